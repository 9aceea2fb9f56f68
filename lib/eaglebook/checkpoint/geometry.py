"""Sizes: what the config states against what the weights have. vLLM cuts tensors that are too large, in silence."""

from __future__ import annotations

from collections.abc import Iterator

from eaglebook.checkpoint import findings as f
from eaglebook.checkpoint import names
from eaglebook.checkpoint.case import CONVERT, Case, is_size
from eaglebook.checkpoint.findings import Finding
from eaglebook.checkpoint.formats import NO_CONFIG

FIX = f"{CONVERT} --fix"
CODES = {
    "head-dim-mismatch",
    "heads-mismatch",
    "kv-heads-mismatch",
    "intermediate-size-mismatch",
    "hidden-size-mismatch",
}


def about(case: Case) -> Iterator[Finding]:
    spec = case.spec
    at = "layers.0.self_attn."
    q, k = (case.rows(f"{at}{part}_proj.weight") for part in ("q", "k"))
    heads, kv, d = spec.num_attention_heads.value, spec.num_key_value_heads.value, spec.head_dim
    if spec.mla.origin == "absent":
        if d.origin == "default":
            yield f.warning(
                "head-dim-implicit", f"head_dim is not stated: readers take hidden_size // num_attention_heads = {d.value}",
                "write head_dim out", vllm="hidden_size // num_attention_heads", sglang="the same",
            )  # fmt: skip
        elif d.origin == "weights":
            implicit = spec.hidden_size.value // heads if is_size(spec.hidden_size.value) and is_size(heads) else None
            built = case.view.head_dim if not case.view.refusal else implicit
            if built is not None and built != d.value:
                yield f.error(
                    "head-dim-mismatch", f"head_dim is not stated and readers take {built}; the weights have {d.value}",
                    f"write head_dim {d.value}, or {FIX}", vllm="refuses smaller weights, cuts larger ones in silence",
                )  # fmt: skip
            else:
                yield f.warning(
                    "head-dim-implicit",
                    f"head_dim is not stated; the weights have {d.value}, and readers take the same",
                    f"write head_dim {d.value}, or {FIX}",
                )
        elif q and is_size(heads) and q != heads * d.value:
            in_weights = spec.head_dim_in_weights.value
            if in_weights and k and is_size(kv) and k == kv * in_weights:
                yield f.error(
                    "head-dim-mismatch",
                    f"head_dim is {d.value}, the weights have {in_weights}",
                    f"write head_dim {in_weights}, or {FIX}",
                    vllm=_cut(q, heads * d.value),
                )
            else:
                yield f.error(
                    "heads-mismatch", f"{heads} heads of {d.value} need {heads * d.value} rows, q_proj has {q}",
                    "write the number of heads used in training", vllm=_cut(q, heads * d.value),
                )  # fmt: skip
        width = spec.head_dim_in_weights.value or d.value
        if k and is_size(kv) and is_size(width) and k != kv * width:
            stated = "" if spec.num_key_value_heads.origin == "stated" else " (by default)"
            yield f.error(
                "kv-heads-mismatch", f"{kv} key-value heads{stated} of {width} need {kv * width} rows, k_proj has {k}",
                f"write num_key_value_heads {k // width}, or {FIX}" if k % width == 0 else "correct num_key_value_heads", vllm=_cut(k, kv * width),
            )  # fmt: skip
        elif spec.num_key_value_heads.origin == "default" and case.format.layout != NO_CONFIG:
            yield f.warning(
                "kv-heads-implicit", f"num_key_value_heads is not stated: readers take {kv}", "write it out"
            )
    stored_sizes = {
        "hidden_size": case.rows("norm.weight") or case.rows("fc.weight"),
        "intermediate_size": case.rows("layers.0.mlp.gate_proj.weight"),
    }
    for key, code in (("intermediate_size", "intermediate-size-mismatch"), ("hidden_size", "hidden-size-mismatch")):
        stated, stored = getattr(spec, key), stored_sizes[key]
        if stated.origin == "stated" and stored and stored != stated.value:
            yield f.error(
                code,
                f"{key} is {stated.value}, the weights have {stored}",
                f"write {key} {stored}, or {FIX}",
                vllm=_cut(stored, stated.value),
            )
    layers = {n for n in map(names.layer, case.stored) if n is not None}
    read, where = (
        case.view.layers,
        "stated" if spec.num_hidden_layers.origin == "stated" else "taken by readers, as none are stated",
    )
    if read is None or case.view.refusal:
        read = spec.num_hidden_layers.value if spec.num_hidden_layers.origin == "stated" else None
    if layers and read is not None and max(layers) + 1 < read:
        yield f.error(
            "layers-missing", f"{read} layers {where}, {max(layers) + 1} stored", f"write num_hidden_layers {max(layers) + 1}, if so many were trained",
            vllm="the others are uninitialised, in silence",
        )  # fmt: skip
    elif layers and read is not None and max(layers) + 1 > read:
        yield f.error(
            "layers-surplus",
            f"{max(layers) + 1} layers stored, {read} {where}",
            f"write num_hidden_layers {max(layers) + 1}, or {FIX}",
            vllm="refuses the surplus",
        )


def _cut(stored: int, built: int) -> str:
    return f"cuts {stored} to {built}, in silence" if stored > built else f"refuses: {built} wanted, {stored} stored"
