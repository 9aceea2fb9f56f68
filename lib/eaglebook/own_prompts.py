"""Questions that the verifier writes itself: shown its chat template up to where a user would speak, it speaks as one.

A source that never runs out and needs no network (Xu et al. 2024, "Magpie"). Sampled at temperature 1, since greedy text would
be one question; the answers to them are greedy again, as all others.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eaglebook import appended, progress
from eaglebook.engine import client, server
from eaglebook.engine.server import Server
from eaglebook.errors import UserError
from eaglebook.prompts import Prompt

LONGEST = 128  # tokens of a question; what has not ended by then is no question
_MARK = "\u241f\u241e"  # no user writes this


@dataclass(frozen=True)
class Try:
    """What was said when asked for a question, and whether it was said to its end."""

    number: int
    text: str
    ended: bool


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
    servers: Sequence[Server], tokenizer: Any, count: int, file: Path, *, end_ids: set[int], concurrency: int, seed: int
) -> None:
    """Try ``count`` times for a question, and append each try to ``file`` as it arrives; what is there already stays.

    Killed at any moment, the next call goes on from the file. On a CPU without seeds of their own: vLLM 0.32 dies over a
    seeded request whose prompt does not fit into one step (v1/worker/gpu_model_runner.py, _bookkeeping_sync: "CPU Generator
    does not use offset").
    """
    start, todo = opening(tokenizer), missing(file, count)
    seeds = [random.Random(f"{seed} {number}").randrange(2**31) for number in todo]
    bar = progress.Progress("own questions", count, start=count - len(todo), unit="tries")
    with file.open("a", encoding="utf-8") as stream:

        def note(answer: client.Completion) -> None:
            ended = answer.finish_reason == "stop" or (answer.token_ids and answer.token_ids[-1] in end_ids)
            text = tokenizer.decode([t for t in answer.token_ids if t not in end_ids], skip_special_tokens=True)
            appended.add(stream, Try(todo[answer.index], text.strip(), bool(ended)))
            bar.step(tokens=len(answer.token_ids))

        client.complete(
            servers, [start] * len(todo), max_tokens=LONGEST, concurrency=concurrency, temperature=1.0,
            seeds=() if server.on_cpu() else seeds, retries=2, on_completion=note,
        )  # fmt: skip
    bar.close()


def missing(file: Path, count: int) -> list[int]:
    """Which of ``count`` tries are not in the file."""
    there = {done.number for done in appended.read(file, Try)} if file.exists() else set()
    return [number for number in range(count) if number not in there]


def read(file: Path, count: int) -> list[Prompt]:
    """The questions among the first ``count`` tries: ended by an end token, at least three words, none twice."""
    questions: dict[str, Prompt] = {}
    for tried in sorted(appended.read(file, Try), key=lambda t: t.number):
        if tried.number < count and tried.ended and len(tried.text.split()) >= 3:
            name = f"own-{tried.number:06d}"
            questions.setdefault(tried.text, Prompt(name, "own", [{"role": "user", "content": tried.text}]))
    return list(questions.values())
