"""What changed between versions of vLLM, for one draft: the table and the inspection of each version must agree."""

from __future__ import annotations

import json
from typing import Any

import drafts
import pytest
from drafts import flat, nested, shapes
from eaglebook.checkpoint import inspection, vllm_history, vllm_rules
from eaglebook.checkpoint.case import Case
from eaglebook.checkpoint.headers import Tensor
from eaglebook.checkpoint.source import Source
from eaglebook.checkpoint.verifier_config import read as read_verifier


def case(config: dict[str, Any], tmp_path, version: tuple[int, int] = vllm_rules.REFERENCE, **how: Any) -> Case:
    (tmp_path / "config.json").write_text(json.dumps(drafts.VERIFIER))
    tensors = {n: Tensor(n, dtype, shape, None, 0, 0) for n, (shape, dtype) in shapes(**how).items()}
    return inspection.examine(Source(tmp_path, config, tensors), read_verifier(tmp_path / "config.json"), version)


def concerned(config: dict[str, Any], tmp_path, **how: Any) -> dict[tuple[int, int], str]:
    return {
        c.since: c.here for c in vllm_history.changes(case(config, tmp_path, **how)) if c.here and "CPU" not in c.here
    }


def test_an_ordinary_draft_is_concerned_by_nothing_but_the_cpu(tmp_path) -> None:
    assert concerned(flat(), tmp_path) == {}
    assert [c.since for c in vllm_history.changes(case(flat(), tmp_path))] == sorted(
        c.since for c in vllm_history.changes(case(flat(), tmp_path))
    )


@pytest.mark.parametrize(
    ("config", "since", "word"),
    [
        (flat(norm_before_fc=True), (0, 19), "ignored"),
        (flat(fc_norm=True, norm_output=True), (0, 22), "fc_norm and norm_output"),
        (flat(eagle_aux_hidden_state_layer_ids=None), (0, 22), "default ids"),
        (flat(max_position_embeddings=64), (0, 28), "drafts nothing"),
        (flat(architectures=["Eagle3Qwen3ForCausalLM"]), (0, 25), "refused"),
        (nested({"model_type": "qwen3"}), (0, 25), "refused"),
        (flat(eagle_aux_hidden_state_layer_ids=[2, 4, 8], eagle_config=None), (0, 19), "never captured"),
    ],
)  # fmt: skip
def test_what_a_draft_uses_is_dated(config, since, word, tmp_path) -> None:
    found = concerned(config, tmp_path)
    assert word in found[since]


@pytest.mark.parametrize("flag", ["norm_before_fc", "fc_norm"])
def test_the_inspection_of_an_older_version_says_the_same(flag, tmp_path) -> None:
    config = flat(**{flag: True})
    since = next(c.since for c in vllm_history.changes(case(config, tmp_path)) if flag in c.what)
    assert getattr(case(config, tmp_path, since).view, flag)
    assert not getattr(case(config, tmp_path, (0, since[1] - 1)).view, flag)
