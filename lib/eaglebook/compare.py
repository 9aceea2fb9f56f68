"""Runs side by side, from their manifests alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from eaglebook import manifests, paths, runs
from eaglebook.errors import UserError
from eaglebook.manifests import Manifest
from eaglebook.params import STAGES

_NOT_A_SETTING = {"preset", "run_dir"}


@dataclass(frozen=True)
class Served:
    """A run whose serving stage succeeded."""

    name: str
    manifests: dict[str, Manifest]

    @property
    def metrics(self) -> dict[str, Any]:
        return self.manifests["07_serve"].metrics

    @property
    def benchmark_length(self) -> float:
        """Mean acceptance length on the benchmark the run was measured with."""
        return float(self.acceptance[self.metrics["benchmark"]]["mean_acceptance_length"])

    @property
    def acceptance(self) -> dict[str, Any]:
        """Summaries by set of prompts: ``heldout`` and every benchmark."""
        return self.metrics["acceptance"]

    def row(self) -> dict[str, Any]:
        """One line of the comparison table."""
        machine = self.manifests["07_serve"].machine
        minutes = sum(m.seconds for m in self.manifests.values()) / 60
        return {
            "run": self.name,
            "preset": self.manifests["07_serve"].preset,
            "held-out length": float(self.acceptance["heldout"]["mean_acceptance_length"]),
            "K": int(self.metrics["num_speculative_tokens"]),
            "benchmark": self.metrics["benchmark"],
            "benchmark length": self.benchmark_length,
            "position 1": float(self.acceptance[self.metrics["benchmark"]]["position_rates"][0]),
            "speed-up": float(self.metrics["speed_up"]),
            "in flight": int(self.metrics["speed_up_concurrency"]),
            "minutes": float(minutes),
            "machine": f"{machine.get('processor', '?')} × {machine.get('cores', '?')}",
            "commit": self.manifests["07_serve"].commit or "?",
        }


def collect(names: Sequence[str] = ()) -> list[Served]:
    """Served runs below outputs: those named, else all. Raises UserError when one is missing or there are none."""
    folders = [paths.outputs() / name for name in names] or runs.run_dirs()
    found = []
    for folder in folders:
        done = {s: m for s in STAGES if (m := manifests.read(runs.stage_dir(folder, s))) and m.status == "succeeded"}
        if "07_serve" in done and "acceptance" in done["07_serve"].metrics:  # older ones named it otherwise
            found.append(Served(folder.name, done))
        elif names:
            raise UserError(
                f"run {folder.name!r} has no finished 07_serve that can be compared",
                expected="a run that was served, by this version of the workbook",
                found=", ".join(done) or "nothing",
                fix=f"eaglebook run --run-dir outputs/{folder.name}",
            )
    if not found:
        raise UserError(
            "no run was served yet",
            expected="a finished 07_serve below outputs",
            found="none",
            fix="eaglebook run --preset smoke",
        )
    return found


def differences(found: Sequence[Served]) -> list[dict[str, str]]:
    """Parameters, inputs and versions that are not equal in all runs, one row each."""
    values: dict[str, dict[str, str]] = {}
    for served in found:
        for stem, manifest in served.manifests.items():
            for key, value in manifest.params.items():
                if key not in _NOT_A_SETTING and key in STAGES[stem].model_fields:
                    values.setdefault(f"{stem}.{key}", {})[served.name] = json.dumps(value)
            for key, mark in manifest.inputs.items():
                values.setdefault(f"{stem}: input {key}", {})[served.name] = mark[:8]
        for package, version in served.manifests["07_serve"].versions.items():
            values.setdefault(f"version of {package}", {})[served.name] = version
    names = [served.name for served in found]
    return [
        {"setting": key, **{name: by_run.get(name, "") for name in names}}
        for key, by_run in values.items()
        if len({by_run.get(name, "") for name in names}) > 1
    ]
