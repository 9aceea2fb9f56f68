"""Are two greedy answers the same, and if not, was it a tie?

bf16 keeps eight bits of a number. Two logits closer than a few steps of that grid cannot be told apart reliably:
another batch size, or several tokens verified at once, may order them the other way. Such a difference is a near-tie;
any other is an error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_TIE_STEPS = 4  # bf16 steps that a forward pass of different batching was seen to move a logit


@dataclass(frozen=True)
class Difference:
    """Where two answers to ``prompt`` first part. Logits are the verifier's own, given the common prefix."""

    prompt: int
    position: int
    token_a: int
    token_b: int
    logit_a: float
    logit_b: float

    @property
    def step(self) -> float:
        """The distance between neighbouring bf16 numbers at this size."""
        return 2.0 ** (math.floor(math.log2(max(abs(self.logit_a), 1e-9))) - 7)

    @property
    def is_tie(self) -> bool:
        return abs(self.logit_a - self.logit_b) <= _TIE_STEPS * self.step


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """The first index at which two token sequences differ, or None. A sequence that merely ends earlier differs there."""
    for position, (left, right) in enumerate(zip(a, b, strict=False)):
        if left != right:
            return position
    return None if len(a) == len(b) else min(len(a), len(b))


def compare(
    model: Any, prompts: Sequence[Sequence[int]], a: Sequence[Sequence[int]], b: Sequence[Sequence[int]]
) -> list[Difference]:
    """Differences between answers ``a`` and ``b`` to the same prompts, with the verifier's logits of both tokens.

    ``model`` is the verifier as a transformers model; it runs once per differing answer.
    """
    import torch

    found = []
    for number, (prompt, left, right) in enumerate(zip(prompts, a, b, strict=True)):
        position = first_difference(left, right)
        if position is None:
            continue
        prefix = torch.tensor([[*prompt, *left[:position]]], device=next(model.parameters()).device)
        with torch.inference_mode():
            logits = model(prefix).logits[0, -1].float()
        token_a, token_b = ((s[position] if position < len(s) else -1) for s in (left, right))
        value = [logits[t].item() if t >= 0 else -math.inf for t in (token_a, token_b)]
        found.append(Difference(number, position, token_a, token_b, *value))
    return found
