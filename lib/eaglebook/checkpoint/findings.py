"""What is said about a checkpoint: a stable code, a severity, the fact, what each reader does with it, how to fix it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Literal

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")


@dataclass(frozen=True)
class Finding:
    """``error``: refused, or loads and accepts (almost) nothing. ``warning``: depends on what was trained or on the reader.
    ``note``: worth knowing, nothing to do. Codes are stable: scripts may depend on them."""

    code: str
    severity: Severity
    message: str
    fix: str = ""
    vllm: str = ""  # what vLLM does with it
    sglang: str = ""  # what SGLang does with it, where that was read in its source

    def as_dict(self) -> dict[str, str]:
        return {key: value for key, value in asdict(self).items() if value}


def error(code: str, message: str, fix: str = "", *, vllm: str = "", sglang: str = "") -> Finding:
    return Finding(code, "error", message, fix, vllm, sglang)


def warning(code: str, message: str, fix: str = "", *, vllm: str = "", sglang: str = "") -> Finding:
    return Finding(code, "warning", message, fix, vllm, sglang)


def note(code: str, message: str, fix: str = "", *, vllm: str = "", sglang: str = "") -> Finding:
    return Finding(code, "note", message, fix, vllm, sglang)


def ordered(findings: Iterable[Finding]) -> list[Finding]:
    """Without repetitions, the worst first."""
    return sorted(dict.fromkeys(findings), key=lambda finding: SEVERITIES.index(finding.severity))
