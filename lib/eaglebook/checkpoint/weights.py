"""Copy tensors as bytes into a new safetensors file: the header is rewritten, no value is ever parsed or rounded."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from eaglebook.checkpoint.headers import Tensor
from eaglebook.errors import UserError
from eaglebook.paths import show

_BLOCK_BYTES = 8 << 20
_COPY_BYTES = 1 << 20


@dataclass(frozen=True)
class Piece:
    """One tensor of the new file: its bytes are ranges of other files, one after the other, or given outright."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    ranges: tuple[tuple[Path, int, int], ...] = ()  # file, first byte, number of bytes
    data: bytes = b""

    @property
    def bytes(self) -> int:
        return len(self.data) or sum(count for _, _, count in self.ranges)


def piece(tensor: Tensor, name: str = "") -> Piece:
    """A stored tensor as it is, under a new name if one is given."""
    if tensor.file is None or tensor.shape is None:
        raise UserError(f"{tensor.name}: only its name is known", fix="give the folder that holds the weights")
    return Piece(name or tensor.name, tensor.dtype, tensor.shape, ((tensor.file, tensor.start, tensor.bytes),))


def rows(tensor: Tensor, order: Sequence[int], name: str = "") -> Piece:
    """Rows of a stored matrix in another order, as bytes. Neighbouring rows become one range."""
    whole = piece(tensor, name)
    row_bytes = whole.bytes // whole.shape[0]
    file, start, _ = whole.ranges[0]
    ranges: list[tuple[Path, int, int]] = []
    for row in order:
        at = start + row * row_bytes
        if ranges and ranges[-1][1] + ranges[-1][2] == at:
            ranges[-1] = (file, ranges[-1][1], ranges[-1][2] + row_bytes)
        else:
            ranges.append((file, at, row_bytes))
    return Piece(whole.name, whole.dtype, (len(order), *whole.shape[1:]), tuple(ranges))


def write(pieces: Iterable[Piece], target: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write the pieces as one safetensors file. Memory stays at one block; the file appears when it is whole."""
    pieces = list(pieces)
    header: dict[str, object] = {"__metadata__": {**(metadata or {}), "format": "pt"}}
    at = 0
    for part in pieces:
        header[part.name] = {"dtype": part.dtype, "shape": list(part.shape), "data_offsets": [at, at + part.bytes]}
        at += part.bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # data starts aligned
    scratch = target.with_name(target.name + ".partial")
    with scratch.open("wb", buffering=0) as out:
        _put(len(text).to_bytes(8, "little") + text, out)
        for source, start, count, data in _merged(pieces):
            if source is None:
                _put(data, out)
            else:
                _copy(source, start, count, out)
    scratch.replace(target)


def sha256(tensor: Tensor) -> str:
    """Hash of one tensor's bytes, "" when only its name is known."""
    if tensor.file is None:
        return ""
    digest = hashlib.sha256()
    with tensor.file.open("rb") as stream:
        stream.seek(tensor.start)
        left = tensor.bytes
        while left > 0:
            block = stream.read(min(left, _BLOCK_BYTES))
            if not block:
                break
            digest.update(block)
            left -= len(block)
    return digest.hexdigest()


def _merged(pieces: Sequence[Piece]) -> Iterable[tuple[Path | None, int, int, bytes]]:
    """The bytes to write, neighbouring ranges of one file joined: an unchanged order is one long copy."""
    waiting: tuple[Path, int, int] | None = None
    for part in pieces:
        for file, start, count in part.ranges:
            if waiting and waiting[0] == file and waiting[1] + waiting[2] == start:
                waiting = (file, waiting[1], waiting[2] + count)
                continue
            if waiting:
                yield *waiting, b""
            waiting = (file, start, count)
        if part.data:
            if waiting:
                yield *waiting, b""
                waiting = None
            yield None, 0, 0, part.data
    if waiting:
        yield *waiting, b""


def _copy(source: Path, start: int, count: int, out: FileIO) -> None:
    """``count`` bytes of a file from ``start`` to the end of ``out``. A buffer that stays in the CPU's cache beats the kernel's own
    ``copy_file_range`` here: see benchmarks/bench_convert.py."""
    buffer, left = memoryview(bytearray(_COPY_BYTES)), count
    with source.open("rb", buffering=0) as stream:
        stream.seek(start)
        while left > 0:
            got = stream.readinto(buffer[: min(left, _COPY_BYTES)])
            if not got:
                raise UserError(f"{show(source)}: ended {left} bytes too early", fix="copy or download the file again")
            _put(buffer[:got], out)
            left -= got


def _put(data: bytes | memoryview, out: FileIO) -> None:
    """All of ``data``: a raw file may take less at once."""
    view = memoryview(data)
    while view:
        view = view[out.write(view) :]
