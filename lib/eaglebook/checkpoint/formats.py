"""Which kind of checkpoint is this, and how does one know?

The *algorithm* says whether vLLM's EAGLE-3 classes can serve it at all, the *layout* where its config keeps things.
Rules look at keys, architectures and tensor names; there is no table of known files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from eaglebook.checkpoint import names
from eaglebook.checkpoint.headers import Tensor
from eaglebook.checkpoint.source import Source

EAGLE3, EAGLE1, MEDUSA, DFLASH, DSPARK, PEAGLE, MTP = (
    "EAGLE-3",
    "EAGLE-1",
    "Medusa",
    "DFlash",
    "DSpark",
    "P-EAGLE",
    "MTP",
)
NO_DRAFT, UNKNOWN = "no draft", "unknown"
NESTED, FLAT, WRAPPED, NO_CONFIG = "speculators", "flat", "wrapped", "no config"

_TYPES = {  # speculators_model_type (speculators 0.9) and config keys of other trainers
    "eagle3": EAGLE3, "eagle": EAGLE1, "hass": EAGLE1, "medusa": MEDUSA, "dflash": DFLASH, "dflash2": DFLASH,
    "dspark": DSPARK, "peagle": PEAGLE, "mtp": MTP, "fastmtp": MTP, "mlp": MEDUSA, "mlp_speculator": MEDUSA,
}  # fmt: skip
_ARCHITECTURES = (  # first match wins; searched in the name
    (r"P-?[Ee]agle", PEAGLE), (r"DSpark|DSpine", DSPARK), (r"DFlash|Domino|LiLiCorr|DFly|DFlare", DFLASH),
    (r"Medusa|MLPSpec", MEDUSA), (r"MTP|NextN", MTP), (r"Eagle3|EAGLE3", EAGLE3), (r"^Eagle(?!2)|Eagle$|EagleModel", EAGLE1),
)  # fmt: skip


@dataclass(frozen=True)
class Format:
    """``layout``: where the config keeps things. ``producer``: who wrote it, as far as it says. ``evidence``: why."""

    algorithm: str
    layout: str
    producer: str
    evidence: tuple[str, ...]

    @property
    def is_eagle3(self) -> bool:
        return self.algorithm == EAGLE3


def detect(source: Source) -> Format:
    """The format of what was read, from its config first and its tensors where the config is silent."""
    config = source.config or {}
    layout, layout_evidence = _layout(source)
    algorithm, evidence = _algorithm(config, source.tensors)
    return Format(algorithm, layout, _producer(config, source), (layout_evidence, evidence))


def _layout(source: Source) -> tuple[str, str]:
    config = source.config
    if config is None:
        return NO_CONFIG, "no config was given"
    for key in ("speculators_config", "speculators_model_type", "transformer_layer_config"):
        if config.get(key) is not None:
            return NESTED, f"{key} in the config"
    if config.get("model_type") == "eagle" and isinstance(config.get("model"), dict):
        return WRAPPED, "model_type eagle around a nested model"
    return FLAT, "decoder keys at the top level of the config"


def _algorithm(config: Mapping[str, Any], tensors: Mapping[str, Tensor] | None) -> tuple[str, str]:
    stored = {plain: tensors[name] for name, plain in names.owned(tensors)[0].items()} if tensors else {}
    algorithm, why = _by_config(config, tensors, stored)
    if algorithm == EAGLE1 and "layers.0.hidden_norm.weight" in stored:
        return EAGLE3, f"layers.0.hidden_norm, which only EAGLE-3 has (although {why})"
    return algorithm, why


def _by_config(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor] | None, stored: Mapping[str, Tensor]
) -> tuple[str, str]:
    said = config.get("speculators_model_type") or dig(config, "speculators_config", "algorithm")
    if isinstance(said, str) and said.lower() in _TYPES:
        return _TYPES[said.lower()], f"the config says {said}"
    for architecture in architectures(config):
        for pattern, algorithm in _ARCHITECTURES:
            if re.search(pattern, architecture):
                return algorithm, f"architecture {architecture}"
    by_key = (
        ("dflash_config", DFLASH), ("medusa_num_heads", MEDUSA), ("markov_rank", DSPARK), ("eagle_config", EAGLE3),
        ("eagle_aux_hidden_state_layer_ids", EAGLE3),
    )  # fmt: skip
    for key, algorithm in by_key:
        if config.get(key) is not None:
            return algorithm, f"{key} in the config"
    if tensors is not None:
        return _by_tensors(stored)
    if config.get("draft_vocab_size") is not None:
        return EAGLE3, "draft_vocab_size in the config"
    if not config:
        return UNKNOWN, "neither config nor tensors say"
    layers = config.get("num_hidden_layers", dig(config, "text_config", "num_hidden_layers"))
    if layers == 1:
        return EAGLE1, "a one-layer decoder without draft_vocab_size or eagle_config (EAGLE-1 configs look so)"
    return (
        NO_DRAFT,
        f"an ordinary config: {', '.join(architectures(config)) or config.get('model_type') or 'no architecture'}",
    )


def _by_tensors(stored: Mapping[str, Tensor]) -> tuple[str, str]:
    """Tell the algorithms apart by what their layers must have."""
    if "mask_hidden" in stored:
        return PEAGLE, "a tensor mask_hidden"
    if any(re.search(r"medusa|^\d\.\d\.linear", name) for name in stored):
        return MEDUSA, "Medusa heads among the tensors"
    if any(re.search(r"(^|\.)(mtp|eh_proj|enorm|hnorm)\b", name) for name in stored):
        return MTP, "multi-token-prediction tensors"
    if any(re.match(r"layers\.0\.hidden_norm\.", name) for name in stored):
        return EAGLE3, "layers.0.hidden_norm, which only EAGLE-3 has"
    if "hidden_norm.weight" in stored and "fc.weight" in stored:
        return DFLASH, "fc and a hidden_norm outside the layers"
    fc = stored.get("fc.weight")
    if fc is not None and fc.shape is not None and fc.columns == 2 * (fc.rows or 0):
        return EAGLE1, "fc takes two states"
    if {"d2t", "t2d"} & stored.keys():
        return EAGLE3, "a draft vocabulary mapping among the tensors"
    if fc is not None:
        return EAGLE3, "a tensor fc"
    if len({names.layer(name.removeprefix("model.")) for name in stored} - {None}) > 0:
        return NO_DRAFT, "decoder layers, but no fc, no hidden_norm and no mapping"
    return UNKNOWN, "no tensor that any draft would have"


def _producer(config: Mapping[str, Any], source: Source) -> str:
    """Who wrote the checkpoint, where it can be told. "" otherwise."""
    if config.get("speculators_version"):
        return f"speculators {config['speculators_version']}"
    if source.backup is not None and source.config is not None:
        return f"converted from speculators {source.backup.get('speculators_version', '')}".strip()
    version = config.get("_torchspec_version") or source.metadata.get("torchspec_version")
    if version:
        return f"TorchSpec {version}"
    if config.get("speculators_config") is not None or config.get("speculators_model_type") is not None:
        return "speculators, version not stated"
    stored = set(source.tensors or ())
    eagle = config.get("eagle_config")
    if isinstance(eagle, dict) and {"use_last_layernorm", "use_mtp_layernorm"} & eagle.keys():
        return "ModelOpt or an exporter of its layout"
    if "Eagle3LlamaForCausalLM" in architectures(config):
        return "AngelSlim or an exporter of its layout"
    if "LlamaForCausalLMEagle3" in architectures(config):
        return "SpecForge or an exporter of its layout"
    if any(name.startswith("midlayer.") for name in stored):
        return "the original EAGLE-3 code or an exporter of its layout"
    return ""


def architectures(config: Mapping[str, Any]) -> list[str]:
    """``architectures`` of a config as a list of names, whatever stands there."""
    stated = config.get("architectures")
    return [name for name in stated if isinstance(name, str)] if isinstance(stated, list) else []


def dig(config: Mapping[str, Any], *keys: str) -> Any:
    """The value under nested `keys`; None where one of them is absent or holds no mapping."""
    value: Any = config
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value
