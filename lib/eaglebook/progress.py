"""A plain progress line: by time, not by tick; the same in JupyterLab, in a log and in a report."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path


class Progress:
    """Counts items (and tokens) towards a total and prints a line at most every ``every_s`` seconds.

    The last line is also left in the file that ``EAGLEBOOK_PROGRESS`` names, for the process that runs the notebook.
    """

    def __init__(self, what: str, total: int, *, start: int = 0, unit: str = "", every_s: float = 15.0) -> None:
        self.what, self.total, self.done, self.unit, self.every_s = what, total, start, unit, every_s
        self.tokens = 0
        self.began = self._said = time.monotonic()
        self._start = start

    def step(self, count: int = 1, *, tokens: int = 0, note: str = "") -> None:
        self.done += count
        self.tokens += tokens
        publish(self.line(note))
        if time.monotonic() - self._said >= self.every_s:
            self._said = time.monotonic()
            print(self.line(note), flush=True)

    def line(self, note: str = "") -> str:
        seconds = time.monotonic() - self.began
        parts = [f"{self.what} {self.done}/{self.total} {self.unit}".rstrip()]
        if self.tokens:
            parts.append(f"{self.tokens / max(seconds, 1e-9):,.0f} tokens/s")
        if self._start + 8 <= self.done < self.total:
            parts.append(f"{seconds / (self.done - self._start) * (self.total - self.done):.0f} s left")
        return " · ".join([*parts, note] if note else parts)

    def close(self) -> float:
        """Print the last line. Returns the seconds since the start."""
        seconds = time.monotonic() - self.began
        print(f"{self.line()} · {seconds:.1f} s", flush=True)
        return seconds


def publish(line: str) -> None:
    """Tell the runner, if there is one, what is going on."""
    target = os.environ.get("EAGLEBOOK_PROGRESS")
    if target:
        scratch = Path(f"{target}.{os.getpid()}")
        scratch.write_text(json.dumps({"time": time.time(), "line": line}))
        scratch.replace(target)
