"""Every fault is named by its own code, and a healthy draft by none. The codes are what scripts depend on.

Errors and warnings are compared exactly: a check that says too much fails here as one that says too little.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import drafts
import pytest
from cases import CASES, L0, MLA, plus
from drafts import AUX_IDS, DRAFT_VOCAB, HIDDEN, VOCAB, flat, ints, mapping, mla_shapes, nested, shapes
from eaglebook.checkpoint import inspection, vllm_rules
from eaglebook.checkpoint.findings import SEVERITIES

NESTED_IDS = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": AUX_IDS}
D2T, T2D = mapping()
KEPT = [10 + 2 * i for i in range(DRAFT_VOCAB)]

# The cases that vLLM's own loader judges too (cases.py), beside a verifier of the right sizes.
EXPECTED = {
    "flat": "",
    "nested": "",
    "midlayer": "",
    "nested of two layers": "",
    "wrapped": "",
    "native architecture": "",
    "already fused": "",
    "model. prefix": "tensor-prefixed",
    "model.midlayer prefix": "tensor-prefixed",
    "draft_model. prefix": "tensor-prefixed",
    "head under model.": "tensor-prefixed",
    "mapping under model.": "tensor-prefixed",
    "model_type eagle3": "model-type-unknown",
    "model_type speculator_model": "model-type-unknown",
    "no model_type": "model-type-missing",
    "model_type speculators": "",
    "wrapped without method": "method-missing",
    "architecture unknown": "architecture-unsupported",
    "architecture of EAGLE-1": "architecture-unsupported",
    "nested layer mistral": "speculators-layer-unsupported",
    "nested layer untyped": "",
    "nested without hidden_act": "speculators-key-missing",
    "nested type unknown": "speculators-type-unsupported",
    "activation gelu": "activation-unsupported",
    "layer_types too short": "layer-types-length",
    "layer_types too short, nested": "layer-types-length",
    "layer_types too long": "layer-types-length",
    "llama3 rope without factors": "rope-incomplete rope-differs",
    "yarn rope without factor, nested": "rope-incomplete rope-differs",
    "old rope_scaling without factor": "rope-incomplete rope-differs",
    "yarn rope": "rope-differs",
    "mrope": "rope-differs",
    "no fc": "tensor-missing",
    "no norm": "tensor-missing",
    "no hidden_norm": "tensor-missing",
    "no lm_head": "lm-head-missing",
    "no embed_tokens": "",
    "no v_proj": "tensor-missing",
    "no gate_proj": "tensor-missing",
    "no d2t": "d2t-missing",
    "no mapping, no lm_head": "lm-head-missing d2t-missing",
    "no t2d": "",
    "layers missing": "layers-missing",
    "biases missing": "bias-missing",
    "input_norm missing": "input-norm-missing",
    "fc_norm missing": "fc-norm-missing",
    "full vocabulary": "",
    "full vocabulary, no lm_head": "",
    "map of vLLM's own name": "d2t-misnamed",
    "input_norm unasked": "input-norm-unasked",
    "fc bias": "bias-unasked",
    "lm_head bias": "bias-unasked",
    "attention biases unasked": "bias-unasked",
    "mlp biases unasked": "bias-unasked",
    "rotary cache": "",
    "aux off, fc stored": "fc-unasked aux-off",
    "mask_hidden": "mask-hidden-unused",
    "attention biases": "",
    "mlp biases": "",
    "input_norm": "",
    "input_norm, nested": "",
    "input_norm asked in eagle_config": "norm-flag-conflict",
    "fc_norm": "",
    "qwen3": "",
    "qwen3, nested": "",
    "qwen3 without q_norm": "qk-norm-missing",
    "qwen3 with biases": "bias-unasked",
    "four ids": "aux-ids-conflict aux-ids-reading-unknown",
    "four ids in eagle_config": "aux-ids-conflict aux-count",
    "four ids on qwen3": "aux-ids-reading-unknown",
    "mla": "",
    "mla of model_type deepseek_v3": "taken-for-mtp tensor-unknown tensor-missing",
    "mla of model_type deepseek_v2": "",
    "mla, q_lora_rank null": "tensor-unknown",
    "mla, q_lora_rank left out": "tensor-unknown tensor-missing",
    "mla with input_norm": "input-norm-on-mla",
    "mla with a latent too wide": "shape-mismatch",
    "mla with heads too few": "tensor-truncated",
    "four ids uncounted": "aux-count aux-ids-reading-unknown",
    "four ids nested": "aux-count",
    "fc_norm unasked": "fc-norm-unasked",
    "q_norm on llama": "qk-norm-on-llama",
    "verifier_lm_head": "verifier-tensors",
    "verifier_norm": "verifier-tensors",
    "bias of an unknown module": "tensor-unknown",
    "layers too many": "layers-surplus",
    "d2t with a full vocabulary": "d2t-forbidden",
    "d2t too short": "d2t-length",
    "d2t of two dimensions": "d2t-length",
    "draft_vocab_size absent": "draft-vocab-missing",
    "lm_head of other rows": "d2t-missing draft-vocab-mismatch",
    "embedding of other rows": "embed-shape",
    "lm_head of other columns": "lm-head-shape",
    "fc of two states": "fc-width",
    "q without the embedding": "qkv-input-width",
    "hidden_size of another model": "hidden-size-mismatch verifier-hidden-size",
    "scale without a quantisation": "quantised-without-config",
    "head_dim stated too small": "head-dim-mismatch",
    "head_dim left out": "head-dim-mismatch",
    "head_dim stated too large": "head-dim-mismatch",
    "heads that kv heads do not divide": "heads-mismatch kv-heads-mismatch",
    "heads that do not divide the state": "heads-mismatch",
    "a size as text": "config-value",
    "a size as text, nested": "config-value",
    "heads stated too few": "heads-mismatch kv-heads-mismatch",
    "kv heads stated too few": "kv-heads-mismatch",
    "kv heads stated too many": "kv-heads-mismatch",
    "kv heads left out": "kv-heads-implicit",
    "inner size stated too small": "intermediate-size-mismatch",
    "inner size stated too large": "intermediate-size-mismatch",
    "kimi_k2 with head_dim": "",
    "kimi_k2 without head_dim": "head-dim-mismatch",
    "kimi_k2 as lived": "head-dim-mismatch",
    "d2t of int32": "",
    "half precision": "",
    "single precision": "",
}  # fmt: skip


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("verifier") / "config.json"
    file.write_text(json.dumps(drafts.VERIFIER))
    return file


def codes(said: inspection.Inspection, *severities: str) -> set[str]:
    return {finding.code for finding in said.findings if finding.severity in (severities or ("error", "warning"))}


@pytest.mark.parametrize("name", CASES)
def test_each_case_gives_exactly_its_codes(name: str, verifier: Path, tmp_path: Path) -> None:
    config, tensors = CASES[name]
    said = inspection.inspect(drafts.write(tmp_path / "draft", config, tensors), verifier=verifier)
    assert codes(said) == set(EXPECTED[name].split())


@pytest.mark.parametrize("name", CASES)
def test_a_draft_that_vllm_refuses_or_half_loads_has_an_error(name: str, verifier: Path, tmp_path: Path) -> None:
    """No silent fault without an error, whichever the fault is: the prediction and the findings never part."""
    config, tensors = CASES[name]
    said = inspection.inspect(drafts.write(tmp_path / "draft", config, tensors), verifier=verifier)
    outcomes = said.case.prediction.tensors
    harmless = ("norm.weight",) if said.case.prediction.stage else ()
    silent = [o for o in outcomes if o.fate in ("truncated", "uninitialised") and not o.tensor.endswith(harmless)]
    if said.case.prediction.stage or silent:
        assert said.errors, (said.case.prediction.error, silent)


# ---- faults of the config alone, or of values: name -> (config, tensors, values, codes)

SPLIT = {"d2t": ints([k - i for i, k in enumerate([*KEPT[:-1], KEPT[-2]])])}
MORE: dict[str, tuple[dict[str, Any] | None, drafts.Shapes | None, dict[str, Any], str]] = {
    # aux ids
    "no ids": (flat(eagle_aux_hidden_state_layer_ids=None, eagle_config=None), None, {}, "aux-ids-missing"),
    "null ids, nested": ({**nested(), "eagle_aux_hidden_state_layer_ids": None}, None, {}, "aux-ids-missing"),
    "empty ids": (flat(eagle_aux_hidden_state_layer_ids=[], eagle_config={}), None, {}, "aux-ids-missing"),
    "ids only inside, another choice": (
        flat(eagle_aux_hidden_state_layer_ids=None, eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}), None, {},
        "aux-ids-nested-only aux-ids-reading-unknown"),
    "ids only inside, the default": (flat(eagle_aux_hidden_state_layer_ids=None), None, {}, ""),
    "ids in eagle_config of a nested config": (
        {**nested(), "eagle_aux_hidden_state_layer_ids": None, "eagle_config": NESTED_IDS}, None, {}, "aux-ids-nested-only"),
    "ids that count outputs": (flat(eagle_aux_hidden_state_layer_ids=[1, 3, 4], eagle_config=None), None, {}, "aux-ids-count-outputs"),
    "ids that contradict each other": (
        flat(eagle_aux_hidden_state_layer_ids=[1, 3, 4], eagle_config=NESTED_IDS), None, {}, "aux-ids-conflict aux-ids-count-outputs"),
    "ids in another order": (nested(eagle_aux_hidden_state_layer_ids=[5, 4, 2]), None, {}, "aux-ids-unsorted"),
    "an id twice": (nested(eagle_aux_hidden_state_layer_ids=[2, 2, 5]), None, {}, "aux-ids-duplicate aux-count"),
    "an id too large": (nested(eagle_aux_hidden_state_layer_ids=[2, 4, 9]), None, {}, "aux-ids-out-of-range"),
    "an id below zero": (nested(eagle_aux_hidden_state_layer_ids=[-1, 4, 5]), None, {}, "aux-ids-out-of-range"),
    "the last layer's output": (nested(eagle_aux_hidden_state_layer_ids=[2, 4, 8]), None, {}, ""),
    "ids as text": (nested(eagle_aux_hidden_state_layer_ids=["2", "4", "5"]), None, {}, "aux-ids-missing config-value"),
    "ids under another key": (
        flat(eagle_aux_hidden_state_layer_ids=None, eagle_config={"layer_ids": AUX_IDS}), None, {}, "aux-ids-missing aux-ids-wrong-key"),
    "old speculators": (nested(speculators_version="0.3.0"), None, {}, "aux-ids-reading-unknown"),
    # flags and rope
    "no norm flag, nested": (nested(norm_before_residual=None), None, {}, "norm-before-residual-implicit"),
    "no norm flag, flat": (flat(norm_before_residual=None), None, {}, ""),
    "flag as text": (flat(norm_before_residual="true"), None, {}, "config-value"),
    "no eps": (flat(rms_norm_eps=None), None, {}, "rms-norm-eps-implicit"),
    "no rope": (flat(rope_theta=None, rope_parameters=None), None, {}, "rope-implicit"),
    "no theta": (flat(rope_theta=None, rope_parameters={"rope_type": "linear", "factor": 2.0}), None, {}, "rope-implicit rope-differs"),
    "two thetas": (flat(rope_theta=500000.0), None, {}, "rope-conflict"),
    "another theta": (flat(rope_theta=500000.0, rope_parameters=None), None, {}, "rope-differs"),
    "dynamic rope": (
        flat(rope_theta=None, rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}), None, {},
        "rope-stretches rope-differs"),
    "no length": (flat(max_position_embeddings=None), None, {}, "max-positions-implicit"),
    "short": (flat(max_position_embeddings=256), None, {}, "max-positions-short"),
    "a window": (nested({"layer_types": ["sliding_attention"], "sliding_window": 128}), None, {}, "sliding-window"),
    "a window of no size": (nested({"layer_types": ["sliding_attention"]}), None, {}, "sliding-window-missing"),
    # sizes and tokens
    "size as text": (flat(head_dim="32"), None, {}, "config-value head-dim-implicit"),
    "negative size": (flat(num_hidden_layers=-1), None, {}, "config-value"),
    "a token outside": (flat(eos_token_id=VOCAB), None, {}, "special-token-out-of-range"),
    "tied": (flat(tie_word_embeddings=True), None, {}, "tied-embeddings"),
    "a draft vocabulary larger than the vocabulary": (flat(draft_vocab_size=VOCAB + 1), None, {}, "draft-vocab-too-large"),
    # the mapping
    "target ids instead of offsets": (flat(), shapes(), {"d2t": ints(KEPT), "t2d": T2D}, "d2t-absolute"),
    "target ids, no mask": (
        flat(), {n: s for n, s in shapes().items() if n != "t2d"}, {"d2t": ints(list(range(200, 300)))}, "d2t-absolute"),
    "a map out of range": (flat(), shapes(), {"d2t": ints([VOCAB, *[0] * 99])}, "d2t-out-of-range"),
    "a token twice": (flat(), shapes(), SPLIT, "d2t-duplicate d2t-t2d-disagree"),
    "two halves that disagree": (flat(), shapes(), {"t2d": bytes([1] * 100 + [0] * 200)}, "d2t-t2d-disagree"),
    "a map of zeros": (flat(), shapes(), {"d2t": ints([0] * 100)}, "d2t-all-zero"),
    "the first tokens": (flat(), shapes(), {"d2t": ints([0] * 100), "t2d": bytes([1] * 100 + [0] * 200)}, ""),
    "frequency order": (flat(), shapes(), {"d2t": ints([k - i for i, k in enumerate(KEPT[::-1])])}, ""),
    "a mask of another length": (flat(), shapes() | {"t2d": ((VOCAB + 8,), "BOOL")}, {"t2d": T2D + bytes(8)}, "t2d-length"),
    # identity
    "a path as verifier": (
        nested(speculators_config={**nested()["speculators_config"], "verifier": {"name_or_path": "/data/m", "architectures": []}}),
        None, {}, "verifier-local-path"),
    "no proposal": (
        nested(speculators_config={**nested()["speculators_config"], "proposal_methods": []}), None, {}, "direct-serving"),
    "trained for another": (
        nested(speculators_config={**nested()["speculators_config"], "verifier": {"name_or_path": "a/b", "architectures": ["Qwen3ForCausalLM"]}}),
        None, {}, "verifier-another"),
    # not EAGLE-3
    "a verifier": (drafts.VERIFIER, None, {}, "not-a-draft"),
    "EAGLE-1": ({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1, "bias": True}, None, {}, "not-eagle3"),
    "Medusa": ({"medusa_num_heads": 4, "medusa_num_layers": 1}, None, {}, "not-eagle3"),
    "DFlash": (nested(speculators_model_type="dflash"), None, {}, "not-eagle3"),
    "P-EAGLE": (nested(speculators_model_type="peagle"), None, {}, "not-eagle3"),
    "DSpark": ({"architectures": ["Qwen3DSparkModel"], "model_type": "qwen3"}, None, {}, "not-eagle3"),
    "MTP": ({"architectures": ["DeepSeekMTPModel"], "model_type": "deepseek_mtp"}, None, {}, "not-eagle3"),
    "nothing": ({}, None, {}, "not-a-draft format-unknown"),
}  # fmt: skip


@pytest.mark.parametrize("name", MORE)
def test_each_fault_of_a_config_or_value_has_its_code(name: str, verifier: Path, tmp_path: Path) -> None:
    config, tensors, values, expected = MORE[name]
    if tensors is None:
        (tmp_path / "config.json").write_text(json.dumps(config))
        path = tmp_path / "config.json"
    else:
        path = drafts.write(tmp_path / "draft", config, tensors, values)
    said = codes(inspection.inspect(path, verifier=verifier))
    assert said <= set(expected.split()) if name == "nothing" else said == set(expected.split())
    assert said or not expected


# ---- the verifier beside it, the version that serves it


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"hidden_size": 96}, "verifier-hidden-size"),
        ({"vocab_size": 400}, "verifier-vocab-size"),
        ({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}, "verifier-unsupported"),
        ({"num_hidden_layers": None}, "verifier-keys-missing"),
        ({"max_position_embeddings": 4096}, "max-positions-short"),
        ({"rope_theta": 500000.0}, "rope-differs"),
        ({"num_hidden_layers": 9}, "aux-ids-reading-unknown"),
    ],
)
def test_another_verifier_is_noticed(change: dict[str, Any], code: str, tmp_path: Path) -> None:
    verifier = tmp_path / "verifier.json"
    verifier.write_text(json.dumps({k: v for k, v in {**drafts.VERIFIER, **change}.items() if v is not None}))
    config = flat(eagle_config=None) if code == "aux-ids-reading-unknown" else nested()
    said = inspection.inspect(drafts.write(tmp_path / "draft", config, shapes()), verifier=verifier)
    assert code in codes(said)


VERSIONS: list[tuple[dict[str, Any], drafts.Shapes, str, str, str]] = [
    (flat(norm_output=True), shapes(), "norm-flag-too-new", "0.21", "0.22"),
    (flat(fc_norm=True), plus({f"fc_norm.{i}.weight": (HIDDEN,) for i in range(3)}), "norm-flag-too-new", "0.21", "0.22"),
    (nested({"model_type": "qwen3"}), shapes(qk_norm=True), "speculators-qwen3-as-llama", "0.22", "0.25"),
    (flat(architectures=["Eagle3Qwen3ForCausalLM"], model_type="qwen3"), shapes(qk_norm=True), "architecture-unsupported", "0.22", "0.25"),
    (flat(**MLA), mla_shapes(), "architecture-unsupported", "0.16", "0.19"),
    (nested(eagle_aux_hidden_state_layer_ids=[2, 4, 8]), shapes(), "aux-ids-last-layer", "0.16", "0.19"),
    (flat(draft_vocab_size=VOCAB), {n: s for n, s in shapes(draft_vocab=VOCAB).items() if n != "t2d"}, "d2t-forbidden", "0.30", "0.28"),
    (flat(), plus({"fc.bias": (HIDDEN,)}), "tensor-unknown", "0.22", "0.25"),
    (flat(eagle_aux_hidden_state_layer_ids=[1, 2, 4, 5], num_aux_hidden_states=4, eagle_config=None), shapes(aux=4), "aux-count", "0.21", "0.22"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "tensors", "code", "bad", "good"), VERSIONS)
def test_what_a_version_does_not_know(config, tensors, code, bad, good, verifier: Path, tmp_path: Path) -> None:
    folder = drafts.write(tmp_path / "draft", config, tensors)
    at = {
        v: codes(inspection.inspect(folder, verifier=verifier, version=vllm_rules.parse_version(v)), "error")
        for v in (bad, good)
    }
    assert code in at[bad]
    assert code not in at[good]


# ---- the object of --json


def test_json_has_the_four_parts_and_every_value_says_where_it_comes_from(verifier: Path, tmp_path: Path) -> None:
    config = flat(head_dim=None, rope_theta=None, rope_parameters=None, norm_before_residual=None)
    said = inspection.inspect(drafts.write(tmp_path / "draft", config, shapes()), verifier=verifier).as_dict()
    assert set(said) == {"format", "spec", "findings", "vllm"}
    spec = said["spec"]
    assert spec["hidden_size"] == {"value": HIDDEN, "origin": "stated", "where": "hidden_size"}
    assert spec["head_dim"]["origin"] == "weights"
    assert (spec["rope"]["origin"], spec["rope"]["value"]["rope_theta"]) == ("default", 10000.0)
    assert (spec["norm_before_residual"]["origin"], spec["norm_before_residual"]["value"]) == ("default", False)
    assert "logit_scale" not in spec, "absent is absent"
    for finding in said["findings"]:
        assert finding["severity"] in SEVERITIES
        assert finding["code"] and finding["message"]
        assert finding["severity"] == "note" or finding["fix"], finding
    fates = {outcome["tensor"]: outcome["fate"] for outcome in said["vllm"]["tensors"]}
    assert fates["t2d"] == "skipped" and fates[f"{L0}self_attn.q_proj.weight"] == "truncated"
    json.dumps(said)


def test_a_nested_config_reads_its_decoder_from_the_layer(tmp_path: Path) -> None:
    said = inspection.inspect(drafts.write(tmp_path / "draft", nested(), shapes())).as_dict()["spec"]
    assert said["hidden_size"]["where"] == "transformer_layer_config.hidden_size"
    assert said["verifier"]["value"] == "org/verifier"
    assert said["speculative_tokens"]["value"] == 3
    assert said["aux_ids_mean"] == {"value": "input", "origin": "stated", "where": "the speculators format"}


def test_inspection_imports_no_heavy_library(tmp_path: Path) -> None:
    import subprocess
    import sys

    drafts.write(tmp_path / "draft", nested(), shapes())
    code = (
        "import sys; from eaglebook import cli; sys.argv = ['eaglebook', 'inspect', sys.argv[1], '--json']\n"
        "try: cli.main()\nexcept SystemExit as end: assert not end.code, end.code\n"
        "heavy = {'torch', 'transformers', 'vllm', 'speculators', 'numpy', 'papermill'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "draft")], check=True, capture_output=True, timeout=60)


def test_every_code_is_explained_in_the_docs() -> None:
    import re

    from eaglebook import paths

    folder = paths.ROOT / "lib/eaglebook/checkpoint"
    files = [*folder.glob("*checks.py"), *(folder / f"{name}.py" for name in ("source", "geometry", "values"))]
    code = "".join(file.read_text() for file in files)
    known = set(re.findall(r'"([a-z0-9]+(?:-[a-z0-9]+)+)"', code)) - {"utf-8"}
    explained = set(re.findall(r"`([a-z0-9]+(?:-[a-z0-9]+)+)`", (paths.ROOT / "docs" / "findings.md").read_text()))
    assert known == explained


def test_every_fate_of_a_tensor_has_words() -> None:
    from typing import get_args

    from eaglebook.checkpoint import tensor_checks, vllm_load

    assert set(tensor_checks._FATES) == set(get_args(vllm_load.Fate))


def test_a_verifiers_quantised_tensor_in_a_quantised_draft_is_named(tmp_path: Path) -> None:
    """Nothing is predicted of it, and it is named all the same (a crash that fuzzing found)."""
    config = flat(quantization_config={"quant_method": "fp8"})
    folder = drafts.write(tmp_path / "draft", config, plus({"verifier_lm_head.weight": (VOCAB, HIDDEN)}))
    assert "verifier-tensors" in codes(inspection.inspect(folder))
