"""A verifier's facts from its config alone: published models, the three tensors beside 200,000, arbitrary JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import tracemalloc
from dataclasses import fields

import pytest
from eaglebook.checkpoint import verifier_config as vc
from eaglebook.checkpoint import verifier_tensors
from eaglebook.errors import UserError
from hypothesis import given, settings
from hypothesis import strategies as st


def llm(layers, hidden, heads, kv, vocab, tied=False, **rest):
    """The five sizes of a text config under their usual names, and whatever else matters."""
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads}
    return {**sizes, "num_key_value_heads": kv, "vocab_size": vocab, "tie_word_embeddings": tied, **rest}


def flat(architecture, model_type, *sizes, **rest):
    return {"architectures": [architecture], "model_type": model_type, **llm(*sizes, **rest)}


def nested(architecture, model_type, text_type, *sizes, **rest):
    """A multimodal config: sizes under text_config, a vision tower beside it."""
    text = {**llm(*sizes, **rest), "model_type": text_type}
    return {"architectures": [architecture], "model_type": model_type, "text_config": text, "vision_config": VISION}


def gemma3(**sizes):
    """As published: what equals the class default (vocabulary, tie, for the 4b even the heads) is left out."""
    text = {"model_type": "gemma3_text", "sliding_window": 1024, **sizes}
    return {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text}


def five_to_one(layers):
    return ["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(layers)]


VISION = {"model_type": "some_vit", "num_hidden_layers": 27, "hidden_size": 1152, "num_attention_heads": 16}
INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "group_size": 32}}},
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
}
W8A8 = {"quant_method": "compressed-tensors", "format": "float-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float"}}}}  # fmt: skip
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.embed_tokens", "lm_head"],
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192}
YARN = {"type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096, "mscale": 1.0}
MISTRAL = {"head_dim": 128, "rope_theta": 100000000.0, "sliding_window": None, "max_position_embeddings": 32768}
MLA = {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
NEMOTRON = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
OSS = {"head_dim": 64, "sliding_window": 128, "quantization_config": MXFP4}
ALTERNATING = ["sliding_attention", "full_attention"]
LONGROPE = {"type": "longrope", "long_factor": [1.0], "short_factor": [1.0]}
GEMMA4_ROPE = {
    "full_attention": {"rope_type": "proportional", "rope_theta": 1000000.0, "partial_rotary_factor": 0.25},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
LLAMA_8B = llm(32, 4096, 32, 8, 128256, rope_theta=500000.0, rope_scaling=LLAMA3, max_position_embeddings=131072)
OMNI = {
    "architectures": ["Qwen3OmniMoeForConditionalGeneration"],
    "thinker_config": {
        "audio_config": VISION,
        "vision_config": VISION,
        "text_config": llm(48, 2048, 32, 4, 152064, model_type="qwen3_omni_moe_text", head_dim=128),
    },
    "talker_config": {"text_config": llm(20, 1024, 16, 2, 3072, head_dim=128)},
}
GPT2 = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12,
        "n_positions": 1024, "vocab_size": 50257, "layer_norm_epsilon": 1e-5}  # fmt: skip

# name: (the relevant keys of its config.json, (layers, hidden, vocabulary, head_dim), nested_in, EAGLE-3 in vLLM 0.32)
MODELS = {
    "Kimi-K2.5": (
        nested("KimiK25ForConditionalGeneration", "kimi_k25", "kimi_k2", 61, 7168, 64, 64, 163840, rope_theta=50000.0,
               rope_scaling=YARN, max_position_embeddings=262144, quantization_config=INT4, **MLA),
        (61, 7168, 163840, 128), "text_config", True),
    "Kimi-K2-Instruct": (
        flat("DeepseekV3ForCausalLM", "kimi_k2", 61, 7168, 64, 64, 163840, quantization_config=FP8, **MLA),
        (61, 7168, 163840, 128), "", True),
    "DeepSeek-R1": (
        flat("DeepseekV3ForCausalLM", "deepseek_v3", 61, 7168, 128, 128, 129280, quantization_config=FP8, **MLA),
        (61, 7168, 129280, 128), "", True),
    "Llama-3.1-8B": (LLAMA_8B | {"architectures": ["LlamaForCausalLM"]}, (32, 4096, 128256, 128), "", True),
    "Llama-3.1-70B": (flat("LlamaForCausalLM", "llama", 80, 8192, 64, 8, 128256), (80, 8192, 128256, 128), "", True),
    "Llama-3.2-1B": (
        flat("LlamaForCausalLM", "llama", 16, 2048, 32, 8, 128256, tied=True, head_dim=64),
        (16, 2048, 128256, 64), "", True),
    "Llama-4-Scout": (
        nested("Llama4ForConditionalGeneration", "llama4", "llama4_text", 48, 5120, 40, 8, 202048, head_dim=128,
               attention_chunk_size=8192, no_rope_layers=[]),
        (48, 5120, 202048, 128), "text_config", True),
    "Qwen2.5-7B": (
        flat("Qwen2ForCausalLM", "qwen2", 28, 3584, 28, 4, 152064, sliding_window=131072, use_sliding_window=False,
             max_window_layers=28, max_position_embeddings=32768),
        (28, 3584, 152064, 128), "", True),
    "Qwen3-8B": (
        flat("Qwen3ForCausalLM", "qwen3", 36, 4096, 32, 8, 151936, head_dim=128, use_sliding_window=False,
             sliding_window=None, max_window_layers=36),
        (36, 4096, 151936, 128), "", True),
    "Qwen3-30B-A3B": (
        flat("Qwen3MoeForCausalLM", "qwen3_moe", 48, 2048, 32, 4, 151936, head_dim=128),
        (48, 2048, 151936, 128), "", True),
    "Qwen3-235B-A22B": (
        flat("Qwen3MoeForCausalLM", "qwen3_moe", 94, 4096, 64, 4, 151936, head_dim=128),
        (94, 4096, 151936, 128), "", True),
    "Qwen3-Next-80B-A3B": (
        flat("Qwen3NextForCausalLM", "qwen3_next", 48, 2048, 16, 2, 151936, head_dim=256, full_attention_interval=4,
             partial_rotary_factor=0.25, rope_theta=10000000, rope_scaling=None),
        (48, 2048, 151936, 256), "", True),
    "Qwen2.5-VL-7B": (
        flat("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl", 28, 3584, 28, 4, 152064, rope_theta=1000000.0,
             rope_scaling={"type": "mrope", "mrope_section": [16, 24, 24]}, vision_config=VISION),
        (28, 3584, 152064, 128), "", True),
    "Qwen3-VL-235B-A22B": (
        nested("Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe", "qwen3_vl_moe_text", 94, 4096, 64, 4, 151936,
               head_dim=128),
        (94, 4096, 151936, 128), "text_config", True),
    "Qwen3-Omni-30B-A3B": (OMNI, (48, 2048, 152064, 128), "thinker_config.text_config", True),
    "gpt-oss-20b": (
        flat("GptOssForCausalLM", "gpt_oss", 24, 2880, 64, 8, 201088, layer_types=ALTERNATING * 12, **OSS),
        (24, 2880, 201088, 64), "", True),
    "gpt-oss-120b": (
        flat("GptOssForCausalLM", "gpt_oss", 36, 2880, 64, 8, 201088, layer_types=ALTERNATING * 18, **OSS),
        (36, 2880, 201088, 64), "", True),
    "gemma-3-27b-it": (
        gemma3(num_hidden_layers=62, hidden_size=5376, num_attention_heads=32, num_key_value_heads=16, head_dim=128),
        (62, 5376, 262208, 128), "text_config", False),
    "gemma-3-4b-it": (gemma3(num_hidden_layers=34, hidden_size=2560), (34, 2560, 262208, 256), "text_config", False),
    "gemma-3-1b-it": (
        flat("Gemma3ForCausalLM", "gemma3_text", 26, 1152, 4, 1, 262144, tied=None, head_dim=256, sliding_window=512,
             sliding_window_pattern=6, max_position_embeddings=32768),
        (26, 1152, 262144, 256), "", False),
    "gemma-4-26B-A4B-it": (
        nested("Gemma4ForConditionalGeneration", "gemma4", "gemma4_text", 30, 2816, 16, 8, 262144, tied=True,
               head_dim=256, layer_types=five_to_one(30), sliding_window=1024, rope_parameters=GEMMA4_ROPE),
        (30, 2816, 262144, 256), "text_config", True),
    "Mistral-Small-24B-2501": (
        flat("MistralForCausalLM", "mistral", 40, 5120, 32, 8, 131072, **MISTRAL),
        (40, 5120, 131072, 128), "", True),
    "Mistral-Small-3.1-24B": (
        nested("Mistral3ForConditionalGeneration", "mistral3", "mistral", 40, 5120, 32, 8, 131072, **MISTRAL),
        (40, 5120, 131072, 128), "text_config", True),
    "Ministral-8B-2410": (
        flat("MistralForCausalLM", "mistral", 36, 4096, 32, 8, 131072, **MISTRAL | {"sliding_window": 32768}),
        (36, 4096, 131072, 128), "", True),
    "Ministral-3-8B-2512": (
        nested("Mistral3ForConditionalGeneration", "mistral3", "ministral3", 34, 4096, 32, 8, 131072, head_dim=128),
        (34, 4096, 131072, 128), "text_config", True),
    "Mixtral-8x7B": (flat("MixtralForCausalLM", "mixtral", 32, 4096, 32, 8, 32000), (32, 4096, 32000, 128), "", False),
    "phi-4": (flat("Phi3ForCausalLM", "phi3", 40, 5120, 40, 10, 100352), (40, 5120, 100352, 128), "", True),
    "Phi-4-mini": (
        flat("Phi3ForCausalLM", "phi3", 32, 3072, 24, 8, 200064, tied=True, sliding_window=262144, rope_theta=10000.0,
             max_position_embeddings=131072, original_max_position_embeddings=4096, partial_rotary_factor=0.75,
             rope_scaling=LONGROPE),
        (32, 3072, 200064, 128), "", True),
    "GLM-4.6": (
        flat("Glm4MoeForCausalLM", "glm4_moe", 92, 5120, 96, 8, 151552, head_dim=128, partial_rotary_factor=0.5),
        (92, 5120, 151552, 128), "", False),
    "MiniMax-M2": (
        flat("MiniMaxM2ForCausalLM", "minimax_m2", 62, 3072, 48, 8, 200064, head_dim=128, attn_type_list=[1] * 62,
             quantization_config=FP8 | {"modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"]}),
        (62, 3072, 200064, 128), "", True),
    "Nemotron-H-8B": (
        flat("NemotronHForCausalLM", "nemotron_h", 52, 4096, 32, 8, 131072, attention_head_dim=128,
             hybrid_override_pattern=NEMOTRON),
        (52, 4096, 131072, 128), "", True),
    "granite-3.1-8b": (
        flat("GraniteForCausalLM", "granite", 40, 4096, 32, 8, 49155, tied=True), (40, 4096, 49155, 128), "", True),
    "OLMo-2-7B": (flat("Olmo2ForCausalLM", "olmo2", 32, 4096, 32, 32, 100352), (32, 4096, 100352, 128), "", True),
    "SmolLM2-135M": (
        flat("LlamaForCausalLM", "llama", 30, 576, 9, 3, 49152, tied=True), (30, 576, 49152, 64), "", True),
    "Llama-3.1-8B-FP8": (
        LLAMA_8B | {"architectures": ["LlamaForCausalLM"], "quantization_config": W8A8 | {"ignore": ["lm_head"]}},
        (32, 4096, 128256, 128), "", True),
    "Llama-3.1-8B-FP8-head": (
        LLAMA_8B | {"architectures": ["LlamaForCausalLM"], "quantization_config": W8A8 | {"ignore": []}},
        (32, 4096, 128256, 128), "", True),
    "gpt2": (GPT2, (12, 768, 50257, 64), "", False),
}  # fmt: skip


def facts(name: str) -> vc.VerifierFacts:
    return vc.from_config(MODELS[name][0], name)


@pytest.mark.parametrize("name", MODELS)
def test_sizes_nesting_and_support_of_published_models(name) -> None:
    _, sizes, nested_in, support = MODELS[name]
    got, layers = facts(name), sizes[0]
    assert (got.num_layers, got.hidden_size, got.vocab_size, got.head_dim) == sizes
    assert (got.name, got.nested_in, got.supports_eagle3) == (name, nested_in, support)
    assert got.default_aux_layer_ids == [2, layers // 2, layers - 3]
    assert got.missing == () and (got.embed_key, got.norm_key, got.head_key) == ("", "", "")


def test_the_known_ids_of_the_kimi_reference() -> None:
    assert facts("Kimi-K2.5").default_aux_layer_ids == [2, 30, 58]  # as AQ-MedAI's published head


HYBRID = {
    "Llama-4-Scout": "attention in chunks of 8192 tokens mixed with full attention",
    "Qwen3-Next-80B-A3B": "linear attention, full attention in every 4th layer",
    "gpt-oss-20b": "12 sliding_attention, 12 full_attention",
    "gpt-oss-120b": "18 sliding_attention, 18 full_attention",
    "gemma-3-27b-it": "sliding window of 1024 tokens, full attention in every 6th layer",
    "gemma-3-4b-it": "sliding window of 1024 tokens, full attention in every 6th layer",
    "gemma-3-1b-it": "sliding window of 512 tokens, full attention in every 6th layer",
    "gemma-4-26B-A4B-it": "25 sliding_attention, 5 full_attention",
    "Nemotron-H-8B": "24 mamba, 24 mlp, 4 attention",
}
TIED = {"Llama-3.2-1B", "gemma-3-27b-it", "gemma-3-4b-it", "gemma-3-1b-it", "gemma-4-26B-A4B-it", "Phi-4-mini",
        "granite-3.1-8b", "SmolLM2-135M", "gpt2"}  # fmt: skip
QUANTISED = {
    "Kimi-K2.5": ("compressed-tensors (pack-quantized, 4 bits)", False),
    "Kimi-K2-Instruct": ("fp8", None),  # its silence proves nothing: the tensor's dtype decides
    "DeepSeek-R1": ("fp8", None),
    "gpt-oss-20b": ("mxfp4", False),
    "gpt-oss-120b": ("mxfp4", False),
    "MiniMax-M2": ("fp8", False),
    "Llama-3.1-8B-FP8": ("compressed-tensors (float-quantized, 8 bits)", False),
    "Llama-3.1-8B-FP8-head": ("compressed-tensors (float-quantized, 8 bits)", True),
}


@pytest.mark.parametrize("name", MODELS)
def test_attention_ties_and_quantisation_of_published_models(name) -> None:
    got = facts(name)
    assert got.hybrid_attention == HYBRID.get(name, "")
    assert got.tied == (name in TIED)
    assert (got.quantisation, got.head_quantised) == QUANTISED.get(name, ("", False))


def test_rope_takes_one_form() -> None:
    assert facts("Llama-3.1-8B").rope == {"rope_theta": 500000.0, **LLAMA3}
    assert facts("Kimi-K2.5").rope == {"rope_theta": 50000.0, "rope_type": "yarn",
                                       "factor": 64.0, "original_max_position_embeddings": 4096, "mscale": 1.0}  # fmt: skip
    assert facts("Qwen3-Next-80B-A3B").rope == {
        "rope_type": "default",
        "rope_theta": 10000000,
        "partial_rotary_factor": 0.25,
    }
    assert facts("Qwen2.5-VL-7B").rope == {
        "rope_type": "default",
        "rope_theta": 1000000.0,
        "mrope_section": [16, 24, 24],
    }
    assert facts("gemma-4-26B-A4B-it").rope == {
        "rope_type": "proportional", "rope_theta": 1000000.0, "partial_rotary_factor": 0.25}  # fmt: skip
    phi = facts("Phi-4-mini").rope
    assert phi and (phi["rope_type"], phi["original_max_position_embeddings"]) == ("longrope", 4096)
    assert facts("gpt2").rope is None


@pytest.mark.parametrize(
    ("block", "words", "head"),
    [
        ({"quant_method": "awq", "bits": 4, "modules_to_not_convert": None}, "awq (4 bits)", False),
        ({"quant_method": "gptq", "bits": 4, "lm_head": True}, "gptq (4 bits)", True),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}, "modelopt (NVFP4)", False),
        ({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "exclude_modules": ["*lm_head*"]}},
         "modelopt (FP8)", False),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["*.gate"]}, "modelopt (FP8)", True),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "llm_int8_skip_modules": ["lm_head"]},
         "bitsandbytes (4 bits)", False),
        ({"quant_method": "fp8", "ignored_layers": ["re:.*lm_head"]}, "fp8", False),
        ({"quant_method": "fp8", "ignored_layers": ["re:(", 3, None, "[z-a", "re:.*audio_head"]}, "fp8", None),
        (W8A8 | {"config_groups": {"g": {"targets": ["re:.*experts.*"]}}}, "compressed-tensors (float-quantized)", False),
    ],
)  # fmt: skip
def test_what_the_quantisation_says_of_the_head(block, words, head) -> None:
    got = vc.from_config({**LLAMA_8B, "quantization_config": block})
    assert (got.quantisation, got.head_quantised) == (words, head)


@pytest.mark.parametrize(
    ("rest", "words"),
    [
        ({"sliding_window": 4096, "max_position_embeddings": 32768}, "sliding window of 4096 tokens"),
        ({"sliding_window": 4096, "max_position_embeddings": 32768, "use_sliding_window": True, "max_window_layers": 32}, ""),
        ({"attn_type_list": [0, 0, 0, 1]}, "3 linear, 1 full"),
        ({"hybrid_layer_pattern": [0, 1, 1, 1, 1]}, "4 sliding, 1 full"),
        ({"attn_layer_indices": [9, 18, 27]}, "mamba layers, attention in 3"),
        ({"attn_layer_period": 8}, "mamba, full attention in every 8th layer"),
        ({"linear_attn_config": {"kda_layers": [1, 2, 3], "full_attn_layers": [4]}}, "linear attention (3 linear, 1 full)"),
        ({"layers_block_type": ["mamba", "attention", "mamba"]}, "2 mamba, 1 attention"),
        ({"layer_types": ["full_attention"] * 4, "sliding_window": 8}, ""),
    ],
)  # fmt: skip
def test_layers_that_are_not_full_attention(rest, words) -> None:
    assert vc.from_config({**LLAMA_8B, **rest}).hybrid_attention == words


def test_values_of_a_wrong_type_count_as_absent() -> None:
    got = vc.from_config({
        "architectures": "LlamaForCausalLM", "model_type": 3, "num_hidden_layers": "32", "hidden_size": True,
        "num_attention_heads": [8, 16], "vocab_size": None, "num_key_value_heads": [2, 4], "rms_norm_eps": float("nan"),
        "rope_theta": 10**400, "text_config": 7, "dtype": ["bf16"], "tie_word_embeddings": "yes",
    })  # fmt: skip
    assert got.missing == vc.NEEDED and got.supports_eagle3 is None and got.default_aux_layer_ids is None
    assert (got.num_kv_heads, got.rms_norm_eps, got.rope, got.dtype, got.tied) == (None, None, None, "", False)


@pytest.mark.parametrize(
    "path", ["llm_config", "language_config", "text_model", "thinker_config.text_config", "decoder_of_ours"]
)
def test_a_nested_text_part_is_found_and_a_vision_part_is_not(path) -> None:
    config: dict = {**LLAMA_8B, "dtype": "bfloat16"}
    for key in reversed(path.split(".")):
        config = {key: config}
    whole = llm(40, 1, 1, 1, 9)  # a tower with every size, a vocabulary too
    got = vc.from_config({"vision_config": whole, "audio_encoder": whole, "talker": {"text_config": whole}, **config})
    assert (got.nested_in, got.num_layers, got.dtype) == (path, 32, "bfloat16")


def test_unknown_and_unsupported_are_told_apart() -> None:
    assert vc.from_config({"architectures": ["NobodysForCausalLM"]}).supports_eagle3 is None
    assert vc.from_config({"architectures": ["NobodysForCausalLM", "Qwen3ForCausalLM"]}).supports_eagle3 is True
    assert vc.from_config({"architectures": ["LlamaForCausalLMEagle3"]}).supports_eagle3 is False  # itself a draft
    assert vc.from_config({}).supports_eagle3 is None


KEYS = ["architectures", "text_config", "thinker_config", "layer_types", "rope_parameters", "rope_scaling", "ignore",
        "quantization_config", "config_groups", "targets", "weights", "linear_attn_config", "sliding_window", "attn_type_list",
        "hybrid_override_pattern", "tie_word_embeddings", "_name_or_path", "num_key_value_heads", "kv_lora_rank",
        "quant_method", "rope_theta", "rms_norm_eps", "num_bits", *vc.NEEDED]  # fmt: skip
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12) | st.sampled_from(
    ["re:(a", "lm_head", "full_attention", "compressed-tensors", "[", 10**400, 1, 64])  # fmt: skip
JSON = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=6), inner, max_size=6)
    ),
    max_leaves=25,
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=6), JSON, max_size=8))
def test_no_json_object_breaks_it(config) -> None:
    got = vc.from_config(config)
    for field in fields(got):
        value = getattr(got, field.name)
        if "int" in str(field.type):
            assert value is None or (type(value) is int and value > 0)
    assert set(got.missing) <= set(vc.NEEDED)


# --- files ---


def safetensors(file, tensors: dict[str, str], metadata: bool = True) -> None:
    """A file with a header and no weights: name → dtype, one element each."""
    header: dict = {"__metadata__": {"format": "pt"}} if metadata else {}
    header |= {name: {"dtype": dtype, "shape": [1], "data_offsets": [0, 2]} for name, dtype in tensors.items()}
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + b"\0\0")


def folder(tmp_path, config, weight_map=None):
    (tmp_path / "config.json").write_text(json.dumps(config))
    if weight_map is not None:
        index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    return tmp_path


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty file"),
        (b"{", "expected: JSON"),
        (b"[1, 2]", "found:    a list"),
        (b"\xff\xfe{}", "expected: UTF-8"),
        (b'{"a": ' * 200_000, "nested brackets"),
        (b'{"a": ' + b"9" * 5000 + b"}", "expected: JSON"),
        (b"{" + b" " * 10_000_001 + b"}", "found:    10,000,003 bytes"),
    ],
)
def test_what_is_no_config_is_refused(tmp_path, content, message) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(UserError) as error:
        vc.read(tmp_path)
    assert message in str(error.value) and "next:" in str(error.value)


@pytest.mark.parametrize("name", ["", "absent", "absent.json", "weights.bin"])
def test_what_is_not_there_is_refused(tmp_path, name) -> None:
    (tmp_path / "weights.bin").write_bytes(b"")
    with pytest.raises(UserError, match=r"no verifier config(.|\n)*next: "):
        vc.read(tmp_path / name)


def test_a_config_alone_is_enough(tmp_path) -> None:
    file = folder(tmp_path, MODELS["Kimi-K2.5"][0]) / "config.json"
    assert vc.read(tmp_path) == vc.read(file) and vc.read(file).name == tmp_path.name
    copy = file.rename(tmp_path / "kimi-k2.5.json")
    assert (vc.read(copy).name, vc.read(copy).num_layers) == ("kimi-k2.5", 61)
    snapshot = tmp_path / "models--moonshotai--Kimi-K2.5" / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    assert vc.read(folder(snapshot, {})).name == "moonshotai/Kimi-K2.5"
    assert vc.from_config({"_name_or_path": "/data/models/mine"}).name == "mine"


def test_three_tensors_beside_two_hundred_thousand(tmp_path) -> None:
    shard = "model-{:05d}-of-000064.safetensors".format
    names = {f"language_model.model.layers.{layer}.mlp.experts.{e}.{proj}_proj.weight_{part}": shard(layer + 1)
             for layer in range(61) for e in range(384) for proj in ("gate", "up", "down")
             for part in ("packed", "scale", "shape")}  # fmt: skip
    names |= {f"language_model.model.layers.{layer}.post_attention_layernorm.weight": shard(1) for layer in range(61)}
    names |= {"vision_tower.encoder.norm.weight": shard(64), "mm_projector.pre_norm.weight": shard(64)}
    three = (
        "language_model.model.embed_tokens.weight",
        "language_model.model.norm.weight",
        "language_model.lm_head.weight",
    )
    where = folder(tmp_path, MODELS["Kimi-K2.5"][0], names | dict.fromkeys(three, shard(62)))
    safetensors(tmp_path / shard(62), dict.fromkeys(three, "BF16"))
    del names
    vc.read(where)  # reads vLLM's list and compiles what is compiled once
    tracemalloc.start()
    started = time.perf_counter()
    got = vc.read(where)
    seconds, peak = time.perf_counter() - started, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (where / "model.safetensors.index.json").stat().st_size > 20_000_000
    assert (got.embed_key, got.norm_key, got.head_key) == three and got.head_quantised is False
    assert peak < 10_000_000 and seconds < 0.5, (peak, seconds)


@pytest.mark.parametrize("size", [1, 2, 7, 64, 1 << 20])
def test_a_name_across_two_blocks_is_found(tmp_path, monkeypatch, size) -> None:
    monkeypatch.setattr(verifier_tensors, "_BLOCK", size)
    monkeypatch.setattr(verifier_tensors, "_LONGEST_ENTRY", 60)
    names = {f"model.layers.{i}.input_layernorm.weight": "a.safetensors" for i in range(20)}
    where = folder(
        tmp_path, LLAMA_8B, {"lm_head.weight": "b.safetensors", **names, "model.norm.weight": "c.safetensors"}
    )
    got = vc.read(where)
    assert (got.head_key, got.norm_key, got.embed_key) == ("lm_head.weight", "model.norm.weight", "")


def test_tied_without_a_head_and_a_single_file(tmp_path) -> None:
    where = folder(tmp_path, MODELS["SmolLM2-135M"][0])
    safetensors(where / "model.safetensors", {"model.embed_tokens.weight": "BF16", "model.norm.weight": "BF16"})
    got = vc.read(where)
    assert got.tied and got.head_key == got.embed_key == "model.embed_tokens.weight" and got.head_quantised is False
    safetensors(where / "model.safetensors", {"model.embed_tokens.weight": "BF16", "lm_head.weight": "F8_E4M3"})
    got = vc.read(where)
    assert (got.head_key, got.norm_key, got.head_quantised) == ("lm_head.weight", "", True)


def test_a_head_missing_without_a_tie_stays_unknown(tmp_path) -> None:
    where = folder(tmp_path, LLAMA_8B)
    safetensors(where / "model.safetensors", {"model.embed_tokens.weight": "BF16", "model.norm.weight": "BF16"})
    assert not vc.read(where).tied and vc.read(where).head_key == ""
    del (silent := dict(LLAMA_8B))["tie_word_embeddings"]
    assert vc.read(folder(where, silent)).tied and vc.read(where).head_key == "model.embed_tokens.weight"


@pytest.mark.parametrize(
    ("names", "key", "quantised"),
    [
        (["lm_head.weight_packed", "lm_head.weight_scale", "lm_head.weight_shape"], "lm_head.weight_packed", True),
        (["lm_head.weight", "lm_head.weight_scale"], "lm_head.weight", True),
        (["language_model.lm_head.qweight", "language_model.lm_head.qzeros"], "language_model.lm_head.qweight", True),
        (["lm_head.weight", "lm_head.bias"], "lm_head.weight", None),
        (["lm_head.weight", "thinker.lm_head.weight"], "lm_head.weight", None),
    ],
)
def test_a_packed_head_is_seen_in_the_index_alone(tmp_path, names, key, quantised) -> None:
    where = folder(tmp_path, LLAMA_8B | {"quantization_config": FP8}, dict.fromkeys(names, "model-1.safetensors"))
    assert (vc.read(where).head_key, vc.read(where).head_quantised) == (key, quantised)


def test_the_dtype_of_the_head_overrides_the_config(tmp_path) -> None:
    weight_map = {"lm_head.weight": "model-2.safetensors", "model.norm.weight": "model-1.safetensors"}
    where = folder(tmp_path, LLAMA_8B | {"quantization_config": FP8}, weight_map)
    for dtype, quantised in (("BF16", False), ("F8_E4M3", True), ("I32", True)):
        safetensors(where / "model-2.safetensors", {"model.layers.0.x": "I32", "lm_head.weight": dtype}, metadata=False)
        assert vc.read(where).head_quantised is quantised


def test_towers_talkers_and_mtp_layers_are_not_the_language_model(tmp_path) -> None:
    names = ["visual.norm.weight", "talker.model.norm.weight", "talker.lm_head.weight", "mtp.norm.weight", "norm.weight",
             "thinker.model.embed_tokens.weight", "thinker.model.norm.weight", "thinker.lm_head.weight",
             "thinker.model.layers.47.embed_tokens.weight", "audio_tower.embed_tokens.weight"]  # fmt: skip
    got = vc.read(folder(tmp_path, {}, dict.fromkeys(names, "s.safetensors")))
    assert [got.embed_key, got.norm_key, got.head_key] == [
        "thinker.model.embed_tokens.weight",
        "thinker.model.norm.weight",
        "thinker.lm_head.weight",
    ]


@pytest.mark.parametrize(
    ("names", "keys"),
    [
        (["wte.weight", "h.0.ln_1.weight", "ln_f.weight"], ("wte.weight", "ln_f.weight", "wte.weight")),
        (["t.embedding.word_embeddings.weight", "t.encoder.final_layernorm.weight", "t.output_layer.weight"],
         ("t.embedding.word_embeddings.weight", "t.encoder.final_layernorm.weight", "t.output_layer.weight")),
        (["backbone.embeddings.weight", "backbone.layers.0.norm.weight", "backbone.norm_f.weight", "lm_head.weight"],
         ("backbone.embeddings.weight", "backbone.norm_f.weight", "lm_head.weight")),
        (["model.tok_embeddings.weight", "model.layers.0.attention.output.weight", "model.norm.weight", "output.weight"],
         ("model.tok_embeddings.weight", "model.norm.weight", "output.weight")),
        (["model.language_model.embed_tokens.weight", "model.language_model.norm.weight", "lm_head.weight"],
         ("model.language_model.embed_tokens.weight", "model.language_model.norm.weight", "lm_head.weight")),
    ],
)  # fmt: skip
def test_names_of_other_families(tmp_path, names, keys) -> None:
    got = vc.read(
        folder(tmp_path, {"model_type": "gpt2"} if "wte.weight" in names else {}, dict.fromkeys(names, "s.safetensors"))
    )
    assert (got.embed_key, got.norm_key, got.head_key) == keys


def test_shards_without_an_index(tmp_path) -> None:
    where = folder(tmp_path, LLAMA_8B)
    safetensors(where / "model-00001-of-00002.safetensors", {"model.embed_tokens.weight": "BF16"})
    safetensors(where / "model-00002-of-00002.safetensors", {"lm_head.weight": "F16", "model.norm.weight": "F16"})
    got = vc.read(where)
    assert (got.embed_key, got.head_key, got.head_quantised) == ("model.embed_tokens.weight", "lm_head.weight", False)


def test_an_index_never_leads_outside_the_folder(tmp_path) -> None:
    (inside := tmp_path / "inside").mkdir()
    safetensors(tmp_path / "outside.safetensors", {"lm_head.weight": "I8"})
    for shard in ("../outside.safetensors", str(tmp_path / "outside.safetensors")):
        assert vc.read(folder(inside, LLAMA_8B, {"lm_head.weight": shard})).head_quantised is False


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "0 bytes in all"),
        ((2**60).to_bytes(8, "little") + b"{}", "bytes announced"),
        ((40_000_000).to_bytes(8, "little") + b"{" + b" " * 40_000_000, "at most 32,000,000 bytes"),
        ((2).to_bytes(8, "little") + b"[]", "bytes announced"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "git lfs pull"),
    ],
)
def test_a_damaged_weight_file_is_refused(tmp_path, data, message) -> None:
    where = folder(tmp_path, LLAMA_8B)
    (where / "model.safetensors").write_bytes(data)
    with pytest.raises(UserError) as error:
        vc.read(where)
    assert message in str(error.value)


def test_modelopt_keeps_its_quantisation_in_a_file_of_its_own(tmp_path) -> None:
    where = folder(tmp_path, LLAMA_8B)
    block = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    (where / "hf_quant_config.json").write_text(json.dumps(block))
    assert (vc.read(where).quantisation, vc.read(where).head_quantised) == ("modelopt (FP8)", False)


# --- the rules agree with their sources ---


def python(code: str) -> str:
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()[-1]


def test_it_imports_nothing_heavy() -> None:
    heavy = "{'torch', 'numpy', 'transformers', 'pydantic', 'vllm'}"
    assert python(f"import sys, eaglebook.checkpoint.verifier_config; print({heavy} & set(sys.modules))") == "set()"


def test_the_list_agrees_with_the_installed_vllm() -> None:
    names = ["LlamaForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "GptOssForCausalLM", "DeepseekV3ForCausalLM",
             "KimiK25ForConditionalGeneration", "NemotronHForCausalLM", "Olmo2ForCausalLM", "Glm4MoeForCausalLM",
             "Gemma3ForCausalLM", "MixtralForCausalLM"]  # fmt: skip
    code = f"""
import importlib, json
from vllm.model_executor.models import registry
from vllm.model_executor.models.interfaces import supports_eagle3
def supported(name):
    module, cls = registry._VLLM_MODELS[name]
    return bool(supports_eagle3(getattr(importlib.import_module(registry._resolve_module_name(module)), cls)))
print(json.dumps([{{n: supported(n) for n in {names}}}, sorted(registry._VLLM_MODELS)]))
"""
    asked, every_name = json.loads(python(code))
    assert {name: vc.from_config({"architectures": [name]}).supports_eagle3 for name in names} == asked
    assert len(set(asked.values())) == 2
    assert set(every_name) - set(vc._registry()) == {"Dots3NoteForCausalLM", "Dots3NoteMTPModel", "Terratorch"}
    assert set(vc._registry()) <= set(every_name)
