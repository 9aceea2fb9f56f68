"""JSON of strangers: what no reader can use is refused while it is read."""

from __future__ import annotations

import json
from typing import Any

MAX_DIGITS, MAX_DEPTH = 18, 64
MAX_CONFIG_BYTES = 10_000_000  # the largest published configs, with per-layer quantisation lists, stay below 1 MB


def loads(text: str | bytes, **options: Any) -> Any:
    """As json.loads. ValueError also for whole numbers of more than 18 digits, lone surrogates, 64 levels of nesting."""
    value = json.loads(text, parse_int=_whole, **options)
    _check(value, 0)
    return value


def _whole(text: str) -> int:
    if len(text.lstrip("-")) > MAX_DIGITS:
        raise ValueError(f"a whole number of {len(text)} digits")
    return int(text)


def _check(value: Any, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise ValueError(f"nested more than {MAX_DEPTH} deep")
    if isinstance(value, str):
        value.encode()  # UnicodeEncodeError is a ValueError
    elif isinstance(value, dict):
        for key, inner in value.items():
            key.encode()
            _check(inner, depth + 1)
    elif isinstance(value, list):
        for inner in value:
            _check(inner, depth + 1)
