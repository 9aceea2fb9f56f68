"""The verifier beside a draft, the name it is called by, and what other readers make of the file."""

from __future__ import annotations

import re
from collections.abc import Iterator

from eaglebook.checkpoint import findings as f
from eaglebook.checkpoint import vllm_rules as rules
from eaglebook.checkpoint.case import CONVERT, Case, is_size
from eaglebook.checkpoint.findings import Finding
from eaglebook.checkpoint.formats import NESTED, NO_CONFIG


def verifier(case: Case) -> Iterator[Finding]:
    v, spec = case.verifier, case.spec
    if v is None:
        return
    if v.missing:
        yield f.error(
            "verifier-keys-missing",
            f"the verifier's config has no {', '.join(v.missing)}",
            "give the verifier's own config.json",
        )
    width = spec.target_hidden_size.value or spec.hidden_size.value
    if v.hidden_size and is_size(width) and width != v.hidden_size:
        yield f.error(
            "verifier-hidden-size",
            f"the draft reads states of {width}, the verifier has {v.hidden_size}",
            "another verifier, or write target_hidden_size",
            vllm="fails at the first request",
        )
    if (
        v.vocab_size
        and is_size(spec.vocab_size.value)
        and spec.vocab_size.known
        and spec.vocab_size.value != v.vocab_size
    ):
        yield f.error(
            "verifier-vocab-size",
            f"vocab_size {spec.vocab_size.value} is not the verifier's {v.vocab_size}",
            "another verifier, or another tokenizer",
            vllm="target ids mean other tokens, or cannot be said",
        )
    if v.supports_eagle3 is False:
        yield f.error(
            "verifier-unsupported",
            f"vLLM 0.32 has no EAGLE-3 support for {', '.join(v.architectures) or v.model_type}",
            "ask for another verifier or engine",
            vllm="Model does not support EAGLE3 interface, after its weights are loaded",
        )
    elif v.supports_eagle3 is None and v.architectures:
        yield f.note(
            "verifier-unknown",
            f"{', '.join(v.architectures)} is no architecture of vLLM 0.32",
            vllm="the transformers backend, if that can run it",
        )
    if case.version <= rules.TARGET_WHITELIST_UNTIL and not any(
        name in v.model_type for name in rules.TARGET_WHITELIST
    ):
        yield f.error(
            "verifier-unsupported",
            f"vLLM 0.16 serves EAGLE-3 only for {', '.join(rules.TARGET_WHITELIST)}, not {v.model_type}",
            "use vLLM 0.19 or newer",
        )
    if v.head_quantised:
        yield f.warning(
            "verifier-head-quantised",
            "the verifier's lm_head is quantised",
            "train against an unquantised copy: speculators 0.9 would take the embedding instead",
        )
    if v.hybrid_attention:
        yield f.note("verifier-hybrid", f"the verifier mixes kinds of attention: {v.hybrid_attention}")
    stated = spec.verifier_architectures.value
    if isinstance(stated, list) and stated and v.architectures and not any(a in stated for a in v.architectures):
        yield f.warning(
            "verifier-another",
            f"trained for {', '.join(map(str, stated))}, given {', '.join(v.architectures)}",
            "check that it is the same model",
        )


def identity(case: Case) -> Iterator[Finding]:
    if case.format.layout == NO_CONFIG:
        return
    name = case.spec.verifier.value
    if isinstance(name, str) and re.match(r"^(/|~|\.{1,2}/|[A-Za-z]:\\|file:)", name):
        yield f.warning(
            "verifier-local-path",
            f"the verifier is named by a path of one machine ({name.rsplit('/', 1)[-1]})",
            f"{CONVERT} --verifier-name ORG/NAME",
            vllm="direct serving looks for that path",
        )
    elif name is None:
        yield f.note(
            "verifier-unnamed", "the file does not say for which verifier it was trained", "state it in the model card"
        )


def attention_backend(case: Case) -> Iterator[Finding]:
    d = case.spec.head_dim.value
    if is_size(d) and case.spec.mla.origin == "absent" and d not in rules.CPU_HEAD_SIZES:
        yield f.note(
            "head-size-cpu",
            f"head_dim {d} has no attention kernel on vLLM's CPU backend",
            vllm=f"CPU: {', '.join(map(str, rules.CPU_HEAD_SIZES))}",
        )


def sglang(case: Case) -> Iterator[Finding]:
    if case.format.layout == NESTED:
        yield f.note(
            "sglang-nested",
            "a speculators config: SGLang's llama_eagle3 reads the flat layout",
            f"{CONVERT} --to sglang",
            sglang="does not find the decoder's keys",
        )
    elif any(name.startswith("layers.0.") for name in case.source.tensors or ()):
        yield f.note(
            "sglang-names",
            "tensors are named layers.0.",
            f"{CONVERT} --to sglang",
            sglang="knows midlayer. only, and ignores other names in silence",
        )
