"""What a ``config.json`` says about quantised weights: in words, and whether the head is one of them."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from typing import Any


def in_force(config: dict[str, Any], text: dict[str, Any]) -> dict[str, Any]:
    """The block in force: top level before text part, as vLLM 0.32 model_arch_config_convertor.py; {} when none."""
    for part in (config, text):
        for key in ("quantization_config", "compression_config"):
            if isinstance(block := part.get(key), dict) and block:
                return block
    return {}


def describe(block: dict[str, Any]) -> str:
    """E.g. ``compressed-tensors (pack-quantized, 4 bits)``, ``awq (4 bits)``, ``modelopt (NVFP4)``, ``fp8``."""
    inner = block.get("quantization")
    inner = inner if isinstance(inner, dict) else {}
    details = [_text(block.get("format")), _text(block.get("quant_algo")) or _text(inner.get("quant_algo"))]
    weights = [group.get("weights") for group in _groups(block)]
    bits = {n for w in weights if isinstance(w, dict) and (n := _bits(w, "num_bits"))}
    bits |= {n for key in ("bits", "w_bit") if (n := _bits(block, key))}
    bits |= {n for key, n in (("load_in_4bit", 4), ("load_in_8bit", 8)) if block.get(key) is True}
    details.append(f"{'/'.join(map(str, sorted(bits)))} bits" if bits else "")
    shown = ", ".join(d for d in details if d)
    return f"{_method(block)} ({shown})" if shown else _method(block)


def of_head(block: dict[str, Any]) -> bool | None:
    """Whether the weight of a head of its own is quantised, as far as the config says. None: only the tensor's dtype can tell.

    vLLM 0.32 ``layers/quantization``: compressed-tensors and modelopt treat the head as one more Linear unless it is
    ignored, AWQ and GPTQ only with ``lm_head: true``. fp8 has no rule for a head, so its silence proves nothing.
    """
    inner = block.get("quantization")
    lists = [part.get(key) for part in (block, inner if isinstance(inner, dict) else {})
             for key in ("ignore", "ignored_layers", "modules_to_not_convert", "exclude_modules", "exclude",
                         "llm_int8_skip_modules")]  # fmt: skip
    if not block or any(_names_head(p) for names in lists if isinstance(names, list) for p in names):
        return False
    method = _method(block)
    if method == "compressed-tensors":
        targets = [t for group in _groups(block) if isinstance(group.get("targets"), list) for t in group["targets"]]
        return any(target == "Linear" or _names_head(target) for target in targets)
    if method.startswith(("awq", "gptq")):
        return block.get("lm_head") is True
    if method.startswith("modelopt"):
        return True
    return None


def _names_head(pattern: Any) -> bool:
    """Whether an entry of an ignore or target list (a name, ``re:`` pattern or glob) covers the head."""
    if not isinstance(pattern, str) or len(pattern) > 500:
        return False
    names = ("lm_head", "language_model.lm_head", "model.language_model.lm_head", "thinker.lm_head")
    if pattern.startswith("re:"):
        try:
            return any(re.match(pattern[3:], name) for name in names)
        except (re.error, OverflowError, RecursionError):
            return False
    return pattern.rpartition(".")[2] == "lm_head" or any(fnmatchcase(name, pattern) for name in names)


def _groups(block: dict[str, Any]) -> list[dict[str, Any]]:
    groups = block.get("config_groups")
    return [g for g in groups.values() if isinstance(g, dict)] if isinstance(groups, dict) else []


def _method(block: dict[str, Any]) -> str:
    method = _text(block.get("quant_method")).lower().replace("_", "-")
    producer = block.get("producer")
    named = _text(producer.get("name")) if isinstance(producer, dict) else ""
    return method or named or ("unknown method" if block else "")


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _bits(block: dict[str, Any], key: str) -> int:
    value = block.get(key)
    return value if type(value) is int and value > 0 else 0
