"""``eaglebook inspect · convert · diff``: draft checkpoints as files. Nothing here imports torch or vllm, nor papermill."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from eaglebook.checkpoint import vllm_rules
from eaglebook.checkpoint.findings import Finding
from eaglebook.checkpoint.inspection import Inspection
from eaglebook.checkpoint.inspection import inspect as look

out = Console(highlight=False, soft_wrap=True)
_COLOURS = {"error": "red", "warning": "yellow", "note": "dim"}

VerifierOption = Annotated[
    Path | None, typer.Option("--verifier", help="The verifier's folder or config.json; its weights are not read.")
]
IdsMeanOption = Annotated[str, typer.Option(help="What the aux ids count, when you know: input or output of a layer.")]


def inspect(
    draft: Annotated[
        Path, typer.Argument(help="A folder, a config.json, a .safetensors file, or a list: name<TAB>shape<TAB>dtype.")
    ],
    verifier: VerifierOption = None,
    vllm: Annotated[str, typer.Option(help="The vLLM version that will serve it, 0.16 to 0.33.")] = vllm_rules.show(
        vllm_rules.REFERENCE
    ),
    tensors: Annotated[Path | None, typer.Option(help="A list of tensors that belongs to a lone config.json.")] = None,
    ids_mean: IdsMeanOption = "",
    deep: Annotated[bool, typer.Option(help="Read every value once: NaN, infinities, a stale embedding.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> int:
    """Say what a draft checkpoint is, what vLLM will do with it, and what is wrong. Exit code 1 when anything is an error."""
    said = look(
        draft,
        verifier=verifier,
        version=vllm_rules.parse_version(vllm),
        tensor_list=tensors,
        ids_mean=reading(ids_mean),
        deep=deep,
    )
    if as_json:
        print(json.dumps(said.as_dict(), indent=1))
    else:
        show(said)
    return 1 if said.errors else 0


def convert() -> int:
    """(next)"""
    return 0


def diff() -> int:
    """(next)"""
    return 0


def reading(ids_mean: str) -> str:
    """``--ids-mean`` checked. Raises a usage error."""
    if ids_mean not in ("", "input", "output"):
        raise typer.BadParameter("input or output", param_hint="--ids-mean")
    return ids_mean


def show(said: Inspection) -> None:
    """An inspection as text: what it is, what vLLM does with it, then the findings, the worst first."""
    case = said.case
    kind = case.format
    line(
        "draft",
        f"{kind.algorithm}, {kind.layout}{f', {kind.producer}' if kind.producer else ''} ({'; '.join(kind.evidence)})",
    )
    if kind.is_eagle3:
        line("sizes", _sizes(said))
        ids, meaning = case.spec.aux_layer_ids, case.spec.aux_ids_mean
        line(
            "aux ids",
            f"{ids.value} count {meaning.value}s ({meaning.where})"
            if ids.value and meaning.value != "unknown"
            else str(ids.value or "not stated"),
        )
        verdict = case.prediction
        fates = Counter(outcome.fate for outcome in verdict.tensors)
        counted = ", ".join(f"{n} {fate}" for fate, n in fates.items())
        outcome = (
            f"refuses it ({verdict.stage}): {verdict.error}" if verdict.stage else f"loads it as {verdict.architecture}"
        )
        line(f"vLLM {verdict.version}", f"{outcome}{f'; tensors: {counted}' if counted else ''}")
    out.print()
    for finding in said.findings:
        show_finding(finding)
    counts = Counter(finding.severity for finding in said.findings)
    out.print(", ".join(f"{counts[s]} {s}{'' if counts[s] == 1 else 's'}" for s in ("error", "warning", "note")))


def show_finding(finding: Finding) -> None:
    colour = _COLOURS[finding.severity]
    out.print(f"[{colour}]{finding.severity:7}[/{colour}] [bold]{finding.code}[/bold]  ", end="")
    out.print(finding.message, markup=False)
    if finding.severity == "note":
        return
    for label, text in (("fix", finding.fix), ("vLLM", finding.vllm), ("SGLang", finding.sglang)):
        if text:
            out.print(f"        {label}: {text}", markup=False)


def line(label: str, text: str) -> None:
    out.print(f"[bold]{label:10}[/bold] ", end="")
    out.print(text, markup=False)


def _sizes(said: Inspection) -> str:
    spec = said.case.spec
    parts: list[tuple[str, Any]] = [
        ("{} layer(s)", spec.num_hidden_layers.value), ("hidden {:,}", spec.hidden_size.value),
        ("{} heads", spec.num_attention_heads.value), ("{} kv", spec.num_key_value_heads.value), ("head_dim {}", spec.head_dim.value),
        ("inner {:,}", spec.intermediate_size.value), ("draft vocabulary {:,}", spec.draft_vocab_size.value), ("of {:,}", spec.vocab_size.value),
    ]  # fmt: skip
    total = sum(t.bytes for t in said.case.stored.values())
    text = ", ".join(form.format(value) for form, value in parts if value).replace(", of", " of")
    return f"{text}{f'; {total / 1e9:.3f} GB' if total else ''}"
