"""Kimi-K2.5's architecture, small and random, through all notebooks with the Kimi preset and smaller sizes.

Left out by name, as vLLM's CPU build cannot: packed INT4 experts (its kernels want AMX), and a draft beside latent attention
in its absorbed form (block sizes 16 and 32 have nothing in common), hence ``VLLM_MLA_DISABLE``.
"""

from __future__ import annotations

import json
from pathlib import Path

import mocks
import pytest
import whole
from eaglebook import verifier
from eaglebook.checkpoint import headers

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    out, done = whole.begin("kimi_k25", tmp_path_factory.mktemp("kimi"))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    return out


@pytest.mark.parametrize("stem", whole.STEMS)
def test_every_stage_succeeds_and_every_check_of_it(run: Path, stem: str) -> None:
    whole.assert_succeeded(run, stem)


def test_the_verifier_is_read_through_its_nesting_and_prefix(run: Path) -> None:
    model = verifier.resolve(str(run.parent / "verifier"))
    assert (model.embed_key, model.head_key) == (
        "language_model.model.embed_tokens.weight",
        "language_model.lm_head.weight",
    )
    assert len(list(model.path.glob("*.safetensors"))) > 1, "sharded"
    states = run / "02_hidden_states" / "artifacts" / "hidden_states"
    shapes = {headers.read_header(f)["hidden_states"].shape[1:] for f in states.glob("*.safetensors")}
    assert shapes == {(4, mocks.HIDDEN)}
    assert whole.metrics(run, "02_hidden_states")["engine"] == "vllm"
    assert max(whole.metrics(run, "02_hidden_states")["engine_errors"]) < 0.05


def test_the_export_is_the_published_layout_with_a_head_dim_of_its_own(run: Path) -> None:
    flat = run / "05_checkpoint" / "artifacts" / "flat"
    config = json.loads((flat / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert (config["num_attention_heads"], config["head_dim"], config["hidden_size"]) == (2, 128, mocks.HIDDEN)
    rope = config.get("rope_parameters") or config["rope_scaling"]
    assert (rope["rope_type"], rope["factor"]) == ("yarn", 64.0)
    assert headers.read_folder(flat)["midlayer.self_attn.q_proj.weight"].shape == (256, 2 * mocks.HIDDEN)


def test_the_draft_is_served_as_it_was_trained(run: Path) -> None:
    whole.assert_served_as_trained(run)
