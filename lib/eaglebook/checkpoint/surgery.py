"""Cut an existing draft to a smaller vocabulary: rows of ``lm_head`` by *target id*, ``d2t`` and ``t2d`` written anew.

A full-vocabulary head keeps row t for token t; a head that is reduced already keeps row j for token ``j + d2t[j]``. Slicing
by the offsets themselves (a fault seen in the field) takes other tokens' rows, and nothing reports it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eaglebook.checkpoint import mapping, strict_json, weights
from eaglebook.checkpoint.case import Case, is_size
from eaglebook.checkpoint.convert import Plan
from eaglebook.checkpoint.weights import Piece
from eaglebook.errors import UserError
from eaglebook.paths import show


@dataclass(frozen=True)
class Cut:
    """The chosen target ids, ascending, and the share of counted tokens they cover."""

    targets: tuple[int, ...]
    coverage: float
    kept_always: int


def choose(counts: Mapping[int, int], size: int, sayable: Iterable[int], always: Iterable[int] = ()) -> Cut:
    """The ``always`` ids, then the most frequent, ties to the lower id, until ``size``. Raises UserError when it cannot be filled."""
    possible = set(sayable)
    fixed = sorted(set(always) & possible)
    if len(possible) < size or len(fixed) > size:
        raise UserError(
            f"a draft vocabulary of {size} cannot be cut", expected=f"between {len(fixed)} tokens always kept and {len(possible)} that the draft has",
            found=str(size), fix="choose another --draft-vocab",
        )  # fmt: skip
    ranked = sorted(possible - set(fixed), key=lambda token: (-counts.get(token, 0), token))
    targets = sorted([*fixed, *ranked[: size - len(fixed)]])
    total = sum(counts.values())
    covered = sum(counts.get(token, 0) for token in targets)
    return Cut(tuple(targets), covered / total if total else 0.0, len(fixed))


def cut(case: Case, made: Plan, chosen: Cut) -> Plan:
    """A planned conversion with its head cut to the chosen target ids. Logits of kept tokens stay what they were."""
    rows = row_of_target(case)
    head = case.stored.get("lm_head.weight")
    vocab = case.spec.vocab_size.value
    if head is None or head.shape is None or not is_size(vocab):
        raise UserError(
            f"{show(case.source.path)}: no lm_head to cut",
            expected="an lm_head of its own",
            fix="give a draft that stores its head",
        )
    order = [rows[target] for target in chosen.targets]
    size = len(order)
    new = {
        "lm_head.weight": weights.rows(head, order, "lm_head.weight"),
        "d2t": Piece("d2t", "I64", (size,), data=mapping.offsets_of(chosen.targets)),
        "t2d": Piece("t2d", "BOOL", (vocab,), data=mapping.mask_of(chosen.targets, vocab)),
    }
    pieces = [part for part in made.pieces if part.name not in new]
    said = f"draft vocabulary: {len(rows)} → {size} tokens, {chosen.kept_always} kept always, coverage {chosen.coverage:.4f}"
    return replace(
        made, config=_resized(made.config, size), pieces=(*pieces, *new.values()), changes=(*made.changes, said)
    )


def row_of_target(case: Case) -> dict[int, int]:
    """Row of ``lm_head`` for each target token the draft can say."""
    if case.mapping is not None and "d2t" in case.stored:
        return {target: row for row, target in enumerate(case.mapping.targets)}
    return {token: token for token in range(case.rows("lm_head.weight") or 0)}


def read_counts(file: Path) -> dict[int, int]:
    """Token counts: the ``counts.json`` of 03, any JSON object or list of numbers, or lines ``id<TAB>count``. Raises UserError."""
    try:
        if file.stat().st_size > 10 * strict_json.MAX_CONFIG_BYTES:
            raise ValueError(f"{file.stat().st_size:,} bytes")
        text = file.read_text(encoding="utf-8")
        if text.lstrip()[:1] in "{[":
            loaded = json.loads(text)
            pairs: Iterable[Sequence[Any]] = loaded.items() if isinstance(loaded, dict) else enumerate(loaded)
        else:
            pairs = [line.split() for line in text.splitlines() if line.strip()]
        counts = {int(token): int(count) for token, count in pairs}
        if not counts or min(counts) < 0 or min(counts.values()) < 0:
            raise ValueError("no counts, or negative ones")
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise UserError(
            f"{show(file)}: not token counts", expected='{"id": count, …} as 03_vocab_mapping writes counts.json', found=str(error)[:200],
            fix="count tokens of served traffic, or give the artifacts of 03",
        ) from None  # fmt: skip
    return counts


def always_kept(folder: Path, what: Iterable[str]) -> set[int]:
    """Ids of special tokens (``special``) and of the chat template's own text (``template``), from a verifier's tokenizer.json."""
    kept: set[int] = set()
    what = set(what)
    unknown = what - {"special", "template"}
    if unknown:
        raise UserError(
            f"--keep {', '.join(sorted(unknown))} is not known",
            expected="special, template",
            fix="--keep special,template",
        )
    if not what:
        return kept
    file = folder / "tokenizer.json"
    if "special" in what:
        kept |= _special_ids(folder)
    if "template" in what:
        if not file.is_file():
            raise UserError(
                f"{show(file)}: not found",
                expected="the verifier's tokenizer",
                fix="--verifier FOLDER with its tokenizer.json",
            )
        kept |= _template_ids(folder, file)
    return kept


def _special_ids(folder: Path) -> set[int]:
    """Ids of the added tokens, from tokenizer.json or, for tiktoken models, from tokenizer_config.json. Raises UserError."""
    ids: set[int] = set()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            stated = json.loads((folder / name).read_text(encoding="utf-8"))
            listed, numbered = stated.get("added_tokens"), stated.get("added_tokens_decoder")
            ids |= {token["id"] for token in listed or () if isinstance(token, dict) and type(token.get("id")) is int}
            ids |= {int(token) for token in numbered or () if token.isdigit()}
    if not ids:
        raise UserError(
            f"{show(folder)}: no special tokens found", expected="added_tokens in tokenizer.json, or added_tokens_decoder in tokenizer_config.json",
            fix="--verifier FOLDER with its tokenizer files",
        )  # fmt: skip
    return ids


def _template_ids(folder: Path, file: Path) -> set[int]:
    """Tokens of the literal text of a chat template, between its Jinja expressions and inside their string literals."""
    import re

    from tokenizers import Tokenizer

    stated = folder / "chat_template.jinja"
    config = folder / "tokenizer_config.json"
    template = stated.read_text(encoding="utf-8") if stated.is_file() else ""
    if not template and config.is_file():
        value = json.loads(config.read_text(encoding="utf-8")).get("chat_template")
        template = value if isinstance(value, str) else ""
    literals = re.split(r"\{[{%#].*?[}%#]\}", template, flags=re.S)
    quoted = re.findall(r"'((?:[^'\\]|\\.)*)'|\"((?:[^\"\\]|\\.)*)\"", template)
    literals += [(a or b).replace("\\n", "\n") for a, b in quoted]
    tokenizer = Tokenizer.from_file(str(file))
    return {token for text in literals if text for token in tokenizer.encode(text, add_special_tokens=False).ids}


def _resized(config: Mapping[str, Any], size: int) -> dict[str, Any]:
    return {**config, "draft_vocab_size": size}
