"""The shipped prompts, and every source's errors."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from eaglebook import prompts
from eaglebook.errors import UserError

CATEGORIES = {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities", "chat"}


def test_the_shipped_set_is_large_varied_and_unique() -> None:
    shipped = prompts.load("shipped")
    counts = Counter(p.category for p in shipped)
    assert len(shipped) >= 600
    assert set(counts) == CATEGORIES
    assert min(counts.values()) >= 50
    assert len({p.id for p in shipped}) == len({prompts.normalised(p.text) for p in shipped}) == len(shipped)


@pytest.mark.parametrize("benchmark", ["package:mtbench", "package:humaneval"])
def test_no_shipped_prompt_holds_a_benchmark_question(benchmark: str) -> None:
    assert prompts.overlaps(prompts.load("shipped"), prompts.load(benchmark)) == []


def test_the_overlap_check_can_fail() -> None:
    question = prompts.load("package:mtbench")[0]
    copied = prompts.Prompt("mine", "all", [{"role": "user", "content": "Please: " + question.text.upper()}])
    assert prompts.overlaps([copied], [question]) == [("mine", question.id)]


def test_mtbench_has_its_eighty_questions_in_eight_categories() -> None:
    questions = prompts.load("package:mtbench")
    assert len(questions) == 80
    assert set(Counter(q.category for q in questions).values()) == {10}


def test_all_three_row_forms_end_with_the_user(tmp_path) -> None:
    file = tmp_path / "rows.jsonl"
    rows = [
        {"prompt": "one"},
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "two"}]},
        {"conversations": [{"from": "human", "value": "three"}, {"from": "gpt", "value": "dropped"}]},
    ]
    file.write_text("\n".join(map(json.dumps, rows)))
    loaded = prompts.load(f"jsonl:{file}")
    assert [p.text for p in loaded] == ["one", "two", "three"]
    assert all(p.messages[-1]["role"] == "user" for p in loaded)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "is empty"),
        ("\n\n", "is empty"),
        ("{not json}\n", "line 1"),
        ('{"prompt": "  "}\n', "row 1"),
        ('{"answer": "x"}\n', "row 1"),
        ('{"messages": [{"role": "robot", "content": "x"}]}\n', "role"),
        ('{"id": 1, "prompt": "x"}\n{"id": 1, "prompt": "y"}\n', "given twice"),
    ],
)
def test_bad_files_are_named_by_line(tmp_path, content: str, says: str) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text(content)
    with pytest.raises(UserError, match=says):
        prompts.load(f"jsonl:{file}")


def test_a_limit_keeps_every_categorys_share() -> None:
    counts = Counter(p.category for p in prompts.load("shipped", 90))
    assert set(counts) == CATEGORIES
    assert max(counts.values()) - min(counts.values()) <= 2


def test_a_file_that_is_not_utf8_is_named_by_line(tmp_path) -> None:
    (tmp_path / "x.jsonl").write_bytes(b'{"prompt": "caf\xe9"}\n')
    with pytest.raises(UserError, match="line 1"):
        prompts.load(f"jsonl:{tmp_path}/x.jsonl")


@pytest.mark.parametrize("source", ["jsonl:/nowhere/x.jsonl", "shiped", "package:nothing", "jsonl:", "hf:"])
def test_unknown_sources_are_refused(source: str) -> None:
    with pytest.raises(UserError, match="next:"):
        prompts.load(source)


NAMES = {
    "package:mtbench": "mtbench",
    "jsonl:a/v1.5.jsonl.gz": "v1.5",
    "hf:meta/Llama-3.1:train": "Llama-3.1",
    "shipped": "shipped",
}


@pytest.mark.parametrize(("source", "name"), NAMES.items())
def test_short_names(source, name) -> None:
    assert prompts.short_name(source) == name


def test_tools_given_answers_and_content_in_parts_are_kept(tmp_path) -> None:
    call = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}],
    }
    parts = [{"type": "text", "text": "look"}, {"type": "image_url", "image_url": "x"}]
    row = {
        "messages": [
            {"role": "user", "content": parts}, call, {"role": "tool", "content": "4", "tool_call_id": "1"},
            {"role": "assistant", "content": "four"},
        ],
        "tools": json.dumps([{"type": "function", "function": {"name": "f"}}]),
    }  # fmt: skip
    (tmp_path / "x.jsonl").write_text(json.dumps(row))
    (one,) = prompts.load(f"jsonl:{tmp_path / 'x.jsonl'}")
    assert [m["role"] for m in one.messages] == ["user", "assistant", "tool"]
    assert one.messages[0]["content"] == "look" and one.messages[1]["tool_calls"] == call["tool_calls"]
    assert one.messages[2]["tool_call_id"] == "1"
    assert (one.given, one.tools[0]["function"]["name"]) == ("four", "f")
