"""Drive speculators' own training from a notebook: its data set, its config file, its process, its metrics.

Nothing of the library is re-implemented. Its traps are closed from outside: an explicit vocabulary mapping, norm flags
written out, missing hidden states an error, full attention, one save directory a run, and a run that trained on
nothing is not believed.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from eaglebook import guard, machine, paths, progress, train_watch, vocab
from eaglebook.engine.server import tail
from eaglebook.errors import UserError
from eaglebook.params import Train
from eaglebook.responses import BENCHMARK, HELD_OUT, TRAIN, Conversation
from eaglebook.train_worker import Job
from eaglebook.verifier import Verifier, load_head, load_tensor

SMALLEST_PACK = 128  # tokens; flex attention (GPU) works in blocks of as many
_LEAST_START = 1.02  # an acceptance length that a draft to continue must pass before its first step
_FITTED = 500  # conversations: their tokens outnumber the columns of fc by far


@dataclass(frozen=True)
class Curves:
    """What training reported. ``steps``: one dict a step; ``epochs``: one a validation; ``points``: one a measured acceptance,
    with the epochs passed by then in ``passes`` and what `acceptance.Acceptance.summary` says by split."""

    steps: list[dict[str, float]]
    epochs: list[dict[str, float]]
    points: list[dict[str, Any]] = field(default_factory=list)
    stopped_early: bool = False

    @property
    def best_epoch(self) -> int | None:
        """The epoch, from 0, after which acceptance on held-out conversations was largest."""
        ends = {
            round(at["passes"]) - 1: at[HELD_OUT]["mean_acceptance_length"]
            for at in self.points
            if at["passes"] % 1 == 0
        }
        return max((e for e in sorted(ends) if e >= 0), key=lambda e: ends[e], default=None)

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
    conversations = [c for c in conversations if c.split != BENCHMARK]
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
    ratio is chosen so that rounding cannot move one. Benchmark conversations come last and are left out. Raises
    UserError without rows on both sides.
    """
    import datasets

    conversations = [c for c in conversations if c.split != BENCHMARK]
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
                **_shape(params, verifier, save_path.parent),
                "draft_vocab_size": draft_vocab_size,
                "target_layer_ids": list(aux_hidden_state_layer_ids),
                "d2t_path": str(mapping / "d2t.npy"),  # explicit: a cached pair of another run is never picked up
                "t2d_path": str(mapping / "t2d.npy"),
                "norm_before_residual": params.norm_before_residual,
                "norm_before_fc": params.norm_before_fc,
                "norm_output": params.norm_output,
                "fc_norm": params.fc_norm,
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
            "trainer": {
                "epochs": params.epochs,
                "save_path": str(save_path),
                "log_freq": 1,
                "fsdp_shard": params.fsdp_shard,
            },
        }
    }


def _shape(params: Train, verifier: Verifier, folder: Path) -> dict[str, Any]:
    """Where the draft's layer comes from: a draft to continue, a geometry of one's own, or the verifier's."""
    if params.continue_from:
        return {
            "from_pretrained": str(
                _of_this_verifier(paths.resolve(params.continue_from), verifier, folder / "continued")
            )
        }
    like_verifier = {"num_layers": 1, "full_attention_indices": [0]}  # the default slides every layer over 2048 tokens
    wanted = {
        "num_attention_heads": params.draft_heads, "num_key_value_heads": params.draft_kv_heads,
        "head_dim": params.draft_head_dim, "intermediate_size": params.draft_intermediate_size,
    }  # fmt: skip
    if not any(wanted.values()):
        return like_verifier
    from speculators.train.cli import create_transformer_layer_config

    layer = create_transformer_layer_config(
        str(verifier.path), 1, "llama", "silu", 2048, [0], trust_remote_code=params.trust_remote_code
    )
    for key, value in wanted.items():
        if value:
            setattr(layer, key, value)
    if layer.num_attention_heads % layer.num_key_value_heads:
        raise UserError(
            "the draft's heads do not divide into groups",
            expected="draft_heads a multiple of draft_kv_heads",
            found=f"{layer.num_attention_heads} and {layer.num_key_value_heads}",
            fix="change one of them in the params file",
        )
    file = folder / "draft_config.json"
    file.write_text(json.dumps(layer.to_dict(), indent=1))
    return {"draft_config": str(file)}


def _of_this_verifier(draft: Path, verifier: Verifier, target: Path) -> Path:
    """A draft's folder by links, its config naming this verifier: speculators reads head and norm of the one it names."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for file in draft.iterdir():
        if file.is_file() and file.name != "config.json":
            (target / file.name).symlink_to(file.resolve())
    config = json.loads((draft / "config.json").read_text())
    config["speculators_config"]["verifier"]["name_or_path"] = str(verifier.path)
    (target / "config.json").write_text(json.dumps(config, indent=1))
    return target


def run(config: dict[str, Any], folder: Path, params: Train, conversations: Path | None = None) -> Curves:
    """Train in a process of its own, show its progress, return its curves.

    ``conversations``: the file of 01; acceptance on those not trained on is measured on the way (`train_watch`). Resumes
    from the newest checkpoint in the save path; a pack that does not fit into memory is halved. Raises UserError with the
    log's tail when the process fails, when another run's checkpoints lie in the save path, or when it ends well but
    cannot have learnt anything.
    """
    metrics, began = folder / "metrics.jsonl", time.monotonic()
    save_path = Path(config["train"]["trainer"]["save_path"])
    refuse_another_run(config, folder, save_path)
    job = Job(
        config=folder / "train.yaml", metrics=metrics, train_lm_head=params.train_lm_head, threads=params.threads,
        warm_start="" if params.warm_start == "noise" or params.continue_from else params.verifier_name_or_path,
        fitted=_FITTED if params.warm_start == "fit" else 0,
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
        so_far = read(metrics)
        discard_unfinished(save_path, so_far, watched=conversations is not None)
        if so_far.stopped_early:  # it had enough: not one epoch more
            code = 0
            break
        code, said = _process(folder, params, began)
        pack_tokens = config["train"]["data"]["total_seq_len"]
        if ran_out_of_memory(code, said) and pack_tokens >= 2 * SMALLEST_PACK:
            config["train"]["data"]["total_seq_len"] = pack_tokens // 2
            print(f"out of memory: packs of {pack_tokens // 2} tokens from the last checkpoint on", flush=True)
            continue
        break
    if code:
        raise UserError(
            f"training ended with code {code}",
            found=f"the end of {paths.show(folder / 'train.log')}:\n{tail(folder / 'train.log')}",
            fix="read the last error above; a rerun goes on from the last checkpoint",
        )
    curves = read(metrics)
    refuse_nothing_learnt(curves, params.epochs)
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
    return process.returncode, log.read_bytes()[before:].decode(errors="replace")


def ran_out_of_memory(code: int, said: str) -> bool:
    """Whether a process ended for want of memory: torch says it, or the kernel killed it without a word (137 by `guard`)."""
    return code in (-signal.SIGKILL, 128 + signal.SIGKILL) or (
        code != 0
        and any(
            words in said
            for words in ("out of memory", "OutOfMemoryError", "can't allocate memory", "not enough memory")
        )
    )


def refuse_another_run(config: dict[str, Any], folder: Path, save_path: Path) -> None:
    """The library resumes from any checkpoint it finds, of whatever data or flags. Raises UserError when those differ."""
    file = folder / "train.yaml"
    if not file.is_file() or not any(d.name.isdigit() for d in save_path.glob("*")):
        return
    free = {"epochs", "total_seq_len", "save_path", "num_workers", "data_path", "log_freq"}

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


def discard_unfinished(save_path: Path, curves: Curves, *, watched: bool = False) -> None:
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


def read(file: Path) -> Curves:
    """The curves of a ``metrics.jsonl``. A torn last line is left out; of repeated steps (after a resume) the last counts."""
    steps: dict[int, dict[str, float]] = {}
    epochs: dict[int, dict[str, float]] = {}
    points: dict[float, dict[str, Any]] = {}
    stopped = False
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
        elif "acceptance" in row:
            passes = row["epoch"] + row["share"]
            points[passes] = {"passes": passes, **row["acceptance"]}
        elif "stopped_early" in row:
            stopped = True
    ordered = (
        [steps[k] for k in sorted(steps)],
        [epochs[k] for k in sorted(epochs)],
        [points[k] for k in sorted(points)],
    )
    return Curves(*ordered, stopped_early=stopped)


def refuse_nothing_learnt(curves: Curves, epochs: int) -> None:
    """A run of speculators 0.9 can end well with loss 0 on no data (``train/recovery.py``). Raises UserError."""
    reasons = []
    if not curves.steps:
        reasons.append("no training step was reported")
    if any(step.get("error_records", 0) for step in curves.steps):
        reasons.append("samples were dropped (error_records above 0)")
    if any(not 0 < step["loss"] < float("inf") for step in curves.steps):
        reasons.append("a loss was 0, infinite or not a number")
    if len(curves.epochs) < epochs and not curves.stopped_early:
        reasons.append(f"{len(curves.epochs)} of {epochs} validations were reported")
    if reasons:
        raise UserError(
            "training ended, but cannot be believed",
            found="; ".join(reasons),
            fix="eaglebook run --stage 02_hidden_states --force, then the same for 04_train",
        )


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


def changed_frozen(checkpoint: Path, verifier: Verifier, d2t: np.ndarray, params: Train) -> list[str]:
    """Which frozen tensors of a checkpoint are no longer to the bit what they began as: the verifier's embedding and its
    head's rows, or those of the draft that was continued."""
    import torch
    from safetensors.torch import load_file

    stored = load_file(checkpoint / "model.safetensors")
    if params.continue_from:
        expected = load_file(paths.resolve(params.continue_from) / "model.safetensors")
    else:
        expected = {
            "embed_tokens.weight": load_tensor(verifier, verifier.embed_key),
            "lm_head.weight": load_head(verifier)[torch.from_numpy(vocab.target_ids(d2t))],
        }
    frozen = {"embed_tokens.weight"} | (set() if params.train_lm_head else {"lm_head.weight"})
    return [
        name
        for name in sorted(frozen & set(expected) & set(stored))
        if not torch.equal(stored[name], expected[name].to(stored[name].dtype))
    ]


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
