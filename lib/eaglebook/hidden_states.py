"""What the verifier tells the draft: residual streams at a few layers, captured with hooks.

Layer id k is the residual stream *entering* decoder layer k, which is the output of layer k-1. The last slot is the
output of the last layer *before* the final norm: the training target is made from it. transformers' own
``output_hidden_states`` ends *after* the norm, so the streams are taken with hooks. Their files are in `states_files`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eaglebook import progress, states_files
from eaglebook.errors import UserError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Extraction:
    """What a capture did. ``padding`` is the share of computed positions that were padding."""

    files: int
    skipped: int
    tokens: int
    seconds: float
    padding: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


def capture(model: Any, sequences: Sequence[Sequence[int]], layer_ids: Sequence[int]) -> list[torch.Tensor]:
    """Hidden states of each sequence, ``[tokens, len(layer_ids) + 1, hidden]``, bf16, on the CPU.

    ``layer_ids`` are strictly ascending and below the number of layers; the last slot is the pre-norm output of the
    last layer. Sequences of different lengths are padded on the right, where a causal model cannot see it: no mask is needed.
    """
    import torch

    from eaglebook import attention

    decoder = _decoder(model)
    layers = decoder.layers
    if list(layer_ids) != sorted(set(layer_ids)) or not all(0 <= k < len(layers) for k in layer_ids):
        raise UserError(
            "aux_hidden_state_layer_ids cannot be captured",
            expected=f"ascending ids in 0..{len(layers) - 1}",
            found=str(list(layer_ids)),
            fix="correct the params file",
        )
    device = next(model.parameters()).device
    lengths = [len(sequence) for sequence in sequences]
    ids = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)] = torch.tensor(sequence)
    out = torch.empty(*ids.shape, len(layer_ids) + 1, decoder.norm.weight.shape[0], dtype=torch.bfloat16, device=device)

    def entering(slot: int) -> Any:
        def hook(module: Any, args: tuple, kwargs: dict) -> None:
            out[:, :, slot] = args[0] if args else kwargs["hidden_states"]

        return hook

    def leaving(module: Any, args: tuple, output: Any) -> None:
        out[:, :, -1] = output[0] if isinstance(output, tuple) else output

    handles = [
        layers[k].register_forward_pre_hook(entering(slot), with_kwargs=True) for slot, k in enumerate(layer_ids)
    ]
    handles.append(layers[-1].register_forward_hook(leaving))
    try:
        with torch.inference_mode(), attention.by_blocks(model):
            decoder(input_ids=ids.to(device), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return [out[row, :length].cpu() for row, length in enumerate(lengths)]


def batches(lengths: Sequence[int], token_budget: int) -> Iterator[list[int]]:
    """Row numbers in batches of similar length whose padded size stays within ``token_budget`` tokens."""
    batch: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if batch and lengths[batch[0]] * (len(batch) + 1) > token_budget:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def extract(
    model: Any,
    sequences: Sequence[Sequence[int]],
    layer_ids: Sequence[int],
    folder: Path,
    *,
    token_budget: int,
    rows: Sequence[int] | None = None,
    reserve_bytes: int = 0,
    storage: states_files.Storage = "bfloat16",
) -> Extraction:
    """Capture and write ``hs_<row>.safetensors`` for every sequence (or those in ``rows``); complete files are skipped.

    A file appears under its name only when it is whole. Writing overlaps with computing. Out of memory halves the
    token budget and goes on with what is left. Raises UserError when the disk has less than ``reserve_bytes`` left.
    """
    import torch

    hidden = _decoder(model).norm.weight.shape[0]
    wanted = range(len(sequences)) if rows is None else rows
    todo = states_files.missing(folder, sequences, wanted, len(layer_ids), hidden, storage)
    bar = progress.Progress("hidden states", len(wanted), start=len(wanted) - len(todo), unit="conversations")
    computed = tokens = 0
    began = time.monotonic()
    with ThreadPoolExecutor(1) as writer:
        pending: list[Future[None]] = []
        queue = [[todo[i] for i in batch] for batch in batches([len(sequences[row]) for row in todo], token_budget)]
        while queue:
            batch = queue.pop(0)
            states_files.require_space(
                folder,
                sum(states_files.sample_bytes(len(sequences[r]), len(layer_ids), hidden, storage) for r in batch),
                reserve_bytes,
            )
            try:
                states = capture(model, [sequences[row] for row in batch], layer_ids)
            except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
                if not _is_out_of_memory(error):
                    raise
                token_budget //= 2
                if len(batch) == 1:
                    raise UserError(
                        "out of memory on a single conversation",
                        expected=f"{len(sequences[batch[0]])} tokens to fit",
                        fix="lower max_new_tokens, or give the machine more memory",
                    ) from None
                print(f"out of memory: token budget halved to {token_budget}", flush=True)
                left = [row for some in [batch, *queue] for row in some]
                queue = [[left[i] for i in batch] for batch in batches([len(sequences[r]) for r in left], token_budget)]
                continue
            for future in pending:
                future.result()
            pending = [
                writer.submit(states_files.write, folder / states_files.file_name(row), state, sequences[row], storage)
                for row, state in zip(batch, states, strict=True)
            ]
            count = sum(len(sequences[row]) for row in batch)
            computed += len(batch) * max(len(sequences[row]) for row in batch)
            tokens += count
            bar.step(len(batch), tokens=count)
        for future in pending:
            future.result()
    seconds = time.monotonic() - began
    bar.close()
    padding = 1 - tokens / computed if computed else 0.0
    return Extraction(len(wanted), len(wanted) - len(todo), tokens, seconds, padding)


@dataclass(frozen=True)
class Stream:
    """Which of the verifier's streams a slot holds: ``id`` as this project counts, and the relative error of that reading.

    ``normed``: it is the last layer's output *after* the final norm, which is no stream that a draft can be trained on.
    """

    id: int
    error: float
    normed: bool


def identify(model: Any, states: torch.Tensor, token_ids: Sequence[int]) -> list[Stream]:
    """Each slot of ``states [tokens, slots, hidden]`` held against every stream of the verifier; the nearest is what it is.

    The first token is left out: its state is so large that it would decide alone.
    """
    import torch

    layers = len(_decoder(model).layers)
    streams = capture(model, [token_ids], range(layers))[0][1:].float()
    last = streams[:, -1].to(next(model.parameters()).device, next(model.parameters()).dtype)
    with torch.inference_mode():
        after = final_norm(model)(last).float().cpu()
    known = torch.cat([streams, after[:, None]], dim=1)
    found = []
    for slot in states[1:].float().unbind(1):
        errors = (known - slot[:, None]).norm(dim=(0, 2)) / known.norm(dim=(0, 2))
        best = int(errors.argmin())
        found.append(Stream(min(best, layers), errors[best].item(), best > layers))
    return found


def convention(stated: Sequence[int], found: Sequence[Stream]) -> str:
    """What stated aux ids count, by the streams that were found: "input", "output" (of a layer), or "neither"."""
    measured = [stream.id for stream in found[: len(stated)]]
    if any(stream.normed for stream in found[: len(stated)]):
        return "neither"
    if measured == list(stated):
        return "input"
    return "output" if measured == [i + 1 for i in stated] else "neither"


def final_norm(model: Any) -> Any:
    """The verifier's final norm module: what turns the last slot into the input of its head."""
    return _decoder(model).norm


def _is_out_of_memory(error: BaseException) -> bool:
    """torch says it with a plain RuntimeError on a CPU (``c10/core/impl/alloc_cpu.cpp``)."""
    import torch

    text = str(error)
    return (
        isinstance(error, torch.OutOfMemoryError | MemoryError)
        or "allocate memory" in text
        or "not enough memory" in text
    )


def _decoder(model: Any) -> Any:
    """The module that owns the list of decoder layers and the final norm, nested or not."""
    for _, module in model.named_modules():
        if hasattr(module, "layers") and hasattr(module, "norm") and hasattr(module, "embed_tokens"):
            return module
    raise UserError(
        "no decoder found in the verifier",
        expected="a module with layers, norm and embed_tokens",
        found=type(model).__name__,
        fix="this architecture needs the vLLM extraction engine",
    )
