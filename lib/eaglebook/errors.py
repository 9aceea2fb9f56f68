"""The exceptions a user is meant to see."""

from __future__ import annotations

import signal


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


class Interrupted(Exception):
    """SIGINT, SIGTERM or SIGHUP reached the runner."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.signum = signum
