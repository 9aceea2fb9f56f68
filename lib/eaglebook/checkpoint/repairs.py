"""What can be repaired from the file itself: where the weights prove the config wrong, or one half of a mapping gives the other.

Each repair is one line of text. Nothing is guessed: a missing head, unknown ids or NaN have no repair here.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from eaglebook.checkpoint import mapping, names
from eaglebook.checkpoint.case import Case, is_size
from eaglebook.checkpoint.spec import ABSENT, DraftSpec, Value

Data = tuple[str, tuple[int, ...], bytes]  # dtype, shape, bytes of a tensor written anew


@dataclass(frozen=True)
class Repaired:
    """``drop``: names in the file to leave out. ``data``: small tensors to write instead of, or besides, the stored ones."""

    spec: DraftSpec
    drop: frozenset[str] = frozenset()
    data: dict[str, Data] = field(default_factory=dict)
    changes: tuple[str, ...] = ()
    copies: dict[str, str] = field(default_factory=dict)  # new tensor -> the stored one it is a copy of


def repair(case: Case) -> Repaired:
    """Everything that the weights of this draft prove about its config."""
    new: dict[str, Value] = {}
    changes: list[str] = []

    def write(key: str, value: Any, why: str) -> None:
        old = getattr(case.spec, key)
        new[key] = Value(value, "stated", f"repaired: {why}")
        changes.append(f"{key}: {old.value if old.origin != 'absent' else 'absent'} → {value} ({why})")

    _sizes(case, write)
    _flags(case, write)
    drop = {*case.foreign, *(name for name in case.source.tensors or () if "rotary_emb." in name)}
    if drop:
        rest = f" and {len(drop) - 4} more" if len(drop) > 4 else ""
        changes.append(f"left out: {', '.join(sorted(drop)[:4])}{rest}")
    spec = replace(case.spec, **new)
    data, left_out, said = _mapping(case, spec)
    drop |= {name for name, plain in case.own.items() if plain in left_out}
    copies = {}
    tied = case.spec.tie_word_embeddings.value and "lm_head.weight" not in case.stored
    if tied and "embed_tokens.weight" in case.stored and spec.draft_vocab_size.value == spec.vocab_size.value:
        copies["lm_head.weight"] = "embed_tokens.weight"
        said.append("lm_head: written as a copy of embed_tokens (the draft's head was tied to it)")
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value, vocab = getattr(spec, key).value, spec.vocab_size.value
        if type(value) is int and is_size(vocab) and not 0 <= value < vocab:
            spec = replace(spec, **{key: ABSENT})
            said.append(f"{key}: {value} left out (outside the vocabulary; readers take the verifier's)")
    return Repaired(spec, frozenset(drop), data, (*changes, *said), copies)


def _sizes(case: Case, write: Any) -> None:
    spec = case.spec
    q, k = case.rows("layers.0.self_attn.q_proj.weight"), case.rows("layers.0.self_attn.k_proj.weight")
    heads, kv, width = spec.num_attention_heads.value, spec.num_key_value_heads.value, spec.head_dim.value
    measured = spec.head_dim_in_weights.value
    if spec.mla.origin == "absent" and q and k and is_size(heads) and is_size(kv) and is_size(width):
        if q != heads * width and measured and k == kv * measured and not _heads_may_be_wrong(case, q, k, width):
            write("head_dim", measured, "q and k in the weights")
        elif q == heads * width and k != kv * width and k % width == 0:
            write("num_key_value_heads", k // width, "k in the weights")
    gate = case.rows("layers.0.mlp.gate_proj.weight")
    if gate and spec.intermediate_size.value != gate:
        write("intermediate_size", gate, "gate_proj in the weights")
    stored_layers = {n for n in map(names.layer, case.stored) if n is not None}
    if (
        stored_layers
        and is_size(spec.num_hidden_layers.value)
        and max(stored_layers) + 1 > spec.num_hidden_layers.value
    ):
        write("num_hidden_layers", max(stored_layers) + 1, "layers in the file")
    head, d2t = case.rows("lm_head.weight"), case.rows("d2t")
    if head and spec.draft_vocab_size.value != head and d2t in (None, head):
        write("draft_vocab_size", head, "lm_head in the weights")


def _heads_may_be_wrong(case: Case, q: int, k: int, width: int) -> bool:
    """Whether the stated ``head_dim`` fits the weights too, with other numbers of heads: then nothing is proved.

    A stated number of heads that the verifier has as well is taken for right.
    """
    fits = case.spec.head_dim.origin == "stated" and q % width == 0 and k % width == 0
    same = case.verifier is not None and case.verifier.num_heads == case.spec.num_attention_heads.value
    return fits and not same


def _flags(case: Case, write: Any) -> None:
    stored = case.stored
    for flag, tensor in (("norm_before_fc", "input_norm.weight"), ("fc_norm", "fc_norm.0.weight")):
        if tensor in stored and not getattr(case.spec, flag).value:
            write(flag, True, f"{tensor} is stored")
    at = "layers.0.self_attn."
    biases = [f"{at}{part}_proj.bias" in stored for part in "qkvo"]
    if all(biases) and not case.spec.attention_bias.value:
        write("attention_bias", True, "its biases are stored")
    if not any(biases) and case.spec.attention_bias.value and case.source.tensors is not None:
        write("attention_bias", False, "no bias is stored")
    inner = [f"layers.0.mlp.{part}_proj.bias" in stored for part in ("gate", "up", "down")]
    if all(inner) and not case.spec.mlp_bias.value:
        write("mlp_bias", True, "its biases are stored")
    if not any(inner) and case.spec.mlp_bias.value and case.source.tensors is not None:
        write("mlp_bias", False, "no bias is stored")


def _mapping(case: Case, spec: DraftSpec) -> tuple[dict[str, Data], set[str], list[str]]:
    """``d2t`` and ``t2d`` as they should be: kept, derived from each other, or left out for a full vocabulary."""
    size, vocab = spec.draft_vocab_size.value, spec.vocab_size.value
    found, stored = case.mapping, case.stored
    if not is_size(size) or not is_size(vocab) or vocab > mapping.MAX_BYTES or case.source.tensors is None:
        return {}, set(), []
    if size == vocab:
        if found is not None and not any(found.offsets):
            there = {"d2t", "t2d"} & stored.keys()
            return (
                {},
                there,
                [f"left out: {' and '.join(sorted(there))} (the vocabulary is full, the map says nothing)"],
            )
        return {}, set(), []
    targets, said = None, []
    if found is not None and found.absolute and _valid(found.offsets, vocab):
        targets = list(found.offsets)
        said.append("d2t: target ids → offsets (t2d marks exactly these ids)")
    elif (
        found is not None and case.stored["d2t"].dtype in ("BF16", "F16") and (mask := found.mask) and len(mask) == size
    ):
        targets = mask
        said.append("d2t: derived from t2d, in the order of the ids (its own type cannot hold the numbers)")
    elif found is not None and _valid(found.targets, vocab):
        targets = found.targets
    elif found is None and "d2t" not in stored and (mask := mapping.read_mask(stored)) and len(mask) == size:
        targets = mask
        said.append("d2t: derived from t2d, in the order of the ids")
    if targets is None or len(targets) != size:
        return {}, set(), []
    data: dict[str, Data] = {}
    if said:
        data["d2t"] = ("I64", (size,), mapping.offsets_of(targets))
    if "t2d" not in stored or case.rows("t2d") != vocab:
        data["t2d"] = ("BOOL", (vocab,), mapping.mask_of(targets, vocab))
        said.append("t2d: derived from d2t")
    return data, set(), said


def _valid(targets: list[int], vocab: int) -> bool:
    return bool(targets) and min(targets) >= 0 and max(targets) < vocab and len(set(targets)) == len(targets)
