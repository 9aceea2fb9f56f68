"""Start the draft from the verifier instead of from noise.

The draft's one decoder layer continues where the highest captured layer stopped. So the decoder layer, its norms and the final
norm are the verifier's last ones, ``fc`` passes that state through, and the half of q/k/v that reads the next token's embedding
keeps its random start. That is the verifier's guess of a token which is known already. What the draft needs is the state *one
position on*, and the best linear guess of it has a closed form: `fit` solves it over the training conversations in seconds, and
the draft accepts something before its first step. Everything is trained from there.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from eaglebook.verifier import Verifier


def from_verifier(draft: Any, verifier: Verifier) -> int:
    """Copy the verifier's last layer into a fresh ``Eagle3DraftModel``. Returns the number of tensors copied.

    A draft with more heads or a wider MLP begins as the same function: what is added keeps its random input side, and its
    output side is zero. Where that is not possible (fewer of either, another head size, latent attention) a tensor keeps
    its noise.
    """
    from safetensors import safe_open

    from eaglebook.checkpoint import headers

    names = headers.read_folder(verifier.path)
    prefix = verifier.norm_key.removesuffix("norm.weight")
    last = f"{prefix}layers.{verifier.num_layers - 1}."

    def stored(name: str) -> torch.Tensor | None:
        if name not in names:
            return None
        with safe_open(names[name].file, framework="pt") as file:
            return file.get_tensor(name).float()

    layer, hidden, copied = draft.layers[0], verifier.hidden_size, 0
    attention, mlp = layer.self_attn, layer.mlp
    norms = [
        (draft.norm.weight, f"{prefix}norm.weight"),
        (layer.hidden_norm.weight, f"{last}input_layernorm.weight"),
        (layer.post_attention_layernorm.weight, f"{last}post_attention_layernorm.weight"),
    ]
    with torch.no_grad():
        for parameter, name in norms:
            copied += _put(parameter, stored(name))
        wider = [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
        gate = stored(f"{last}mlp.gate_proj.weight")
        if gate is not None and gate.shape[0] <= mlp.gate_proj.weight.shape[0]:
            mlp.down_proj.weight.zero_()
            for part, module in zip(("gate", "up", "down"), wider, strict=True):
                copied += _put(module.weight, stored(f"{last}mlp.{part}_proj.weight"))
        q, k, v, o = (stored(f"{last}self_attn.{part}_proj.weight") for part in "qkvo")
        if q is not None and k is not None and v is not None and o is not None:
            heads, kv_heads = q.shape[0] // attention.head_dim, k.shape[0] // attention.head_dim
            chosen = _kv_sources(heads, kv_heads, draft.config.transformer_layer_config)
            if chosen and verifier.head_dim == attention.head_dim and q.shape[1] == hidden:
                attention.o_proj.weight.zero_()
                copied += _put(attention.q_proj.weight[:, hidden:], q) + _put(attention.o_proj.weight, o)
                for module, weight in ((attention.k_proj, k), (attention.v_proj, v)):
                    by_head = weight.view(kv_heads, attention.head_dim, hidden)[chosen].flatten(0, 1)
                    copied += _put(module.weight[:, hidden:], by_head)
        if draft.fc.weight.shape[1] % hidden == 0 and draft.fc.weight.shape[0] == hidden:
            draft.fc.weight.zero_()
            draft.fc.weight[:, -hidden:] = torch.eye(hidden)
            copied += 1
    return copied


def fit(draft: Any, samples: Iterable[torch.Tensor], ridge: float = 1e-2) -> None:
    """Set ``fc`` to the ridge regression from a position's captured states to the highest of them one position on.

    ``samples``: hidden states ``[tokens, n_aux + 1, hidden]`` of training conversations, as stored by 02. Float64 sums of
    ``(n_aux × hidden)²`` numbers. A draft that normalises its states before ``fc`` keeps what it had.
    """
    if draft.input_norm is not None or draft.fc_norm is not None:
        return
    hidden, wide = draft.fc.weight.shape
    where = torch.accelerator.current_accelerator() or torch.device("cpu")  # the draft itself is moved there later
    gram = torch.zeros(wide, wide, dtype=torch.float64, device=where)
    cross = torch.zeros(wide, hidden, dtype=torch.float64, device=where)
    for sample in samples:
        states = sample.to(where).float()
        now, following = states[1:-1, :-1].flatten(1), states[2:, -2]  # the first state is out of scale
        gram += (now.T @ now).double()
        cross += (now.T @ following).double()
    gram.diagonal().add_(ridge * gram.diagonal().mean())
    with torch.no_grad():
        draft.fc.weight.copy_(torch.linalg.solve(gram, cross).T.to(draft.fc.weight))


def _put(target: torch.Tensor, value: torch.Tensor | None) -> int:
    """Copy into the leading rows and columns; 1 if there was something to copy that fits."""
    if value is None or any(n > m for n, m in zip(value.shape, target.shape, strict=True)):
        return 0
    target[tuple(slice(n) for n in value.shape)].copy_(value)
    return 1


def _kv_sources(heads: int, kv_heads: int, config: Any) -> list[int]:
    """Which of the verifier's key-value heads each leading one of the draft's is, so that every query head meets its own.

    Empty when the draft shares its key-value heads in a way that no copy can follow.
    """
    share, own_share = heads // kv_heads, config.num_attention_heads // config.num_key_value_heads
    if config.num_attention_heads < heads or share % own_share:
        return []
    return [first // share for first in range(0, heads, own_share)]
