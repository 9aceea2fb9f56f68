"""The rungs of the load ladder, run in vLLM's own environment: ``python rungs.py '{"rung": 2, "draft": …}'``.

Imports vLLM and the standard library only, so that ``VLLM_PYTHON`` may be any environment. Prints one JSON object as
its last line: ``{"verdict": "pass" | "fail", "seconds": …, "detail": …}``. Written for vLLM 0.32.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # rung 5 in this process: an error arrives as itself

_TORCH_DTYPES = {
    "BF16": "bfloat16",
    "F16": "float16",
    "F32": "float32",
    "I64": "int64",
    "I32": "int32",
    "BOOL": "bool",
}


def rung_1(ask: dict[str, Any]) -> str:
    """Config: does vLLM parse both configs, know the architecture, accept the lengths?"""
    draft = engine_config(ask).speculative_config.draft_model_config
    return f"{draft.hf_config.architectures[0]}, max_model_len {draft.max_model_len}, dtype {str(draft.dtype).split('.')[-1]}"


def rung_2(ask: dict[str, Any]) -> str:
    """Names and shapes: vLLM's own ``load_weights`` on the meta device, no tensor data read."""
    import torch

    stored = _stored(Path(ask["draft"]))
    with _built(ask, device="meta") as (model, _, _draft):
        model.load_weights(
            (name, torch.empty(shape, dtype=getattr(torch, _TORCH_DTYPES[dtype]), device="meta"))
            for name, (shape, dtype) in stored.items()
        )
    return f"{len(stored)} tensors taken by {type(model).__name__}"


def rung_3(ask: dict[str, Any]) -> str:
    """Completeness: fill every parameter with a number no weight has, load the real file, list what still holds it.

    vLLM never does: ``load_weights`` of the EAGLE-3 classes returns nothing, so its own check for missing tensors is off.
    """
    with _built(ask, device="cpu") as (model, _, draft):
        for parameter in model.parameters():
            parameter.data.fill_(_no_weight(parameter.dtype))
        model.load_weights(_weights(Path(ask["draft"])))
        untouched: list[str] = []
        partly: list[str] = []
        for name, parameter in model.named_parameters():
            left = int((parameter.data == _no_weight(parameter.dtype)).sum())
            if left:
                (untouched if left == parameter.numel() else partly).append(name)
    layers_after_the_first = [n for n in untouched if n.endswith("hidden_norm.weight") and "layers.0." not in n]
    shared = {"model.embed_tokens.weight"}
    if draft.hf_config.draft_vocab_size == ask["verifier_vocab"]:
        shared.add("lm_head.weight")
    missing = [n for n in untouched if n not in shared and n not in layers_after_the_first]
    if missing or partly:
        raise RuntimeError("; ".join(filter(None, [
            f"not filled: {', '.join(missing)}" if missing else "", f"filled in part: {', '.join(partly)}" if partly else "",
        ])))  # fmt: skip
    taken = [n for n in untouched if n in shared]
    return f"every parameter is filled from the file{f'; the verifier gives {chr(44).join(taken)}' if taken else ''}"


def rung_4(ask: dict[str, Any]) -> str:
    """Arithmetic: the loaded draft on random states. Widths, the vocabulary map, NaN; no verifier, no cache."""
    import torch
    from vllm.config import LoadConfig
    from vllm.forward_context import set_forward_context
    from vllm.model_executor.model_loader import get_model

    with _world(ask) as config:
        _without_accelerator()
        draft = config.speculative_config.draft_model_config
        model: Any = get_model(
            vllm_config=config, model_config=draft, load_config=LoadConfig()
        )  # not the verifier's "dummy"
        inner, tokens = model.model, 4
        width = getattr(inner, "fc_input_size", None) or inner.fc.weight.shape[1]
        captured = len(set(ask["aux_ids"])) * ask["verifier_hidden"] if ask["aux_ids"] else width
        _attend_to_oneself(model)
        with torch.inference_mode(), set_forward_context(None, config, num_tokens=tokens):
            states = torch.randn(tokens, captured, dtype=draft.dtype)
            if captured != width:
                raise RuntimeError(
                    f"the verifier gives {captured} numbers a token ({ask['aux_ids']}), fc takes {width}"
                )
            fused = model.combine_hidden_states(states)
            embed = inner.embed_tokens.weight
            if not getattr(model, "has_own_embed_tokens", True):
                embed.data.normal_()  # the verifier's is taken when serving
            out, again = model(torch.arange(tokens), torch.arange(tokens), fused)
            logits = model.compute_logits(out)
        finite = torch.isfinite(logits).sum(dim=-1).tolist()
        for name, value in (("fused state", fused), ("output", out), ("fed-back state", again)):
            if not torch.isfinite(value).all():
                raise RuntimeError(f"{name} is not finite")
        expected = draft.hf_config.draft_vocab_size
        if set(finite) != {expected}:
            raise RuntimeError(
                f"{finite[0]} logits are finite, the draft has {expected} tokens: targets repeat, or NaN"
            )
    return f"{tokens} random states through {type(model).__name__}: {expected} finite logits each"


def rung_5(ask: dict[str, Any]) -> str:
    """Engine: real draft weights beside a dummy verifier cut to a few layers, one greedy request."""
    import in_process
    from vllm import SamplingParams

    llm = in_process.engine(
        model=ask["verifier"],
        trust_remote_code=ask["trust_remote_code"],
        skip_tokenizer_init=True,
        load_format="dummy",
        hf_overrides=_cut(ask["layers"], ask["aux_ids"]),
        dtype=ask["dtype"],
        enforce_eager=True,
        max_model_len=ask["max_model_len"],
        max_num_seqs=4,
        max_num_batched_tokens=max(256, ask["max_model_len"]),
        kv_cache_memory_bytes=64 << 20,
        disable_log_stats=False,
        speculative_config={
            "method": "eagle3",
            "model": ask["draft"],
            "num_speculative_tokens": ask["num_speculative_tokens"],
            "draft_load_config": {"load_format": "auto"},  # else the draft would be dummy too
        },
    )
    sampling = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
    answer = llm.generate([{"prompt_token_ids": [1, 2, 3, 4, 5, 6, 7, 8]}], sampling, use_tqdm=False)[0]
    drafts = sum(m.value for m in llm.get_metrics() if m.name == "vllm:spec_decode_num_drafts")
    if not drafts:
        raise RuntimeError("the engine answered but proposed no draft")
    return f"{len(answer.outputs[0].token_ids)} tokens from a {ask['layers']}-layer dummy verifier, {drafts:.0f} drafts proposed"


def probe() -> dict[str, Any]:
    """Ask the installed version which arguments ``ModelConfig`` takes, before guessing: ``task="draft"`` is such a guess."""
    import inspect

    from vllm.config import ModelConfig

    accepted = inspect.signature(ModelConfig).parameters
    try:
        arguments: dict[str, Any] = {"model": "x", "task": "draft"}
        ModelConfig(**arguments)
        refusal = ""
    except Exception as error:
        refusal = " ".join(str(error).split())[:200]
    return {
        "accepts": {name: name in accepted for name in ("task", "runner", "convert", "hf_overrides")},
        "refusal": refusal,
    }


@contextlib.contextmanager
def _world(ask: dict[str, Any]) -> Iterator[Any]:
    """A configuration of the engine, and a world of one process for its layers."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment

    config = engine_config(ask)
    with set_current_vllm_config(config), tempfile.TemporaryDirectory() as folder:
        init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        yield config


@contextlib.contextmanager
def _built(ask: dict[str, Any], device: str) -> Iterator[tuple[Any, Any, Any]]:
    """The draft's model as vLLM builds it, not loaded; its configuration; the draft's."""
    import torch
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    with _world(ask) as config:
        draft = config.speculative_config.draft_model_config
        with set_default_torch_dtype(draft.dtype), torch.device(device):
            model = initialize_model(vllm_config=config, model_config=draft)
        with torch.device(device) if device == "meta" else contextlib.nullcontext():
            yield model, config, draft


def _attend_to_oneself(model: Any) -> None:
    """Give every attention layer the answer of a token that sees itself only, which is its own value.

    Without a cache and its metadata vLLM's attention hands back memory it never wrote (a warm-up is meant to look at no number).
    """
    for module in model.modules():
        if hasattr(module, "impl") and hasattr(module, "num_kv_heads") and hasattr(module, "head_size"):
            module.forward = _own_value(module.num_heads, module.num_kv_heads, module.head_size)


def _own_value(heads: int, kv_heads: int, head_size: int) -> Any:
    def forward(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> Any:
        own = value.view(-1, kv_heads, head_size).repeat_interleave(heads // kv_heads, dim=1)
        return own.reshape(query.shape) + 0 * (query + key.sum())  # what is not finite stays so

    return forward


def _no_weight(dtype: Any) -> Any:
    """A number that no weight and no vocabulary map holds, exact in its type."""
    import torch

    return torch.finfo(dtype).max if dtype.is_floating_point else torch.iinfo(dtype).min + 7


def _without_accelerator() -> None:
    """``get_model`` outside a worker asks for an accelerator that a CPU build does not have (vLLM 0.32)."""
    import torch

    if not torch.accelerator.is_available():
        from vllm.v1.worker.cpu_model_runner import _set_torch_accelerator_to_noop

        _set_torch_accelerator_to_noop()


def _weights(folder: Path) -> Iterator[tuple[str, Any]]:
    from safetensors import safe_open

    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                yield name, tensors.get_tensor(name)


def engine_config(ask: dict[str, Any]) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(
        model=ask["verifier"],
        trust_remote_code=ask["trust_remote_code"],
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype=ask["dtype"],
        max_model_len=ask["max_model_len"],
        enforce_eager=True,
        speculative_config={
            "method": "eagle3",
            "model": ask["draft"],
            "num_speculative_tokens": ask["num_speculative_tokens"],
        },
    ).create_engine_config()


def _cut(layers: int, aux_ids: list[int]) -> Any:
    """A config override that keeps ``layers`` layers of the verifier and moves the aux ids into them.

    A callable is applied to the draft's config too (vLLM 0.32 ``compose_draft_hf_overrides``): told apart by layer count.
    """
    inside = list(range(1, len(aux_ids) + 1))

    def cut(config: Any) -> Any:
        text = getattr(config, "text_config", config)
        if getattr(text, "num_hidden_layers", 0) > layers:
            text.num_hidden_layers = layers
        elif getattr(config, "eagle_aux_hidden_state_layer_ids", None):
            config.eagle_aux_hidden_state_layer_ids = inside
        return config

    return cut


def _stored(folder: Path) -> dict[str, tuple[list[int], str]]:
    found: dict[str, tuple[list[int], str]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        header.pop("__metadata__", None)
        found |= {name: (entry["shape"], entry["dtype"]) for name, entry in header.items()}
    return found


def main(ask: dict[str, Any]) -> dict[str, Any]:
    import vllm  # noqa: F401  (its import takes seconds; the rung's own time is what is compared)

    if ask["rung"] == "probe":
        return probe()
    began = time.perf_counter()
    try:
        detail, verdict = {1: rung_1, 2: rung_2, 3: rung_3, 4: rung_4, 5: rung_5}[ask["rung"]](ask), "pass"
    except Exception as error:
        detail, verdict = f"{type(error).__name__}: {error}", "fail"
    return {"verdict": verdict, "seconds": time.perf_counter() - began, "detail": detail}


if __name__ == "__main__":
    result = main(json.loads(sys.argv[1]))
    sys.stdout.flush()
    print("\n" + json.dumps(result), flush=True)
    os._exit(0)  # in-process engines leave threads that would wait
