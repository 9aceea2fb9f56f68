"""Small drafts made on the spot, without torch: configs of each layout, tensor shapes that belong to them, files on disk."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ITEM = {"BF16": 2, "F16": 2, "F32": 4, "I64": 8, "I32": 4, "BOOL": 1, "F8_E4M3": 1}
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, VOCAB, DRAFT_VOCAB, LAYERS = 64, 4, 2, 32, 96, 300, 100, 8
AUX_IDS = [2, 4, 5]  # the default of an 8-layer verifier

Shapes = dict[str, tuple[tuple[int, ...], str]]

VERIFIER: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": INNER,
    "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
    "vocab_size": VOCAB, "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu",
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LAYER: dict[str, Any] = {
    "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": 1,
    "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "vocab_size": VOCAB,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
FLAGS = {"norm_before_residual": True, "norm_before_fc": False, "fc_norm": False, "norm_output": False}


def flat(**changes: Any) -> dict[str, Any]:
    """A flat config that says everything. A change to None removes the key."""
    config = {
        **LAYER,
        "architectures": ["LlamaForCausalLMEagle3"],
        "rope_theta": 10000.0,
        "draft_vocab_size": DRAFT_VOCAB,
        "target_hidden_size": HIDDEN,
        **FLAGS,
        "eagle_aux_hidden_state_layer_ids": AUX_IDS,
        "num_aux_hidden_states": 3,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": AUX_IDS},
    }
    return _changed(config, changes)


def nested(layer: Mapping[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """A config as speculators 0.9 writes it."""
    config = {
        "architectures": ["Eagle3DraftModel"],
        "auto_map": {"": "config.Eagle3SpeculatorConfig"},
        "draft_vocab_size": DRAFT_VOCAB,
        "dtype": "bfloat16",
        "eagle_aux_hidden_state_layer_ids": AUX_IDS,
        "embed_requires_grad": False,
        **FLAGS,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": 3, "accept_tolerance": 0.0, "verifier_accept_k": 1}
            ],
            "verifier": {"name_or_path": "org/verifier", "architectures": ["LlamaForCausalLM"]},
        },
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "transformer_layer_config": _changed(dict(LAYER), layer or {}),
        "transformers_version": "5.19.0",
    }
    return _changed(config, changes)


def _changed(config: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in {**config, **changes}.items() if value is not None or key not in changes}


def shapes(
    *,
    layers: int = 1,
    aux: int = 3,
    heads: int = HEADS,
    kv: int = KV_HEADS,
    head_dim: int = HEAD_DIM,
    inner: int = INNER,
    hidden: int = HIDDEN,
    draft_vocab: int = DRAFT_VOCAB,
    vocab: int = VOCAB,
    mapping: bool = True,
    embed: bool = True,
    qk_norm: bool = False,
    prefix: str = "layers.0.",
) -> Shapes:
    """Tensors of a llama draft as speculators stores them."""
    of: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, aux * hidden),
        "norm.weight": (hidden,),
        "lm_head.weight": (draft_vocab, hidden),
    }
    if embed:
        of["embed_tokens.weight"] = (vocab, hidden)
    for i in range(layers):
        wide, at = (2 * hidden, prefix) if i == 0 else (hidden, f"layers.{i}.")
        of |= {
            f"{at}self_attn.q_proj.weight": (heads * head_dim, wide),
            f"{at}self_attn.k_proj.weight": (kv * head_dim, wide),
            f"{at}self_attn.v_proj.weight": (kv * head_dim, wide),
            f"{at}self_attn.o_proj.weight": (hidden, heads * head_dim),
            f"{at}mlp.gate_proj.weight": (inner, hidden),
            f"{at}mlp.up_proj.weight": (inner, hidden),
            f"{at}mlp.down_proj.weight": (hidden, inner),
            f"{at}input_layernorm.weight": (hidden,),
            f"{at}post_attention_layernorm.weight": (hidden,),
        }
        if i == 0:
            of[f"{at}hidden_norm.weight"] = (hidden,)
        if qk_norm:
            of |= {f"{at}self_attn.q_norm.weight": (head_dim,), f"{at}self_attn.k_norm.weight": (head_dim,)}
    out: Shapes = {name: (shape, "BF16") for name, shape in of.items()}
    return out | {"d2t": ((draft_vocab,), "I64"), "t2d": ((vocab,), "BOOL")} if mapping else out


def mla_shapes(rank: int = 24, kv_rank: int = 512, nope: int = 32, rope: int = 64, value: int = 32) -> Shapes:
    """Tensors of a DeepSeek draft: multi-head latent attention, dense MLP."""
    kept = {name: shape for name, shape in shapes().items() if "self_attn" not in name}
    at, wide = "layers.0.self_attn.", 2 * HIDDEN
    attention = {
        "q_a_proj": (rank, wide), "q_a_layernorm": (rank,), "q_b_proj": (HEADS * (nope + rope), rank),
        "kv_a_proj_with_mqa": (kv_rank + rope, wide), "kv_a_layernorm": (kv_rank,),
        "kv_b_proj": (HEADS * (nope + value), kv_rank), "o_proj": (HIDDEN, HEADS * value),
    }  # fmt: skip
    if not rank:
        attention = {name: shape for name, shape in attention.items() if not name.startswith("q_")}
        attention["q_proj"] = (HEADS * (nope + rope), wide)
    return kept | {f"{at}{name}.weight": (shape, "BF16") for name, shape in attention.items()}


def write(
    folder: Path, config: Mapping[str, Any] | None, tensors: Shapes, values: Mapping[str, Any] | None = None
) -> Path:
    """A checkpoint folder. ``values``: bytes of a tensor, or one number that fills it; default zero, and a valid mapping."""
    folder.mkdir(parents=True, exist_ok=True)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    given = {**_mapping(tensors), **(values or {})}
    data = {name: _bytes(shape, dtype, given.get(name, 0)) for name, (shape, dtype) in tensors.items()}
    header, at = {}, 0
    for name, (shape, dtype) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(data[name])]}
        at += len(data[name])
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + b"".join(data.values()))
    return folder


def ints(values: list[int]) -> bytes:
    return struct.pack(f"<{len(values)}q", *values)


def mapping(draft_vocab: int = DRAFT_VOCAB, vocab: int = VOCAB, first: int = 10) -> tuple[bytes, bytes]:
    """``d2t`` offsets and ``t2d`` mask of a draft vocabulary that is every second token from ``first`` on."""
    kept = [first + 2 * i for i in range(draft_vocab)]
    return ints([k - i for i, k in enumerate(kept)]), bytes(int(i in set(kept)) for i in range(vocab))


def _mapping(tensors: Shapes) -> dict[str, bytes]:
    """A valid map under whatever names the tensors have; nothing for a full vocabulary, whose map is zero."""
    named = {name.rpartition(".")[2]: name for name in tensors}
    d2t = named.get("d2t") or named.get("draft_id_to_target_id")
    t2d = named.get("t2d")
    vocab = tensors[t2d][0][0] if t2d else VOCAB
    if d2t is None or 10 + 2 * tensors[d2t][0][0] > vocab:
        return {}
    offsets, mask = mapping(tensors[d2t][0][0], vocab)
    if tensors[d2t][1] == "I32":
        offsets = struct.pack(f"<{len(offsets) // 8}i", *struct.unpack(f"<{len(offsets) // 8}q", offsets))
    return {d2t: offsets, **({t2d: mask} if t2d else {})}


def _bytes(shape: tuple[int, ...], dtype: str, value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    count = 1
    for n in shape:
        count *= n
    one = {
        "BF16": lambda: struct.pack("<f", value)[2:], "F16": lambda: struct.pack("<e", value),
        "F32": lambda: struct.pack("<f", value),
        "I64": lambda: struct.pack("<q", int(value)), "I32": lambda: struct.pack("<i", int(value)),
        "BOOL": lambda: bytes([int(value) & 1]), "F8_E4M3": lambda: bytes([int(value) & 0x7F]),
    }[dtype]()  # fmt: skip
    return one * count
