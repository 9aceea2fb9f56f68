"""From what vLLM's loader will do with each tensor to findings: the same cause is said once, by its own code."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from eaglebook.checkpoint import findings as f
from eaglebook.checkpoint import geometry, names
from eaglebook.checkpoint.case import CONVERT, Case
from eaglebook.checkpoint.findings import Finding
from eaglebook.checkpoint.formats import NO_CONFIG
from eaglebook.checkpoint.vllm_load import Outcome
from eaglebook.checkpoint.vllm_rules import show


def about(case: Case) -> Iterator[Finding]:
    if case.source.tensors is None:
        if case.source.config is not None and not any(
            s.code.startswith(("weights-", "index-")) for s in case.source.findings
        ):
            yield f.note("weights-not-given", "no weights were given: nothing can be said about tensors")
        return
    if case.format.layout == NO_CONFIG:
        return
    explained = bool(geometry.CODES & {found.code for found in geometry.about(case)})
    grouped: dict[str, list[Outcome]] = {}
    for outcome in case.prediction.tensors:
        code = _code(outcome, case)
        if code and not (explained and code.endswith(("-shape", "-width", "-mismatch", "-truncated"))):
            grouped.setdefault(code, []).append(outcome)
    for code, outcomes in grouped.items():
        yield _finding(code, outcomes, case)
    twice = [plain for plain, n in Counter(case.own.values()).items() if n > 1]
    if twice:
        both = [name for name, plain in case.own.items() if plain == twice[0]]
        yield f.error(
            "tensor-twice",
            f"{' and '.join(both)} are one tensor",
            "remove the one that is not wanted",
            vllm="loads both: the last one wins",
        )
    if any(name.endswith(("weight_scale", "weight_packed", "weight_scale_inv")) for name in case.stored):
        known = case.spec.quantisation.origin == "stated"
        kind = f.note if known else f.error
        yield kind(
            "quantised-draft" if known else "quantised-without-config", "quantised tensors in the draft",
            "" if known else "add the quantization_config they were made with", vllm="loads quantised" if known else "refuses weight_scale",
        )  # fmt: skip
    kinds = {t.dtype for name, t in case.stored.items() if t.dtype and name not in ("d2t", "t2d")}
    if len(kinds) > 1 and case.spec.quantisation.origin == "absent":
        yield f.note(
            "dtype-mixed",
            f"weights of several types: {', '.join(sorted(kinds))}",
            vllm="casts each to the verifier's type",
        )
    stated = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}.get(str(case.spec.dtype.value))
    if stated and len(kinds) == 1 and kinds != {stated}:
        yield f.note(
            "dtype-differs",
            f"dtype is {case.spec.dtype.value}, the weights are {kinds.pop()}",
            vllm="casts to the verifier's type",
        )


def _code(outcome: Outcome, case: Case) -> str:
    """The finding an outcome belongs to, "" when it is as it should be or another check says it better."""
    name, fate = names.plain(outcome.tensor), outcome.fate
    if outcome.tensor in case.foreign:
        return "verifier-tensors"
    if fate in ("loaded", "skipped", "unknown"):
        return ""
    if fate == "shared":
        return {"lm_head.weight": "lm-head-shared"}.get(name, "embed-shared")
    if fate in ("uninitialised", "left at default"):
        if name in case.stored:
            return ""  # it is there, under a name vLLM does not take: said once
        for pattern, code in (
            ("lm_head", "lm-head-missing"), ("embed_tokens", "embed-missing"), ("d2t", "d2t-missing"), ("input_norm", "input-norm-missing"),
            (r"fc_norm", "fc-norm-missing"), (r"\.bias$", "bias-missing"), (r"[qk]_norm", "qk-norm-missing"),
        ):  # fmt: skip
            if re.search(pattern, name):
                return code
        layer = names.layer(name)
        stored_layers = {names.layer(n) for n in case.stored}
        return "" if layer is not None and layer not in stored_layers and layer > 0 else "tensor-missing"
    if fate == "dropped":
        for pattern, code in (
            (r"\.bias$", "bias-unasked"), ("input_norm", "input-norm-unasked"), ("d2t|draft_id", "d2t-misnamed"),
            ("mask_hidden", "mask-hidden-unused"), (r"^fc\.", "fc-unasked"),
        ):  # fmt: skip
            if re.search(pattern, name):
                return code
        return "tensor-dropped"
    if fate == "truncated":
        return "tensor-truncated"
    if names.unwrapped(outcome.tensor) != outcome.tensor:
        return "tensor-prefixed"
    for pattern, code in (
        ("verifier|target_model", "verifier-tensors"), ("^d2t", "" if _dig_d2t(case) else "d2t-length"), (r"^fc_norm", "fc-norm-unasked"),
        (r"[qk]_norm", "qk-norm-on-llama"), ("^lm_head", "" if _rows_said(case) else "lm-head-shape"), ("^embed_tokens", "embed-shape"), (r"^fc\.weight", "" if _count_said(case) else "fc-width"), ("^input_norm", "input-norm-on-mla"),
        ("weight_scale|weight_packed|zero_point|g_idx", ""),
    ):  # fmt: skip
        if re.search(pattern, name):
            return code
    if "no module" in outcome.detail or "KeyError" in outcome.detail:
        layer = names.layer(name)
        return "" if layer is not None and layer >= (case.view.layers or 1) else "tensor-unknown"
    if re.search(r"layers\.0\.self_attn\.(q|k|v|q_a|kv_a)_proj", name) and _narrow_input(name, case):
        return "qkv-input-width"
    return "shape-mismatch"


def _dig_d2t(case: Case) -> bool:
    """Whether a raising d2t is the full-vocabulary case, which `_vocabulary` says."""
    return case.view.draft_vocab is not None and case.view.draft_vocab == case.target_vocab


def _rows_said(case: Case) -> bool:
    """Whether lm_head has other rows than draft_vocab_size, which the vocabulary check says."""
    return case.rows("lm_head.weight") != case.view.draft_vocab


def _count_said(case: Case) -> bool:
    """Whether fc is as wide as the ids are many, so that only the count is wrong, which the check of ids says."""
    fc, ids = case.stored.get("fc.weight"), case.spec.aux_layer_ids.value
    return bool(fc and ids and case.view.target_hidden and fc.columns == len(ids) * case.view.target_hidden)


def _narrow_input(name: str, case: Case) -> bool:
    tensor = case.stored.get(name)
    return tensor is not None and tensor.columns is not None and tensor.columns == case.view.hidden


_ABOUT: dict[str, tuple[f.Severity, str, str]] = {
    "lm-head-shared": ("note", "no lm_head stored; the vocabulary is full", "nothing, if the draft was trained with the verifier's head"),
    "embed-shared": ("note", "no embed_tokens stored", "nothing: readers take the verifier's"),
    "lm-head-missing": ("error", "no lm_head although the draft vocabulary is smaller", "find the trained lm_head; it cannot be guessed"),
    "embed-missing": ("error", "no embed_tokens, and the verifier's has another width", "add the embedding the draft was trained with"),
    "d2t-missing": ("error", "no d2t although the draft vocabulary is smaller", f"{CONVERT} --fix derives it from t2d; without t2d find the mapping used in training"),
    "input-norm-missing": ("error", "norm_before_fc is on and input_norm is not stored", "set norm_before_fc as in training, or find the tensor"),
    "fc-norm-missing": ("error", "fc_norm is on and its tensors are not stored", "set fc_norm as in training, or find the tensors"),
    "bias-missing": ("error", "the config asks for biases that are not stored", "set attention_bias and mlp_bias false, if trained so"),
    "qk-norm-missing": ("error", "a qwen3 layer without q_norm or k_norm", "find the tensors, or use the llama architecture if trained so"),
    "tensor-missing": ("error", "tensors are missing", "find them: vLLM does not notice, the draft would be noise"),
    "bias-unasked": ("error", "biases that the config does not ask for", "set attention_bias or mlp_bias true, if they were trained"),
    "input-norm-unasked": ("error", "input_norm is stored and norm_before_fc is off", "set norm_before_fc true"),
    "d2t-misnamed": ("error", "the mapping has vLLM's internal name", "rename it to d2t"),
    "mask-hidden-unused": ("warning", "mask_hidden is stored: a P-EAGLE draft?", "serve it with parallel_drafting"),
    "fc-unasked": ("error", "fc is stored and use_aux_hidden_state is off", "set eagle_config.use_aux_hidden_state true"),
    "tensor-dropped": ("warning", "tensors nobody reads", "remove them"),
    "tensor-truncated": ("error", "tensors larger than the config says", "correct the sizes in the config"),
    "tensor-prefixed": ("error", "names with a prefix no reader expects", f"{CONVERT} --fix strips it"),
    "verifier-tensors": ("error", "tensors of the verifier in the draft's file", f"{CONVERT} --fix leaves them out"),
    "d2t-length": ("error", "d2t has another length or rank than draft_vocab_size", "write the mapping again"),
    "fc-norm-unasked": ("error", "fc_norm is stored and fc_norm is off", "set fc_norm true"),
    "qk-norm-on-llama": ("error", "q_norm or k_norm in a llama draft", "use the qwen3 architecture (vLLM 0.25 or newer)"),
    "input-norm-on-mla": (
        "error",
        "input_norm is stored, and the DeepSeek class has no norm before fc",
        "retrain without norm_before_fc, or use a llama draft",
    ),
    "lm-head-shape": ("error", "lm_head has another shape than the config says", "correct draft_vocab_size or hidden_size"),
    "embed-shape": ("error", "embed_tokens has another shape than the config says", "correct vocab_size; the embedding is indexed by target tokens"),
    "fc-width": ("error", "fc has another width than (number of aux states) × target hidden size", "correct num_aux_hidden_states, the ids or target_hidden_size"),
    "tensor-unknown": ("error", "tensors no reader knows", "remove them, or find the format they belong to"),
    "qkv-input-width": ("error", "q, k or v of the first layer read one state instead of two: not EAGLE-3", "this layer takes hidden_size columns; EAGLE-3's takes twice that"),
    "shape-mismatch": ("error", "shapes that do not belong to this config", "correct the sizes in the config"),
}  # fmt: skip
_FATES = {
    "loaded": "loads it in the place of the draft's", "skipped": "skips it", "unknown": "was not predicted",
    "shared": "takes the verifier's", "uninitialised": "loads, and that parameter is uninitialised memory", "left at default": "loads, and that parameter keeps its default",
    "dropped": "drops it in silence", "truncated": "cuts it in silence", "raises": "refuses to load",
}  # fmt: skip


def _finding(code: str, outcomes: list[Outcome], case: Case) -> Finding:
    severity, text, fix = _ABOUT[code]
    listed = ", ".join(o.tensor for o in outcomes[:4]) + (f" and {len(outcomes) - 4} more" if len(outcomes) > 4 else "")
    detail = f" ({outcomes[0].detail})" if outcomes[0].detail and outcomes[0].fate in ("raises", "truncated") else ""
    missing = outcomes[0].fate in ("uninitialised", "left at default") and outcomes[0].detail
    does = f"loads; {outcomes[0].detail}" if missing else _FATES[outcomes[0].fate]
    sglang = (
        "ignores unknown names in silence" if code in ("tensor-prefixed", "tensor-unknown", "verifier-tensors") else ""
    )
    return Finding(code, severity, f"{text}: {listed}{detail}", fix, f"{show(case.version)}: {does}", sglang)
