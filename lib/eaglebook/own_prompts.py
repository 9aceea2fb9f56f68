"""Questions that the verifier writes itself: shown its chat template up to where a user would speak, it speaks as one.

A source that never runs out and needs no network (Xu et al. 2024, "Magpie"). Sampled at temperature 1, since greedy text would
be one question; the answers to them are greedy again, as all others.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from eaglebook import manifests
from eaglebook.engine import client, server
from eaglebook.engine.server import Server
from eaglebook.errors import UserError
from eaglebook.prompts import Prompt

LONGEST = 128  # tokens of a question; what has not ended by then is no question
_MARK = "\u241f\u241e"  # no user writes this


def opening(tokenizer: Any) -> list[int]:
    """The ids of the chat template up to the first word of a user.

    Raises UserError for a template that changes what users say, which hides the place.
    """
    text = tokenizer.apply_chat_template([{"role": "user", "content": _MARK}], tokenize=False)
    before, mark, _ = text.partition(_MARK)
    if not mark:
        raise UserError(
            "the chat template hides where a user's words begin",
            expected="the words as they are, behind a marker",
            found=text[:80],
            fix="own_questions: 0, and a prompt_source",
        )
    return list(tokenizer.encode(before, add_special_tokens=False))


def ask(
    servers: Sequence[Server], tokenizer: Any, count: int, *, end_ids: set[int], concurrency: int, seed: int,
    say: Callable[[client.Completion], None] | None = None,
) -> list[Prompt]:  # fmt: skip
    """At most ``count`` questions from the verifier: asked so often, see `keep` for what is left out.

    On a CPU without seeds of their own: vLLM 0.32 dies over a seeded request whose prompt does not fit into one step
    (v1/worker/gpu_model_runner.py, _bookkeeping_sync: "CPU Generator does not use offset").
    """
    start = opening(tokenizer)
    seeds = random.Random(seed)
    answers, _ = client.complete(
        servers, [start] * count, max_tokens=LONGEST, concurrency=concurrency, temperature=1.0,
        seeds=() if server.on_cpu() else [seeds.randrange(2**31) for _ in range(count)], retries=2, on_completion=say,
    )  # fmt: skip
    return keep(tokenizer, answers, end_ids)


def save(file: Path, questions: Sequence[Prompt]) -> None:
    """A ``jsonl:`` source that `prompts.load` reads; in place only when it is whole."""
    rows = [json.dumps({"id": q.id, "category": q.category, "prompt": q.text}) + "\n" for q in questions]
    manifests.write_atomically(file, "".join(rows))


def keep(tokenizer: Any, answers: Sequence[client.Completion], end_ids: set[int]) -> list[Prompt]:
    """The questions among what was said: ended by an end token, at least three words, none twice."""
    questions: dict[str, Prompt] = {}
    for number, answer in enumerate(answers):
        ended = answer.finish_reason == "stop" or (answer.token_ids and answer.token_ids[-1] in end_ids)
        text = tokenizer.decode([t for t in answer.token_ids if t not in end_ids], skip_special_tokens=True).strip()
        if ended and len(text.split()) >= 3:
            questions.setdefault(text, Prompt(f"own-{number:06d}", "own", [{"role": "user", "content": text}]))
    return list(questions.values())
