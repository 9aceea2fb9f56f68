"""The config of a draft as vLLM sees it: which class it becomes, which sizes that class is built with, or why it is refused.

Follows ``transformers_utils/config.py``, ``configs/eagle.py``, ``configs/speculators`` and the three ``*_eagle3.py`` models
of vLLM 0.32. A size that only a config class unknown here would tell is None, and nothing is predicted from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from eaglebook.checkpoint import vllm_rules as rules
from eaglebook.checkpoint.formats import architectures
from eaglebook.checkpoint.spec import AUX_IDS, INTEGERS
from eaglebook.checkpoint.vllm_rules import DEEPSEEK, LLAMA, QWEN3, Version, show

_DEEPSEEK_TYPES = ("kimi_k2", "deepseek_v3", "deepseek_v2")  # head_dim is qk_rope_head_dim when absent
_DEEPSEEK_DEFAULTS = {
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip
# vLLM takes any draft of these model types for the model's own MTP layers, whatever its architecture says
# (config/speculative.py, hf_config_override).
_TAKEN_FOR_MTP = {
    "deepseek_v3": "DeepSeekMTPModel", "deepseek_v32": "DeepseekV32MTPModel", "glm_moe_dsa": "DeepseekV32MTPModel",
    "deepseek_v4": "DeepSeekV4MTPModel", "pangu_ultra_moe": "OpenPanguMTPModel", "kimi_k3": "KimiK3MTPModel",
    "dots3_note": "Dots3NoteMTPModel",
}  # fmt: skip
# Defaults of transformers 5.19's config classes for keys a file leaves out.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32, "vocab_size": 32000,
    },
    "qwen3": {
        "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 32, "head_dim": 128, "vocab_size": 151936,
    },
}  # fmt: skip
_REQUIRED = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
    "rms_norm_eps",
    "hidden_act",
)


@dataclass(frozen=True)
class View:
    """What vLLM would build. ``refusal`` is the kind of message it stops with, "" when it does not."""

    class_: str = ""
    architecture: str = ""
    refusal: str = ""
    hidden: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    intermediate: int | None = None
    layers: int | None = None
    vocab: int | None = None
    draft_vocab: int | None = None
    target_hidden: int | None = None
    aux_count: int | None = None
    aux_ids: tuple[int, ...] | None = (
        None  # as the V1 runner takes them; None: the verifier's default; (): none that exists
    )
    use_aux: bool = True
    norm_before_fc: bool = False
    fc_norm: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    quantised: bool = False
    parallel: bool = False
    mla: Mapping[str, int] | None = None


def view(config: Mapping[str, Any], version: Version = rules.REFERENCE) -> View:
    """How vLLM ``version`` reads this config with ``method="eagle3"``."""
    model_type = config.get("model_type")
    if model_type == "speculators" or (model_type is None and config.get("speculators_config") is not None):
        return _speculators(config, version)
    if model_type is None:
        return View(refusal="Unrecognized model … Should have a `model_type` key in its config.json")
    if model_type == "eagle":
        return _wrapped(config, version)
    if not isinstance(model_type, str) or model_type not in rules.model_types():
        return View(refusal=f"model type `{model_type}` but Transformers does not recognize this architecture")
    return _native(config, str(model_type), version)


def assumed(config: Mapping[str, Any], version: Version = rules.REFERENCE) -> View:
    """The view if only the architecture were right: a refused config can still be compared with its tensors."""
    inner = config.get("transformer_layer_config") or config.get("model")
    layer = inner if isinstance(inner, dict) else {}
    fill = {**_DEFAULTS["llama"], "hidden_act": "silu"} if not layer else {"hidden_act": "silu"}
    merged = {k: v for k, v in {**fill, **config, **layer}.items() if v is not None}
    is_qwen3 = (layer or config).get("model_type") == "qwen3"
    merged |= {"hidden_act": "silu", "layer_types": None, "rope_scaling": None, "rope_parameters": None}
    return _build(
        "Eagle3Qwen3ForCausalLM" if is_qwen3 else "LlamaForCausalLMEagle3",
        merged,
        max(version, (0, 25)),
        flat=True,
        strict=False,
    )


def _native(config: Mapping[str, Any], model_type: str, version: Version) -> View:
    named = architectures(config)
    architecture = rules.rewritten(named[0]) if named else "Eagle3LlamaModel"
    odd = [key for key in sorted(INTEGERS) if config.get(key) is not None and type(config[key]) is not int]
    if odd:  # transformers 5.19 checks the types of its own config classes
        return View(refusal=f"Validation error for field '{odd[0]}': {type(config[odd[0]]).__name__}")
    merged = {**_DEFAULTS.get(model_type, {}), **{k: v for k, v in config.items() if v is not None}}
    if model_type in _TAKEN_FOR_MTP:
        architecture = f"Eagle3{_TAKEN_FOR_MTP[model_type]}"
    if model_type in _DEEPSEEK_TYPES:
        stated_null = {key for key in ("q_lora_rank",) if key in config and config[key] is None}
        merged = {**{k: v for k, v in _DEEPSEEK_DEFAULTS.items() if k not in stated_null}, **merged}
        merged.setdefault("head_dim", merged["qk_rope_head_dim"])
    return _build(architecture, merged, version, flat=True)


def _wrapped(config: Mapping[str, Any], version: Version) -> View:
    model = config.get("model")
    if not isinstance(model, dict) or config.get("method", "eagle") != "eagle3":
        return View(refusal="read as an EAGLE-1 draft, then: There is no module or parameter named 'fc'")
    rest = {k: v for k, v in config.items() if k not in ("model", "architectures", "model_type")}
    return _native({**model, **rest}, str(model.get("model_type")), version)


def _speculators(config: Mapping[str, Any], version: Version) -> View:
    kind = config.get("speculators_model_type")
    if kind not in rules.SPECULATORS_TYPES:
        return View(refusal=f"Expected one of the speculators types, found {kind!r}")
    layer = config.get("transformer_layer_config") or {}
    if not isinstance(layer, dict):
        return View(refusal="transformer_layer_config is no object")
    if kind not in ("eagle3", "peagle"):
        return View(refusal=f"speculators type {kind}: not served by method eagle3")
    model_type = layer.get("model_type", "llama")
    if not isinstance(model_type, str):
        return View(refusal=f"Unsupported model_type {model_type} for Eagle3 speculator")
    classes = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
    if version < rules.SPECULATORS_QWEN3:
        classes = dict.fromkeys((model_type, "llama"), "LlamaForCausalLM")  # whatever the layer is
    if model_type not in classes:
        return View(refusal=f"Unsupported model_type {model_type} for Eagle3 speculator")
    missing = [key for key in _REQUIRED if layer.get(key) is None]
    if missing:
        return View(refusal=f"AttributeError: 'SpeculatorsConfig' object has no attribute '{missing[0]}'")
    odd = [key for key in sorted(INTEGERS) if layer.get(key) is not None and type(layer[key]) is not int]
    if odd:  # no class checks the type: the first arithmetic with it fails
        return View(refusal=f"TypeError: {odd[0]} is a {type(layer[odd[0]]).__name__}")
    copied = (
        "draft_vocab_size",
        "target_hidden_size",
        "norm_before_residual",
        "norm_before_fc",
        "fc_norm",
        "norm_output",
        AUX_IDS,
    )
    merged = {**layer, **{key: config[key] for key in copied if config.get(key)}}
    merged["quantization_config"] = config.get("quantization_config") or layer.get("quantization_config")
    built = _build(("Eagle3" if kind == "eagle3" else "Peagle") + classes[model_type], merged, version, flat=False)
    return replace(built, parallel=kind == "peagle")


def _build(architecture: str, config: Mapping[str, Any], version: Version, *, flat: bool, strict: bool = True) -> View:
    class_, since = rules.ARCHITECTURES.get(architecture, ("", rules.NEWEST))
    if not class_ or version < since:
        known = f" (registered from {show(since)} on)" if class_ else ""
        return View(
            architecture=architecture, refusal=f"Model architectures ['{architecture}'] are not supported{known}"
        )
    if architecture.startswith(("Peagle", "PEagle")) and flat:
        return View(
            class_,
            architecture,
            refusal=f"{architecture}: a P-EAGLE draft, not served by method eagle3 without parallel_drafting",
        )

    def size(key: str) -> int | None:
        value = config.get(key)
        return value if type(value) is int else None

    if config.get("hidden_act", "silu") != "silu":
        return View(
            class_,
            architecture,
            refusal=f"Unsupported activation: {config['hidden_act']}. Only silu is supported for now.",
        )
    hidden, heads, layers = size("hidden_size"), size("num_attention_heads"), size("num_hidden_layers")
    llama_config = (
        strict and flat and config.get("model_type") == "llama"
    )  # transformers' class checks this, others do not
    if llama_config and hidden and heads and hidden % heads:
        refusal = f"The hidden size ({hidden}) is not a multiple of the number of attention heads ({heads})."
        return View(class_, architecture, refusal=refusal)
    kv_heads = size("num_key_value_heads") or heads
    if strict and heads and kv_heads and not config.get("kv_lora_rank") and heads % kv_heads:
        return View(class_, architecture, refusal=f"num_heads ({heads}) is not divisible by num_kv_heads ({kv_heads})")
    layer_types = config.get("layer_types")
    if isinstance(layer_types, list) and layer_types and layers and len(layer_types) != layers:
        refusal = f"`num_hidden_layers` ({layers}) must be equal to the number of `layer_types` ({len(layer_types)})"
        return View(class_, architecture, refusal=refusal)
    rope = {**_object(config.get("rope_scaling")), **_object(config.get("rope_parameters"))}
    kind = str(rope.get("rope_type", rope.get("type")))
    lacking = [key for key in rules.ROPE_NEEDS.get(kind, ()) if rope.get(key) is None]
    if lacking:
        refusal = f"Missing required keys in `rope_parameters` for 'rope_type'='{kind}': {lacking}"
        return View(class_, architecture, refusal=refusal)
    eagle = config.get("eagle_config")
    eagle = eagle if isinstance(eagle, dict) else {}
    top_ids, nested_ids = _ids(config.get(AUX_IDS)), _ids(eagle.get(AUX_IDS))
    ids = top_ids or (nested_ids if version >= rules.NESTED_AUX_IDS else None)
    bias = bool(config.get("attention_bias") or (class_ == LLAMA and config.get("bias")))
    mla = {
        k: config[k]
        for k in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        if size(k)
    }
    return View(
        class_=class_,
        architecture=architecture,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=size("head_dim") or (hidden // heads if hidden and heads else None),
        intermediate=size("intermediate_size"),
        layers=layers,
        vocab=size("vocab_size"),
        draft_vocab=size("draft_vocab_size") or size("vocab_size"),
        target_hidden=size("target_hidden_size") or hidden,
        aux_count=_aux_count(class_, config, eagle, top_ids, nested_ids, version),
        aux_ids=tuple(sorted(set(ids))) if ids else () if config.get(AUX_IDS) else None,
        use_aux=class_ == DEEPSEEK or bool(eagle.get("use_aux_hidden_state", True)),
        norm_before_fc=class_ != DEEPSEEK
        and version >= rules.NORM_BEFORE_FC
        and bool(eagle.get("norm_before_fc", config.get("norm_before_fc", False))),
        fc_norm=version >= rules.FC_NORM and bool(config.get("fc_norm")),
        qkv_bias=bool(config.get("attention_bias")),
        o_bias=class_ == LLAMA and bias,
        mlp_bias=class_ == LLAMA and bool(config.get("mlp_bias")),
        quantised=isinstance(config.get("quantization_config"), dict),
        mla=mla if class_ == DEEPSEEK else None,
    )  # fmt: skip


def _aux_count(
    class_: str,
    config: Mapping[str, Any],
    eagle: Mapping[str, Any],
    top_ids: list[int] | None,
    nested_ids: list[int] | None,
    version: Version,
) -> int:
    """How many states ``fc`` takes. Llama and DeepSeek do not look at the top-level ids; Qwen3 does."""
    if version < rules.AUX_COUNT:
        return 3
    keys = ("num_aux_layers", "num_aux_hidden_states") if class_ == QWEN3 else ("num_aux_hidden_states",)
    for key in keys:
        if type(config.get(key)) is int:
            return int(config[key])
    ids = (top_ids or nested_ids) if class_ == QWEN3 else nested_ids
    return len(ids) if ids else 3


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _ids(value: Any) -> list[int] | None:
    return value if isinstance(value, list) and value and all(type(i) is int for i in value) else None
