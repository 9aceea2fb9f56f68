"""``eaglebook plan``: what a params file will cost, from configs alone, and whether that fits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from eaglebook import machine, plan, prompts, templates, verifier, verifier_size
from eaglebook.checkpoint import verifier_config
from eaglebook.cli_runs import SetOption
from eaglebook.errors import UserError
from eaglebook.params import Preflight
from eaglebook.presets import load

out = Console(highlight=False, soft_wrap=True)
_FIRST_TRIES = ((10, 3), (1000, 10))  # prompts, epochs: as cheap as can be, then enough to see it learn


def of(
    preset: Annotated[str, typer.Argument(help="A preset of params/, or the path of a YAML file.")] = "smollm2",
    set_: SetOption = None,
    tensors: Annotated[bool, typer.Option(help="List the draft's tensors.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> int:
    """Plan disk, memory and time of a run. Of the verifier its config.json is enough. Exit code 1 when it does not fit."""
    p = load(preset, set_ or ())["00_preflight"]
    assert isinstance(p, Preflight)
    path = verifier.folder(p.verifier_name_or_path)
    facts = verifier_config.read(path)
    parameters, weight_bytes, source = verifier_size.parameters_and_bytes(path)
    draft, has = plan.geometry(p, facts), plan.of_machine(p)
    asked = [] if p.prompt_source.startswith("hf:") else prompts.load(p.prompt_source, p.max_prompts)
    count = len(asked) or _stated_count(p)
    speed = plan.rates(p, parameters, draft, _gemm_flops(p))
    lengths = {"prompt_tokens": _prompt_tokens(p, path, asked), "benchmark_prompts": plan.benchmark_prompts(p)}
    made = plan.estimate(p, draft, weight_bytes, speed, has, prompts=count, **lengths)
    wrong = plan.problems(p, facts, made, has)
    if as_json:
        print(json.dumps(_as_json(made, parameters, weight_bytes, wrong), indent=1))
        return int(bool(wrong))
    size = f"{parameters / 1e6:,.0f} M parameters, {weight_bytes / 1e9:,.2f} GB by {source}"
    out.print(f"[bold]{facts.name or path.name}[/bold]: {size}")
    out.print(_draft(p, draft))
    if tensors:
        out.print(_tensors(draft))
    out.print(_stages(made, has))
    out.print(f"{made.bytes_per_token:,} bytes of hidden states a token, {made.tokens:,} tokens at most\n")
    out.print("[bold]cheapest first[/bold]")
    for few, epochs in (t for t in _FIRST_TRIES if t[0] < count):
        small = p.model_copy(update={"epochs": epochs, "own_questions": 0})
        trial = plan.estimate(small, draft, weight_bytes, speed, has, prompts=few, **lengths)
        out.print(f"  --set common.max_prompts={few} --set common.epochs={epochs}: {_in_short(trial)}")
    out.print(f"  as planned: {_in_short(made)}\n")
    for problem in wrong:
        out.print(
            f"[red]does not fit[/red]: {problem.what}\n  expected: {problem.expected}\n"
            f"  found:    {problem.found}\n  next:     {problem.fix}"
        )
    if not wrong:
        out.print("it fits")
    return int(bool(wrong))


def _stated_count(p: Preflight) -> int:
    """Prompts of a source that is not here."""
    if not p.max_prompts:
        raise UserError(
            f"{p.prompt_source}: how many prompts are in it is not known before it is downloaded",
            expected="max_prompts above 0",
            fix="--set common.max_prompts=10000",
        )
    return p.max_prompts


def _prompt_tokens(p: Preflight, folder: Path, asked: list[prompts.Prompt]) -> int:
    """As the params file says; else as the verifier's tokenizer renders them, where both are here; else at their longest."""
    if p.mean_prompt_tokens or not asked or not (folder / "tokenizer_config.json").is_file():
        return p.mean_prompt_tokens or p.max_prompt_tokens
    tokenizer = verifier.load_tokenizer(
        verifier.resolve(p.verifier_name_or_path), trust_remote_code=p.trust_remote_code
    )
    return templates.mean_length(tokenizer, [q.messages for q in asked], p.max_prompt_tokens)


def _gemm_flops(p: Preflight) -> float:
    given = (p.generation_tokens_per_s, p.extraction_tokens_per_s, p.training_tokens_per_s)
    return 1.0 if all(given) else machine.gemm_flops()


def _in_short(made: plan.Plan) -> str:
    hours, training = sum(made.seconds.values()) / 3600, made.seconds["04_train"] / 60
    return f"{hours:.1f} h, {training:.1f} minutes of it training, {made.peak_disk_bytes / 1e9:,.1f} GB"


def _draft(p: Preflight, draft: plan.Geometry) -> str:
    return (
        f"[bold]draft[/bold]: {draft.parameters / 1e6:,.1f} M parameters, {draft.trained / 1e6:,.1f} M trained, "
        f"{draft.heads} heads of {draft.head_dim}; {draft.checkpoint_bytes:,} bytes as a checkpoint, "
        f"{draft.saved_bytes(p.optimizer):,} with its optimiser's state"
    )


def _tensors(draft: plan.Geometry) -> Table:
    table = Table("tensor", "shape", "bytes", "", box=None)
    for tensor in draft.tensors():
        shape = " × ".join(f"{n:,}" for n in tensor.shape)
        table.add_row(tensor.name, shape, f"{tensor.bytes:,}", "trained" if tensor.trained else "")
    return table


def _stages(made: plan.Plan, has: plan.Machine) -> Table:
    memory = "memory of each GPU" if has.gpus else "memory"
    table = Table("stage", "disk", "disk after it", memory, "time", box=None)
    for stage, seconds in made.seconds.items():
        cells = [made.disk_bytes.get(stage), made.disk_after.get(stage), made.memory_bytes.get(stage)]
        time = f"{seconds / 3600:.1f} h" if seconds >= 7200 else f"{seconds / 60:.1f} min"
        table.add_row(stage, *("" if c is None else f"{c / 1e9:,.2f} GB" for c in cells), time)
    return table


def _as_json(made: plan.Plan, parameters: int, weight_bytes: int, wrong: list[plan.Problem]) -> dict[str, Any]:
    return {
        "verifier": {"parameters": parameters, "bytes": weight_bytes},
        "draft": {
            "parameters": made.draft.parameters,
            "trained": made.draft.trained,
            "checkpoint_bytes": made.draft.checkpoint_bytes,
            "tensors": {t.name: {"shape": t.shape, "bytes": t.bytes} for t in made.draft.tensors()},
        },
        "tokens": made.tokens,
        "bytes_per_token": made.bytes_per_token,
        "disk_bytes": made.disk_bytes,
        "disk_after": made.disk_after,
        "peak_disk_bytes": made.peak_disk_bytes,
        "memory_bytes": made.memory_bytes,
        "seconds": made.seconds,
        "problems": [vars(problem) for problem in wrong],
    }
