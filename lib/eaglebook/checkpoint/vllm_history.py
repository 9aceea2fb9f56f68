"""How one draft fares from version to version of vLLM: the inspection of each, and what is new in it.

Nothing is stated here: outcome and findings are what the rules of each version say (`vllm_rules`, `vllm_load`, the checks).
"""

from __future__ import annotations

from dataclasses import dataclass

from eaglebook.checkpoint import checks, inspection
from eaglebook.checkpoint import vllm_rules as rules
from eaglebook.checkpoint.case import Case
from eaglebook.checkpoint.vllm_rules import Version

VERSIONS: tuple[Version, ...] = tuple(
    (0, n) for n in (16, 19, 21, 22, 25, 28, 30, 32, 33)
)  # those whose sources were read


@dataclass(frozen=True)
class Chapter:
    """Versions that treat the draft alike. ``new`` and ``gone``: codes of findings, against the versions before."""

    since: Version
    until: Version
    outcome: str
    on_a_cpu: bool
    new: tuple[str, ...]
    gone: tuple[str, ...]


def chapters(case: Case) -> list[Chapter]:
    """The draft of ``case`` read as every known version reads it, equal neighbours as one."""
    told: list[Chapter] = []
    before: set[str] = set()
    for version in VERSIONS:
        at = inspection.examine(case.source, case.verifier, version)
        codes = {f.code for f in checks.examine(at) if f.severity != "note"}
        stage, error = at.prediction.stage, at.prediction.error
        outcome = f"stops at {stage}: {error}" if stage else "loads"
        cpu = version >= rules.CPU_SERVES
        last = told[-1] if told else None
        if last and (last.outcome, last.on_a_cpu) == (outcome, cpu) and codes == before:
            told[-1] = Chapter(last.since, version, outcome, cpu, last.new, last.gone)
        else:
            told.append(
                Chapter(version, version, outcome, cpu, tuple(sorted(codes - before)), tuple(sorted(before - codes)))
            )
        before = codes
    return told
