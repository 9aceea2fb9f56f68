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
from typing import Any

import psutil

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def start(argv: list[str], **options: Any) -> subprocess.Popen[Any]:
    """Start ``argv`` under guard, in a session of its own; ``options`` as for ``subprocess.Popen``. End it with `stop`."""
    guarded = [sys.executable, "-m", "eaglebook.guard", str(os.getpid()), *argv]
    return subprocess.Popen(guarded, stdin=subprocess.DEVNULL, start_new_session=True, **options)


def stop(process: subprocess.Popen[Any], signum: signal.Signals = signal.SIGTERM) -> None:
    """End a guarded command and everything it started, and wait for it. Nothing happens when it is over already."""
    if process.poll() is not None:
        return
    process.send_signal(signum)
    try:
        process.wait(25)  # the guard gives the command 10 s, then its descendants 3 s, before it kills
    except subprocess.TimeoutExpired:
        end_tree(process.pid, grace_s=0)
        process.kill()
        process.wait()


def end_tree(pid: int, grace_s: float = 10.0) -> list[int]:
    """Terminate, then kill, every descendant of ``pid``, not itself. Returns the pids that had to be killed."""
    return end(descendants(pid), grace_s)


def descendants(pid: int) -> list[psutil.Process]:
    """Every process below ``pid``; none when it is gone."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


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
    signal.signal(signal.SIGHUP, stop)
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
