"""Nested to flat: every key that a reader looks for, every byte of every tensor, and vLLM's own loader as judge."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from eaglebook import verifier
from eaglebook.checkpoint import flat, headers, vllm_names
from eaglebook.engine import ladder
from eaglebook.errors import UserError

AUX_IDS = [2, 4, 5]


@pytest.fixture(scope="module")
def nested(tiny_verifier, tmp_path_factory):
    """An untrained draft of the tiny verifier, saved by speculators itself."""
    from speculators.models.eagle3 import Eagle3DraftModel
    from speculators.train.cli import create_transformer_layer_config

    layer = create_transformer_layer_config(str(tiny_verifier), 1, "llama", "silu", 2048, [0])
    kept = torch.arange(10, 110)
    t2d = torch.zeros(300, dtype=torch.bool)
    t2d[kept] = True
    model = Eagle3DraftModel.from_training_args(
        layer, t2d=t2d, d2t=kept - torch.arange(100), draft_vocab_size=100, norm_before_residual=True,
        norm_before_fc=False, fc_norm=False, norm_output=True, verifier_name_or_path=str(tiny_verifier), ttt_steps=3,
        target_layer_ids=AUX_IDS, draft_attn_impl="sdpa",
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("nested")
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture
def exported(nested, tmp_path):
    flat.export(nested, tmp_path / "flat")
    return tmp_path / "flat"


def test_the_flat_config_says_all_that_readers_look_for(nested, exported) -> None:
    config = json.loads((exported / "config.json").read_text())
    layer = json.loads((nested / "config.json").read_text())["transformer_layer_config"]
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["model_type"] == "llama"
    assert config["head_dim"] == 32, "explicit, not hidden / heads"
    assert config["eagle_aux_hidden_state_layer_ids"] == AUX_IDS
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == AUX_IDS
    assert config["num_aux_hidden_states"] == 3
    assert [config[flag] for flag in flat.NORM_FLAGS] == [True, False, False, True]
    assert config["rope_theta"] == layer["rope_parameters"]["rope_theta"]
    assert (config["draft_vocab_size"], config["vocab_size"], config["target_hidden_size"]) == (100, 300, 64)
    assert config["tie_word_embeddings"] is False
    assert (exported / "config_speculators.json").read_bytes() == (nested / "config.json").read_bytes()


def test_every_tensor_is_kept_byte_for_byte(nested, exported) -> None:
    before, after = headers.read_folder(nested), headers.read_folder(exported)
    assert {n.replace("layers.0.", "midlayer.") for n in before} == set(after)
    for name, tensor in before.items():
        new = after[name.replace("layers.0.", "midlayer.")]
        assert (new.shape, new.dtype) == (tensor.shape, tensor.dtype)
        assert headers.tensor_bytes(new) == headers.tensor_bytes(tensor)


def test_autoconfig_reads_the_ten_fields(exported) -> None:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(exported)
    assert type(config).__name__ == "LlamaConfig"
    assert (config.head_dim, config.draft_vocab_size, config.num_hidden_layers) == (32, 100, 1)
    assert config.eagle_config["use_aux_hidden_state"] is True


@pytest.mark.parametrize("key", [*flat.NORM_FLAGS, "eagle_aux_hidden_state_layer_ids", "draft_vocab_size"])
def test_what_must_not_be_guessed_is_refused(nested, key) -> None:
    config = json.loads((nested / "config.json").read_text())
    config[key] = None
    with pytest.raises(UserError, match=key):
        flat.flat_config(config)


@pytest.mark.parametrize("key", ["head_dim", "rope_parameters", "rms_norm_eps"])
def test_what_the_layer_must_say_is_refused(nested, key) -> None:
    config = json.loads((nested / "config.json").read_text())
    del config["transformer_layer_config"][key]
    with pytest.raises(UserError, match=key):
        flat.flat_config(config)


def test_other_drafts_are_refused(nested) -> None:
    config = json.loads((nested / "config.json").read_text())
    with pytest.raises(UserError, match="not a speculators EAGLE-3"):
        flat.flat_config(config | {"speculators_config": {"algorithm": "dflash"}})
    config["transformer_layer_config"]["model_type"] = "qwen3"
    with pytest.raises(UserError, match="cannot hold"):
        flat.flat_config(config)


@pytest.mark.parametrize(
    ("name", "destination"),
    [
        ("midlayer.self_attn.q_proj.weight", "model.layers.0.self_attn.qkv_proj.weight"),
        ("layers.0.self_attn.v_proj.weight", "model.layers.0.self_attn.qkv_proj.weight"),
        ("midlayer.mlp.up_proj.weight", "model.layers.0.mlp.gate_up_proj.weight"),
        ("midlayer.hidden_norm.weight", "model.layers.0.hidden_norm.weight"),
        ("fc.weight", "model.fc.weight"),
        ("norm.weight", "model.norm.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("d2t", "draft_id_to_target_id"),
        ("t2d", ""),
        ("embed_tokens.weight", "model.embed_tokens.weight"),
    ],
)
def test_vllms_names(name, destination) -> None:
    assert vllm_names.destination(name) == destination


@pytest.mark.timeout(300)
def test_vllms_own_loader_takes_the_export_and_names_what_it_does_not_know(exported, tiny_verifier, tmp_path) -> None:
    climb = {"num_speculative_tokens": 3, "aux_ids": AUX_IDS}
    verdicts = list(ladder.climb(exported, tiny_verifier, [1, 2], **climb))
    assert [(v.rung.number, v.passed) for v in verdicts] == [(1, True), (2, True)], verdicts
    assert verifier.resolve(str(tiny_verifier)).num_layers == 8
    # a tensor that vLLM does not know stops rung 2; a config it cannot parse stops rung 1 and ends the climb
    stray = tmp_path / "stray"
    shutil.copytree(exported, stray)
    tensors = headers.read_folder(stray)
    flat.copy_tensors(
        tensors, {n: n.replace("fc.weight", "verifier_norm.weight") for n in tensors}, stray / "model.safetensors"
    )
    (last,) = list(ladder.climb(stray, tiny_verifier, [2], **climb))
    assert not last.passed
    assert "verifier_norm" in last.detail
    config = json.loads((stray / "config.json").read_text())
    (stray / "config.json").write_text(json.dumps(config | {"model_type": "eagle3"}))
    verdicts = list(ladder.climb(stray, tiny_verifier, [1, 2], **climb))
    assert [(v.rung.number, v.passed) for v in verdicts] == [(1, False)]
