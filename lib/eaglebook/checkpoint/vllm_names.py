"""The name vLLM gives to each tensor of an EAGLE-3 draft.

Rules of ``model_executor/models/llama_eagle3.py`` (vLLM 0.32, the same in ``qwen3_eagle3.py``), in their order.
"""

from __future__ import annotations

import re

# Parameters that vLLM keeps fused: several stored tensors fill slices of one.
_FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}


def destination(name: str) -> str:
    """Where vLLM loads the tensor ``name``, or "" when it is skipped in silence."""
    if "t2d" in name:
        return ""
    if "d2t" in name:
        return name.replace("d2t", "draft_id_to_target_id")
    if "lm_head" in name:
        return name
    inner = name.replace("midlayer.", "layers.0.", 1)
    return "model." + re.sub(r"\.(q_proj|k_proj|v_proj|gate_proj|up_proj)\.", lambda m: f".{_FUSED[m[1]]}.", inner)
