"""From any layout to any other: speculators' nested, flat for vLLM, flat with SGLang's count of layers.

A plan is made and inspected before a byte is written, the result is written beside the target and appears when it is
whole. The original is never touched; in place, the old config stays as ``config_speculators.json``.
"""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from eaglebook.checkpoint import checks, inspection, layouts, repairs, vllm_rules, weights
from eaglebook.checkpoint.case import Case
from eaglebook.checkpoint.findings import Finding
from eaglebook.checkpoint.formats import EAGLE3, FLAT, NESTED, Format, dig
from eaglebook.checkpoint.headers import DTYPE_BYTES, Tensor
from eaglebook.checkpoint.source import BACKUP, Source
from eaglebook.checkpoint.spec import INPUT, NORM_FLAGS, OUTPUT, UNKNOWN, DraftSpec, Value, ids_meaning
from eaglebook.checkpoint.verifier_config import VerifierFacts
from eaglebook.checkpoint.weights import Piece
from eaglebook.errors import UserError
from eaglebook.paths import show

SPECULATORS, VLLM, SGLANG = "speculators", "flat", "sglang"
LAYOUTS = (VLLM, SPECULATORS, SGLANG)
_TYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
_UNKNOWN_FORMAT = Format(EAGLE3, FLAT, "", ())
_LOCAL = re.compile(r"^(/|~|\.{1,2}/|[A-Za-z]:\\|file:)")


@dataclass(frozen=True)
class Told:
    """What the user states because no file does."""

    ids_mean: str = ""
    aux_ids: tuple[int, ...] = ()
    verifier_name: str = ""
    speculative_tokens: int = 0
    publish: bool = False  # no path of this machine may stay


@dataclass(frozen=True)
class Plan:
    """The new checkpoint before it is written: its config, its tensors as byte ranges, and what differs from the source."""

    config: dict[str, Any]
    pieces: tuple[Piece, ...]
    changes: tuple[str, ...]
    backup: Path | None = None  # the nested config to keep beside a flat one
    metadata: dict[str, str] = field(default_factory=dict)


def plan(case: Case, to: str, told: Told | None = None, *, fix: bool = False) -> Plan:
    """Plan the conversion of an inspected draft. Raises UserError naming what is unknown or wrong and has no repair."""
    told = told or Told()
    where = show(case.source.path)
    if not case.format.is_eagle3:
        raise UserError(
            f"{where}: not an EAGLE-3 draft", expected="an EAGLE-3 draft", found=f"{case.format.algorithm}: {case.format.evidence[-1]}",
            fix="eaglebook inspect shows what it is",
        )  # fmt: skip
    wrong = [s for s in case.source.findings if s.severity == "error"]
    if wrong:
        raise UserError(
            f"{where}: its files are wrong", expected="readable files that belong together",
            found="; ".join(f"{s.code}: {s.message}" for s in wrong), fix="; ".join(dict.fromkeys(s.fix for s in wrong if s.fix)),
        )  # fmt: skip
    if case.source.tensors is None:
        raise UserError(
            f"{where}: no weights to convert",
            expected="a folder with safetensors",
            found="a config alone",
            fix="give the draft's folder",
        )
    if case.source.config is None:
        raise UserError(
            f"{where}: no config",
            expected="a config.json beside the weights",
            found="tensors alone",
            fix="find the config of the training run",
        )
    repaired = repairs.repair(case) if fix else repairs.Repaired(case.spec)
    spec, said = _stated(case, repaired.spec, told, to)
    kind = _kind(case)
    ids, mean, moved = _ids(spec, to, told, where)
    rest = layouts.rest_of(case.config, case.layer)
    if to == SPECULATORS:
        if kind == layouts.MLA:
            raise UserError(f"{where}: speculators has no draft with latent attention", fix="keep it flat")
        for key, option in (("verifier", "--verifier-name ORG/NAME"), ("speculative_tokens", "--speculative-tokens K")):
            if getattr(spec, key).origin == "absent":
                raise UserError(
                    f"{where}: a speculators config needs {key}",
                    expected="stated in the file or by you",
                    found="not stated",
                    fix=option,
                )
        base = case.config if case.format.layout == NESTED else case.source.backup
        config = layouts.nested(spec, kind, rest, ids, base)
    else:
        config = layouts.flat(spec, kind, rest, ids, mean)
    pieces, renamed = _pieces(case, repaired, one_layer=spec.num_hidden_layers.value == 1, nested=to == SPECULATORS)
    return Plan(
        config=config,
        pieces=pieces,
        changes=(*repaired.changes, *said, *moved, *renamed),
        backup=case.source.folder / "config.json" if case.format.layout == NESTED and to != SPECULATORS else None,
        metadata=dict(case.source.metadata),
    )


def check(
    made: Plan, to: str, verifier: VerifierFacts | None = None, where: str = "the result", repairable: bool = False
) -> list[Finding]:
    """Inspect a plan before it is written. Raises UserError when the result would have an error.

    ``repairable``: the plan was made without ``fix`` and something could be repaired, which the message then says.
    """
    tensors = {part.name: _as_tensor(part) for part in made.pieces}
    source = Source(Path(where), made.config, tensors or None)
    case = inspection.examine(source, verifier, vllm_rules.REFERENCE)
    if not tensors:
        case = replace(case, prediction=replace(case.prediction, tensors=()))
    found = [
        finding for finding in checks.examine(case) if not (to == SGLANG and finding.code == "aux-ids-count-outputs")
    ]
    errors = [finding for finding in found if finding.severity == "error"]
    if errors:
        raise UserError(
            f"{where}: the converted draft would still be wrong",
            expected="no error",
            found="; ".join(f"{e.code}: {e.message}" for e in errors),
            fix="the same command with --fix repairs what the weights prove"
            if repairable
            else "; ".join(dict.fromkeys(e.fix for e in errors if e.fix)),
        )
    return found


def write(made: Plan, target: Path, extra: Mapping[str, str] | None = None) -> None:
    """Write a plan into a new folder. ``extra``: further text files, by name. Nothing is left behind on failure."""
    if target.is_symlink() and not target.exists():
        raise UserError(
            f"{show(target)}: a link to nothing", expected="a new or empty folder", fix="name another, or remove it"
        )
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(
            f"{show(target)}: already there", expected="a new or empty folder", fix="name another, or remove it"
        )
    scratch = target.with_name(f".{target.name}.partial")
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        scratch.mkdir(parents=True)
        if made.pieces:
            weights.write(made.pieces, scratch / "model.safetensors", made.metadata)
        _write_json(scratch / "config.json", made.config)
        if made.backup is not None:
            shutil.copyfile(made.backup, scratch / BACKUP)
        for name, text in (extra or {}).items():
            (scratch / name).write_text(text, encoding="utf-8")
        if target.exists():
            target.rmdir()
        scratch.rename(target)
    except OSError as error:
        raise UserError(
            f"{show(target)}: cannot be written", expected="a new folder, in a place one may write to",
            found=error.strerror or str(error), fix="name another",
        ) from None  # fmt: skip
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def write_in_place(case: Case, made: Plan) -> None:
    """Replace the config alone and keep the old one as ``config_speculators.json``. Refuses when tensors would change."""
    folder = case.source.folder
    stored = {name: (t.dtype, t.shape) for name, t in (case.source.tensors or {}).items()}
    planned = {part.name.replace("midlayer.", "layers.0."): (part.dtype, part.shape) for part in made.pieces}
    if {name.replace("midlayer.", "layers.0."): value for name, value in stored.items()} != planned or any(
        p.data for p in made.pieces
    ):
        raise UserError(
            f"{show(folder)}: tensors must change too", expected="a change of the config alone", found="other names, or a new mapping",
            fix="eaglebook convert DRAFT OUT, into a new folder",
        )  # fmt: skip
    backup = folder / (BACKUP if case.format.layout == NESTED else "config_original.json")
    if backup.exists() and case.format.layout == NESTED:
        raise UserError(f"{show(backup)}: already there", expected="no earlier backup", fix="move it away")
    if not backup.exists():
        shutil.copyfile(folder / "config.json", backup)
    _write_json(folder / "config.json.partial", made.config)
    (folder / "config.json.partial").replace(folder / "config.json")


def can_repair(case: Case) -> bool:
    """Whether ``fix`` would change anything."""
    return bool(repairs.repair(case).changes)


def inside(target: Path, source: Source) -> bool:
    """Whether a target lies in the draft's own folder, which is never changed."""
    return source.path.is_dir() and target.resolve().is_relative_to(source.path.resolve())


# ---- the parts of a plan


def _stated(case: Case, spec: DraftSpec, told: Told, to: str) -> tuple[DraftSpec, list[str]]:
    """The spec with everything written out that a reader would default or that the user states, and what was added."""
    said, new = [], {}
    for key in (
        "num_attention_heads",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "vocab_size",
        "rms_norm_eps",
        "hidden_act",
        "rope",
    ):
        if getattr(spec, key).origin == "absent":
            raise UserError(
                f"{show(case.source.path)}: {key} is not stated", expected=f"{key} in the config", found="no value and no reader's default",
                fix=f"write {key} into the config with the value used in training",
            )  # fmt: skip
    for key in (
        "head_dim",
        "num_key_value_heads",
        "rms_norm_eps",
        "hidden_act",
        "rope",
        "max_position_embeddings",
        *NORM_FLAGS,
    ):
        value = getattr(spec, key)
        if value.origin in ("default", "weights"):
            said.append(f"{key}: written out as {value.value} ({value.where})")
    dtypes = {t.dtype for name, t in case.stored.items() if name not in ("d2t", "t2d")} & _TYPES.keys()
    if spec.dtype.origin == "absent":
        if len(dtypes) != 1:
            raise UserError(
                f"{show(case.source.path)}: no dtype",
                found=f"weights of {sorted(dtypes)}",
                fix="write dtype into the config",
            )
        new["dtype"] = Value(_TYPES[dtypes.pop()], "weights", "type of the weights")
        said.append(f"dtype: written out as {new['dtype'].value} (type of the weights)")
    name = spec.verifier.value
    if told.verifier_name:
        new["verifier"] = Value(told.verifier_name, "stated", "--verifier-name")
        if isinstance(name, str) and name != told.verifier_name:
            said.append(f"verifier: {_last_part(name)!r} → {told.verifier_name!r}")
    elif isinstance(name, str) and _LOCAL.match(name) and not (to == SPECULATORS and not told.publish):
        new["verifier"] = Value(_last_part(name), "stated", "last part of a local path")
        said.append(f"verifier: local path → {_last_part(name)!r}")
    elif isinstance(name, str) and case.source.backup is not None:  # the flat file holds the last part of the path only
        older = dig(case.source.backup, "speculators_config", "verifier", "name_or_path")
        if isinstance(older, str) and _last_part(older) == name and not told.publish:
            new["verifier"] = Value(older, "stated", BACKUP)
    if case.verifier is not None and spec.verifier_architectures.origin == "absent":
        new["verifier_architectures"] = Value(list(case.verifier.architectures), "stated", "--verifier")
    if told.speculative_tokens:
        new["speculative_tokens"] = Value(told.speculative_tokens, "stated", "--speculative-tokens")
    if told.ids_mean and not told.aux_ids:
        new["aux_ids_mean"] = Value(told.ids_mean, "stated", "--ids-mean")
    if told.aux_ids:
        layers = case.verifier.num_layers if case.verifier else None
        bare = Source(case.source.path, {}, None)  # what the old ids counted says nothing about the new ones
        new["aux_ids_mean"] = ids_meaning(
            Value(list(told.aux_ids), "stated"), bare, _UNKNOWN_FORMAT, {}, layers, told.ids_mean
        )
        new["aux_layer_ids"] = Value(list(told.aux_ids), "stated", "--aux-ids")
        if spec.aux_layer_ids.value not in (None, list(told.aux_ids)):
            said.append(f"aux ids: {spec.aux_layer_ids.value} → {list(told.aux_ids)} (--aux-ids)")
    if spec.tie_word_embeddings.value:
        said.append("tie_word_embeddings: true → false (the draft's head is its own)")
    return replace(spec, **new), said


def _last_part(path: str) -> str:
    return re.split(r"[/\\]", path.rstrip("/\\"))[-1] if _LOCAL.match(path) else path


def _kind(case: Case) -> str:
    """Which decoder this is: by its tensors, else by what the config names."""
    if "layers.0.self_attn.kv_a_proj_with_mqa.weight" in case.stored:
        return layouts.MLA
    if case.source.tensors is not None:
        return layouts.QWEN3 if "layers.0.self_attn.q_norm.weight" in case.stored else layouts.LLAMA
    if case.spec.mla.origin != "absent":
        return layouts.MLA
    return layouts.QWEN3 if case.spec.model_type.value == "qwen3" else layouts.LLAMA


def _ids(spec: DraftSpec, to: str, told: Told, where: str) -> tuple[list[int], str, list[str]]:
    """The aux ids as the target counts them, what they count there, and what was said about it."""
    ids, mean = spec.aux_layer_ids.value, spec.aux_ids_mean.value
    if not ids:
        raise UserError(
            f"{where}: no aux hidden state layer ids", expected="the ids the draft was trained with", found="none: every reader takes its own default",
            fix="--aux-ids 2,30,58 --ids-mean input (of a layer, as vLLM and speculators count) or output (SGLang, SpecForge, ModelOpt)",
        )  # fmt: skip
    if mean in (UNKNOWN, None):
        raise UserError(
            f"{where}: nothing tells what the aux ids {ids} count", expected="the input (vLLM) or the output (SGLang) of a layer",
            found=spec.aux_ids_mean.where or "no mark in the file",
            fix="--ids-mean input or --ids-mean output, by what the trainer did; --verifier with its config.json may settle it",
        )  # fmt: skip
    inputs = [i + 1 for i in ids] if mean == OUTPUT else list(ids)
    if to != SGLANG:
        return inputs, INPUT, [f"aux ids: {ids} → {inputs} (outputs → inputs of a layer)"] if inputs != ids else []
    if inputs[0] == 2:  # every SGLang adds one to these
        outputs = [i - 1 for i in inputs]
        return outputs, OUTPUT, [f"aux ids: {ids} → {outputs} (inputs → outputs of a layer)"] if outputs != ids else []
    note = "aux ids kept as inputs: SGLang from pull request 25454 on adds one only when the first id is 1; older versions always do"
    return inputs, INPUT, [note]


def _pieces(
    case: Case, repaired: repairs.Repaired, *, one_layer: bool, nested: bool
) -> tuple[tuple[Piece, ...], list[str]]:
    """Tensors in the order of the file, under the target's names; what was repaired is written anew."""
    out, changed = [], {}
    for stored_name, tensor in (case.source.tensors or {}).items():
        plain = case.own.get(stored_name, stored_name)
        if stored_name in repaired.drop or plain in repaired.data:
            continue
        name = plain if nested or not one_layer else re.sub(r"^layers\.0\.", "midlayer.", plain)
        out.append(weights.piece(tensor, name) if tensor.file else Piece(name, tensor.dtype, tensor.shape or ()))
        if name.replace("midlayer.", "layers.0.") != stored_name.replace("midlayer.", "layers.0."):
            changed[stored_name] = name
    out += [Piece(name, dtype, shape, data=data) for name, (dtype, shape, data) in repaired.data.items()]
    out += [weights.piece(case.stored[source], name) for name, source in repaired.copies.items()]
    twice = [name for name, n in Counter(part.name for part in out).items() if n > 1]
    if twice:
        raise UserError(
            f"{show(case.source.path)}: two tensors would get one name", expected="one tensor for each name", found=", ".join(twice[:3]),
            fix="remove the one that is not wanted",
        )  # fmt: skip
    said = (
        [f"renamed {len(changed)} tensors, e.g. {next(iter(changed.items()))[0]} → {next(iter(changed.values()))}"]
        if changed
        else []
    )
    return tuple(out), said


def _as_tensor(part: Piece) -> Tensor:
    """A planned tensor as the inspection sees one; its bytes can be read when they are one range."""
    if len(part.ranges) == 1 and not part.data:
        file, start, count = part.ranges[0]
        return Tensor(part.name, part.dtype, part.shape, file, start, start + count)
    return Tensor(part.name, part.dtype, part.shape, None, 0, _size(part))


def _size(part: Piece) -> int:
    count = DTYPE_BYTES.get(part.dtype, 0)
    for n in part.shape:
        count *= n
    return count


def _write_json(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def run(
    case: Case, target: Path, to: str, told: Told | None = None, *, fix: bool = False
) -> tuple[Plan, Sequence[Finding]]:
    """Plan, check, write: the whole conversion of an inspected draft into a new folder."""
    made = plan(case, to, told, fix=fix)
    found = check(made, to, case.verifier, show(target), can_repair(case) and not fix)
    write(made, target)
    return made, found


__all__ = [
    "FLAT", "LAYOUTS", "NORM_FLAGS", "SGLANG", "SPECULATORS", "VLLM", "Plan", "Told", "check", "plan", "run", "write", "write_in_place",
]  # fmt: skip
