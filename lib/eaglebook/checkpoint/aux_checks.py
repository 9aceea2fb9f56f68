"""The aux hidden states: which layers, counted how, stated where, and how many ``fc`` takes."""

from __future__ import annotations

from collections.abc import Iterator

from eaglebook.checkpoint import findings as f
from eaglebook.checkpoint import vllm_rules as rules
from eaglebook.checkpoint.case import CONVERT, LOW, Case
from eaglebook.checkpoint.findings import Finding
from eaglebook.checkpoint.formats import NESTED, NO_CONFIG
from eaglebook.checkpoint.spec import AUX_IDS, INPUT, OUTPUT, UNKNOWN


def aux_ids(case: Case) -> Iterator[Finding]:
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
    elif spec.aux_ids_mean.value == UNKNOWN:
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


def aux_count(case: Case) -> Iterator[Finding]:
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
