"""Safetensors headers without torch: 8 bytes of length, a JSON header, then the tensors' bytes.

The length and every offset are checked against the file before anything is allocated, so a truncated or lying file
is an error in microseconds instead of a huge allocation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eaglebook.checkpoint import strict_json
from eaglebook.errors import UserError
from eaglebook.paths import show

MAX_HEADER_BYTES = (
    32 << 20
)  # the library allows 100 MB (safetensors 0.8, tensor.rs); a shard of 3,000 tensors needs 0.4
_MAX_DIMENSIONS = 16
DTYPE_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
}


@dataclass(frozen=True)
class Tensor:
    """One tensor as a header or a list states it. ``start`` and ``end`` count bytes from the beginning of the file.

    ``shape`` and ``dtype`` may be unknown (None, "") and ``file`` absent for a tensor that is only listed by name.
    """

    name: str
    dtype: str
    shape: tuple[int, ...] | None
    file: Path | None
    start: int = 0
    end: int = 0

    @property
    def bytes(self) -> int:
        return self.end - self.start

    @property
    def rows(self) -> int | None:
        """The first dimension, None when unknown or a scalar."""
        return self.shape[0] if self.shape else None

    @property
    def columns(self) -> int | None:
        """The last dimension of a matrix, None when unknown or not a matrix."""
        return self.shape[1] if self.shape and len(self.shape) == 2 else None


def read_header(file: Path) -> dict[str, Tensor]:
    """Tensors of one safetensors file, in file order. Raises UserError on a truncated or inconsistent header."""
    return _parse(file)[0]


def read_metadata(file: Path) -> dict[str, str]:
    """The ``__metadata__`` of one safetensors file: who wrote it, if anybody says so."""
    return _parse(file)[1]


def _parse(file: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    def refuse(expected: str, found: str) -> UserError:
        return UserError(
            f"{show(file)}: not a readable safetensors file",
            expected=expected,
            found=found,
            fix="copy or download the file again",
        )

    if not file.is_file():  # a pipe would be waited for
        raise refuse("a regular file", "a link to nothing" if file.is_symlink() else "none")
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length == int.from_bytes(b"version ", "little"):
            raise UserError(
                f"{show(file)}: a git-lfs pointer, not the file itself",
                expected="safetensors",
                found=f"{size} bytes",
                fix="git lfs pull",
            )
        if size < 8 or length > min(MAX_HEADER_BYTES, size - 8):
            limit = min(MAX_HEADER_BYTES, max(0, size - 8))
            raise refuse(f"a header of at most {limit} bytes", f"{length} bytes announced")
        try:
            header = strict_json.loads(stream.read(length), object_pairs_hook=_no_duplicates)
            metadata = header.pop("__metadata__", None)
            tensors = {name: _tensor(name, entry, file, 8 + length) for name, entry in header.items()}
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise refuse("a JSON object of tensors", f"{type(error).__name__}: {str(error)[:200]}") from None
    at, before = 8 + length, "the header"
    for tensor in sorted(tensors.values(), key=lambda t: (t.start, t.end)):
        if not 8 + length <= tensor.start <= tensor.end <= size:
            raise refuse(f"offsets inside {size} bytes", f"{tensor.name} at {tensor.start}..{tensor.end}")
        if tensor.start < at:
            raise refuse("tensors side by side", f"{tensor.name} overlaps {before}")
        at, before = tensor.end, tensor.name
        item = DTYPE_BYTES.get(tensor.dtype)
        if item is not None and math.prod(tensor.shape or ()) * item != tensor.bytes:
            raise refuse(
                f"{tensor.name} of shape {list(tensor.shape or ())} {tensor.dtype}", f"{tensor.bytes} bytes stored"
            )
    return tensors, metadata if isinstance(metadata, dict) else {}


def _tensor(name: str, entry: Any, file: Path, data_start: int) -> Tensor:
    start, end = entry["data_offsets"]
    shape = entry["shape"]
    if type(start) is not int or type(end) is not int or not isinstance(entry["dtype"], str):
        raise ValueError(f"{name}: offsets and type of another kind")
    if not isinstance(shape, list) or len(shape) > _MAX_DIMENSIONS:
        raise ValueError(f"{name}: shape is no list of at most {_MAX_DIMENSIONS} sizes")
    if any(type(n) is not int or not 0 <= n < 1 << 62 for n in shape):
        raise ValueError(f"{name}: a size that is none in {shape}")
    return Tensor(name, entry["dtype"], tuple(shape), file, data_start + start, data_start + end)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = dict(pairs)
    if len(names) != len(pairs):
        raise ValueError("a name appears twice")
    return names


def read_folder(folder: Path) -> dict[str, Tensor]:
    """Tensors of a checkpoint folder: of the files its index names, else of every ``*.safetensors`` in it."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(read_index(index).values()))
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise UserError(
                f"{show(index)}: shards are missing",
                expected=f"{len(names)} files",
                found=f"no {', '.join(missing[:3])}",
                fix="copy the missing shards",
            )
    else:
        names = sorted(file.name for file in folder.glob("*.safetensors"))
    tensors: dict[str, Tensor] = {}
    for name in names:
        tensors |= read_header(folder / name)
    return tensors


def read_index(index: Path) -> dict[str, str]:
    """``weight_map`` of a safetensors index: tensor name to file name, both inside the folder. Raises UserError."""
    try:
        if index.stat().st_size > MAX_HEADER_BYTES:
            raise ValueError(f"{index.stat().st_size} bytes")
        weight_map = strict_json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        for name, file in weight_map.items():
            if not isinstance(file, str) or Path(file).name != file:
                raise ValueError(f"{name} in {file!r}, which is no file of this folder")
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UserError(
            f"{show(index)}: not a readable index",
            expected='{"weight_map": {tensor: file}}',
            found=f"{type(error).__name__}: {str(error)[:200]}",
            fix="write the index again, or delete it when there is one file only",
        ) from None
    return dict(weight_map)


def tensor_bytes(tensor: Tensor) -> bytes:
    """The raw little-endian bytes of one tensor. Meant for small tensors (``d2t``, ``t2d``)."""
    if tensor.file is None:
        raise UserError(f"{tensor.name}: only its name is known", fix="give the folder that holds the weights")
    with tensor.file.open("rb") as stream:
        stream.seek(tensor.start)
        return stream.read(tensor.bytes)
