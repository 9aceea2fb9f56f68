"""Are two drafts the same draft? Field by field through the one spec, tensor by tensor through shape and hash.

Layout is not a difference: a nested checkpoint and its flat export are identical here. Aux ids are compared as inputs of
a layer when both sides say what theirs count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from eaglebook.checkpoint import weights
from eaglebook.checkpoint.case import Case
from eaglebook.checkpoint.spec import OUTPUT, UNKNOWN, DraftSpec, same

# Not compared: how a layout names its class, what is derived from other fields, and what the weights part compares.
_LAYOUT_ONLY = {
    "architectures",
    "model_type",
    "head_dim_in_weights",
    "num_aux_hidden_states",
    "aux_ids_mean",
    "d2t",
    "t2d",
    "lm_head",
    "embed_tokens",
}
_FALSE_IS_ABSENT = {"attention_bias", "mlp_bias", "tie_word_embeddings"}


@dataclass(frozen=True)
class Difference:
    """One field or tensor; ``a`` and ``b`` as text, "" for absent."""

    what: str
    a: str
    b: str


def compare(a: Case, b: Case, *, hashes: bool = True) -> list[Difference]:
    """Every difference in meaning between two drafts. ``hashes``: read every weight to compare its bytes."""
    return [*_fields(a.spec, b.spec), *_tensors(a, b, hashes)]


def _fields(a: DraftSpec, b: DraftSpec) -> list[Difference]:
    found = []
    for (name, ours), (_, theirs) in zip(a.items(), b.items(), strict=True):
        if name in _LAYOUT_ONLY:
            continue
        x, y = _meaning(name, ours.value, a), _meaning(name, theirs.value, b)
        if not same(x, y):
            found.append(Difference(name, _text(x, ours.origin), _text(y, theirs.origin)))
    if UNKNOWN in (a.aux_ids_mean.value, b.aux_ids_mean.value) and a.aux_ids_mean.value != b.aux_ids_mean.value:
        found.append(Difference("aux_ids_mean", str(a.aux_ids_mean.value), str(b.aux_ids_mean.value)))
    return found


def _meaning(name: str, value: Any, spec: DraftSpec) -> Any:
    """A value as readers take it, so that two ways of saying the same thing compare equal."""
    if name == "aux_layer_ids" and value:
        return [i + 1 for i in value] if spec.aux_ids_mean.value == OUTPUT else list(value)
    if name == "target_hidden_size":
        return value if value is not None else spec.hidden_size.value
    if name in _FALSE_IS_ABSENT:
        return bool(value)
    if name == "use_aux_hidden_state":
        return value is not False
    if name == "verifier_architectures":
        return value or None
    if name == "rope" and isinstance(value, dict):
        return {k: v for k, v in value.items() if v is not None}
    return value


def _tensors(a: Case, b: Case, hashes: bool) -> list[Difference]:
    if a.source.tensors is None or b.source.tensors is None:
        counts = ["" if c.source.tensors is None else f"{len(c.source.tensors)} tensors" for c in (a, b)]
        return [Difference("weights", *counts)] if any(counts) else []
    found = []
    for name in sorted(a.stored.keys() | b.stored.keys()):
        ours, theirs = a.stored.get(name), b.stored.get(name)
        if (
            ours is None
            or theirs is None
            or (None not in (ours.shape, theirs.shape) and _shape(ours) != _shape(theirs))
        ):
            found.append(Difference(name, _shape(ours), _shape(theirs)))
        elif hashes and ours.file and theirs.file and (x := weights.sha256(ours)) != (y := weights.sha256(theirs)):
            found.append(Difference(name, f"sha256 {x[:12]}", f"sha256 {y[:12]}"))
    return found


def _shape(tensor: Any) -> str:
    return "" if tensor is None else f"{list(tensor.shape) if tensor.shape is not None else '?'} {tensor.dtype}"


def _text(value: Any, origin: str) -> str:
    return "" if value is None else f"{value}{' (default)' if origin == 'default' else ''}"
