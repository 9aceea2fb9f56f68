"""The config of a draft, written out in each layout from its one spec. Every value that any reader would default is stated.

Flat: what vLLM and, with ids that count outputs, SGLang read. Nested: what speculators 0.9 writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eaglebook.checkpoint.spec import AUX_IDS, NORM_FLAGS, DraftSpec, Value

LLAMA, QWEN3, MLA = "llama", "qwen3", "mla"
_ARCHITECTURE = {LLAMA: "LlamaForCausalLMEagle3", QWEN3: "Eagle3Qwen3ForCausalLM", MLA: "Eagle3DeepseekV2ForCausalLM"}
_SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size", "hidden_act", "rms_norm_eps", "max_position_embeddings",
)  # fmt: skip
_IF_STATED = (
    "mlp_bias", "sliding_window", "layer_types", "logit_scale", "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip
# Keys that a layout writes itself, wherever the source had them; all others are carried over as they are.
_WRITTEN = {
    *_SIZES, *_IF_STATED, *NORM_FLAGS, AUX_IDS, "architectures", "model_type", "torch_dtype", "dtype", "rope_theta", "rope_scaling",
    "rope_parameters", "draft_vocab_size", "target_hidden_size", "num_aux_hidden_states", "num_aux_layers", "attention_bias", "qkv_bias", "bias",
    "tie_word_embeddings", "eagle_config", "quantization_config", "auto_map", "transformers_version", "_name_or_path",
}  # fmt: skip
_NESTED_ONLY = {
    "speculators_config", "speculators_model_type", "speculators_version", "transformer_layer_config", "embed_requires_grad",
    "base_model_ep_plan", "has_no_defaults_at_init", "model", "method",
}  # fmt: skip
# Keys of eagle_config that SGLang and ModelOpt read; they describe what every EAGLE-3 draft does.
_EAGLE = {"use_input_layernorm_in_first_layer": True, "use_last_layernorm": True, "use_mtp_layernorm": False}


def flat(spec: DraftSpec, kind: str, rest: Mapping[str, Any], ids: list[int], ids_mean: str) -> dict[str, Any]:
    """The flat config. ``kind`` is "llama", "qwen3" or "mla"; ``rest`` what the source says besides; ``ids`` as they shall stand."""
    eagle = rest.get("eagle_config")
    return {
        "architectures": [_ARCHITECTURE[kind]],
        "model_type": {LLAMA: "llama", QWEN3: "qwen3", MLA: "kimi_k2"}[kind],
        **_decoder(spec, rest),
        **_rope(spec.rope, old_style=True),
        "torch_dtype": spec.dtype.value,
        "draft_vocab_size": spec.draft_vocab_size.value,
        "target_hidden_size": spec.target_hidden_size.value or spec.hidden_size.value,
        **{flag: bool(getattr(spec, flag).value) for flag in NORM_FLAGS},
        AUX_IDS: ids,
        "num_aux_hidden_states": len(ids),
        "tie_word_embeddings": False,
        **({"quantization_config": spec.quantisation.value} if spec.quantisation.value else {}),
        "eagle_config": {
            **_EAGLE,
            **(eagle if isinstance(eagle, dict) else {}),
            "use_aux_hidden_state": spec.use_aux_hidden_state.value is not False,
            AUX_IDS: ids,
            "ids_mean": ids_mean,
            **({"norm_before_fc": bool(spec.norm_before_fc.value)} if spec.norm_before_fc.value else {}),
            **_known(verifier_name_or_path=spec.verifier, verifier_architectures=spec.verifier_architectures),
            **_known(speculative_tokens=spec.speculative_tokens),
        },
    }


def nested(
    spec: DraftSpec, kind: str, rest: Mapping[str, Any], ids: list[int], base: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The config as speculators 0.9 writes it. ``base``: an older nested config whose other keys are kept."""
    base = base or {}
    stated = base.get("speculators_config")
    old = stated if isinstance(stated, dict) else {}
    method = {
        "proposal_type": "greedy",
        "speculative_tokens": spec.speculative_tokens.value,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    methods = old.get("proposal_methods")
    if not isinstance(methods, list) or not methods or not isinstance(methods[0], dict):
        methods = [method]
    count = (
        {"num_aux_hidden_states": len(ids)} if len(ids) != 3 else {}
    )  # vLLM's llama class looks for it inside the layer
    inner = base.get("transformer_layer_config")
    return {
        "architectures": ["Eagle3DraftModel"],
        "draft_vocab_size": spec.draft_vocab_size.value,
        "dtype": spec.dtype.value,
        AUX_IDS: ids,
        "embed_requires_grad": False,
        **{key: value for key, value in base.items() if key in ("embed_requires_grad", "base_model_ep_plan", "has_no_defaults_at_init")},
        **{flag: bool(getattr(spec, flag).value) for flag in NORM_FLAGS},
        "speculators_config": {
            **old,
            "algorithm": "eagle3",
            "default_proposal_method": old.get("default_proposal_method", "greedy"),
            "proposal_methods": [{**methods[0], "speculative_tokens": spec.speculative_tokens.value}, *methods[1:]],
            "verifier": {"name_or_path": spec.verifier.value, "architectures": spec.verifier_architectures.value or []},
        },
        "speculators_model_type": "eagle3",
        "speculators_version": base.get("speculators_version", "0.9.0"),
        "target_hidden_size": spec.target_hidden_size.value,
        "tie_word_embeddings": False,
        **({"quantization_config": spec.quantisation.value} if spec.quantisation.value else {}),
        "transformer_layer_config": {
            **(inner if isinstance(inner, dict) else {}),
            "model_type": {LLAMA: "llama", QWEN3: "qwen3"}[kind],
            **_decoder(spec, rest),
            **_rope(spec.rope, old_style=False),
            "tie_word_embeddings": False,
            **count,
        },
    }  # fmt: skip


def rest_of(config: Mapping[str, Any], layer: Mapping[str, Any]) -> dict[str, Any]:
    """What a config says about the decoder besides the spec's own keys, and its ``eagle_config``: carried over."""
    kept = {k: v for k, v in layer.items() if k not in _WRITTEN | _NESTED_ONLY}
    if layer is config:
        kept = {k: v for k, v in kept.items() if not k.startswith("_")}
    eagle = config.get("eagle_config")
    return {**kept, "eagle_config": eagle} if isinstance(eagle, dict) else kept


def _decoder(spec: DraftSpec, rest: Mapping[str, Any]) -> dict[str, Any]:
    stated = {key: getattr(spec, key).value for key in _IF_STATED if getattr(spec, key).origin == "stated"}
    bias = spec.attention_bias
    return {
        **{key: value for key, value in rest.items() if key != "eagle_config"},
        **{key: getattr(spec, key).value for key in _SIZES},
        **stated,
        "attention_bias": bool(bias.value),
        "mlp_bias": bool(spec.mlp_bias.value),
        **(
            {"bias": True}
            if bias.where.endswith("bias") and bias.where.rpartition(".")[2] == "bias" and bias.value
            else {}
        ),
    }


def _rope(rope: Value, *, old_style: bool) -> dict[str, Any]:
    """Rope in the style of transformers 5, and for flat files in the older one beside it."""
    parameters = dict(rope.value)
    if not old_style:
        return {"rope_parameters": parameters}
    scaling = {k: v for k, v in parameters.items() if k != "rope_theta"}
    if scaling.get("rope_type", "default") == "default" and len(scaling) <= 1:
        return {"rope_parameters": parameters, "rope_theta": parameters.get("rope_theta"), "rope_scaling": None}
    return {
        "rope_parameters": parameters,
        "rope_theta": parameters.get("rope_theta"),
        "rope_scaling": {**scaling, "type": scaling.get("rope_type", "default")},
    }


def _known(**values: Value) -> dict[str, Any]:
    return {key: value.value for key, value in values.items() if value.origin == "stated"}
