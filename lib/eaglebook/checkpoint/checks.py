"""What is wrong with a draft, and what each fault does. One function a subject; each yields findings.

Rules: vLLM 0.32 (``vllm_load``, ``vllm_view``) with the versions of ``vllm_rules``; SGLang ``models/llama_eagle3.py``;
speculators 0.9. A fault that vLLM does not see is an error here: it would only show as acceptance near one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from eaglebook.checkpoint import findings as f
from eaglebook.checkpoint import geometry, tensor_checks
from eaglebook.checkpoint import vllm_rules as rules
from eaglebook.checkpoint.case import Case, is_size, short
from eaglebook.checkpoint.findings import Finding
from eaglebook.checkpoint.formats import FLAT, NESTED, NO_CONFIG, NO_DRAFT, PEAGLE, UNKNOWN
from eaglebook.checkpoint.spec import AUX_IDS, INPUT, INTEGERS, NORM_FLAGS, OUTPUT, same
from eaglebook.checkpoint.spec import UNKNOWN as READING_UNKNOWN
from eaglebook.checkpoint.vllm_rules import show

CONVERT = "eaglebook convert DRAFT OUT"
LOW = "loads, serves, accepts little"


def examine(case: Case) -> list[Finding]:
    """All findings, the worst first. A checkpoint of another algorithm gets one: what it is."""
    found = list(case.source.findings)
    if not case.format.is_eagle3:
        return f.ordered([*found, *_another_algorithm(case)])
    subjects = (
        _config, _class, geometry.about, tensor_checks.about, _vocabulary, _mapping, _aux_ids, _aux_count, _norms, _rope, _length, _window,
        _special_tokens, _verifier, _identity, _attention_backend, _sglang,
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


# ---- the config by itself


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


# ---- the draft vocabulary


def _vocabulary(case: Case) -> Iterator[Finding]:
    if case.format.layout == NO_CONFIG:
        return
    spec, target = case.spec, case.target_vocab
    rows = case.rows("lm_head.weight")
    stated = spec.draft_vocab_size
    if stated.origin in ("weights", "default") and rows and spec.vocab_size.known and rows != spec.vocab_size.value:
        yield f.error(
            "draft-vocab-missing", f"draft_vocab_size is not stated and lm_head has {rows} of {spec.vocab_size.value} rows", f"write draft_vocab_size {rows}",
            vllm="refuses: it builds a full head", sglang="takes the verifier's head",
        )  # fmt: skip
    elif stated.origin == "stated" and rows and rows != stated.value:
        yield f.error(
            "draft-vocab-mismatch",
            f"draft_vocab_size is {stated.value}, lm_head has {rows} rows",
            f"write draft_vocab_size {rows}",
            vllm="refuses, by an assertion without text",
        )
    if is_size(stated.value) and is_size(target) and stated.value > target:
        yield f.error(
            "draft-vocab-too-large",
            f"draft_vocab_size {stated.value} is larger than the vocabulary of {target}",
            "correct it",
        )
    full = is_size(stated.value) and stated.value == target
    if full and "d2t" in case.stored:
        strict = case.version >= rules.D2T_FORBIDDEN_WHEN_FULL
        yield (f.error if strict else f.warning)(
            "d2t-forbidden", "d2t is stored although the draft vocabulary is the full one", f"{CONVERT} --fix leaves it out",
            vllm="0.30 and newer refuse it; older ones read it",
        )  # fmt: skip
    if not full and case.source.tensors is not None and "t2d" not in case.stored:
        yield f.note(
            "t2d-missing",
            "no t2d: nothing to check d2t against; SpecForge and speculators want it to train on",
            f"{CONVERT} --fix derives it from d2t",
        )
    if spec.tie_word_embeddings.origin == "stated" and spec.tie_word_embeddings.value:
        missing = case.source.tensors is not None and "lm_head.weight" not in case.stored
        own_head = "embed_tokens.weight" in case.stored or not (case.verifier and case.verifier.tied)
        yield (f.error if missing and (own_head or not full) else f.warning)(
            "tied-embeddings", "tie_word_embeddings is true; a draft's head is its own", "write false",
            vllm="ignores it; without an lm_head it takes the verifier's", sglang="takes the embedding as head",
        )  # fmt: skip
    embed = case.rows("embed_tokens.weight")
    if embed and spec.vocab_size.origin == "stated" and embed != spec.vocab_size.value and case.view.refusal:
        yield f.error(
            "embed-shape", f"embed_tokens has {embed} rows, vocab_size is {spec.vocab_size.value}", "correct vocab_size"
        )


def _mapping(case: Case) -> Iterator[Finding]:
    m, vocab = case.mapping, case.spec.vocab_size.value
    d2t, t2d = case.stored.get("d2t"), case.stored.get("t2d")
    if t2d is not None and t2d.rows is not None and is_size(vocab) and t2d.rows != vocab:
        yield f.error(
            "t2d-length",
            f"t2d has {t2d.rows} entries, vocab_size is {vocab}",
            "write the mapping again",
            vllm="ignores t2d",
        )
    if d2t is None:
        return
    if d2t.dtype and d2t.dtype != "I64":
        yield f.note("d2t-dtype", f"d2t is stored as {d2t.dtype}", "write int64", vllm="casts it with a warning")
        exact = {"BF16": 256, "F16": 2048, "F8_E4M3": 16, "F8_E5M2": 8}.get(d2t.dtype)
        if exact and m is not None and max(map(abs, m.offsets), default=0) > exact:
            yield f.error(
                "d2t-rounded", f"d2t is stored as {d2t.dtype}, which cannot hold whole numbers above {exact}", f"{CONVERT} --fix derives it from t2d", vllm=LOW,
            )  # fmt: skip
            return
    if m is None or not m.offsets or not is_size(vocab):
        return
    targets = m.targets
    if m.absolute:
        yield f.error(
            "d2t-absolute",
            "d2t holds target ids, not offsets (t2d marks exactly these ids)",
            f"{CONVERT} --fix subtracts the row numbers",
            vllm=LOW + ", or an index error at the first request",
        )
        return
    outside = sum(not 0 <= t < vocab for t in targets)
    if outside:
        looks = sorted(set(m.offsets)) == m.offsets and m.offsets[0] >= 0 and m.offsets[-1] < vocab
        code, text = (
            ("d2t-absolute", "; they look like target ids instead of offsets") if looks else ("d2t-out-of-range", "")
        )
        yield f.error(
            code,
            f"{outside} of {len(targets)} draft tokens map outside the vocabulary of {vocab}{text}",
            "write offsets: target id minus row number",
            vllm="an index error at the first request, on a GPU a device assertion",
        )
        return
    if len(set(targets)) != len(targets):
        yield f.error(
            "d2t-duplicate",
            f"{len(targets) - len(set(targets))} draft tokens share a target",
            "write the mapping again",
            vllm="the last one wins: " + LOW,
        )
    if not any(m.offsets) and m.mask != targets and case.spec.draft_vocab_size.value != case.target_vocab:
        yield f.error(
            "d2t-all-zero",
            "d2t is all zero: draft id k is read as token k",
            "write the mapping used in training",
            vllm=LOW,
        )
    elif m.mask is not None and sorted(targets) != m.mask:
        yield f.error(
            "d2t-t2d-disagree",
            f"d2t and t2d name different tokens ({len(set(targets) ^ set(m.mask))} differ)",
            "write both again from one list",
            vllm="reads d2t only",
        )
    elif targets != sorted(targets):
        yield f.note(
            "d2t-unsorted",
            "draft tokens are not in the order of their ids (ModelOpt orders by frequency)",
            "nothing for vLLM and SGLang; tools that assume order misread it",
        )


# ---- the aux hidden states


def _aux_ids(case: Case) -> Iterator[Finding]:
    if case.format.layout == NO_CONFIG:
        return
    spec, ids = case.spec, case.spec.aux_layer_ids.value
    layers = case.verifier.num_layers if case.verifier else None
    top, inner = case.config.get(AUX_IDS), case.eagle.get(AUX_IDS)
    if case.eagle.get("use_aux_hidden_state") is False:
        yield f.warning(
            "aux-off",
            "use_aux_hidden_state is false: the draft reads the last state only",
            "true for EAGLE-3",
            vllm="the V2 runner before 0.33 still collects aux states and fails on the shape",
        )
        return
    if not ids:
        known = case.verifier.default_aux_layer_ids if case.verifier else None
        example = ",".join(map(str, known)) if known else "A,B,C"
        default = (
            f" (2, L//2, L-3) = {case.verifier.default_aux_layer_ids}"
            if case.verifier and layers
            else " (2, L//2, L-3)"
        )
        yield f.warning(
            "aux-ids-missing",
            f"no aux hidden state layer ids: readers take{default}, in silence",
            f"{CONVERT} --aux-ids {example} --ids-mean input, with the ids of training",
            vllm="its default",
            sglang="its default",
        )
        others = [key for key in ("layer_ids", "target_layer_ids") if case.eagle.get(key) or case.config.get(key)]
        if others:
            yield f.error(
                "aux-ids-wrong-key",
                f"ids under {others[0]}",
                f"write them as {AUX_IDS}",
                vllm="V1 ignores this key; V2 reads eagle_config.layer_ids, and target_layer_ids plus one",
            )
        return
    if top and inner and top != inner:
        yield f.error(
            "aux-ids-conflict",
            f"ids {top} at the top level, {inner} in eagle_config",
            "write the ids used in training at both places",
            vllm=f"takes {top}",
            sglang=f"takes {inner}",
        )
    if not top and inner and case.format.layout != NESTED:
        note = layers is not None and case.verifier is not None and sorted(inner) == case.verifier.default_aux_layer_ids
        yield (f.note if note else f.warning)(
            "aux-ids-nested-only", f"ids only in eagle_config{'; they equal the default' if note else ''}", f"write them at the top level too: {CONVERT}",
            vllm="the V2 runner (the GPU's from 0.30 on) ignores them and takes its default; V1 before 0.22 too", sglang="reads them",
        )  # fmt: skip
    if inner and case.format.layout == NESTED and not top:
        yield f.error(
            "aux-ids-nested-only",
            "ids only in eagle_config of a speculators config",
            f"write them at the top level: {CONVERT} --to speculators",
            vllm="drops eagle_config: its default ids",
        )
    if ids != sorted(ids):
        yield f.error(
            "aux-ids-unsorted",
            f"ids {ids} are not ascending: vLLM sorts them, fc was trained in another order",
            "permute the columns of fc, or state the true order of training",
            vllm="sorts and removes duplicates",
        )
    if len(set(ids)) != len(ids):
        yield f.error(
            "aux-ids-duplicate",
            f"ids {ids} repeat",
            "write the ids used in training",
            vllm="removes duplicates, then fc is too wide: fails at the first request",
        )
    if min(ids) < 0 or (layers is not None and max(ids) > layers):
        yield f.error(
            "aux-ids-out-of-range",
            f"ids {ids} of a verifier of {layers} layers",
            "write the ids used in training",
            vllm="never captured: fails at the first request",
        )
    elif layers is not None and max(ids) == layers and case.version < rules.LAST_LAYER_ID:
        yield f.error(
            "aux-ids-last-layer",
            f"id {layers} is the last layer's output; vLLM before 0.19 never captures it",
            "use vLLM 0.19 or newer",
        )
    if spec.aux_ids_mean.value == OUTPUT:
        yield f.error(
            "aux-ids-count-outputs", f"ids {ids} count the output of a layer ({spec.aux_ids_mean.where}); vLLM counts the input", f"{CONVERT} adds one: {[i + 1 for i in ids]}",
            vllm="captures one layer too early: " + LOW, sglang="adds one when the first id is 1 (from pull request 25454 on), always before",
        )  # fmt: skip
    elif spec.aux_ids_mean.value == READING_UNKNOWN:
        yield f.warning(
            "aux-ids-reading-unknown", f"ids {ids}: nothing tells whether they count inputs (vLLM) or outputs (SGLang, SpecForge, ModelOpt)",
            f"{CONVERT} --ids-mean input|output, by what the trainer did", vllm="reads inputs", sglang="adds one when the first id is 1",
        )  # fmt: skip
    unusable = case.verifier.default_aux_layer_ids if case.verifier else None
    if layers is not None and layers < 7 and spec.aux_ids_mean.value == INPUT and ids == unusable:
        yield f.error(
            "aux-ids-default-unusable",
            f"the default ids of {layers} layers are {ids}",
            "choose ids by hand below seven layers",
        )


def _aux_count(case: Case) -> Iterator[Finding]:
    ids, view = case.spec.aux_layer_ids.value, case.view
    if not ids or view.refusal or case.format.layout == NO_CONFIG or not view.use_aux:
        return
    if view.aux_count is not None and view.aux_count != len(set(ids)):
        nested = case.format.layout == NESTED
        fix = f"write num_aux_hidden_states {len(ids)}" + (
            " inside transformer_layer_config, or serve the flat form" if nested else ""
        )
        yield f.error(
            "aux-count", f"{len(ids)} ids, but vLLM builds fc for {view.aux_count} states", fix,
            vllm="the llama class counts num_aux_hidden_states or eagle_config's ids, else 3; it fails at load or at the first request", sglang="always three",
        )  # fmt: skip
    if len(ids) != 3:
        yield f.note(
            "aux-count-sglang", f"{len(ids)} aux states", "", sglang="builds fc for three", vllm="0.22 or newer"
        )


# ---- flags without a shape


def _norms(case: Case) -> Iterator[Finding]:
    spec = case.spec
    if case.format.layout == NO_CONFIG:
        return
    value = spec.norm_before_residual
    if value.origin == "default":
        named_by_speculators = any(name.startswith("layers.0.") for name in case.source.tensors or ())
        severity = f.warning if case.format.layout == NESTED or named_by_speculators else f.note
        yield severity(
            "norm-before-residual-implicit", f"norm_before_residual is not stated: vLLM takes {str(value.value).lower()} in this layout, the opposite in the other",
            "write the value used in training (the original EAGLE-3, SpecForge and ModelOpt: false; speculators' default: true)", vllm=f"{str(value.value).lower()}; a wrong value costs acceptance, not an error",
            sglang="false",
        )  # fmt: skip
    if value.origin == "stated" and value.value is True:
        yield f.note(
            "norm-before-residual-sglang",
            "norm_before_residual is true",
            "check the SGLang version before serving there",
            sglang="its llama_eagle3 keeps the state before the norm as residual: it was read without this flag",
        )
    for flag, since in (
        ("norm_before_fc", rules.NORM_BEFORE_FC),
        ("fc_norm", rules.FC_NORM),
        ("norm_output", rules.NORM_OUTPUT),
    ):
        stated = getattr(spec, flag)
        if stated.origin == "stated" and stated.value is True:
            if case.version < since:
                yield f.error(
                    "norm-flag-too-new",
                    f"{flag} is on; vLLM {show(case.version)} does not know it",
                    f"use vLLM {show(since)} or newer",
                    vllm="ignores it: " + LOW,
                )
            else:
                yield f.note(
                    "norm-flag-since",
                    f"{flag} needs vLLM {show(since)} or newer",
                    vllm="older versions ignore it, in silence",
                )
    for flag, tensor in (("norm_before_fc", "input_norm.weight"), ("fc_norm", "fc_norm.0.weight")):
        stored, on = tensor in case.stored, bool(getattr(spec, flag).value)
        if case.view.refusal and case.source.tensors is not None and stored != on:
            yield f.error(
                f"{tensor.split('.')[0].replace('_', '-')}-{'unasked' if stored else 'missing'}",
                f"{flag} is {on}, {tensor} is {'there' if stored else 'not'}",
                f"set {flag} {str(stored).lower()}",
            )
    inner, outer = case.eagle.get("norm_before_fc"), case.config.get("norm_before_fc")
    if inner is not None and outer is not None and inner != outer:
        yield f.error(
            "norm-flag-conflict",
            f"norm_before_fc is {outer} at the top level and {inner} in eagle_config",
            "write one value",
            vllm=f"takes {inner}",
        )
    if spec.rms_norm_eps.origin in ("default", "absent"):
        yield f.warning(
            "rms-norm-eps-implicit",
            "rms_norm_eps is not stated",
            "write the verifier's",
            vllm="1e-6 in a flat file; refuses a nested one",
        )


def _rope(case: Case) -> Iterator[Finding]:
    if case.format.layout == NO_CONFIG:
        return
    rope, layer = case.spec.rope, case.layer
    parameters, theta, scaling = layer.get("rope_parameters"), layer.get("rope_theta"), layer.get("rope_scaling")
    if rope.origin in ("default", "absent"):
        yield f.warning(
            "rope-implicit",
            "no rope parameters: readers take theta 10000",
            "write the rope used in training, usually the verifier's",
            vllm="10000, in silence",
        )
    elif "by " in rope.where and "rope_theta" in rope.where and "rope_theta by" in rope.where:
        yield f.warning(
            "rope-implicit", "rope is scaled but its theta is not stated: readers take 10000", "write rope_theta"
        )
    if isinstance(parameters, dict) and theta is not None and parameters.get("rope_theta") not in (None, theta):
        yield f.error(
            "rope-conflict",
            f"rope_theta is {theta}, rope_parameters say {parameters['rope_theta']}",
            "write one value",
            vllm="takes rope_parameters",
            sglang="older transformers take rope_theta",
        )
    if (
        isinstance(parameters, dict)
        and isinstance(scaling, dict)
        and not same(_rope_type(parameters), _rope_type(scaling))
    ):
        yield f.error(
            "rope-conflict",
            f"rope_scaling is {_rope_type(scaling)}, rope_parameters are {_rope_type(parameters)}",
            "write one value",
        )
    kind = (rope.value or {}).get("rope_type", "default") if isinstance(rope.value, dict) else "default"
    if (
        kind in rules.STRETCHING_ROPE
        and rules.ROPE_TABLE_FOLLOWS_VERIFIER <= case.version < rules.ROPE_TABLE_ONLY_SAFE_TYPES
    ):
        yield f.warning(
            "rope-stretches",
            f"rope type {kind}: vLLM 0.28 to 0.32 raise max_position_embeddings, which changes its frequencies",
            "use vLLM 0.33, or write the verifier's max_position_embeddings",
        )
    if kind == "mrope":
        yield f.note(
            "rope-mrope", "multimodal rope (mrope)", sglang="reads it as the default type with three positions"
        )
    known = case.verifier.rope if case.verifier else None
    if (
        known
        and rope.origin == "stated"
        and isinstance(rope.value, dict)
        and not same(_comparable(rope.value), _comparable(known))
    ):
        yield f.warning(
            "rope-differs",
            f"rope {short(_comparable(rope.value))} is not the verifier's {short(_comparable(known))}",
            "right if trained so; else copy the verifier's",
        )
    if isinstance(parameters, dict) and theta is None and case.format.layout == FLAT:
        yield f.note(
            "rope-new-style-only",
            "rope only as rope_parameters",
            "write rope_theta too, for readers before transformers 5",
            sglang="older ones read 10000",
        )


def _rope_type(rope: Mapping[str, Any]) -> Any:
    return rope.get("rope_type", rope.get("type", "default"))


def _comparable(rope: Mapping[str, Any]) -> dict[str, Any]:
    return {
        k: (float(v) if isinstance(v, int) and not isinstance(v, bool) else v)
        for k, v in rope.items()
        if v is not None and k != "mrope_section"
    }


def _length(case: Case) -> Iterator[Finding]:
    if case.format.layout == NO_CONFIG:
        return
    value = case.spec.max_position_embeddings
    theirs = case.verifier.max_position_embeddings if case.verifier else None
    if value.origin in ("default", "absent"):
        yield f.warning(
            "max-positions-implicit",
            f"max_position_embeddings is not stated: readers take {value.value or 'their default'}",
            "write the verifier's",
        )
    elif theirs and is_size(value.value) and value.value < theirs:
        yield f.warning(
            "max-positions-short", f"max_position_embeddings {value.value} is below the verifier's {theirs}", "write the verifier's, or keep served sequences shorter",
            vllm="longer sequences: the V1 runner submits zeros as drafts (accepted almost never); before 0.28 the rope table is indexed out of range",
        )  # fmt: skip
    elif not theirs and is_size(value.value) and value.value <= 4096:
        yield f.warning(
            "max-positions-short",
            f"max_position_embeddings {value.value}: longer requests get no useful drafts",
            "write the verifier's",
            vllm="longer sequences: V1 submits zeros as drafts",
        )


def _window(case: Case) -> Iterator[Finding]:
    if case.format.layout == NO_CONFIG:
        return
    types, window = case.spec.layer_types.value, case.spec.sliding_window.value
    if isinstance(types, list) and "sliding_attention" in types and is_size(window):
        yield f.warning(
            "sliding-window",
            f"the draft attends to the last {window} tokens only (speculators' default is 2048)",
            "right if trained so; state it when publishing",
            vllm="honoured through layer_types; older versions and SGLang ignore it",
        )
    if isinstance(types, list) and "sliding_attention" in types and not is_size(window):
        yield f.error(
            "sliding-window-missing",
            "layer_types slide and sliding_window is not stated",
            "write sliding_window",
            vllm="attends to everything",
        )


def _special_tokens(case: Case) -> Iterator[Finding]:
    vocab = case.spec.vocab_size.value
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = getattr(case.spec, key).value
        for token in value if isinstance(value, list) else [value]:
            if type(token) is int and is_size(vocab) and not 0 <= token < vocab and token != -1:
                yield f.warning(
                    "special-token-out-of-range",
                    f"{key} {token} is outside the vocabulary of {vocab}",
                    f"{CONVERT} --fix takes the verifier's",
                )
    end = case.spec.eos_token_id.value
    if (
        case.mapping is not None
        and type(end) is int
        and case.mapping.mask is not None
        and end not in set(case.mapping.targets)
    ):
        yield f.note(
            "end-token-not-in-vocabulary",
            f"the draft cannot say the end token {end}",
            "keep special tokens when choosing the draft vocabulary",
        )


# ---- the verifier


def _verifier(case: Case) -> Iterator[Finding]:
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


def _identity(case: Case) -> Iterator[Finding]:
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


def _attention_backend(case: Case) -> Iterator[Finding]:
    d = case.spec.head_dim.value
    if is_size(d) and case.spec.mla.origin == "absent" and d not in rules.CPU_HEAD_SIZES:
        yield f.note(
            "head-size-cpu",
            f"head_dim {d} has no attention kernel on vLLM's CPU backend",
            vllm=f"CPU: {', '.join(map(str, rules.CPU_HEAD_SIZES))}",
        )


def _sglang(case: Case) -> Iterator[Finding]:
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
