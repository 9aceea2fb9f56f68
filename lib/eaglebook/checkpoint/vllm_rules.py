"""vLLM's rules about EAGLE-3 drafts as data: what each version knows. No vLLM is imported.

Read in the sources of vLLM 0.16, 0.19, 0.21, 0.22, 0.25, 0.28, 0.30, 0.32 and 0.33; a version in between is taken to know
what the last one read before it knows. Predictions for 0.32 are held against the real loader by tests/checkpoint.
"""

from __future__ import annotations

import re
from functools import cache

from eaglebook.errors import UserError
from eaglebook.paths import DATA

Version = tuple[int, int]
OLDEST, NEWEST, REFERENCE = (0, 16), (0, 33), (0, 32)

LLAMA, QWEN3, DEEPSEEK = "Eagle3LlamaForCausalLM", "Eagle3Qwen3ForCausalLM", "Eagle3DeepseekV2ForCausalLM"
# Architecture name (after rewriting) -> class, first version that registers it (model_executor/models/registry.py).
ARCHITECTURES: dict[str, tuple[str, Version]] = {
    "LlamaForCausalLMEagle3": (LLAMA, (0, 16)),
    "Eagle3LlamaForCausalLM": (LLAMA, (0, 16)),
    "Eagle3Qwen2_5vlForCausalLM": (LLAMA, (0, 16)),
    "Eagle3Qwen3vlForCausalLM": (LLAMA, (0, 16)),
    "Eagle3MiniMaxM2ForCausalLM": (LLAMA, (0, 21)),
    "PeagleLlamaForCausalLM": (LLAMA, (0, 22)),
    "PEagleDraftModel": (LLAMA, (0, 22)),
    "Eagle3DeepseekV2ForCausalLM": (DEEPSEEK, (0, 19)),
    "Eagle3DeepseekV3ForCausalLM": (DEEPSEEK, (0, 19)),
    "Eagle3Qwen3ForCausalLM": (QWEN3, (0, 25)),
    "PeagleQwen3ForCausalLM": (QWEN3, (0, 25)),
}

# What a version must be to honour something; earlier ones ignore it in silence unless the text says otherwise.
NORM_BEFORE_FC, FC_NORM, NORM_OUTPUT, AUX_COUNT = (0, 19), (0, 22), (0, 22), (0, 22)
NESTED_AUX_IDS = (0, 22)  # ids only in eagle_config: read by the V1 runner from here on, never by V2
LAST_LAYER_ID = (0, 19)  # id == number of layers; 0.16 stops one short
SPECULATORS_QWEN3 = (0, 25)
D2T_FORBIDDEN_WHEN_FULL = (0, 30)
STRAY_BIAS_DROPPED = (0, 25)  # a KeyError before
V2_BY_DEFAULT = (0, 30)  # on a GPU
CPU_SERVES = (0, 22)
ROPE_TABLE_FOLLOWS_VERIFIER = (0, 28)
ROPE_TABLE_ONLY_SAFE_TYPES = (0, 33)
TARGET_WHITELIST_UNTIL = (0, 16)
TARGET_WHITELIST = ("llama", "qwen", "minicpm", "gpt_oss", "hunyuan_vl", "hunyuan_v1_dense", "afmoe")
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
SPECULATORS_TYPES = ("eagle3", "peagle", "dflash", "dflash2", "dspark")
# Keys without which transformers 5.19 refuses a rope type (modeling_rope_utils.py); original_max_position_embeddings is filled in.
ROPE_NEEDS = {
    "linear": ("factor",), "dynamic": ("factor",), "yarn": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}  # fmt: skip
STRETCHING_ROPE = ("dynamic", "longrope", "su")  # frequencies depend on max_position_embeddings


def parse_version(text: str) -> Version:
    """``"0.32"`` or ``"0.32.1"`` as (0, 32). Raises UserError outside 0.16 … 0.33."""
    match = re.fullmatch(r"v?0\.(\d{1,3})(\.\S*)?", text)
    version = (0, int(match[1])) if match else (0, 0)
    if not OLDEST <= version <= NEWEST:
        raise UserError(
            f"vLLM {text!r} is not known here",
            expected=f"{show(OLDEST)} to {show(NEWEST)}",
            found=text,
            fix=f"--vllm {show(REFERENCE)}",
        )
    return version


def show(version: Version) -> str:
    return f"{version[0]}.{version[1]}"


@cache
def model_types() -> frozenset[str]:
    """``model_type`` values that some config class of transformers 5.19 or vLLM 0.32 claims."""
    lines = (DATA / "model_types.txt").read_text(encoding="utf-8").splitlines()
    return frozenset(line for line in lines if line and not line.startswith("#"))


def rewritten(architecture: str) -> str:
    """The name the registry is asked for (``transformers_utils/configs/eagle.py``, method ``eagle3``)."""
    is_eagle3 = architecture.startswith("Eagle3") or architecture.endswith("Eagle3")
    return architecture if is_eagle3 else f"Eagle3{architecture}"
