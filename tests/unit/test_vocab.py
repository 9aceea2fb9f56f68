"""Vocabulary mapping: speculators' own rule, validated, and its cost."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from eaglebook import paths, vocab
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


@given(
    st.dictionaries(st.integers(0, 299), st.integers(1, 50), min_size=1, max_size=200),
    st.integers(30, 300),
    st.sets(st.integers(0, 299), max_size=30),
)
def test_reserved_tokens_have_a_place_and_the_rest_is_the_librarys_choice(counts, size, always) -> None:
    d2t, t2d = vocab.build(Counter(counts), size, 300, always)
    assert not vocab.problems(d2t, t2d)
    assert all(t2d[token] for token in always)
    plain = np.flatnonzero(vocab.build(Counter(counts), size, 300)[1])
    if always <= set(plain.tolist()):
        assert np.array_equal(np.flatnonzero(t2d), plain)
    least = min((counts.get(int(t), 0) for t in np.flatnonzero(t2d) if t not in always), default=0)
    assert all(n <= least for token, n in counts.items() if not t2d[token])  # nothing more frequent was left out


@given(
    st.dictionaries(st.integers(0, 299), st.integers(1, 50), min_size=2, max_size=200),
    st.floats(0.01, 0.99),
    st.sets(st.integers(0, 299), max_size=10),
)
def test_the_size_for_a_coverage_is_the_smallest(counts, share, always) -> None:
    counts = Counter(counts)
    size = vocab.size_for_coverage(counts, share, always)
    assert vocab.coverage(counts, vocab.build(counts, size, 300, always)[1]) >= share - 1e-9
    if size > max(1, len(always)):
        assert vocab.coverage(counts, vocab.build(counts, size - 1, 300, always)[1]) < share


def test_more_to_reserve_than_there_is_room_is_refused() -> None:
    with pytest.raises(UserError, match="do not fit"):
        vocab.build(Counter({1: 2}), 3, 300, range(4))


def test_special_and_listed_tokens_are_found(tiny_verifier, tmp_path) -> None:
    from transformers import AutoTokenizer

    (tmp_path / "mine.json").write_text("[5, 7]")
    tokenizer = AutoTokenizer.from_pretrained(tiny_verifier)
    assert vocab.reserved(["special"], tiny_verifier, tokenizer) >= set(tokenizer.all_special_ids)
    assert vocab.reserved([f"file:{tmp_path / 'mine.json'}"], tiny_verifier, tokenizer) == {5, 7}
    (tmp_path / "mine.json").write_text('{"5": 1}')
    with pytest.raises(UserError, match="list of token"):
        vocab.reserved([f"file:{tmp_path / 'mine.json'}"], tiny_verifier, tokenizer)
    with pytest.raises(UserError, match="not known"):
        vocab.reserved(["everything"], tiny_verifier, tokenizer)


def test_tool_tokens_are_what_a_call_adds() -> None:
    class Tokenizer:
        def apply_chat_template(self, messages, tools=None, return_dict=False):
            return [1, 2, 3] + ([9, 8] if tools else [])

    assert vocab.reserved(["tools"], paths.ROOT, Tokenizer()) == {8, 9}


def test_counts_of_another_tokenizer_are_not_added(tmp_path) -> None:
    vocab.save_counts(tmp_path, Counter({3: 2, 5: 1}), "a" * 64, "b" * 64)
    assert vocab.load_counts(tmp_path, "a" * 64) == Counter({3: 2, 5: 1})
    with pytest.raises(UserError, match="cannot be added"):
        vocab.load_counts(tmp_path, "c" * 64)
    (tmp_path / "counts_source.json").unlink()
    with pytest.raises(UserError, match="no counts_source"):
        vocab.load_counts(tmp_path, "a" * 64)


def test_a_larger_vocabulary_covers_more_and_costs_more() -> None:
    held_out = [conversation([1], [token % 250 for token in range(start, start + 60)]) for start in (0, 50, 120)]
    counts = Counter({token: 300 - token for token in range(200)})
    judged = vocab.sizes(
        (50, 100, 200, 300), counts, held_out, 300, num_speculative_tokens=3, hidden_size=8, verifier_bytes=100_000,
        layer_bytes=2_000,
    )  # fmt: skip
    assert [s.coverage for s in judged] == sorted(s.coverage for s in judged)
    assert [s.head_bytes for s in judged] == [2 * 8 * n for n in (50, 100, 200, 300)]
    assert judged[-1].ceiling == 4.0
    assert judged[-1].relative_speed == pytest.approx(4 * 100_000 / (100_000 + 3 * (2_000 + 4_800)))
