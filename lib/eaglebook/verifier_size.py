"""How many bytes a verifier's weights are: from its files, its index, or from nothing but its config."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from eaglebook import transformers_folder
from eaglebook.errors import UserError

_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def parameters_and_bytes(path: Path) -> tuple[int, int, str]:
    """Parameters, bytes, and where they are from. ``path``: a folder or a config file alone.

    Files that are there are counted; else the index says its sum; else transformers builds the model without memory
    and the quantisation in its config is applied to what it would quantise.
    """
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else []
    index = path / "model.safetensors.index.json"
    stated = json.loads(index.read_text())["metadata"].get("total_size", 0) if index.is_file() else 0
    on_disk = sum(file.stat().st_size for file in files)
    if on_disk and on_disk >= 0.99 * stated:
        return _count(path)[0], on_disk, "its files"
    if stated:
        return _count(path)[0], int(stated), index.name
    return (*_count(path), "its config")


def _count(path: Path) -> tuple[int, int]:
    import torch
    from transformers import AutoConfig, AutoModel
    from transformers.utils import logging

    file = path / "config.json" if path.is_dir() else path
    raw = json.loads(file.read_text(encoding="utf-8"))
    bits, ignored = _quantisation(
        raw.get("text_config", raw).get("quantization_config") or raw.get("quantization_config") or {}
    )
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        known = {k: v for k, v in raw.items() if k not in {"quantization_config", "auto_map"}}
        if isinstance(known.get("text_config"), dict):
            known["text_config"] = {k: v for k, v in known["text_config"].items() if k != "quantization_config"}
        config = AutoConfig.for_model(transformers_folder.known_as(known.pop("model_type")), **known)
        with torch.device("meta"):
            model = AutoModel.from_config(config)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{file.name}: the model cannot be counted from its config",
            expected="a model type that transformers knows",
            found=f"{type(error).__name__}: {str(error)[:150]}",
            fix="put the verifier's model.safetensors.index.json beside its config.json",
        ) from None
    finally:
        logging.set_verbosity(level)
    text = config.get_text_config()
    width = _BYTES.get(str(getattr(text, "dtype", None) or "bfloat16").removeprefix("torch."), 2)
    head = 0 if getattr(text, "tie_word_embeddings", False) else text.vocab_size * text.hidden_size
    parameters, size = head, float(head * width)
    for name, weight in model.named_parameters():
        parameters += weight.numel()
        packed = bits and weight.dim() > 1 and not _is_ignored(name, ignored)
        size += weight.numel() * (bits if packed else width)
    return parameters, int(size)


def _quantisation(stated: dict[str, Any]) -> tuple[float, list[str]]:
    """Bytes of a quantised number, its share of the scales included (0 for none), and the modules left out."""
    for group in (stated.get("config_groups") or {}).values():
        weights = group.get("weights") or {}
        scale = 2 / weights["group_size"] if weights.get("group_size") else 0
        return weights.get("num_bits", 8) / 8 + scale, list(stated.get("ignore") or [])
    if stated.get("quant_method") == "fp8":
        return 1.0, list(stated.get("modules_to_not_convert") or [])
    if stated.get("quant_method") == "mxfp4":
        return 4.25 / 8, list(stated.get("modules_to_not_convert") or [])
    return 0.0, []


def _is_ignored(name: str, ignored: list[str]) -> bool:
    """Whether a module is left out of the quantisation, by name or ``re:`` pattern. Embeddings, routers and what sees always are.

    A mixture's experts are one tensor in transformers and a module each in the files, where the patterns were written.
    """
    if re.search(r"embed|norm|visi|mm_projector|\.gate\.|router", name):
        return True
    if ".experts." in name:
        name = re.sub(r"\.experts\.", ".experts.0.", name)
    module = name.removesuffix(".weight")
    return any(
        re.match(pattern[3:], module) if pattern.startswith("re:") else module.endswith(pattern) for pattern in ignored
    )
