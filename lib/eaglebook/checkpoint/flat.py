"""From speculators' nested checkpoint to the flat layout that every vLLM, and SGLang's readers, understand.

The config is rewritten, the tensors are copied as bytes under new names. Nothing is filled in by a default: what the
nested config does not say is an error.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eaglebook.checkpoint import headers
from eaglebook.errors import UserError
from eaglebook.paths import show

_CHUNK_BYTES = 16 << 20
NORM_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


@dataclass(frozen=True)
class Export:
    """Names as stored before and after, in file order, and the flat config."""

    renamed: dict[str, str]
    config: dict[str, Any]


def read_config(folder: Path) -> dict[str, Any]:
    """The config of a draft's folder. Raises UserError when there is none, or it is not JSON."""
    file = folder / "config.json"
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(
            f"{show(folder)}: no readable config.json",
            expected="a draft's folder",
            found=f"{type(error).__name__}: {error}" if file.exists() else "nothing there",
            fix="correct `draft` in the params file",
        ) from None


def aux_ids(config: dict[str, Any], where: str = "config.json") -> list[int]:
    """The aux hidden state layer ids of a draft's config, at the top level or in ``eagle_config``."""
    key = "eagle_aux_hidden_state_layer_ids"
    ids = config.get(key) or (config.get("eagle_config") or {}).get(key)
    if not ids:
        raise UserError(
            f"{where}: no aux hidden state layer ids",
            expected=f"{key}, at the top level",
            found="neither there nor in eagle_config: every reader would take its own default",
            fix="write in the ids the draft was trained with",
        )
    return list(ids)


def flat_config(nested: dict[str, Any], where: str = "config.json") -> dict[str, Any]:
    """The flat config of a speculators EAGLE-3 config.

    The aux ids stand at three places because three readers look in three places: top level (vLLM's V2 runner), inside
    ``eagle_config`` (V1, SGLang), and as a count (the width of ``fc`` in vLLM's Llama class). ``head_dim``, the norm flags
    and rope are written out: their defaults differ between the two formats or between transformers versions.
    """
    layer, algorithm = (
        nested.get("transformer_layer_config"),
        nested.get("speculators_config", {}).get("algorithm"),
    )
    if not isinstance(layer, dict) or algorithm != "eagle3":
        raise UserError(
            f"{where}: not a speculators EAGLE-3 config",
            expected="transformer_layer_config and algorithm eagle3",
            found=f"algorithm {algorithm!r}",
            fix="give the folder that 04_train saved",
        )
    if layer.get("model_type", "llama") != "llama":
        raise UserError(
            f"{where}: the flat llama layout cannot hold this draft",
            expected="a llama draft layer",
            found=str(layer["model_type"]),
            fix="serve the nested folder directly",
        )
    needed = [*NORM_FLAGS, "draft_vocab_size", "eagle_aux_hidden_state_layer_ids"]
    missing = [key for key in needed if nested.get(key) is None]
    missing += [
        f"transformer_layer_config.{k}" for k in ("head_dim", "rope_parameters", "rms_norm_eps") if layer.get(k) is None
    ]
    if missing:
        raise UserError(
            f"{where}: keys are missing that must not be guessed",
            expected=", ".join(needed),
            found=f"no {', '.join(missing)}",
            fix="write them into the config with the values used in training",
        )
    ids = nested["eagle_aux_hidden_state_layer_ids"]
    return {
        **layer,
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "torch_dtype": nested.get("dtype") or layer.get("dtype") or "bfloat16",
        "rope_theta": layer["rope_parameters"]["rope_theta"],  # readers older than transformers 5 look here
        "draft_vocab_size": nested["draft_vocab_size"],
        "target_hidden_size": nested.get("target_hidden_size") or layer["hidden_size"],
        **{flag: nested[flag] for flag in NORM_FLAGS},
        "eagle_aux_hidden_state_layer_ids": ids,
        "num_aux_hidden_states": len(ids),
        "tie_word_embeddings": False,
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": ids,
            "use_input_layernorm_in_first_layer": True,
            "use_last_layernorm": True,
            "use_mtp_layernorm": False,
        },
    }


def export(source: Path, target: Path) -> Export:
    """Write the flat form of ``source`` into the new folder ``target``; the nested config stays as ``config_speculators.json``.

    ``layers.0.`` becomes ``midlayer.`` (the original EAGLE-3 name, loaded by vLLM and SGLang alike) for one-layer
    drafts. All tensors are kept, ``t2d`` too, so the step can be undone.
    """
    config = flat_config(read_config(source), show(source / "config.json"))
    tensors = headers.read_folder(source)
    one_layer = config["num_hidden_layers"] == 1
    renamed = {
        n: n.replace("layers.0.", "midlayer.", 1) if one_layer and n.startswith("layers.0.") else n for n in tensors
    }
    target.mkdir(parents=True)
    copy_tensors(tensors, renamed, target / "model.safetensors")
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    shutil.copyfile(source / "config.json", target / "config_speculators.json")
    return Export(renamed, config)


def copy_tensors(tensors: dict[str, headers.Tensor], renamed: dict[str, str], target: Path) -> None:
    """Copy tensors, as bytes, into one safetensors file under their new names. Memory stays at one chunk."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, tensor in tensors.items():
        header[renamed[name]] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.bytes],
        }
        at += tensor.bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # data starts aligned
    scratch = target.with_suffix(".partial")
    with scratch.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            with tensor.file.open("rb") as stream:
                stream.seek(tensor.start)
                left = tensor.bytes
                while left:
                    chunk = stream.read(min(left, _CHUNK_BYTES))
                    if not chunk:
                        raise UserError(f"{show(tensor.file)}: ended inside {tensor.name}", fix="copy the file again")
                    out.write(chunk)
                    left -= len(chunk)
    scratch.replace(target)
