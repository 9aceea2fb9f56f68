"""Mappings from elsewhere: whatever file they came in, what their numbers mean, and what is wrong with them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from eaglebook import foreign_mapping as foreign
from eaglebook.errors import UserError
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

V = 300


def mapping(ids) -> tuple[np.ndarray, np.ndarray]:
    """d2t as offsets, and t2d."""
    kept = np.array(sorted(ids))
    return kept - np.arange(len(kept)), np.isin(np.arange(V), kept)


ids = st.sets(st.integers(0, V - 1), min_size=2, max_size=V - 1)


@given(ids)
def test_with_a_mask_both_readings_are_told_apart_and_repaired(kept) -> None:
    d2t, t2d = mapping(kept)
    absolute = np.array(sorted(kept))
    told = foreign.diagnose(absolute, t2d, V)
    if np.array_equal(np.sort(absolute), np.sort(absolute + np.arange(len(absolute)))):
        assert told.kind == "unclear"
    else:
        assert told.kind == "target ids"
        assert not told.problems
        assert np.array_equal(foreign.as_offsets(absolute), d2t)
    assert foreign.diagnose(d2t, t2d, V).kind in ("offsets", "unclear")
    assert not foreign.diagnose(d2t, t2d, V).problems


@given(st.sets(st.integers(0, V - 1), min_size=20, max_size=150))
def test_without_a_mask_the_numbers_themselves_tell(kept) -> None:
    d2t, _ = mapping(kept)
    neighbours = len(np.unique(d2t)) < len(d2t)
    if neighbours:
        assert foreign.diagnose(d2t, None, V).kind == "offsets"
    assert foreign.diagnose(np.array(sorted(kept)), None, V).kind == "target ids"


def test_what_is_wrong_is_said() -> None:
    d2t, t2d = mapping(range(10, 110))
    assert "verifier 400" in foreign.diagnose(d2t, t2d, 400).problems[-1]
    assert "no t2d" in foreign.diagnose(d2t, None, V).problems[-1]
    wrong = t2d.copy()
    wrong[[10, 299]] = wrong[[299, 10]]
    assert "2 differ" in foreign.diagnose(d2t, wrong, V).problems[-1]
    assert "ascending" in foreign.diagnose(d2t[::-1] + np.arange(100)[::-1] * 2, None, V).problems[0]
    neither = foreign.diagnose(np.array([5, -7, V]), None, V)
    assert neither.kind == "unclear" and "outside" in neither.problems[0]


def test_every_file_it_may_come_in(tmp_path) -> None:
    d2t, t2d = mapping(range(3, 60, 2))
    (tmp_path / "npy").mkdir()
    np.save(tmp_path / "npy" / "d2t-29.npy", d2t)
    np.save(tmp_path / "npy" / "t2d-29.npy", t2d)
    save_file(
        {"model.draft_id_to_target_id": d2t, "lm_head.weight": np.zeros((2, 2), np.float32)},
        tmp_path / "vllm.safetensors",
    )
    (tmp_path / "checkpoint").mkdir()
    save_file({"d2t": d2t, "t2d": t2d}, tmp_path / "checkpoint" / "model.safetensors")
    torch.save({"d2t": torch.tensor(d2t), "t2d": torch.tensor(t2d)}, tmp_path / "specforge.pt")
    torch.save(torch.tensor(d2t), tmp_path / "bare.pt")
    for name, masked in (
        ("npy", True),
        ("vllm.safetensors", False),
        ("checkpoint", True),
        ("specforge.pt", True),
        ("bare.pt", False),
    ):
        found, mask = foreign.read(tmp_path / name)
        assert np.array_equal(found, d2t), name
        assert (mask is not None and np.array_equal(mask, t2d)) if masked else mask is None, name


@pytest.mark.parametrize("name", ["nothing", "other.safetensors", "object.pt"])
def test_what_holds_no_mapping_is_refused(tmp_path, name) -> None:
    save_file({"weight": np.zeros(3, np.float32)}, tmp_path / "other.safetensors")
    torch.save({"d2t": foreign.Diagnosis("offsets", "", ())}, tmp_path / "object.pt")  # an object: never unpickled
    with pytest.raises(UserError, match="no vocabulary mapping"):
        foreign.read(tmp_path / name)


@pytest.mark.parametrize("absolute", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_a_sound_mapping_is_taken_over_whatever_its_form(tmp_path, absolute: bool, masked: bool) -> None:
    d2t, t2d = mapping([*range(20, 60), 70, 75, *range(90, 120)])
    stored = {"d2t": d2t + np.arange(len(d2t)) if absolute else d2t} | ({"t2d": t2d} if masked else {})
    save_file(stored, tmp_path / "model.safetensors")
    taken = foreign.adopt(tmp_path, V)
    assert np.array_equal(taken[0], d2t)
    assert np.array_equal(taken[1], t2d)


@pytest.mark.parametrize(
    "d2t",
    [np.array([400, 401, 402]), np.array([5, 4, 3, 2]), np.zeros(4, dtype=np.int64) - 1],
    ids=["beyond", "falling", "below"],
)
def test_a_mapping_that_is_not_sound_is_not_taken_over(tmp_path, d2t) -> None:
    save_file({"d2t": d2t}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="cannot be taken over"):
        foreign.adopt(tmp_path, V)
