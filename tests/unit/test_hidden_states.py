"""Captured states: the right layers, before the norm, the same in any batch, whole files only."""

from __future__ import annotations

import shutil

import pytest
import torch
from eaglebook import hidden_states, states_files, verifier
from eaglebook.errors import UserError
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

IDS = [2, 4, 5]


@pytest.fixture(scope="module")
def model(tiny_verifier):
    return verifier.load_model(verifier.resolve(str(tiny_verifier)), dtype="float32")


@pytest.fixture(scope="module")
def sequences():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 300, (n,), generator=generator).tolist() for n in (5, 17, 9, 17, 30)]


def test_ids_mean_the_stream_entering_the_layer_and_the_last_slot_is_before_the_norm(model, sequences) -> None:
    (states,) = hidden_states.capture(model, [sequences[1]], IDS)
    with torch.inference_mode():
        reference = model(torch.tensor([sequences[1]]), output_hidden_states=True)
    for slot, k in enumerate(IDS):
        torch.testing.assert_close(states[:, slot], reference.hidden_states[k][0].bfloat16())
    after_norm = reference.hidden_states[-1][0]
    with torch.inference_mode():
        torch.testing.assert_close(
            hidden_states.final_norm(model)(states[:, -1].float()), after_norm, rtol=0.02, atol=0.05
        )
    assert not torch.allclose(states[:, -1].float(), after_norm, rtol=0.02, atol=0.05)


def test_a_batch_gives_the_same_states_as_one_alone(model, sequences) -> None:
    together = hidden_states.capture(model, sequences, IDS)
    for sequence, states in zip(sequences, together, strict=True):
        (alone,) = hidden_states.capture(model, [sequence], IDS)
        torch.testing.assert_close(states, alone, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("ids", [[4, 2], [2, 2], [-1], [8]])
def test_ids_that_cannot_be_captured_are_refused(model, sequences, ids) -> None:
    with pytest.raises(UserError, match="aux_hidden_state_layer_ids"):
        hidden_states.capture(model, sequences[:1], ids)


def test_files_are_what_speculators_reads_and_only_missing_ones_are_made(model, sequences, tmp_path) -> None:
    first = hidden_states.extract(model, sequences, IDS, tmp_path, token_budget=32)
    assert (first.files, first.skipped, first.tokens) == (5, 0, sum(map(len, sequences)))
    assert states_files.validate(tmp_path, sequences) == {}
    before = {f.name: f.stat().st_mtime_ns for f in tmp_path.iterdir()}
    assert all((tmp_path / n).stat().st_size - states_files.sample_bytes(len(s), 3, 64) < 300
               for n, s in ((states_files.file_name(i), s) for i, s in enumerate(sequences)))  # fmt: skip
    damaged = tmp_path / states_files.file_name(1)
    damaged.write_bytes(damaged.read_bytes()[:-10])
    (tmp_path / states_files.file_name(3)).unlink()
    again = hidden_states.extract(model, sequences, IDS, tmp_path, token_budget=32)
    assert again.skipped == 3
    assert states_files.validate(tmp_path, sequences) == {}
    same = [name for name, when in before.items() if (tmp_path / name).stat().st_mtime_ns == when]
    assert len(same) == 3


def test_speculators_check_catches_nan_and_other_tokens(model, sequences, tmp_path) -> None:
    hidden_states.extract(model, sequences[:2], IDS, tmp_path, token_budget=64)
    file = tmp_path / states_files.file_name(0)
    tensors = load_file(file)
    tensors["hidden_states"][0, 0, 0] = float("nan")
    save_file(tensors, file)
    assert len(states_files.validate(tmp_path, [sequences[0], sequences[1][::-1]])) == 2


def test_damaged_files_are_found_dropped_and_made_again(model, sequences, tmp_path) -> None:
    hidden_states.extract(model, sequences, IDS, tmp_path, token_budget=64)
    for row, (name, value) in {0: ("hidden_states", float("inf")), 2: ("token_ids", 7)}.items():
        file = tmp_path / states_files.file_name(row)
        tensors = load_file(file)
        tensors[name].view(-1)[0] = value
        save_file(tensors, file)
    (tmp_path / states_files.file_name(3)).write_bytes(b"not a tensor file")
    (tmp_path / states_files.file_name(4)).unlink()
    assert states_files.drop_damaged(tmp_path, sequences, range(5)) == [0, 2, 3]
    assert hidden_states.extract(model, sequences, IDS, tmp_path, token_budget=64).skipped == 1
    assert states_files.validate(tmp_path, sequences) == {}


def test_float8_takes_half_the_disk_and_its_error_is_small(model, sequences, tmp_path) -> None:
    for storage in ("bfloat16", "float8"):
        (tmp_path / storage).mkdir()
        hidden_states.extract(model, sequences, IDS, tmp_path / storage, token_budget=64, storage=storage)
        assert states_files.validate(tmp_path / storage, sequences) == {}
        assert (
            hidden_states.extract(model, sequences, IDS, tmp_path / storage, token_budget=64, storage=storage).skipped
            == 5
        )
        for row, sequence in enumerate(sequences):
            file = tmp_path / storage / states_files.file_name(row)
            assert file.stat().st_size - states_files.sample_bytes(len(sequence), 3, 64, storage) < 400
    whole, small = (
        states_files.read(tmp_path / s / states_files.file_name(4))[0].float() for s in ("bfloat16", "float8")
    )
    assert 0 < (whole - small).norm() / whole.norm() < 0.05
    assert hidden_states.convention(IDS, hidden_states.identify(model, small, sequences[4])) == "input"
    again = hidden_states.extract(model, sequences, IDS, tmp_path / "float8", token_budget=64)
    assert again.skipped == 0, "another storage is another file"


def test_speculators_own_loader_reads_both_kinds(model, sequences, tmp_path) -> None:
    from hs_connectors.transfer import FP8Transfer

    hidden_states.extract(model, sequences[:1], IDS, tmp_path, token_budget=64, storage="float8")
    states_files.write(
        tmp_path / states_files.file_name(1),
        states_files.read(tmp_path / states_files.file_name(0))[0],
        sequences[0],
    )
    loader = FP8Transfer(tmp_path)
    small, whole = loader.get_cached(0), loader.get_cached(1)
    assert torch.equal(small["hidden_states"], whole["hidden_states"])
    assert small["token_ids"].tolist() == sequences[0]


def test_machines_share_the_work_and_meet_nowhere(model, sequences, tmp_path) -> None:
    shares = [range(rank, len(sequences), 2) for rank in range(2)]
    done = [hidden_states.extract(model, sequences, IDS, tmp_path, token_budget=64, rows=share) for share in shares]
    assert [d.files for d in done] == [3, 2]
    assert [d.skipped for d in done] == [0, 0]
    assert states_files.validate(tmp_path, sequences) == {}


def test_a_disk_that_fills_up_stops_the_capture_and_keeps_what_is_there(
    model, sequences, tmp_path, monkeypatch
) -> None:
    free = iter([10**9, 10**9, 100])
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(0, 0, next(free)))
    with pytest.raises(UserError, match="disk is too small"):
        hidden_states.extract(model, sequences, IDS, tmp_path, token_budget=17, reserve_bytes=1000)
    assert 1 <= len(list(tmp_path.glob("hs_*.safetensors"))) < 5


@pytest.mark.parametrize(
    ("shift", "says"), [(0, "input"), (1, "output"), (-1, "neither")]
)  # a program that counts outputs files the stream entering layer k + 1 under the name k
def test_the_convention_is_measured_from_the_files(model, sequences, shift, says) -> None:
    (states,) = hidden_states.capture(model, [sequences[4]], [i + shift for i in IDS])
    streams = hidden_states.identify(model, states, sequences[4])
    assert [s.id for s in streams] == [*(i + shift for i in IDS), 8]
    assert all(s.error < 0.01 and not s.normed for s in streams)
    assert hidden_states.convention(IDS, streams) == says


def test_a_last_slot_taken_after_the_norm_is_seen(model, sequences) -> None:
    (states,) = hidden_states.capture(model, [sequences[4]], IDS)
    with torch.inference_mode():
        states[:, -1] = hidden_states.final_norm(model)(states[:, -1].float()).bfloat16()
    assert hidden_states.identify(model, states, sequences[4])[-1].normed


def test_out_of_memory_halves_the_batch_and_goes_on(model, sequences, tmp_path, monkeypatch) -> None:
    capture, sizes = hidden_states.capture, []

    def small_machine(model, batch, ids):
        sizes.append(len(batch))
        if len(batch) > 2:
            raise torch.OutOfMemoryError
        if len(batch) > 1:  # what torch says on a CPU
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes.")
        return capture(model, batch, ids)

    monkeypatch.setattr(hidden_states, "capture", small_machine)
    hidden_states.extract(model, sequences, IDS, tmp_path, token_budget=1000)
    assert max(sizes) > 1
    assert states_files.validate(tmp_path, sequences) == {}

    def broken(model, batch, ids):
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(hidden_states, "capture", broken)
    with pytest.raises(RuntimeError, match="shapes"):
        hidden_states.extract(model, sequences[::-1], IDS, tmp_path, token_budget=1000)


def test_a_disk_too_small_is_refused_with_both_numbers(tmp_path) -> None:
    free = shutil.disk_usage(tmp_path).free
    with pytest.raises(UserError) as error:
        states_files.require_space(tmp_path, free, reserve_bytes=1_000_000_000)
    assert f"{free:,} bytes and a reserve" in str(error.value)
    assert "bytes free" in str(error.value)
    states_files.require_space(tmp_path, 1, reserve_bytes=0)


@given(st.lists(st.integers(1, 500), max_size=60), st.integers(1, 2000))
def test_batches_hold_every_row_once_within_the_budget(lengths, budget) -> None:
    made = list(hidden_states.batches(lengths, budget))
    assert sorted(row for batch in made for row in batch) == list(range(len(lengths)))
    for batch in made:
        assert len(batch) == 1 or max(lengths[row] for row in batch) * len(batch) <= budget


def test_states_that_an_engine_left_in_float32_are_read_as_bf16(tmp_path) -> None:
    file, states = tmp_path / "hs_0.safetensors", torch.randn(5, 4, 64)
    save_file({"hidden_states": states, "token_ids": torch.arange(5)}, file)
    assert not states_files.is_complete(file, 5, 3, 64)
    assert states_files.is_complete(file, 5, 3, 64, "float32")
    assert not states_files.is_complete(file, 6, 3, 64, "float32")
    read, _ = states_files.read(file)
    assert read.dtype == torch.bfloat16
    torch.testing.assert_close(read, states.bfloat16())
