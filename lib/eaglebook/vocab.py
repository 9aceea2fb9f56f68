"""Which verifier tokens the draft may say, and what leaving the others out costs.

``d2t`` (int64 ``[draft_vocab]``) holds offsets: target id = draft id + d2t[draft id]. ``t2d`` (bool
``[verifier_vocab]``) is a mask of the tokens kept. The selection is speculators' own: the most frequent supervised
tokens, ties to the lower id.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from eaglebook.checkpoint.surgery import always_kept, read_counts
from eaglebook.errors import UserError
from eaglebook.paths import resolve, show
from eaglebook.responses import Conversation


def count(conversations: Iterable[Conversation]) -> Counter[int]:
    """How often each token occurs in the supervised parts (the answers; never the prompts)."""
    return Counter(itertools.chain.from_iterable(c.response_ids for c in conversations))


def count_by_category(conversations: Iterable[Conversation]) -> dict[str, Counter[int]]:
    """The same for each category of prompts."""
    by: dict[str, Counter[int]] = {}
    for c in conversations:
        by.setdefault(c.category, Counter()).update(c.response_ids)
    return by


def build(
    counts: Counter[int], draft_vocab_size: int, vocab_size: int, always: Iterable[int] = ()
) -> tuple[np.ndarray, np.ndarray]:
    """``(d2t, t2d)`` by ``speculators.train.vocab_mapping``; the ``always`` ids have a place whatever their count.

    Raises UserError when the draft's vocabulary is larger than the verifier's, or cannot hold the ``always`` ids.
    """
    fixed = set(always)
    if len(fixed) > draft_vocab_size:
        raise UserError(
            "the tokens to reserve do not fit into the draft vocabulary",
            expected=f"at most {draft_vocab_size}",
            found=str(len(fixed)),
            fix="raise draft_vocab_size, or reserve fewer",
        )
    if draft_vocab_size > vocab_size:
        raise UserError(
            "draft_vocab_size is larger than the verifier's vocabulary",
            expected=f"at most {vocab_size}",
            found=str(draft_vocab_size),
            fix="lower draft_vocab_size in the params file",
        )
    from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution

    first = max(counts.values(), default=0) + 1  # more than any other: the library knows no reserved places
    ranked = dict(counts) | dict.fromkeys(fixed, first)
    d2t, t2d = build_vocab_mappings_from_distribution(ranked, draft_vocab_size, vocab_size)
    return d2t.numpy(), t2d.numpy()


def reserved(what: Iterable[str], folder: Path, tokenizer: Any) -> set[int]:
    """Ids that always get a place: ``special``, ``template`` (the chat template's own text), ``tools``, ``file:PATH``.

    ``tools``: what the template adds around a tool and a call of it. A file holds a JSON list of ids. Raises UserError.
    """
    plain = [entry for entry in what if entry != "tools" and not entry.startswith("file:")]
    ids = always_kept(folder, plain)
    for entry in what:
        if entry == "tools":
            ids |= _tool_ids(tokenizer)
        elif entry.startswith("file:"):
            ids |= _listed_ids(resolve(entry.removeprefix("file:")))
    return ids


def _tool_ids(tokenizer: Any) -> set[int]:
    """Tokens of a rendered conversation with a tool and a call that are not there without; none for a template without tools."""
    ask = {"role": "user", "content": "x"}
    function = {
        "name": "x",
        "description": "x",
        "parameters": {"type": "object", "properties": {"x": {"type": "string"}}},
    }
    call = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "x", "arguments": {"x": "x"}}}],
    }
    try:
        with_tools = tokenizer.apply_chat_template(
            [ask, call, {"role": "tool", "content": "x"}], tools=[{"type": "function", "function": function}], return_dict=False
        )  # fmt: skip
    except Exception as error:  # a template may raise whatever it likes
        raise UserError(
            "the chat template cannot render a tool call",
            expected="a template that knows tools",
            found=f"{type(error).__name__}: {error}"[:160],
            fix="leave `tools` out of reserve",
        ) from None
    plain = tokenizer.apply_chat_template([ask, {"role": "assistant", "content": "x"}], return_dict=False)
    return set(with_tools) - set(plain)


def _listed_ids(file: Path) -> set[int]:
    try:
        ids = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(ids, list) or not all(type(i) is int and i >= 0 for i in ids):
            raise ValueError("not a list of ids")
        return set(ids)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{show(file)}: not a list of tokens",
            expected="a JSON list of token ids",
            found=str(error)[:120],
            fix="correct `reserve:` or the file",
        ) from None


def size_for_coverage(counts: Counter[int], share: float, always: Iterable[int] = ()) -> int:
    """The smallest draft vocabulary that covers ``share`` of the counted tokens and holds the ``always`` ids."""
    fixed = set(always)
    missing = share * sum(counts.values()) - sum(counts[token] for token in fixed)
    size = len(fixed)
    for token, n in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        if missing <= 0:
            break
        if token not in fixed:
            missing -= n
            size += 1
    return max(size, 1)


def target_ids(d2t: np.ndarray) -> np.ndarray:
    """The verifier id of every draft id."""
    return np.arange(len(d2t)) + d2t


def problems(d2t: np.ndarray, t2d: np.ndarray) -> list[str]:
    """What is wrong with a mapping; empty when it is sorted, unique, in range and its two halves agree."""
    ids, found = target_ids(d2t), []
    if ids.min() < 0 or ids.max() >= len(t2d):
        found.append(f"target ids outside 0..{len(t2d) - 1}")
    if (np.diff(ids) <= 0).any():
        found.append("target ids are not strictly ascending")
    if not np.array_equal(np.flatnonzero(t2d), np.unique(ids)):
        found.append("t2d does not mark the ids that d2t reaches")
    return found


def coverage(counts: Counter[int], kept: np.ndarray) -> float:
    """Share of token occurrences that a vocabulary covers. ``kept`` is a t2d mask."""
    total = sum(counts.values())
    return sum(n for token, n in counts.items() if kept[token]) / total if total else 0.0


def coverage_by_size(train: Counter[int], other: Counter[int], sizes: Sequence[int], vocab_size: int) -> list[float]:
    """Coverage of ``other`` by the ``size`` most frequent tokens of ``train``, for each size."""
    ranked = sorted(train, key=lambda token: (-train[token], token))
    result = []
    for size in sizes:
        kept = np.zeros(vocab_size, dtype=bool)
        kept[ranked[:size]] = True
        result.append(coverage(other, kept))
    return result


def ceiling(conversations: Iterable[Conversation], t2d: np.ndarray, num_speculative_tokens: int) -> float:
    """The largest mean acceptance length a draft of this vocabulary can reach on these answers.

    A perfect draft guesses every token it can say: each step accepts the run of sayable tokens, at most
    ``num_speculative_tokens`` of them, and the verifier adds one.
    """
    steps = accepted = 0
    for conversation in conversations:
        sayable = [bool(t2d[token]) for token in conversation.response_ids[1:]]  # the first comes from the prompt
        at = 0
        while at < len(sayable):
            run = sum(1 for _ in itertools.takewhile(bool, sayable[at : at + num_speculative_tokens]))
            steps, accepted, at = steps + 1, accepted + run, at + run + 1
    return 1 + accepted / steps if steps else 1.0


@dataclass(frozen=True)
class Size:
    """What a draft vocabulary of ``tokens`` costs and allows. ``head_bytes``: read for every draft token.

    ``relative_speed``: the ceiling over the bytes of a step, against decoding without a draft; the bound of a machine whose
    time goes into reading weights, with a draft that is right whenever it can be.
    """

    tokens: int
    coverage: float
    ceiling: float
    head_bytes: int
    relative_speed: float


def sizes(
    candidates: Iterable[int], counts: Counter[int], held_out: Sequence[Conversation], vocab_size: int, *,
    always: Iterable[int] = (), num_speculative_tokens: int, hidden_size: int, verifier_bytes: int, layer_bytes: int,
) -> list[Size]:  # fmt: skip
    """Each candidate judged on held-out answers. Bytes as read for a step: ``layer_bytes`` of the draft without its head."""
    other, result = count(held_out), []
    for tokens in candidates:
        _, kept = build(counts, tokens, vocab_size, always)
        top, head = ceiling(held_out, kept, num_speculative_tokens), 2 * tokens * hidden_size
        step = verifier_bytes + num_speculative_tokens * (layer_bytes + head)
        result.append(Size(tokens, coverage(other, kept), top, head, top * verifier_bytes / step))
    return result


def tokenizer_fingerprint(folder: Path) -> str:
    """A hash of the verifier's tokenizer: counts of another one count other tokens."""
    files = [folder / name for name in ("tokenizer.json", "tokenizer.model", "tiktoken.model", "vocab.json")]
    digest = hashlib.sha256()
    for file in files:
        if file.is_file():
            digest.update(file.read_bytes())
    return digest.hexdigest()


def save_counts(folder: Path, counts: Counter[int], tokenizer: str, conversations: str) -> None:
    """``counts.json`` and, beside it, what was counted: fingerprints of tokenizer and conversations."""
    (folder / "counts.json").write_text(json.dumps({str(t): n for t, n in sorted(counts.items())}))
    source = {"tokenizer": tokenizer, "conversations": conversations, "tokens": sum(counts.values())}
    (folder / "counts_source.json").write_text(json.dumps(source, indent=1))


def load_counts(folder: Path, tokenizer: str) -> Counter[int]:
    """Counts that `save_counts` left. Raises UserError when they are of another tokenizer, or do not say of which."""
    source = folder / "counts_source.json"
    found = json.loads(source.read_text()).get("tokenizer", "none") if source.is_file() else "no counts_source.json"
    if found != tokenizer:
        raise UserError(
            f"{show(folder)}: these counts cannot be added",
            expected=f"counts of the tokenizer {tokenizer[:12]}",
            found=found[:24],
            fix="count that corpus with this verifier's tokenizer: run 01 and 03 on it",
        )
    return Counter(read_counts(folder / "counts.json"))


def save(folder: Path, d2t: np.ndarray, t2d: np.ndarray) -> None:
    """``d2t.npy`` and ``t2d.npy``, the names and form speculators' ``d2t_path`` and ``t2d_path`` take."""
    np.save(folder / "d2t.npy", d2t)
    np.save(folder / "t2d.npy", t2d)


def load(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    return np.load(folder / "d2t.npy", allow_pickle=False), np.load(folder / "t2d.npy", allow_pickle=False)
