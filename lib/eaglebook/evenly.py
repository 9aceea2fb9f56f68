"""A few of many, evenly spread: what stands in order by kind keeps every kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

Item = TypeVar("Item")


def take(items: Sequence[Item], count: int) -> list[Item]:
    """``count`` of ``items`` in their order, the first among them; all of them for 0 or when there are no more."""
    if not count or count >= len(items):
        return list(items)
    return [items[i * len(items) // count] for i in range(count)]
