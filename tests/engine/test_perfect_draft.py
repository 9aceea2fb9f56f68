"""The whole serving path with a draft that must be accepted fully, and a broken copy of it that must not.

The verifier's next token is a function of the current one (its layers add nothing), and the draft computes the same
function. Whatever acceptance length below K + 1 is measured would be the fault of the way from file to counter.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from eaglebook.engine import client, counters, server
from safetensors.torch import load_file, save_file

H, HEADS, V, DRAFT_V, K = 128, 4, 512, 256, 3
OPTIONS = {"max_model_len": 160, "max_num_seqs": 4, "kv_cache_bytes": 64 << 20, "dtype": "float32"}


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> tuple[Path, Path, dict[int, int]]:
    """Folders of verifier and draft, and the cycle that both follow."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    common = {
        "hidden_size": H, "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "head_dim": H // HEADS,
        "intermediate_size": 64, "vocab_size": V, "max_position_embeddings": 256, "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=8, **common)).float()
    kept = torch.sort(torch.randperm(V - 3)[:DRAFT_V] + 3).values
    order = kept[torch.randperm(DRAFT_V)]
    cycle = dict(zip(order.tolist(), order.roll(-1).tolist(), strict=True))
    embed = torch.randn(V, H)
    embed /= embed.pow(2).mean(-1, keepdim=True).sqrt()
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(embed)
        model.lm_head.weight.zero_()
        for token, following in cycle.items():
            model.lm_head.weight[following] = embed[token]
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    verifier = tmp_path_factory.mktemp("verifier")
    model.save_pretrained(verifier)

    draft, eye, none = tmp_path_factory.mktemp("draft"), torch.eye(H), torch.zeros(H, H)
    save_file({
        "fc.weight": torch.zeros(H, 3 * H),
        "midlayer.self_attn.q_proj.weight": torch.cat([4 * eye, none], 1),
        "midlayer.self_attn.k_proj.weight": torch.cat([4 * eye, none], 1),
        "midlayer.self_attn.v_proj.weight": torch.cat([eye, none], 1),
        "midlayer.self_attn.o_proj.weight": eye.clone(),
        "midlayer.mlp.gate_proj.weight": torch.zeros(64, H),
        "midlayer.mlp.up_proj.weight": torch.zeros(64, H),
        "midlayer.mlp.down_proj.weight": torch.zeros(H, 64),
        "midlayer.input_layernorm.weight": torch.ones(H),
        "midlayer.hidden_norm.weight": torch.zeros(H),
        "midlayer.post_attention_layernorm.weight": torch.ones(H),
        "norm.weight": torch.ones(H),
        "lm_head.weight": model.lm_head.weight.detach()[kept].clone(),
        "d2t": kept - torch.arange(DRAFT_V),
    }, draft / "model.safetensors")  # fmt: skip
    (draft / "config.json").write_text(json.dumps({
        **common, "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1, "hidden_act": "silu",
        "rope_theta": 10000.0, "draft_vocab_size": DRAFT_V, "norm_before_residual": True,
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5], "num_aux_hidden_states": 3,
    }))  # fmt: skip
    return verifier, draft, cycle


def answers(verifier: Path, start: int, log: Path, draft: Path | None = None):
    """Greedy answer tokens, and what the counters say about them."""
    speculation = {"draft": draft, "num_speculative_tokens": K} if draft else {}
    with server.serve(verifier, log=log, extra_args=("--skip-tokenizer-init",), **OPTIONS, **speculation) as vllm:
        before = counters.read(vllm, K) if draft else None
        done, _ = client.complete(vllm, [[start]], max_tokens=81, concurrency=1)
        accepted = counters.since(before, counters.read(vllm, K)) if before else None
    assert not server.leftovers()
    return done[0].token_ids, accepted


@pytest.mark.timeout(600)
def test_a_perfect_draft_is_accepted_fully_and_a_broken_one_is_not(pair, tmp_path) -> None:
    verifier, draft, cycle = pair
    start = next(iter(cycle))
    expected, token = [], start
    for _ in range(81):
        token = cycle[token]
        expected.append(token)
    plain, _ = answers(verifier, start, tmp_path / "plain.log")
    assert plain == expected
    spoken, accepted = answers(verifier, start, tmp_path / "perfect.log", draft)
    assert spoken == expected
    assert accepted.drafts == 20
    assert accepted.mean_acceptance_length == K + 1
    broken = tmp_path / "broken"
    shutil.copytree(draft, broken)
    tensors = load_file(broken / "model.safetensors")
    del tensors["d2t"]  # vLLM says nothing, and maps the draft's ids onto the first ones of the verifier
    save_file(tensors, broken / "model.safetensors")
    spoken, accepted = answers(verifier, start, tmp_path / "broken.log", broken)
    assert spoken == expected, "speculation is lossless: a broken draft costs time, never words"
    assert accepted.mean_acceptance_length < 1.2
