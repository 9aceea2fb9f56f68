"""Vocabulary mapping: speculators' own rule, validated, and its cost."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from eaglebook import vocab
from eaglebook.errors import UserError
from eaglebook.responses import TRAIN, Conversation
from hypothesis import given, settings
from hypothesis import strategies as st

counts = st.dictionaries(st.integers(0, 99), st.integers(1, 50), max_size=100).map(Counter)


def conversation(prompt: list[int], answer: list[int]) -> Conversation:
    return Conversation("a", "all", TRAIN, prompt + answer, [0] * len(prompt) + [1] * len(answer), "stop")


def test_only_the_answers_count() -> None:
    assert vocab.count([conversation([1, 1, 1], [2, 3, 2])]) == {2: 2, 3: 1}


@settings(deadline=None)
@given(counts, st.integers(1, 100))
def test_a_built_mapping_is_valid_and_keeps_the_most_frequent(counted: Counter, size: int) -> None:
    d2t, t2d = vocab.build(counted, size, 100)
    assert vocab.problems(d2t, t2d) == []
    assert len(d2t) == size == t2d.sum()
    kept = {token: n for token, n in counted.items() if t2d[token]}
    dropped = {token: n for token, n in counted.items() if not t2d[token]}
    assert not dropped or min(kept.values()) >= max(dropped.values())
    # draft id -> verifier id -> draft id
    ids = vocab.target_ids(d2t)
    assert [int(np.flatnonzero(ids == target)[0]) for target in ids] == list(range(size))


def test_a_draft_vocabulary_larger_than_the_verifiers_is_refused() -> None:
    with pytest.raises(UserError, match="larger"):
        vocab.build(Counter({1: 1}), 101, 100)


def test_problems_sees_each_fault() -> None:
    d2t, t2d = vocab.build(Counter({5: 3, 9: 2, 40: 1}), 3, 50)
    absolute = vocab.target_ids(d2t)
    assert vocab.problems(absolute, t2d)  # ids stored where offsets belong
    assert any("outside" in p for p in vocab.problems(d2t + 45, t2d))
    assert any("ascending" in p for p in vocab.problems(d2t[::-1].copy(), t2d))
    assert any("t2d" in p for p in vocab.problems(d2t, ~t2d))


def test_coverage_and_its_curve() -> None:
    train, other = Counter({1: 5, 2: 3, 3: 1}), Counter({1: 1, 2: 1, 9: 2})
    assert vocab.coverage_by_size(train, train, [1, 2, 3], 10) == [5 / 9, 8 / 9, 1.0]
    assert vocab.coverage_by_size(train, other, [1, 3], 10) == [0.25, 0.5]
    assert vocab.coverage(Counter(), np.ones(3, dtype=bool)) == 0.0


def test_the_ceiling_walks_as_serving_does() -> None:
    kept = np.zeros(10, dtype=bool)
    kept[[1, 2, 3]] = True
    # guessed: 2 3 (1 is the verifier's) 2 | 9 is no draft token | 1
    answer = conversation([0], [1, 2, 3, 2, 9, 1])
    # steps: run 2,3,2 then the verifier says 9; then run 1
    assert vocab.ceiling([answer], kept, 3) == 1 + (3 + 1) / 2
    assert vocab.ceiling([answer], np.zeros(10, dtype=bool), 3) == 1.0
    assert vocab.ceiling([conversation([0], [1] * 9)], kept, 3) == 4.0


def test_files_read_back_equal(tmp_path) -> None:
    d2t, t2d = vocab.build(Counter({5: 3, 9: 2}), 2, 50)
    vocab.save(tmp_path, d2t, t2d)
    again = vocab.load(tmp_path)
    assert np.array_equal(again[0], d2t)
    assert np.array_equal(again[1], t2d)
