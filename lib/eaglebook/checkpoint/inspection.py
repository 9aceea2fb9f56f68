"""``eaglebook inspect``: everything that can be said about a draft without loading it, in one object.

Reads the config, the headers, the index, and the bytes of ``d2t`` and ``t2d``; with ``deep`` also every value once.
Imports neither torch nor transformers, vllm or speculators.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from eaglebook.checkpoint import (
    checks,
    findings,
    formats,
    mapping,
    names,
    source,
    spec,
    vllm_load,
    vllm_rules,
    vllm_view,
)
from eaglebook.checkpoint.case import Case
from eaglebook.checkpoint.findings import Finding
from eaglebook.checkpoint.headers import Tensor
from eaglebook.checkpoint.verifier_config import VerifierFacts
from eaglebook.checkpoint.verifier_config import read as read_verifier


@dataclass(frozen=True)
class Inspection:
    """The case, and what is said about it, the worst first."""

    case: Case
    findings: list[Finding]

    @property
    def errors(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.severity == "error"]

    @classmethod
    def of(
        cls, path: Path, config: dict[str, Any], tensors: dict[str, Tensor], verifier: VerifierFacts | None = None
    ) -> Inspection:
        """An inspection of a config and tensors that need not exist together on disk."""
        case = examine(source.Source(path, config, tensors), verifier)
        return cls(case, checks.examine(case))

    def as_dict(self) -> dict[str, Any]:
        """The object of ``--json``."""
        kind = self.case.format
        return {
            "format": {**asdict(kind), "is_eagle3": kind.is_eagle3},
            "spec": self.case.spec.as_dict(),
            "findings": [finding.as_dict() for finding in self.findings],
            "vllm": self.case.prediction.as_dict(),
        }


def inspect(
    path: Path,
    *,
    verifier: Path | None = None,
    version: vllm_rules.Version = vllm_rules.REFERENCE,
    tensor_list: Path | None = None,
    ids_mean: str = "",
    deep: bool = False,
) -> Inspection:
    """Inspect what ``path`` is (see `source.read`), as vLLM ``version`` would serve it beside ``verifier``.

    ``verifier`` is a folder or a config.json. ``ids_mean`` is "input" or "output" when the user knows how the aux ids count.
    Raises UserError when there is nothing to read.
    """
    facts = read_verifier(verifier) if verifier else None
    case = examine(source.read(path, tensor_list), facts, version, ids_mean)
    found = checks.examine(case)
    if deep and case.source.tensors:
        from eaglebook.checkpoint import values

        found = findings.ordered([*found, *values.examine(case, verifier)])
    return Inspection(case, found)


def examine(
    given: source.Source,
    facts: VerifierFacts | None = None,
    version: vllm_rules.Version = vllm_rules.REFERENCE,
    ids_mean: str = "",
) -> Case:
    """Everything the checks need, from what was read."""
    kind = formats.detect(given)
    own, foreign = names.owned(given.tensors or ())
    stored = {plain: given.tensors[name] for name, plain in own.items()} if given.tensors else {}
    config = given.config or {}
    prediction = vllm_load.predict(
        config,
        given.tensors if given.config is not None and kind.is_eagle3 else None,
        target_vocab=facts.vocab_size if facts else None,
        target_hidden=facts.hidden_size if facts else None,
        version=version,
    )
    seen, found = vllm_view.view(config, version), mapping.read(stored)
    if given.tensors is not None and kind.is_eagle3:
        layers, hidden = (facts.num_layers, facts.hidden_size) if facts else (None, None)
        prediction = vllm_load.first_request(prediction, seen, found.targets if found else None, layers, hidden)
    if given.config is None:
        prediction = replace(prediction, stage="config", error="no config was given")
    return Case(
        source=given,
        format=kind,
        spec=spec.read(given, kind, facts.num_layers if facts else None, ids_mean),
        stored=stored,
        own=own,
        foreign=tuple(foreign),
        view=seen,
        prediction=prediction,
        mapping=found,
        verifier=facts,
        version=version,
    )
