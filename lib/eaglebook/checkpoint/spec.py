"""One canonical description of an EAGLE-3 draft, whatever format it came in, and where each value comes from.

Nothing is filled in silently: a value is *stated* by the config, read off the *weights*, a *default* of a named reader,
or *absent*.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from eaglebook.checkpoint import names
from eaglebook.checkpoint.formats import FLAT, NESTED, WRAPPED, Format, architectures
from eaglebook.checkpoint.headers import Tensor
from eaglebook.checkpoint.source import Source

Origin = Literal["stated", "weights", "default", "absent"]
NORM_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
AUX_IDS = "eagle_aux_hidden_state_layer_ids"
INTEGERS = {
    "num_hidden_layers", "hidden_size", "target_hidden_size", "intermediate_size", "num_attention_heads", "vocab_size",
    "num_key_value_heads", "head_dim", "draft_vocab_size", "max_position_embeddings", "num_aux_hidden_states",
}  # fmt: skip
INPUT, OUTPUT, UNKNOWN = (
    "input",
    "output",
    "unknown",
)  # what an aux id k means: the stream entering layer k, or leaving it

# What the config class of a flat file fills in (transformers 5.19), and vLLM's SpeculatorsConfig (vLLM 0.32) for a nested one.
_LLAMA: dict[str, Any] = {
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 2048, "hidden_act": "silu",
    "tie_word_embeddings": False,
}  # fmt: skip
_CLASS_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "qwen3": {**_LLAMA, "max_position_embeddings": 32768, "head_dim": 128},
    "mistral": {**_LLAMA, "max_position_embeddings": 131072, "num_key_value_heads": 8},
    "qwen2": {**_LLAMA, "max_position_embeddings": 32768},
}
_NESTED_DEFAULTS = {"rope_theta": 10000.0, "max_position_embeddings": 8192}
_FLAG_DEFAULTS = {
    NESTED: {"norm_before_residual": True, "norm_before_fc": False, "fc_norm": False, "norm_output": False},
    FLAT: {"norm_before_residual": False, "norm_before_fc": False, "fc_norm": False, "norm_output": False},
}


@dataclass(frozen=True)
class Value:
    """A value, its origin, and the key, tensor or reader it comes from."""

    value: Any
    origin: Origin
    where: str = ""

    @property
    def known(self) -> bool:
        return self.origin in ("stated", "weights")


ABSENT = Value(None, "absent")


@dataclass(frozen=True)
class DraftSpec:
    """Everything any format says about a draft. Sizes in elements; ``rope`` is one object in the style of transformers 5."""

    architectures: Value
    model_type: Value  # of the decoder layer: llama, qwen3, …
    num_hidden_layers: Value
    hidden_size: Value
    target_hidden_size: Value
    intermediate_size: Value
    num_attention_heads: Value
    num_key_value_heads: Value
    head_dim: Value
    head_dim_in_weights: Value
    vocab_size: Value
    draft_vocab_size: Value
    hidden_act: Value
    rms_norm_eps: Value
    rope: Value
    max_position_embeddings: Value
    norm_before_residual: Value
    norm_before_fc: Value
    fc_norm: Value
    norm_output: Value
    aux_layer_ids: Value
    aux_ids_mean: Value  # "input", "output" or "unknown"
    num_aux_hidden_states: Value
    use_aux_hidden_state: Value
    attention_bias: Value
    mlp_bias: Value
    tie_word_embeddings: Value
    dtype: Value
    sliding_window: Value
    layer_types: Value
    logit_scale: Value
    bos_token_id: Value
    eos_token_id: Value
    pad_token_id: Value
    d2t: Value  # True when stored
    t2d: Value
    lm_head: Value
    embed_tokens: Value
    quantisation: Value
    mla: Value  # the five sizes of multi-head latent attention, or absent
    verifier: Value
    verifier_architectures: Value
    speculative_tokens: Value

    def items(self) -> list[tuple[str, Value]]:
        return [(field.name, getattr(self, field.name)) for field in fields(self)]

    def as_dict(self) -> dict[str, Any]:
        """For JSON: each value beside its origin; absent ones are left out."""
        return {
            name: {"value": value.value, "origin": value.origin, "where": value.where}
            for name, value in self.items()
            if value.origin != "absent"
        }


def read(source: Source, format_: Format, verifier_layers: int | None = None, ids_mean: str = "") -> DraftSpec:
    """The spec of an EAGLE-3 draft. ``ids_mean`` ("input" or "output") is what the user says about the aux ids."""
    own, _ = names.owned(source.tensors or ())
    stored = {plain: source.tensors[name] for name, plain in own.items()} if source.tensors else {}
    reader = _Reader(source.config or {}, format_.layout, stored)
    ids = reader.aux_ids()
    spec = {name: reader.find(name) for name in _PLAIN_KEYS}
    return DraftSpec(
        **spec,
        architectures=reader.find("architectures", top=True),
        model_type=reader.model_type(),
        head_dim=reader.head_dim(),
        head_dim_in_weights=reader.weights("head_dim"),
        target_hidden_size=reader.find("target_hidden_size", top=True),
        draft_vocab_size=reader.draft_vocab_size(),
        rope=reader.rope(),
        norm_before_residual=reader.flag("norm_before_residual"),
        norm_before_fc=reader.flag("norm_before_fc"),
        fc_norm=reader.flag("fc_norm"),
        norm_output=reader.flag("norm_output"),
        aux_layer_ids=ids,
        aux_ids_mean=ids_meaning(ids, source, format_, reader.eagle, verifier_layers, ids_mean),
        num_aux_hidden_states=reader.find("num_aux_hidden_states", top=True, then_layer=True),
        use_aux_hidden_state=reader.find_in(reader.eagle, "eagle_config.", "use_aux_hidden_state"),
        attention_bias=reader.attention_bias(),
        tie_word_embeddings=reader.find("tie_word_embeddings", top=True, then_layer=True),
        dtype=reader.dtype(),
        d2t=reader.stored(stored, "d2t"),
        t2d=reader.stored(stored, "t2d"),
        lm_head=reader.stored(stored, "lm_head.weight"),
        embed_tokens=reader.stored(stored, "embed_tokens.weight"),
        quantisation=reader.find("quantization_config", top=True, then_layer=True),
        mla=reader.mla(),
        verifier=reader.verifier("name_or_path"),
        verifier_architectures=reader.verifier("architectures"),
        speculative_tokens=reader.speculative_tokens(),
    )


_PLAIN_KEYS = (
    "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size",
    "hidden_act", "rms_norm_eps", "max_position_embeddings", "mlp_bias", "sliding_window", "layer_types", "logit_scale",
    "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip


def ids_meaning(
    ids: Value,
    source: Source,
    format_: Format,
    eagle: Mapping[str, Any],
    verifier_layers: int | None = None,
    told: str = "",
) -> Value:
    """What the aux ids count: the *input* of layer k (vLLM, speculators ≥ 0.5) or its *output* (SGLang, SpecForge, ModelOpt).

    Certain: the user says so; the export says so; a nested config; a trainer whose export is known; an id that only one
    reading allows; or ids that are exactly a verifier's default under one reading, (2, L//2, L-3) or (1, L//2-1, L-4).
    Otherwise unknown: SGLang then guesses by the first id (pull request 25454), and a guess is not written into a file.
    """
    config = source.config or {}
    if not ids.value:
        return ABSENT
    if told:
        return Value(told, "stated", "--ids-mean")
    if eagle.get("ids_mean") in (INPUT, OUTPUT):
        return Value(eagle["ids_mean"], "stated", "eagle_config.ids_mean")
    pattern = _default_pattern(ids.value, verifier_layers)
    if format_.layout == NESTED:
        if re.match(r"speculators 0\.[1-4](\.|$)", format_.producer):
            return Value(UNKNOWN, "absent", "speculators before 0.5 counted outputs, vLLM reads inputs")
        if pattern and pattern[0] == OUTPUT and "Eagle3Speculator" in architectures(config):  # the converter's class
            return Value(
                UNKNOWN,
                "absent",
                f"converted into the speculators format, which counts inputs, but the ids are {pattern[1]}",
            )
        return Value(INPUT, "stated", "the speculators format")
    if format_.producer.startswith(
        "TorchSpec"
    ):  # tools/convert_to_hf.py: --vllm renames the layer and moves kimi_k2's ids
        moved = config.get("model_type") == "kimi_k2" and any(n.startswith("layers.0.") for n in source.tensors or ())
        return Value(
            INPUT if moved else OUTPUT, "stated", f"{format_.producer}{', exported for vLLM' if moved else ''}"
        )
    if source.backup is not None and source.backup.get(AUX_IDS) == ids.value:
        return Value(INPUT, "stated", "config_speculators.json has the same ids")
    if verifier_layers is not None and max(ids.value) == verifier_layers:
        return Value(
            INPUT, "weights", f"id {verifier_layers} exists only as an input count of {verifier_layers} layers"
        )
    return Value(pattern[0], "weights", pattern[1]) if pattern else Value(UNKNOWN, "absent", "the file does not say")


def _default_pattern(ids: Sequence[int], verifier_layers: int | None) -> tuple[str, str] | None:
    """The reading under which three ids are exactly a verifier's default, and that default; None under neither."""
    for shift, meaning in ((0, INPUT), (1, OUTPUT)) if len(ids) == 3 else ():
        first, middle, last = (i + shift for i in ids)
        layers = last + 3
        if verifier_layers in (None, layers) and first == 2 and middle == layers // 2:
            return meaning, f"exactly ({'2, L//2, L-3' if meaning == INPUT else '1, L//2-1, L-4'}) of {layers} layers"
    return None


class _Reader:
    """Looks each value up in the order of its layout. One config, one layout."""

    def __init__(self, config: Mapping[str, Any], layout: str, stored: Mapping[str, Tensor]) -> None:
        self.config, self.layout = config, layout
        inner = config.get("transformer_layer_config") if layout == NESTED else config.get("model")
        nested = layout in (NESTED, WRAPPED) and isinstance(inner, dict)
        self.layer: Mapping[str, Any] = inner if nested else config  # type: ignore[assignment]
        self.prefix = {NESTED: "transformer_layer_config.", WRAPPED: "model."}.get(layout, "") if nested else ""
        eagle = config.get("eagle_config") or (self.layer.get("eagle_config") if layout == WRAPPED else None)
        self.eagle: Mapping[str, Any] = eagle if isinstance(eagle, dict) else {}
        self.sizes = measured(stored, self.layer.get("num_attention_heads"), config.get("target_hidden_size"))

    def find_in(self, where: Mapping[str, Any], prefix: str, key: str) -> Value:
        value = where.get(key)
        if value is None or (key in INTEGERS and type(value) is not int):  # a wrong type is a finding, not a value
            return ABSENT
        return Value(value, "stated", prefix + key)

    def find(self, key: str, *, top: bool = False, then_layer: bool = False) -> Value:
        """Stated, else read off the weights, else the default of the reader, else absent."""
        places = [(self.config, "")] if top else [(self.layer, self.prefix)]
        if (top and then_layer) or (not top and self.layout == WRAPPED):
            places.append((self.layer, self.prefix) if top else (self.config, ""))
        for where, prefix in places:
            value = self.find_in(where, prefix, key)
            if value.origin == "stated":
                return value
        if key in self.sizes:
            return self.weights(key)
        return self.default(key)

    def weights(self, key: str) -> Value:
        return Value(self.sizes[key], "weights", _MEASURED[key]) if key in self.sizes else ABSENT

    def default(self, key: str) -> Value:
        if self.layout == NESTED:
            who, values = "vLLM's SpeculatorsConfig", _NESTED_DEFAULTS
        else:
            kind = self.layer.get("model_type")
            who, values = f"transformers' {kind} config", _CLASS_DEFAULTS.get(kind if isinstance(kind, str) else "", {})
        if key == "num_key_value_heads" and key not in values and type(self.layer.get("num_attention_heads")) is int:
            return Value(self.layer["num_attention_heads"], "default", f"{who}: as many as heads")
        return Value(values[key], "default", who) if key in values else ABSENT

    def model_type(self) -> Value:
        value = self.find("model_type")
        if value.origin == "absent" and self.layout == NESTED:
            return Value("llama", "default", "vLLM: a nested layer without model_type")
        return value

    def head_dim(self) -> Value:
        value = self.find("head_dim")
        if value.origin != "absent":
            return value
        hidden, heads = self.find("hidden_size").value, self.find("num_attention_heads").value
        if type(hidden) is int and type(heads) is int and heads > 0:
            return Value(hidden // heads, "default", "hidden_size // num_attention_heads")
        return ABSENT

    def draft_vocab_size(self) -> Value:
        value = self.find("draft_vocab_size", top=True, then_layer=True)
        if value.origin == "absent":
            vocab = self.find("vocab_size")
            return Value(vocab.value, "default", "vLLM: vocab_size") if vocab.known else ABSENT
        return value

    def flag(self, key: str) -> Value:
        if key == "norm_before_fc" and self.layout != NESTED and self.eagle.get(key) is not None:
            return Value(self.eagle[key], "stated", f"eagle_config.{key}")  # vLLM 0.32 looks there first
        value = self.find_in(self.config, "", key)
        if value.origin == "absent" and self.layout == WRAPPED:
            value = self.find_in(self.layer, self.prefix, key)
        if value.origin == "stated" or not self.config:
            return value
        layout = NESTED if self.layout == NESTED else FLAT
        return Value(_FLAG_DEFAULTS[layout][key], "default", f"vLLM, {layout} layout")

    def attention_bias(self) -> Value:
        for key in ("attention_bias", "qkv_bias", "bias"):
            value = self.find_in(self.layer, self.prefix, key)
            if value.origin == "stated":
                return value
        return ABSENT

    def dtype(self) -> Value:
        for key in ("dtype", "torch_dtype"):
            for where, prefix in ((self.config, ""), (self.layer, self.prefix)):
                value = self.find_in(where, prefix, key)
                if value.origin == "stated":
                    return Value(str(value.value).removeprefix("torch."), "stated", value.where)
        return ABSENT

    def rope(self) -> Value:
        """``{"rope_type", "rope_theta", …}`` from either key style; ``rope_parameters`` wins, as in transformers 5.19."""
        parameters, scaling = self.layer.get("rope_parameters"), self.layer.get("rope_scaling")
        theta = self.layer.get("rope_theta")
        merged: dict[str, Any] = {}
        where = []
        for value, key in ((scaling, "rope_scaling"), (parameters, "rope_parameters")):
            if isinstance(value, dict):
                merged |= {("rope_type" if k == "type" else k): v for k, v in value.items() if v is not None}
                where.append(self.prefix + key)
        if theta is not None and "rope_theta" not in merged:
            merged["rope_theta"] = theta
            where.append(self.prefix + "rope_theta")
        if "rope_theta" not in merged:
            missing = self.default("rope_theta")
            if not merged:
                return missing if missing.origin == "absent" else Value(
                    {"rope_type": "default", "rope_theta": missing.value}, "default", missing.where
                )  # fmt: skip
            if missing.origin == "default":
                merged["rope_theta"] = missing.value
                where.append(f"rope_theta by {missing.where}")
        if isinstance(merged.get("rope_theta"), int) and not isinstance(merged["rope_theta"], bool):
            merged["rope_theta"] = float(merged["rope_theta"])
        return Value({"rope_type": "default", **merged}, "stated", ", ".join(where))

    def aux_ids(self) -> Value:
        for where, prefix in ((self.config, ""), (self.layer, self.prefix), (self.eagle, "eagle_config.")):
            ids = where.get(AUX_IDS)
            if isinstance(ids, list) and ids and all(type(i) is int for i in ids):
                return Value(ids, "stated", prefix + AUX_IDS)
        return ABSENT

    def mla(self) -> Value:
        keys = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        found = {key: self.layer[key] for key in keys if self.layer.get(key) is not None}
        return Value(found, "stated", self.prefix + "kv_lora_rank") if "kv_lora_rank" in found else ABSENT

    def verifier(self, key: str) -> Value:
        config = self.config.get("speculators_config")
        verifier = config.get("verifier") if isinstance(config, dict) else None
        if isinstance(verifier, dict) and verifier.get(key):
            return Value(verifier[key], "stated", f"speculators_config.verifier.{key}")
        flat = {"name_or_path": "verifier_name_or_path", "architectures": "verifier_architectures"}[key]
        return self.find_in(self.eagle, "eagle_config.", flat)

    def speculative_tokens(self) -> Value:
        config = self.config.get("speculators_config")
        methods = config.get("proposal_methods") if isinstance(config, dict) else None
        if isinstance(methods, list) and methods and isinstance(methods[0], dict):
            value = methods[0].get("speculative_tokens")
            if type(value) is int:
                return Value(value, "stated", "speculators_config.proposal_methods[0].speculative_tokens")
        return self.find_in(self.eagle, "eagle_config.", "speculative_tokens")

    def stored(self, tensors: Mapping[str, Tensor], name: str) -> Value:
        return Value(list(tensors[name].shape or ()), "weights", name) if name in tensors else ABSENT


# ---- sizes that the weights alone tell

_MEASURED = {
    "hidden_size": "fc.weight rows, or norm.weight",
    "intermediate_size": "layers.0.mlp.gate_proj.weight rows",
    "num_hidden_layers": "layers in the file",
    "head_dim": "q_proj rows / num_attention_heads",
    "draft_vocab_size": "lm_head.weight rows, or d2t",
    "vocab_size": "embed_tokens.weight rows, or t2d",
    "num_aux_hidden_states": "fc.weight columns / target hidden size",
}


def measured(stored: Mapping[str, Tensor], heads: Any = None, target_hidden_size: Any = None) -> dict[str, int]:
    """Sizes read off the tensors (plain names). ``head_dim`` needs the number of heads, which no tensor tells."""

    def size(name: str, dimension: int = 0) -> int | None:
        tensor = stored.get(name)
        return tensor.shape[dimension] if tensor and tensor.shape and len(tensor.shape) > dimension else None

    hidden = size("fc.weight") or size("norm.weight")
    rows, columns = size("layers.0.self_attn.q_proj.weight"), size("fc.weight", 1)
    per_state = target_hidden_size if type(target_hidden_size) is int and target_hidden_size > 0 else hidden
    layers = [n for n in map(names.layer, stored) if n is not None]
    found = {
        "hidden_size": hidden,
        "intermediate_size": size("layers.0.mlp.gate_proj.weight"),
        "num_hidden_layers": max(layers) + 1 if layers else None,
        "head_dim": rows // heads if rows and type(heads) is int and heads > 0 and rows % heads == 0 else None,
        "draft_vocab_size": size("lm_head.weight") or size("d2t"),
        "vocab_size": size("embed_tokens.weight") or size("t2d"),
        "num_aux_hidden_states": columns // per_state if columns and per_state and columns % per_state == 0 else None,
    }
    return {key: value for key, value in found.items() if value}


def same(a: Any, b: Any) -> bool:
    """Equal as configs mean it: 10000 and 10000.0 are, a missing scaling and None are."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return all(same(a.get(k), b.get(k)) for k in a.keys() | b.keys())
    if isinstance(a, Sequence) and isinstance(b, Sequence) and not isinstance(a, str):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)
