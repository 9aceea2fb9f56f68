"""Files that grow a JSON object a line as work is done, so that whoever was killed goes on from there."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO, TypeVar

from eaglebook.errors import UserError

Row = TypeVar("Row")


def add(stream: TextIO, row: Any) -> None:
    """Append a dataclass as a line, at once."""
    stream.write(json.dumps(asdict(row)) + "\n")
    stream.flush()


def read(file: Path, row: Callable[..., Row]) -> list[Row]:
    """``row(**object)`` of every line; a torn last line (the writer was killed) is dropped and cut off the file.

    Raises UserError for any other line that is not one.
    """
    rows: list[Row] = []
    good = 0
    data = file.read_bytes()
    for line in data.splitlines(keepends=True):
        try:
            rows.append(row(**json.loads(line)))
        except (json.JSONDecodeError, TypeError, UnicodeDecodeError):
            if good + len(line) != len(data):
                raise UserError(
                    f"{file.name}: line {len(rows) + 1} is damaged",
                    expected="one object a line",
                    found=line[:80].decode(errors="replace"),
                    fix="delete the file and run the notebook again",
                ) from None
            with file.open("r+b") as stream:
                stream.truncate(good)
            break
        good += len(line)
    return rows
