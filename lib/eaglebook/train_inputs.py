"""Do the things that a training reads belong together, and are they whole? Asked before the first step, never after.

Conversations, hidden states and a mapping are made apart and combined by row number. speculators 0.9 trains on what does
not belong together as readily as on what does.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from eaglebook import evenly, foreign_mapping, states_files, vocab
from eaglebook.checkpoint import headers
from eaglebook.errors import UserError
from eaglebook.params import Train
from eaglebook.paths import resolve, show
from eaglebook.responses import Conversation
from eaglebook.verifier import Verifier

if TYPE_CHECKING:
    import torch

_DEEPLY_READ = 200  # files whose every number is looked at; all have their headers read


def checks(
    params: Train, verifier: Verifier, conversations: Sequence[Conversation], states: Path, index: Mapping[str, Any],
    d2t: np.ndarray, t2d: np.ndarray,
) -> dict[str, tuple[bool, str]]:  # fmt: skip
    """Named findings about the inputs of a training: whether it holds, and what was found."""
    ids, rows = index["aux_hidden_state_layer_ids"], range(len(conversations))
    sequences = [c.input_ids for c in conversations]
    absent = {row for row in rows if not (states / states_files.file_name(row)).is_file()}
    other = [
        row
        for row in rows
        if row not in absent and _shape(states / states_files.file_name(row))
        != (len(sequences[row]), len(ids) + 1, verifier.hidden_size)
    ]  # fmt: skip
    whole = not absent and not other
    wrong = states_files.validate(states, sequences, evenly.take(rows, _DEEPLY_READ)) if whole else {}
    faults = vocab.problems(d2t, t2d)
    beyond = [c.id for c in conversations if max(c.input_ids) >= verifier.vocab_size]
    found = {
        "02 has the rows of 01, in order": (index["rows"] == [c.id for c in conversations], f"{len(index['rows'])} rows"),
        "02 was made from this verifier": (index["verifier"] == verifier.name, index["verifier"]),
        "every conversation has its hidden states": (
            not absent,
            f"{len(absent)} missing; if deleted after a training: eaglebook run --stage 02 --force" if absent else f"{len(rows)}",
        ),
        "the files hold these aux ids of this verifier": (not other, f"{len(other)} of another shape" if other else f"{ids}"),
        "their numbers are finite and their tokens the conversations'": (whole and not wrong, next(iter(wrong.values()), "")),
        "the ids are of this verifier": (
            list(ids) == sorted(set(ids)) and all(0 <= i <= verifier.num_layers for i in ids), f"{list(ids)}"
        ),
        "every token is of this verifier": (not beyond, f"{len(beyond)} conversations with others" if beyond else ""),
        "03 maps this verifier's vocabulary": (len(t2d) == verifier.vocab_size, f"{len(t2d)} of {verifier.vocab_size}"),
        "the mapping is whole": (not faults, "; ".join(faults)),
    }  # fmt: skip
    if params.continue_from:
        found["the draft to continue fits"] = _continues(params, ids, d2t)
    return found


def samples(
    conversations: Sequence[Conversation], states: Path, split: str
) -> Callable[[], Iterator[tuple[torch.Tensor, Sequence[int], Sequence[int]]]]:
    """What `acceptance` reads of all conversations of a split, file by file; called again, it reads them again."""

    def read() -> Iterator[tuple[torch.Tensor, Sequence[int], Sequence[int]]]:
        for row, c in enumerate(conversations):
            if c.split == split:
                yield states_files.read(states / states_files.file_name(row))[0], c.input_ids, c.loss_mask

    return read


def delete(states: Path) -> str:
    """Remove the hidden states of a training that succeeded. Returns what was done, in words."""
    files = list(states.glob("hs_*.safetensors"))
    freed = sum(file.stat().st_size for file in files)
    shutil.rmtree(states)
    return f"{len(files)} files of hidden states deleted, {freed / 1e9:.2f} GB: eaglebook run --stage 02 --force makes them again"


def _shape(file: Path) -> tuple[int, ...]:
    try:
        return headers.read_header(file)["hidden_states"].shape or ()
    except (OSError, KeyError, UserError):
        return ()


def _continues(params: Train, ids: Sequence[int], d2t: np.ndarray) -> tuple[bool, str]:
    """Whether a draft in the speculators format reads these ids, says these tokens and has the flags asked for."""
    folder = resolve(params.continue_from)
    config = json.loads((folder / "config.json").read_text()) if (folder / "config.json").is_file() else {}
    if "transformer_layer_config" not in config:
        return False, f"{show(folder)} is not in the speculators format: eaglebook convert it first"
    theirs = config.get("eagle_aux_hidden_state_layer_ids")
    if theirs and list(theirs) != list(ids):
        return False, f"it reads {theirs}, 02 holds {list(ids)}"
    for flag in ("norm_before_residual", "norm_before_fc", "norm_output", "fc_norm"):
        if (theirs := bool(config.get(flag, False))) != getattr(params, flag):
            return False, f"its {flag} is {theirs}: set the parameter so"
    mapping = headers.read_folder(folder).get("d2t")  # none: it says every token
    own = foreign_mapping.read(mapping.file)[0] if mapping and mapping.file else d2t
    if not np.array_equal(own, d2t):
        return (
            False,
            f"its {len(own)} tokens are not those of 03: give 03 its folder as foreign_mapping, and use_foreign_mapping: true",
        )
    return True, f"{show(folder)}"
