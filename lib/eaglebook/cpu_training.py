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

from eaglebook.cpu_sums import GRAIN, KLDivergence, argmax, attend

_NAME = "eaglebook_unrolled"


def install() -> None:
    """Put the faster parts in place of the library's, in this process. `prepare` does the rest once the model is built."""
    import speculators.losses.utils as losses
    import speculators.train.dataloader as dataloader
    import speculators.train.trainer as trainer

    losses._EAGER_LOSS_FN_MAP["kl_div"] = lambda logits, targets: KLDivergence.apply(logits, targets)
    torch.argmax = argmax  # type: ignore[assignment]
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
    _teach_only_what_is_taught(model)


def _teach_only_what_is_taught(model: Any) -> None:
    """Let both heads wait until the loss asks for them, and compute them for supervised positions alone.

    In ``Eagle3DraftModel.forward`` (speculators 0.9) a head passes its input on whenever a loss will follow; what follows is
    ``compute_metrics``, which here picks the rows, applies the heads and calls the library's own on them. The conditional
    accuracy's denominator leaves out, as well, the positions whose target is not taught.
    """
    import speculators.models.eagle3.core as core

    library, known = core.compute_metrics, dict[str, Any](waits=False)
    apply = {head: head.forward for head in (model.lm_head, model.verifier_lm_head)}
    for head, forward in apply.items():
        head.forward = lambda rows, forward=forward: rows if known["waits"] else forward(rows)

    def told(_: Any, __: Any, named: dict[str, Any]) -> None:
        known["waits"] = named.get("verifier_last_hidden_states") is not None

    def compute_metrics(
        hidden: torch.Tensor, last: torch.Tensor, loss_mask: torch.Tensor, prev_correct: torch.Tensor, step: int,
        decay: float, loss_config: Any = None,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:  # fmt: skip
        if step == 0:
            taught = loss_mask[0].nonzero()[:, 0]
            known["at"] = functional.pad(taught, (0, -len(taught) % GRAIN), value=-1)
            with torch.no_grad():
                known["targets"] = apply[model.verifier_lm_head](last[:, known["at"]])
        starts = known["at"] - step  # whose guess number `step` this is (``align_for_step``)
        valid = starts >= 0
        right = prev_correct[:, starts] & valid
        weighted = {name: (loss, weight * decay**step) for name, (loss, weight) in loss_config.items()}
        loss, metrics = library(
            apply[model.lm_head](hidden[:, starts]), known["targets"], valid[None], right, 0, 1.0, weighted
        )
        prev_correct[:, starts[valid]] = right[:, valid]
        return loss, {name.replace("_0_", f"_{step}_"): value for name, value in metrics.items()}

    model.register_forward_pre_hook(told, with_kwargs=True)
    core.compute_metrics = compute_metrics  # type: ignore[assignment]


def trim(batch: dict[str, Any]) -> dict[str, Any]:
    """A pack with little padding: every tensor ``[1, pack_tokens, …]`` cut behind the last document, to a multiple of `GRAIN`."""
    used = max(1, int((batch["document_ids"] != -1).sum()))
    used = -(-used // GRAIN) * GRAIN
    return {k: v[:, :used] if isinstance(v, torch.Tensor) and v.ndim > 1 else v for k, v in batch.items()}


ALL_ATTENTION_FUNCTIONS.register(_NAME, attend)
