"""The chat template: where an answer begins, and which markers are text in disguise."""

from __future__ import annotations

import pytest
from eaglebook import templates, verifier
from eaglebook.errors import UserError


@pytest.fixture(scope="module")
def tokenizer(tiny_verifier):
    return verifier.load_tokenizer(verifier.resolve(str(tiny_verifier)))


ASK = [{"role": "user", "content": "w5 w6"}]


def test_a_given_answer_is_what_the_template_adds(tokenizer) -> None:
    prompt = templates.render(tokenizer, ASK)
    answer = templates.given_answer(tokenizer, ASK, "w7", end_ids={2})
    whole = tokenizer.apply_chat_template([*ASK, {"role": "assistant", "content": "w7"}], return_dict=False)
    assert list(whole[: len(prompt) + len(answer)]) == prompt + answer
    assert answer[0] == 7 and answer[-1] == 2


def test_a_template_that_rewrites_the_prompt_is_refused() -> None:
    class Rewrites:
        def apply_chat_template(
            self, messages, tools=None, tokenize=True, add_generation_prompt=False, return_dict=False
        ):
            return [1, 2, 3] if add_generation_prompt else [1, 9, 3, 4]

    with pytest.raises(UserError, match="cannot be told from its prompt"):
        templates.given_answer(Rewrites(), ASK, "x", end_ids={4})


class Words:
    """Knows <|user|> as one token and everything else letter by letter."""

    def decode(self, ids):
        return "".join(map(chr, ids))

    def encode(self, text, add_special_tokens=False):
        return [1000] if text == "<|user|>" else [ord(c) for c in text]


def test_markers_the_tokenizer_spells_out_are_found() -> None:
    ids = [ord(c) for c in "<|user|>hi<|im_end|> a < b | c > d"]
    assert templates.broken_markers(Words(), ids) == ["<|im_end|>"]


def test_a_tokenizer_without_thoughts_says_so(tokenizer) -> None:
    with pytest.raises(UserError, match="ends a thought"):
        templates.thought_end(Words())
