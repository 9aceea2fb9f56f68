"""What no tensor's shape shows: norm flags, rope, lengths, windows. A wrong one costs acceptance and no reader reports it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from eaglebook.checkpoint import findings as f
from eaglebook.checkpoint import vllm_rules as rules
from eaglebook.checkpoint.case import LOW, Case, is_size, short
from eaglebook.checkpoint.findings import Finding
from eaglebook.checkpoint.formats import FLAT, NESTED, NO_CONFIG
from eaglebook.checkpoint.spec import same
from eaglebook.checkpoint.vllm_rules import show


def norms(case: Case) -> Iterator[Finding]:
    spec = case.spec
    if case.format.layout == NO_CONFIG:
        return
    value = spec.norm_before_residual
    if value.origin == "default":
        named_by_speculators = any(name.startswith("layers.0.") for name in case.source.tensors or ())
        severity = f.warning if case.format.layout == NESTED or named_by_speculators else f.note
        yield severity(
            "norm-before-residual-implicit", f"norm_before_residual is not stated: vLLM takes {str(value.value).lower()} in this layout, the opposite in the other",
            "write the value used in training (the original EAGLE-3, SpecForge and ModelOpt: false; speculators' default: true)", vllm=f"{str(value.value).lower()}; a wrong value costs acceptance, not an error",
            sglang="false",
        )  # fmt: skip
    if value.origin == "stated" and value.value is True:
        yield f.note(
            "norm-before-residual-sglang",
            "norm_before_residual is true",
            "check the SGLang version before serving there",
            sglang="its llama_eagle3 keeps the state before the norm as residual: it was read without this flag",
        )
    for flag, since in (
        ("norm_before_fc", rules.NORM_BEFORE_FC),
        ("fc_norm", rules.FC_NORM),
        ("norm_output", rules.NORM_OUTPUT),
    ):
        stated = getattr(spec, flag)
        if stated.origin == "stated" and stated.value is True:
            if case.version < since:
                yield f.error(
                    "norm-flag-too-new",
                    f"{flag} is on; vLLM {show(case.version)} does not know it",
                    f"use vLLM {show(since)} or newer",
                    vllm="ignores it: " + LOW,
                )
            else:
                yield f.note(
                    "norm-flag-since",
                    f"{flag} needs vLLM {show(since)} or newer",
                    vllm="older versions ignore it, in silence",
                )
    for flag, tensor in (("norm_before_fc", "input_norm.weight"), ("fc_norm", "fc_norm.0.weight")):
        stored, on = tensor in case.stored, bool(getattr(spec, flag).value)
        if case.view.refusal and case.source.tensors is not None and stored != on:
            yield f.error(
                f"{tensor.split('.')[0].replace('_', '-')}-{'unasked' if stored else 'missing'}",
                f"{flag} is {on}, {tensor} is {'there' if stored else 'not'}",
                f"set {flag} {str(stored).lower()}",
            )
    inner, outer = case.eagle.get("norm_before_fc"), case.config.get("norm_before_fc")
    if inner is not None and outer is not None and inner != outer:
        yield f.error(
            "norm-flag-conflict",
            f"norm_before_fc is {outer} at the top level and {inner} in eagle_config",
            "write one value",
            vllm=f"takes {inner}",
        )
    if spec.rms_norm_eps.origin in ("default", "absent"):
        yield f.warning(
            "rms-norm-eps-implicit",
            "rms_norm_eps is not stated",
            "write the verifier's",
            vllm="1e-6 in a flat file; refuses a nested one",
        )


def rope(case: Case) -> Iterator[Finding]:
    if case.format.layout == NO_CONFIG:
        return
    rope, layer = case.spec.rope, case.layer
    parameters, theta, scaling = layer.get("rope_parameters"), layer.get("rope_theta"), layer.get("rope_scaling")
    if rope.origin in ("default", "absent"):
        yield f.warning(
            "rope-implicit",
            "no rope parameters: readers take theta 10000",
            "write the rope used in training, usually the verifier's",
            vllm="10000, in silence",
        )
    elif "by " in rope.where and "rope_theta" in rope.where and "rope_theta by" in rope.where:
        yield f.warning(
            "rope-implicit", "rope is scaled but its theta is not stated: readers take 10000", "write rope_theta"
        )
    if isinstance(parameters, dict) and theta is not None and parameters.get("rope_theta") not in (None, theta):
        yield f.error(
            "rope-conflict",
            f"rope_theta is {theta}, rope_parameters say {parameters['rope_theta']}",
            "write one value",
            vllm="takes rope_parameters",
            sglang="older transformers take rope_theta",
        )
    if (
        isinstance(parameters, dict)
        and isinstance(scaling, dict)
        and not same(_rope_type(parameters), _rope_type(scaling))
    ):
        yield f.error(
            "rope-conflict",
            f"rope_scaling is {_rope_type(scaling)}, rope_parameters are {_rope_type(parameters)}",
            "write one value",
        )
    kind = (rope.value or {}).get("rope_type", "default") if isinstance(rope.value, dict) else "default"
    if (
        kind in rules.STRETCHING_ROPE
        and rules.ROPE_TABLE_FOLLOWS_VERIFIER <= case.version < rules.ROPE_TABLE_ONLY_SAFE_TYPES
    ):
        yield f.warning(
            "rope-stretches",
            f"rope type {kind}: vLLM 0.28 to 0.32 raise max_position_embeddings, which changes its frequencies",
            "use vLLM 0.33, or write the verifier's max_position_embeddings",
        )
    if kind == "mrope":
        yield f.note(
            "rope-mrope", "multimodal rope (mrope)", sglang="reads it as the default type with three positions"
        )
    known = case.verifier.rope if case.verifier else None
    if (
        known
        and rope.origin == "stated"
        and isinstance(rope.value, dict)
        and not same(_comparable(rope.value), _comparable(known))
    ):
        yield f.warning(
            "rope-differs",
            f"rope {short(_comparable(rope.value))} is not the verifier's {short(_comparable(known))}",
            "right if trained so; else copy the verifier's",
        )
    if isinstance(parameters, dict) and theta is None and case.format.layout == FLAT:
        yield f.note(
            "rope-new-style-only",
            "rope only as rope_parameters",
            "write rope_theta too, for readers before transformers 5",
            sglang="older ones read 10000",
        )


def _rope_type(rope: Mapping[str, Any]) -> Any:
    return rope.get("rope_type", rope.get("type", "default"))


def _comparable(rope: Mapping[str, Any]) -> dict[str, Any]:
    return {
        k: (float(v) if isinstance(v, int) and not isinstance(v, bool) else v)
        for k, v in rope.items()
        if v is not None and k != "mrope_section"
    }


def length(case: Case) -> Iterator[Finding]:
    if case.format.layout == NO_CONFIG:
        return
    value = case.spec.max_position_embeddings
    theirs = case.verifier.max_position_embeddings if case.verifier else None
    if value.origin in ("default", "absent"):
        yield f.warning(
            "max-positions-implicit",
            f"max_position_embeddings is not stated: readers take {value.value or 'their default'}",
            "write the verifier's",
        )
    elif theirs and is_size(value.value) and value.value < theirs:
        yield f.warning(
            "max-positions-short", f"max_position_embeddings {value.value} is below the verifier's {theirs}", "write the verifier's, or keep served sequences shorter",
            vllm="longer sequences: the V1 runner submits zeros as drafts (accepted almost never); before 0.28 the rope table is indexed out of range",
        )  # fmt: skip
    elif not theirs and is_size(value.value) and value.value <= 4096:
        yield f.warning(
            "max-positions-short",
            f"max_position_embeddings {value.value}: longer requests get no useful drafts",
            "write the verifier's",
            vllm="longer sequences: V1 submits zeros as drafts",
        )


def window(case: Case) -> Iterator[Finding]:
    if case.format.layout == NO_CONFIG:
        return
    types, window = case.spec.layer_types.value, case.spec.sliding_window.value
    if isinstance(types, list) and "sliding_attention" in types and is_size(window):
        yield f.warning(
            "sliding-window",
            f"the draft attends to the last {window} tokens only (speculators' default is 2048)",
            "right if trained so; state it when publishing",
            vllm="honoured through layer_types; older versions and SGLang ignore it",
        )
    if isinstance(types, list) and "sliding_attention" in types and not is_size(window):
        yield f.error(
            "sliding-window-missing",
            "layer_types slide and sliding_window is not stated",
            "write sliding_window",
            vllm="attends to everything",
        )
