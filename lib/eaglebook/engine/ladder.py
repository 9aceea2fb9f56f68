"""The load ladder: ask vLLM about a draft, cheapest question first, stop at the first no.

Only a verifier's ``config.json`` is needed, never its weights.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eaglebook import guard, paths
from eaglebook.checkpoint import inspection
from eaglebook.engine.server import python

_DUMMY_LAYERS = 4


@dataclass(frozen=True)
class Rung:
    number: int
    name: str
    costs: str
    proves: str
    does_not_prove: str

    @property
    def next_costs(self) -> str:
        """What the rung above this one costs."""
        return RUNGS[self.number + 1].costs if self.number + 1 in RUNGS else "the verifier's weights (07)"


RUNGS = {
    rung.number: rung
    for rung in (
        Rung(
            0,
            "reading",
            "two reads of small files",
            "sizes, names, mapping, ids and flags agree, by rules stricter than vLLM's",
            "that the rules are this vLLM's",
        ),
        Rung(
            1,
            "config",
            "an import of vLLM",
            "both configs parse, the architecture is known, lengths agree",
            "anything about a tensor",
        ),
        Rung(
            2,
            "names and shapes",
            "an import; no tensor is read",
            "every stored tensor has a place of the right shape",
            "that nothing is missing, or any value",
        ),
        Rung(
            3,
            "completeness",
            "an import; the file is read",
            "every parameter is filled from the file, to its last number",
            "that the numbers are right, or were cut",
        ),
        Rung(
            4,
            "arithmetic",
            "an import; the file is read",
            "states of the verifier's width go through, every draft token has a finite logit",
            "that anything was trained",
        ),
        Rung(
            5,
            "engine",
            "an engine of a few layers",
            "the whole engine starts, captures the aux states and proposes drafts",
            "acceptance: the verifier is noise",
        ),
    )
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
    dtype: str = "bfloat16",
    max_model_len: int = 256,
    trust_remote_code: bool = False,
    timeout_s: float = 300,
    stop_at_first_no: bool = True,
) -> Iterator[Verdict]:
    """Verdicts in order, from the cheapest rung on; ends after the first failure unless told otherwise.

    ``verifier`` is a folder of which only ``config.json`` is needed. Rung 0 runs here, each of the others in a process of its own.
    """
    began = time.perf_counter()
    said = inspection.inspect(draft, verifier=verifier)
    read_s = time.perf_counter() - began
    facts = said.case.verifier
    ids = said.case.spec.aux_layer_ids.value or (facts.default_aux_layer_ids if facts else None) or []
    ask = {
        "draft": str(draft), "verifier": str(verifier), "dtype": dtype, "num_speculative_tokens": num_speculative_tokens,
        "max_model_len": max_model_len, "trust_remote_code": trust_remote_code, "aux_ids": ids, "layers": max(_DUMMY_LAYERS, len(ids) + 1),
        "verifier_vocab": facts.vocab_size if facts else None, "verifier_hidden": facts.hidden_size if facts else None,
    }  # fmt: skip
    for number in sorted(rungs):
        verdict = _reading(said, read_s) if number == 0 else _ask(RUNGS[number], {**ask, "rung": number}, timeout_s)
        yield verdict
        if stop_at_first_no and not verdict.passed:
            return


def signature() -> dict[str, Any]:
    """What the installed vLLM's ``ModelConfig`` takes, and what it says to ``task="draft"``: looked up, not guessed."""
    return _run({"rung": "probe"}, 120)[0]


def _reading(said: inspection.Inspection, seconds: float) -> Verdict:
    detail = "; ".join(f"{e.code}: {e.message}" for e in said.errors) or f"{len(said.findings)} findings, none an error"
    return Verdict(RUNGS[0], not said.errors, seconds, seconds, detail)


def _ask(rung: Rung, ask: dict[str, object], timeout_s: float) -> Verdict:
    began = time.monotonic()
    try:
        answer, ended = _run(ask, timeout_s)
    except subprocess.TimeoutExpired:
        return Verdict(rung, False, timeout_s, timeout_s, f"no answer within {timeout_s:g} s")
    wall = time.monotonic() - began
    if not answer:
        return Verdict(rung, False, wall, wall, ended)
    return Verdict(rung, answer["verdict"] == "pass", answer["seconds"], wall, paths.scrub(answer["detail"]))


def _run(ask: dict[str, object], timeout_s: float) -> tuple[dict[str, Any], str]:
    """The answer of one rung's process, empty when it gave none; and how it ended."""
    argv = [python(), str(Path(__file__).with_name("rungs.py")), json.dumps(ask)]
    with tempfile.TemporaryDirectory() as scratch:
        environment = os.environ | {"TMPDIR": scratch}  # vLLM leaves a rendezvous file behind for each engine
        process = guard.start(argv, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            out, err = process.communicate(timeout=timeout_s)
        finally:
            guard.stop(process)
    last = [line for line in err.splitlines() if line.strip()][-1:] or ["no output"]
    ended = paths.scrub(f"the process ended with code {process.returncode}: {last[0]}")
    try:
        return dict(json.loads(out.strip().splitlines()[-1])), ended
    except (IndexError, ValueError, TypeError):
        return {}, ended
