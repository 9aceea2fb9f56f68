"""Drive speculators' own training from a notebook: its data set, its config file, its process, its metrics.

Nothing of the library is re-implemented. Its traps are closed from outside: an explicit vocabulary mapping, norm flags
written out, missing hidden states an error, full attention, one save directory a run, and a run that trained on
nothing is not believed.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from eaglebook import guard, machine, paths, progress
from eaglebook.engine.server import tail
from eaglebook.errors import UserError
from eaglebook.params import Train
from eaglebook.responses import TRAIN, Conversation
from eaglebook.verifier import Verifier


@dataclass(frozen=True)
class Curves:
    """What training reported. ``steps``: one dict a step; ``epochs``: one dict a validation."""

    steps: list[dict[str, float]]
    epochs: list[dict[str, float]]

    @property
    def tokens_per_s(self) -> float:
        """Median non-padding tokens a second over the steps, the first ones left out."""
        speeds = sorted(step["tokens_per_s"] for step in self.steps[3:] or self.steps)
        return speeds[len(speeds) // 2] if speeds else 0.0


def clipped(conversations: Sequence[Conversation], pack_tokens: int) -> tuple[int, int]:
    """How many conversations do not fit into one pack, and how many of their supervised tokens are cut off.

    speculators 0.9 clips them with a warning in its log (``train/data.py:398``); its batches hold one token less than the
    conversation. Raises UserError when a conversation would have nothing left to learn: such a pack has loss 0.
    """
    long = [c for c in conversations if len(c.input_ids) > pack_tokens + 1]
    empty = [c.id for c in long if not any(c.loss_mask[: pack_tokens + 1])]
    if empty:
        raise UserError(
            f"{len(empty)} conversations have no supervised token within pack_tokens",
            expected=f"prompts shorter than pack_tokens = {pack_tokens}",
            found=f"{', '.join(empty[:3])}",
            fix="raise pack_tokens, or lower max_prompt_tokens in 01",
        )
    return len(long), sum(sum(c.loss_mask[pack_tokens + 1 :]) for c in long)


def write_dataset(conversations: Sequence[Conversation], folder: Path) -> float:
    """Write the data set speculators reads (row i has ``hs_<i>.safetensors``). Returns its ``train_data_ratio``.

    The library splits by row: the first share trains, the rest validates. The rows are in that order already, and the
    ratio is chosen so that rounding cannot move one. Raises UserError without rows on both sides.
    """
    import datasets

    train = sum(c.split == TRAIN for c in conversations)
    if not 0 < train < len(conversations) or any(c.split != TRAIN for c in conversations[:train]):
        raise UserError(
            "the split leaves nothing to train on or nothing to validate on",
            expected="training conversations first, then held-out ones",
            found=f"{train} of {len(conversations)} for training",
            fix="give more prompts, or change held_out_fraction",
        )
    rows = [{"input_ids": c.input_ids, "loss_mask": c.loss_mask, "seq_len": len(c.input_ids)} for c in conversations]
    dataset = datasets.Dataset.from_list(rows)
    dataset.set_format("torch")  # stored with the data; the loader calls tensor methods on the items
    dataset.save_to_disk(folder)
    return (train + 0.5) / len(conversations)


def config(
    params: Train,
    verifier: Verifier,
    *,
    dataset: Path,
    hidden_states: Path,
    mapping: Path,
    draft_vocab_size: int,
    aux_hidden_state_layer_ids: Sequence[int],
    train_data_ratio: float,
    save_path: Path,
) -> dict[str, Any]:
    """The config of speculators 0.9's ``TrainConfig``, every field that matters written out."""
    on_gpu = bool(machine.accelerator())
    return {
        "train": {
            "seed": params.seed,
            "verifier": {
                "verifier_name_or_path": str(verifier.path),
                "trust_remote_code": params.trust_remote_code,
            },
            "draft": {
                "num_layers": 1,
                "draft_vocab_size": draft_vocab_size,
                "target_layer_ids": list(aux_hidden_state_layer_ids),
                "d2t_path": str(mapping / "d2t.npy"),  # explicit: a cached pair of another run is never picked up
                "t2d_path": str(mapping / "t2d.npy"),
                "norm_before_residual": params.norm_before_residual,
                "norm_before_fc": params.norm_before_fc,
                "norm_output": params.norm_output,
                "fc_norm": params.fc_norm,
                "full_attention_indices": [0],  # the default slides every draft layer over 2048 tokens
                "draft_attn_impl": "simple_flex_attention" if on_gpu else "sdpa",
                "mask_token_id": 0,  # unused by EAGLE-3; without it a processor is loaded
            },
            "data": {
                "data_path": str(dataset),
                "hidden_states_backend": "fp8",  # the file backend, which also reads states stored as float8
                "total_seq_len": params.pack_tokens,
                "train_data_ratio": train_data_ratio,
                "num_workers": 4 if on_gpu else 0,
            },
            "backend": {"hidden_states_path": str(hidden_states)},
            "generation": {"on_missing": "raise"},
            "loss": {
                "loss_fn": params.loss,
                "loss_implementation": "fused" if on_gpu else "eager",
                "ttt_steps": params.ttt_steps,
                "ttt_step_loss_decay": params.ttt_step_loss_decay,
            },
            "optimizer": {"optimizer": params.optimizer, "lr": params.learning_rate},
            "scheduler": {"scheduler_type": params.scheduler},
            "trainer": {"epochs": params.epochs, "save_path": str(save_path), "log_freq": 1},
        }
    }


def run(config: dict[str, Any], folder: Path, params: Train) -> Curves:
    """Train in a process of its own, show its progress, return its curves.

    Resumes from the newest checkpoint in the save path. Raises UserError with the log's tail when the process fails, or
    when it ends well but cannot have learnt anything.
    """
    file, log, metrics = folder / "train.yaml", folder / "train.log", folder / "metrics.jsonl"
    file.write_text(yaml.safe_dump(config, sort_keys=False))
    discard_unfinished(Path(config["train"]["trainer"]["save_path"]), read(metrics))
    argv = [sys.executable, "-m", "eaglebook.train_worker", str(file), "--metrics", str(metrics)]
    argv += ["--threads", str(params.threads)] if params.threads else []
    argv += ["--warm-start", params.verifier_name_or_path] if params.warm_start else []
    argv += ["--train-lm-head"] if params.train_lm_head else []
    began = time.monotonic()
    with log.open("ab") as stream:
        process = guard.start(argv, stdout=stream, stderr=subprocess.STDOUT)
        try:
            said = 0.0
            while process.poll() is None:
                time.sleep(1)
                line = _line(read(metrics), time.monotonic() - began)
                progress.publish(line)
                if line and time.monotonic() - said > 30:
                    said = time.monotonic()
                    print(line, flush=True)
                if time.monotonic() - began > params.timeout_s:
                    raise UserError(
                        f"training ran over timeout_s = {params.timeout_s}",
                        found=line,
                        fix="raise timeout_s or lower epochs; a rerun goes on from the last checkpoint",
                    )
        finally:
            guard.stop(process)
    if process.returncode:
        raise UserError(
            f"training ended with code {process.returncode}",
            found=f"the end of {paths.show(log)}:\n{tail(log)}",
            fix="read the last error above; a rerun goes on from the last checkpoint",
        )
    curves = read(metrics)
    refuse_nothing_learnt(curves, params.epochs)
    return curves


def discard_unfinished(save_path: Path, curves: Curves) -> None:
    """Remove what a stopped training left that the library's resume would stumble over (speculators 0.9).

    It takes any folder with a number for a finished epoch (``train/checkpointer.py:126``), also one cut while it was
    written (``training_state.json`` comes last), and never validates an epoch that was saved but not yet validated.
    ``interrupted/`` does not know its place in the epoch. The epoch in question is trained again.
    """
    shutil.rmtree(save_path / "interrupted", ignore_errors=True)
    validated = {int(e["epoch"]) for e in curves.epochs}
    for folder in save_path.glob("*"):
        whole = (
            (folder / "training_state.json").is_file() and int(folder.name) in validated
            if folder.name.isdigit()
            else True
        )
        if not whole and not folder.is_symlink():
            shutil.rmtree(folder)


def read(file: Path) -> Curves:
    """The curves of a ``metrics.jsonl``. A torn last line is left out; of repeated steps (after a resume) the last counts."""
    steps: dict[int, dict[str, float]] = {}
    epochs: dict[int, dict[str, float]] = {}
    for line in file.read_text().splitlines() if file.exists() else ():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if "train" in row:
            steps[row["global_step"]] = {
                "step": row["global_step"],
                "epoch": row["epoch"],
                "lr": _first(row["lr"]),
                "tokens_per_s": row["profile"]["tokens_per_s"],
                **row["train"],
            }
        elif "val" in row:
            values = {key.removesuffix("_epoch"): value for key, value in row["val"].items()}
            epochs[row["epoch"]] = {"epoch": row["epoch"], **values}
    return Curves([steps[k] for k in sorted(steps)], [epochs[k] for k in sorted(epochs)])


def refuse_nothing_learnt(curves: Curves, epochs: int) -> None:
    """A run of speculators 0.9 can end well with loss 0 on no data (``train/recovery.py``). Raises UserError."""
    reasons = []
    if not curves.steps:
        reasons.append("no training step was reported")
    if any(step.get("error_records", 0) for step in curves.steps):
        reasons.append("samples were dropped (error_records above 0)")
    if any(not 0 < step["loss"] < float("inf") for step in curves.steps):
        reasons.append("a loss was 0, infinite or not a number")
    if len(curves.epochs) < epochs:
        reasons.append(f"{len(curves.epochs)} of {epochs} validations were reported")
    if reasons:
        raise UserError(
            "training ended, but cannot be believed",
            found="; ".join(reasons),
            fix="eaglebook run --stage 02_hidden_states --force, then the same for 04_train",
        )


def last_checkpoint(save_path: Path) -> Path:
    """The newest whole checkpoint. Raises UserError when there is none."""
    numbered = sorted((d for d in save_path.glob("*") if d.is_dir() and d.name.isdigit()), key=lambda d: int(d.name))
    whole = [d for d in numbered if (d / "model.safetensors").exists() and (d / "config.json").exists()]
    if not whole:
        raise UserError(
            f"no checkpoint in {paths.show(save_path)}",
            expected="a numbered folder with config.json and model.safetensors",
            fix="run 04_train",
        )
    return whole[-1]


def _line(curves: Curves, seconds: float) -> str:
    if not curves.steps:
        return f"training process starting · {seconds:.0f} s"
    last = curves.steps[-1]
    accuracy = " / ".join(f"{last[key]:.3f}" for key in sorted(last) if key.startswith("full_acc_"))
    return (
        f"epoch {last['epoch'] + 1:.0f} step {last['step'] + 1:.0f} · loss {last['loss']:.3f} · accuracy {accuracy} · "
        f"{curves.tokens_per_s:,.0f} tokens/s · {seconds:.0f} s"
    )


def _first(value: Any) -> float:
    return next(iter(value.values())) if isinstance(value, dict) else value
