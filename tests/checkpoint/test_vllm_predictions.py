"""Predicted = real: what `vllm_load.predict` says of a draft, against the loader of the installed vLLM.

Every stored tensor is filled with a number of its own, every parameter with a sentinel before loading, so that the judge
sees where each value went, what was cut, what was dropped, and what nobody filled.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import drafts
import pytest
from cases import CASES
from drafts import HIDDEN, VOCAB
from eaglebook.checkpoint import headers, vllm_load, vllm_rules
from vllm_judge import SENTINEL


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What vLLM does with every case, in one process."""
    base = tmp_path_factory.mktemp("judged")
    verifier = base / "verifier"
    verifier.mkdir()
    (verifier / "config.json").write_text(json.dumps(drafts.VERIFIER))
    folders = {}
    for number, (name, (config, tensors)) in enumerate(CASES.items()):
        marks = {tensor: i + 1 for i, tensor in enumerate(tensors)}
        folders[name] = str(drafts.write(base / f"draft{number}", config, tensors, marks))
    argv = [sys.executable, str(Path(__file__).with_name("vllm_judge.py")), str(verifier)]
    done = subprocess.run(argv, input=json.dumps(list(folders.values())), capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    answers = json.loads(done.stdout.strip().splitlines()[-1])
    return {name: answers[folder] | {"folder": folder} for name, folder in folders.items()}


@pytest.mark.parametrize("name", CASES)
def test_predicted_is_real(name: str, real: dict[str, dict[str, Any]]) -> None:
    config, stored = CASES[name]
    actual = real[name]
    tensors = headers.read_folder(Path(actual["folder"]))
    said = vllm_load.predict(config, tensors, target_vocab=VOCAB, target_hidden=HIDDEN, version=vllm_rules.REFERENCE)
    assert bool(said.stage) == bool(actual["stage"]), (said.stage, said.error, actual["error"])
    if actual["stage"]:
        assert _kind(said.error) in actual["error"], (said.error, actual["error"])
        return
    marks = {tensor: str(i + 1) for i, tensor in enumerate(stored)}
    reached = {mark: sum(values.get(mark, 0) for values in actual["found"].values()) for mark in marks.values()}
    check = _Check(actual["found"], marks, reached, stored)
    for outcome in said.tensors:
        check(outcome)
    unfilled = {parameter for parameter, values in actual["found"].items() if str(SENTINEL) in values}
    expected = {o.destination for o in said.tensors if o.fate in ("uninitialised", "left at default", "shared")}
    assert unfilled - {_unused_norm(p) for p in unfilled} == expected


class _Check:
    """One predicted outcome against the values that arrived."""

    def __init__(self, found: dict[str, Any], marks: dict[str, str], reached: dict[str, int], stored: drafts.Shapes):
        self.found, self.marks, self.reached, self.stored = found, marks, reached, stored

    def __call__(self, outcome: vllm_load.Outcome) -> None:
        name, fate = outcome.tensor, outcome.fate
        if name not in self.stored:
            assert fate in ("shared", "uninitialised", "left at default"), outcome
            return
        size, arrived = math.prod(self.stored[name][0]), self.reached[self.marks[name]]
        held: dict[str, Callable[[], bool]] = {
            "loaded": lambda: arrived == size and self.marks[name] in self.found[outcome.destination],
            "truncated": lambda: 0 < arrived < size,
            "dropped": lambda: arrived == 0,
            "skipped": lambda: arrived == 0,
        }
        assert held[fate](), (outcome, size, arrived)


def _unused_norm(parameter: str) -> str:
    """vLLM builds a hidden_norm in every layer and uses the first."""
    return parameter if parameter.endswith("hidden_norm.weight") and "layers.0." not in parameter else ""


def _kind(error: str) -> str:
    """The part of a predicted message that names its kind, as it stands in vLLM's own."""
    kinds = {
        "rope_parameters": "Missing required keys in `rope_parameters`",
        "Validation error for field": "Validation error for field", "TypeError": "TypeError",
        "not a multiple": "is not a multiple of",
        "not divisible": "is not divisible by num_kv_heads", "no module": "There is no module or parameter named",
        "size mismatch": "", "AssertionError": "AssertionError", "exceeds dimension size": "exceeds dimension size",
        "does not recognize": "does not recognize this architecture", "`model_type` key": "Should have a `model_type` key",
        "are not supported": "are not supported", "Unsupported activation": "Unsupported activation",
        "Unsupported model_type": "Unsupported model_type", "has no attribute": "has no attribute",
        "layer_types": "must be equal to the number of `layer_types`",
        "Expected one of": "Expected one of",
    }  # fmt: skip
    (kind,) = [text for key, text in kinds.items() if key in error][:1] or [error]
    return kind
