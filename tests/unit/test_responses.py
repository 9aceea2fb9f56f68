"""Conversations: rendered once, split by content, appended safely, gated."""

from __future__ import annotations

import dataclasses

import pytest
from eaglebook import responses, verifier
from eaglebook.errors import UserError
from eaglebook.prompts import Prompt
from hypothesis import given
from hypothesis import strategies as st


@pytest.fixture(scope="module")
def tokenizer(tiny_verifier):
    return verifier.load_tokenizer(verifier.resolve(str(tiny_verifier)))


def prompt(name: str, text: str) -> Prompt:
    return Prompt(name, "all", [{"role": "user", "content": text}])


def encode(prompts, tokenizer, limit=64, seed=0):
    return responses.encode(prompts, tokenizer, max_prompt_tokens=limit, held_out_fraction=0.25, seed=seed)


def test_long_and_repeated_prompts_are_kept_out_and_counted(tokenizer) -> None:
    asked = [prompt("a", "w5 w6"), prompt("b", "W5   w6"), prompt("c", "w7 " * 200), prompt("d", "w8")]
    kept, out = encode(asked, tokenizer)
    assert [e.id for e in kept] == ["a", "d"]
    assert out == {"repeated": 1, "too_long": 1}


def test_what_differs_is_no_repeat(tokenizer) -> None:
    system = [{"role": "system", "content": "w9"}, {"role": "user", "content": "w5"}]
    asked = [prompt("a", "你好"), prompt("b", "谢谢"), prompt("c", "2+3"), prompt("d", "2*3"), prompt("e", "w5"),
             Prompt("f", "all", system)]  # fmt: skip
    assert encode(asked, tokenizer)[1]["repeated"] == 0


class Answers:
    """Stands where the server's client is: answers with the prompt's length, and can die on the way."""

    def __init__(self, die_after: int = 10**9) -> None:
        self.asked: list[list[int]] = []
        self.die_after = die_after

    def complete(self, server, prompts, *, max_tokens, concurrency, on_completion):
        for index, ids in enumerate(prompts):
            if len(self.asked) == self.die_after:
                raise KeyboardInterrupt
            self.asked.append(ids)
            on_completion(responses.client.Completion(index, [len(ids), 2], "stop", 0.1))


def test_a_killed_generation_goes_on_and_asks_nothing_twice(tokenizer, tmp_path, monkeypatch) -> None:
    asked = encode([prompt(f"p{i}", "w5 " * (i + 1)) for i in range(10)], tokenizer)[0]
    file = tmp_path / "answers.jsonl"
    first, second = Answers(die_after=4), Answers()
    monkeypatch.setattr(responses.client, "complete", first.complete)
    with pytest.raises(KeyboardInterrupt):
        responses.generate(None, asked, file, max_new_tokens=8, concurrency=2)
    file.write_bytes(file.read_bytes() + b'{"torn')
    monkeypatch.setattr(responses.client, "complete", second.complete)
    done = responses.generate(None, asked, file, max_new_tokens=8, concurrency=2)
    assert [c.id for c in done] == [e.id for e in asked]
    assert len(first.asked) + len(second.asked) == 10
    assert all(c.response_ids == [len(c.prompt_ids), 2] for c in done)
    assert sorted(c.id for c in responses.read(file)) == sorted(e.id for e in asked)


def test_nothing_left_is_an_error(tokenizer) -> None:
    with pytest.raises(UserError, match="no prompt is left"):
        encode([prompt("c", "w7 " * 200)], tokenizer)


def test_the_split_is_by_content_and_does_not_depend_on_order(tokenizer) -> None:
    asked = [prompt(f"p{i}", f"w{i} w{i + 1}") for i in range(10, 50)]
    first = {e.id: e.split for e in encode(asked, tokenizer)[0]}
    again = {e.id: e.split for e in encode(asked[::-1], tokenizer)[0]}
    assert first == again
    assert sum(split == responses.HELD_OUT for split in first.values()) == 10
    assert {e.id: e.split for e in encode(asked, tokenizer, seed=1)[0]} != first


def conversation(**changes) -> responses.Conversation:
    base = responses.Conversation("a", "all", responses.TRAIN, [5, 6, 7, 8], [0, 0, 1, 1], "stop")
    return dataclasses.replace(base, **changes)


def test_a_torn_last_line_is_dropped_and_cut_off(tmp_path) -> None:
    file = tmp_path / "c.jsonl"
    responses.write(file, [conversation(), conversation(id="b")])
    whole = file.read_bytes()
    file.write_bytes(whole + b'{"id": "c", "categ')
    assert [c.id for c in responses.read(file)] == ["a", "b"]
    assert file.read_bytes() == whole


def test_a_damaged_line_in_the_middle_is_an_error(tmp_path) -> None:
    file = tmp_path / "c.jsonl"
    responses.write(file, [conversation()])
    file.write_bytes(b"garbage\n" + file.read_bytes())
    with pytest.raises(UserError, match="line 1"):
        responses.read(file)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"loss_mask": [0, 0, 0, 0]}, "nothing is supervised"),
        ({"loss_mask": [1, 1, 1, 1]}, "covers the prompt"),
        ({"loss_mask": [0, 1, 0, 1]}, "holes"),
        ({"loss_mask": [0, 1]}, "mask entries"),
        ({"input_ids": [5, 6, 7, 300]}, "outside"),
    ],
)
def test_gates(changes, says: str) -> None:
    assert any(says in what for _, what in responses.problems([conversation(**changes)], 300))
    assert not list(responses.problems([conversation()], 300))


@given(st.lists(st.integers(0, 299), min_size=1, max_size=40), st.lists(st.integers(0, 299), min_size=1, max_size=40))
def test_prompt_and_response_come_apart_where_they_were_joined(prompt_ids, response_ids) -> None:
    c = conversation(input_ids=prompt_ids + response_ids, loss_mask=[0] * len(prompt_ids) + [1] * len(response_ids))
    assert c.prompt_ids == prompt_ids
    assert c.response_ids == response_ids
