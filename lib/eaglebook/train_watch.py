"""While speculators trains: what would be accepted by now, a stop when it no longer grows, no checkpoint but the best and the last.

The library validates by loss and by accuracy inside the draft vocabulary. Neither is what serving counts, so after each epoch
(and within the first, where most is learnt) the draft is run over answers it never saw, and judged as `acceptance` does.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eaglebook import acceptance, evenly, manifests, responses, states_files
from eaglebook.acceptance import Acceptance
from eaglebook.responses import Conversation

if TYPE_CHECKING:
    import torch

RECORD = "acceptance.json"  # in every checkpoint's folder
FIRST_EPOCH_POINTS = 4  # the curve over samples has its steepest part here
Sample = tuple[Path, Conversation]
_metrics = logging.getLogger("speculators.metrics")


class Enough(Exception):
    """Acceptance no longer grows: the rest of the epochs is left out."""


def gradients(said: dict[str, float]) -> None:
    """Keep the norm of every step's gradient in ``said["grad_norm"]``; a step that has none ends the training at once.

    The library clips by it and forgets it, and trains on with weights that are not numbers.
    """
    import torch

    clip = torch.nn.utils.clip_grad_norm_

    def watched(*arguments: Any, **named: Any) -> Any:
        norm = clip(*arguments, **named)
        said["grad_norm"] = float(norm)
        if not math.isfinite(said["grad_norm"]):
            raise FloatingPointError(
                "the gradient is not finite; the last checkpoint is whole. Lower learning_rate; if it is low, a file of hidden "
                "states may hold numbers that are not finite: eaglebook run --stage 02 --force"
            )
        return norm

    torch.nn.utils.clip_grad_norm_ = watched


def install(
    conversations: Path, states: Path, positions: int, evaluated: int, patience: int, least_start: float = 0.0
) -> None:
    """Let this process's Trainer report ``{"acceptance": {split: …}}`` beside its own metrics, stop early, and prune.

    ``least_start``: a draft that accepts no more than this before its first step is not read as it was trained; raises
    SystemExit then.
    """
    import speculators.train.trainer as trainer
    import torch

    samples = choose(responses.read(conversations), states, evaluated)
    train_epoch, val_epoch, run_training = (
        trainer.Trainer.train_epoch, trainer.Trainer.val_epoch, trainer.Trainer.run_training,
    )  # fmt: skip

    def report(self: Any, epoch: int, share: float) -> dict[str, Any]:
        row = {split: a.summary() for split, a in measure(self, samples, positions).items()}
        _metrics.info({"acceptance": row, "epoch": epoch, "share": share, "global_step": self.global_step})
        return row

    def watched_epoch(self: Any, epoch: int, *, step_callback: Callable[[], None] | None = None) -> None:
        steps, done = len(self.train_loader), [0]
        points = {steps * k // FIRST_EPOCH_POINTS for k in range(FIRST_EPOCH_POINTS)} if epoch == 0 else set()

        def after_step() -> None:
            done[0] += 1
            if done[0] in points - {0}:
                report(self, epoch, done[0] / steps)
            if step_callback is not None:
                step_callback()

        if epoch == 0 and self.global_step == 0:
            start = report(self, 0, 0.0)[responses.HELD_OUT]["mean_acceptance_length"]
            if start <= least_start:
                raise SystemExit(
                    f"the draft to continue accepts nothing before its first step: acceptance length {start:.2f}. It was "
                    "trained for another verifier, other aux ids or flags. Next: eaglebook inspect it"
                )
        train_epoch(self, epoch, step_callback=after_step)

    def watched_validation(self: Any, epoch: int) -> Any:
        values = val_epoch(self, epoch)
        saved, found = Path(self.checkpointer.path), report(self, epoch, 1.0)
        enough = [False]
        if self.rank == 0:  # one process alone looks at the checkpoints, and tells the others
            if (saved / str(epoch)).is_dir():
                manifests.write_atomically(saved / str(epoch) / RECORD, json.dumps(found))
            best = best_epoch(saved)
            if best is not None:
                prune(saved, keep={epoch, best})
                enough = [bool(patience) and epoch - best >= patience]
        if self.is_distributed:
            torch.distributed.broadcast_object_list(enough, src=0)
        if enough[0]:
            raise Enough
        return values

    def until_enough(self: Any) -> None:
        try:
            run_training(self)
        except Enough:
            _metrics.info({"stopped_early": True, "epoch": self.global_step // max(1, len(self.train_loader)) - 1})

    trainer.Trainer.train_epoch = watched_epoch  # type: ignore[method-assign]
    trainer.Trainer.val_epoch = watched_validation  # type: ignore[method-assign]
    trainer.Trainer.run_training = until_enough  # type: ignore[method-assign]


def best_epoch(save_path: Path) -> int | None:
    """The checkpoint with the largest acceptance length on held-out conversations, by the record that lies in each."""
    lengths = {
        int(file.parent.name): json.loads(file.read_text())[responses.HELD_OUT]["mean_acceptance_length"]
        for file in save_path.glob(f"[0-9]*/{RECORD}")
    }
    return max(sorted(lengths), key=lambda epoch: lengths[epoch], default=None)


def choose(conversations: list[Conversation], states: Path, count: int) -> dict[str, list[Sample]]:
    """At most ``count`` conversations of each split that is not trained on, evenly spread, with their hidden-state files."""
    rows: dict[str, list[Sample]] = {}
    for row, conversation in enumerate(conversations):
        if conversation.split != responses.TRAIN:
            rows.setdefault(conversation.split, []).append((states / states_files.file_name(row), conversation))
    return {split: evenly.take(some, count) for split, some in rows.items()}


def training_states(conversations: Path, states: Path, count: int) -> Iterator[torch.Tensor]:
    """Hidden states of at most ``count`` conversations that are trained on, evenly spread."""
    rows = [row for row, c in enumerate(responses.read(conversations)) if c.split == responses.TRAIN]
    for row in evenly.take(rows, count):
        yield states_files.read(states / states_files.file_name(row))[0]


def measure(trainer: Any, samples: dict[str, list[Sample]], positions: int) -> dict[str, Acceptance]:
    """Greedy acceptance as served of the model in training, by split. The model goes back to training mode."""
    import torch

    draft = getattr(trainer.model, "module", trainer.model)
    draft.eval()
    found = {}
    with torch.autocast(trainer.device_type, dtype=trainer.config.hidden_states_dtype):
        for split, some in samples.items():
            read = ((states_files.read(file)[0], c.input_ids, c.loss_mask) for file, c in some)
            found[split] = acceptance.evaluate(draft, read, positions)["as_served"]
    draft.train()
    return found


def prune(save_path: Path, keep: set[int]) -> None:
    """Delete the checkpoints of all epochs but ``keep``, with the links that name them."""
    for folder in save_path.glob("*"):
        if folder.is_dir() and not folder.is_symlink() and folder.name.isdigit() and int(folder.name) not in keep:
            shutil.rmtree(folder)
            for link in save_path.glob("*"):
                if link.is_symlink() and not link.exists():
                    link.unlink()
