"""What is wrong with a draft, and what each fault does. One function a subject; each yields findings.

Rules: vLLM 0.32 (``vllm_load``, ``vllm_view``) with the versions of ``vllm_rules``; SGLang ``models/llama_eagle3.py``;
speculators 0.9. A fault that vLLM does not see is an error here: it would only show as acceptance near one.
"""

from __future__ import annotations

from collections.abc import Iterator

from eaglebook.checkpoint import aux_checks, flag_checks, geometry, tensor_checks, verifier_checks, vocabulary_checks
from eaglebook.checkpoint import findings as f
from eaglebook.checkpoint import vllm_rules as rules
from eaglebook.checkpoint.case import CONVERT, Case, short
from eaglebook.checkpoint.findings import Finding
from eaglebook.checkpoint.formats import NESTED, NO_CONFIG, NO_DRAFT, PEAGLE, UNKNOWN
from eaglebook.checkpoint.spec import AUX_IDS, INTEGERS, NORM_FLAGS
from eaglebook.checkpoint.vllm_rules import show


def examine(case: Case) -> list[Finding]:
    """All findings, the worst first. A checkpoint of another algorithm gets one: what it is."""
    found = list(case.source.findings)
    if not case.format.is_eagle3:
        return f.ordered([*found, *_another_algorithm(case)])
    subjects = (
        _config, _class, geometry.about, tensor_checks.about, vocabulary_checks.vocabulary, vocabulary_checks.mapping,
        vocabulary_checks.special_tokens, aux_checks.aux_ids, aux_checks.aux_count, flag_checks.norms, flag_checks.rope, flag_checks.length,
        flag_checks.window, verifier_checks.verifier, verifier_checks.identity, verifier_checks.attention_backend, verifier_checks.sglang,
    )  # fmt: skip
    for subject in subjects:
        found += subject(case)
    return f.ordered(found)


def _another_algorithm(case: Case) -> Iterator[Finding]:
    kind, why = case.format.algorithm, case.format.evidence[-1]
    if kind == NO_DRAFT:
        yield f.error(
            "not-a-draft", f"an ordinary model, no draft: {why}", "give the draft's folder, not the verifier's"
        )
    elif kind == UNKNOWN:
        yield f.error(
            "format-unknown", f"nothing tells what this is: {why}", "give the config.json that belongs to the weights"
        )
    else:
        method = {PEAGLE: "method eagle3 with parallel_drafting", "DFlash": "method dflash", "MTP": "method mtp"}.get(
            kind, "its own method"
        )
        yield f.error(
            "not-eagle3",
            f"a {kind} draft, not EAGLE-3: {why}",
            f"serve it by {method}",
            vllm="refused, or loads nonsense, as eagle3",
        )


def _config(case: Case) -> Iterator[Finding]:
    if case.format.layout == NO_CONFIG:
        if not any(said.code.startswith("config-") for said in case.source.findings):
            yield f.note(
                "config-not-given",
                "tensors without a config: nothing can be said about flags, ids, rope and names of classes",
            )
        return
    for where, prefix in ((case.layer, ""), (case.config, "")):
        for key in sorted(INTEGERS & where.keys()):
            value = where[key]
            if value is not None and (type(value) is not int or value <= 0):
                yield f.error(
                    "config-value",
                    f"{prefix}{key} is {short(value)}, not a positive whole number",
                    f"write the number {key} has in the weights",
                )
    for key in ("rms_norm_eps", "rope_theta"):
        value = case.layer.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            yield f.error(
                "config-value", f"{key} is {short(value)}, not a number", "write the number", vllm="refuses it"
            )
    for flag in NORM_FLAGS:
        if case.config.get(flag) is not None and not isinstance(case.config[flag], bool):
            yield f.error(
                "config-value", f"{flag} is {short(case.config[flag])}, not true or false", "write true or false"
            )
    if case.config.get(AUX_IDS) is not None or case.eagle.get(AUX_IDS) is not None:
        for ids in (case.config.get(AUX_IDS), case.eagle.get(AUX_IDS)):
            if ids is not None and not (isinstance(ids, list) and all(type(i) is int for i in ids)):
                yield f.error(
                    "config-value",
                    f"{AUX_IDS} is {short(ids)}, not a list of whole numbers",
                    "write the ids used in training",
                )
    if case.spec.num_hidden_layers.origin == "default" or case.spec.hidden_size.origin == "absent":
        yield f.error(
            "size-missing",
            "hidden_size or num_hidden_layers is not stated",
            "write the sizes out",
            vllm="takes the defaults of a config class",
        )
    if isinstance(case.config.get("auto_map"), dict):
        yield f.note(
            "auto-map",
            "the config names Python code (auto_map); nothing here runs it",
            f"{CONVERT} --publish leaves it out",
        )


_WRITTEN_ANEW = f"{CONVERT} writes it anew"
_REFUSALS = (  # part of vLLM's message, code, repair; the first match holds
    ("MTP", "taken-for-mtp", f"{CONVERT} writes model_type llama, or kimi_k2 for latent attention"),
    ("model_type` key", "model-type-missing", _WRITTEN_ANEW),
    ("does not recognize", "model-type-unknown", _WRITTEN_ANEW),
    ("not supported", "architecture-unsupported", _WRITTEN_ANEW),
    ("Expected one of", "speculators-type-unsupported", _WRITTEN_ANEW),
    ("Unsupported model_type", "speculators-layer-unsupported", _WRITTEN_ANEW),
    (
        "no attribute",
        "speculators-key-missing",
        "write the key into transformer_layer_config, with the value used in training",
    ),
    ("Unsupported activation", "activation-unsupported", "train a draft with silu"),
    ("layer_types", "layer-types-length", "write one layer type for each layer"),
    ("EAGLE-1", "method-missing", _WRITTEN_ANEW),
    ("rope_parameters", "rope-incomplete", "write the factors used in training"),
    ("Validation error for field", "config-value", "write a whole number"),
    ("TypeError", "config-value", "write a whole number"),
    (
        "not a multiple",
        "heads-mismatch",
        "write the numbers of heads used in training; transformers wants hidden_size to be a multiple",
    ),
    ("not divisible", "heads-mismatch", "write the numbers of heads used in training"),
)


def _class(case: Case) -> Iterator[Finding]:
    """Which class vLLM takes, or the message it refuses the config with."""
    refusal, architecture = case.view.refusal, case.view.architecture
    if case.format.layout == NO_CONFIG:
        return
    if refusal:
        code, fix = "config-refused", "correct what the message names"
        for part, name, repair in _REFUSALS:
            if part in refusal:
                code, fix = name, repair
                break
        yield f.error(code, f"vLLM {show(case.version)} refuses the config: {refusal}", fix, vllm=refusal)
        return
    since = rules.ARCHITECTURES[architecture][1]
    if since > rules.OLDEST:
        yield f.note(
            "architecture-since",
            f"{architecture} is known to vLLM from {show(since)} on",
            vllm=f"earlier versions refuse {architecture}",
        )
    if (
        case.format.layout == NESTED
        and case.spec.model_type.value == "qwen3"
        and case.version < rules.SPECULATORS_QWEN3
    ):
        yield f.error(
            "speculators-qwen3-as-llama",
            "a qwen3 layer is built as llama before vLLM 0.25",
            "use vLLM 0.25 or newer",
            vllm="q_norm and k_norm raise",
        )
    if case.format.layout == NESTED:
        direct = case.config.get("speculators_config")
        methods = direct.get("proposal_methods") if isinstance(direct, dict) else None
        if not methods or case.spec.verifier.origin == "absent":
            yield f.warning(
                "direct-serving", "`vllm serve` on this folder alone needs proposal_methods and verifier.name_or_path",
                "name the verifier: convert --to speculators --verifier-name NAME", vllm="Invalid speculators config structure; as a draft it loads",
            )  # fmt: skip
