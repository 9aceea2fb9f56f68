"""Safetensors headers: agree with the library, refuse what lies."""

from __future__ import annotations

import json

import pytest
import torch
from eaglebook.checkpoint import headers, weights
from eaglebook.errors import UserError
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.arange(6, dtype=torch.int64).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}, path)
    return path


def test_names_shapes_types_and_bytes_agree_with_the_library(file) -> None:
    tensors = headers.read_header(file)
    assert {n: (t.shape, t.dtype) for n, t in tensors.items()} == {"a": ((2, 3), "I64"), "b": ((4,), "BF16")}
    assert headers.tensor_bytes(tensors["a"]) == load_file(file)["a"].numpy().tobytes()


def rewrite(file, change) -> None:
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


@pytest.mark.parametrize(
    "change",
    [
        lambda h: h["a"].update(data_offsets=[0, 2**60]),
        lambda h: h["a"].update(data_offsets=[-8, 48]),
        lambda h: h["a"].update(data_offsets=[48, 0]),
        lambda h: h["a"].update(shape=[2**40, 2**40]),
        lambda h: h["a"].update(shape=[-2, -3]),
        lambda h: h["a"].update(shape="no"),
        lambda h: h["a"].update(data_offsets=[0]),
        lambda h: h.update(a=3),
    ],
)
def test_a_lying_header_is_refused(file, change) -> None:
    rewrite(file, change)
    with pytest.raises(UserError, match="not a readable safetensors file"):
        headers.read_header(file)


@pytest.mark.parametrize("data", [b"", b"\x01", (2**60).to_bytes(8, "little") + b"{}", (2).to_bytes(8, "little") + b"[]",
                                  (100_000).to_bytes(8, "little") + b"[" * 100_000, b"<html>not found</html>"])  # fmt: skip
def test_what_is_no_safetensors_file_is_refused(file, data) -> None:
    file.write_bytes(data)
    with pytest.raises(UserError):
        headers.read_header(file)


def test_a_truncated_file_is_refused(file) -> None:
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(UserError):
        headers.read_header(file)


@settings(max_examples=300, deadline=None)
@given(data=st.binary(max_size=200))
def test_random_bytes_never_end_in_a_traceback(tmp_path_factory, data) -> None:
    file = tmp_path_factory.mktemp("fuzz") / "x.safetensors"
    file.write_bytes(len(data).to_bytes(8, "little") + data)
    try:
        headers.read_header(file)
    except UserError as error:
        assert "next:" in str(error)


def test_a_shard_named_by_the_index_but_missing_is_an_error(file) -> None:
    index = {"weight_map": {"a": "model.safetensors", "c": "model-2.safetensors"}}
    (file.parent / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"model-2\.safetensors"):
        headers.read_folder(file.parent)


def test_tensors_are_copied_as_bytes_under_new_names(file, tmp_path) -> None:
    tensors = headers.read_header(file)
    weights.write([weights.piece(tensors["a"], "x.a"), weights.piece(tensors["b"])], tmp_path / "copy.safetensors")
    before, after = load_file(file), load_file(tmp_path / "copy.safetensors")
    assert set(after) == {"x.a", "b"}
    assert torch.equal(after["x.a"], before["a"])
    assert torch.equal(after["b"], before["b"])


def test_rows_are_taken_in_the_order_asked_and_small_tensors_written_anew(file, tmp_path) -> None:
    tensors = headers.read_header(file)
    new = weights.Piece("n", "I64", (2,), data=(7).to_bytes(8, "little") + (8).to_bytes(8, "little"))
    weights.write([weights.rows(tensors["a"], [1, 0, 1]), new, weights.piece(tensors["b"])], tmp_path / "x.safetensors")
    after = load_file(tmp_path / "x.safetensors")
    assert after["a"].tolist() == [[3, 4, 5], [0, 1, 2], [3, 4, 5]]
    assert after["n"].tolist() == [7, 8]
    assert torch.equal(after["b"], load_file(file)["b"])


def test_a_source_that_ends_early_is_an_error_and_leaves_no_file(file, tmp_path) -> None:
    tensors = headers.read_header(file)
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(UserError, match="too early"):
        weights.write([weights.piece(t) for t in tensors.values()], tmp_path / "copy.safetensors")
    assert not (tmp_path / "copy.safetensors").exists()


@pytest.mark.parametrize(
    "change",
    [
        lambda h: h["b"].update(data_offsets=[h["a"]["data_offsets"][0], h["a"]["data_offsets"][0] + 8]),
        lambda h: h["a"].update(shape=[True, 6]),
        lambda h: h["a"].update(data_offsets=[0.0, 48.0]),
        lambda h: h["a"].update(shape=[1] * 40),
    ],
)
def test_overlaps_and_other_kinds_are_refused(file, change) -> None:
    rewrite(file, change)
    with pytest.raises(UserError, match="not a readable safetensors file"):
        headers.read_header(file)


def test_a_name_given_twice_is_refused(file) -> None:
    text = b'{"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}, "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}'
    file.write_bytes(len(text).to_bytes(8, "little") + text + b"x")
    with pytest.raises(UserError, match="twice"):
        headers.read_header(file)


def test_a_pipe_is_not_waited_for(tmp_path) -> None:
    import os

    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="regular file"):
        headers.read_header(tmp_path / "model.safetensors")
