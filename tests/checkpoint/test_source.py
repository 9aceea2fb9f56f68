"""Whatever is handed over: read as far as it can be, named where it cannot, never a traceback, a hang or a flood of memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import drafts
import pytest
from drafts import flat, nested, shapes
from eaglebook.checkpoint import formats, inspection, source
from eaglebook.errors import UserError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

INDEX = "model.safetensors.index.json"


def draft(tmp_path: Path) -> Path:
    return drafts.write(tmp_path / "draft", nested(), shapes())


def codes(path: Path) -> set[str]:
    return {finding.code for finding in inspection.inspect(path).findings if finding.severity != "note"}


def index(folder: Path, **where: str) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(shapes(), "model.safetensors") | where}))


FOLDERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda d: (d / "config.json").unlink(), "config-missing"),
    "config not JSON": (lambda d: (d / "config.json").write_text("{'a': 1}"), "config-unreadable"),
    "config not UTF-8": (lambda d: (d / "config.json").write_bytes(b'{"a": "\xff\xfe"}'), "config-unreadable"),
    "config a list": (lambda d: (d / "config.json").write_text("[1]"), "config-unreadable"),
    "config nested deep": (lambda d: (d / "config.json").write_text("[" * 100_000), "config-unreadable"),
    "config of 100 MB": (lambda d: os.truncate(d / "config.json", 100_000_000), "config-unreadable"),
    "config a folder": (lambda d: ((d / "config.json").unlink(), (d / "config.json").mkdir()), "config-unreadable"),
    "weights truncated": (lambda d: os.truncate(d / "model.safetensors", 1000), "weights-unreadable"),
    "weights of HTML": (lambda d: (d / "model.safetensors").write_text("<html>404"), "weights-unreadable"),
    "weights empty": (lambda d: (d / "model.safetensors").write_bytes(b""), "weights-unreadable"),
    "weights a folder": (lambda d: ((d / "model.safetensors").unlink(), (d / "model.safetensors").mkdir()), "weights-unreadable"),
    "weights pickled": (lambda d: (d / "model.safetensors").rename(d / "pytorch_model.bin"), "weights-pickled"),
    "weights in GGUF": (lambda d: (d / "model.safetensors").rename(d / "model.gguf"), "weights-gguf"),
    "index not JSON": (lambda d: (d / INDEX).write_text("no"), "index-unreadable"),
    "index out of the folder": (lambda d: index(d, fc="../other.safetensors"), "index-unreadable"),
    "index names a missing shard": (lambda d: index(d, fc="model-2.safetensors"), "index-shard-missing"),
    "index of another file": (lambda d: index(d, **{"fc.weight.old": "model.safetensors"}), "index-stale"),
    "file not in the index": (lambda d: (index(d), (d / "more.safetensors").write_bytes((d / "model.safetensors").read_bytes())),
                              "index-stale"),
    "consolidated beside shards": (lambda d: (d / "consolidated.safetensors").write_bytes((d / "model.safetensors").read_bytes()),
                                   "consolidated-mixed"),
    "the same tensor twice": (lambda d: (d / "b.safetensors").write_bytes((d / "model.safetensors").read_bytes()), "tensor-twice"),
    "a link out of the folder": (lambda d: (d / "config.json").rename(d.parent / "c.json") and (d / "config.json").symlink_to(d.parent / "c.json"),
                                 "link-outside"),
    "a link to nothing": (lambda d: (d / "x.safetensors").symlink_to("/nowhere/at/all"), "link-outside weights-unreadable"),
}  # fmt: skip


@pytest.mark.parametrize("name", FOLDERS)
def test_a_fault_of_the_files_is_a_finding(name: str, tmp_path: Path) -> None:
    folder = draft(tmp_path)
    change, expected = FOLDERS[name]
    change(folder)
    found = codes(folder)
    assert set(expected.split()) <= found
    assert found <= set(expected.split()) | {"max-positions-short", "not-eagle3"}, found


def test_a_hub_cache_entry_is_made_of_links_and_fine(tmp_path: Path) -> None:
    entry = tmp_path / "models--a--b"
    (entry / "blobs").mkdir(parents=True)
    folder = drafts.write(entry / "snapshots" / "rev", nested(), shapes())
    for name in ("config.json", "model.safetensors"):
        (folder / name).rename(entry / "blobs" / name)
        (folder / name).symlink_to(Path("../../blobs") / name)
    assert codes(folder) == {"max-positions-short"}


def test_training_state_is_noticed_and_not_opened(tmp_path: Path) -> None:
    folder = draft(tmp_path)
    (folder / "optimizer_state_dict.pt").write_bytes(b"\x80\x04.")
    found = {f.code: f for f in inspection.inspect(folder).findings}
    assert "optimizer_state_dict.pt" in found["training-state"].message
    assert "weights-pickled" not in found


@pytest.mark.parametrize("make", [
    lambda p: None,
    lambda p: p.mkdir(),
    lambda p: p.symlink_to("/nowhere"),
    lambda p: p.with_suffix(".pt").write_bytes(b"\x80"),
])  # fmt: skip
def test_nothing_to_look_at_is_an_error_with_a_next_step(make: Callable[[Path], object], tmp_path: Path) -> None:
    path = tmp_path / "x"
    make(path)
    path = (
        path if path.exists() or path.is_symlink() or not path.with_suffix(".pt").exists() else path.with_suffix(".pt")
    )
    with pytest.raises(UserError, match="next:"):
        inspection.inspect(path)


# ---- what else than a folder can be given


def test_a_list_of_tensors_is_as_good_as_headers(tmp_path: Path) -> None:
    folder = draft(tmp_path)
    lines = [f"{name}\t{list(shape)}\t{dtype}" for name, (shape, dtype) in shapes().items() if name != "d2t"]
    (tmp_path / "list.tsv").write_text("# names\n\n" + "\n".join(lines))
    said = inspection.inspect(folder / "config.json", tensor_list=tmp_path / "list.tsv")
    assert [e.code for e in said.errors] == ["d2t-missing"]
    alone = inspection.inspect(tmp_path / "list.tsv")
    assert alone.case.format.algorithm == formats.EAGLE3
    assert {f.code for f in alone.findings} >= {"config-not-given"}
    assert alone.case.spec.draft_vocab_size.value == 100


@pytest.mark.parametrize(
    ("line", "shape", "dtype"),
    [
        ("fc.weight\t[64, 192]\tBF16", (64, 192), "BF16"),
        ("fc.weight\t64x192\ttorch.bfloat16", (64, 192), "BF16"),
        ("fc.weight\ttorch.Size([64, 192])\tfloat16", (64, 192), "F16"),
        ("fc.weight\t(64, 192)", (64, 192), ""),
        ("fc.weight [64, 192] int64", (64, 192), "I64"),
        ("norm.weight\t[64]\tF32", (64,), "F32"),
        ("scale\t[]\tF32", (), "F32"),
        ("fc.weight", None, ""),
    ],
)
def test_lists_are_read_as_people_write_them(
    line: str, shape: tuple[int, ...] | None, dtype: str, tmp_path: Path
) -> None:
    (tmp_path / "l.txt").write_text(line)
    (tensor,) = source.read_list(tmp_path / "l.txt").values()
    assert (tensor.shape, tensor.dtype) == (shape, dtype)


@pytest.mark.parametrize(
    "text", ["fc.weight\t[-3]\tF32", "a b c d\t[1]", "fc.weight\t[1e9]\tF32", "fc\t" + "9" * 5000, "<a>\t[1]\tF32"]
)
def test_what_is_no_list_is_refused_with_its_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "l.txt").write_text("fc.weight\n" + text)
    with pytest.raises(UserError, match="line 2"):
        source.read_list(tmp_path / "l.txt")


def test_an_index_is_a_list_of_names(tmp_path: Path) -> None:
    index(tmp_path)
    assert set(source.read_list(tmp_path / INDEX)) == set(shapes())


def test_a_file_of_weights_is_a_draft_without_a_config(tmp_path: Path) -> None:
    said = inspection.inspect(draft(tmp_path) / "model.safetensors")
    assert said.case.format.algorithm == formats.EAGLE3
    assert said.case.spec.head_dim.origin == "absent", "heads are not known without a config"


# ---- nothing breaks it

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
KEYS = sorted({*flat(), *nested(), *flat()["eagle_config"], "rope_scaling", "layer_types", "sliding_window", "quantization_config",
               "kv_lora_rank", "model", "method", "dflash_config"})  # fmt: skip


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    start=st.sampled_from([flat(), nested(), {}]),
    top=st.dictionaries(st.sampled_from(KEYS), json_values, max_size=4),
    layer=st.dictionaries(st.sampled_from(KEYS), json_values, max_size=4),
    eagle=st.dictionaries(
        st.sampled_from([*flat()["eagle_config"], "ids_mean", "norm_before_fc"]), json_values, max_size=3
    ),
    with_tensors=st.booleans(),
    version=st.integers(16, 33),
)
def test_no_config_ends_in_a_traceback(start, top, layer, eagle, with_tensors, version) -> None:
    """Any JSON value under any key a reader knows."""
    config = {**start, **top}
    if isinstance(config.get("transformer_layer_config"), dict):
        config["transformer_layer_config"] = {**config["transformer_layer_config"], **layer}
    if isinstance(config.get("eagle_config"), dict):
        config["eagle_config"] = {**config["eagle_config"], **eagle}
    tensors = {n: source.Tensor(n, d, s, None) for n, (s, d) in shapes().items()} if with_tensors else None
    case = inspection.examine(source.Source(Path("x"), config, tensors), version=(0, version))
    from eaglebook.checkpoint import checks, convert

    said = inspection.Inspection(case, checks.examine(case))
    json.dumps(said.as_dict())
    for to in convert.LAYOUTS:
        try:
            made = convert.plan(case, to, convert.Told("input", (1, 2, 3), "a/b", 3), fix=True)
            convert.check(made, to)
        except UserError as error:
            assert "expected" in str(error) or "next" in str(error) or "found" in str(error)


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=300))
def test_no_bytes_end_in_a_traceback(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    folder = tmp_path_factory.mktemp("fuzz")
    for name in ("config.json", INDEX, "model.safetensors", "list.txt"):
        (folder / name).write_bytes(data)
    inspection.inspect(folder)
    for name in ("config.json", "list.txt", "model.safetensors"):
        try:
            inspection.inspect(folder / name)
        except UserError as error:
            assert "next:" in str(error)


def test_a_pipe_in_the_folder_does_not_hang(tmp_path: Path) -> None:
    folder = draft(tmp_path)
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    os.mkfifo(folder / "more.safetensors")
    command = [sys.executable, "-m", "eaglebook.cli", "inspect", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert "config-unreadable" in done.stdout and "weights-unreadable" in done.stdout
