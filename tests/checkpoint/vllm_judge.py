"""Load drafts with the real loader of the installed vLLM, many in one process, and say where every value went.

``python vllm_judge.py VERIFIER_DIR`` reads a JSON list of draft folders from stdin. Every stored tensor is expected to be
filled with one number of its own; a folder without weights is only built. Prints one JSON object: folder ->
``{"stage", "error", "found": {parameter: {number: count}}}``.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "TRANSFORMERS_VERBOSITY": "error"}
SENTINEL = 250


def judge(folder: str, verifier: str) -> dict[str, object]:
    import torch
    from eaglebook.engine.rungs import engine_config
    from safetensors import safe_open
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    ask = {"verifier": verifier, "draft": folder, "trust_remote_code": False, "dtype": "bfloat16", "max_model_len": 256,
           "num_speculative_tokens": 3}  # fmt: skip
    stage = "config"
    try:
        config = engine_config(ask)
        draft = config.speculative_config.draft_model_config
        stage = "load"
        if not (Path(folder) / "model.safetensors").exists():  # a config alone: its class is built without memory
            with set_current_vllm_config(config), set_default_torch_dtype(draft.dtype), torch.device("meta"):
                initialize_model(vllm_config=config, model_config=draft)
            return {"stage": "", "error": "", "found": {}}
        with set_current_vllm_config(config):
            with set_default_torch_dtype(draft.dtype):
                model = initialize_model(vllm_config=config, model_config=draft)
            for parameter in model.parameters():
                parameter.data.fill_(SENTINEL)
            with safe_open(Path(folder) / "model.safetensors", "pt") as file:
                model.load_weights((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118
        found = {
            name: {str(int(value)): n for value, n in Counter(parameter.data.flatten().tolist()).items()}
            for name, parameter in model.named_parameters()
        }
        return {"stage": "", "error": "", "found": found}
    except Exception as error:
        return {"stage": stage, "error": f"{type(error).__name__}: {error}", "found": {}}
    finally:
        torch.set_default_dtype(torch.float32)


def main() -> None:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment

    folders = json.load(sys.stdin)
    with tempfile.TemporaryDirectory() as scratch, set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{scratch}/rendezvous", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
    print("\n" + json.dumps({folder: judge(folder, sys.argv[1]) for folder in folders}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
