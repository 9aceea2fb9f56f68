"""Configs as published drafts have them, written down from their public values: what is said of each, and what vLLM does.

Precision matters as much as recall here: these drafts work somewhere, and a checker that cries wolf is switched off.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import drafts
import pytest
from eaglebook.checkpoint import inspection

KEY = "eagle_aux_hidden_state_layer_ids"


def head(
    hidden: int, inner: int, heads: int, kv: int, vocab: int, draft_vocab: int | None = 32000, **rest: Any
) -> dict[str, Any]:
    """A flat one-layer config in the words of SpecForge and the original code; None leaves a key out."""
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": hidden, "intermediate_size": inner,
        "num_attention_heads": heads, "num_key_value_heads": kv, "num_hidden_layers": 1, "vocab_size": vocab, "draft_vocab_size": draft_vocab,
        "hidden_act": "silu", "rms_norm_eps": 1e-6, "head_dim": 128, "rope_theta": 1000000.0, "rope_scaling": None, "torch_dtype": "bfloat16",
        "max_position_embeddings": 131072, "tie_word_embeddings": False, **rest,
    }  # fmt: skip
    return {key: value for key, value in config.items() if value is not None or key == "rope_scaling"}


def eagle(*ids: int, **rest: Any) -> dict[str, Any]:
    return {"eagle_config": {KEY: list(ids), "use_aux_hidden_state": True, **rest}}


def speculator(layer: dict[str, Any], **rest: Any) -> dict[str, Any]:
    config = drafts.nested(
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            },
            **layer,
        }
    )
    return {**config, "draft_vocab_size": 32000, **rest}


MODELOPT = {"use_input_layernorm_in_first_layer": True, "use_last_layernorm": True, "use_mtp_layernorm": False}
LLAMA_8B = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
            "vocab_size": 128256, "max_position_embeddings": 131072}  # fmt: skip

# name -> config, layers of its verifier (0: unknown), errors and warnings
PUBLISHED: dict[str, tuple[dict[str, Any], int, str]] = {
    "Kimi-K2, SpecForge": (head(7168, 18432, 64, 64, 163840, model_type="kimi_k2", **eagle(2, 30, 58)), 61, ""),
    "Kimi-K2, verifier unknown": (head(7168, 18432, 64, 64, 163840, **eagle(2, 30, 58)), 0, "aux-ids-nested-only"),
    "Kimi-K2.5, TorchSpec": (
        head(7168, 12288, 64, 64, 163840, 163840, max_position_embeddings=262144, rope_theta=50000.0, **eagle(1, 29, 57),
             rope_scaling={"type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096}), 61,
        "aux-ids-nested-only aux-ids-count-outputs"),
    "Kimi-K3, latent attention": (
        head(7168, 18432, 64, 64, 163840, 163840, architectures=["Eagle3DeepseekV2ForCausalLM"], model_type="kimi_k2", head_dim=None,
             q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, **eagle(1, 45, 89, **MODELOPT)), 93,
        "aux-ids-nested-only aux-ids-count-outputs"),
    "Qwen3-235B, SpecForge": (head(4096, 24576, 64, 4, 151936, max_position_embeddings=40960, **eagle(1, 46, 90)), 94,
                              "aux-ids-nested-only aux-ids-count-outputs"),
    "the same, lifted by a converter": (
        speculator({"hidden_size": 4096, "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936,
                    "max_position_embeddings": 40960}, architectures=["Eagle3Speculator"], eagle_aux_hidden_state_layer_ids=[1, 46, 90]), 94,
        "aux-ids-reading-unknown"),
    "ids of its own choice, trained by speculators": (
        speculator({**LLAMA_8B, "max_position_embeddings": 131072}, eagle_aux_hidden_state_layer_ids=[1, 15, 28]), 32, ""),
    "Llama-3.1-8B, the original": (
        head(4096, 14336, 32, 8, 128256, architectures=["LlamaForCausalLM"], head_dim=None, rope_theta=None, max_position_embeddings=2048,
             rms_norm_eps=1e-5, torch_dtype="float16"), 32,
        "head-dim-implicit aux-ids-missing rope-implicit max-positions-short"),
    "Llama-3.1-8B, speculators 0.9": (speculator(LLAMA_8B, eagle_aux_hidden_state_layer_ids=[2, 16, 29]), 32, ""),
    "Llama-3.1-8B, converted, null ids": (
        {**speculator(LLAMA_8B, architectures=["Eagle3Speculator"], speculators_version="0.1.0"), KEY: None}, 32, "aux-ids-missing"),
    "Qwen3-30B-A3B, EAGLE-3.1": (
        head(2048, 12288, 32, 4, 151936, max_position_embeddings=2048, fc_norm=True, norm_output=True), 48, "aux-ids-missing max-positions-short"),
    "Qwen2.5-VL, mrope": (
        head(3584, 18944, 28, 4, 152064, max_position_embeddings=2048, sliding_window=32768, use_sliding_window=False,
             rope_scaling={"type": "mrope", "mrope_section": [16, 24, 24]}), 28, "aux-ids-missing max-positions-short"),
    "gpt-oss-20B, MoE draft": (
        head(2880, 17280, 64, 8, 201088, architectures=["GptOssForCausalLMEagle3"], model_type="gpt_oss", head_dim=64, rope_theta=150000,
             num_local_experts=16, max_position_embeddings=4096, **{"eagle_config": {KEY: [1, 11, 21]}}), 24,
        "architecture-unsupported aux-ids-nested-only aux-ids-reading-unknown max-positions-short"),
    "gpt-oss-120B, ModelOpt, last layer": (
        head(2880, 17280, 64, 8, 201088, 201088, head_dim=64, rope_theta=150000.0, norm_before_fc=True, **eagle(24, 30, 36, **MODELOPT)), 36,
        "aux-ids-nested-only"),
    "Gemma-4, five of six": (
        head(2816, 2112, 32, 8, 262144, 262144, max_position_embeddings=4096, **{"eagle_config": {KEY: [5, 17, 29]}}), 30,
        "aux-ids-nested-only aux-ids-reading-unknown max-positions-short"),
    "Qwen3-8B, AngelSlim": (head(4096, 12288, 32, 8, 151936, architectures=["Eagle3LlamaForCausalLM"], max_position_embeddings=40960), 36,
                            "aux-ids-missing"),
    "DeepSeek-V3, its own model_type": (
        head(7168, 18432, 128, 128, 129280, architectures=["Eagle3DeepseekV3ForCausalLM"], model_type="deepseek_v3", head_dim=None,
             q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, eagle_aux_hidden_state_layer_ids=[2, 30, 58]),
        61, "taken-for-mtp"),
    "Qwen3-8B, P-EAGLE": (head(4096, 12288, 32, 8, 151936, 151936, architectures=["PEagleDraftModel"], num_hidden_layers=4), 36, "not-eagle3"),
    "Qwen3-4B, DFlash": (head(2560, 9728, 32, 8, 151936, architectures=["DFlashDraftModel"], model_type="qwen3", num_hidden_layers=5), 36,
                         "not-eagle3"),
    "Llama-2, EAGLE-1": (
        head(4096, 11008, 32, 32, 32000, None, architectures=["LlamaForCausalLM"], bias=True, head_dim=None, max_position_embeddings=4096), 32,
        "not-eagle3"),
}  # fmt: skip


def facts_of(config: dict[str, Any], layers: int, file: Path) -> Path:
    """A verifier's config whose sizes suit the draft, with so many layers."""
    layer = config.get("transformer_layer_config", config)
    kept = ("hidden_size", "vocab_size", "max_position_embeddings")
    same = {key: layer[key] for key in kept} | {
        "num_hidden_layers": layers,
        "rope_theta": None,
        "rope_parameters": None,
    }
    file.write_text(json.dumps({k: v for k, v in {**drafts.VERIFIER, **same}.items() if v is not None}))
    return file


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_gets_what_it_deserves(name: str, tmp_path: Path) -> None:
    config, layers, expected = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    verifier = facts_of(config, layers, tmp_path / "verifier.json") if layers else None
    said = inspection.inspect(tmp_path / "config.json", verifier=verifier)
    codes = {f.code for f in said.findings if f.severity != "note"} - {"rope-differs", "max-positions-short"}
    said_short = {f.code for f in inspection.inspect(tmp_path / "config.json").findings} & {"max-positions-short"}
    assert codes | said_short == set(expected.split())


def test_vllm_refuses_exactly_those_that_are_said_to_be_refused(tmp_path: Path) -> None:
    verifier = tmp_path / "verifier"
    verifier.mkdir()
    (verifier / "config.json").write_text(json.dumps(drafts.VERIFIER))
    folders = {}
    for number, (name, (config, _, _)) in enumerate(PUBLISHED.items()):
        folder = tmp_path / f"draft{number}"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        folders[name] = str(folder)
    argv = [sys.executable, str(Path(__file__).with_name("vllm_judge.py")), str(verifier)]
    done = subprocess.run(argv, input=json.dumps(list(folders.values())), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    answers = json.loads(done.stdout.strip().splitlines()[-1])
    for name, folder in folders.items():
        said = inspection.inspect(Path(folder))
        if said.case.format.is_eagle3:
            assert bool(answers[folder]["stage"]) == bool(said.case.prediction.stage), (
                name,
                answers[folder]["error"],
                said.case.prediction.error,
            )
