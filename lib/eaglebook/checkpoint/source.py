"""What somebody handed over as a draft: a folder, a config alone, a list of tensors, or a config and a list.

Reading never stops at the first fault of a folder: what is wrong with the files becomes a finding, and the rest is
still read. Only what leaves nothing to look at (no such path, an empty folder) is an error.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eaglebook.checkpoint import findings as f
from eaglebook.checkpoint import headers, strict_json
from eaglebook.checkpoint.headers import Tensor
from eaglebook.errors import UserError
from eaglebook.paths import show

BACKUP = "config_speculators.json"  # where a flat export keeps the nested config it came from
_INDEX = "model.safetensors.index.json"
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
_TRAINING_STATE = (
    "optimizer_state_dict.pt", "scheduler_state_dict.pt", "training_state.json", "training_args.bin", "optimizer.pt",
    "scheduler.pt", "rng_state.pth", "trainer_state.json", "val_metrics.json", "train_command.txt", "run.yaml",
)  # fmt: skip
_TORCH_NAMES = {
    "bfloat16": "BF16", "float16": "F16", "half": "F16", "float32": "F32", "float": "F32", "float64": "F64",
    "int64": "I64", "long": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip


@dataclass(frozen=True)
class Source:
    """What could be read. ``config`` or ``tensors`` is None when it was not given or not readable."""

    path: Path
    config: dict[str, Any] | None
    tensors: dict[str, Tensor] | None
    findings: tuple[f.Finding, ...] = ()
    metadata: dict[str, str] = field(default_factory=dict)  # of the first safetensors file
    backup: dict[str, Any] | None = None  # config_speculators.json beside a flat config

    @property
    def folder(self) -> Path:
        return self.path if self.path.is_dir() else self.path.parent


def read(path: Path, tensor_list: Path | None = None) -> Source:
    """Read what ``path`` is: a folder, a ``config.json``, a ``.safetensors`` file or a text list of tensors.

    ``tensor_list`` adds a list to a config. Raises UserError when there is nothing to read at all.
    """
    if not path.exists():
        raise UserError(
            f"{show(path)}: not found",
            expected="a draft's folder, a config.json, a .safetensors file or a list of tensors",
            found="a link to nothing" if path.is_symlink() else "no such file or folder",
            fix="correct the path",
        )
    if path.is_dir():
        source = _folder(path)
    elif path.suffix == ".json" and not path.name.endswith(".index.json"):
        source = Source(path, read_config(path), None)
    elif path.suffix == ".safetensors":
        source = Source(path, None, headers.read_header(path), metadata=headers.read_metadata(path))
    elif path.suffix in _PICKLES:
        raise UserError(
            f"{show(path)}: a pickle is code, it is not opened here",
            expected="safetensors",
            found=path.suffix,
            fix="convert it to safetensors on a machine that trusts it",
        )
    else:
        source = Source(path, None, read_list(path))
    if tensor_list is not None:
        source = Source(source.path, source.config, read_list(tensor_list), source.findings, {}, source.backup)
    return source


def read_config(file: Path) -> dict[str, Any]:
    """A config as an object. Raises UserError: missing, too large, not UTF-8, not JSON, not an object."""
    try:
        if not file.is_file():
            raise ValueError("nothing there")
        if file.stat().st_size > strict_json.MAX_CONFIG_BYTES:
            raise ValueError(f"{file.stat().st_size:,} bytes; no config needs {strict_json.MAX_CONFIG_BYTES:,}")
        config = strict_json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError(f"a {type(config).__name__}")
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"{show(file)}: not a readable config",
            expected="a JSON object in UTF-8",
            found=str(error)[:200],
            fix="copy the config again",
        ) from None
    return config


def _folder(folder: Path) -> Source:
    names = sorted(entry.name for entry in folder.iterdir())
    if not names:
        raise UserError(f"{show(folder)}: an empty folder", expected="a draft's folder", fix="correct the path")
    said = list(_about_files(folder, names))
    config = backup = None
    try:
        config = read_config(folder / "config.json")
    except UserError as error:
        code = "config-unreadable" if "config.json" in names else "config-missing"
        said.append(f.error(code, _one_line(error), "put the draft's config.json beside its weights"))
    if BACKUP in names:
        try:
            found = read_config(folder / BACKUP)
            backup = found if isinstance(found.get("transformer_layer_config"), dict) else None
        except UserError as error:
            said.append(f.note("backup-unreadable", _one_line(error)))
    tensors, metadata, about_weights = _weights(folder, names)
    return Source(folder, config, tensors, (*said, *about_weights), metadata, backup)


def _about_files(folder: Path, names: list[str]) -> list[f.Finding]:
    said = []
    state = [name for name in names if name in _TRAINING_STATE]
    if state:
        said.append(
            f.note("training-state", f"training state in the folder: {', '.join(state)}", "eaglebook convert --publish")
        )
    pickles = [name for name in names if Path(name).suffix in _PICKLES and name not in _TRAINING_STATE]
    weights = [name for name in names if name.endswith(".safetensors")]
    if pickles and not weights:
        said.append(
            f.error(
                "weights-pickled",
                f"weights only as pickle, which is code and is not opened here: {', '.join(pickles[:3])}",
                "convert them to safetensors on a machine that trusts them",
                vllm="loads *.bin, then *.pt, when there is no safetensors file",
            )
        )
    elif pickles:
        said.append(f.note("pickle-beside", f"pickles beside safetensors, not opened: {', '.join(pickles[:3])}"))
    if not weights and any(name.endswith(".gguf") for name in names):
        said.append(f.error("weights-gguf", "weights only as GGUF", "convert the original safetensors instead"))
    for name in names:
        file = folder / name
        if file.is_symlink() and not _inside(file.resolve(), folder.resolve()):
            said.append(
                f.warning("link-outside", f"{name} is a link out of the folder", "copy the file itself before sharing")
            )
    return said


def _inside(target: Path, folder: Path) -> bool:
    """Whether a link stays in its folder, or in the ``blobs`` of the same hub cache entry (``snapshots/REV``)."""
    return target.is_relative_to(folder) or (
        folder.parent.name == "snapshots" and target.is_relative_to(folder.parent.parent / "blobs")
    )


def _weights(folder: Path, names: list[str]) -> tuple[dict[str, Tensor] | None, dict[str, str], list[f.Finding]]:
    """Tensors of the files vLLM would open (0.32 ``weight_utils.py``), and what is wrong with them."""
    files = [name for name in names if name.endswith(".safetensors")]
    if not files:
        return None, {}, []
    said = []
    consolidated = [name for name in files if name.startswith("consolidated")]
    if consolidated and len(consolidated) < len(files):
        said.append(
            f.error(
                "consolidated-mixed",
                f"{', '.join(consolidated)} beside {len(files) - len(consolidated)} other safetensors files",
                "keep one of the two",
                vllm="reads the consolidated files only",
            )
        )
        files = consolidated
    index: dict[str, str] = {}
    if _INDEX in names and not consolidated:
        try:
            index = headers.read_index(folder / _INDEX)
        except UserError as error:
            said.append(f.error("index-unreadable", _one_line(error), "write the index again"))
    tensors: dict[str, Tensor] = {}
    complete = True
    named = set(index.values())
    for name in [file for file in files if not index or file in named]:
        try:
            found = headers.read_header(folder / name)
        except UserError as error:
            said.append(f.error("weights-unreadable", _one_line(error), "copy or download the file again"))
            complete = False
            continue
        twice = sorted(tensors.keys() & found.keys())
        if twice:
            said.append(
                f.error(
                    "tensor-twice",
                    f"{twice[0]} is in {name} and in {tensors[twice[0]].file.name}",  # type: ignore[union-attr]
                    "remove the file that is not wanted",
                    vllm="the file read last wins",
                )
            )
        tensors |= found
    if index:
        said += _about_index(index, files, tensors, complete)
    first = next(iter(tensors.values()), None)
    metadata = headers.read_metadata(first.file) if complete and first is not None and first.file is not None else {}
    return (tensors if complete else None), metadata, said


def _about_index(
    index: dict[str, str], files: list[str], tensors: dict[str, Tensor], complete: bool
) -> list[f.Finding]:
    said = []
    absent = sorted(set(index.values()) - set(files))
    leftover = bool(files) and set(absent) == set(index.values())
    if absent:
        said.append(
            f.error(
                "index-shard-missing",
                f"the index names files that are not there: {', '.join(absent[:3])}",
                "delete the index: it belongs to an earlier save, and no file it names is here"
                if leftover
                else "copy the missing shards",
                vllm="refuses the folder",
            )
        )
    left_out = sorted(set(files) - set(index.values()))
    if left_out and not leftover:
        said.append(
            f.error(
                "index-stale",
                f"files the index does not name: {', '.join(left_out[:3])}",
                "write the index again; delete it if one file holds everything",
                vllm="leaves these files out, in silence",
            )
        )
    stored = {name: t.file.name for name, t in tensors.items() if t.file is not None}
    wrong = sorted(name for name, file in index.items() if file not in absent and stored.get(name) != file)
    if wrong and complete:
        said.append(
            f.error("index-stale", f"not where the index says: {', '.join(wrong[:3])}", "write the index again")
        )
    return said


# ---- lists of tensors


def read_list(file: Path) -> dict[str, Tensor]:
    """Tensors of a text list, one a line: ``name<TAB>shape<TAB>dtype``; shape and dtype may be missing.

    Shapes are written ``[2, 3]``, ``2x3``, ``2,3`` or ``torch.Size([2, 3])``, types as safetensors or torch write them.
    A safetensors index (JSON) is a list of names. Raises UserError on a line that is none of this.
    """
    if file.name.endswith(".index.json"):
        return {name: Tensor(name, "", None, None) for name in headers.read_index(file)}
    try:
        if not file.is_file() or file.stat().st_size > strict_json.MAX_CONFIG_BYTES:
            raise ValueError("no file of a list's size")
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise UserError(
            f"{show(file)}: not a readable list of tensors",
            expected="text in UTF-8, one tensor a line: name<TAB>shape<TAB>dtype",
            found=str(error)[:200],
            fix="give a draft's folder, a config.json or such a list",
        ) from None
    tensors = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        try:
            tensor = _listed(line)
        except ValueError as error:
            raise UserError(
                f"{show(file)}, line {number}: not a tensor",
                expected="name<TAB>shape<TAB>dtype",
                found=f"{line[:80]!r} ({error})",
                fix="correct the line",
            ) from None
        tensors[tensor.name] = tensor
    return tensors


def _listed(line: str) -> Tensor:
    name, *rest = (part.strip() for part in line.split("\t")) if "\t" in line else line.split(None, 1)
    if not re.fullmatch(r"[\w.\-/]+", name):
        raise ValueError("a name has letters, digits, dots and dashes")
    if len(rest) == 1 and "\t" not in line:  # name [2, 3] BF16
        match = re.search(r"(?<![\w.])[A-Za-z][\w.]*$", rest[0])
        rest = [rest[0][: match.start()].strip(), match[0]] if match else rest
    shape = _shape(rest[0]) if rest and rest[0] else None
    dtype = _dtype(rest[1]) if len(rest) > 1 and rest[1] else ""
    bytes_ = math.prod(shape) * headers.DTYPE_BYTES.get(dtype, 0) if shape is not None else 0
    return Tensor(name, dtype, shape, None, 0, bytes_)


def _shape(text: str) -> tuple[int, ...]:
    inner = re.sub(r"^(torch\.Size)?\(?\[?|\]?\)?$", "", text.strip())
    sizes = [part for part in re.split(r"[,x×\s]+", inner) if part]
    if any(not part.isascii() or not part.isdigit() or len(part) > 18 for part in sizes):
        raise ValueError(f"no shape: {text[:40]!r}")
    return tuple(int(part) for part in sizes)


def _dtype(text: str) -> str:
    plain = text.removeprefix("torch.")
    return _TORCH_NAMES.get(plain.lower(), plain.upper())


def _one_line(error: UserError) -> str:
    lines = [line.strip() for line in str(error).splitlines() if not line.strip().startswith("next:")]
    return "; ".join(" ".join(line.split()) for line in lines)
