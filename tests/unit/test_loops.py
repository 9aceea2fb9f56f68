"""Loops are found by their period, and ordinary answers are left alone."""

from __future__ import annotations

import pytest
from eaglebook import loops
from hypothesis import given
from hypothesis import strategies as st


@pytest.mark.parametrize(
    ("answer", "period"),
    [
        ([5] * 20, 1),
        ([1, 2, 3] * 8, 3),
        ([9, 8, 7, 6] + [1, 2] * 10, 2),
        (list(range(40)) + [1, 2] * 10, 0),  # the loop is less than half
        ([1, 2, 3, 4, 5, 6] * 3, 0),  # three times is a refrain
        (list(range(60)), 0),
        ([], 0),
        ([7], 0),
        ([7, 7, 7], 0),
    ],
)
def test_the_period_of_an_answer(answer: list[int], period: int) -> None:
    assert loops.period(answer) == period


@given(
    start=st.lists(st.integers(0, 9), max_size=8),
    loop=st.lists(st.integers(0, 99), min_size=1, max_size=8),
    times=st.integers(8, 20),
)
def test_whatever_is_said_again_and_again_is_a_loop(start: list[int], loop: list[int], times: int) -> None:
    found = loops.period(start + loop * times)
    assert found and len(loop) % found == 0


def test_the_share_of_answers() -> None:
    assert loops.share([[1] * 20, list(range(20)), [1, 2] * 10, list(range(30))]) == 0.5
    assert loops.share([]) == 0
