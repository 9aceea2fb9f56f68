"""An engine inside the process that asks: for the two scripts beside this file that run in vLLM's own environment.

Imports vLLM and the standard library only (``import in_process``: a script finds what lies beside it). The scripts set
``VLLM_ENABLE_V1_MULTIPROCESSING`` to 0 before vLLM is imported. Written for vLLM 0.32.
"""

from __future__ import annotations

import contextlib
from typing import Any


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
