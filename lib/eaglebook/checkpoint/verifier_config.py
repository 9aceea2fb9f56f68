"""What a verifier's ``config.json`` says about it, without transformers: one resolver for every family.

The text part of a multimodal config is found by what it holds, keys by all their spellings; what is not there is listed
as missing. The config is the only file parsed here; `verifier_tensors` finds its three tensors.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from eaglebook.checkpoint import quantisation, strict_json, verifier_tensors
from eaglebook.checkpoint.verifier_tensors import OTHER_PARTS
from eaglebook.errors import UserError
from eaglebook.paths import DATA, show

NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_SPELLINGS = {
    "hidden_size": ("hidden_size", "n_embd", "d_model", "model_dim", "dim"),
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_transformer_layers"),
    "num_attention_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "vocab_size": ("vocab_size", "padded_vocab_size", "n_vocab"),
    # vLLM 0.32 transformers_utils/model_arch_config_convertor.py get_total_num_kv_heads and derive_max_model_len_and_key
    "num_key_value_heads": (
        "num_key_value_heads",
        "n_head_kv",
        "num_kv_heads",
        "n_kv_heads",
        "multi_query_group_num",
        "num_attention_groups",
    ),
    "max_position_embeddings": (
        "max_position_embeddings",
        "n_positions",
        "max_seq_len",
        "seq_length",
        "model_max_length",
        "max_sequence_length",
        "max_seq_length",
        "seq_len",
    ),
    "head_dim": ("head_dim", "attention_head_dim", "hidden_size_per_head"),
    "rms_norm_eps": ("rms_norm_eps", "norm_eps", "layer_norm_epsilon", "layer_norm_eps"),
}
_TEXT_KEYS = ("text_config", "llm_config", "language_config", "text_model", "language_model", "thinker_config", "llm")
# Published configs leave out what equals the default of their class. transformers 5.19, the files
# models/gemma3/configuration_gemma3.py (gemma-3-4b-it states no heads and no vocabulary), gemma2, cohere2.
_CLASS_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "sliding_window_pattern": 6,
    },
    "gemma2": {"sliding_window_pattern": 2},
    "cohere2": {"sliding_window_pattern": 4},
}
# Decoders whose config class ties when config.json is silent (transformers 5.19, the defaults of CONFIG_MAPPING).
_TIED_BY_DEFAULT = frozenset({
    "bloom", "cohere", "cohere2", "cohere2_moe", "cohere_compass_text", "ernie4_5", "ernie4_5_moe", "falcon",
    "falcon_mamba", "gemma", "gemma2", "gemma3", "gemma3_text", "gemma3n", "gemma3n_text", "gemma4", "gemma4_text",
    "gemma4_unified", "gemma4_unified_text", "gpt2", "gpt_bigcode", "gpt_neo", "granite_swa", "jetmoe", "lfm2",
    "lfm2_moe", "mamba", "minicpm3", "mpt", "opt", "recurrent_gemma", "smollm3", "starcoder2", "vaultgemma", "youtu",
    "zamba", "zamba2",
})  # fmt: skip

_FLOATS = frozenset({"BF16", "F16", "F32", "F64"})


@dataclass(frozen=True)
class VerifierFacts:
    """What a draft and vLLM need to know of a verifier. Sizes in elements; None or "" where the files do not say."""

    name: str  # the folder, or the last part of _name_or_path
    model_type: str  # of the text part
    architectures: tuple[str, ...]  # of the top level
    nested_in: str  # where the text config was found: "", "text_config", "thinker_config.text_config"
    hidden_size: int | None
    num_layers: int | None
    num_heads: int | None
    num_kv_heads: int | None  # num_heads when the config is silent (vLLM's rule)
    head_dim: int | None  # stated, else hidden_size / num_heads; v_head_dim for MLA, see `_head_dim`
    vocab_size: int | None
    max_position_embeddings: int | None  # tokens
    rope: dict[str, Any] | None  # as transformers 5 writes rope_parameters, of the full-attention layers
    rms_norm_eps: float | None
    tied: bool
    dtype: str  # "bfloat16"
    quantisation: str  # "" or the method, e.g. "compressed-tensors (pack-quantized, 4 bits)"
    head_quantised: bool | None
    hybrid_attention: str  # "" or which layers are not full attention
    missing: tuple[str, ...]  # of NEEDED
    embed_key: str  # tensor names; "" when only a config was read
    norm_key: str
    head_key: str  # embed_key when tied without a head of its own
    supports_eagle3: bool | None  # vLLM 0.32, by architecture; None for a name its registry does not have
    intermediate_size: int | None = None  # of the dense MLP
    latent_attention: bool = False  # MLA: what the config calls head_dim is not the width of a draft's heads

    @property
    def default_aux_layer_ids(self) -> list[int] | None:
        """What vLLM takes when a draft names no ids; None when the number of layers is not known."""
        return None if self.num_layers is None else default_aux_layer_ids(self.num_layers)


def default_aux_layer_ids(num_layers: int) -> list[int]:
    """``[2, L//2, L-3]``; id k is the stream entering layer k (vLLM 0.32 ``interfaces.py``, speculators 0.9).

    Unusable below seven layers (repeated or negative ids); the numbers are returned as vLLM computes them.
    """
    return [2, num_layers // 2, num_layers - 3]


def read(path: Path) -> VerifierFacts:
    """Facts of a verifier folder, or of a config file alone (any name ending in ``.json``).

    A folder may hold nothing but config.json; shards that an index names may be absent. Raises UserError when the
    config is missing, too large, not UTF-8 or not a JSON object, or when a safetensors file there is damaged.
    """
    path = Path(path)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file() or file.suffix != ".json":
        raise UserError(
            f"{show(path)}: no verifier config",
            expected="a folder with config.json, or a file ending in .json",
            found="a folder without config.json" if path.is_dir() else "a file" if path.exists() else "nothing there",
            fix="give the verifier's folder or its config.json",
        )
    config = _load(file)
    name = _name_on_disk(file)
    if not path.is_dir():
        return from_config(config, name)
    beside = path / "hf_quant_config.json"  # ModelOpt exports keep the quantisation there (vLLM 0.32 reads it too)
    if not quantisation.in_force(config, _text_part(config)[1]) and beside.is_file():
        config = {**config, "quantization_config": _load(beside)}
    return _with_tensors(from_config(config, name), path, _stated_tie(config))


def from_config(config: dict[str, Any], name: str = "") -> VerifierFacts:
    """Facts from a parsed config.json alone. Never raises: a value of a wrong type counts as absent."""
    nested_in, text = _text_part(config)
    model_type = _text(text.get("model_type")) or _text(config.get("model_type"))
    text = {**_CLASS_DEFAULTS.get(model_type, {}), **{key: value for key, value in text.items() if value is not None}}
    sizes = {key: _int(text, key) for key in NEEDED}
    if sizes["vocab_size"] is None:  # LLaVA and others state it at the top level only
        sizes["vocab_size"] = _int(config, "vocab_size")
    if sizes["num_hidden_layers"] is None:
        sizes["num_hidden_layers"] = _pattern_length(text)
    architectures = config.get("architectures")
    architectures = tuple(a for a in architectures if isinstance(a, str)) if isinstance(architectures, list) else ()
    stated = _stated_tie(config)
    tied = model_type in _TIED_BY_DEFAULT if stated is None else stated
    quantised = quantisation.in_force(config, text)
    return VerifierFacts(
        name=name or _own_name(config),
        model_type=model_type,
        architectures=architectures,
        nested_in=nested_in,
        hidden_size=sizes["hidden_size"],
        num_layers=sizes["num_hidden_layers"],
        num_heads=sizes["num_attention_heads"],
        num_kv_heads=_kv_heads(text, sizes["num_attention_heads"]),
        head_dim=_head_dim(text, sizes["hidden_size"], sizes["num_attention_heads"]),
        vocab_size=sizes["vocab_size"],
        max_position_embeddings=_int(text, "max_position_embeddings"),
        rope=_rope(text),
        rms_norm_eps=next((x for k in _SPELLINGS["rms_norm_eps"] if (x := _float(text.get(k))) is not None), None),
        tied=tied,
        dtype=_dtype(text) or _dtype(config),
        quantisation=quantisation.describe(quantised),
        head_quantised=False if tied else quantisation.of_head(quantised),
        hybrid_attention=_hybrid_attention(text),
        missing=tuple(key for key in NEEDED if sizes[key] is None),
        embed_key="",
        norm_key="",
        head_key="",
        supports_eagle3=_supports_eagle3(architectures),
        intermediate_size=_int(text, "intermediate_size"),
        latent_attention=_int(text, "kv_lora_rank") is not None,
    )


# --- the config ---


def _load(file: Path) -> dict[str, Any]:
    def refuse(expected: str, found: str) -> UserError:
        return UserError(
            f"{show(file)}: not a config", expected=expected, found=found, fix="copy or download the file again"
        )

    try:
        size = file.stat().st_size
        data = file.read_bytes() if size <= strict_json.MAX_CONFIG_BYTES else b""
    except OSError as error:
        raise refuse("a file this user can read", str(error.strerror)) from None
    if size > strict_json.MAX_CONFIG_BYTES:
        raise refuse(f"at most {strict_json.MAX_CONFIG_BYTES:,} bytes", f"{size:,} bytes")
    try:
        config = strict_json.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise refuse("UTF-8 text", f"byte {data[error.start]:#04x} at position {error.start}") from None
    except ValueError as error:
        raise refuse("JSON", f"empty file: {file.name}" if not data.strip() else str(error)) from None
    except RecursionError:
        raise refuse("JSON", "thousands of nested brackets") from None
    if not isinstance(config, dict):
        raise refuse("a JSON object", f"a {type(config).__name__}")
    return config


def _name_on_disk(file: Path) -> str:
    """The folder's name; ``org/name`` inside a Hugging Face cache, where the folder is a commit; else the file's."""
    folder = file.parent.resolve()
    if file.name != "config.json":
        return file.stem
    if folder.parent.name == "snapshots":
        return folder.parent.parent.name.removeprefix("models--").replace("--", "/")
    return folder.name


def _text_part(config: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Where the language model is described: (dotted path, dict); ("", config) for a flat config.

    A top level with layers and hidden size wins (Qwen2.5-VL keeps both forms). Otherwise the dict that states most of
    the needed sizes, known names before unknown ones, outer before inner; never a vision, audio or talker part.
    """

    def stated(part: dict[str, Any]) -> int:
        return sum(_int(part, key) is not None for key in NEEDED)

    if _int(config, "hidden_size") is not None and _int(config, "num_hidden_layers") is not None:
        return "", config
    best = (stated(config), 2, "", config)  # sizes stated, how well known the name is, path, dict
    level = [("", config, 2)]
    for _ in range(3):
        inner = []
        for path, part, known in level:
            for key, value in part.items():
                if not isinstance(value, dict) or not isinstance(key, str) or OTHER_PARTS.search(key):
                    continue
                rank = known if key in _TEXT_KEYS else 0
                inner.append((f"{path}.{key}".lstrip("."), value, rank))
        for path, part, known in inner:
            # an unknown name must describe a whole language model: other encoders have layers and a width as well
            if (known or stated(part) == len(NEEDED)) and (stated(part), known) > best[:2]:
                best = (stated(part), known, path, part)
        level = inner
    return best[2], best[3]


def _int(config: dict[str, Any], key: str) -> int | None:
    """The first spelling of `key` that holds a positive whole number (a bool or a per-layer list is none)."""
    for name in _SPELLINGS.get(key, (key,)):
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def _float(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:  # JSON has whole numbers of any length
        return None
    return number if math.isfinite(number) and number > 0 else None


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _own_name(config: dict[str, Any]) -> str:
    return _text(config.get("_name_or_path")).replace("\\", "/").rstrip("/").rpartition("/")[2]


def _dtype(config: dict[str, Any]) -> str:
    return (_text(config.get("dtype")) or _text(config.get("torch_dtype"))).removeprefix("torch.")


def _stated_tie(config: dict[str, Any]) -> bool | None:
    """tie_word_embeddings of the text part, else of the top level, else None (then the config class decides)."""
    for part in (_text_part(config)[1], config):
        if isinstance(value := part.get("tie_word_embeddings"), bool):
            return value
    return None


def _pattern_length(text: dict[str, Any]) -> int | None:
    """Layers of a hybrid model that states them only as a pattern, one entry or character a layer."""
    for key in ("layers_block_type", "layer_types", "hybrid_override_pattern"):
        value = text.get(key)
        if isinstance(value, list | str) and value:
            return len(value)
    return None


def _kv_heads(text: dict[str, Any], heads: int | None) -> int | None:
    """Key/value heads; the attention heads when no key is there (vLLM 0.32 model_arch_config_convertor.py)."""
    stated = any(name in text for name in _SPELLINGS["num_key_value_heads"])
    return _int(text, "num_key_value_heads") if stated else heads


def _head_dim(text: dict[str, Any], hidden: int | None, heads: int | None) -> int | None:
    """Width of an attention head, as a draft would copy it.

    Under MLA (``kv_lora_rank``) queries, cached keys and values have different widths, and ``head_dim`` or
    hidden/heads mean none of them (7168/64 = 112 for Kimi, where the published drafts use 128): there it is
    ``v_head_dim``, the one width that times the heads is what the output projection reads. None when absent.
    """
    if _int(text, "kv_lora_rank") is not None:
        return _int(text, "v_head_dim")
    if stated := _int(text, "head_dim"):
        return stated
    return hidden // heads if hidden and heads and hidden % heads == 0 else None


def _rope(text: dict[str, Any]) -> dict[str, Any] | None:
    """Rotary parameters under the names of transformers 5 (``modeling_rope_utils.py``); None when there are none.

    Of per-layer-type parameters (Gemma 3 and 4) those of full attention: a draft's one layer attends to everything.
    """
    stated, scaling = text.get("rope_parameters"), text.get("rope_scaling")
    rope = dict(stated) if isinstance(stated, dict) else dict(scaling) if isinstance(scaling, dict) else {}
    kinds = [value for value in rope.values() if isinstance(value, dict)]
    if isinstance(rope.get("full_attention"), dict):
        rope = dict(rope["full_attention"])
    elif kinds and not {"rope_type", "type", "rope_theta"} & rope.keys():
        rope = dict(kinds[0])
    theta = next((x for x in (rope.pop("rope_theta", None), text.get("rope_theta")) if _float(x) is not None), None)
    kind = _text(rope.pop("type", "")) or "default"
    kind = _text(rope.pop("rope_type", "")) or kind
    if theta is None and not rope and kind == "default":
        return None
    # "mrope" is the default rotation with sections for images (Qwen2-VL); "su" is Phi-3's old name
    result: dict[str, Any] = {"rope_type": {"mrope": "default", "su": "longrope"}.get(kind, kind)}
    if theta is not None:
        result["rope_theta"] = theta
    for key in ("partial_rotary_factor", "original_max_position_embeddings"):  # transformers 5 moved them into the dict
        if _float(text.get(key)) is not None:
            rope.setdefault(key, text[key])
    return result | rope


# --- attention ---


def _hybrid_attention(text: dict[str, Any]) -> str:
    """Which layers are not full attention, in words; "" when all are. The most explicit statement of a config wins."""
    for key in ("layer_types", "layers_block_type"):
        kinds = text.get(key)
        if isinstance(kinds, list) and kinds and all(isinstance(kind, str) for kind in kinds):
            return _count(kinds, plain={"full_attention", "attention", "mlp", "moe"})
    pattern = text.get("hybrid_override_pattern")  # Nemotron-H
    if isinstance(pattern, str) and pattern:
        names = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
        return _count([names.get(letter, letter) for letter in pattern], plain={"attention", "mlp", "moe"})
    for key, pair in (("attn_type_list", ("linear", "full")), ("hybrid_layer_pattern", ("full", "sliding"))):
        kinds = text.get(key)  # MiniMax: 0 is linear, 1 softmax; MiMo-V2: 0 is full, 1 sliding
        if isinstance(kinds, list) and kinds and all(kind in (0, 1) for kind in kinds):
            return _count([pair[int(kind)] for kind in kinds], plain={"full"})
    linear = text.get("linear_attn_config")  # Kimi-Linear
    if isinstance(linear, dict):
        parts = {"linear": linear.get("kda_layers"), "full": linear.get("full_attn_layers")}
        counts = ", ".join(f"{len(layers)} {kind}" for kind, layers in parts.items() if isinstance(layers, list))
        return f"linear attention ({counts})" if counts else "linear attention"
    for key, other in (("attn_layer_indices", "mamba"), ("full_attn_idxs", "convolution")):  # Bamba, LFM2
        if isinstance(indices := text.get(key), list) and indices:
            return f"{other} layers, attention in {len(indices)}"
    for key, other in (("full_attention_interval", "linear attention"), ("attn_layer_period", "mamba")):
        if (every := _int(text, key) or 0) > 1:  # Qwen3-Next, Jamba
            return f"{other}, full attention in every {every}th layer"
    if chunk := _int(text, "attention_chunk_size"):  # Llama 4
        return f"attention in chunks of {chunk} tokens mixed with full attention"
    return _sliding_window(text)


def _count(kinds: list[str], plain: set[str]) -> str:
    counts = Counter(kinds)
    return ", ".join(f"{n} {kind}" for kind, n in counts.most_common()) if counts.keys() - plain else ""


def _sliding_window(text: dict[str, Any]) -> str:
    """The window when it limits anything: switched on (Qwen), reached by some layer, shorter than the context."""
    window, longest = _int(text, "sliding_window"), _int(text, "max_position_embeddings")
    if not window or text.get("use_sliding_window") is False or (longest and window >= longest):
        return ""
    first, layers = _int(text, "max_window_layers"), _int(text, "num_hidden_layers")
    if text.get("use_sliding_window") is True and first and layers and first >= layers:
        return ""  # Qwen2: only layers from this one on have the window
    every = _int(text, "sliding_window_pattern") or _int(text, "_sliding_window_pattern") or 0
    return f"sliding window of {window} tokens" + (f", full attention in every {every}th layer" if every > 1 else "")


# --- vLLM's registry ---


@cache
def _registry() -> dict[str, bool]:
    lines = (DATA / "vllm_eagle3_verifiers.txt").read_text(encoding="utf-8").splitlines()
    names = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    return {name.removeprefix("-"): not name.startswith("-") for name in names}


def _supports_eagle3(architectures: tuple[str, ...]) -> bool | None:
    """Of the first architecture that the registry has: the one vLLM 0.32 takes (``models/registry.py``)."""
    return next((_registry()[name] for name in architectures if name in _registry()), None)


# --- three tensors ---


def _with_tensors(facts: VerifierFacts, folder: Path, stated_tie: bool | None) -> VerifierFacts:
    """The facts with the names of embedding, norm and head, and what the head's stored dtype says."""
    found = verifier_tensors.find(folder)
    if found is None:
        return facts
    # an unstated tie of a class we do not know: without a head only the embedding can be one
    tied = facts.tied or (stated_tie is None and bool(found.embed) and not found.head)
    key = found.head or (found.embed if tied else "")
    quantised = facts.head_quantised
    if found.head_scales:
        quantised = True
    elif key and (dtype := verifier_tensors.stored_dtype(folder, key, found.entries[key])):
        quantised = dtype not in _FLOATS
    return dataclasses.replace(
        facts, tied=tied, embed_key=found.embed, norm_key=found.norm, head_key=key, head_quantised=quantised
    )
