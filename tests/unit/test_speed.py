"""Speed-up, where it ends, and the model behind the dashed line."""

from __future__ import annotations

import pytest
from eaglebook import speed
from eaglebook.acceptance import none
from eaglebook.engine.client import Completion
from eaglebook.engine.load import ALONE, Load
from hypothesis import given
from hypothesis import strategies as st

TRUE = speed.Model(verifier_step_s=0.020, verifier_token_s=0.002, draft_pass_s=0.003, overhead_s=0.001)


def load(step_s: float, steps: list[list[int]], alone_tokens: int = 0) -> Load:
    """Answers whose every step took ``step_s``; ``steps`` are the accepted tokens of each draft of each answer."""
    answers = []
    for index, accepted in enumerate(steps):
        tokens = alone_tokens or 1 + len(accepted) + sum(accepted)
        count = len(accepted) or tokens - 1
        answers.append(
            Completion(index, [7] * tokens, "length", 0.05 + count * step_s, 0.05, count * step_s, tuple(accepted))
        )
    return Load(tuple(answers), 1.0, none(0))


def modelled_loads(model: speed.Model, sweep: tuple[int, ...] = (1, 2, 4, 8, 16)) -> dict[tuple[int, int], Load]:
    alone = {(ALONE, c): load(model.verify_s(c), [[]] * 3, alone_tokens=50) for c in sweep}
    return alone | {(k, sweep[0]): load(model.step_s(k, sweep[0]), [[1, 0, 1]] * 3) for k in (1, 2, 3, 5)}


def test_times_and_rates_of_a_load() -> None:
    at = load(0.5, [[1, 0], [2]])  # 4 tokens in two steps, 4 in one
    assert (at.step_s, at.token_s, at.first_token_s) == (0.5, 1.5 / 6, 0.05)
    assert at.tokens_per_s == 8.0
    assert at.acceptance_length.value == 2.0
    assert at.recorded(3).accepted == (2, 1, 0)


def test_the_speed_up_is_of_sums() -> None:
    alone, drafted = load(0.02, [[]] * 4, alone_tokens=9), load(0.03, [[1, 1, 1, 1], [3, 3], [3, 3], [3, 3]])
    estimate = speed.speed_up(alone, drafted)
    assert estimate.value == pytest.approx(4 * (0.05 + 8 * 0.02) / (4 * 0.05 + (4 + 2 + 2 + 2) * 0.03))
    assert estimate.low <= estimate.value <= estimate.high


def test_prompts_are_paired_what_is_slow_alone_is_slow_with_the_draft() -> None:
    """Long prompts cost both sides; drawn together they cancel, drawn apart they would not."""

    def waiting(seconds: list[float], tokens: int) -> Load:
        return Load(tuple(Completion(i, [7] * tokens, "length", s) for i, s in enumerate(seconds)), 1.0, none(0))

    waits = [1.0, 2.0, 4.0, 8.0, 1.5, 3.0, 6.0, 12.0]
    paired = speed.speed_up(waiting(waits, 10), waiting([w / 2 for w in waits], 10))
    apart = speed.speed_up(waiting(waits, 10), waiting([w / 2 for w in reversed(waits)], 10))
    assert paired.value == apart.value == 2.0
    assert paired.high - paired.low < 0.01 < apart.high - apart.low


@pytest.mark.parametrize("sweep", [(1, 2, 4, 8, 16), (8, 32), (4, 8)])
def test_the_fit_finds_the_costs_it_was_made_from(sweep) -> None:
    found = speed.fit(modelled_loads(TRUE, sweep))
    for name in ("verifier_step_s", "verifier_token_s", "draft_pass_s", "overhead_s"):
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=1e-6), name


@given(st.lists(st.floats(1e-3, 2.0), min_size=2, max_size=5), st.lists(st.floats(1e-3, 2.0), min_size=1, max_size=4))
def test_no_cost_is_ever_negative_whatever_the_noise(alone_s, drafted_s) -> None:
    loads = {(ALONE, 2**i): load(s, [[]], alone_tokens=9) for i, s in enumerate(alone_s)}
    loads |= {(k, 1): load(s, [[1, 1]]) for k, s in enumerate(drafted_s, 1)}
    found = speed.fit(loads)
    assert min(found.verifier_step_s, found.verifier_token_s, found.draft_pass_s, found.overhead_s) >= 0
    assert found.verify_s(1) > 0


def test_one_k_and_one_concurrency_are_enough_for_a_fit() -> None:
    loads = modelled_loads(TRUE)
    found = speed.fit({key: loads[key] for key in ((ALONE, 1), (3, 1))})
    assert found.step_s(3, 1) == pytest.approx(loads[3, 1].step_s)


def test_the_model_agrees_with_the_loads_it_describes() -> None:
    alone, drafted = load(TRUE.verify_s(1), [[]], alone_tokens=7), load(TRUE.step_s(3, 1), [[1, 1, 1]])
    assert TRUE.speed_up(3, 1, 2.0, 7, 0.05) == pytest.approx(speed.speed_up(alone, drafted).value)


def test_where_it_stops_paying() -> None:
    assert speed.break_even({1: 1.4, 2: 1.2, 4: 1.1, 8: 0.9}) == pytest.approx(4 * 2**0.5)
    assert speed.break_even({1: 1.4, 8: 1.1}) is None
    assert speed.break_even({1: 0.9, 8: 0.8}) == 0.0


@given(st.lists(st.floats(0.2, 4), min_size=1, max_size=6))
def test_the_break_even_lies_between_the_last_gain_and_the_first_loss(values) -> None:
    points = {2**i: v for i, v in enumerate(values)}
    at = speed.break_even(points)
    losses = [c for c, v in points.items() if v < 1]
    if not losses:
        assert at is None
    elif losses[0] == 1:
        assert at == 0.0
    else:
        assert losses[0] / 2 <= at <= losses[0]
