"""Training against serving, draft by draft: who is suspected when the three opinions differ."""

from __future__ import annotations

import pytest
from eaglebook.acceptance import accepted_tokens, of_steps
from eaglebook.train_serve import INTO_THE_FILE, LIMIT, OUT_OF_THE_FILE, Comparison, inside
from hypothesis import given
from hypothesis import strategies as st

HIGH, LOW = of_steps([3, 1, 2, 0] * 500, 3), of_steps([1, 0, 0, 0] * 500, 3)
steps = st.lists(st.integers(0, 3), max_size=30)


@pytest.mark.parametrize(
    ("forced", "own", "served", "suspects"),
    [
        (HIGH, HIGH, HIGH, ()),
        (HIGH, LOW, LOW, INTO_THE_FILE),
        (HIGH, HIGH, LOW, OUT_OF_THE_FILE),
        (HIGH, None, LOW, INTO_THE_FILE + OUT_OF_THE_FILE),
        (LOW, LOW, HIGH, OUT_OF_THE_FILE),  # more than promised is as suspicious
    ],
)
def test_a_gap_points_at_one_side_of_the_file(forced, own, served, suspects) -> None:
    comparison = Comparison(forced, own, served)
    assert comparison.suspects == suspects
    assert (abs(comparison.largest) > comparison.limit) == bool(suspects)


def test_without_a_reference_nobody_is_accused() -> None:
    told = Comparison(HIGH, None, LOW)
    assert told.into_the_file is None and told.out_of_the_file is None
    assert told.largest == pytest.approx(-0.5)


def test_few_drafts_have_a_wider_limit() -> None:
    few = of_steps([1] * 9 + [0], 3)
    assert Comparison(few, few, few).limit > 0.3
    many = of_steps([1] * 4000, 3)
    assert Comparison(many, many, many).limit == LIMIT


def test_a_gap_at_any_position_counts() -> None:
    a, b = of_steps([1] * 2000, 3), of_steps([1] * 1900 + [2] * 100, 3)
    assert Comparison(a, a, b).largest == pytest.approx(0.05)
    assert Comparison(a, a, b).suspects == OUT_OF_THE_FILE


@given(steps, st.integers(0, 60), st.integers(1, 3))
def test_only_drafts_inside_the_answer_are_compared(taken, tokens, positions) -> None:
    kept = inside(taken, tokens, positions)
    assert kept == taken[: len(kept)]
    begin = sum(a + 1 for a in kept[:-1])
    if kept:
        assert begin + positions < tokens
    if len(kept) < len(taken):
        assert sum(a + 1 for a in kept) + positions >= tokens


@given(steps)
def test_the_coloured_tokens_are_the_accepted_ones(taken) -> None:
    count = 1 + sum(a + 1 for a in taken)
    marks = accepted_tokens(taken, count)
    assert (len(marks), sum(marks)) == (count, sum(taken))
    assert not marks[0]
    assert accepted_tokens(taken, max(0, count - 2)) == marks[: max(0, count - 2)]  # the end of an answer cuts a draft
