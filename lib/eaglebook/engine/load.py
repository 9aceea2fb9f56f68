"""Real load on real servers: the same prompts asked of the verifier alone and with its draft, in turns.

A machine drifts: it warms up, something else runs for a minute. Asked in turns, block by block, both sides meet the same
weather, and their ratio stays true.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from eaglebook.acceptance import Acceptance, none, of_steps
from eaglebook.engine import client, counters
from eaglebook.engine.client import Completion
from eaglebook.engine.server import Server
from eaglebook.intervals import Estimate, of_sums
from eaglebook.progress import Progress

_REST_S = 1.2  # vLLM 0.32, distributed/device_communicators/shm_broadcast.py: SpinCondition, busy_loop_s = 1
ALONE = 0  # the key of the verifier without a draft, where others are keyed by their number of speculative tokens


@dataclass(frozen=True)
class Load:
    """What a set of prompts met on one server. ``counted``: vLLM's counters, differenced; no drafts when there is no draft."""

    answers: tuple[Completion, ...]
    wall_s: float
    counted: Acceptance

    def __add__(self, other: Load) -> Load:
        return Load(self.answers + other.answers, self.wall_s + other.wall_s, self.counted + other.counted)

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all answers over the wall seconds, as ``vllm bench serve`` counts output throughput."""
        return sum(len(a.token_ids) for a in self.answers) / self.wall_s

    @property
    def first_token_s(self) -> float:
        """Median seconds from a request's arrival to its first token."""
        return float(np.median([a.first_token_s for a in self.answers]))

    @property
    def token_s(self) -> float:
        """Seconds from one token to the next, the mean over all tokens but the first of each answer."""
        return self._decode_s / sum(len(a.token_ids) - 1 for a in self.answers)

    @property
    def step_s(self) -> float:
        """Seconds of one step of the engine: a token alone, a draft and its verification with one."""
        return self._decode_s / sum(len(a.accepted) or len(a.token_ids) - 1 for a in self.answers)

    @property
    def _decode_s(self) -> float:
        return sum(a.decode_s for a in self.answers)

    @property
    def acceptance_length(self) -> Estimate:
        """Mean acceptance length with its interval over prompts, from the answers' own records."""
        return of_sums(
            [(len(a.accepted), sum(a.accepted)) for a in self.answers], lambda drafts, hits: 1 + hits / drafts
        )

    def recorded(self, positions: int) -> Acceptance:
        """The answers' own records summed: they must equal what the counters say."""
        return sum((of_steps(a.accepted, positions) for a in self.answers), none(positions))


def nothing(positions: int) -> Load:
    return Load((), 0.0, none(positions))


def measure(
    vllm: Server,
    prompts: Sequence[Sequence[int]],
    *,
    concurrency: int,
    max_tokens: int,
    positions: int = 0,
    temperature: float = 0.0,
    bar: Progress | None = None,
) -> Load:
    """Ask every prompt once. ``positions``: the server's number of speculative tokens, 0 without a draft."""
    before = counters.read(vllm, positions) if positions else none(0)
    answers, wall_s = client.complete(
        vllm, prompts, max_tokens=max_tokens, concurrency=concurrency, temperature=temperature,
        on_completion=(lambda a: bar.step(tokens=len(a.token_ids))) if bar else None,
    )  # fmt: skip
    counted = counters.since(before, counters.read(vllm, positions)) if positions else before
    return Load(tuple(answers), wall_s, counted)


def alternate(
    servers: Mapping[int, Server],
    prompts: Sequence[Sequence[int]],
    *,
    concurrency: int,
    max_tokens: int,
    temperature: float = 0.0,
    bar: Progress | None = None,
) -> dict[int, Load]:
    """The same prompts on every server (by number of speculative tokens), block by block; who begins changes each time.

    A block is as many prompts as keep ``concurrency`` busy twice, at least four. Between two servers there is a rest: the
    workers of the one that was asked last spin for a second before they sleep, on a core that the other needs.
    """
    size = max(4, 2 * concurrency)
    loads: dict[int, Load] = {}
    for number, start in enumerate(range(0, len(prompts), size)):
        for k in sorted(servers, reverse=bool(number % 2)):
            if len(servers) > 1:
                time.sleep(_REST_S)
            load = measure(
                servers[k], prompts[start : start + size], concurrency=concurrency, max_tokens=max_tokens, positions=k,
                temperature=temperature, bar=bar,
            )  # fmt: skip
            loads[k] = loads[k] + load if k in loads else load
    return loads


def in_turns(
    start: Callable[[int], contextlib.AbstractContextManager[Server]],
    ks: Sequence[int],
    work: Callable[[int, dict[int, Server]], object],
    *,
    side_by_side: bool,
) -> None:
    """Call ``work(k, up)`` for each number of speculative tokens in ``ks``, with the servers that are up.

    ``start(k)`` starts a server with k speculative tokens, `ALONE` the verifier without a draft. Side by side, the
    verifier alone stays up beside each; otherwise it has a first call for itself, and no two servers are ever up. All
    of them are ended whatever happens.
    """
    if side_by_side:
        with start(ALONE) as alone:
            for k in ks:
                with start(k) as drafted:
                    work(k, {ALONE: alone, k: drafted})
        return
    for k in (ALONE, *ks):
        with start(k) as one:
            work(k, {k: one})
