"""The load ladder on the perfect draft and on broken copies: each fault stops at the cheapest rung that can see it."""

from __future__ import annotations

import pytest
from eaglebook.engine import ladder
from eaglebook.faults import library
from eaglebook.faults.library import FAULTS

BY_NAME = {fault.name: fault for fault in FAULTS}


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    folder = tmp_path_factory.mktemp("perfect")
    return folder, library.build_bases(folder)


def climb(draft, pair, rungs, **options):
    return list(ladder.climb(draft, pair.verifier, rungs, num_speculative_tokens=3, dtype="float32", **options))


@pytest.mark.timeout(400)
def test_a_healthy_draft_passes_every_rung(bases) -> None:
    pair = bases[1][2, 4, 5]
    verdicts = climb(pair.draft, pair, [0, 1, 2, 3, 4, 5])
    assert [(v.rung.number, v.passed) for v in verdicts] == [(n, True) for n in range(6)], verdicts
    assert "the verifier gives model.embed_tokens.weight" in verdicts[3].detail
    assert verdicts[0].wall_s < min(v.wall_s for v in verdicts[1:])


# what vLLM's own rungs say when nobody reads the file first: fault -> the rung that stops, a part of its message
STOPS = {
    "model_type left out": (1, "model_type"),
    "an unknown tensor": (2, "adapter"),
    "no self_attn.v_proj": (3, "filled in part: model.layers.0.self_attn.qkv_proj.weight"),
    "no lm_head": (3, "not filled: lm_head.weight"),
    "d2t missing": (3, "draft_id_to_target_id"),
    "d2t with a token twice": (4, "finite"),
    "NaN in fc": (4, "not finite"),
    "an id twice": (4, "fc takes"),
}


@pytest.mark.timeout(500)
@pytest.mark.parametrize("name", STOPS)
def test_a_fault_stops_at_its_rung(name, bases, tmp_path) -> None:
    fault = BY_NAME[name]
    draft = library.write(fault, bases[0], tmp_path / "draft")
    pair = bases[1][fault.ids]
    number, message = STOPS[name]
    read = climb(draft, pair, [0])[0]
    assert read.passed == (fault.code == "not-finite"), "all but values are seen by reading, before any process"
    assert read.passed or fault.code in read.detail
    last = climb(draft, pair, [number])[-1]
    assert not last.passed and message in last.detail, last


def test_the_climb_goes_on_when_told(bases, tmp_path) -> None:
    draft = library.write(BY_NAME["model_type left out"], bases[0], tmp_path / "draft")
    verdicts = climb(draft, bases[1][2, 4, 5], [0, 1], stop_at_first_no=False)
    assert [(v.rung.number, v.passed) for v in verdicts] == [(0, False), (1, False)]


def test_the_signature_is_looked_up() -> None:
    said = ladder.signature()
    assert said["accepts"] == {"task": False, "runner": True, "convert": True, "hf_overrides": True}
    assert "task" in said["refusal"]
