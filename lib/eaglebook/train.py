"""Drive speculators' own training from a notebook: its process, its checkpoints.

Nothing of the library is re-implemented. Its traps are closed from outside: `train_config` writes out what it would guess,
`train_curves` does not believe a run that trained on nothing, and here a save directory belongs to one run.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml

from eaglebook import (
    guard,
    machine,
    paths,
    progress,
    responses,
    train_config,
    train_curves,
    train_watch,
    verifier,
    vocab,
)
from eaglebook.checkpoint import headers
from eaglebook.engine.server import tail
from eaglebook.errors import UserError
from eaglebook.params import Train
from eaglebook.train_config import ATTENTION_BLOCK
from eaglebook.train_worker import Job
from eaglebook.verifier import Verifier, load_head, load_tensor

if TYPE_CHECKING:
    import torch

_LEAST_START = 1.02  # an acceptance length that a draft to continue must pass before its first step
_FITTED = 500  # conversations: more of them do not change fc
_TOKENS_PER_COLUMN = 5  # fewer training tokens for each column of fc, and the fit is of these tokens alone


def run(config: dict[str, Any], folder: Path, params: Train, conversations: Path | None = None) -> train_curves.Curves:
    """Train in a process of its own, show its progress, return its curves.

    ``conversations``: the file of 01; acceptance on those not trained on is measured on the way (`train_watch`). Resumes
    from the newest checkpoint in the save path; a pack that does not fit into memory is halved, in ``config`` too. Raises
    UserError with the log's tail when the process fails, when another run's checkpoints lie in the save path, or when it
    ends well but cannot have learnt anything.
    """
    metrics, began = folder / "metrics.jsonl", time.monotonic()
    save_path = Path(config["train"]["trainer"]["save_path"])
    refuse_another_run(config, folder, save_path)
    job = Job(
        config=folder / "train.yaml", metrics=metrics, train_lm_head=params.train_lm_head, threads=params.threads,
        warm_start="" if params.warm_start == "noise" or params.continue_from else params.verifier_name_or_path,
        fitted=_FITTED if params.warm_start == "fit" and _enough_to_fit(config, params, conversations) else 0,
        stock=params.stock_trainer, conversations=conversations, evaluated=params.evaluated_conversations,
        states=Path(config["train"]["backend"]["hidden_states_path"]), patience=params.patience,
        least_start=_LEAST_START if params.continue_from else 0.0,
    )  # fmt: skip
    (folder / "job.json").write_text(job.model_dump_json(indent=1))
    for rank in range(1, params.nodes):
        print(
            f"on machine {rank}, which must see this folder:", *command(params, folder / "job.json", rank), flush=True
        )
    while True:
        job.config.write_text(yaml.safe_dump(config, sort_keys=False))
        so_far = train_curves.read(metrics)
        discard_unfinished(save_path, so_far, watched=conversations is not None)
        if so_far.stopped_early:  # it had enough: not one epoch more
            code = 0
            break
        killed = machine.oom_kills()
        code, said = _process(folder, params, began)
        by_kernel = killed is None or killed != machine.oom_kills()
        if (
            not ran_out_of_memory(code, said, by_kernel)
            or config["train"]["data"]["total_seq_len"] < 2 * ATTENTION_BLOCK
        ):
            break
        halve_packs(config, train_curves.read(metrics), params.epochs)
        pack_tokens = config["train"]["data"]["total_seq_len"]
        print(f"out of memory: packs of {pack_tokens} tokens from the last checkpoint on", flush=True)
        if conversations is not None:  # what no longer has anything to learn is refused now, not after all epochs
            train_config.clipped(responses.read(conversations), pack_tokens)
    if code:
        raise UserError(
            f"training ended with code {code}",
            found=f"the end of {paths.show(folder / 'train.log')}:\n{tail(folder / 'train.log')}",
            fix="read the last error above; a rerun goes on from the last checkpoint",
        )
    curves = train_curves.read(metrics)
    train_curves.refuse_nothing_learnt(curves, params.epochs)
    return curves


def command(params: Train, job: Path, node_rank: int = 0) -> list[str]:
    """The command of a training: one process, or torchrun's with one a GPU, on one machine or several (this being
    ``node_rank`` of them; the notebook runs on number 0 and prints what the others run).

    Raises UserError when more processes are asked for than this machine has GPUs.
    """
    if params.processes == params.nodes == 1:
        return [sys.executable, "-m", "eaglebook.train_worker", str(job)]
    gpus = machine.accelerators()
    if params.processes > gpus:
        raise UserError(
            f"{params.processes} training processes are asked for",
            expected="no more than GPUs in this machine",
            found=f"{gpus} GPUs",
            fix="lower `processes:` of 04_train in the params file",
        )
    meet = (
        ["--standalone"]
        if params.nodes == 1
        else ["--nnodes", f"{params.nodes}", "--node-rank", f"{node_rank}", "--rdzv-backend", "c10d",
              "--rdzv-id", "eaglebook", "--rdzv-endpoint", params.rendezvous]
    )  # fmt: skip
    torchrun = [sys.executable, "-m", "torch.distributed.run", *meet, "--nproc-per-node", f"{params.processes}"]
    return [*torchrun, "-m", "eaglebook.train_worker", str(job)]


def _process(folder: Path, params: Train, began: float) -> tuple[int, str]:
    """One training, watched to its end: its exit code and all that it logged."""
    log, metrics = folder / "train.log", folder / "metrics.jsonl"
    before = log.stat().st_size if log.exists() else 0
    with log.open("ab") as stream:
        process = guard.start(command(params, folder / "job.json"), stdout=stream, stderr=subprocess.STDOUT)
        try:
            said = 0.0
            while process.poll() is None:
                time.sleep(1)
                line = train_curves.progress_line(train_curves.read(metrics), time.monotonic() - began)
                progress.publish(line)
                if line and time.monotonic() - said > 30:
                    said = time.monotonic()
                    print(line, flush=True)
                if time.monotonic() - began > params.timeout_s:
                    raise UserError(
                        f"training ran over timeout_s = {params.timeout_s}",
                        found=line,
                        fix="raise timeout_s: a rerun goes on from the last checkpoint. With fewer epochs it begins anew",
                    )
        finally:
            guard.stop(process)
    return process.returncode, log.read_bytes()[before:].decode(errors="replace")


def ran_out_of_memory(code: int, said: str, by_kernel: bool = True) -> bool:
    """Whether a process ended for want of memory: torch says it, or the kernel killed it without a word (137 by `guard`).

    ``by_kernel``: the kernel may have done so, by its own count (`machine.oom_kills`); else somebody else killed it.
    """
    return (by_kernel and code in (-signal.SIGKILL, 128 + signal.SIGKILL)) or (
        code != 0
        and any(
            words in said
            for words in ("out of memory", "OutOfMemoryError", "can't allocate memory", "not enough memory")
        )
    )


def halve_packs(config: dict[str, Any], so_far: train_curves.Curves, epochs: int) -> None:
    """Half the pack, in whole `ATTENTION_BLOCK`s, and a learning rate that still ends where it was to end.

    The epochs left have twice the steps. The library counts by steps and would plan as if those done had been twice as many
    too: the rate would go up by more than it does now, and be well above zero at the end.
    """
    packed = config["train"]["data"]["total_seq_len"] // 2 // ATTENTION_BLOCK * ATTENTION_BLOCK
    config["train"]["data"]["total_seq_len"] = packed
    done = len(so_far.epochs)
    if done:
        steps = sum(step["epoch"] < done for step in so_far.steps)
        config["train"]["scheduler"]["scheduler_total_steps"] = steps + 2 * round(steps / done) * (epochs - done)


def _enough_to_fit(config: dict[str, Any], params: Train, conversations: Path | None) -> bool:
    """Whether the training tokens outnumber the columns of ``fc`` far enough; says so when they do not."""
    if conversations is None:
        return False
    columns = (
        len(config["train"]["draft"]["target_layer_ids"]) * verifier.resolve(params.verifier_name_or_path).hidden_size
    )
    tokens = sum(len(c.input_ids) for c in responses.read(conversations) if c.split == responses.TRAIN)
    enough = tokens >= _TOKENS_PER_COLUMN * columns
    if not enough:
        print(
            f"{tokens:,} tokens are too few to fit fc, which has {columns:,} columns: the draft starts from a copy",
            flush=True,
        )
    return enough


def refuse_another_run(config: dict[str, Any], folder: Path, save_path: Path) -> None:
    """The library resumes from any checkpoint it finds, of whatever data or flags. Raises UserError when those differ."""
    file = folder / "train.yaml"
    if not file.is_file() or not any(d.name.isdigit() for d in save_path.glob("*")):
        return
    free = {"epochs", "total_seq_len", "scheduler_total_steps", "save_path", "num_workers", "data_path", "log_freq"}

    def binding(groups: dict[str, Any]) -> dict[str, Any]:
        flat: dict[str, Any] = {}
        for key, value in groups["train"].items():
            flat |= (
                {f"{key}.{k}": v for k, v in value.items() if k not in free}
                if isinstance(value, dict)
                else {key: value}
            )
        return flat

    before, now = binding(yaml.safe_load(file.read_text())), binding(config)
    other = [key for key in sorted(before | now) if before.get(key) != now.get(key)]
    if other:
        raise UserError(
            f"{paths.show(save_path)} holds checkpoints of another training",
            expected="; ".join(f"{key} {now.get(key)}" for key in other[:3]),
            found="; ".join(f"{key} {before.get(key)}" for key in other[:3]),
            fix="eaglebook run --stage 04_train --force",
        )


def discard_unfinished(save_path: Path, curves: train_curves.Curves, *, watched: bool = False) -> None:
    """Remove what a stopped training left that the library's resume would stumble over (speculators 0.9).

    It takes any folder with a number for a finished epoch (``train/checkpointer.py:126``), also one cut while it was
    written (``training_state.json`` comes last), and never validates an epoch that was saved but not yet validated.
    ``interrupted/`` does not know its place in the epoch. The epoch in question is trained again.
    """
    shutil.rmtree(save_path / "interrupted", ignore_errors=True)
    validated = {int(e["epoch"]) for e in curves.epochs}
    for folder in save_path.glob("*"):
        whole = (
            (folder / "training_state.json").is_file()
            and int(folder.name) in validated
            and (not watched or (folder / train_watch.RECORD).is_file())
            if folder.name.isdigit()
            else True
        )
        if not whole and not folder.is_symlink():
            shutil.rmtree(folder)


def best_checkpoint(save_path: Path) -> Path:
    """The whole checkpoint that accepted most on held-out conversations. Raises UserError when there is none."""
    best = train_watch.best_epoch(save_path)
    folder = save_path / str(best)
    if best is None or not all((folder / name).is_file() for name in ("model.safetensors", "config.json")):
        raise UserError(
            f"no checkpoint in {paths.show(save_path)}",
            expected="a numbered folder with config.json, model.safetensors and its measured acceptance",
            fix="run 04_train",
        )
    return folder


def changed_frozen(checkpoint: Path, model: Verifier, d2t: np.ndarray, params: Train) -> list[str]:
    """Which frozen tensors of a checkpoint are no longer to the bit what they began as: the verifier's embedding and its
    head's rows, or those of the draft that was continued."""
    import torch

    frozen = ["embed_tokens.weight"] + ([] if params.train_lm_head else ["lm_head.weight"])

    def of(folder: Path) -> dict[str, torch.Tensor]:
        return {name: load_tensor(folder, name) for name in headers.read_folder(folder) if name in frozen}

    stored = of(checkpoint)
    if params.continue_from:
        expected = of(paths.resolve(params.continue_from))
    else:
        expected = {
            "embed_tokens.weight": load_tensor(model.path, model.embed_key),
            "lm_head.weight": load_head(model)[torch.from_numpy(vocab.target_ids(d2t))],
        }
    return [
        name
        for name in frozen
        if name in expected and name in stored and not torch.equal(stored[name], expected[name].to(stored[name].dtype))
    ]
