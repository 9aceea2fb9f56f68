"""What speculators' training spends on a CPU beside its matrix products, and the same sums done faster through its own seams.

Found by profiling its Trainer (speculators 0.9.0, torch 2.13) at the demo's sizes, largest first: argmax over bf16 logits,
attention on a dense mask of which most is empty, padding of packs, the KL divergence through six temporaries, frozen heads
turned from fp32 to bf16 in every forward, an optimiser that walks over its tensors one by one. The loss it reaches is the
same; ``benchmarks/bench_training.py`` holds both side by side, and ``stock_trainer: true`` leaves all of this out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

_NAME, _GRAIN = "eaglebook_unrolled", 32  # tokens


def install() -> None:
    """Put the faster parts in place of the library's, in this process. `prepare` does the rest once the model is built."""
    import speculators.losses.utils as losses
    import speculators.train.dataloader as dataloader
    import speculators.train.trainer as trainer

    losses._EAGER_LOSS_FN_MAP["kl_div"] = lambda logits, targets: _KLDivergence.apply(logits, targets)
    torch.argmax = _argmax  # type: ignore[assignment]
    build = trainer.build_optimizers

    def fused(model: Any, config: Any) -> list[torch.optim.Optimizer]:
        optimizers = build(model, config)
        for group in (g for o in optimizers if isinstance(o, torch.optim.AdamW) for g in o.param_groups):
            group |= {"fused": True, "foreach": False}
        return optimizers

    trainer.build_optimizers = fused

    class Trimmed(dataloader.CollateFn):
        def __call__(self, batch: Any) -> Any:
            return trim(super().__call__(batch))

    dataloader.CollateFn = Trimmed  # type: ignore[misc]


def prepare(model: Any) -> None:
    """Frozen heads in bf16, as the verifier stores them and autocast would make them; attention that knows the unrolling."""
    for head in (model.lm_head, model.verifier_lm_head):
        if not head.weight.requires_grad:
            head.to(torch.bfloat16)
    model.config.transformer_layer_config._attn_implementation = _NAME


def trim(batch: dict[str, Any]) -> dict[str, Any]:
    """A pack with little padding: every tensor ``[1, pack_tokens, …]`` cut behind the last document, to a multiple of `_GRAIN`.

    Every new length would have oneDNN prepare each matrix product anew.
    """
    used = max(1, int((batch["document_ids"] != -1).sum()))
    used = -(-used // _GRAIN) * _GRAIN
    return {k: v[:, :used] if isinstance(v, torch.Tensor) and v.ndim > 1 else v for k, v in batch.items()}


def attend(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor,
    scaling: float | None = None, **_: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Attention of an unrolled step: all of the first step's keys, by the mask, and one key of each further step, its own.

    ``query [1, heads, tokens, dim]``, ``key`` and ``value`` with a head a group and ``steps × tokens`` rows, ``attention_mask``
    boolean ``[1, 1, tokens, steps × tokens]`` as speculators extends it (``models/eagle3/attention.py``): beyond the first
    step only its diagonal is set, so a product with every key would be thrown away. Returns ``[1, tokens, heads, dim]``.
    """
    batch, heads, tokens, dim = query.shape
    groups, steps = key.shape[1], key.shape[2] // tokens
    shared = heads // groups
    grouped = (query * (dim**-0.5 if scaling is None else scaling)).reshape(batch, groups, shared * tokens, dim)
    keys = key.view(batch, groups, steps, tokens, dim)
    values = value.view(batch, groups, steps, tokens, dim)
    first = (grouped @ keys[:, :, 0].transpose(-1, -2)).view(batch, groups, shared, tokens, tokens)
    scores = [first.masked_fill(~attention_mask[:, :, None, :, :tokens], float("-inf"))]
    by_token = grouped.view(batch, groups, shared, tokens, dim)
    scores += [(by_token * keys[:, :, None, step]).sum(-1, keepdim=True) for step in range(1, steps)]
    weights = torch.cat(scores, dim=-1).softmax(-1)
    out = (weights[..., :tokens].reshape(batch, groups, shared * tokens, tokens) @ values[:, :, 0]).view(by_token.shape)
    for step in range(1, steps):
        out = out + weights[..., tokens + step - 1, None] * values[:, :, None, step]
    return out.reshape(batch, heads, tokens, dim).transpose(1, 2).contiguous(), None


class _KLDivergence(torch.autograd.Function):
    """``speculators.losses.eager.kl_div_loss`` with its gradient, softmax(logits) - softmax(targets), made on the way."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        log_q = functional.log_softmax(logits, dim=-1, dtype=torch.float32)
        log_p = functional.log_softmax(targets, dim=-1, dtype=torch.float32)
        p = log_p.exp()
        loss = log_p.sub_(log_q).mul_(p).sum(-1)
        ctx.save_for_backward(log_q.exp_().sub_(p).to(logits.dtype))
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (slope,) = ctx.saved_tensors
        return slope * gradients[0].unsqueeze(-1).to(slope.dtype), None


_stock_argmax = torch.argmax


def _argmax(tensor: torch.Tensor, dim: int | None = None, keepdim: bool = False) -> torch.Tensor:
    """torch 2.13's argmax of bf16 on a CPU takes six times as long as its max, which gives the index as well."""
    if dim is None or tensor.dtype != torch.bfloat16 or tensor.device.type != "cpu":
        return _stock_argmax(tensor, dim, keepdim)
    return tensor.max(dim, keepdim).indices


ALL_ATTENTION_FUNCTIONS.register(_NAME, attend)
