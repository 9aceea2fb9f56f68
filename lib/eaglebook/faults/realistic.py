"""The faults that people really had, done to a draft of one's own: the perfect draft shows them pure, a trained one as they look.

A trained draft is right half of the time at best, so a fault that costs it everything looks like a draft that learned
little. Each change works on any EAGLE-3 draft of one decoder layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from eaglebook.acceptance import Acceptance
from eaglebook.checkpoint import headers, inspection
from eaglebook.checkpoint.headers import Tensor
from eaglebook.engine import trial
from eaglebook.faults.library import IDS, Copy, Fault

L = "layers.0."


@dataclass(frozen=True)
class Verdict:
    """``acceptance`` is None when vLLM refused the draft, or broke over it."""

    name: str
    code: str  # the finding that must name the fault, "" for the draft as it is
    named: bool
    acceptance: Acceptance | None
    error: str
    lossless: bool

    @property
    def length(self) -> float | None:
        return self.acceptance.mean_acceptance_length if self.acceptance else None


def copy_of(draft: Path) -> Copy:
    """A draft's config and numbers (float32, plain names), to be broken."""
    case = inspection.inspect(draft).case
    return Copy(dict(case.config), {plain: _array(t) for plain, t in case.stored.items() if t.file is not None})


def judge(
    verifier: Path, draft: Path, prompts: Sequence[Sequence[int]], faults: Sequence[Fault], scratch: Path, *, max_tokens: int = 48,
    num_speculative_tokens: int = 3, dtype: str = "bfloat16", timeout_s: float = 120,
) -> Iterator[Verdict]:  # fmt: skip
    """Serve the draft as it is and with each fault, greedily, beside its real verifier. The first verdict is the healthy one's."""
    folders = [copy_of(draft).write(scratch / "healthy")]
    for number, fault in enumerate(faults):
        copy = copy_of(draft)
        fault.change(copy)
        folders.append(copy.write(scratch / f"{number}"))
    trials = trial.run(
        verifier, folders, prompts, num_speculative_tokens=num_speculative_tokens, max_tokens=max_tokens, dtype=dtype,
        max_model_len=max(map(len, prompts)) + max_tokens + num_speculative_tokens + 1, timeout_s=timeout_s,
    )  # fmt: skip
    said: tuple[tuple[int, ...], ...] = ()
    names = [("as it is", ""), *((fault.name, fault.code) for fault in faults)]
    for (name, code), folder, one in zip(names, folders, trials, strict=True):
        said = said or one.tokens
        found = [
            f.code for f in inspection.inspect(folder, verifier=verifier, deep=True).findings if f.severity != "note"
        ]
        yield Verdict(
            name, code, not code or code in found, one.acceptance, one.error, not one.tokens or one.tokens == said
        )


def _array(tensor: Tensor) -> np.ndarray:
    """A tensor's numbers; NumPy has no bfloat16, which is the upper half of a float32."""
    data, shape = headers.tensor_bytes(tensor), tensor.shape or ()
    if tensor.dtype == "BF16":
        return (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4").reshape(shape)
    kinds = {"F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "BOOL": "?"}
    return np.frombuffer(data, kinds[tensor.dtype]).reshape(shape)


def _ids(copy: Copy) -> list[int]:
    return copy.config.get(IDS) or copy.config["eagle_config"][IDS]


def _swap_states(copy: Copy) -> None:
    fc, ids = copy.tensors["fc.weight"], _ids(copy)
    copy.tensors["fc.weight"] = fc.reshape(len(fc), len(ids), -1)[:, ::-1].reshape(fc.shape)
    copy.ids(ids[::-1], ids_mean="input")


def _strange_embedding(copy: Copy) -> None:
    shape = copy.config["vocab_size"], copy.config["hidden_size"]
    copy.tensors["embed_tokens.weight"] = np.random.default_rng(1).normal(scale=0.1, size=shape)


def _moved_map(copy: Copy) -> None:
    """Every draft token stands for the next one's target: sorted, unique, in range, and wrong."""
    rows = np.arange(len(copy.tensors["d2t"]))
    targets = rows + copy.tensors["d2t"]
    free = np.setdiff1d(np.arange(copy.config["vocab_size"]), targets)[-1:]
    copy.tensors["d2t"] = np.sort(np.append(targets[1:], free)) - rows


FAULTS: list[Fault] = [
    Fault(name, "realistic", code, change)
    for name, code, change in (
        ("ids one less", "aux-ids-count-outputs", lambda c: c.ids([i - 1 for i in _ids(c)])),
        ("states in another order", "aux-ids-unsorted", _swap_states),
        ("no hidden_norm", "tensor-missing", lambda c: c.drop(f"{L}hidden_norm.weight")),
        ("rope left out", "rope-implicit", lambda c: c.set(rope_theta=None, rope_parameters=None, rope_scaling=None)),
        ("one kv head", "kv-heads-mismatch", lambda c: c.set(num_key_value_heads=1)),
        ("d2t missing", "d2t-missing", lambda c: c.drop("d2t")),
        ("no v_proj", "tensor-missing", lambda c: c.drop(f"{L}self_attn.v_proj.weight")),
        ("head_dim halved", "head-dim-mismatch", lambda c: c.set(head_dim=c.config["head_dim"] // 2)),
        ("no norm", "tensor-missing", lambda c: c.drop("norm.weight")),
        ("an embedding of its own", "embed-differs", _strange_embedding),
        ("d2t moved by one row", "d2t-t2d-disagree", _moved_map),
        ("inner size halved", "intermediate-size-mismatch", lambda c: c.set(intermediate_size=c.config["intermediate_size"] // 2)),
        ("no lm_head", "lm-head-missing", lambda c: c.drop("lm_head.weight")),
        ("a length of 64", "max-positions-short", lambda c: c.set(max_position_embeddings=64)),
    )
]  # fmt: skip
