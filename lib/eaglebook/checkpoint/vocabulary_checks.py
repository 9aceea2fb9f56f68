"""The draft vocabulary: its size, its head, its map to target tokens, the special tokens."""

from __future__ import annotations

from collections.abc import Iterator

from eaglebook.checkpoint import findings as f
from eaglebook.checkpoint import vllm_rules as rules
from eaglebook.checkpoint.case import CONVERT, LOW, Case, is_size
from eaglebook.checkpoint.findings import Finding
from eaglebook.checkpoint.formats import NO_CONFIG


def vocabulary(case: Case) -> Iterator[Finding]:
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


def mapping(case: Case) -> Iterator[Finding]:
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


def special_tokens(case: Case) -> Iterator[Finding]:
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
