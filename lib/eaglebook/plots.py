"""One function per figure. Each takes plain data and returns a matplotlib Figure; none keeps state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("agg")
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from eaglebook.intervals import Estimate

# Okabe and Ito's colours: told apart by colour-blind readers too.
BLUE, ORANGE, GREEN, RED, PURPLE, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#777777"
CYCLE = [BLUE, ORANGE, GREEN, RED, PURPLE]


def _axes(width: float = 7.0, height: float = 3.4, columns: int = 1) -> tuple[Figure, Any]:
    figure, axes = plt.subplots(1, columns, figsize=(width, height), layout="constrained")
    for axis in np.atleast_1d(axes):
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
        axis.set_prop_cycle(color=CYCLE)
    return figure, axes


def plan(disk_bytes: Mapping[str, float], seconds: Mapping[str, float], free_bytes: float) -> Figure:
    """Disk and time by stage, as bars."""
    figure, (left, right) = _axes(8, 3, columns=2)
    left.barh(list(disk_bytes)[::-1], [b / 1e9 for b in disk_bytes.values()][::-1], color=BLUE)
    left.set(
        xlabel="GB on disk",
        title=f"{sum(disk_bytes.values()) / 1e9:.2f} GB of {free_bytes / 1e9:.0f} GB free",
    )
    right.barh(list(seconds)[::-1], [s / 60 for s in seconds.values()][::-1], color=ORANGE)
    right.set(xlabel="minutes", title=f"about {sum(seconds.values()) / 60:.0f} minutes")
    return figure


def lengths(prompt_tokens: Sequence[int], response_tokens: Sequence[int], limit: int) -> Figure:
    """Histograms of prompt and response lengths; the response limit marked."""
    figure, (left, right) = _axes(8, 3, columns=2)
    left.hist(prompt_tokens, bins=30, color=GREY)
    left.set(xlabel="tokens in the rendered prompt", ylabel="conversations")
    right.hist(response_tokens, bins=30, color=BLUE)
    right.axvline(limit, color=RED, linestyle="--", label="max_new_tokens")
    right.set(xlabel="tokens in the response")
    right.legend(frameon=False)
    return figure


def norms(by_slot: Mapping[str, Sequence[float]]) -> Figure:
    """Distribution of residual-stream norms per slot, log scale: a wrong layer or a post-norm slot stands out."""
    figure, axis = _axes(7, 3)
    axis.violinplot([np.log10(values) for values in by_slot.values()], showmedians=True)
    axis.set_xticks(range(1, len(by_slot) + 1), list(by_slot))
    axis.set(ylabel="log10 of the norm", title="Norm of each token's state, by slot")
    return figure


def coverage(sizes: Sequence[int], curves: Mapping[str, Sequence[float]], chosen: int) -> Figure:
    """Share of tokens covered against draft vocabulary size."""
    figure, axis = _axes()
    for name, values in curves.items():
        axis.plot(sizes, values, marker="o", markersize=3, label=name)
    axis.axvline(chosen, color=GREY, linestyle="--", label=f"draft_vocab_size {chosen:,}")
    axis.set(xscale="log", xlabel="draft vocabulary size", ylabel="share of response tokens covered")
    axis.legend(frameon=False, loc="lower right")
    return figure


def training(steps: Sequence[Mapping[str, float]], epochs: Sequence[Mapping[str, float]], window: int = 25) -> Figure:
    """Loss and per-position accuracy by step, smoothed; validation as dots at the end of each epoch."""
    figure, (left, right) = _axes(9, 3.4, columns=2)
    x = np.array([s["step"] for s in steps])
    ends = [max((s["step"] for s in steps if s["epoch"] == e["epoch"]), default=0) for e in epochs]
    left.plot(x, [s["loss"] for s in steps], color=BLUE, alpha=0.2)
    left.plot(x, _smooth([s["loss"] for s in steps], window), color=BLUE, label="training, smoothed")
    left.plot(ends, [e["loss"] for e in epochs], "o", color=RED, label="validation")
    left.set(xlabel="step", ylabel="loss (summed over TTT steps)")
    left.legend(frameon=False)
    for colour, key in zip(CYCLE, sorted(k for k in steps[0] if k.startswith("full_acc_")), strict=False):
        position = int(key.rsplit("_", 1)[1]) + 1
        right.plot(x, _smooth([s[key] for s in steps], window), color=colour, label=f"position {position}")
        right.plot(ends, [e[key] for e in epochs], "o", color=colour)
    right.set(xlabel="step", ylabel="share all right so far", title="dots: validation")
    right.legend(frameon=False)
    return figure


def over_samples(lengths: Mapping[str, Sequence[tuple[float, float]]], distinct: int) -> Figure:
    """Mean acceptance length against conversations seen, a line a set; dashed where the first epoch ends."""
    figure, axis = _axes()
    for colour, (name, points) in zip(CYCLE, lengths.items(), strict=False):
        x, y = zip(*points, strict=True)
        axis.plot(x, y, "o-", color=colour, label=f"{name.replace('_', ' ')}, {y[-1]:.2f} at the end")
    axis.axvline(distinct, color="grey", linestyle="--", linewidth=1)
    axis.set(
        xlabel="conversations seen, repetitions counted", ylabel="mean acceptance length, as served", ylim=(1, None)
    )
    axis.legend(frameon=False)
    return figure


def position_rates(by_source: Mapping[str, Sequence[float]]) -> Figure:
    """Acceptance rate per draft position, one group of bars per source."""
    figure, axis = _axes()
    count = len(by_source)
    for number, (name, rates) in enumerate(by_source.items()):
        x = np.arange(1, len(rates) + 1) + (number - (count - 1) / 2) * 0.8 / count
        bars = axis.bar(x, rates, width=0.8 / count, label=name, color=CYCLE[number % len(CYCLE)])
        axis.bar_label(bars, fmt="%.2f", fontsize=8)
    positions = max(len(rates) for rates in by_source.values())
    axis.set_xticks(range(1, positions + 1))
    axis.set(xlabel="draft position", ylabel="accepted drafts / drafts", ylim=(0, None))
    axis.legend(frameon=False)
    return figure


def by_category(lengths: Mapping[str, Estimate]) -> Figure:
    """Mean acceptance length per category with its interval, sorted."""
    figure, axis = _axes(7, 0.6 + 0.3 * len(lengths))
    names = sorted(lengths, key=lambda name: lengths[name].value)
    values = [lengths[name] for name in names]
    axis.barh(names, [e.value for e in values], color=BLUE, alpha=0.75)
    axis.errorbar(
        [e.value for e in values], names, xerr=_arms(values), fmt="none", ecolor="black", elinewidth=1, capsize=2
    )
    for name, e in zip(names, values, strict=True):
        axis.annotate(
            f"{e.value:.2f}", (e.high, name), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8
        )
    axis.set(xlabel="mean acceptance length, with 95 % interval", xlim=(1, None))
    return figure


def rung_seconds(names: Sequence[str], own: Sequence[float], wall: Sequence[float], passed: Sequence[bool]) -> Figure:
    """Seconds per rung of the load ladder: its own work, and with Python and vLLM's import."""
    figure, axis = _axes(7, 0.8 + 0.5 * len(names))
    y = np.arange(len(names))[::-1]
    axis.barh(y, wall, color=GREY, alpha=0.35, label="with start and import")
    axis.barh(y, own, color=[GREEN if ok else RED for ok in passed], label="the rung itself")
    axis.set_yticks(y, names)
    axis.set(xlabel="seconds")
    axis.legend(frameon=False)
    return figure


def faults(lengths: Sequence[tuple[str, float, bool]], healthy: float) -> Figure:
    """Mean acceptance length by fault, beside the healthy draft's; pale where uninitialised memory decides."""
    figure, axis = _axes(7, 1.0 + 0.27 * len(lengths))
    y = np.arange(len(lengths))[::-1]
    for at, (_, length, undefined) in zip(y, lengths, strict=True):
        axis.barh(at, length - 1, left=1, color=GREEN if length == healthy else RED, alpha=0.35 if undefined else 1.0)
    axis.axvline(healthy, color=GREY, linestyle="--")
    axis.set_yticks(y, [name for name, _, _ in lengths], fontsize=8)
    axis.set(xlabel="mean acceptance length", xlim=(1, healthy + 0.1))
    return figure


def speed_ups(
    by_concurrency: Mapping[int, Estimate],
    modelled_by_concurrency: Mapping[int, float],
    by_k: Mapping[int, Estimate],
    modelled_by_k: Mapping[int, float],
    k: int,
    concurrency: int,
) -> Figure:
    """Speed-up against requests in flight (at K = ``k``) and against K (at ``concurrency``), measured beside the model."""
    figure, axes = _axes(9, 3.4, columns=2)
    panels = ((by_concurrency, modelled_by_concurrency), (by_k, modelled_by_k))
    for axis, (measured, modelled) in zip(axes, panels, strict=True):
        values = list(measured.values())
        axis.errorbar(
            list(measured),
            [e.value for e in values],
            yerr=_arms(values),
            fmt="o",
            color=BLUE,
            capsize=3,
            label="measured",
        )
        axis.plot(list(modelled), list(modelled.values()), "--", color=ORANGE, label="model")
        axis.axhline(1, color=GREY, linewidth=1)
        axis.set_xticks(list(measured), [str(x) for x in measured])
        axis.set(ylim=(0, None))
    axes[0].set_xscale("log", base=2)
    axes[0].set_xticks(list(by_concurrency), [str(x) for x in by_concurrency])
    axes[0].set(xlabel="requests in flight", ylabel="speed-up (1: no draft)", title=f"{k} draft tokens a step")
    flight = "one request" if concurrency == 1 else f"{concurrency} requests"
    axes[1].set(xlabel="draft tokens a step (K)", title=f"{flight} in flight")
    axes[0].legend(frameon=False)
    return figure


def runs(names: Sequence[str], series: Mapping[str, Sequence[float]]) -> Figure:
    """One panel per metric, one bar per run."""
    figure, axes = _axes(3.2 * len(series), 0.9 + 0.35 * len(names), columns=len(series))
    for axis, (metric, values) in zip(np.atleast_1d(axes), series.items(), strict=True):
        bars = axis.barh(list(names)[::-1], list(values)[::-1], color=BLUE)
        axis.bar_label(bars, fmt="%.3g", padding=3, fontsize=8)
        axis.set_title(metric, fontsize=9)
    return figure


def _arms(estimates: Sequence[Estimate]) -> np.ndarray:
    """Lengths of the error bars below and above, ``[2, n]``."""
    return np.array([[max(0.0, e.value - e.low) for e in estimates], [max(0.0, e.high - e.value) for e in estimates]])


def _smooth(values: Sequence[float], window: int) -> np.ndarray:
    """Running mean over the last ``window`` values."""
    total = np.cumsum(np.insert(np.asarray(values, dtype=float), 0, 0.0))
    index = np.arange(1, len(values) + 1)
    start = np.maximum(0, index - window)
    return (total[index] - total[start]) / (index - start)
