"""The load ladder: ask vLLM about a draft, cheapest question first, stop at the first no.

Only a verifier's ``config.json`` is needed, never its weights.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from eaglebook import guard, paths
from eaglebook.engine.server import python

_DUMMY_LAYERS = 4


@dataclass(frozen=True)
class Rung:
    number: int
    name: str
    proves: str
    does_not_prove: str


RUNGS = {
    1: Rung(1, "config", "both configs parse, the architecture is known, lengths agree", "anything about a tensor"),
    2: Rung(
        2,
        "names and shapes",
        "every stored tensor has a place of the right shape",
        "that nothing is missing, or any value",
    ),
    5: Rung(
        5,
        "engine",
        "the whole engine starts, captures the aux states and proposes drafts",
        "acceptance: the verifier is noise",
    ),
}


@dataclass(frozen=True)
class Verdict:
    """``seconds`` is the rung's own time, ``wall_s`` includes starting Python and importing vLLM."""

    rung: Rung
    passed: bool
    seconds: float
    wall_s: float
    detail: str


def climb(
    draft: Path,
    verifier: Path,
    rungs: Sequence[int],
    *,
    num_speculative_tokens: int,
    aux_ids: Sequence[int],
    dtype: str = "bfloat16",
    max_model_len: int = 256,
    trust_remote_code: bool = False,
    timeout_s: float = 300,
) -> Iterator[Verdict]:
    """Verdicts in order; ends after the first failure. Each rung is a process of its own."""
    for number in sorted(rungs):
        ask = {
            "rung": number,
            "draft": str(draft),
            "verifier": str(verifier),
            "dtype": dtype,
            "num_speculative_tokens": num_speculative_tokens,
            "max_model_len": max_model_len,
            "trust_remote_code": trust_remote_code,
            "aux_ids": list(aux_ids),
            "layers": max(_DUMMY_LAYERS, len(aux_ids) + 1),
        }
        verdict = _ask(RUNGS[number], ask, timeout_s)
        yield verdict
        if not verdict.passed:
            return


def _ask(rung: Rung, ask: dict[str, object], timeout_s: float) -> Verdict:
    began = time.monotonic()
    argv = [python(), str(Path(__file__).with_name("rungs.py")), json.dumps(ask)]
    process = guard.start(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return Verdict(rung, False, timeout_s, timeout_s, f"no answer within {timeout_s:g} s")
    finally:
        guard.stop(process)
    wall = time.monotonic() - began
    try:
        answer = json.loads(out.strip().splitlines()[-1])
        return Verdict(rung, answer["verdict"] == "pass", answer["seconds"], wall, paths.scrub(answer["detail"]))
    except (IndexError, ValueError, KeyError, TypeError):
        last = [line for line in err.splitlines() if line.strip()][-1:] or ["no output"]
        return Verdict(
            rung,
            False,
            wall,
            wall,
            paths.scrub(f"the process ended with code {process.returncode}: {last[0]}"),
        )
