"""What vLLM's ``load_weights`` will do with each tensor of a draft, and with each tensor that is not there.

Three things happen in silence: a tensor with no use is dropped, one that is too large is cut (the tensor-parallel
``narrow`` of ``layers/linear.py``), one that is missing leaves its parameter as it was allocated. All else raises.
Rules of vLLM 0.32 ``models/llama_eagle3.py``, ``qwen3_eagle3.py``, ``deepseek_eagle3.py``, ``models/utils.py``, and per version
where ``vllm_rules`` says so.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from eaglebook.checkpoint import names
from eaglebook.checkpoint import vllm_rules as rules
from eaglebook.checkpoint.headers import Tensor
from eaglebook.checkpoint.vllm_rules import DEEPSEEK, LLAMA, QWEN3, Version
from eaglebook.checkpoint.vllm_view import View, assumed, view

Fate = Literal[
    "loaded",  # every value of the parameter comes from this tensor
    "truncated",  # silent: the tensor is larger, its first rows or columns are taken
    "skipped",  # meant to be left out: t2d, rotary caches
    "dropped",  # silent: nothing takes it, and nothing says so
    "raises",
    "shared",  # not stored; the verifier's module is used
    "uninitialised",  # silent: not stored; the parameter keeps whatever memory held
    "left at default",  # silent: not stored; a norm stays one, the map stays zero
    "unknown",  # shape or size is not known, nothing is claimed
]
SILENT: tuple[Fate, ...] = ("truncated", "dropped", "uninitialised", "left at default")
_ROTARY = ("rotary_pos_emb.inv_freq", "rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")
_STACKED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}
_STACKED_MLA = {
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
    "q_a_proj": "fused_qkv_a_proj",
    "kv_a_proj_with_mqa": "fused_qkv_a_proj",
}

Shape = tuple[int | None, ...]


@dataclass(frozen=True)
class Slot:
    """A place for one stored tensor. ``cut``: along which axis a larger tensor is cut; None: the shape must be exact."""

    shape: Shape
    cut: int | None = None
    vocab: bool = False  # rows are checked by a bare assertion (vocab_parallel_embedding.py)
    if_missing: Fate = "uninitialised"


@dataclass(frozen=True)
class Outcome:
    tensor: str
    destination: str
    fate: Fate
    detail: str = ""

    def as_dict(self) -> dict[str, str]:
        return {key: value for key, value in asdict(self).items() if value}


@dataclass(frozen=True)
class Prediction:
    """``stage``: where vLLM stops: "config", "load", "request" (the first one), or "" when it serves; ``error``: why."""

    version: str
    architecture: str
    stage: str
    error: str
    tensors: tuple[Outcome, ...] = field(default=())

    def as_dict(self) -> dict[str, Any]:
        return {
            "version": self.version,
            "architecture": self.architecture,
            "loads": self.stage in ("", "request"),
            "stops_at": self.stage,
            "error": self.error,
            "tensors": [outcome.as_dict() for outcome in self.tensors],
        }


def predict(
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor] | None,
    *,
    target_vocab: int | None = None,
    target_hidden: int | None = None,
    version: Version = rules.REFERENCE,
) -> Prediction:
    """The outcome of loading a draft by vLLM ``version`` with ``method="eagle3"``, tensor by tensor.

    ``target_vocab`` and ``target_hidden`` are the verifier's sizes; without them the draft's own are taken. A config that
    is refused still gets its tensors compared, as if only its architecture were wrong.
    """
    seen = view(config, version)
    refusal, architecture = seen.refusal, seen.architecture
    if tensors is None:
        return Prediction(rules.show(version), architecture, "config" if refusal else "", refusal)
    seen = assumed(config, version) if refusal else seen
    full = seen.draft_vocab is not None and seen.draft_vocab == (target_vocab or seen.vocab)
    places = slots(seen, full=full, version=version, target_hidden=target_hidden)
    outcomes = [_stored(name, tensor, seen, places, tensors, version) for name, tensor in tensors.items()]
    if "mask_hidden" not in tensors and seen.parallel:
        outcomes.append(Outcome("mask_hidden", "mask_hidden", "raises", "mask_hidden not found in weights"))
    outcomes += _missing(tensors, places, seen)
    if refusal:
        return Prediction(rules.show(version), architecture, "config", refusal, tuple(outcomes))
    raising = sorted(
        (o for o in outcomes if o.fate == "raises"), key=lambda o: o.tensor
    )  # files are read in this order
    error = f"{raising[0].tensor}: {raising[0].detail}" if raising else ""
    return Prediction(rules.show(version), seen.architecture, "load" if error else "", error, tuple(outcomes))


def first_request(
    made: Prediction,
    seen: View,
    targets: Sequence[int] | None,
    verifier_layers: int | None,
    verifier_hidden: int | None,
) -> Prediction:
    """What loads and then fails when the first token is drafted (V1 runner, 0.32): another number of states than ``fc`` takes, or a
    target id that is no index. ``targets``: target ids of the draft's tokens, None when there is no map to read."""
    if made.stage or seen.refusal:
        return made
    problem = ""
    if targets and seen.vocab and (min(targets) < 0 or max(targets) >= seen.vocab):
        problem = f"index {max(targets)} is out of bounds for dimension 1 with size {seen.vocab}"
    if seen.use_aux and verifier_layers is not None and seen.aux_count is not None:
        default = (2, verifier_layers // 2, verifier_layers - 3)
        ids = set(default if seen.aux_ids is None else seen.aux_ids)
        captured = sum(0 <= i <= verifier_layers for i in ids)
        if captured != seen.aux_count:
            problem = f"{captured} states are captured, fc takes {seen.aux_count}"
    if verifier_hidden and seen.target_hidden and verifier_hidden != seen.target_hidden:
        problem = f"states of {verifier_hidden}, fc takes {seen.target_hidden} each"
    return replace(made, stage="request", error=problem) if problem else made


def slots(
    seen: View, *, full: bool, version: Version = rules.REFERENCE, target_hidden: int | None = None
) -> dict[str, Slot]:
    """Every tensor that a draft of this config should store, by plain name, with the shape vLLM builds for it."""
    h, width = seen.hidden, _times(seen.aux_count, seen.target_hidden)
    narrow = (
        target_hidden is not None and h is not None and target_hidden != h
    )  # the verifier's embedding cannot be shared
    places = {
        "embed_tokens.weight": Slot((seen.vocab, h), vocab=True, if_missing="uninitialised" if narrow else "shared"),
        "norm.weight": Slot((h,), if_missing="left at default"),
        "lm_head.weight": Slot((seen.draft_vocab, h), vocab=True, if_missing="shared" if full else "uninitialised"),
    }
    if seen.use_aux:
        places["fc.weight"] = Slot((h, width))
    if seen.norm_before_fc and seen.use_aux:
        places["input_norm.weight"] = Slot((width,), if_missing="left at default")
    if seen.fc_norm and seen.use_aux:
        for i in range(min(seen.aux_count or 0, 64)):
            places[f"fc_norm.{i}.weight"] = Slot((seen.target_hidden,), if_missing="left at default")
    if not full or version < rules.D2T_FORBIDDEN_WHEN_FULL:
        places["d2t"] = Slot((seen.draft_vocab,), if_missing="left at default")
    for i in range(min(seen.layers or 0, 64)):
        places |= {f"layers.{i}.{name}": slot for name, slot in _layer(seen, i)}
    return places


def _layer(seen: View, i: int) -> Iterator[tuple[str, Slot]]:
    h, inner, d = seen.hidden, seen.intermediate, seen.head_dim
    wide = _times(2, h) if i == 0 else h
    for norm in ("input_layernorm", "post_attention_layernorm", "hidden_norm"):
        yield f"{norm}.weight", Slot((h,), if_missing="left at default")
    yield from _mla(seen, wide) if seen.class_ == DEEPSEEK else _attention(seen, wide)
    if seen.class_ == QWEN3:
        yield "self_attn.q_norm.weight", Slot((d,), if_missing="left at default")
        yield "self_attn.k_norm.weight", Slot((d,), if_missing="left at default")
    for part in ("gate", "up"):
        yield f"mlp.{part}_proj.weight", Slot((inner, h), cut=0)
    yield "mlp.down_proj.weight", Slot((h, inner), cut=1)
    if seen.mlp_bias:
        for part, rows in (("gate", inner), ("up", inner), ("down", h)):
            yield f"mlp.{part}_proj.bias", Slot((rows,), cut=None if part == "down" else 0)


def _attention(seen: View, wide: int | None) -> Iterator[tuple[str, Slot]]:
    queries, keys = _times(seen.heads, seen.head_dim), _times(seen.kv_heads, seen.head_dim)
    for part, rows in (("q", queries), ("k", keys), ("v", keys)):
        yield f"self_attn.{part}_proj.weight", Slot((rows, wide), cut=0)
        if seen.qkv_bias:
            yield f"self_attn.{part}_proj.bias", Slot((rows,), cut=0)
    yield "self_attn.o_proj.weight", Slot((seen.hidden, queries), cut=1)
    if seen.o_bias:
        yield "self_attn.o_proj.bias", Slot((seen.hidden,))


def _mla(seen: View, wide: int | None) -> Iterator[tuple[str, Slot]]:
    sizes = seen.mla or {}
    rank, nope, rope = sizes.get("q_lora_rank"), sizes.get("qk_nope_head_dim"), sizes.get("qk_rope_head_dim")
    kv_rank, value = sizes.get("kv_lora_rank"), sizes.get("v_head_dim")
    rows = _times(seen.heads, nope + rope if nope and rope else None)
    if rank:
        yield "self_attn.q_a_proj.weight", Slot((rank, wide))
        yield "self_attn.q_a_layernorm.weight", Slot((rank,), if_missing="left at default")
        yield "self_attn.q_b_proj.weight", Slot((rows, rank), cut=0)
        yield "self_attn.kv_a_proj_with_mqa.weight", Slot((kv_rank + rope if kv_rank and rope else None, wide))
    else:  # kv_a_proj_with_mqa has no place: it is renamed into the fused module, which this model does not have
        yield "self_attn.q_proj.weight", Slot((rows, wide), cut=0)
    yield "self_attn.kv_a_layernorm.weight", Slot((kv_rank,), if_missing="left at default")
    yield (
        "self_attn.kv_b_proj.weight",
        Slot((_times(seen.heads, nope + value if nope and value else None), kv_rank), cut=0),
    )
    yield "self_attn.o_proj.weight", Slot((seen.hidden, _times(seen.heads, value)), cut=1)


def destination(name: str, class_: str = LLAMA) -> str:
    """The parameter that vLLM fills from a stored tensor of this name, "" when the name is skipped."""
    if "t2d" in name:
        return ""
    if "d2t" in name:
        return name.replace("d2t", "draft_id_to_target_id")
    if "lm_head" in name:
        return name
    stacked = _STACKED_MLA if class_ == DEEPSEEK else _STACKED
    inner = name.replace("midlayer.", "layers.0.")
    return "model." + re.sub(rf"\.({'|'.join(stacked)})\.", lambda m: f".{stacked[m[1]]}.", inner)


def _stored(
    name: str, tensor: Tensor, seen: View, places: Mapping[str, Slot], tensors: Mapping[str, Tensor], version: Version
) -> Outcome:
    """Follow one stored tensor through ``load_weights``, in its order of rules."""
    to = destination(name, seen.class_)
    if "t2d" in name:
        return Outcome(name, "", "skipped", "vLLM has no use for the mask")
    if any(part in to for part in _ROTARY):
        return Outcome(name, to, "skipped", "rotary caches are computed again")
    if "mask_hidden" in name and "d2t" not in name and seen.class_ != DEEPSEEK:
        return Outcome(name, to, "loaded" if seen.parallel else "dropped", "only parallel drafting takes it")
    dropped = {
        "draft_id_to_target_id": not any("d2t" in n and "t2d" not in n for n in tensors),
        "fc.": not seen.use_aux,
        "input_norm.": seen.class_ != DEEPSEEK and not seen.norm_before_fc and version >= rules.NORM_BEFORE_FC,
    }
    for part, holds in dropped.items():
        if holds and part in to:
            return Outcome(name, to, "dropped", "the config does not ask for it")
    key = to.removeprefix("model.") if to.startswith("model.") else to
    plain = {"draft_id_to_target_id": "d2t"}.get(key, name.replace("midlayer.", "layers.0."))
    at_home = plain in places and to == destination(plain, seen.class_)
    if at_home:
        return _fits(name, to, tensor, places[plain], seen)
    if re.fullmatch(r"(layers\.\d+\.self_attn\.qkv_proj|layers\.\d+\.mlp\.gate_up_proj)\.(weight|bias)", plain):
        part = "q_proj" if "qkv" in plain else "gate_proj"
        if re.sub(r"(qkv|gate_up)_proj", part, plain) in places:
            return Outcome(name, to, "loaded", "already fused")
    if plain.endswith(".bias") and _module_known(plain.removesuffix(".bias"), places):
        if version >= rules.STRAY_BIAS_DROPPED:
            return Outcome(name, to, "dropped", "a bias the config does not ask for")
        return Outcome(name, to, "raises", f"KeyError: '{to}'")
    if seen.quantised:
        return Outcome(name, to, "unknown", "quantised draft")
    kind = "KeyError" if version < rules.STRAY_BIAS_DROPPED else "There is no module or parameter named"
    return Outcome(name, to, "raises", f"{kind} {_unknown_part(to, places)!r}")


def _fits(name: str, to: str, tensor: Tensor, slot: Slot, seen: View) -> Outcome:
    have, need = tensor.shape, slot.shape
    if have is None or None in need or seen.quantised:
        return Outcome(name, to, "unknown", "quantised draft" if seen.quantised else "a size is not known")
    if have == need:
        return Outcome(name, to, "loaded")
    shapes = f"stored {list(have)}, built {list(need)}"
    if len(have) == len(need) and slot.cut is not None:
        cut, others = slot.cut, [i for i in range(len(have)) if i != slot.cut]
        if all(have[i] == need[i] for i in others):
            if have[cut] > (need[cut] or 0):
                return Outcome(name, to, "truncated", shapes)
            return Outcome(
                name, to, "raises", f"start (0) + length ({need[cut]}) exceeds dimension size ({have[cut]}): {shapes}"
            )
    if slot.vocab and have[:1] != need[:1]:
        return Outcome(name, to, "raises", f"AssertionError without text: {shapes}")
    return Outcome(name, to, "raises", f"size mismatch: {shapes}")


def _missing(tensors: Mapping[str, Tensor], places: Mapping[str, Slot], seen: View) -> list[Outcome]:
    found = {name.replace("midlayer.", "layers.0.") for name in tensors}
    if any("d2t" in name and "t2d" not in name for name in tensors):
        found.add("d2t")
    fused = {re.sub(r"(qkv|gate_up)_proj", "*", name) for name in found if "qkv_proj" in name or "gate_up_proj" in name}
    out = []
    for name, slot in places.items():
        if name in found or re.sub(r"\b([qkv]|gate|up)_proj", "*", name) in fused:
            continue
        if names.layer(name) not in (None, 0) and name.endswith("hidden_norm.weight"):
            continue  # built for every layer, used in the first only
        why = {
            "lm_head.weight": "the verifier's head is taken"
            + ("" if slot.if_missing == "shared" else " and cut to its first rows"),
            "embed_tokens.weight": "the verifier's embedding is taken"
            if slot.if_missing == "shared"
            else "widths differ, nothing is shared",
            "d2t": "all zero: draft id k is read as token k",
        }.get(name, "")
        out.append(Outcome(name, destination(name, seen.class_), slot.if_missing, why))
    return out


def _module_known(module: str, places: Mapping[str, Slot]) -> bool:
    fused = re.sub(r"\.(qkv|gate_up)_proj$", lambda m: ".q_proj" if m[1] == "qkv" else ".gate_proj", module)
    return any(name.startswith((module + ".", fused + ".")) for name in places)


def _unknown_part(to: str, places: Mapping[str, Slot]) -> str:
    """The first part of a destination that is no module of the model, as the message names it."""
    known = {destination(name) for name in places}
    parts = to.split(".")
    for end in range(1, len(parts) + 1):
        part = ".".join(parts[:end])
        if not any(name == part or name.startswith(part + ".") for name in known):
            return part
    return to


def _times(a: int | None, b: int | None) -> int | None:
    return a * b if a is not None and b is not None else None
