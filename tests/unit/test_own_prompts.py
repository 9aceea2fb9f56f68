"""Questions from the verifier itself: asked in the right place, kept when they are questions."""

from __future__ import annotations

import pytest
from eaglebook import own_prompts, verifier
from eaglebook.engine.client import Completion
from eaglebook.errors import UserError


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


def test_only_whole_questions_are_kept() -> None:
    said = {"Why is it so?": "stop", "Why is it cut here": "length", "Hm": "stop", "  How are you?\n": "stop"}
    answers = [Completion(n, [ord(c) for c in text], how, 0.1) for n, (text, how) in enumerate(said.items())]
    kept = own_prompts.keep(Spelled(""), answers, {0})
    assert [(q.id, q.text) for q in kept] == [("own-000000", "Why is it so?"), ("own-000003", "How are you?")]


def test_a_question_written_twice_is_asked_once() -> None:
    answers = [Completion(n, [ord(c) for c in "Why is it so?"], "stop", 0.1) for n in range(2)]
    assert [q.id for q in own_prompts.keep(Spelled(""), answers, {0})] == ["own-000000"]
