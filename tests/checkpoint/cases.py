"""Small drafts, healthy and broken, and the findings each must give: one table for vLLM's real loader and for the checks.

Every row of the outcome table of the loader is here, and every mutation the checks must name.
"""

from __future__ import annotations

from typing import Any

import drafts
from drafts import DRAFT_VOCAB, HIDDEN, VOCAB, flat, mla_shapes, nested, shapes

Case = tuple[dict[str, Any], drafts.Shapes]
L0 = "layers.0."


def without(*names: str, **how: Any) -> drafts.Shapes:
    return {name: shape for name, shape in shapes(**how).items() if name not in names}


def plus(extra: dict[str, tuple[int, ...]], base: drafts.Shapes | None = None, dtype: str = "BF16") -> drafts.Shapes:
    return (base or shapes()) | {name: (shape, dtype) for name, shape in extra.items()}


def renamed(old: str, new: str) -> drafts.Shapes:
    return {name.replace(old, new): shape for name, shape in shapes().items()}


def retyped(name: str, dtype: str) -> drafts.Shapes:
    return shapes() | {name: (shapes()[name][0], dtype)}


def reshaped(name: str, *shape: int) -> drafts.Shapes:
    return shapes() | {name: (shape, shapes()[name][1])}


QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
MLA = {"architectures": ["Eagle3DeepseekV2ForCausalLM"], "model_type": "kimi_k2", "q_lora_rank": 24, "kv_lora_rank": 512,
       "qk_nope_head_dim": 32, "qk_rope_head_dim": 64, "v_head_dim": 32, "num_key_value_heads": 4}  # fmt: skip
EAGLE4 = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [1, 2, 4, 5]}
BIASES = {f"{L0}self_attn.{p}_proj.bias": (n,) for p, n in (("q", 128), ("k", 64), ("v", 64), ("o", HIDDEN))}
MLP_BIASES = {f"{L0}mlp.{p}_proj.bias": (n,) for p, n in (("gate", 96), ("up", 96), ("down", HIDDEN))}
FUSED = {f"{L0}self_attn.qkv_proj.weight": (256, 2 * HIDDEN), f"{L0}mlp.gate_up_proj.weight": (192, HIDDEN)}
UNFUSED = [f"{L0}self_attn.{p}_proj.weight" for p in "qkv"] + [f"{L0}mlp.{p}_proj.weight" for p in ("gate", "up")]

CASES: dict[str, Case] = {
    # layouts and names
    "flat": (flat(), shapes()),
    "nested": (nested(), shapes()),
    "midlayer": (flat(), shapes(prefix="midlayer.")),
    "nested of two layers": (nested({"num_hidden_layers": 2}), shapes(layers=2)),
    "wrapped": ({"model_type": "eagle", "method": "eagle3", "model": flat(architectures=["LlamaForCausalLM"])}, shapes()),
    "native architecture": (flat(architectures=["LlamaForCausalLM"]), shapes()),
    "already fused": (flat(), plus(FUSED, without(*UNFUSED))),
    "model. prefix": (flat(), renamed("layers.0.", "model.layers.0.")),
    "model.midlayer prefix": (flat(), renamed("layers.0.", "model.midlayer.")),
    "draft_model. prefix": (flat(), {f"draft_model.{n}": s for n, s in shapes().items()}),
    "head under model.": (flat(), renamed("lm_head.weight", "model.lm_head.weight")),
    "mapping under model.": (flat(), renamed("d2t", "model.d2t")),
    # refused at the config
    "model_type eagle3": (flat(model_type="eagle3"), shapes()),
    "model_type speculator_model": (nested(model_type="speculator_model"), shapes()),
    "no model_type": (flat(model_type=None), shapes()),
    "model_type speculators": (nested(model_type="speculators"), shapes()),
    "wrapped without method": ({"model_type": "eagle", "model": flat(architectures=["LlamaForCausalLM"])}, shapes()),
    "architecture unknown": (flat(architectures=["MistralForCausalLM"], model_type="mistral"), shapes()),
    "architecture of EAGLE-1": (flat(architectures=["EagleLlamaForCausalLM"]), shapes()),
    "nested layer mistral": (nested({"model_type": "mistral"}), shapes()),
    "nested layer untyped": (nested({"model_type": None}), shapes()),
    "nested without hidden_act": (nested({"hidden_act": None}), shapes()),
    "nested type unknown": (nested(speculators_model_type="hass"), shapes()),
    "activation gelu": (flat(hidden_act="gelu"), shapes()),
    "layer_types too short": (flat(num_hidden_layers=2, layer_types=["full_attention"]), shapes(layers=2)),
    "layer_types too short, nested": (nested({"num_hidden_layers": 2, "layer_types": ["full_attention"]}), shapes(layers=2)),
    "layer_types too long": (flat(layer_types=["full_attention"] * 3), shapes()),
    "llama3 rope without factors": (flat(rope_theta=None, rope_parameters={"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0}), shapes()),
    "yarn rope without factor, nested": (nested({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}), shapes()),
    "old rope_scaling without factor": (flat(rope_parameters=None, rope_scaling={"type": "linear"}), shapes()),
    "yarn rope": (flat(rope_theta=None, rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}), shapes()),
    "mrope": (flat(rope_parameters=None, rope_scaling={"type": "mrope", "mrope_section": [4, 6, 6]}), shapes()),
    # missing: silent
    "no fc": (flat(), without("fc.weight")),
    "no norm": (flat(), without("norm.weight")),
    "no hidden_norm": (flat(), without(f"{L0}hidden_norm.weight")),
    "no lm_head": (flat(), without("lm_head.weight")),
    "no embed_tokens": (flat(), shapes(embed=False)),
    "no v_proj": (flat(), without(f"{L0}self_attn.v_proj.weight")),
    "no gate_proj": (flat(), without(f"{L0}mlp.gate_proj.weight")),
    "no d2t": (flat(), without("d2t")),
    "no mapping, no lm_head": (flat(), without("d2t", "t2d", "lm_head.weight")),
    "no t2d": (flat(), without("t2d")),
    "layers missing": (flat(num_hidden_layers=2), shapes()),
    "biases missing": (flat(attention_bias=True, mlp_bias=True), shapes()),
    "input_norm missing": (flat(norm_before_fc=True), shapes()),
    "fc_norm missing": (flat(fc_norm=True), shapes()),
    "full vocabulary": (flat(draft_vocab_size=VOCAB), shapes(draft_vocab=VOCAB, mapping=False)),
    "full vocabulary, no lm_head": (flat(draft_vocab_size=None), without("lm_head.weight", draft_vocab=VOCAB, mapping=False)),
    # dropped: silent
    "map of vLLM's own name": (flat(), renamed("d2t", "draft_id_to_target_id")),
    "input_norm unasked": (flat(), plus({"input_norm.weight": (3 * HIDDEN,)})),
    "fc bias": (flat(), plus({"fc.bias": (HIDDEN,)})),
    "lm_head bias": (flat(), plus({"lm_head.bias": (DRAFT_VOCAB,)})),
    "attention biases unasked": (flat(), plus(BIASES)),
    "mlp biases unasked": (nested(), plus(MLP_BIASES)),
    "rotary cache": (flat(), plus({f"{L0}self_attn.rotary_emb.inv_freq": (16,)}, dtype="F32")),
    "aux off, fc stored": (flat(eagle_config={"use_aux_hidden_state": False}), shapes()),
    "mask_hidden": (flat(), plus({"mask_hidden": (1, 3 * HIDDEN)})),
    # asked and there
    "attention biases": (flat(attention_bias=True), plus(BIASES)),
    "mlp biases": (flat(mlp_bias=True), plus(MLP_BIASES)),
    "input_norm": (flat(norm_before_fc=True), plus({"input_norm.weight": (3 * HIDDEN,)})),
    "input_norm, nested": (nested(norm_before_fc=True), plus({"input_norm.weight": (3 * HIDDEN,)})),
    "input_norm asked in eagle_config": (
        flat(eagle_config={"norm_before_fc": True}, norm_before_fc=False), plus({"input_norm.weight": (3 * HIDDEN,)})),
    "fc_norm": (flat(fc_norm=True), plus({f"fc_norm.{i}.weight": (HIDDEN,) for i in range(3)})),
    "qwen3": (flat(**QWEN3), shapes(qk_norm=True)),
    "qwen3, nested": (nested({"model_type": "qwen3"}), shapes(qk_norm=True)),
    "qwen3 without q_norm": (flat(**QWEN3), shapes()),
    "qwen3 with biases": (flat(**QWEN3, attention_bias=True), plus(BIASES, shapes(qk_norm=True))),
    "four ids": (flat(eagle_aux_hidden_state_layer_ids=[1, 2, 4, 5], num_aux_hidden_states=4), shapes(aux=4)),
    "four ids in eagle_config": (flat(num_aux_hidden_states=None, eagle_config=EAGLE4), shapes(aux=4)),
    "four ids on qwen3": (
        flat(**QWEN3, num_aux_hidden_states=None, eagle_aux_hidden_state_layer_ids=[1, 2, 4, 5], eagle_config=None),
        shapes(aux=4, qk_norm=True)),
    "mla": (flat(**MLA), mla_shapes()),
    "mla of model_type deepseek_v3": (flat(**MLA | {"model_type": "deepseek_v3"}), mla_shapes()),
    "mla of model_type deepseek_v2": (flat(**MLA | {"model_type": "deepseek_v2"}), mla_shapes()),
    "mla, q_lora_rank null": ({**flat(**MLA), "q_lora_rank": None}, mla_shapes(rank=0)),
    "mla, q_lora_rank left out": (flat(**MLA | {"q_lora_rank": None}), mla_shapes(rank=0)),
    "mla with input_norm": (flat(**MLA, norm_before_fc=True), plus({"input_norm.weight": (3 * HIDDEN,)}, mla_shapes())),
    "mla with a latent too wide": (flat(**MLA), mla_shapes(kv_rank=640)),
    "mla with heads too few": (flat(**MLA | {"num_attention_heads": 2}), mla_shapes()),
    # raise
    "four ids uncounted": (
        flat(eagle_aux_hidden_state_layer_ids=[1, 2, 4, 5], num_aux_hidden_states=None, eagle_config=None), shapes(aux=4)),
    "four ids nested": (nested(eagle_aux_hidden_state_layer_ids=[1, 2, 4, 5]), shapes(aux=4)),
    "fc_norm unasked": (flat(), plus({f"fc_norm.{i}.weight": (HIDDEN,) for i in range(3)})),
    "q_norm on llama": (flat(), shapes(qk_norm=True)),
    "verifier_lm_head": (flat(), plus({"verifier_lm_head.weight": (VOCAB, HIDDEN)})),
    "verifier_norm": (nested(), plus({"verifier_norm.weight": (HIDDEN,)})),
    "bias of an unknown module": (flat(), plus({"adapter.bias": (HIDDEN,)})),
    "layers too many": (flat(), shapes(layers=2)),
    "d2t with a full vocabulary": (flat(draft_vocab_size=VOCAB), without("t2d", draft_vocab=VOCAB)),
    "d2t too short": (flat(), without("d2t") | {"d2t": ((DRAFT_VOCAB - 1,), "I64")}),
    "d2t of two dimensions": (flat(), without("d2t") | {"d2t": ((DRAFT_VOCAB, 1), "I64")}),
    "draft_vocab_size absent": (flat(draft_vocab_size=None), shapes()),
    "lm_head of other rows": (flat(draft_vocab_size=DRAFT_VOCAB + 1), without("d2t")),
    "embedding of other rows": (flat(), reshaped("embed_tokens.weight", VOCAB + 4, HIDDEN)),
    "lm_head of other columns": (flat(), reshaped("lm_head.weight", DRAFT_VOCAB, 32)),
    "fc of two states": (flat(), shapes(aux=2)),
    "q without the embedding": (flat(), reshaped(f"{L0}self_attn.q_proj.weight", 128, HIDDEN)),
    "hidden_size of another model": (flat(hidden_size=32, target_hidden_size=32), shapes()),
    "scale without a quantisation": (flat(), plus({f"{L0}mlp.down_proj.weight_scale": (1,)}, dtype="F32")),
    # too large: cut in silence; too small: raise
    "head_dim stated too small": (flat(head_dim=16), shapes()),
    "head_dim left out": (flat(head_dim=None), shapes()),
    "head_dim stated too large": (flat(head_dim=64), shapes()),
    "heads that kv heads do not divide": (flat(num_key_value_heads=3), shapes()),
    "heads that do not divide the state": (flat(num_attention_heads=6), shapes()),
    "a size as text": (flat(intermediate_size="96"), shapes()),
    "a size as text, nested": (nested({"intermediate_size": "96"}), shapes()),
    "heads stated too few": (flat(num_attention_heads=2), shapes()),
    "kv heads stated too few": (flat(num_key_value_heads=1), shapes()),
    "kv heads stated too many": (flat(num_key_value_heads=4), shapes()),
    "kv heads left out": (flat(num_key_value_heads=None), shapes(kv=4)),
    "inner size stated too small": (flat(intermediate_size=64), shapes()),
    "inner size stated too large": (nested({"intermediate_size": 128}), shapes()),
    "kimi_k2 with head_dim": (flat(model_type="kimi_k2", qk_rope_head_dim=16), shapes()),
    "kimi_k2 without head_dim": (flat(model_type="kimi_k2", qk_rope_head_dim=16, head_dim=None), shapes()),
    "kimi_k2 as lived": (flat(model_type="kimi_k2", head_dim=None), shapes()),
    # types
    "d2t of int32": (flat(), retyped("d2t", "I32")),
    "half precision": (flat(), {n: (s, "F16" if t == "BF16" else t) for n, (s, t) in shapes().items()}),
    "single precision": (flat(), {n: (s, "F32" if t == "BF16" else t) for n, (s, t) in shapes().items()}),
}  # fmt: skip
