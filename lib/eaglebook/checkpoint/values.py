"""``--deep``: look at every value once. NaN, infinities, numbers too large for float16, rows of nothing, a stale embedding.

Needs NumPy, still no torch. Reads in blocks, so memory stays flat; speculators 0.9 saves NaN when the verifier's weights
were never loaded, and vLLM loads NaN in silence.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eaglebook.checkpoint import findings as f
from eaglebook.checkpoint import headers, verifier_config, verifier_tensors
from eaglebook.checkpoint.case import Case
from eaglebook.checkpoint.findings import Finding
from eaglebook.checkpoint.headers import Tensor

_BLOCK_BYTES = 16 << 20
_HALF_MAX = 65504.0
_ROWS_COMPARED = 512


def examine(case: Case, verifier: Path | None = None) -> Iterator[Finding]:
    """Findings about values. ``verifier``: a folder whose embedding the draft's is compared with."""
    for name, tensor in case.stored.items():
        if tensor.file is None or tensor.dtype not in ("BF16", "F16", "F32", "F64"):
            continue
        bad, largest = scan(tensor)
        if bad:
            yield f.error(
                "not-finite",
                f"{tensor.name}: {bad} of {_count(tensor)} values are NaN or infinite",
                "train again, or find the checkpoint before; nothing can be put in their place",
                vllm="loads them in silence: no draft token is accepted",
            )
        elif largest == 0 and name != "layers.0.hidden_norm.weight" and _count(tensor):
            yield f.warning("all-zero", f"{tensor.name} is all zero", "find out whether it was ever trained or loaded")
        elif largest > _HALF_MAX:
            yield f.warning(
                "beyond-float16",
                f"{tensor.name} reaches {largest:.3g}",
                "serve in bfloat16",
                vllm="infinite when the verifier runs in float16",
            )
    if verifier is not None and verifier.is_dir() and "embed_tokens.weight" in case.stored:
        yield from _embedding(case.stored["embed_tokens.weight"], verifier)


def scan(tensor: Tensor) -> tuple[int, float]:
    """Number of values that are not finite, and the largest magnitude of the others."""
    import numpy as np

    bad, largest = 0, 0.0
    for block in _blocks(tensor):
        if tensor.dtype == "BF16":
            exponent = block & 0x7F80
            wrong = exponent == 0x7F80
            top = int((block & 0x7FFF)[~wrong].max(initial=0))
            size = float(np.array([top << 16], dtype=np.uint32).view(np.float32)[0])
        else:
            wrong = ~np.isfinite(block)
            size = float(np.abs(block[~wrong]).max(initial=0))
        bad += int(wrong.sum())
        largest = max(largest, size)
    return bad, largest


def _blocks(tensor: Tensor) -> Iterator[Any]:
    import numpy as np

    kinds = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32, "F64": np.float64}
    assert tensor.file is not None
    with tensor.file.open("rb") as stream:
        stream.seek(tensor.start)
        left = tensor.bytes
        while left > 0:
            data = stream.read(min(left, _BLOCK_BYTES))
            if not data:
                return
            left -= len(data)
            yield np.frombuffer(data, dtype=kinds[tensor.dtype])


def _embedding(ours: Tensor, verifier: Path) -> Iterator[Finding]:
    """Compare rows spread over the vocabulary with the verifier's: a draft reads target tokens through this table."""
    facts = verifier_config.read(verifier)
    theirs = _find(verifier, facts.embed_key)
    if theirs is None or ours.shape is None or theirs.shape is None:
        return
    if theirs.shape != ours.shape or theirs.dtype != ours.dtype:
        yield f.note(
            "embed-not-comparable",
            f"embed_tokens is {ours.shape} {ours.dtype}, the verifier's {theirs.shape} {theirs.dtype}",
        )
        return
    rows = ours.shape[0]
    row_bytes = ours.bytes // rows
    step = max(1, rows // _ROWS_COMPARED)
    compared = range(0, rows, step)
    other = sum(_row(ours, i, row_bytes) != _row(theirs, i, row_bytes) for i in compared)
    if other:
        yield f.warning(
            "embed-differs",
            f"{other} of {len(compared)} embedding rows compared are not the verifier's",
            "right only if the embedding was trained; else leave it out: readers then take the verifier's",
            vllm="uses the draft's own",
        )


def _row(tensor: Tensor, row: int, row_bytes: int) -> bytes:
    assert tensor.file is not None
    with tensor.file.open("rb") as stream:
        stream.seek(tensor.start + row * row_bytes)
        return stream.read(row_bytes)


def _find(folder: Path, name: str) -> Tensor | None:
    """One tensor of a folder, opening only the shard that holds it."""
    if not name:
        return None
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        shard = verifier_tensors.shard_of(index, name)
        return headers.read_header(folder / shard).get(name) if shard else None
    for file in sorted(folder.glob("*.safetensors")):
        found = headers.read_header(file).get(name)
        if found:
            return found
    return None


def _count(tensor: Tensor) -> int:
    return tensor.bytes // headers.DTYPE_BYTES[tensor.dtype]
