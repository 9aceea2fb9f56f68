"""One notebook, executed by papermill in a process of its own, with a status one can trust.

papermill's own record cannot be: after a timeout or a dead kernel the saved notebook says that every cell completed
(papermill 2.7). Here the exit code decides, the manifest is ours, and whatever the notebook started is ended: every
process of an attempt carries the attempt's token in its environment.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import nbformat
import psutil

from eaglebook import guard, machine, manifests, paths, report, runs
from eaglebook.errors import Interrupted, UserError
from eaglebook.manifests import Manifest, Status
from eaglebook.params import Notebook

_PAPERMILLS = {"injected-parameters", "papermill-error-cell-tag"}  # cells that the notebook as written does not have
_TOKEN = "EAGLEBOOK_TOKEN"
_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_DEAD_KERNEL = 138  # papermill's exit code when the kernel died (papermill 2.7, cli.py)


def run_stage(
    stem: str, params: Notebook, run_dir: Path, *, force: bool = False, say: Callable[[str], None] = print
) -> Manifest:
    """Execute one stage, or skip it when a succeeded one matches. Returns its manifest; never raises for a failed cell.

    The attempt works in ``NN_stage.next`` and is renamed on success, so a failed or killed rerun loses nothing.
    """
    for upstream in runs.needed(stem, params):
        runs.find_upstream(stem, upstream, run_dir, params.preset)
    runs.repair(run_dir, stem)
    found = runs.inputs(stem, params, run_dir)
    mark = runs.fingerprint(stem, params, found)
    good = manifests.read(runs.stage_dir(run_dir, stem))
    if good and good.status == "succeeded" and good.fingerprint == mark and not force:
        return good
    folder = runs.next_dir(run_dir, stem)
    before = manifests.read(folder)
    if before is not None:
        if before.alive:
            raise UserError(
                f"{stem} is being run by another process", found=f"pid {before.pid}", fix="wait for it, or stop it"
            )
        sweep(before.token)  # what a killed runner left behind
        if before.status == "succeeded" and before.fingerprint == mark and not force:  # killed just before the swap
            runs.swap_in(run_dir, stem)
            return before
    unfinished = folder.exists()
    resumes = runs.prepare(folder, mark, keep=not force)
    if resumes:
        say(f"  goes on from the artifacts of an unfinished attempt in {paths.show(folder)}")
    elif unfinished and not force:
        left = runs.set_aside(folder)
        where = f"; checkpoints of an attempt before are in {paths.show(left)}" if left.exists() else ""
        say(f"  begins anew: parameters, inputs or code are not those of the unfinished attempt{where}")
    manifest = manifests.new(stem, run_dir.name, params, found, mark)
    manifest.token, manifest.machine = secrets.token_hex(8), machine.card()
    manifests.write_params(folder, params)
    manifests.write(folder, manifest)
    began = time.time()
    interrupted: Interrupted | None = None
    with _signals_raise_once():
        try:
            manifest.exit_code = _papermill(stem, params, folder, manifest.token, say)
        except Interrupted as error:
            interrupted = error
            manifest.exit_code = 128 + error.signum
            manifest.error = str(error)
        finally:
            sweep(manifest.token)
        status: Status = "succeeded" if manifest.exit_code == 0 else "killed" if interrupted else "failed"
        if status == "failed":
            status, manifest.failing_cell, manifest.error = _diagnose(folder, manifest.exit_code or 0)
        if status == "succeeded" and not (folder / "metrics.json").is_file():
            status, manifest.error = "failed", "the notebook ended without run.finish(...)"
        manifests.close(manifest, folder, status, began)
        _scrub_notebook(folder / "notebook.ipynb")
        report.write_stage_report(folder, manifest)
        manifests.write(folder, manifest)
        if status == "succeeded":
            runs.swap_in(run_dir, stem)
    if interrupted:
        raise interrupted
    return manifest


def sweep(token: str) -> list[int]:
    """End every process that carries ``token`` in its environment. Returns the pids that had to be killed."""
    if not token:
        return []
    mine = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and process.environ().get(_TOKEN) == token:
                mine.append(process)
    return guard.end(mine, grace_s=20)  # a guard needs up to 18 s to end its own tree


def _papermill(stem: str, params: Notebook, folder: Path, token: str, say: Callable[[str], None]) -> int:
    """Run papermill on the notebook, its log to ``log.txt``. Returns its exit code."""
    progress_file = folder / ".progress"
    progress_file.unlink(missing_ok=True)
    environment = os.environ | {
        _TOKEN: token,
        "EAGLEBOOK_STAGE_DIR": str(folder),
        "EAGLEBOOK_PREFIX": sys.prefix,
        "EAGLEBOOK_PROGRESS": str(progress_file),
        "EAGLEBOOK_OUTPUTS": str(paths.outputs()),
        "EAGLEBOOK_MODELS": str(paths.models()),
        "SPT_NOENV": "1",  # setproctitle, used by vLLM, would overwrite the environment that sweep looks at
        "PYTHONUNBUFFERED": "1",
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
    }
    argv = [
        sys.executable,
        "-m",
        "papermill",
        str(paths.NOTEBOOKS / f"{stem}.ipynb"),
        str(folder / "notebook.ipynb"),
        "-f",
        str(folder / "params.yaml"),
        "--kernel",
        "python3",
        "--cwd",
        str(paths.NOTEBOOKS),
        "--execution-timeout",
        str(params.cell_timeout_s),
        "--start-timeout",
        "120",
        "--log-output",
        "--no-progress-bar",
    ]
    with (folder / "log.txt").open("wb") as log:
        process = guard.start(argv, env=environment, stdout=log, stderr=subprocess.STDOUT)
        try:
            last = ""
            while process.poll() is None:
                time.sleep(0.2)
                line = _progress_line(progress_file)
                if line != last:
                    say(line)
                    last = line
            return process.returncode
        finally:
            progress_file.unlink(missing_ok=True)
            guard.stop(process, signal.SIGINT)


def _progress_line(file: Path) -> str:
    try:
        return str(json.loads(file.read_text())["line"])
    except (OSError, ValueError, KeyError):
        return ""


@contextlib.contextmanager
def _signals_raise_once() -> Iterator[None]:
    """Turn the first SIGINT, SIGTERM or SIGHUP into `Interrupted`; ignore the impatient ones until all is put away."""

    def raise_once(signum: int, frame: FrameType | None) -> None:
        for each in _STOPPING:
            signal.signal(each, signal.SIG_IGN)
        raise Interrupted(signum)

    before = {each: signal.signal(each, raise_once) for each in _STOPPING}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _diagnose(folder: Path, exit_code: int) -> tuple[Status, str, str]:
    """Status, failing cell and first line of the error of an attempt that did not exit with 0."""
    log = (folder / "log.txt").read_text(errors="replace")
    if exit_code == _DEAD_KERNEL or "DeadKernelError" in log or "Kernel died" in log:
        return "failed", "", "the kernel died (out of memory, or a crash in native code); see log.txt"
    if "CellTimeoutError" in log or "A cell timed out" in log:
        return "timed_out", "", "a cell ran over cell_timeout_s; see log.txt"
    with contextlib.suppress(OSError, ValueError, nbformat.reader.NotJSONError):
        cells = nbformat.read(folder / "notebook.ipynb", as_version=4).cells
        own = [c for c in cells if not _PAPERMILLS & set(c.metadata.get("tags", []))]
        for number, cell in enumerate(own):
            for output in cell.get("outputs", []):
                if output.output_type == "error":
                    tags = ", ".join(cell.metadata.get("tags", []))
                    name = f"cell {number}{f' ({tags})' if tags else ''}"
                    return "failed", name, paths.scrub(f"{output.ename}: {output.evalue}")
    lines = [line for line in log.splitlines() if line.strip()]
    return "failed", "", paths.scrub(lines[-1] if lines else f"papermill ended with code {exit_code}")


def _scrub_notebook(file: Path) -> None:
    """Take this machine's paths out of an executed notebook: it is shared as it is."""
    if file.is_file():
        text = file.read_text(encoding="utf-8")
        with contextlib.suppress(ValueError):
            json.loads(text)
            manifests.write_atomically(file, paths.scrub(text))
