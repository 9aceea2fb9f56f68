"""Every fault asked three times: what the inspection says, what its rules predict vLLM to do, and what vLLM does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from eaglebook import evenly
from eaglebook.checkpoint import inspection
from eaglebook.checkpoint.vllm_load import SILENT
from eaglebook.engine import trial
from eaglebook.faults.library import FAULTS, Fault, build_bases, write

STARTS, LENGTH, ANSWER_TOKENS, K = (0, 60, 120, 200), 6, 81, 3


@dataclass(frozen=True)
class Verdict:
    """``predicted`` and ``real``: "refused", "fails at the first request" or "served". ``acceptance_length`` when served."""

    fault: Fault
    codes: tuple[str, ...]
    predicted: str
    predicted_error: str
    silent: tuple[str, ...]  # what the rules say vLLM would do in silence
    real: str
    error: str
    acceptance_length: float | None
    lossless: bool
    seconds: float

    @property
    def named(self) -> bool:
        """Whether the finding that must name the fault is there."""
        return self.fault.code in self.codes

    @property
    def undefined(self) -> bool:
        """Whether a parameter is uninitialised memory: acceptance may then be anything, even full."""
        return "uninitialised" in self.silent


def spread(number: int) -> list[Fault]:
    """So many faults, taken evenly from the library; all of them for 0."""
    return evenly.take(FAULTS, number)


def judge(
    base: Path,
    faults: Sequence[Fault] = FAULTS,
    *,
    timeout_s: float = 90,
    say: Callable[[str], object] = lambda _: None,
) -> list[Verdict]:
    """Write, inspect and serve every fault below the new folder ``base``, and the healthy pair first.

    Raises AssertionError when the healthy pair is not accepted fully: nothing could be learnt then.
    """
    pairs = build_bases(base / "perfect")
    found: dict[str, Verdict] = {}
    for ids, pair in pairs.items():
        own = [fault for fault in faults if fault.ids == ids]
        if not own:
            continue
        drafts = [
            write(fault, base / "perfect", base / f"{'-'.join(map(str, ids))}-{n}") for n, fault in enumerate(own)
        ]
        prompts = [pair.prompt(start, LENGTH) for start in STARTS]
        answers = tuple(tuple(pair.answer(prompt, ANSWER_TOKENS)) for prompt in prompts)
        trials = trial.run(
            pair.verifier,
            [pair.draft, *drafts],
            prompts,
            num_speculative_tokens=K,
            max_tokens=ANSWER_TOKENS,
            timeout_s=timeout_s,
        )
        healthy = next(trials)
        assert healthy.acceptance and healthy.acceptance.mean_acceptance_length == K + 1, healthy
        for fault, draft, one in zip(own, drafts, trials, strict=True):
            found[fault.name] = _verdict(fault, draft, pair.verifier, one, answers)
            say(f"{len(found)}/{len(faults)} {fault.name}: {found[fault.name].real}")
    return [found[fault.name] for fault in faults]


def _verdict(
    fault: Fault, draft: Path, verifier: Path, one: trial.Trial, answers: tuple[tuple[int, ...], ...]
) -> Verdict:
    said = inspection.inspect(draft, verifier=verifier, deep=True)
    prediction = said.case.prediction
    broken = any(s.code in ("weights-unreadable", "index-shard-missing", "config-unreadable") for s in said.findings)
    return Verdict(
        fault=fault,
        codes=tuple(f.code for f in said.findings if f.severity != "note"),
        predicted="refused" if broken else _stage(prediction.stage),
        predicted_error=prediction.error,
        silent=tuple(sorted({o.fate for o in prediction.tensors if o.fate in SILENT})),
        real=_stage(one.stage),
        error=one.error,
        acceptance_length=one.acceptance.mean_acceptance_length if one.acceptance else None,
        lossless=not one.tokens or one.tokens == answers,
        seconds=one.seconds,
    )


def _stage(stage: str) -> str:
    return {"": "served", "request": "fails at the first request"}.get(stage, "refused")
