"""The record of what happened in one stage: written by the process that ran it, atomically, and never by papermill."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import subprocess
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import psutil
import yaml
from pydantic import BaseModel, ConfigDict

from eaglebook import machine, paths
from eaglebook.params import Notebook

Status = Literal["running", "succeeded", "failed", "timed_out", "killed"]

_HASHED_WHOLE_BYTES = 8_000_000_000  # above this an artifact folder is identified by names and sizes


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


def read(folder: Path) -> Manifest | None:
    """The manifest in a stage directory, or None when there is none or it is damaged."""
    try:
        return Manifest.model_validate_json((folder / "manifest.json").read_bytes())
    except (OSError, ValueError):
        return None


def write(folder: Path, manifest: Manifest) -> None:
    write_atomically(folder / "manifest.json", paths.scrub(manifest.model_dump_json(indent=1)))


def write_atomically(file: Path, text: str) -> None:
    scratch = file.with_name(f".{file.name}.{os.getpid()}")
    scratch.write_text(text, encoding="utf-8")
    scratch.replace(file)


def describe_artifacts(folder: Path) -> list[Artifact]:
    """Every file directly in ``artifacts/`` and every folder in it, with bytes and sha256."""
    described = []
    for path in sorted((folder / "artifacts").iterdir()):
        if path.is_file():
            described.append(Artifact(path=path.name, bytes=path.stat().st_size, sha256=file_sha256(path)))
            continue
        files = sorted(f for f in path.rglob("*") if f.is_file() and not f.is_symlink())
        total = sum(f.stat().st_size for f in files)
        whole = total <= _HASHED_WHOLE_BYTES
        listing = [(f.relative_to(path).as_posix(), file_sha256(f) if whole else f.stat().st_size) for f in files]
        described.append(
            Artifact(
                path=path.name + "/",
                bytes=total,
                files=len(files),
                sha256=digest(listing),
                digest="contents" if whole else "names and sizes",
            )
        )
    return described


def output_fingerprint(artifacts: list[Artifact]) -> str:
    return digest([(a.path, a.sha256) for a in artifacts])


def new(stem: str, run: str, params: Notebook, found: Mapping[str, str], mark: str) -> Manifest:
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


def close(manifest: Manifest, folder: Path, status: Status, started: float) -> None:
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


def plain(value: Any) -> Any:
    """Numbers of numpy and torch as plain JSON numbers, dataclasses as objects."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return plain(dataclasses.asdict(value))
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return value.item() if hasattr(value, "item") else value


def _json(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text()) if file.is_file() else {}


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def file_sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _commit() -> str:
    """The commit of the project, with ``+`` when files differ from it; "" outside git."""

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
