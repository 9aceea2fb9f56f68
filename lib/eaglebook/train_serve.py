"""Does serving keep what training promised? Three opinions on the same answers, draft by draft, and who is to be suspected.

*Teacher-forced*: speculators' own model from the trained checkpoint. *Autoregressive*: plain torch from the exported file
(`reference`). *Served*: what vLLM recorded. The first two read the verifier's states from transformers. A gap between the
first and the second lies on the way into the file, between the second and the third on the way out of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from eaglebook import acceptance, hidden_states, reference
from eaglebook.acceptance import Acceptance, none, of_steps

if TYPE_CHECKING:
    import torch

LIMIT = 0.03  # of a position's rate: answers and drafts are the same, so only rounding may differ

INTO_THE_FILE = (
    "another checkpoint was exported than the one that was trained last",
    "a norm flag that was not carried over (its default differs between the formats)",
    "rope or rms_norm_eps left to a reader's default",
    "aux ids moved by one, or in another order than fc was trained for",
    "d2t lost, renamed, or absolute instead of offsets",
)
OUT_OF_THE_FILE = (
    "the server's vLLM does not know a flag of this draft (the table by versions in 06)",
    "aux ids read from another place of the config, or not at all",
    "max_position_embeddings below the served length",
    "another verifier than the draft was trained for, or the same one in another precision",
    "a sampling parameter that is not greedy (temperature, a penalty in generation_config.json)",
    "a tensor vLLM dropped, cut or left empty (rung 3 of 06 names it)",
)


@dataclass(frozen=True)
class Comparison:
    """The drafts that all three can judge: none of them reaches past its answer's end."""

    teacher_forced: Acceptance
    autoregressive: Acceptance | None  # None for a draft the plain reference does not cover
    served: Acceptance

    @property
    def limit(self) -> float:
        """`LIMIT`, or what one differing draft in each answer could do by chance where there are few drafts."""
        return max(LIMIT, (self.served.drafts or 1) ** -0.5)

    @property
    def into_the_file(self) -> float | None:
        """Largest gap of a position's rate between the trained checkpoint and the exported file."""
        return _gap(self.autoregressive, self.teacher_forced) if self.autoregressive else None

    @property
    def out_of_the_file(self) -> float | None:
        """Largest gap of a position's rate between the exported file and the server."""
        return _gap(self.served, self.autoregressive) if self.autoregressive else None

    @property
    def largest(self) -> float:
        """The largest gap between any two, signed; where there is no reference, the one between training and serving."""
        return max(
            self.into_the_file or 0.0, self.out_of_the_file or 0.0, _gap(self.served, self.teacher_forced), key=abs
        )

    @property
    def suspects(self) -> tuple[str, ...]:
        """Where to look, the likely side first; nothing when no gap is over the limit."""
        if abs(self.largest) <= self.limit:
            return ()
        into, out = (abs(gap or 0.0) > self.limit for gap in (self.into_the_file, self.out_of_the_file))
        if into == out:  # both, or nobody could tell
            return INTO_THE_FILE + OUT_OF_THE_FILE
        return INTO_THE_FILE if into else OUT_OF_THE_FILE


def compare(
    model: Any,
    trained: Any,
    exported: reference.Draft | None,
    answers: Sequence[tuple[Sequence[int], Sequence[int], Sequence[int]]],
    positions: int,
    *,
    token_budget: int = 1024,
) -> Comparison:
    """All three on ``answers``: (prompt ids, answer ids, tokens accepted of each served draft), given greedily.

    ``model`` is the verifier in transformers, ``trained`` as `acceptance.load_draft` gives it, ``exported`` as
    `reference.load` does.
    """
    trained_ids = list(trained.config.eagle_aux_hidden_state_layer_ids)
    layers = model.config.get_text_config().num_hidden_layers
    exported_ids = exported.aux_ids(layers) if exported else trained_ids
    wanted = sorted({i for i in (*trained_ids, *exported_ids) if i < layers})
    total = Comparison(none(positions), none(positions) if exported else None, none(positions))
    sequences = [[*prompt, *answer] for prompt, answer, _ in answers]
    for rows in hidden_states.batches([len(s) for s in sequences], token_budget):
        captured = hidden_states.capture(model, [sequences[row] for row in rows], wanted)
        for row, states in zip(rows, captured, strict=True):
            ids, prompt, served = sequences[row], len(answers[row][0]), answers[row][2]
            mask = [0] * prompt + [1] * (len(ids) - prompt)
            right = acceptance.correct_tokens(trained, _pick(states, wanted, trained_ids), ids, mask, positions)
            forced = inside(acceptance.steps_as_served(right), len(ids) - prompt, positions)
            own = exported and reference.walk(
                exported, _pick(states, wanted, exported_ids)[:, :-1], ids, prompt, positions
            )
            total = replace(
                total,
                teacher_forced=total.teacher_forced + of_steps(forced, positions),
                autoregressive=total.autoregressive and total.autoregressive + of_steps(own or (), positions),
                served=total.served + of_steps(inside(served, len(ids) - prompt, positions), positions),
            )
    return total


def inside(steps: Sequence[int], answer_tokens: int, positions: int) -> list[int]:
    """Those drafts in turn whose every token lies inside the answer: further on nobody knows what is right."""
    kept, at = [], 0
    for accepted in steps:
        if at + positions >= answer_tokens:
            break
        kept.append(accepted)
        at += accepted + 1
    return kept


def _pick(states: torch.Tensor, wanted: list[int], ids: list[int]) -> torch.Tensor:
    """The slots of ``ids`` in their order, and the last one; an id that is the number of layers is the last slot."""
    slots = [wanted.index(i) if i in wanted else states.shape[1] - 1 for i in ids]
    return states[:, [*slots, states.shape[1] - 1]]


def _gap(a: Acceptance, b: Acceptance) -> float:
    """The signed difference of two rates where it is largest."""
    return max((x - y for x, y in zip(a.position_rates, b.position_rates, strict=True)), key=abs)
