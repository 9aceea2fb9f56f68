"""vLLM's own speculative-decoding counters, read from ``/metrics`` and differenced."""

from __future__ import annotations

import re

import httpx

from eaglebook.acceptance import Acceptance
from eaglebook.engine.server import Server, died
from eaglebook.errors import UserError

_PREFIX = "vllm:spec_decode_num_"


def read(server: Server, positions: int) -> Acceptance:
    """The counters now (vLLM 0.32 ``v1/spec_decode/metrics.py``). Raises UserError when the server has none."""
    try:
        text = httpx.get(f"{server.url}/metrics", timeout=30, trust_env=False).raise_for_status().text
    except httpx.HTTPError as error:
        raise died(server, str(error)) from None
    return parse(text, positions)


def parse(text: str, positions: int) -> Acceptance:
    """``drafts`` and accepted drafts per position out of a Prometheus page."""
    drafts = re.search(rf"^{_PREFIX}drafts(?:_total)?(?:{{.*?}})? ([0-9.e+]+)$", text, re.M)
    found = re.findall(
        rf'^{_PREFIX}accepted_tokens_per_pos(?:_total)?{{.*?position="(\d+)".*?}} ([0-9.e+]+)$', text, re.M
    )
    if drafts is None or not found:
        raise UserError(
            "the server has no speculative-decoding counters",
            expected=f"{_PREFIX}drafts on /metrics",
            found="none",
            fix="start the server with a draft and with statistics on",
        )
    per_position = {int(position): float(value) for position, value in found}
    return Acceptance(int(float(drafts[1])), tuple(int(per_position.get(i, 0)) for i in range(positions)))


def since(before: Acceptance, now: Acceptance) -> Acceptance:
    """What happened between two readings."""
    return Acceptance(
        now.drafts - before.drafts, tuple(n - b for b, n in zip(before.accepted, now.accepted, strict=True))
    )
