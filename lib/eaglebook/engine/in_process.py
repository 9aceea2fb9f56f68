"""An engine inside the process that asks: for the two scripts that run in vLLM's own environment beside this file.

Imports vLLM and the standard library only (``import in_process``: a script finds what lies beside it). Written for vLLM 0.32.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # an error arrives as itself


def engine(**options: Any) -> Any:
    """``vllm.LLM``, for a verifier whose class imports numba too (Kimi-K2.5's).

    vLLM's scan for overridden kernels asks every loaded module's ``__dict__`` for its ``get``; llvmlite's library
    object answers any name with a foreign function, and the scan dies over it.
    """
    with contextlib.suppress(ImportError):
        import llvmlite.binding.ffi as llvm

        llvm.lib._fntab["__dict__"] = {}
    from vllm import LLM

    return LLM(**options)
