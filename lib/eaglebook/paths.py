"""Where things are. Nothing depends on the working directory; nothing shown to people holds an absolute path."""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import socket
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = ROOT / "notebooks"
PARAMS = ROOT / "params"
LIBRARY = Path(__file__).resolve().parents[1]
DATA = LIBRARY / "eaglebook" / "data"


def outputs() -> Path:
    """The outputs folder: ``outputs/`` of the project, or ``EAGLEBOOK_OUTPUTS`` (a bigger disk, a test)."""
    return Path(os.environ.get("EAGLEBOOK_OUTPUTS") or ROOT / "outputs").resolve()


def models() -> Path:
    """Where materialised verifiers are cached, shared by all runs: ``EAGLEBOOK_MODELS``, else ``outputs/_models``."""
    return Path(os.environ.get("EAGLEBOOK_MODELS") or outputs() / "_models").resolve()


def resolve(path: str | Path) -> Path:
    """A path from a params file: ``~`` expanded, relative to the project's root. ``outputs/…`` follows `outputs`."""
    path = Path(path).expanduser()
    if path.parts[:1] == ("outputs",):
        return outputs().joinpath(*path.parts[1:])
    return path if path.is_absolute() else ROOT / path


def show(path: str | Path) -> str:
    """How a path is written in a report, manifest or message: below outputs or the project, else its last two parts."""
    path = Path(path)
    for base, prefix in ((outputs(), "outputs"), (ROOT, "")):
        if path.is_relative_to(base):
            return (Path(prefix) / path.relative_to(base)).as_posix()
    return path.as_posix() if not path.is_absolute() else ".../" + "/".join(path.parts[-2:])


def scrub(text: str) -> str:
    """Text without this machine's paths, host name and user name (reports and manifests are shared)."""
    import sys

    known = {str(outputs()): "outputs", str(ROOT): ".", sys.prefix: "<env>", sys.base_prefix: "<python>"}
    for base, name in sorted(known.items(), key=lambda item: -len(item[0])):  # the innermost folder first
        text = text.replace(base, name)
    if len(str(Path.home())) > 1:
        text = text.replace(str(Path.home()), "~")
    text = re.sub(r"/tmp/[^\s'\"\\:,)]*", "<tmp>", text)  # a backslash ends it: in JSON it belongs to what follows
    host, user = socket.gethostname(), ""
    with contextlib.suppress(KeyError, OSError):  # a uid without a name, in a container
        user = getpass.getuser()
    if len(host) > 3:
        text = re.sub(rf"\b{re.escape(host)}\b", "<host>", text)
    if len(user) > 3 and user != "root":
        text = re.sub(rf"\b{re.escape(user)}\b", "<user>", text)
    return text
