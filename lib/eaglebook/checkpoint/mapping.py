"""``d2t`` and ``t2d``: which target token each draft token stands for. Read with the standard library, a few hundred KB.

``d2t`` holds offsets, target = draft + d2t[draft] (vLLM 0.32 ``llama_eagle3.py``, ``compute_logits``); ``t2d`` is a mask.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from eaglebook.checkpoint import headers
from eaglebook.checkpoint.headers import Tensor

MAX_BYTES = 8 << 20  # a million tokens; the largest vocabularies have a quarter of that
_CODES = {
    "I64": "q",
    "I32": "i",
    "U64": "Q",
    "U32": "I",
    "I16": "h",
    "U16": "H",
    "I8": "b",
    "U8": "B",
    "F32": "f",
    "F64": "d",
}


@dataclass(frozen=True)
class VocabMapping:
    """``offsets`` as stored; ``mask`` the target ids that ``t2d`` marks, None when there is none to read."""

    offsets: list[int]
    mask: list[int] | None

    @property
    def targets(self) -> list[int]:
        return [draft + offset for draft, offset in enumerate(self.offsets)]

    @property
    def absolute(self) -> bool:
        """Whether the numbers are target ids instead of offsets: the mask agrees with them as ids, and not as offsets."""
        return self.mask is not None and self.targets != self.mask and sorted(self.offsets) == self.mask


def read(stored: Mapping[str, Tensor]) -> VocabMapping | None:
    """The mapping of a checkpoint (plain names), None when it has none or only its name is known."""
    d2t = stored.get("d2t")
    if d2t is None or d2t.file is None or d2t.dtype not in {*_CODES, "BF16", "F16"} or d2t.bytes > MAX_BYTES:
        return None
    return VocabMapping([int(n) for n in _numbers(d2t)], read_mask(stored))


def read_mask(stored: Mapping[str, Tensor]) -> list[int] | None:
    """The target ids that ``t2d`` marks, ascending; None when there is none to read."""
    t2d = stored.get("t2d")
    if t2d is None or t2d.file is None or t2d.bytes > MAX_BYTES or t2d.dtype not in {*_CODES, "BOOL"}:
        return None
    return [token for token, kept in enumerate(_numbers(t2d)) if kept]


def offsets_of(targets: Sequence[int]) -> bytes:
    """``d2t`` of the target ids in their order, as int64 bytes."""
    return _bytes(array("q", (target - draft for draft, target in enumerate(targets))))


def mask_of(targets: Sequence[int], vocab_size: int) -> bytes:
    """``t2d`` of the target ids, as bool bytes."""
    mask = bytearray(vocab_size)
    for target in targets:
        mask[target] = 1
    return bytes(mask)


def _numbers(tensor: Tensor) -> Sequence[float]:
    data = headers.tensor_bytes(tensor)
    if tensor.dtype == "BOOL":
        return data
    if tensor.dtype == "F16":
        return [n if n == n and abs(n) < 2**53 else -1 for n in struct.unpack(f"<{len(data) // 2}e", data)]
    if tensor.dtype == "BF16":  # the upper half of a float32
        data = b"".join(b"\0\0" + data[i : i + 2] for i in range(0, len(data), 2))
    numbers = array(_CODES.get(tensor.dtype, "f"))
    numbers.frombytes(data)
    if sys.byteorder == "big":
        numbers.byteswap()
    return [n if n == n and abs(n) < 2**53 else -1 for n in numbers] if numbers.typecode in "fd" else numbers


def _bytes(numbers: array[int]) -> bytes:
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()
