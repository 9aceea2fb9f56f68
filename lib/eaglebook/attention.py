"""Causal attention on a CPU, a block of queries at a time: what lies in the future is not computed, and scores stay in cache.

torch 2.13's own CPU kernel takes two to three times as long in bf16 at some hundred tokens a sequence, with a mask or without.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

_NAME, _BLOCK = "eaglebook_blocks", 64  # tokens: 32 and 128 were slower at the demo's lengths


def causal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float) -> torch.Tensor:
    """``query [batch, heads, tokens, dim]``, ``key`` and ``value`` with a head a group -> ``[batch, tokens, heads, width]``.

    ``width`` is the values' own, which latent attention has another of. Scores are rounded to the dtype of ``query``.
    """
    batch, heads, tokens, dim = query.shape
    groups, width = key.shape[1], value.shape[-1]
    shared, transposed = heads // groups, key.transpose(-1, -2)  # queries of a group share its keys: one product
    out = query.new_empty(batch, tokens, heads, width)
    for start in range(0, tokens, _BLOCK):
        end = min(start + _BLOCK, tokens)
        rows = end - start
        block = (query[:, :, start:end] * scaling).reshape(batch, groups, shared * rows, dim)
        scores = (block @ transposed[..., :end]).view(batch, heads, rows, end)
        scores[..., start:] += scores.new_full((rows, rows), float("-inf")).triu(1)
        weights = scores.softmax(-1).view(batch, groups, shared * rows, end)
        out[:, start:end] = (weights @ value[:, :, :end]).view(batch, heads, rows, width).transpose(1, 2)
    return out


@contextmanager
def by_blocks(model: Any) -> Iterator[None]:
    """Inside, a model that would attend by torch's kernel on a CPU does it by blocks. Any other is left as it is."""
    applies = model.device.type == "cpu" and model.config._attn_implementation == "sdpa"
    if not applies or not model._can_set_attn_implementation():
        yield
        return
    model.set_attn_implementation(_NAME)
    try:
        yield
    finally:
        model.set_attn_implementation("sdpa")


def _forward(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **more: Any) -> tuple[Any, None]:
    """transformers' attention interface. A mask (sliding window, padding on the left) or a bias goes to torch's kernel."""
    whole = query.shape[2] == key.shape[2] and more.get("is_causal") is not False and getattr(module, "is_causal", True)
    if attention_mask is not None or more.get("position_bias") is not None or not whole:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **more)
    scaling = more.get("scaling")
    return causal(query, key, value, query.shape[-1] ** -0.5 if scaling is None else scaling), None


ALL_ATTENTION_FUNCTIONS.register(_NAME, _forward)
ALL_MASK_ATTENTION_FUNCTIONS.register(_NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
