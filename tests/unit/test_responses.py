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


def encode(prompts, tokenizer, limit=64, seed=0, **how):
    return responses.encode(prompts, tokenizer, max_prompt_tokens=limit, held_out_fraction=0.25, seed=seed, **how)


def test_long_and_repeated_prompts_are_kept_out_and_counted(tokenizer) -> None:
    asked = [prompt("a", "w5 w6"), prompt("b", "W5   w6"), prompt("c", "w7 " * 200), prompt("d", "w8"),
             prompt("e", "W5   w6"), prompt("f", "w5 w6"), prompt("g", "ｗ８")]  # fmt: skip
    kept, out = encode(asked, tokenizer)
    assert [e.id for e in kept] == ["a", "d"]
    assert out == {"repeated": 1, "nearly_repeated": 3, "too_long": 1}


def test_what_differs_is_no_repeat(tokenizer) -> None:
    system = [{"role": "system", "content": "w9"}, {"role": "user", "content": "w5"}]
    asked = [prompt("a", "你好"), prompt("b", "谢谢"), prompt("c", "2+3"), prompt("d", "2*3"), prompt("e", "w5"),
             Prompt("f", "all", system)]  # fmt: skip
    out = encode(asked, tokenizer)[1]
    assert (out["repeated"], out["nearly_repeated"]) == (0, 0)


class Answers:
    """Stands where the server's client is: answers with the prompt's length, and can die on the way."""

    def __init__(self, die_after: int = 10**9) -> None:
        self.asked: list[list[int]] = []
        self.die_after = die_after

    def complete(self, servers, prompts, *, max_tokens, concurrency, retries, on_completion):
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


# ---- several turns, given answers, thoughts


def talk(name: str, *turns: tuple[str, str]) -> Prompt:
    return Prompt(name, "all", [{"role": role, "content": text} for role, text in turns])


class Says:
    """Answers each prompt with a word of its own, then ends; a prompt that holds w13 is cut instead."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    def complete(self, servers, prompts, *, max_tokens, concurrency, retries, on_completion):
        for index, ids in enumerate(prompts):
            self.asked.append(ids)
            cut = 13 in ids
            on_completion(
                responses.client.Completion(index, [100 + len(self.asked), 2 - cut], "length" if cut else "stop", 0.1)
            )


def test_every_turn_is_answered_behind_the_verifiers_own_answers(tokenizer, tmp_path, monkeypatch) -> None:
    asked = [
        talk(
            "a",
            ("system", "w9"),
            ("user", "w5"),
            ("assistant", "w99"),
            ("user", "w6"),
            ("assistant", "w98"),
            ("user", "w7"),
        ),
        talk("b", ("user", "w13"), ("assistant", "w97"), ("user", "w8")),
        talk("c", ("user", "w11")),
    ]
    encoded, _ = encode(asked, tokenizer)
    says = Says()
    monkeypatch.setattr(responses.client, "complete", says.complete)
    how = {"max_prompt_tokens": 64, "max_new_tokens": 8, "concurrency": 2}
    told = responses.converse([], encoded, tokenizer, tmp_path / "answers.jsonl", **how)
    assert sorted(c.id for c in told) == ["a", "a/2", "a/3", "b", "c"]  # b's first answer was cut: it ends there
    by = {c.id: c for c in told}
    assert len({c.split for c in told if c.id.startswith("a")}) == 1
    for name, earlier in (("a/2", ["a"]), ("a/3", ["a", "a/2"])):
        prompt = by[name].prompt_ids
        assert not {97, 98, 99} & set(prompt), "the answers of the source are gone"
        assert all(by[e].response_ids[0] in prompt for e in earlier), "the verifier's own stand there"
        assert by[name].loss_mask == [0] * len(prompt) + [1, 1]
    assert 9 in by["a/3"].prompt_ids and 7 in by["a/3"].prompt_ids
    again = Says()
    monkeypatch.setattr(responses.client, "complete", again.complete)
    assert responses.converse([], encoded, tokenizer, tmp_path / "answers.jsonl", **how) == told
    assert again.asked == [], "resumed by id, turn by turn"


def test_the_last_turn_alone_keeps_the_answers_of_the_source(tokenizer) -> None:
    asked = talk("a", ("user", "w5"), ("assistant", "w99"), ("user", "w6"))
    ((one,), _) = encode([asked], tokenizer, every_turn=False)
    assert 99 in one.prompt_ids and 6 in one.prompt_ids


def test_a_conversation_with_tool_results_is_answered_at_its_end(tokenizer) -> None:
    asked = talk("a", ("user", "w5"), ("assistant", "w99"), ("tool", "w42"), ("user", "w6"))
    ((one,), _) = encode([asked], tokenizer)
    assert {99, 42, 6} <= set(one.prompt_ids)


def test_given_answers_are_taken_as_the_template_writes_them(tokenizer) -> None:
    given = [
        Prompt("a", "all", [{"role": "user", "content": "w5"}], given="w7 w8"),
        Prompt("b", "all", [{"role": "user", "content": "w6"}], given="w9 " * 20),
    ]
    encoded, _ = encode(given, tokenizer, every_turn=False)
    whole, cut = responses.take_given(encoded, tokenizer, 6, {2})
    assert whole.response_ids[:2] == [7, 8] and whole.response_ids[-1] == 2
    assert (whole.finish_reason, cut.finish_reason) == ("stop", "length")
    assert cut.response_ids == [9] * 6
    assert not list(responses.problems([whole, cut], 300))
    with pytest.raises(UserError, match="gives no answer"):
        responses.take_given(encode([prompt("c", "w5")], tokenizer)[0], tokenizer, 6, {2})


def test_thoughts_are_left_in_the_context_and_not_supervised() -> None:
    thought = conversation(input_ids=[5, 6, 50, 51, 99, 7, 2], loss_mask=[0, 0, 1, 1, 1, 1, 1])
    endless = conversation(id="b", input_ids=[5, 6, 50, 51], loss_mask=[0, 0, 1, 1])
    earlier = conversation(id="c", input_ids=[99, 6, 50, 2], loss_mask=[0, 0, 1, 1])
    masked = responses.mask_thoughts([thought, endless, earlier], 99)
    assert [c.loss_mask for c in masked] == [[0, 0, 0, 0, 0, 1, 1], [0, 0, 1, 1], [0, 0, 1, 1]]
    assert masked[0].input_ids == thought.input_ids
    assert not list(responses.problems(masked, 300))
