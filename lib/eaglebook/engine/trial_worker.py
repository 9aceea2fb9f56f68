"""Serve a few greedy requests with each of many drafts, in vLLM's own environment: ``python trial_worker.py JOBS``, one a line.

Imports vLLM and the standard library only. vLLM is imported once; each job is a fork of that process, because an engine
cannot be built twice in one, and because a broken draft may take the process with it (a wrong width ends in a
segmentation fault on the CPU build of vLLM 0.32). Prints one JSON object a line and job, in their order.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")


def serve(job: dict[str, Any]) -> dict[str, Any]:
    """One engine, the job's prompts, and what its counters say. The stage of a failure is "load" or "request"."""
    import in_process
    from vllm import SamplingParams

    k = job["num_speculative_tokens"]
    speculative = {"method": "eagle3", "model": job["draft"], "num_speculative_tokens": k} if job["draft"] else None
    stage = "load"
    try:
        llm = in_process.engine(
            model=job["verifier"],
            skip_tokenizer_init=True,
            dtype=job["dtype"],
            enforce_eager=True,
            max_model_len=job["max_model_len"],
            max_num_seqs=4,
            max_num_batched_tokens=max(256, job["max_model_len"]),
            kv_cache_memory_bytes=64 << 20,
            disable_log_stats=False,
            speculative_config=speculative,
        )
        stage = "request"
        sampling = SamplingParams(temperature=0, max_tokens=job["max_tokens"], ignore_eos=True, detokenize=False)
        asked = [{"prompt_token_ids": ids} for ids in job["prompts"]]
        done = llm.generate(asked, sampling, use_tqdm=False)
        metrics = {m.name.removeprefix("vllm:spec_decode_"): m for m in llm.get_metrics() if "spec_decode" in m.name}
        return {
            "stage": "",
            "error": "",
            "tokens": [list(answer.outputs[0].token_ids) for answer in done],
            "drafts": int(metrics["num_drafts"].value) if metrics else 0,
            "accepted": list(metrics["num_accepted_tokens_per_pos"].values)[:k] if metrics else [],
        }
    except Exception as error:
        return {"stage": stage, "error": f"{type(error).__name__}: {error}"[:2000]}


def fork(job: dict[str, Any]) -> dict[str, Any]:
    """Run `serve` in a child and wait for its answer, its death, or its time."""
    read, write = os.pipe()
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        os.close(read)
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        answer = json.dumps(serve(job)).encode()
        while answer:
            answer = answer[os.write(write, answer) :]
        os._exit(0)
    os.close(write)
    data = b""
    while select.select([read], [], [], max(0.0, began + job["timeout_s"] - time.monotonic()))[0]:
        block = os.read(read, 1 << 16)
        if not block:
            break
        data += block
    else:
        os.kill(child, signal.SIGKILL)
    os.close(read)
    _, status = os.waitpid(child, 0)
    seconds = time.monotonic() - began
    if data and not os.WIFSIGNALED(status):
        return {**json.loads(data), "seconds": seconds}
    if seconds >= job["timeout_s"]:
        return {"stage": "request", "error": f"no answer within {job['timeout_s']:g} s", "seconds": seconds}
    return {
        "stage": "request",
        "error": f"the process died: {signal.Signals(os.WTERMSIG(status)).name}",
        "seconds": seconds,
    }


def main() -> None:
    import vllm  # noqa: F401  (before any fork)

    for line in Path(sys.argv[1]).read_text().splitlines():
        print(json.dumps(fork(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
