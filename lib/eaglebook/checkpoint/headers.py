"""Safetensors headers without torch: 8 bytes of length, a JSON header, then the tensors' bytes.

The length and every offset are checked against the file before anything is allocated, so a truncated or lying file
is an error in microseconds instead of a huge allocation.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from eaglebook.errors import UserError
from eaglebook.paths import show

MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library itself (safetensors 0.8, tensor.rs)
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
    """One tensor as the header states it. ``start`` and ``end`` count bytes from the beginning of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    end: int

    @property
    def bytes(self) -> int:
        return self.end - self.start


def read_header(file: Path) -> dict[str, Tensor]:
    """Tensors of one safetensors file, in file order. Raises UserError on a truncated or inconsistent header."""

    def refuse(expected: str, found: str) -> UserError:
        return UserError(
            f"{show(file)}: not a readable safetensors file",
            expected=expected,
            found=found,
            fix="copy or download the file again",
        )

    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(MAX_HEADER_BYTES, size - 8):
            raise refuse(f"a header of at most {max(0, size - 8)} bytes", f"{length} bytes announced")
        try:
            header = json.loads(stream.read(length))
            header.pop("__metadata__", None)
            tensors = {}
            for name, entry in header.items():
                start, end = entry["data_offsets"]
                shape = tuple(int(n) for n in entry["shape"])
                tensors[name] = Tensor(name, str(entry["dtype"]), shape, file, 8 + length + start, 8 + length + end)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise refuse("a JSON object of tensors", f"{type(error).__name__}: {error}") from None
    for tensor in tensors.values():
        count = 1
        for n in tensor.shape:
            count *= n
        item = DTYPE_BYTES.get(tensor.dtype)
        if not 8 + length <= tensor.start <= tensor.end <= size:
            raise refuse(f"offsets inside {size} bytes", f"{tensor.name} at {tensor.start}..{tensor.end}")
        if min(tensor.shape, default=1) < 0 or (item is not None and count * item != tensor.bytes):
            raise refuse(f"{tensor.name} of shape {list(tensor.shape)} {tensor.dtype}", f"{tensor.bytes} bytes stored")
    return tensors


def read_folder(folder: Path) -> dict[str, Tensor]:
    """Tensors of a checkpoint folder: of the files its index names, else of every ``*.safetensors`` in it."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
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


def tensor_bytes(tensor: Tensor) -> bytes:
    """The raw little-endian bytes of one tensor. Meant for small tensors (``d2t``, ``t2d``)."""
    with tensor.file.open("rb") as stream:
        stream.seek(tensor.start)
        return stream.read(tensor.bytes)
