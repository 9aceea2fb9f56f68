"""The faults that people really had, done to a draft of one's own: the perfect draft shows them pure, a trained one as they look.

A trained draft is right half of the time at best, so a fault that costs it everything looks like a draft that learned
little. A change that needs what a draft does not have (a full vocabulary has no map to lose) is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from eaglebook.acceptance import Acceptance
from eaglebook.checkpoint import headers, inspection
from eaglebook.checkpoint.headers import Tensor
from eaglebook.engine import trial
from eaglebook.faults.library import IDS, Copy, swap_states, without

L = "layers.0."


@dataclass(frozen=True)
class Fault:
    """``codes``: the findings of which one must name it. ``needs``: config keys or tensors without which it cannot be done."""

    name: str
    codes: tuple[str, ...]
    needs: tuple[str, ...]
    change: Callable[[Copy], object]

    def applies(self, copy: Copy) -> bool:
        return all(need in copy.tensors or copy.config.get(need) is not None for need in self.needs)


@dataclass(frozen=True)
class Verdict:
    """``named``: the finding that names the fault. ``acceptance`` is None when vLLM refused the draft, or broke over it."""

    name: str
    named: str
    acceptance: Acceptance | None
    error: str


def copy_of(draft: Path) -> Copy:
    """A draft's config and numbers (float32, plain names), to be broken. Its aux ids stand at the top level as well."""
    case = inspection.inspect(draft).case
    copy = Copy(dict(case.config), {plain: _array(t) for plain, t in case.stored.items() if t.file is not None})
    if case.spec.aux_layer_ids.value:
        copy.config[IDS] = case.spec.aux_layer_ids.value
    return copy


def judge(
    verifier: Path, draft: Path, prompts: Sequence[Sequence[int]], faults: Sequence[Fault], scratch: Path, *, max_tokens: int = 48,
    num_speculative_tokens: int = 3, dtype: str = "bfloat16", timeout_s: float = 120,
) -> Iterator[Verdict]:  # fmt: skip
    """Serve the draft as it is, then with each fault that applies to it, greedily, beside its real verifier."""
    names, folders = ["as it is"], [draft]
    codes: list[tuple[str, ...]] = [()]
    whole = copy_of(draft)
    for number, fault in enumerate(faults):
        copy = Copy(dict(whole.config), dict(whole.tensors))
        if fault.applies(copy):
            fault.change(copy)
            folders.append(copy.write(scratch / f"{number}"))
            names.append(fault.name)
            codes.append(fault.codes)
    trials = trial.run(
        verifier, folders, prompts, num_speculative_tokens=num_speculative_tokens, max_tokens=max_tokens, dtype=dtype,
        max_model_len=max(map(len, prompts)) + max_tokens + num_speculative_tokens + 1, timeout_s=timeout_s,
    )  # fmt: skip
    for name, wanted, folder, one in zip(names, codes, folders, trials, strict=True):
        found = [
            f.code for f in inspection.inspect(folder, verifier=verifier, deep=True).findings if f.severity != "note"
        ]
        yield Verdict(name, next((code for code in wanted if code in found), ""), one.acceptance, one.error)


def _array(tensor: Tensor) -> np.ndarray:
    """A tensor's numbers; NumPy has no bfloat16, which is the upper half of a float32."""
    data, shape = headers.tensor_bytes(tensor), tensor.shape or ()
    if tensor.dtype == "BF16":
        return (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4").reshape(shape)
    kinds = {"F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "BOOL": "?"}
    return np.frombuffer(data, kinds[tensor.dtype]).reshape(shape)


def _strange_embedding(copy: Copy) -> None:
    shape = copy.config["vocab_size"], copy.config["hidden_size"]
    copy.tensors["embed_tokens.weight"] = np.random.default_rng(1).normal(scale=0.1, size=shape)


def _moved_map(copy: Copy) -> None:
    """Every draft token stands for the next one's target: sorted, unique, in range, and wrong."""
    rows = np.arange(len(copy.tensors["d2t"]))
    targets = rows + copy.tensors["d2t"]
    free = np.setdiff1d(np.arange(copy.config["vocab_size"]), targets)[-1:]
    copy.tensors["d2t"] = np.sort(np.append(targets[1:], free)) - rows


def _halved(key: str) -> Callable[[Copy], object]:
    return lambda copy: copy.set(**{key: copy.config[key] // 2})


FAULTS: list[Fault] = [
    Fault("ids one less", ("aux-ids-count-outputs", "aux-ids-reading-unknown"), (IDS,), lambda c: c.ids([i - 1 for i in c.config[IDS]])),
    Fault("states in another order", ("aux-ids-unsorted",), (IDS, "fc.weight"), swap_states),
    Fault("no hidden_norm", ("tensor-missing",), (f"{L}hidden_norm.weight",), without(f"{L}hidden_norm.weight")),
    Fault("rope left out", ("rope-implicit",), (), lambda c: c.set(rope_theta=None, rope_parameters=None, rope_scaling=None)),
    Fault("one kv head", ("kv-heads-mismatch",), ("num_key_value_heads",), lambda c: c.set(num_key_value_heads=1)),
    Fault("d2t missing", ("d2t-missing",), ("d2t",), without("d2t")),
    Fault("no v_proj", ("tensor-missing",), (f"{L}self_attn.v_proj.weight",), without(f"{L}self_attn.v_proj.weight")),
    Fault("head_dim halved", ("head-dim-mismatch",), ("head_dim",), _halved("head_dim")),
    Fault("no norm", ("tensor-missing",), ("norm.weight",), without("norm.weight")),
    Fault("an embedding of its own", ("embed-differs",), ("vocab_size", "hidden_size"), _strange_embedding),
    Fault("d2t moved by one row", ("d2t-t2d-disagree",), ("d2t", "t2d", "vocab_size"), _moved_map),
    Fault("inner size halved", ("intermediate-size-mismatch",), ("intermediate_size",), _halved("intermediate_size")),
    Fault("no lm_head", ("lm-head-missing",), ("lm_head.weight", "d2t"), without("lm_head.weight")),
    Fault("a length of 64", ("max-positions-short",), (), lambda c: c.set(max_position_embeddings=64)),
]  # fmt: skip
