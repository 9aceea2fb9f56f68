"""What a draft buys: the measured speed-up, where it ends, and a model of it in three costs.

The model: a step of the verifier costs a part that does not depend on how many tokens are in it (its weights are read
once) and a part for each; a pass of the draft costs a fixed share of a step; speculating itself costs something a step. The
costs are fitted at one request at a time. What the model says about more of them is a prediction.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
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

    None when it never does, the smallest one when it is below 1 from the start.
    """
    points = sorted(speed_ups.items())
    if points[0][1] < 1:
        return float(points[0][0])
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
    """The costs from measured loads by (number of speculative tokens, concurrency).

    The verifier's come from all loads without a draft, the draft's and the overhead from those with one at the smallest
    concurrency: the first grows with the number of speculative tokens, the second does not.
    """
    alone = {c: load.step_s for (k, c), load in loads.items() if k == ALONE}
    first = min(alone)
    if len(alone) > 1:
        # relative errors: a step of many requests is long, and must not decide alone
        sizes, seconds = np.array(list(alone), dtype=float), np.array(list(alone.values()))
        columns = np.stack([1 / seconds, sizes / seconds], axis=1)
        per_token, whole = np.linalg.lstsq(columns, np.ones(len(sizes)), rcond=None)[0][::-1]
        per_token = max(0.0, float(per_token))
    else:
        per_token, whole = 0.0, alone[first]
    base = Model(float(whole), per_token, 0.0, 0.0)
    ks = sorted(k for k, c in loads if k != ALONE and c == first)
    rest = np.array([loads[k, first].step_s - base.verify_s(first * (k + 1)) for k in ks])
    if len(ks) > 1:
        each, once = np.polyfit(ks, rest, 1)
        if once < 0 or each < 0:  # noise: one of the two cannot be told from nothing
            each, once = float(np.dot(ks, rest) / np.dot(ks, ks)), 0.0
    else:
        each, once = rest[0] / ks[0], 0.0
    return Model(base.verifier_step_s, per_token, max(0.0, float(each)), max(0.0, float(once)))
