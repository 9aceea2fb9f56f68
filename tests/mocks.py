"""Tiny random verifiers of the families a draft is trained for: the real config classes, names and layouts, small sizes.

    .venv/bin/python tests/mocks.py kimi_k25 FOLDER

with a tokenizer of its own (learned from the shipped prompts) and a chat template in Kimi's manner.
Norms and router biases are moved off their initial values, so that one which is lost or not loaded shows.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

LAYERS, HIDDEN, VOCAB = 8, 128, 1024
_SHARED = dict(
    hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=4, vocab_size=VOCAB, max_position_embeddings=4096,
    bos_token_id=1, eos_token_id=2, pad_token_id=0, dtype="float32",
)  # fmt: skip
_DENSE = dict(_SHARED, num_key_value_heads=2, head_dim=32, intermediate_size=256)
# All experts are chosen for every token: the code of a mixture, without a router whose near-ties make two engines differ.
_MOE = dict(num_experts_per_tok=4, moe_intermediate_size=64)
_MLA = dict(
    _SHARED, **_MOE, num_key_value_heads=4, intermediate_size=256, n_routed_experts=4, n_shared_experts=1,
    first_k_dense_replace=1, n_group=1, topk_group=1, q_lora_rank=64, kv_lora_rank=512, qk_rope_head_dim=64,
    qk_nope_head_dim=32, v_head_dim=32, routed_scaling_factor=1.0, tie_word_embeddings=False, rope_theta=50000.0,
    rope_scaling={
        "type": "yarn", "factor": 64.0, "original_max_position_embeddings": 64, "beta_fast": 32.0, "beta_slow": 1.0,
        "mscale": 1.0, "mscale_all_dim": 1.0,
    },
)  # fmt: skip


def build(family: str, folder: Path, tokenizer: PreTrainedTokenizerBase | None = None, *, scale: float = 0.3) -> Path:
    """Write a verifier of ``family`` (a key of `FAMILIES`) with a tokenizer, if one is given. Returns its folder.

    ``scale`` below 1 shrinks what layers add: the next token then hangs mostly on the current one, and a draft can learn it.
    """
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    config = FAMILIES[family]()
    model = _model_class(config)(config).float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if re.search(r"norm\d?\.weight$", name):
                weight.uniform_(0.5, 1.5)
            elif re.search(r"(o_proj|down_proj)\.?(weight)?$", name):
                weight.mul_(scale)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.01)
        head = model.get_output_embeddings().weight
        head.mul_(10)  # a choice between tokens, not a near-tie of all of them
        head[model.config.get_text_config().eos_token_id] *= 2  # else no answer ever ends
    model.save_pretrained(folder, max_shard_size="8MB")
    if family in _AFTER:
        _AFTER[family](folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return folder


def tokenizer() -> PreTrainedTokenizerBase:
    """A byte-level tokenizer of `VOCAB` ids at most, with the control tokens of the mocks' configs."""
    from eaglebook import prompts
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    learned = ByteLevelBPETokenizer()
    special = ["<pad>", "<s>", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>"]
    learned.train_from_iterator(
        (p.text for p in prompts.load("shipped")), VOCAB, special_tokens=special, show_progress=False
    )
    made = PreTrainedTokenizerFast(
        tokenizer_object=learned._tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="<|im_end|>",
        extra_special_tokens=special[3:],
    )  # fmt: skip
    made.chat_template = (
        "{% for m in messages %}<|im_{{ m.role }}|>{{ m.role }}<|im_middle|>{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"
    )
    return made


def _llama() -> Any:
    from transformers import LlamaConfig

    rope = {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    }  # fmt: skip
    return LlamaConfig(**_DENSE, rope_parameters=rope, tie_word_embeddings=False)


def _qwen3() -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(**_DENSE, tie_word_embeddings=False)


def _qwen3_moe() -> Any:
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(**_DENSE, **_MOE, num_experts=4, tie_word_embeddings=False)


def _gpt_oss() -> Any:
    from transformers import GptOssConfig

    return GptOssConfig(**_DENSE, num_local_experts=4, num_experts_per_tok=4, sliding_window=16)  # yarn by default


def _gemma3() -> Any:
    from transformers import Gemma3TextConfig

    return Gemma3TextConfig(**_DENSE, sliding_window=16, tie_word_embeddings=True, query_pre_attn_scalar=32)


def _gemma4() -> Any:
    from transformers import Gemma4TextConfig

    kinds = (["sliding_attention"] * 3 + ["full_attention"]) * (LAYERS // 4)
    return Gemma4TextConfig(
        **_DENSE, layer_types=kinds, sliding_window=16, tie_word_embeddings=True, global_head_dim=32,
        vocab_size_per_layer_input=VOCAB, hidden_size_per_layer_input=16,
    )  # fmt: skip


def _deepseek_v3() -> Any:
    from transformers import DeepseekV3Config

    return DeepseekV3Config(**_MLA)


def _kimi_k25() -> Any:
    from transformers import Kimi_K25Config

    vision = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64)
    text = dict(_MLA, model_type="kimi_k2")
    return Kimi_K25Config(
        text_config=text, vision_config=vision, projection_hidden_size=32, tie_word_embeddings=False, dtype="float32"
    )


FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": _llama,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "gpt_oss": _gpt_oss,
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "deepseek_v3": _deepseek_v3,
    "kimi_k2": _deepseek_v3,
    "kimi_k25": _kimi_k25,
}


def _model_class(config: Any) -> Any:
    import transformers

    causal = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    both = transformers.models.auto.modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    return getattr(transformers, causal.get(config.model_type) or both[config.model_type])


# transformers 5.19 leaves these keys of the published configs out when it saves; vLLM looks for the router's bias by them.
_ROUTER = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}


def _as_deepseek_v3(folder: Path) -> None:
    _edit_config(folder, **_ROUTER)


def _as_kimi_k2(folder: Path) -> None:
    _edit_config(folder, model_type="kimi_k2", **_ROUTER)


def _as_published_kimi(folder: Path) -> None:
    """transformers 5.19 writes names that only transformers reads back; the published files have these."""
    from safetensors.torch import load_file, save_file

    index_file = folder / "model.safetensors.index.json"
    files = sorted(folder.glob("*.safetensors"))
    where = {}
    for number, file in enumerate(files, 1):
        name = f"model-{number:05d}-of-{len(files):06d}.safetensors"
        tensors = {_published_name(key): tensor for key, tensor in load_file(file).items()}
        file.unlink()
        save_file(tensors, folder / name, metadata={"format": "pt"})
        where |= dict.fromkeys(tensors, name)
    index_file.write_text(json.dumps({"metadata": {}, "weight_map": where}, indent=1))
    config = json.loads((folder / "config.json").read_text())
    text = dict(config["text_config"], model_type="kimi_k2", architectures=["DeepseekV3ForCausalLM"], **_ROUTER)
    # vLLM 0.32 reads the published name of the image token (v1/spec_decode/llm_base_proposer.py), not the one transformers writes
    _edit_config(
        folder, architectures=["KimiK25ForConditionalGeneration"], text_config=text, media_placeholder_token_id=163605
    )
    images = {
        "patch_size": 14, "merge_kernel_size": 2, "in_patch_limit": 16384, "patch_limit_on_one_side": 512,
        "in_patch_limit_each_frame": 4096, "in_patch_limit_video": 65536, "fixed_output_tokens": None,
        "temporal_merge_kernel_size": 4, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
    }  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps({"media_proc_cfg": images}))


def _published_name(key: str) -> str:
    key = key.replace("language_model.model.blocks.", "language_model.model.layers.")
    key = key.replace("vision_tower.encoder.patch_embed.", "vision_tower.patch_embed.")
    return re.sub(r"^model\.mm_projector", "mm_projector", key)


def pack_experts(folder: Path, packed: Path) -> None:
    """Write ``folder`` (a `kimi_k25`) again as ``packed``: its routed experts in INT4 as published, those of ``folder`` rounded.

    Eight numbers in an int32, groups of 32 with a bf16 scale, zero at 8. Both folders then hold the same model.
    """
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(folder, packed)
    where = {}
    for file in sorted(folder.glob("*.safetensors")):
        rounded, stored = load_file(file), {}
        for name, weight in rounded.items():
            if ".mlp.experts." not in name:
                stored[name] = weight
                continue
            groups = weight.unflatten(1, (-1, 32))
            scale = (groups.abs().amax(-1, keepdim=True) / 7).bfloat16()
            whole = (groups / scale.float()).round().clamp(-8, 7)
            rounded[name] = (whole * scale.float()).flatten(1)
            shifts = torch.arange(0, 32, 4)
            nibbles = (whole.flatten(1).long() + 8).unflatten(1, (-1, 8)) << shifts
            stem = name.removesuffix(".weight")
            stored[f"{stem}.weight_packed"] = nibbles.sum(-1).to(torch.int32)
            stored[f"{stem}.weight_scale"] = scale.squeeze(-1)
            stored[f"{stem}.weight_shape"] = torch.tensor(weight.shape)
        save_file(rounded, file, metadata={"format": "pt"})
        save_file(stored, packed / file.name, metadata={"format": "pt"})
        where |= dict.fromkeys(stored, file.name)
    (packed / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    text = json.loads((packed / "config.json").read_text())["text_config"]
    text["quantization_config"] = {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
        "config_groups": {"group_0": {"weights": weights, "targets": ["Linear"]}},
        "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
    }  # fmt: skip
    _edit_config(packed, text_config=text)


def _edit_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes, indent=1))


_AFTER = {"deepseek_v3": _as_deepseek_v3, "kimi_k2": _as_kimi_k2, "kimi_k25": _as_published_kimi}

if __name__ == "__main__":
    target = Path(sys.argv[2])
    shutil.rmtree(target, ignore_errors=True)
    print(build(sys.argv[1], target, tokenizer()))
