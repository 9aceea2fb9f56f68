"""``eaglebook inspect · convert · diff``: draft checkpoints as files. Nothing here imports torch or vllm, nor papermill."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from eaglebook import paths
from eaglebook.checkpoint import surgery, vllm_rules
from eaglebook.checkpoint.convert import (
    LAYOUTS,
    VLLM,
    Plan,
    Told,
    can_repair,
    check,
    inside,
    plan,
    write,
    write_in_place,
)
from eaglebook.checkpoint.diff import compare
from eaglebook.checkpoint.findings import Finding
from eaglebook.checkpoint.inspection import Inspection, examine
from eaglebook.checkpoint.inspection import inspect as look
from eaglebook.checkpoint.publish import model_card
from eaglebook.checkpoint.source import Source
from eaglebook.checkpoint.verifier_config import VerifierFacts
from eaglebook.errors import UserError

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
    try:
        said = look(
            draft.expanduser(),
            verifier=verifier.expanduser() if verifier else None,
            version=vllm_rules.parse_version(vllm),
            tensor_list=tensors,
            ids_mean=reading(ids_mean),
            deep=deep,
        )
    except UserError as error:
        if not as_json:
            raise
        print(json.dumps({"error": paths.scrub(str(error))}, indent=1))
        return 2
    if as_json:
        print(json.dumps(said.as_dict(), indent=1))
    else:
        show(said)
    return 1 if said.errors else 0


def convert(
    draft: Annotated[Path, typer.Argument(help="The draft's folder. It is never changed, except by --in-place.")],
    target: Annotated[Path | None, typer.Argument(metavar="OUT", help="A new folder.")] = None,
    to: Annotated[
        str, typer.Option(help="flat (vLLM), speculators (nested) or sglang (flat, SGLang's count of layers).")
    ] = VLLM,
    fix: Annotated[
        bool, typer.Option("--fix", help="Repair what the weights prove wrong; each repair is printed.")
    ] = False,
    in_place: Annotated[
        bool, typer.Option("--in-place", help="Replace config.json; the old one stays as config_speculators.json.")
    ] = False,
    publish: Annotated[
        bool, typer.Option("--publish", help="Add a model card; leave out local paths and training state.")
    ] = False,
    run: Annotated[Path | None, typer.Option(help="A finished run whose measurements go on the card.")] = None,
    verifier: VerifierOption = None,
    verifier_name: Annotated[str, typer.Option(help="The verifier's public name, ORG/NAME.")] = "",
    ids_mean: IdsMeanOption = "",
    aux_ids: Annotated[str, typer.Option(help="The ids used in training, when the config lacks them: 2,30,58.")] = "",
    speculative_tokens: Annotated[int, typer.Option(min=0, help="Tokens a step (K), for a nested config.")] = 0,
    draft_vocab: Annotated[int, typer.Option(min=0, help="Cut the draft to so many tokens, by --counts.")] = 0,
    counts: Annotated[Path | None, typer.Option(help="Token counts: counts.json of 03, or lines id<TAB>count.")] = None,
    keep: Annotated[
        str, typer.Option(help="Tokens always kept: special, template (from --verifier's tokenizer).")
    ] = "",
) -> int:
    """Write a draft in another layout, repaired, cut, or ready to publish. What was changed is printed; what is unknown is refused."""
    if to not in LAYOUTS:
        raise typer.BadParameter(", ".join(LAYOUTS), param_hint="--to")
    if in_place == (target is not None):
        raise typer.BadParameter("give OUT, or --in-place, one of them", param_hint="OUT")
    if keep and not draft_vocab:
        raise typer.BadParameter("belongs to --draft-vocab N --counts FILE", param_hint="--keep")
    if bool(draft_vocab) != (counts is not None):
        raise typer.BadParameter("--draft-vocab N and --counts FILE belong together", param_hint="--draft-vocab")
    said = look(draft.expanduser(), verifier=verifier, ids_mean=reading(ids_mean))
    told = Told(ids_mean, _numbers(aux_ids), verifier_name, speculative_tokens, publish)
    target = target.expanduser() if target else None
    if target is not None and inside(target, said.case.source):
        raise UserError(
            f"{paths.show(target)}: inside the draft's own folder", expected="a folder elsewhere", fix="name another"
        )
    made = plan(said.case, to, told, fix=fix)
    if counts is not None:
        always = surgery.always_kept(verifier or Path(), [word for word in keep.split(",") if word])
        sayable = surgery.row_of_target(said.case)
        made = surgery.cut(said.case, made, surgery.choose(surgery.read_counts(counts), draft_vocab, sayable, always))
    found = check(made, to, said.case.verifier, paths.show(target or draft), can_repair(said.case) and not fix)
    if publish:
        made = replace(made, backup=None)
    if target is None:
        write_in_place(said.case, made)
    else:
        card = {"README.md": _card(made, target, said.case.verifier, run)} if publish else {}
        write(made, target, card)
    for change in made.changes:
        out.print(f"  {change}", markup=False)
    out.print(
        f"{paths.show(target or draft)}: {to}, {len(made.pieces)} tensors, {len(made.changes)} changes", markup=False
    )
    for finding in found:
        if finding.severity == "warning":
            show_finding(finding)
    return 0


def diff(
    a: Annotated[Path, typer.Argument(help="A draft: folder, config.json or list.")],
    b: Annotated[Path, typer.Argument(help="Another draft.")],
    verifier: VerifierOption = None,
    hashes: Annotated[bool, typer.Option(help="Compare the bytes of the weights too.")] = True,
) -> int:
    """Say where two drafts differ in meaning, whatever layout each has. Exit code 1 when they do."""
    cases = [look(path.expanduser(), verifier=verifier).case for path in (a, b)]
    for case, path in zip(cases, (a, b), strict=True):
        wrong = [finding for finding in case.source.findings if finding.severity == "error"]
        if wrong:
            raise UserError(
                f"{paths.show(path)}: cannot be compared",
                found="; ".join(f.message for f in wrong),
                fix=f"eaglebook inspect {path}",
            )
    differences = compare(cases[0], cases[1], hashes=hashes)
    for difference in differences:
        out.print(f"[bold]{difference.what}[/bold]")
        out.print(f"  {difference.a or 'absent'}\n  {difference.b or 'absent'}", markup=False)
    unread = " in what their configs say; no weights were given" if all(c.source.tensors is None for c in cases) else ""
    out.print(f"{len(differences)} differences" if differences else f"identical{unread}")
    return 1 if differences else 0


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise typer.BadParameter("whole numbers with commas between: 2,30,58", param_hint="--aux-ids") from None


def _card(made: Plan, target: Path, facts: VerifierFacts | None, run: Path | None) -> str:
    spec = examine(Source(target, made.config, {}), facts).spec
    measured = _manifest(run, "07_serve").get("metrics") if run else None
    data = _manifest(run, "01_responses") if run else None
    return model_card(made.config, spec, target.name, measured, data)


def _manifest(run: Path, stem: str) -> dict[str, Any]:
    file = run / stem / "manifest.json"
    if not file.is_file():
        raise UserError(
            f"{paths.show(file)}: not found", expected=f"a run whose {stem} is finished", fix="eaglebook run"
        )
    return dict(json.loads(file.read_text(encoding="utf-8")))


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
