"""Run one command so that nothing of it outlives us: ``python -m eaglebook.guard COMMAND …``.

vLLM and torchrun start children of their own, in sessions of their own. This small supervisor adopts orphans
(``PR_SET_CHILD_SUBREAPER``), is told by the kernel when its starter dies (``PR_SET_PDEATHSIG``), and ends the whole
tree on SIGTERM, SIGINT or when the command is over. Linux only; elsewhere it ends the descendants it can see.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from types import FrameType

import psutil

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def command(argv: list[str]) -> list[str]:
    """The command line that runs ``argv`` under guard. Start it with ``start_new_session=True``."""
    return [sys.executable, "-m", "eaglebook.guard", str(os.getpid()), *argv]


def end_tree(pid: int, grace_s: float = 10.0) -> list[int]:
    """Terminate, then kill, every descendant of ``pid``, not itself. Returns the pids that had to be killed."""
    try:
        children = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    return end(children, grace_s)


def end(processes: list[psutil.Process], grace_s: float = 10.0) -> list[int]:
    """Terminate, wait at most ``grace_s`` seconds, kill what is left. Returns the pids that had to be killed."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.terminate()
    _, alive = psutil.wait_procs(processes, timeout=grace_s)
    for process in alive:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(alive, timeout=5)
    return [process.pid for process in alive]


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def main(argv: list[str]) -> int:
    starter, argv = int(argv[0]), argv[1:]
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    if os.getppid() != starter:  # it died before the line above
        return 128 + signal.SIGTERM
    stopped_by = 0

    def stop(signum: int, frame: FrameType | None) -> None:
        nonlocal stopped_by
        stopped_by = signum
        with contextlib.suppress(ProcessLookupError):
            child.send_signal(signal.SIGINT if signum == signal.SIGINT else signal.SIGTERM)

    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # If the guard itself is killed, the kernel kills the command.
    child = subprocess.Popen(argv, preexec_fn=lambda: _as_child())
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    deadline = None
    while child.poll() is None:
        if stopped_by:
            deadline = deadline or time.monotonic() + 10
            if time.monotonic() > deadline:
                child.kill()
        time.sleep(0.05)
    end_tree(os.getpid(), grace_s=3)
    code = child.returncode
    return 128 - code if code < 0 else code


def _as_child() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
