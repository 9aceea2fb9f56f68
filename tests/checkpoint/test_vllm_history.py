"""How a draft fares from version to version: each stretch is what the inspection of its versions says."""

from __future__ import annotations

import json
from typing import Any

import drafts
import pytest
from cases import plus
from drafts import HIDDEN, flat, nested, shapes
from eaglebook.checkpoint import inspection, vllm_history, vllm_rules
from eaglebook.checkpoint.case import Case
from eaglebook.checkpoint.headers import Tensor
from eaglebook.checkpoint.source import Source
from eaglebook.checkpoint.verifier_config import read as read_verifier

INPUT_NORM = plus({"input_norm.weight": (3 * HIDDEN,)})
FC_NORMS = plus({f"fc_norm.{i}.weight": (HIDDEN,) for i in range(3)})


def case(config: dict[str, Any], tmp_path, stored: drafts.Shapes | None = None) -> Case:
    (tmp_path / "config.json").write_text(json.dumps(drafts.VERIFIER))
    tensors = {n: Tensor(n, dtype, shape, None, 0, 0) for n, (shape, dtype) in (stored or shapes()).items()}
    return inspection.examine(Source(tmp_path, config, tensors), read_verifier(tmp_path / "config.json"))


def test_an_ordinary_draft_changes_once_when_cpus_begin_to_draft(tmp_path) -> None:
    told = vllm_history.chapters(case(flat(), tmp_path))
    assert [(c.since, c.until, c.outcome, c.on_a_cpu) for c in told] == [
        ((0, 16), (0, 21), "loads", False),
        ((0, 22), (0, 33), "loads", True),
    ]


# What such a draft meets before the version that knows it, and from which version on it loads without a word.
CHANGES = {
    "norm_before_fc": (flat(norm_before_fc=True), INPUT_NORM, (0, 19), "stops at load"),
    "fc_norm": (flat(fc_norm=True), FC_NORMS, (0, 22), "stops at load"),
    "norm_output": (flat(norm_output=True), None, (0, 22), "loads"),
    "an architecture of 0.25": (flat(architectures=["Eagle3Qwen3ForCausalLM"]), None, (0, 25), "stops at"),
    "nested Qwen3": (nested({"model_type": "qwen3"}), shapes(qk_norm=True), (0, 25), "stops at"),
    "the last layer's output": (flat(eagle_aux_hidden_state_layer_ids=[2, 4, 8], eagle_config=None), None, (0, 19), "loads"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_draft_uses_is_dated(name, tmp_path) -> None:
    config, stored, since, before = CHANGES[name]
    told = vllm_history.chapters(case(config, tmp_path, stored))
    earlier = next(c for c in told if c.since < since <= next(v for v in vllm_history.VERSIONS if v > c.until))
    later = next(c for c in told if c.since == since)
    assert earlier.outcome.startswith(before), earlier
    assert earlier.outcome != later.outcome or later.gone, (earlier, later)


@pytest.mark.parametrize("version", vllm_history.VERSIONS)
def test_every_stretch_is_what_the_inspection_of_its_versions_says(version, tmp_path) -> None:
    config = flat(norm_before_fc=True, eagle_aux_hidden_state_layer_ids=None, max_position_embeddings=64)
    start = case(config, tmp_path, INPUT_NORM)
    told = [c for c in vllm_history.chapters(start) if c.since <= version <= c.until]
    assert len(told) == 1
    stage = inspection.examine(start.source, start.verifier, version).prediction.stage
    assert told[0].outcome.startswith(f"stops at {stage}" if stage else "loads")
    assert told[0].on_a_cpu == (version >= vllm_rules.CPU_SERVES)
