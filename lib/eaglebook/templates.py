"""The chat template between messages and token ids: where an answer begins, what it is made of, what it must not do.

Everything about masks hangs on one boundary, the end of the generation prompt. It is found by rendering, never by searching
for a marker in text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from eaglebook import evenly
from eaglebook.errors import UserError

_MARKER = re.compile(r"<[|｜][^<>|｜\s]{1,40}[|｜]>")
_THINK_END = ("</think>", "[/THINK]", "◁/think▷")


def render(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] = (), *, thinking: bool = True
) -> list[int]:
    """Token ids of a conversation up to where the answer begins. ``thinking`` False asks the template not to open a thought."""
    extra = {} if thinking else {"enable_thinking": False}
    ids = tokenizer.apply_chat_template(
        list(messages), tools=list(tools) or None, tokenize=True, add_generation_prompt=True, return_dict=False, **extra
    )
    return list(ids)


def mean_length(
    tokenizer: Any, conversations: Sequence[Sequence[Mapping[str, Any]]], limit: int, sample: int = 500
) -> int:
    """Mean tokens of rendered conversations, ``sample`` of them evenly spread; those over ``limit`` count as it. Rounded up."""
    some = evenly.take(conversations, sample)
    lengths = [min(limit, len(render(tokenizer, messages))) for messages in some]
    return math.ceil(sum(lengths) / len(lengths))


def given_answer(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], answer: str, tools: Sequence[Any] = (), *, end_ids: set[int]
) -> list[int]:
    """Token ids of an answer that a data set gives, as the template writes it, up to and with its end token.

    Raises UserError when the template renders the conversation differently once it is answered (some drop earlier
    thoughts): the answer's first token could then not be told from the prompt's last.
    """
    prompt = render(tokenizer, messages, tools)
    whole = tokenizer.apply_chat_template(
        [*messages, {"role": "assistant", "content": answer}],
        tools=list(tools) or None,
        tokenize=True,
        return_dict=False,
    )
    if list(whole[: len(prompt)]) != prompt:
        raise UserError(
            "a given answer cannot be told from its prompt",
            expected="a template that leaves the prompt as it is when an answer follows",
            found="another rendering",
            fix="let the verifier answer: given_responses: false",
        )
    response = list(whole[len(prompt) :])
    end = next((i for i, token in enumerate(response) if token in end_ids), len(response) - 1)
    return response[: end + 1]


def broken_markers(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Control markers in a rendered conversation (``<|…|>``) that the tokenizer does not know as one token.

    The verifier then reads them as text, letter by letter: a template of one model beside the tokenizer of another.
    """
    found = set(_MARKER.findall(tokenizer.decode(list(ids))))
    return sorted(m for m in found if len(tokenizer.encode(m, add_special_tokens=False)) != 1)


def thought_end(tokenizer: Any) -> int:
    """The id of the token that ends a thought. Raises UserError for a tokenizer without one."""
    for marker in _THINK_END:
        ids = tokenizer.encode(marker, add_special_tokens=False)
        if len(ids) == 1:
            return int(ids[0])
    raise UserError(
        "this tokenizer has no token that ends a thought",
        expected=f"one of {', '.join(_THINK_END)} as a single token",
        found="none",
        fix="thinking: keep",
    )
