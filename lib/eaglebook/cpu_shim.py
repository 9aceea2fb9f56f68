"""What speculators 0.9's Trainer needs to run without an accelerator. Installed beside it, never a fork of it.

Each line names the place that fails without it (speculators 0.9.0). With an accelerator nothing is changed.
"""

from __future__ import annotations

from typing import Any


def install() -> bool:
    """Patch the Trainer for a CPU. Returns False, having done nothing, where an accelerator is available."""
    import speculators.train.checkpointer as checkpointer
    import speculators.train.trainer as trainer
    import torch

    if torch.accelerator.is_available():
        return False
    torch.accelerator.synchronize = lambda *args, **kwargs: None  # trainer.py:80, the step timer
    trainer.get_local_rank = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]  # trainer.py:348, .to(0) means "device 0"
    checkpointer.get_current_device = lambda: "cpu"  # utils/util.py:13, loads a resumed state to cuda:0
    original = trainer.Trainer.__init__

    def on_cpu(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.device_type = "cpu"  # trainer.py:228 falls back to "cuda", which switches autocast off

    trainer.Trainer.__init__ = on_cpu  # type: ignore[method-assign]
    return True
