"""A vocabulary mapping from elsewhere: read it from any of the usual files, say what its numbers mean and what is wrong.

vLLM and speculators want offsets (target = draft + d2t[draft]). Some trainers save target ids under the same name, and a
file does not say which; read the wrong way it loads, and the draft speaks in other tokens.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from eaglebook import vocab
from eaglebook.errors import UserError
from eaglebook.paths import show

Kind = Literal["offsets", "target ids", "unclear"]


@dataclass(frozen=True)
class Diagnosis:
    """What the numbers of a ``d2t`` are, by which sign, and what is wrong with the mapping read that way."""

    kind: Kind
    because: str
    problems: tuple[str, ...]


def read(path: Path) -> tuple[np.ndarray, np.ndarray | None]:
    """``d2t`` (int64) and ``t2d`` (bool, None when there is none) of a folder of ``.npy`` files, a safetensors or a torch file.

    A torch file is read without unpickling objects. Raises UserError when there is no ``d2t`` of one dimension in it.
    """
    if path.is_dir():
        loaded = {
            name: np.load(file, allow_pickle=False) for name in ("d2t", "t2d") for file in path.glob(f"{name}*.npy")
        }
        loaded = loaded or next((_tensors(file) for file in sorted(path.glob("*.safetensors"))), {})
    elif path.is_file():
        loaded = _tensors(path)
    else:
        loaded = {}
    d2t, t2d = loaded.get("d2t"), loaded.get("t2d")
    if d2t is None or d2t.ndim != 1 or not len(d2t):
        raise UserError(
            f"{show(path)}: no vocabulary mapping",
            expected="d2t, of one dimension, in .npy, .safetensors or .pt",
            found=f"{', '.join(loaded) or 'nothing'}" if d2t is None else f"d2t of shape {d2t.shape}",
            fix="give the file that the trainer saved it in",
        )
    return d2t.astype(np.int64), None if t2d is None else t2d.astype(bool)


def diagnose(d2t: np.ndarray, t2d: np.ndarray | None, vocab_size: int) -> Diagnosis:
    """Offsets or target ids? By the mask where it decides; else by their own pattern."""
    kind, because = _kind(d2t, t2d, vocab_size)
    offsets = as_offsets(d2t) if kind == "target ids" else d2t
    mask = np.zeros(vocab_size, dtype=bool)
    ids = vocab.target_ids(offsets)
    mask[ids[(ids >= 0) & (ids < vocab_size)]] = True
    found = vocab.problems(offsets, mask)
    if t2d is None:
        found.append("no t2d: nothing to hold d2t against")
    elif len(t2d) != vocab_size:
        found.append(f"t2d has {len(t2d)} entries, the verifier {vocab_size} tokens")
    elif not np.array_equal(t2d, mask):
        found.append(f"t2d and d2t name different tokens ({int((t2d != mask).sum())} differ)")
    return Diagnosis(kind, because, tuple(found))


def adopt(path: Path, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """A mapping from elsewhere as this workbook's own: ``d2t`` as offsets, and ``t2d``. Raises UserError when it is not sound."""
    d2t, t2d = read(path)
    said = diagnose(d2t, t2d, vocab_size)
    wrong = [problem for problem in said.problems if t2d is not None or not problem.startswith("no t2d")]
    if wrong or said.kind == "unclear":
        raise UserError(
            f"{show(path)}: this mapping cannot be taken over",
            expected="offsets or target ids of this verifier, sorted, each once",
            found="; ".join(wrong) or said.because,
            fix="look at what 03 says of it without use_foreign_mapping",
        )
    offsets = as_offsets(d2t) if said.kind == "target ids" else d2t
    return offsets, np.isin(np.arange(vocab_size), vocab.target_ids(offsets))


def as_offsets(target_ids: np.ndarray) -> np.ndarray:
    return target_ids - np.arange(len(target_ids))


def _kind(d2t: np.ndarray, t2d: np.ndarray | None, vocab_size: int) -> tuple[Kind, str]:
    as_ids, ids = np.sort(d2t), np.sort(vocab.target_ids(d2t))
    if t2d is not None:
        marked = np.flatnonzero(t2d)
        if np.array_equal(marked, ids) != np.array_equal(marked, as_ids):
            return (
                ("offsets", "t2d marks what they add up to")
                if np.array_equal(marked, ids)
                else ("target ids", "t2d marks exactly these")
            )
    if np.array_equal(ids, as_ids):
        return "unclear", "both readings give the same tokens"
    if ids[0] < 0 or ids[-1] >= vocab_size:
        sound = as_ids[0] >= 0 and as_ids[-1] < vocab_size
        return (
            ("target ids", "as offsets they leave the vocabulary")
            if sound
            else ("unclear", "neither reading stays in the vocabulary")
        )
    if len(np.unique(d2t)) < len(d2t):
        return "offsets", "numbers repeat, as they do wherever neighbouring tokens are kept"
    return "target ids", "every number occurs once: as offsets no two neighbouring tokens would be kept"


def _tensors(file: Path) -> dict[str, Any]:
    """``d2t`` and ``t2d`` of one file, also under vLLM's own name."""
    if file.suffix == ".safetensors":
        from safetensors import safe_open

        with safe_open(file, "np") as opened:
            found = {n: opened.get_tensor(n) for n in opened.keys() if _plain(n)}  # noqa: SIM118
    else:
        import torch

        try:
            saved = torch.load(file, map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, EOFError):  # objects, or not a torch file: nothing is executed
            return {}
        saved = saved if isinstance(saved, dict) else {"d2t": saved}
        found = {
            str(n): t.numpy() for n, t in saved.items() if isinstance(t, torch.Tensor) and t.dtype != torch.bfloat16
        }
    return {_plain(name): array for name, array in found.items() if _plain(name)}


def _plain(name: str) -> str:
    """The name of a mapping's half without what stands before it, "" for any other tensor."""
    return {"d2t": "d2t", "t2d": "t2d", "draft_id_to_target_id": "d2t"}.get(name.rpartition(".")[2], "")
