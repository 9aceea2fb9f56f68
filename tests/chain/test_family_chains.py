"""All notebooks on a small random verifier of each family, with the preset of the real one where there is one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import whole

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
OWN_SHAPE = {"draft_heads": 0, "draft_kv_heads": 0}  # the draft has the verifier's heads
PRESETS = {
    "llama": ("llama-3.1-8b", OWN_SHAPE),
    "qwen3": ("qwen3-8b", OWN_SHAPE),
    "qwen3_moe": ("qwen3-8b", {}),
    "gpt_oss": ("llama-3.1-8b", {}),
    # Four norms a layer magnify bf16's rounding: two engines differ by 5 % in it, by 0.02 % in float32.
    "gemma4": ("smollm2", OWN_SHAPE | {"dtype": "float32"}),
    "deepseek_v3": ("kimi-k2.5", {}),
    "kimi_k2": ("kimi-k2.5", {}),
}
# What hangs on no family is left to the Kimi chain: own faults and several loads.
SHORT = {
    "06_load_ladder": {"own_faults": 0},
    "07_serve": {"concurrency_sweep": [1], "kv_cache_gb": 0.5},
}


def preset(base: str, shape: dict[str, Any], folder: Path) -> Path:
    common = {"num_speculative_tokens_sweep": [], **shape}
    return whole.smaller(base, folder / "small.yaml", {"common": common, **SHORT})


@pytest.mark.parametrize("family", list(PRESETS))
def test_the_notebooks_take_every_family_to_a_served_draft(family: str, tmp_path: Path) -> None:
    run, done = whole.begin(family, tmp_path, preset(*PRESETS[family], tmp_path))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    for stem in whole.STEMS:
        whole.assert_succeeded(run, stem)
    whole.assert_served_as_trained(run)


def test_a_family_that_vllm_serves_no_draft_beside_is_told_so_first(tmp_path: Path) -> None:
    run, done = whole.begin("gemma3", tmp_path, preset("smollm2", OWN_SHAPE, tmp_path))
    assert done.returncode != 0
    assert "Gemma3ForCausalLM" in done.stdout + done.stderr
    assert not (run / "01_responses").exists()
    assert json.loads((run / "00_preflight.next" / "manifest.json").read_text())["status"] == "failed"
