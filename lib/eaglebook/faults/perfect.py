"""A verifier and a draft of a few megabytes, built so that the draft is accepted at every position, and only if nothing is wrong.

Every token of a cycle has three digits. The verifier's next token follows from the three digits of the current one. The
draft needs one digit from each of its three sources, and none can replace another:

* *a* of the current token, from its embedding (a head that attends to itself, and an MLP that moves it to its place);
* *b* of the token before, from the position before (a head that rope turns to distance one, by frequencies that depend on theta);
* *c* of the token before, from the fused aux states in the first step and from its own fed-back state in the next ones.

The verifier's layers rotate *c* by one each, so a state taken one layer off decodes to another digit; `hidden_norm` and the
final `norm` hold signs, so leaving one out, or feeding back the wrong side of it, decodes to another digit as well. Each of
the four heads has keys and values of its own. Everything is exact in float32; NumPy only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from eaglebook.checkpoint import headers, weights
from eaglebook.checkpoint.weights import Piece

H, HEADS, HEAD_DIM, LAYERS, INNER, VOCAB, DRAFT_VOCAB = 128, 4, 64, 8, 64, 512, 256  # head_dim is not hidden / heads
AUX_IDS = [2, 4, 5]
THETA = 1000.0  # not the default: a rope that is left out must show
A, B, C, TURNED = (
    slice(8 * i, 8 * i + 8) for i in range(4)
)  # a verifier's state: the digits, and c turned by the layer
OUT_A, OUT_B, OUT_C_OLD, OUT_C_NEW = A, B, C, TURNED  # a draft's state
WAITING = slice(32, 40)  # where a stands between attention and MLP
_SELF, _HIDDEN, _BEFORE = 0, 1, 2  # heads; the fourth is idle
_SHARP, _SHARP_BEFORE = 15.0, 60.0  # how sharply the two kinds of head attend
_GATE = 8.0
_ACTIVE = _GATE / (1 + np.exp(-_GATE))  # silu of it

Weights = dict[str, np.ndarray]


@dataclass(frozen=True)
class Pair:
    """Folders of the two, and the cycle of tokens that both follow."""

    verifier: Path
    draft: Path
    cycle: dict[int, int]

    def answer(self, prompt: list[int], length: int) -> list[int]:
        """What the verifier must say after ``prompt``."""
        out, token = [], prompt[-1]
        for _ in range(length):
            token = self.cycle[token]
            out.append(token)
        return out

    def prompt(self, start: int = 0, length: int = 6) -> list[int]:
        """Tokens of the cycle in their order."""
        token = sorted(self.cycle)[start]
        return [token, *self.answer([token], length - 1)]


def build(folder: Path, aux_ids: list[int] | None = None, seed: int = 0) -> Pair:
    """Write the pair into ``folder/verifier`` and ``folder/draft`` (float32, about 3 MB). ``aux_ids`` are ascending, from 1 to 8."""
    aux_ids = aux_ids or AUX_IDS
    order, digits = _tokens(np.random.default_rng(seed))
    kept = sorted(order)
    verifier, draft = folder / "verifier", folder / "draft"
    _write(verifier, _VERIFIER, _verifier(order, digits))
    _write(draft, draft_config(aux_ids), _draft(order, digits, kept, aux_ids))
    return Pair(verifier, draft, dict(zip(order, order[1:] + order[:1], strict=True)))


def draft_config(aux_ids: list[int]) -> dict[str, Any]:
    """The draft's flat config: every key that a reader would default is stated."""
    return {
        **_SIZES, "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1,
        "draft_vocab_size": DRAFT_VOCAB, "target_hidden_size": H, "torch_dtype": "float32", "norm_before_residual": True,
        "norm_before_fc": False, "fc_norm": False, "norm_output": False, "eagle_aux_hidden_state_layer_ids": aux_ids,
        "num_aux_hidden_states": 3,
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": aux_ids, "ids_mean": "input"},
    }  # fmt: skip


_SIZES: dict[str, Any] = {
    "hidden_size": H, "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "head_dim": HEAD_DIM, "intermediate_size": INNER,
    "vocab_size": VOCAB, "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "hidden_act": "silu", "attention_bias": False,
    "mlp_bias": False, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "rope_theta": THETA, "rope_parameters": {"rope_type": "default", "rope_theta": THETA},
}  # fmt: skip
_VERIFIER = {
    **_SIZES,
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": LAYERS,
    "torch_dtype": "float32",
}


def _tokens(draw: np.random.Generator) -> tuple[list[int], np.ndarray]:
    """The cycle, and the digits (a, b, c) of each of its places: every combination that is read is unique."""
    order = [int(t) for t in draw.permutation(np.arange(3, VOCAB))[:DRAFT_VOCAB]]
    while True:
        digits = np.zeros((DRAFT_VOCAB, 3), dtype=int)
        whole: set[tuple[int, ...]] = set()
        read: set[tuple[int, ...]] = set()
        for n in range(DRAFT_VOCAB):
            for _ in range(1000):
                new = draw.integers(0, 8, 3)
                seen = (int(new[0]), int(digits[n - 1, 1]), int(digits[n - 1, 2]))
                if tuple(new) not in whole and (n == 0 or seen not in read):
                    break
            digits[n] = new
            whole.add(tuple(int(d) for d in new))
            if n:
                read.add(seen)
        last = (int(digits[0, 0]), int(digits[-1, 1]), int(digits[-1, 2]))
        if len(whole) == DRAFT_VOCAB and len(read) == DRAFT_VOCAB - 1 and last not in read:
            return order, digits


def _verifier(order: list[int], digits: np.ndarray) -> Weights:
    """Embeddings are the digits; layer i turns the copy of c by one; the head knows which digits come before a token."""
    embed, head = np.zeros((VOCAB, H)), np.zeros((VOCAB, H))
    for n, token in enumerate(order):
        for part, digit in zip((A, B, C), digits[n], strict=True):
            embed[token, part.start + digit] = 1
            head[order[(n + 1) % DRAFT_VOCAB], part.start + digit] = 1
    out: Weights = {"model.embed_tokens.weight": embed, "lm_head.weight": head, "model.norm.weight": np.ones(H)}
    for i in range(LAYERS):
        scale = np.sqrt(H / (3 if i == 0 else 4))  # what the norm before the MLP multiplies by
        gate, up, down = np.zeros((INNER, H)), np.zeros((INNER, H)), np.zeros((H, INNER))
        for c in range(8):
            gate[c, C.start + c] = _GATE / scale
            up[c, C.start + c] = 1 / scale
            down[TURNED.start + (c + i + 1) % 8, c] += 1 / _ACTIVE
            if i:
                down[TURNED.start + (c + i) % 8, c] -= 1 / _ACTIVE
        at = f"model.layers.{i}."
        out |= {f"{at}mlp.gate_proj.weight": gate, f"{at}mlp.up_proj.weight": up, f"{at}mlp.down_proj.weight": down}
        out |= {f"{at}{norm}.weight": np.ones(H) for norm in ("input_layernorm", "post_attention_layernorm")}
        out |= {f"{at}self_attn.{part}_proj.weight": np.zeros((HEADS * HEAD_DIM, H)) for part in "qkv"}
        out[f"{at}self_attn.o_proj.weight"] = np.zeros((H, HEADS * HEAD_DIM))
    return out


def _draft(order: list[int], digits: np.ndarray, kept: list[int], aux_ids: list[int]) -> Weights:
    code = _hadamard()  # c is fed back as a row of this, so that signs exchange digits
    signs = np.array([-1.0 if i % 2 else 1.0 for i in range(8)])
    hidden_norm, norm = np.ones(H), np.ones(H)
    hidden_norm[OUT_C_NEW] = signs
    norm[OUT_C_NEW], norm[OUT_A] = np.roll(signs, 1), signs
    fc = np.zeros((H, 3 * H))
    for part in (OUT_A, OUT_B, OUT_C_OLD):
        fc[part, part] = np.eye(8)  # from the first state
    for state, layer in enumerate(aux_ids):
        turned_back = np.roll(np.eye(8), -layer, axis=0)  # one column per turned digit, its row is c
        fc[OUT_C_NEW, state * H + TURNED.start : state * H + TURNED.stop] = code @ turned_back / 3
    q, k, v = (np.zeros((HEADS, HEAD_DIM, 2 * H)) for _ in range(3))
    o = np.zeros((H, HEADS, HEAD_DIM))
    embed_scale, hidden_scale = np.sqrt(H / 3), np.sqrt(H / 4)
    constant = np.zeros(2 * H)
    constant[A] = 1 / embed_scale  # exactly one of the digits a is there
    for head, distance, sharp, first in (
        (_SELF, 0, _SHARP, 0),
        (_HIDDEN, 0, _SHARP, 0),
        (_BEFORE, 1, _SHARP_BEFORE, 6),
    ):
        for pair in range(first, HEAD_DIM // 2):
            angle = distance * THETA ** (-2 * pair / HEAD_DIM)
            k[head, pair] = sharp * constant
            q[head, pair], q[head, pair + HEAD_DIM // 2] = (
                sharp * np.cos(angle) * constant,
                -sharp * np.sin(angle) * constant,
            )
    for i in range(8):
        v[_SELF, i, A.start + i] = v[_SELF, 8 + i, C.start + i] = v[_BEFORE, i, B.start + i] = 1 / embed_scale
    for i in range(32):
        v[_HIDDEN, i, H + i] = 1
    o[WAITING, _SELF, :8] = np.eye(8)
    o[OUT_C_NEW, _SELF, 8:16] = code
    o[OUT_B, _BEFORE, :8] = np.eye(8)
    o[:32, _HIDDEN, :32] = -np.eye(32)  # what came in goes out again: only the new state is left
    o[OUT_C_OLD, _HIDDEN, OUT_C_NEW] += code.T @ np.diag(signs) / hidden_scale
    gate, up, down = np.zeros((INNER, H)), np.zeros((INNER, H)), np.zeros((H, INNER))
    for i in range(8):
        unit = i * INNER // 8  # spread out, so that half the units are not enough
        gate[unit, WAITING.start + i], up[unit, WAITING.start + i] = _GATE / hidden_scale, 1 / hidden_scale
        down[OUT_A.start + i, unit], down[WAITING.start + i, unit] = 1 / _ACTIVE, -1 / _ACTIVE
    lm_head = np.zeros((DRAFT_VOCAB, H))
    row = {token: i for i, token in enumerate(kept)}
    for n in range(DRAFT_VOCAB):
        following = row[order[(n + 1) % DRAFT_VOCAB]]
        a, b, c = int(digits[n, 0]), int(digits[n - 1, 1]), int(digits[n - 1, 2])
        lm_head[following, OUT_A.start + a] = signs[a]  # as the final norm has it
        lm_head[following, OUT_B.start + b] = lm_head[following, OUT_C_OLD.start + c] = 1
    at = "midlayer."
    return {
        "fc.weight": fc, "norm.weight": norm, "lm_head.weight": lm_head,
        "d2t": np.array(kept) - np.arange(DRAFT_VOCAB), "t2d": np.isin(np.arange(VOCAB), kept),
        f"{at}hidden_norm.weight": hidden_norm, f"{at}input_layernorm.weight": np.ones(H), f"{at}post_attention_layernorm.weight": np.ones(H),
        f"{at}self_attn.q_proj.weight": q.reshape(-1, 2 * H), f"{at}self_attn.k_proj.weight": k.reshape(-1, 2 * H),
        f"{at}self_attn.v_proj.weight": v.reshape(-1, 2 * H), f"{at}self_attn.o_proj.weight": o.reshape(H, -1),
        f"{at}mlp.gate_proj.weight": gate, f"{at}mlp.up_proj.weight": up, f"{at}mlp.down_proj.weight": down,
    }  # fmt: skip


def _hadamard() -> np.ndarray:
    """Orthogonal 8 × 8 of ± 1/√8: negating every second row exchanges neighbouring columns."""
    two = np.array([[1.0, 1.0], [1.0, -1.0]])
    return np.kron(two, np.kron(two, two)) / np.sqrt(8)


def load(folder: Path) -> Weights:
    """The tensors of a draft written here, as arrays in the order of the file."""
    kinds = {"F32": "<f4", "I64": "<i8", "BOOL": "?"}
    tensors = headers.read_header(folder / "model.safetensors")
    return {
        n: np.frombuffer(headers.tensor_bytes(t), kinds[t.dtype]).reshape(t.shape or ()) for n, t in tensors.items()
    }


def piece(name: str, array: np.ndarray) -> Piece:
    """One tensor of a file, in the type it has in a draft."""
    if name == "d2t":
        return Piece(name, "I64", array.shape, data=np.ascontiguousarray(array, dtype="<i8").tobytes())
    if name == "t2d":
        return Piece(name, "BOOL", array.shape, data=np.ascontiguousarray(array, dtype=bool).tobytes())
    return Piece(name, "F32", array.shape, data=np.ascontiguousarray(array, dtype="<f4").tobytes())


def _write(folder: Path, config: Mapping[str, Any], tensors: Weights) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    weights.write([piece(name, array) for name, array in tensors.items()], folder / "model.safetensors")
