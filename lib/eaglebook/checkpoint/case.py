"""One checkpoint and all that was found out about it: what every check looks at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from eaglebook.checkpoint.formats import NESTED, Format
from eaglebook.checkpoint.headers import Tensor
from eaglebook.checkpoint.mapping import VocabMapping
from eaglebook.checkpoint.source import Source
from eaglebook.checkpoint.spec import DraftSpec
from eaglebook.checkpoint.verifier_config import VerifierFacts
from eaglebook.checkpoint.vllm_load import Prediction
from eaglebook.checkpoint.vllm_rules import Version
from eaglebook.checkpoint.vllm_view import View

CONVERT = "eaglebook convert DRAFT OUT"
LOW = "loads, serves, accepts little"


@dataclass(frozen=True)
class Case:
    """All that the checks look at. ``stored`` has plain names; ``view`` and ``prediction`` are of vLLM ``version``."""

    source: Source
    format: Format
    spec: DraftSpec
    stored: Mapping[str, Tensor]  # the draft's tensors by plain name
    own: Mapping[str, str]  # name in the file -> plain name
    foreign: tuple[str, ...]  # tensors of a verifier in the same file
    view: View
    prediction: Prediction
    mapping: VocabMapping | None
    verifier: VerifierFacts | None
    version: Version

    @property
    def config(self) -> Mapping[str, Any]:
        return self.source.config or {}

    @property
    def layer(self) -> Mapping[str, Any]:
        inner = self.config.get("transformer_layer_config") if self.format.layout == NESTED else None
        return inner if isinstance(inner, dict) else self.config

    @property
    def eagle(self) -> Mapping[str, Any]:
        inner = self.config.get("eagle_config")
        return inner if isinstance(inner, dict) else {}

    @property
    def target_vocab(self) -> int | None:
        """The verifier's vocabulary, as far as one knows: its config, else what the draft says."""
        return (self.verifier.vocab_size if self.verifier else None) or self.spec.vocab_size.value

    def rows(self, name: str) -> int | None:
        """First dimension of a stored tensor, by plain name."""
        tensor = self.stored.get(name)
        return tensor.rows if tensor else None


def is_size(value: Any) -> bool:
    return type(value) is int and value > 0


def short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
