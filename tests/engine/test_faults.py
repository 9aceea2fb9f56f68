"""The fault library: every fault is named by the inspection, predicted as it happens, and lossless where it is served."""

from __future__ import annotations

import pytest
import torch
from eaglebook import acceptance, hidden_states, reference
from eaglebook.checkpoint import inspection
from eaglebook.faults import library, perfect, realistic, verdicts
from eaglebook.faults.library import FAULTS
from transformers import AutoModelForCausalLM


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    folder = tmp_path_factory.mktemp("perfect")
    return folder, library.build_bases(folder)


def test_the_library_is_large_and_its_names_are_its_own() -> None:
    assert len(FAULTS) >= 80
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert {fault.group for fault in verdicts.spread(12)} >= {"config", "sizes", "mapping", "aux ids"}


def test_the_perfect_draft_has_no_fault(bases) -> None:
    for pair in bases[1].values():
        said = inspection.inspect(pair.draft, verifier=pair.verifier, deep=True)
        assert not [f.code for f in said.findings if f.severity != "note"]
        assert not said.case.prediction.stage


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_every_fault_is_named(fault, bases, tmp_path) -> None:
    draft = library.write(fault, bases[0], tmp_path / "draft")
    said = inspection.inspect(draft, verifier=bases[1][fault.ids].verifier, deep=True)
    assert fault.code in [f.code for f in said.findings if f.severity != "note"]


def test_the_pair_is_built_for_any_ids(tmp_path) -> None:
    pair = perfect.build(tmp_path, aux_ids=[3, 7, 8])
    assert inspection.inspect(pair.draft).case.spec.aux_layer_ids.value == [3, 7, 8]
    assert len(pair.cycle) == perfect.DRAFT_VOCAB and len(set(pair.cycle.values())) == perfect.DRAFT_VOCAB


@pytest.fixture(scope="module")
def judged(tmp_path_factory, request):
    """A few of them in every run of the tests; all of them where slow tests run."""
    return verdicts.judge(tmp_path_factory.mktemp("faults"), verdicts.spread(8))


def check(verdict: verdicts.Verdict) -> None:
    fault = verdict.fault
    assert verdict.named, (fault.name, verdict.codes)
    assert verdict.predicted == verdict.real, (
        fault.name,
        verdict.predicted,
        verdict.predicted_error,
        verdict.real,
        verdict.error,
    )
    assert verdict.lossless, f"{fault.name}: a broken draft costs time, never words"
    if verdict.real == "served" and not verdict.undefined:
        assert (verdict.acceptance_length == verdicts.K + 1) == fault.harmless, (fault.name, verdict.acceptance_length)


@pytest.mark.timeout(600)
def test_a_sample_happens_as_predicted(judged) -> None:
    assert len(judged) == 8
    for verdict in judged:
        check(verdict)


@pytest.mark.timeout(600)
def test_the_plain_reference_agrees_with_vllm(bases, tmp_path) -> None:
    """What the reference says a broken file accepts is what vLLM accepts: not only where all is well."""
    wanted = (
        "another theta",
        "linear scaling",
        "an embedding of its own",
        "norm_before_residual left out",
        "kv heads left out",
    )
    judged = verdicts.judge(tmp_path / "judged", [fault for fault in FAULTS if fault.name in wanted])
    pair = bases[1][tuple(perfect.AUX_IDS)]
    model = AutoModelForCausalLM.from_pretrained(pair.verifier, dtype=torch.float32)
    for number, verdict in enumerate(judged):
        draft = reference.load(library.write(verdict.fault, bases[0], tmp_path / str(number)), model)
        total = acceptance.none(verdicts.K)
        for start in verdicts.STARTS:
            prompt = pair.prompt(start, verdicts.LENGTH)
            ids = prompt + pair.answer(prompt, verdicts.ANSWER_TOKENS)
            states = hidden_states.capture(model, [ids], perfect.AUX_IDS)[0][:, :-1]
            total += acceptance.of_steps(reference.walk(draft, states, ids, len(prompt), verdicts.K), verdicts.K)
        assert total.mean_acceptance_length == pytest.approx(verdict.acceptance_length, abs=0.02), verdict.fault.name


@pytest.mark.timeout(600)
def test_the_faults_that_people_had_are_named_on_any_draft(bases, tmp_path) -> None:
    """The realistic ones, done to a draft as if it were the user's own; here the perfect one, so that each must show."""
    pair = bases[1][tuple(perfect.AUX_IDS)]
    prompts = [pair.prompt(start, verdicts.LENGTH) for start in verdicts.STARTS]
    healthy, *broken = realistic.judge(
        pair.verifier, pair.draft, prompts, realistic.FAULTS[:6], tmp_path, max_tokens=61, dtype="float32"
    )
    assert healthy.acceptance.mean_acceptance_length == verdicts.K + 1
    assert len(broken) == 6
    for verdict in broken:
        assert verdict.named, verdict
        assert verdict.acceptance and verdict.acceptance.mean_acceptance_length < verdicts.K + 1, verdict


@pytest.mark.parametrize("ids", [tuple(perfect.AUX_IDS), (1, 3, 6)], ids=str)
@pytest.mark.parametrize("fault", realistic.FAULTS, ids=lambda fault: fault.name)
def test_every_realistic_fault_is_named(fault, ids, bases, tmp_path) -> None:
    pair = bases[1][ids]
    copy = realistic.copy_of(pair.draft)
    assert fault.applies(copy)
    fault.change(copy)
    said = inspection.inspect(copy.write(tmp_path / "draft"), verifier=pair.verifier, deep=True)
    assert set(fault.codes) & {f.code for f in said.findings if f.severity != "note"}


def test_a_fault_that_needs_what_is_not_there_is_left_out(bases) -> None:
    copy = realistic.copy_of(bases[1][tuple(perfect.AUX_IDS)].draft)
    copy.drop("d2t", "t2d").set(head_dim=None)
    left = {fault.name for fault in realistic.FAULTS if fault.applies(copy)}
    assert left.isdisjoint({"d2t missing", "d2t moved by one row", "head_dim halved", "no lm_head"})
    assert len(left) == len(realistic.FAULTS) - 4


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_fault_happens_as_predicted(tmp_path_factory) -> None:
    for verdict in verdicts.judge(tmp_path_factory.mktemp("all-faults")):
        check(verdict)
