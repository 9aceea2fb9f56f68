"""Safetensors headers: agree with the library, refuse what lies."""

from __future__ import annotations

import json

import pytest
import torch
from eaglebook.checkpoint import flat, headers
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
    flat.copy_tensors(tensors, {"a": "x.a", "b": "b"}, tmp_path / "copy.safetensors")
    before, after = load_file(file), load_file(tmp_path / "copy.safetensors")
    assert set(after) == {"x.a", "b"}
    assert torch.equal(after["x.a"], before["a"])
    assert torch.equal(after["b"], before["b"])
