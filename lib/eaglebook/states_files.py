"""Hidden states on the disk: one safetensors file a conversation, as speculators 0.9 reads them.

A file holds ``hidden_states [tokens, n_aux + 1, hidden]`` and ``token_ids [tokens]``. Which streams those are: `hidden_states`.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from eaglebook.checkpoint import headers
from eaglebook.errors import UserError
from eaglebook.paths import show

if TYPE_CHECKING:
    import torch

Storage = Literal["bfloat16", "float8"]


def file_name(row: int) -> str:
    """The name speculators 0.9 reads for row ``row`` of the data set (``data_generation/offline.py``)."""
    return f"hs_{row}.safetensors"


def sample_bytes(tokens: int, num_aux: int, hidden_size: int, storage: Storage = "bfloat16") -> int:
    """Bytes of one sample's file without its header of under 400 bytes: states, int64 ids, with float8 a scale a token."""
    width = {"bfloat16": 2, "float8": 1}[storage]
    return tokens * ((num_aux + 1) * hidden_size * width + 8 + (4 if storage == "float8" else 0))


def require_space(folder: Path, needed_bytes: int, reserve_bytes: int = 1_000_000_000) -> None:
    """Raises UserError, before anything is written, when the disk cannot hold ``needed_bytes`` and a reserve."""
    free = shutil.disk_usage(folder).free
    if free < needed_bytes + reserve_bytes:
        raise UserError(
            "the disk is too small for the hidden states",
            expected=f"{needed_bytes:,} bytes and a reserve of {reserve_bytes:,}",
            found=f"{free:,} bytes free at {show(folder)}",
            fix="lower max_prompts or max_new_tokens, or set EAGLEBOOK_OUTPUTS to a bigger disk",
        )


def is_complete(
    file: Path, tokens: int, num_aux: int, hidden_size: int, storage: Storage | Literal["float32"] = "bfloat16"
) -> bool:
    """Whether a file is there with the right shape, type and size. Reads its header only. float32: as an engine may leave it."""
    try:
        tensors = headers.read_header(file)
    except (OSError, UserError):
        return False
    states, ids = tensors.get("hidden_states"), tensors.get("token_ids")
    return (
        states is not None
        and ids is not None
        and states.shape == (tokens, num_aux + 1, hidden_size)
        and states.dtype == {"bfloat16": "BF16", "float8": "F8_E4M3", "float32": "F32"}[storage]
        and (storage != "float8" or "hidden_states_scales" in tensors)
        and ids.shape == (tokens,)
        and ids.dtype == "I64"
    )


def missing(
    folder: Path,
    sequences: Sequence[Sequence[int]],
    rows: Sequence[int],
    num_aux: int,
    hidden_size: int,
    storage: Storage = "bfloat16",
) -> list[int]:
    """Those of ``rows`` whose file is not there whole."""
    return [
        row
        for row in rows
        if not is_complete(folder / file_name(row), len(sequences[row]), num_aux, hidden_size, storage)
    ]


def read(file: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """``hidden_states [tokens, n_aux + 1, hidden]`` (bf16, whatever they were stored in) and ``token_ids [tokens]`` of one file."""
    import torch
    from hs_connectors.fp8_utils import SCALES_KEY, dequantize_fp8_tensor
    from safetensors.torch import load_file

    tensors = load_file(file)
    states = tensors["hidden_states"]
    if SCALES_KEY in tensors:
        states = dequantize_fp8_tensor(states, tensors[SCALES_KEY], torch.bfloat16)
    return states.bfloat16(), tensors["token_ids"]


def write(file: Path, states: torch.Tensor, token_ids: Sequence[int], storage: Storage = "bfloat16") -> None:
    """One sample's file, in place only when it is whole. float8 as speculators' fp8 backend stores it: a scale for each token."""
    import torch
    from safetensors.torch import save_file

    tensors = {"hidden_states": states.contiguous(), "token_ids": torch.tensor(token_ids)}
    if storage == "float8":
        from hs_connectors.fp8_utils import SCALES_KEY, quantize_tensor_to_fp8

        tensors["hidden_states"], tensors[SCALES_KEY] = quantize_tensor_to_fp8(states)
    scratch = file.with_suffix(".partial")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, scratch)
    scratch.replace(file)


def validate(folder: Path, sequences: Sequence[Sequence[int]], rows: Sequence[int] | None = None) -> dict[int, str]:
    """What is wrong with the files of ``sequences`` by row, by speculators' own check (shapes, ids, finite values)."""
    from safetensors import SafetensorError
    from speculators.data_generation.offline import check_hidden_states

    wrong = {}
    for row in range(len(sequences)) if rows is None else rows:
        try:
            states, ids = read(folder / file_name(row))
            check_hidden_states({"hidden_states": states, "token_ids": ids}, list(sequences[row]))
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            wrong[row] = f"{file_name(row)}: {error}"
    return wrong


def drop_damaged(folder: Path, sequences: Sequence[Sequence[int]], rows: Sequence[int]) -> list[int]:
    """Delete the files that are there and do not pass `validate`, so that `extract` makes them again. Returns their rows."""
    there = [row for row in rows if (folder / file_name(row)).exists()]
    damaged = list(validate(folder, sequences, there))
    for row in damaged:
        (folder / file_name(row)).unlink()
    return damaged


def gather(
    folder: Path,
    shares: Mapping[int, Path],
    sequences: Sequence[Sequence[int]],
    num_aux: int,
    hidden_size: int,
    storage: Storage = "bfloat16",
) -> int:
    """Take the files of other machines' shares (by rank, from 1) into ``folder``, as links where the disk is the same.

    Rank r of n does rows r, r + n, …. Returns the number of files taken. Raises UserError naming what is missing.
    """
    taken = 0
    absent: dict[int, int] = {}
    for rank, share in shares.items():
        for row in missing(
            folder, sequences, range(rank, len(sequences), len(shares) + 1), num_aux, hidden_size, storage
        ):
            theirs = share / file_name(row)
            if not is_complete(theirs, len(sequences[row]), num_aux, hidden_size, storage):
                absent[rank] = absent.get(rank, 0) + 1
                continue
            (folder / file_name(row)).unlink(missing_ok=True)
            try:
                os.link(theirs, folder / file_name(row))
            except OSError:  # another disk
                shutil.copy2(theirs, folder / f"{file_name(row)}.part")
                (folder / f"{file_name(row)}.part").replace(folder / file_name(row))
            taken += 1
    if absent:
        raise UserError(
            "the shares of other machines are not all here",
            expected=f"finished runs of 02 with world_size {len(shares) + 1} beside this one",
            found=", ".join(f"rank {rank}: {count} files missing" for rank, count in absent.items()),
            fix=f"run 02 there (--set 02.world_size={len(shares) + 1} --set 02.rank={min(absent)}), then this command again",
        )
    return taken


def write_index(file: Path, ids: Sequence[str], layer_ids: Sequence[int], verifier: str) -> None:
    """Which conversation each row is, and what the slots mean: files alone do not say it."""
    file.write_text(
        json.dumps(
            {
                "verifier": verifier,
                "aux_hidden_state_layer_ids": list(layer_ids),
                "id_means": "residual stream entering the layer",
                "last_slot": "output of the last layer before the final norm",
                "rows": list(ids),
            }
        )
    )
