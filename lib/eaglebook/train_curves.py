"""What a training reported, step by step and epoch by epoch, and whether that can be believed."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eaglebook.errors import UserError
from eaglebook.responses import HELD_OUT


@dataclass(frozen=True)
class Curves:
    """What training reported. ``steps``: one dict a step; ``epochs``: one a validation; ``points``: one a measured acceptance,
    with the epochs passed by then in ``passes`` and what `acceptance.Acceptance.summary` says by split."""

    steps: list[dict[str, float]]
    epochs: list[dict[str, float]]
    points: list[dict[str, Any]] = field(default_factory=list)
    stopped_early: bool = False

    @property
    def best_epoch(self) -> int | None:
        """The epoch, from 0, after which acceptance on held-out conversations was largest."""
        ends = {
            round(at["passes"]) - 1: at[HELD_OUT]["mean_acceptance_length"]
            for at in self.points
            if at["passes"] % 1 == 0
        }
        return max((e for e in sorted(ends) if e >= 0), key=lambda e: ends[e], default=None)

    @property
    def gain(self) -> tuple[float, float]:
        """Acceptance length on held-out conversations before the first step, and after the best epoch."""
        lengths = {at["passes"]: float(at[HELD_OUT]["mean_acceptance_length"]) for at in self.points}
        return lengths[0], max(length for passes, length in lengths.items() if passes and passes % 1 == 0)

    @property
    def tokens_per_s(self) -> float:
        """Median non-padding tokens a second over the steps, the first ones left out."""
        speeds = sorted(step["tokens_per_s"] for step in self.steps[3:] or self.steps)
        return speeds[len(speeds) // 2] if speeds else 0.0


def read(file: Path) -> Curves:
    """The curves of a ``metrics.jsonl``. A torn last line is left out; of repeated steps (after a resume) the last counts."""
    steps: dict[int, dict[str, float]] = {}
    epochs: dict[int, dict[str, float]] = {}
    points: dict[float, dict[str, Any]] = {}
    stopped = False
    for line in file.read_text().splitlines() if file.exists() else ():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if "train" in row:
            steps[row["global_step"]] = {
                "step": row["global_step"],
                "epoch": row["epoch"],
                "lr": _first(row["lr"]),
                "tokens_per_s": row["profile"]["tokens_per_s"],
                **row["train"],
            }
        elif "val" in row:
            values = {key.removesuffix("_epoch"): value for key, value in row["val"].items()}
            epochs[row["epoch"]] = {"epoch": row["epoch"], **values}
        elif "acceptance" in row:
            passes = row["epoch"] + row["share"]
            points[passes] = {"passes": passes, **row["acceptance"]}
        elif "stopped_early" in row:
            stopped = True
    ordered = (
        [steps[k] for k in sorted(steps)],
        [epochs[k] for k in sorted(epochs)],
        [points[k] for k in sorted(points)],
    )
    return Curves(*ordered, stopped_early=stopped)


def refuse_nothing_learnt(curves: Curves, epochs: int) -> None:
    """A run of speculators 0.9 can end well with loss 0 on no data (``train/recovery.py``). Raises UserError."""
    reasons = []
    if not curves.steps:
        reasons.append("no training step was reported")
    if any(step.get("error_records", 0) for step in curves.steps):
        reasons.append("samples were dropped (error_records above 0)")
    if any(not 0 < step["loss"] < float("inf") for step in curves.steps):
        reasons.append("a loss was 0, infinite or not a number")
    if any(not math.isfinite(epoch.get("loss", math.nan)) for epoch in curves.epochs):
        reasons.append("a validation has no loss, or one that is not a number")
    if len(curves.epochs) < epochs and not curves.stopped_early:
        reasons.append(f"{len(curves.epochs)} of {epochs} validations were reported")
    if reasons:
        raise UserError(
            "training ended, but cannot be believed",
            found="; ".join(reasons),
            fix="look at train.log; where the hidden states are at fault: eaglebook run --stage 02 --force, then 04 so",
        )


def loss_fell(curves: Curves) -> tuple[bool, str]:
    """Whether the last steps' mean loss is below the first step's, which is that of a draft which has learnt nothing; in
    words. The first few steps may already hold an explosion, so one alone is what the end is compared with."""
    if len(curves.steps) < 2:
        return True, "one step: nothing to compare"
    first, last = curves.steps[0]["loss"], [step["loss"] for step in curves.steps[1:][-5:]]
    end = sum(last) / len(last)
    return end < first, f"{first:.2f} to {end:.2f}"


def progress_line(curves: Curves, seconds: float) -> str:
    if not curves.steps:
        return f"training process starting · {seconds:.0f} s"
    last = curves.steps[-1]
    accuracy = " / ".join(f"{last[key]:.3f}" for key in sorted(last) if key.startswith("full_acc_"))
    return (
        f"epoch {last['epoch'] + 1:.0f} step {last['step'] + 1:.0f} · loss {last['loss']:.3f} · accuracy {accuracy} · "
        f"{curves.tokens_per_s:,.0f} tokens/s · {seconds:.0f} s"
    )


def _first(value: Any) -> float:
    return next(iter(value.values())) if isinstance(value, dict) else value
