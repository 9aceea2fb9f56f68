"""Questions from the verifier itself: asked in the right place, kept when they are questions."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
from eaglebook import own_prompts, verifier
from eaglebook.engine.client import Completion
from eaglebook.errors import UserError
from eaglebook.own_prompts import Try


class Spelled:
    """A tokenizer that spells: every character is its code."""

    def __init__(self, template: str) -> None:
        self.template = template

    def apply_chat_template(self, messages, tokenize):
        assert not tokenize
        return self.template.replace("WORDS", messages[0]["content"])

    def encode(self, text, add_special_tokens):
        assert not add_special_tokens
        return [ord(c) for c in text]

    def decode(self, ids, skip_special_tokens):
        return "".join(map(chr, ids))


def test_the_opening_ends_where_a_user_would_speak() -> None:
    ids = own_prompts.opening(Spelled("<sys>be kind<user>WORDS<end>"))
    assert "".join(map(chr, ids)) == "<sys>be kind<user>"


def test_the_opening_of_a_real_template_is_the_prefix_of_every_prompt() -> None:
    embedded = verifier.load_tokenizer(verifier.resolve(verifier.EMBEDDED))
    start = own_prompts.opening(embedded)
    prompt = embedded.apply_chat_template([{"role": "user", "content": "Why?"}], tokenize=True, return_dict=False)
    assert prompt[: len(start)] == start
    assert embedded.decode(prompt[len(start) :]).startswith("Why?")


def test_a_template_that_hides_the_place_is_refused() -> None:
    with pytest.raises(UserError, match="hides where a user's words begin"):
        own_prompts.opening(Spelled("<user>nothing<end>"))


def said(file, *tries: tuple[str, bool]) -> None:
    file.write_text("".join(json.dumps(asdict(Try(n, text, ended))) + "\n" for n, (text, ended) in enumerate(tries)))


def test_only_whole_questions_are_kept(tmp_path) -> None:
    file = tmp_path / "own.jsonl"
    said(file, ("Why is it so?", True), ("Why is it cut here", False), ("Hm", True), ("How are you?", True))
    kept = own_prompts.read(file, 4)
    assert [(q.id, q.text) for q in kept] == [("own-000000", "Why is it so?"), ("own-000003", "How are you?")]
    assert [q.id for q in own_prompts.read(file, 3)] == ["own-000000"]  # of fewer tries, the first


def test_a_question_written_twice_is_asked_once(tmp_path) -> None:
    said(tmp_path / "own.jsonl", ("Why is it so?", True), ("Why is it so?", True))
    assert [q.id for q in own_prompts.read(tmp_path / "own.jsonl", 2)] == ["own-000000"]


def test_a_killed_asking_goes_on_with_what_is_missing(tmp_path, monkeypatch) -> None:
    file, asked = tmp_path / "own.jsonl", []

    def answer(servers, prompts, *, on_completion, seeds, **_):
        asked.append(dict(zip(range(len(prompts)), seeds, strict=True)))
        for n in reversed(range(len(prompts))):  # they arrive in any order
            if len(asked) == 1 and n < 3:
                raise KeyboardInterrupt
            on_completion(Completion(n, [ord(c) for c in f"Why is it {seeds[n]}?"] + [0], "length", 0.1))

    monkeypatch.setattr(own_prompts.client, "complete", answer)
    monkeypatch.setattr(own_prompts.server, "on_cpu", lambda: False)
    options = dict(end_ids={0}, concurrency=4, seed=7)
    with pytest.raises(KeyboardInterrupt):
        own_prompts.ask([], Spelled("<user>WORDS"), 5, file, **options)
    assert own_prompts.missing(file, 5) == [0, 1, 2]
    with file.open("a") as stream:
        stream.write('{"number": 2, "te')  # killed while it wrote
    own_prompts.ask([], Spelled("<user>WORDS"), 5, file, **options)
    assert own_prompts.missing(file, 5) == []
    assert [len(seeds) for seeds in asked] == [5, 3]
    assert asked[1] == {n: asked[0][n] for n in range(3)}, "a try has the same seed whenever it is made"
    assert [q.text for q in own_prompts.read(file, 5)] == [f"Why is it {asked[0][n]}?" for n in range(5)]


def test_what_was_said_is_judged_by_how_it_ended(tmp_path, monkeypatch) -> None:
    told = {"Why is it so?": "stop", "Why is it cut here": "length", "Hm": "stop", "  How are you?\n": "stop"}

    def answer(*_, on_completion, **__):
        for n, (text, how) in enumerate(told.items()):
            on_completion(Completion(n, [ord(c) for c in text], how, 0.1))

    monkeypatch.setattr(own_prompts.client, "complete", answer)
    own_prompts.ask([], Spelled("<user>WORDS"), 4, tmp_path / "own.jsonl", end_ids={0}, concurrency=4, seed=0)
    kept = own_prompts.read(tmp_path / "own.jsonl", 4)
    assert [(q.id, q.text) for q in kept] == [("own-000000", "Why is it so?"), ("own-000003", "How are you?")]


def test_a_damaged_line_is_told(tmp_path) -> None:
    file = tmp_path / "own.jsonl"
    file.write_text('{"number": 0, "te\n{"number": 1, "text": "Why is it so?", "ended": true}\n')
    with pytest.raises(UserError, match="line 1 is damaged"):
        own_prompts.read(file, 2)
