"""Token ids in, token ids out: greedy completions from an OpenAI-compatible vLLM server."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from eaglebook.engine import background
from eaglebook.engine.server import Server, died
from eaglebook.errors import UserError

_TOKENS = re.compile(r"^vllm:(?:generation|prompt)_tokens_total\{.*\} .*$", re.M)


@dataclass(frozen=True)
class Completion:
    """One answer. ``token_ids`` are the generated ids, end token included when the model ended by itself.

    ``seconds`` as the client waited. From a server that was asked for it (``serve(measured=True)``), by its own clock:
    ``first_token_s`` from arrival to the first token, ``decode_s`` from the first token to the last; and ``accepted``,
    the draft tokens accepted in each draft-and-verify step, in order (empty without a draft).
    """

    index: int
    token_ids: list[int]
    finish_reason: str
    seconds: float
    first_token_s: float = 0.0
    decode_s: float = 0.0
    accepted: tuple[int, ...] = ()


def complete(
    servers: Server | Sequence[Server],
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    concurrency: int,
    temperature: float = 0.0,
    seeds: Sequence[int] = (),
    retries: int = 0,
    stall_s: float = 300,
    on_completion: Callable[[Completion], None] | None = None,
) -> tuple[list[Completion], float]:
    """Completions of ``prompts`` (lists of token ids), at most ``concurrency`` in flight; greedy at temperature 0,
    above it with ``seeds``, one a prompt, where sampling shall be repeatable.

    Returns them in the order of the prompts, and the wall seconds. ``on_completion`` sees each as it arrives. Ids
    come back with ``return_token_ids``: nothing is re-tokenised. Several servers take turns, and a request that breaks
    off is asked ``retries`` times more, each time of the next one. Raises UserError when a prompt is refused or broken off,
    when a server dies, and when none has done anything for ``stall_s`` seconds: a dead engine can leave a request open.
    """
    pool = [servers] if isinstance(servers, Server) else list(servers)

    async def one(client: httpx.AsyncClient, gate: asyncio.Semaphore, index: int) -> Completion:
        async with gate:
            began = time.monotonic()
            body = {
                "prompt": list(prompts[index]),
                "max_tokens": max_tokens,
                "temperature": temperature,
                "repetition_penalty": 1.0,  # the model's own generation_config must not change what greedy means
                "return_token_ids": True,
                **({"seed": seeds[index]} if seeds else {}),
            }
            for attempt in range(retries + 1):
                server = pool[(index + attempt) % len(pool)]
                try:
                    answer = await client.post(f"{server.url}/v1/completions", json=body | {"model": server.model})
                    if answer.status_code < 500:
                        break
                    error = f"status {answer.status_code}: {answer.text[:300]}"
                except httpx.HTTPError as broken:
                    error = f"{type(broken).__name__} {broken}".strip()
                if attempt < retries:
                    await asyncio.sleep(2**attempt)
            else:
                raise died(server, error)
            if answer.status_code != 200:
                raise UserError(
                    f"vLLM refused a prompt of {len(prompts[index])} tokens",
                    expected="status 200",
                    found=f"{answer.status_code}: {answer.text[:300]}",
                    fix="check max_prompt_tokens and max_new_tokens against the model's length",
                )
            done = _completion(index, answer.json(), time.monotonic() - began)
            if on_completion:
                on_completion(done)
            return done

    async def run() -> list[Completion]:
        wait = httpx.Timeout(None, connect=60)  # a long answer may take long; a dead server closes the connection
        gate = asyncio.Semaphore(concurrency)
        limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
        async with httpx.AsyncClient(timeout=wait, limits=limits, trust_env=False) as client:
            tasks = [asyncio.ensure_future(one(client, gate, i)) for i in range(len(prompts))]
            answers = asyncio.gather(*tasks)
            watch = asyncio.ensure_future(_watch(pool, lambda: sum(task.done() for task in tasks), stall_s))
            try:
                either: list[asyncio.Future[Any]] = [answers, watch]
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                if not answers.done():
                    watch.result()  # raises what it found
                return await answers
            finally:
                for task in (*tasks, watch):
                    task.cancel()

    began = time.monotonic()
    return background.run(run), time.monotonic() - began


async def _watch(servers: Sequence[Server], done: Callable[[], int], stall_s: float) -> None:
    """Raise when every server is gone, or when neither answers nor tokens have come for ``stall_s`` seconds."""
    async with httpx.AsyncClient(timeout=30, trust_env=False) as client:
        seen, since = "", time.monotonic()
        while True:
            await asyncio.sleep(min(10.0, stall_s / 4))
            said, errors = str(done()), []
            for server in servers:
                try:
                    page = await client.get(f"{server.url}/metrics")
                    said += "".join(_TOKENS.findall(page.text))
                except httpx.HTTPError as error:
                    errors.append(f"{type(error).__name__} {error}".strip())
            if len(errors) == len(servers):
                raise died(servers[0], errors[0])
            if said != seen:
                seen, since = said, time.monotonic()
            elif time.monotonic() - since > stall_s:
                raise died(servers[0], f"no token for {stall_s:g} s")


def _completion(index: int, answer: dict[str, Any], seconds: float) -> Completion:
    """An answer as vLLM 0.32 gives it; ``metrics`` is there when asked for (``entrypoints/generate/base/serving.py``)."""
    choice, metrics = answer["choices"][0], answer.get("metrics") or {}
    if choice.get("token_ids") is None:
        raise UserError(
            "the server gave text instead of token ids",
            expected="a vLLM server that honours return_token_ids",
            found=", ".join(sorted(choice)),
            fix="use a vLLM endpoint: text would have to be tokenised again, and might not be what was said",
        )
    queue, first, decode = (
        (metrics.get(key) or 0.0) / 1000 for key in ("queue_time_ms", "time_to_first_token_ms", "generation_time_ms")
    )
    accepted = (metrics.get("speculative_decoding") or {}).get("per_step_accepted") or ()
    return Completion(
        index, choice["token_ids"], choice["finish_reason"], seconds, queue + first, decode, tuple(accepted)
    )
