"""What a draft would have accepted on known answers, offline, and the definitions behind every acceptance number.

mean acceptance length = 1 + accepted / drafts, the verifier's own token included, from 1 to K + 1;
position rate i = drafts whose first i tokens were all accepted / drafts. `docs/metrics.md` says it in words.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eaglebook import transformers_folder

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Acceptance:
    """Counts of draft-and-verify: ``accepted[i]`` drafts had their first i + 1 tokens accepted."""

    drafts: int
    accepted: tuple[int, ...]

    @property
    def position_rates(self) -> list[float]:
        return [n / self.drafts if self.drafts else 0.0 for n in self.accepted]

    @property
    def mean_acceptance_length(self) -> float:
        return 1 + sum(self.accepted) / self.drafts if self.drafts else 1.0

    def __add__(self, other: Acceptance) -> Acceptance:
        return Acceptance(
            self.drafts + other.drafts,
            tuple(a + b for a, b in zip(self.accepted, other.accepted, strict=True)),
        )

    def summary(self) -> dict[str, Any]:
        return {
            "mean_acceptance_length": self.mean_acceptance_length,
            "position_rates": self.position_rates,
            "drafts": self.drafts,
        }


def none(positions: int) -> Acceptance:
    return Acceptance(0, (0,) * positions)


def of_steps(steps: Sequence[int], positions: int) -> Acceptance:
    """Counts from the number of accepted tokens of each draft in turn."""
    return Acceptance(len(steps), tuple(sum(accepted > i for accepted in steps) for i in range(positions)))


def accepted_tokens(steps: Sequence[int], count: int) -> list[bool]:
    """Which of an answer's ``count`` tokens a draft had guessed; the first, and one after each draft, are the verifier's own."""
    marks = [False]
    for accepted in steps:
        marks += [True] * accepted + [False]
    return (marks + [False] * count)[:count]


def every_position(correct: Sequence[Sequence[bool]]) -> Acceptance:
    """A draft started at every token. ``correct[t][k]``: token k of the draft started at t is the right one."""
    if not correct:
        return none(0)
    return of_steps([_run(row) for row in correct], len(correct[0]))


def as_served(correct: Sequence[Sequence[bool]]) -> Acceptance:
    """A draft started only where serving starts one: after the last accepted token and the verifier's own."""
    return of_steps(steps_as_served(correct), len(correct[0])) if correct else none(0)


def steps_as_served(correct: Sequence[Sequence[bool]]) -> list[int]:
    """Tokens accepted of each draft in turn, started where serving starts them."""
    runs: list[int] = []
    at = 0
    while at < len(correct):
        runs.append(_run(correct[at]))
        at += runs[-1] + 1
    return runs


def _run(row: Sequence[bool]) -> int:
    return next((k for k, right in enumerate(row) if not right), len(row))


def load_draft(checkpoint: Path, verifier: Path) -> Any:
    """A speculators checkpoint as an ``Eagle3DraftModel`` in fp32 with an attention that runs anywhere."""
    from loguru import logger
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

    logger.disable("speculators")  # it warns of every file it tries in turn
    config = Eagle3SpeculatorConfig.from_pretrained(checkpoint)
    config.transformer_layer_config._attn_implementation = "sdpa"  # never serialised; the default needs a GPU
    config.speculators_config.verifier.name_or_path = str(transformers_folder.of(verifier))
    return Eagle3DraftModel.from_pretrained(checkpoint, config=config).float().eval()


def correct_tokens(
    draft: Any,
    hidden_states: torch.Tensor,
    input_ids: Sequence[int],
    loss_mask: Sequence[int],
    positions: int,
) -> list[list[bool]]:
    """For each draft started in an answer, which of its tokens equal the verifier's. ``[starts, positions]``.

    Teacher-forced: step k is fed the answer's own tokens. As long as all earlier guesses are right that is what
    serving feeds too, so runs of right guesses are exact. A token outside the draft vocabulary is a miss, and so is one
    past the end. ``hidden_states [tokens, n_aux + 1, hidden]`` as stored by 02.
    """
    import torch

    ids = torch.tensor(input_ids, device=draft.fc.weight.device)
    count = len(ids)
    features = hidden_states[:-1, :-1].flatten(1)[None].to(ids.device, torch.float32)
    # flex attention (GPU) extends its mask by whole blocks of 128 (speculators 0.9, models/eagle3/attention.py)
    padding = -(count - 1) % 128 if getattr(draft, "_attn_impl", "") == "simple_flex_attention" else 0
    pad = torch.nn.functional.pad
    with torch.no_grad():  # not inference_mode: a training goes on behind it
        guesses = draft(
            pad(features, (0, 0, 0, padding)),
            pad(ids[None, 1:], (0, padding)),
            pad(torch.zeros(1, count - 1, dtype=torch.long, device=ids.device), (0, padding), value=-1),
            position_ids=torch.arange(1, count + padding, device=ids.device)[None],
            ttt_steps=positions,
        )
    d2t = draft.d2t if getattr(draft, "d2t", None) is not None else None
    right = torch.zeros(count - 1, positions, dtype=torch.bool, device=ids.device)
    for k, guess in enumerate(out[:, : count - 1] for out in guesses):
        tokens = guess[0] if d2t is None else guess[0] + d2t[guess[0]]
        known = count - 2 - k  # row t of step k guesses token t + 2 + k
        if known > 0:
            right[:known, k] = tokens[:known] == ids[2 + k :]
    return right[_starts(loss_mask).to(ids.device)].tolist()


def _starts(loss_mask: Sequence[int]) -> torch.Tensor:
    """Where a draft is started: after every generated token but the last. Row t stands for token t + 1."""
    import torch

    started = torch.tensor(loss_mask[1:], dtype=torch.bool)
    started[-1] = False
    return started


def expected_when_sampling(
    draft: Any,
    head: torch.Tensor,
    samples: Iterable[tuple[torch.Tensor, Sequence[int], Sequence[int]]],
    positions: int,
) -> list[float]:
    """Position rates at temperature 1: the chance that the first i + 1 tokens are all accepted, mean over all starts.

    A sampled token is accepted with probability sum(min(p, q)) (Leviathan et al. 2023, lossless verification): p over all of
    the verifier's vocabulary, q of the draft, 0 outside its own. Teacher-forced on the answers' tokens. ``head
    [vocabulary, hidden]``: the verifier's. The norm before it is the draft's copy.
    """
    import torch

    logits: list[torch.Tensor] = []
    hook = draft.lm_head.register_forward_hook(lambda module, args, out: logits.append(out[0].float()))
    total, starts = torch.zeros(positions), 0
    says = torch.arange(len(head)) if draft.d2t is None else torch.arange(len(draft.d2t)) + draft.d2t.cpu()
    says, head = says.to(draft.fc.weight.device), head.to(draft.fc.weight.device)
    try:
        for hidden_states, input_ids, loss_mask in samples:
            logits.clear()
            correct_tokens(draft, hidden_states, input_ids, loss_mask, positions)  # fills ``logits``, one a step
            started = _starts(loss_mask).to(head.device)
            with torch.no_grad():
                last = draft.verifier_norm(hidden_states[:, -1].to(head.device, torch.float32)).to(head.dtype)
                p = torch.cat([(part @ head.T).float().softmax(-1)[:, says] for part in last.split(256)])
                chance = torch.ones(len(started), device=head.device)
                for step, guessed in enumerate(out[: len(started)] for out in logits):
                    known = max(0, len(started) - 1 - step)  # row t of a step guesses token t + 2 + step
                    overlap = torch.zeros_like(chance)
                    q = guessed[:known].softmax(-1)
                    overlap[:known] = torch.minimum(p[step + 1 : step + 1 + known], q).sum(-1)
                    chance = chance * overlap
                    total[step] += chance[started].sum().cpu()
            starts += int(started.sum())
    finally:
        hook.remove()
    return (total / max(1, starts)).tolist()


def evaluate(
    draft: Any, samples: Iterable[tuple[torch.Tensor, Sequence[int], Sequence[int]]], positions: int
) -> dict[str, Acceptance]:
    """Teacher-forced acceptance over ``(hidden_states, input_ids, loss_mask)`` samples, by both ways of starting drafts."""
    total = {"every_position": none(positions), "as_served": none(positions)}
    for hidden_states, input_ids, loss_mask in samples:
        correct = correct_tokens(draft, hidden_states, input_ids, loss_mask, positions)
        if correct:
            total["every_position"] += every_position(correct)
            total["as_served"] += as_served(correct)
    return total
