"""Start the draft from the verifier instead of from noise.

The draft's one decoder layer continues where the highest captured layer stopped. So: ``fc`` passes that state through,
the decoder layer, its norms and the final norm are the verifier's last ones, and the half of q/k/v that reads the next
token's embedding keeps its random start. Everything is trained from there.
"""

from __future__ import annotations

from typing import Any

import torch

from eaglebook.verifier import Verifier


def from_verifier(draft: Any, verifier: Verifier) -> int:
    """Copy the verifier's last layer into a fresh ``Eagle3DraftModel``. Returns the number of tensors copied.

    Only tensors whose shapes agree are copied (a draft with other heads or another MLP keeps its random ones).
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

    layer, hidden = draft.layers[0], verifier.hidden_size
    pairs = [
        (draft.norm.weight, f"{prefix}norm.weight"),
        (layer.hidden_norm.weight, f"{last}input_layernorm.weight"),
        (layer.post_attention_layernorm.weight, f"{last}post_attention_layernorm.weight"),
        (layer.self_attn.o_proj.weight, f"{last}self_attn.o_proj.weight"),
        (layer.mlp.gate_proj.weight, f"{last}mlp.gate_proj.weight"),
        (layer.mlp.up_proj.weight, f"{last}mlp.up_proj.weight"),
        (layer.mlp.down_proj.weight, f"{last}mlp.down_proj.weight"),
    ]
    copied = 0
    with torch.no_grad():
        for parameter, name in pairs:
            value = stored(name)
            if value is not None and value.shape == parameter.shape:
                parameter.copy_(value)
                copied += 1
        for part in "qkv":
            parameter = getattr(layer.self_attn, f"{part}_proj").weight
            value = stored(f"{last}self_attn.{part}_proj.weight")
            if value is not None and value.shape == (parameter.shape[0], hidden) == (
                *parameter.shape[:1],
                parameter.shape[1] // 2,
            ):
                parameter[:, hidden:] = value
                copied += 1
        if draft.fc.weight.shape[1] % hidden == 0 and draft.fc.weight.shape[0] == hidden:
            draft.fc.weight.zero_()
            draft.fc.weight[:, -hidden:] = torch.eye(hidden)
            copied += 1
    return copied
