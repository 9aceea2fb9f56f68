"""Which verifier tokens the draft may say, and what leaving the others out costs.

``d2t`` (int64 ``[draft_vocab]``) holds offsets: target id = draft id + d2t[draft id]. ``t2d`` (bool
``[verifier_vocab]``) is a mask of the tokens kept. The selection is speculators' own: the most frequent supervised
tokens, ties to the lower id.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from eaglebook.errors import UserError
from eaglebook.responses import Conversation


def count(conversations: Iterable[Conversation]) -> Counter[int]:
    """How often each token occurs in the supervised parts (the answers; never the prompts)."""
    return Counter(itertools.chain.from_iterable(c.response_ids for c in conversations))


def build(counts: Counter[int], draft_vocab_size: int, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """``(d2t, t2d)`` by ``speculators.train.vocab_mapping``. Raises UserError when the draft's is the larger one."""
    if draft_vocab_size > vocab_size:
        raise UserError(
            "draft_vocab_size is larger than the verifier's vocabulary",
            expected=f"at most {vocab_size}",
            found=str(draft_vocab_size),
            fix="lower draft_vocab_size in the params file",
        )
    from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution

    d2t, t2d = build_vocab_mappings_from_distribution(dict(counts), draft_vocab_size, vocab_size)
    return d2t.numpy(), t2d.numpy()


def target_ids(d2t: np.ndarray) -> np.ndarray:
    """The verifier id of every draft id."""
    return np.arange(len(d2t)) + d2t


def problems(d2t: np.ndarray, t2d: np.ndarray) -> list[str]:
    """What is wrong with a mapping; empty when it is sorted, unique, in range and its two halves agree."""
    ids, found = target_ids(d2t), []
    if ids.min() < 0 or ids.max() >= len(t2d):
        found.append(f"target ids outside 0..{len(t2d) - 1}")
    if (np.diff(ids) <= 0).any():
        found.append("target ids are not strictly ascending")
    if not np.array_equal(np.flatnonzero(t2d), np.unique(ids)):
        found.append("t2d does not mark the ids that d2t reaches")
    return found


def coverage(counts: Counter[int], kept: np.ndarray) -> float:
    """Share of token occurrences that a vocabulary covers. ``kept`` is a t2d mask."""
    total = sum(counts.values())
    return sum(n for token, n in counts.items() if kept[token]) / total if total else 0.0


def coverage_by_size(train: Counter[int], other: Counter[int], sizes: Sequence[int], vocab_size: int) -> list[float]:
    """Coverage of ``other`` by the ``size`` most frequent tokens of ``train``, for each size."""
    ranked = sorted(train, key=lambda token: (-train[token], token))
    result = []
    for size in sizes:
        kept = np.zeros(vocab_size, dtype=bool)
        kept[ranked[:size]] = True
        result.append(coverage(other, kept))
    return result


def ceiling(conversations: Iterable[Conversation], t2d: np.ndarray, num_speculative_tokens: int) -> float:
    """The largest mean acceptance length a draft of this vocabulary can reach on these answers.

    A perfect draft guesses every token it can say: each step accepts the run of sayable tokens, at most
    ``num_speculative_tokens`` of them, and the verifier adds one.
    """
    steps = accepted = 0
    for conversation in conversations:
        sayable = [bool(t2d[token]) for token in conversation.response_ids[1:]]  # the first comes from the prompt
        at = 0
        while at < len(sayable):
            run = sum(1 for _ in itertools.takewhile(bool, sayable[at : at + num_speculative_tokens]))
            steps, accepted, at = steps + 1, accepted + run, at + run + 1
    return 1 + accepted / steps if steps else 1.0


def save(folder: Path, d2t: np.ndarray, t2d: np.ndarray) -> None:
    """``d2t.npy`` and ``t2d.npy``, the names and form speculators' ``d2t_path`` and ``t2d_path`` take."""
    np.save(folder / "d2t.npy", d2t)
    np.save(folder / "t2d.npy", t2d)


def load(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    return np.load(folder / "d2t.npy", allow_pickle=False), np.load(folder / "t2d.npy", allow_pickle=False)
