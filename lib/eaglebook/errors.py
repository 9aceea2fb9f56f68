"""The one exception a user is meant to see."""

from __future__ import annotations


class UserError(Exception):
    """Something the user can fix. The message names the file, what was expected and found, and the next command."""

    def __init__(self, what: str, *, expected: str = "", found: str = "", fix: str = "") -> None:
        lines = [what]
        if expected:
            lines.append(f"  expected: {expected}")
        if found:
            lines.append(f"  found:    {found}")
        if fix:
            lines.append(f"  next:     {fix}")
        super().__init__("\n".join(lines))
