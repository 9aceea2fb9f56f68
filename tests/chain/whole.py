"""A whole run, 00 to 07, on a random verifier: started as a user starts it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import mocks
import yaml
from eaglebook import manifests, paths
from eaglebook.params import STAGES

STEMS = list(STAGES)[:8]
SIZES = paths.ROOT / "tests" / "kimi-mock.yaml"


def begin(family: str, folder: Path, preset: Path = SIZES) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """Build ``family``'s verifier in ``folder`` and run the notebooks on it. Returns the run's folder and how it went."""
    mocks.build(family, folder / "verifier", mocks.tokenizer())
    argv = [
        sys.executable, "-m", "eaglebook.cli", "run", "--preset", str(preset), "--run-dir", str(folder / "out"),
        "--set", f"common.verifier_name_or_path={folder / 'verifier'}", "--to", "07",
    ]  # fmt: skip
    environment = os.environ | {
        "EAGLEBOOK_MODELS": str(folder / "models"), "VLLM_MLA_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }  # fmt: skip
    return folder / "out", subprocess.run(argv, capture_output=True, text=True, timeout=1700, env=environment)


def smaller(base: str, file: Path, changes: dict[str, dict[str, Any]]) -> Path:
    """The mock's sizes, and ``changes`` to them by block, over another preset, as ``file``."""
    blocks = yaml.safe_load(SIZES.read_text()) | {"base": base}
    for stem, values in changes.items():
        blocks[stem] |= values
    file.write_text(yaml.safe_dump(blocks))
    return file


def metrics(run: Path, stem: str) -> dict[str, Any]:
    return json.loads((run / stem / "metrics.json").read_text())


def assert_succeeded(run: Path, stem: str) -> None:
    """The stage says so, and each check of it."""
    manifest = manifests.read(run / stem)
    assert manifest is not None
    assert manifest.status == "succeeded"
    assert manifest.checks
    assert all(manifest.checks.values())


def assert_served_as_trained(run: Path) -> None:
    """Something is accepted, as much as was estimated offline, and no answer is another one."""
    served = metrics(run, "07_serve")
    assert served["acceptance"]["heldout"]["mean_acceptance_length"] > 1.1, "the mocks are easy to guess"
    assert abs(served["train_serve_gap"]) <= 0.05
    assert served["answers_identical"] == served["answers_compared"] > 0
