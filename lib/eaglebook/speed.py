"""What a draft buys: the measured speed-up, where it ends, and a model of it in three costs.

The model: a step of the verifier costs a part that does not depend on how many tokens are in it (its weights are read
once) and a part for each; a pass of the draft costs a fixed share of a step; speculating itself costs something a step. The
verifier's costs come from its steps without a draft, the draft's from steps with one at the smallest concurrency. What the model
says about steps with a draft at other concurrencies is a prediction; acceptance is always the measured one.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from eaglebook.engine.load import ALONE, Load
from eaglebook.intervals import Estimate, of_sums


def speed_up(alone: Load, drafted: Load) -> Estimate:
    """Seconds per token of the requests, alone over with the draft, paired by prompt, with the interval over prompts."""
    rows = [
        (a.seconds, len(a.token_ids), d.seconds, len(d.token_ids))
        for a, d in zip(alone.answers, drafted.answers, strict=True)
    ]
    return of_sums(rows, lambda alone_s, alone_n, drafted_s, drafted_n: (alone_s / alone_n) / (drafted_s / drafted_n))


def break_even(speed_ups: Mapping[int, float]) -> float | None:
    """The concurrency at which the speed-up falls to 1, between the two that were measured (by its logarithm).

    None when it never does, 0 when it is below 1 from the start.
    """
    points = sorted(speed_ups.items())
    if points[0][1] < 1:
        return 0.0
    for (c0, s0), (c1, s1) in itertools.pairwise(points):
        if s0 >= 1 > s1:
            return float(c0 * (c1 / c0) ** ((s0 - 1) / (s0 - s1)))
    return None


@dataclass(frozen=True)
class Model:
    """Seconds: of a verifier's step with no token in it, for each token in it, of a draft's pass, and of speculating."""

    verifier_step_s: float
    verifier_token_s: float
    draft_pass_s: float
    overhead_s: float

    def verify_s(self, tokens: float) -> float:
        """A verifier's step over ``tokens`` tokens, of one request or of several."""
        return self.verifier_step_s + self.verifier_token_s * tokens

    def step_s(self, k: int, concurrency: int) -> float:
        """A step with ``k`` draft tokens for each of ``concurrency`` requests; they slow the draft as they slow the verifier."""
        slower = self.verify_s(concurrency) / self.verify_s(1)
        return self.verify_s(concurrency * (k + 1)) + k * self.draft_pass_s * slower + self.overhead_s

    def speed_up(
        self, k: int, concurrency: int, acceptance_length: float, new_tokens: float, first_token_s: float
    ) -> float:
        """Seconds of an answer of ``new_tokens`` alone over those with the draft; both wait as long for the first token."""
        alone = first_token_s + (new_tokens - 1) * self.verify_s(concurrency)
        drafted = first_token_s + (new_tokens - 1) / acceptance_length * self.step_s(k, concurrency)
        return alone / drafted


def fit(loads: Mapping[tuple[int, int], Load]) -> Model:
    """The costs from measured loads by (number of speculative tokens, concurrency); none of them below 0.

    A cost that grows with the number of speculative tokens is the draft's, one that does not is the overhead.
    """
    alone = {c: load.step_s for (k, c), load in loads.items() if k == ALONE}
    first = min(alone)
    whole, per_token = _line(list(alone), list(alone.values()))
    verifier = Model(whole, per_token, 0.0, 0.0)
    ks = sorted(k for k, c in loads if k != ALONE and c == first)
    rest = [loads[k, first].step_s - verifier.verify_s(first * (k + 1)) for k in ks]
    once, each = _line(ks, rest) if len(ks) > 1 else (0.0, max(0.0, rest[0] / ks[0]))
    return Model(whole, per_token, each / (verifier.verify_s(first) / verifier.verify_s(1)), once)


def _line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """``y = a + b·x`` with neither below 0, by least squares of the relative errors: long steps must not decide alone.

    Noise can make one of the two negative; then it cannot be told from nothing, and the other explains all there is.
    """
    at, values = np.array(x, dtype=float), np.array(y, dtype=float)
    weight = 1 / np.maximum(np.abs(values), 1e-9)
    if len(at) == 1:
        return max(0.0, float(values[0])), 0.0
    a, b = np.linalg.lstsq(np.stack([weight, at * weight], axis=1), values * weight, rcond=None)[0]
    if b < 0:
        a, b = np.average(values, weights=weight**2), 0.0
    elif a < 0:
        a, b = 0.0, float(np.sum(values * at * weight**2) / np.sum(at**2 * weight**2))
    return max(0.0, float(a)), max(0.0, float(b))
