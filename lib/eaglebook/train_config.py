"""What speculators' training is told: its data set, and its config file with every field that matters written out."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eaglebook import machine, paths, transformers_folder
from eaglebook.errors import UserError
from eaglebook.params import Train
from eaglebook.responses import BENCHMARK, TRAIN, Conversation
from eaglebook.verifier import Verifier

GEOMETRY = {  # our parameters, and what a layer's config calls them
    "draft_heads": "num_attention_heads", "draft_kv_heads": "num_key_value_heads", "draft_head_dim": "head_dim",
    "draft_intermediate_size": "intermediate_size",
}  # fmt: skip
ATTENTION_BLOCK = 128  # tokens: flex attention's mask (GPU) is of whole blocks (torch 2.13, speculators 0.9)


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


def build(
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
                "verifier_name_or_path": str(transformers_folder.of(verifier.path)),
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
    wanted = {key: getattr(params, parameter) for parameter, key in GEOMETRY.items()}
    if not any(wanted.values()):
        return like_verifier
    from speculators.train.cli import create_transformer_layer_config

    folder_read = str(transformers_folder.of(verifier.path))
    layer = create_transformer_layer_config(
        folder_read, 1, "llama", "silu", 2048, [0], trust_remote_code=params.trust_remote_code
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
    config["speculators_config"]["verifier"]["name_or_path"] = str(transformers_folder.of(verifier.path))
    (target / "config.json").write_text(json.dumps(config, indent=1))
    return target
