"""The bootstrap over prompts: it holds the truth as often as it says, and knows that prompts differ more than tokens."""

from __future__ import annotations

import numpy as np
from eaglebook.intervals import of_sums


def ratio(a, b):
    return a / b


def test_the_value_is_the_ratio_of_sums() -> None:
    assert of_sums([(1, 2), (5, 2)], ratio).value == 1.5


def test_equal_prompts_leave_no_doubt() -> None:
    estimate = of_sums([(3, 2)] * 20, ratio)
    assert estimate.low == estimate.value == estimate.high == 1.5


def test_the_interval_holds_the_truth_about_as_often_as_it_says() -> None:
    draw = np.random.default_rng(1)
    held = 0
    for trial in range(200):
        lengths = draw.integers(5, 60, 40)
        hits = draw.binomial(lengths, draw.beta(4, 6, 40))  # each prompt has a rate of its own
        estimate = of_sums(np.stack([hits, lengths], 1), ratio, seed=trial)
        held += estimate.low <= 0.4 <= estimate.high
    assert 0.87 <= held / 200 <= 0.99


def test_a_set_without_any_draft_gives_no_number() -> None:
    assert np.isnan(of_sums([(0, 0)] * 3, ratio).value)


def test_one_prompt_tells_nothing_about_others() -> None:
    estimate = of_sums([(3, 2)], ratio)
    assert str(estimate) == "1.50"
