"""``eaglebook run · status · report``: the notebooks in order, what there is, the reports."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from eaglebook import execute, manifests, paths, report, runs
from eaglebook.errors import UserError
from eaglebook.params import STAGES
from eaglebook.presets import load

out = Console(highlight=False, soft_wrap=True)

PresetOption = Annotated[str, typer.Option(help="A preset of params/, or the path of a YAML file.")]
RunDirOption = Annotated[str, typer.Option(help="The run's directory. Default: outputs/<preset>.")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", help="stem.key=value, e.g. 04_train.epochs=2. Repeatable.")
]


def run(
    preset: PresetOption = "smollm2",
    run_dir: RunDirOption = "",
    stage: Annotated[
        list[str] | None, typer.Option(help="Only this stage (02_hidden_states, or 02). Repeatable.")
    ] = None,
    to: Annotated[str, typer.Option(help="Run all stages up to this one.")] = "",
    set_: SetOption = None,
    force: Annotated[bool, typer.Option(help="Run again what has succeeded.")] = False,
) -> None:
    """Run the notebooks through papermill; skip what is done, go on where a killed run stopped."""
    directory = _run_dir(preset, run_dir)
    params = load(preset, set_ or (), run_dir=_portable(directory))
    stems = _stems(stage, to)
    rank = params["02_hidden_states"].model_dump()["rank"]
    if rank:
        if stems != ["02_hidden_states"]:
            raise UserError(
                f"rank {rank} is another machine's share of 02",
                expected="--stage 02 and no other stage",
                found=", ".join(stems),
                fix="run the other stages where rank 0 runs",
            )
        directory = runs.rank_dir(directory, rank)
        params = load(preset, set_ or (), run_dir=_portable(directory))
    began, skipped = time.monotonic(), 0
    for number, stem in enumerate(stems, 1):
        out.print(f"[bold]\\[{number}/{len(stems)}] {stem}[/bold]", end=" ", soft_wrap=True)
        ticker = _Ticker()
        before = time.time()
        try:
            manifest = execute.run_stage(stem, params[stem], directory, force=force, say=ticker)
        finally:
            ticker.close()
            report.write_index(paths.outputs())
        if manifest.status != "succeeded":
            folder = runs.next_dir(directory, stem)
            raise UserError(
                f"{stem} {manifest.status.replace('_', ' ')}{f' in {manifest.failing_cell}' if manifest.failing_cell else ''}",
                found=manifest.error,
                fix=f"see {paths.show(folder / 'report.html')} and log.txt beside it; then run the same command again",
            )
        fresh = _epoch(manifest.ended) >= int(before)
        skipped += not fresh
        out.print(
            f"{'done in' if fresh else 'already done, took'} {manifest.seconds:.0f} s. {report.headline(manifest)}"
        )
    if "07_serve" in stems:
        _summary(directory)
    took = time.monotonic() - began
    note = "nothing to do: every stage is up to date" if skipped == len(stems) else f"{len(stems) - skipped} stages"
    out.print(f"{note} ({took:.0f} s)\n{paths.show(report.write_index(paths.outputs()))}")


def status(run_dir: Annotated[str, typer.Argument(help="A run's directory. Default: all.")] = "") -> None:
    """What every stage of every run came to."""
    directories = [paths.resolve(run_dir)] if run_dir else runs.run_dirs()
    if not directories:
        out.print("No run yet. Start one: eaglebook run --preset smoke")
    for directory in directories:
        table = Table(title=paths.show(directory), title_justify="left", box=None)
        for column in ("stage", "status", "seconds", "result"):
            table.add_column(column, overflow="fold")
        for stem in STAGES:
            for folder in (runs.stage_dir(directory, stem), runs.next_dir(directory, stem)):
                manifest = manifests.read(folder)
                if manifest:
                    attempt = " (last attempt)" if folder.name.endswith(".next") else ""
                    table.add_row(
                        stem,
                        manifest.shown_status + attempt,
                        f"{manifest.seconds:.0f}",
                        report.headline(manifest),
                    )
        out.print(table)


def report_all(run_dir: Annotated[str, typer.Argument(help="A run's directory. Default: all.")] = "") -> None:
    """Write the HTML reports and outputs/index.html again from the executed notebooks."""
    for directory in [paths.resolve(run_dir)] if run_dir else runs.run_dirs():
        for stem in STAGES:
            for folder in (runs.stage_dir(directory, stem), runs.next_dir(directory, stem)):
                manifest = manifests.read(folder)
                if manifest and (folder / "notebook.ipynb").exists():
                    report.write_stage_report(folder, manifest)
    out.print(paths.show(report.write_index(paths.outputs())))


class _Ticker:
    """Shows a stage's progress line: in place on a terminal, every half minute in a log."""

    def __init__(self) -> None:
        self._status = out.status("starting") if out.is_terminal else None
        self._said = time.monotonic()
        if self._status:
            out.print()
            self._status.start()

    def __call__(self, line: str) -> None:
        if self._status:
            self._status.update(line)
        elif line and (line.startswith("  ") or time.monotonic() - self._said > 30):
            self._said = time.monotonic()
            out.print(f"\n    {line.strip()}", end=" ")

    def close(self) -> None:
        if self._status:
            self._status.stop()


def _run_dir(preset: str, run_dir: str) -> Path:
    return paths.resolve(run_dir) if run_dir else paths.outputs() / Path(preset).stem


def _portable(directory: Path) -> str:
    """A run directory as it is written into params.yaml: below outputs where it is, so that it means the same elsewhere."""
    return paths.show(directory) if directory.is_relative_to(paths.outputs()) else str(directory.resolve())


def _stems(stage: list[str] | None, to: str) -> list[str]:
    wanted = []
    for name in [*(stage or []), *([to] if to else [])]:
        stem = next((s for s in STAGES if name in (s, s.split("_")[0])), None)
        if stem is None:
            raise UserError(f"no stage {name!r}", expected=", ".join(STAGES), fix="name it in full or by its number")
        wanted.append(stem)
    if to:
        return list(STAGES)[: list(STAGES).index(wanted[-1]) + 1]
    return [s for s in STAGES if s in wanted] or list(STAGES)


def _summary(directory: Path) -> None:
    """The demo's last lines: acceptance and speed, from 07's own metrics."""
    manifest = manifests.read(runs.stage_dir(directory, "07_serve"))
    if manifest is None:
        return
    metrics = manifest.metrics
    for name in ("heldout", *metrics["benchmarks"]):
        found = metrics["acceptance"][name]
        rates = " / ".join(f"{rate:.3f}" for rate in found["position_rates"])
        out.print(f"  {name:9} mean acceptance length {found['mean_acceptance_length']:.3f}, position rates {rates}")
    tokens = metrics["tokens_per_s"]
    pair = f"{tokens['with_draft']:.1f} against {tokens['verifier_only']:.1f} tokens/s"
    ends = metrics["break_even_concurrency"]
    until = f"; it stops paying at about {ends:.1f} in flight" if ends else ""
    flight = metrics["speed_up_concurrency"]
    out.print(f"  speed-up {metrics['speed_up']:.2f} with {flight} in flight ({pair}{until})")


def _epoch(text: str) -> float:
    from datetime import datetime

    return datetime.fromisoformat(text).timestamp()
