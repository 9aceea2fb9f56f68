"""Do the things that a training reads belong together, and are they whole? Asked before the first step, never after.

Conversations, hidden states and a mapping are made apart and combined by row number. speculators 0.9 trains on what does
not belong together as readily as on what does.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from eaglebook import draft_size, evenly, foreign_mapping, machine, paths, runs, states_files, vocab
from eaglebook.checkpoint import headers, inspection
from eaglebook.checkpoint.verifier_config import read as read_facts
from eaglebook.errors import UserError
from eaglebook.params import Train
from eaglebook.paths import resolve, show
from eaglebook.responses import HELD_OUT, TRAIN, Conversation
from eaglebook.train_config import ATTENTION_BLOCK, GEOMETRY
from eaglebook.verifier import Verifier

if TYPE_CHECKING:
    import torch

_DEEPLY_READ = 200  # files at least whose every number is looked at; all have their headers read
_DEEPLY_READ_BYTES = 4e9  # as many more as stay below this: seconds


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
    wrong = (
        states_files.validate(states, sequences, evenly.take(rows, _deeply_read(states, len(rows)))) if whole else {}
    )
    run = states.parents[2]  # RUN/02_hidden_states/artifacts/hidden_states
    again = f"{runs.command('02_hidden_states', run, params.preset)} --force"
    faults = vocab.problems(d2t, t2d)
    beyond = [c.id for c in conversations if max(c.input_ids) >= verifier.vocab_size]
    found = {
        "02 has the rows of 01, in order": (index["rows"] == [c.id for c in conversations], f"{len(index['rows'])} rows"),
        "02 was made from this verifier": (index["verifier"] == verifier.name, index["verifier"]),
        "every conversation has its hidden states": (
            not absent,
            f"{len(absent)} missing, {_names(absent)}; {again}" if absent else f"{len(rows)}",
        ),
        "the files hold these aux ids of this verifier": (
            not other, f"{len(other)} cut or of another shape, {_names(other)}; {again}" if other else f"{ids}"
        ),
        "their numbers are finite and their tokens the conversations'": (
            whole and not wrong,
            f"{'; '.join(list(wrong.values())[:3])}; {again}" if wrong else "" if whole else "not looked at: see above",
        ),
        "the ids are of this verifier": (
            list(ids) == sorted(set(ids)) and all(0 <= i <= verifier.num_layers for i in ids), f"{list(ids)}"
        ),
        "every token is of this verifier": (not beyond, f"{len(beyond)} conversations with others" if beyond else ""),
        "03 maps this verifier's vocabulary": (len(t2d) == verifier.vocab_size, f"{len(t2d)} of {verifier.vocab_size}"),
        "the mapping is whole": (not faults, "; ".join(faults)),
        "every process has a conversation to train on, and one to validate on": _enough(params, conversations),
        "the disk holds the checkpoints": _disk(params, verifier, len(ids), len(d2t)),
    }  # fmt: skip
    if machine.accelerator():
        found["a pack is whole blocks of attention"] = (
            params.pack_tokens % ATTENTION_BLOCK == 0, f"pack_tokens {params.pack_tokens}, blocks of {ATTENTION_BLOCK}"
        )  # fmt: skip
    if params.continue_from:
        found["the draft to continue fits"] = _continues(params, verifier, ids, d2t, t2d)
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


def _names(rows: Iterable[int]) -> str:
    """The first of these rows' files, for a message."""
    return ", ".join(states_files.file_name(row) for row in sorted(rows)[:3])


def _deeply_read(states: Path, count: int) -> int:
    """How many files are read whole: those that `_DEEPLY_READ_BYTES` allow, by the size of the first."""
    each = (states / states_files.file_name(0)).stat().st_size
    return min(count, max(_DEEPLY_READ, int(_DEEPLY_READ_BYTES / each)))


def _enough(params: Train, conversations: Sequence[Conversation]) -> tuple[bool, str]:
    """speculators 0.9 leaves out what is too little to give every process some (``distributed_batch_sampler.py:126``): with
    fewer conversations than processes it trains or validates on nothing."""
    has = {split: sum(c.split == split for c in conversations) for split in (TRAIN, HELD_OUT)}
    processes = params.processes * params.nodes
    ok = all(count >= processes for count in has.values())
    wanted = (
        "" if ok else f", for {processes} processes: lower `processes`, give more prompts or a larger held_out_fraction"
    )
    return ok, f"{has[TRAIN]} and {has[HELD_OUT]}{wanted}"


def _disk(params: Train, verifier: Verifier, num_aux: int, draft_vocab_size: int) -> tuple[bool, str]:
    """Whether there is room for what lies there at once; checkpoints of an attempt to go on from are counted twice."""
    draft = draft_size.asked(params, read_facts(verifier.path), draft_vocab_size, num_aux)
    needed, free = draft.kept_bytes(params.optimizer, params.epochs), shutil.disk_usage(paths.outputs()).free
    said = f"{needed / 1e9:.2f} GB at most, {free / 1e9:.2f} free"
    return free >= needed, said if free >= needed else f"{said}: free some, or set EAGLEBOOK_OUTPUTS to a bigger disk"


def _continues(
    params: Train, verifier: Verifier, ids: Sequence[int], d2t: np.ndarray, t2d: np.ndarray
) -> tuple[bool, str]:
    """Whether a draft in the speculators format is whole, reads these ids, says these tokens and is what is asked for."""
    folder, own_stage = resolve(params.continue_from), runs.stage_dir(runs.run_dir(params), "04_train")
    if folder.resolve().is_relative_to(own_stage.resolve()):
        return (
            False,
            f"{show(folder)} would be replaced by what is trained from it: copy it elsewhere, or another --run-dir",
        )
    tensors = headers.read_folder(folder) if folder.is_dir() else {}
    if not tensors:
        return False, f"{show(folder)} {'holds no weights' if folder.is_dir() else 'does not exist'}"
    config = json.loads((folder / "config.json").read_text()) if (folder / "config.json").is_file() else {}
    if "transformer_layer_config" not in config:
        return False, f"{show(folder)} is not in the speculators format: eaglebook convert it first"
    theirs = config.get("eagle_aux_hidden_state_layer_ids")
    if theirs and list(theirs) != list(ids):
        return False, f"it reads {theirs}, 02 holds {list(ids)}"
    for flag in ("norm_before_residual", "norm_before_fc", "norm_output", "fc_norm"):
        if (theirs := bool(config.get(flag, False))) != getattr(params, flag):
            return False, f"its {flag} is {theirs}: set the parameter so"
    layer = config["transformer_layer_config"]
    for parameter, key in GEOMETRY.items():
        if (wanted := getattr(params, parameter)) and wanted != layer.get(key):
            return False, f"its {key} is {layer.get(key)}, {parameter} asks for {wanted}: set it to 0"
    if errors := inspection.inspect(folder, verifier=verifier.path).errors:
        return False, f"{errors[0].message}; eaglebook inspect {show(folder)}"
    mapping = tensors.get("d2t")  # none: it says every token, or the inspection would have said so
    own = foreign_mapping.read(mapping.file)[0] if mapping and mapping.file else np.zeros(len(t2d), dtype=np.int64)
    if not np.array_equal(own, d2t):
        return (
            False,
            f"its {len(own)} tokens are not those of 03: give 03 its folder as foreign_mapping, and use_foreign_mapping: true",
        )
    return True, f"{show(folder)}"
