"""The sums of EAGLE-3's training that a CPU does faster than torch's and speculators' own: attention, divergence, argmax."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

GRAIN = 32  # tokens: lengths are multiples of it, as oneDNN prepares each matrix product anew for every new one
_BLOCK, _ROWS = 128, 64  # tokens


def attend(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor,
    scaling: float | None = None, **_: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Attention of an unrolled step: the first step's keys, by the mask, and one key of each further step, its own.

    ``query [1, heads, tokens, dim]``, ``key`` and ``value`` with a head a group and ``steps × tokens`` rows, ``attention_mask``
    boolean ``[1, 1, tokens, steps × tokens]`` as speculators extends it (``models/eagle3/attention.py``): beyond the first
    step only its diagonal is set, so a product with every key would be thrown away. So would most of the first step's, as
    a pack holds many conversations: each block of queries meets the keys from the first that one of them sees, to its end.
    Returns ``[1, tokens, heads, dim]``.
    """
    batch, heads, tokens, dim = query.shape
    groups, steps = key.shape[1], key.shape[2] // tokens
    shared = heads // groups
    by_token = (query * (dim**-0.5 if scaling is None else scaling)).view(batch, groups, shared, tokens, dim)
    keys, *own_keys = key.view(batch, groups, 1, steps, tokens, dim).unbind(3)
    values, *own_values = value.view(batch, groups, 1, steps, tokens, dim).unbind(3)
    own = [(by_token * k).sum(-1, keepdim=True) for k in own_keys]
    mask = attention_mask[0, 0, :, :tokens]
    first = mask.byte().argmax(-1).tolist()
    out = []
    for start in range(0, tokens, _BLOCK):
        end = min(start + _BLOCK, tokens)
        seen = min(first[start:end]) // GRAIN * GRAIN
        rows = by_token[..., start:end, :].reshape(batch, groups, shared * (end - start), dim)
        scores = (rows @ keys[:, :, 0, seen:end].transpose(-1, -2)).view(batch, groups, shared, end - start, end - seen)
        scores = scores.masked_fill(~mask[start:end, seen:end], float("-inf"))
        weights = torch.cat([scores, *(o[..., start:end, :] for o in own)], dim=-1).softmax(-1)
        part = (
            weights[..., : end - seen].reshape(batch, groups, shared * (end - start), end - seen)
            @ values[:, :, 0, seen:end]
        )
        part = part.view(batch, groups, shared, end - start, dim)
        for n, v in enumerate(own_values):
            part = part + weights[..., end - seen + n, None] * v[..., start:end, :]
        out.append(part)
    return torch.cat(out, dim=-2).reshape(batch, heads, tokens, dim).transpose(1, 2).contiguous(), None


class KLDivergence(torch.autograd.Function):
    """``speculators.losses.eager.kl_div_loss`` with its gradient, softmax(logits) - softmax(targets), made on the way.

    A few rows at a time, so that what lies between stays in the cache.
    """

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        losses, slopes = [], []
        for some, wanted in zip(logits.split(_ROWS, dim=1), targets.split(_ROWS, dim=1), strict=True):
            log_q = functional.log_softmax(some, dim=-1, dtype=torch.float32)
            log_p = functional.log_softmax(wanted, dim=-1, dtype=torch.float32)
            p = log_p.exp()
            losses.append(log_p.sub_(log_q).mul_(p).sum(-1))
            slopes.append(log_q.exp_().sub_(p).to(logits.dtype))
        ctx.save_for_backward(torch.cat(slopes, dim=1))
        return torch.cat(losses, dim=1)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (slope,) = ctx.saved_tensors
        return slope * gradients[0].unsqueeze(-1).to(slope.dtype), None


_stock_argmax = torch.argmax


def argmax(tensor: torch.Tensor, dim: int | None = None, keepdim: bool = False) -> torch.Tensor:
    """torch 2.13's argmax of bf16 on a CPU takes six times as long as its max, which gives the index as well."""
    if dim is None or tensor.dtype != torch.bfloat16 or tensor.device.type != "cpu":
        return _stock_argmax(tensor, dim, keepdim)
    return tensor.max(dim, keepdim).indices
