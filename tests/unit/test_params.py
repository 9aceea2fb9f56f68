"""Parameters: shipped files, notebooks and models agree; wrong input is named with its fix."""

from __future__ import annotations

import ast
import itertools
import json
import re

import pytest
import yaml
from eaglebook import paths
from eaglebook.errors import UserError
from eaglebook.params import STAGES, Train
from eaglebook.presets import load, names
from hypothesis import given
from hypothesis import strategies as st


def parameters_cell(stem: str) -> str:
    cells = json.loads((paths.NOTEBOOKS / f"{stem}.ipynb").read_text())["cells"]
    return next("".join(c["source"]) for c in cells if "parameters" in c["metadata"].get("tags", []))


@pytest.mark.parametrize("preset", names())
def test_every_shipped_preset_is_valid(preset: str) -> None:
    loaded = load(preset)
    assert set(loaded) == set(STAGES)
    assert all(p.preset == preset for p in loaded.values())


@pytest.mark.parametrize("preset", names())
def test_every_key_of_a_preset_is_explained_above_it(preset: str) -> None:
    lines = (paths.PARAMS / f"{preset}.yaml").read_text().splitlines()
    bare = [line for before, line in itertools.pairwise(lines) if re.match(r"  \w+:", line) and "# " not in before]
    assert not bare


@pytest.mark.parametrize("stem", STAGES)
def test_the_parameters_cell_is_typed_commented_and_equal_to_the_model(stem: str) -> None:
    cell = parameters_cell(stem)
    statements = ast.parse(cell).body
    assert all(isinstance(s, ast.AnnAssign) for s in statements)
    assert all("  # " in line for line in cell.splitlines())
    names = [s.target.id for s in statements]  # type: ignore[union-attr]
    assert names[:2] == ["preset", "run_dir"]
    values = {s.target.id: ast.literal_eval(s.value) for s in statements}  # type: ignore[union-attr, arg-type]
    assert values == STAGES[stem]().model_dump()


def test_the_models_defaults_are_the_smollm2_preset() -> None:
    for stem, loaded in load("smollm2").items():
        assert loaded.model_dump() == STAGES[stem]().model_dump(), stem


def test_the_field_guide_names_every_key() -> None:
    guide = (paths.PARAMS / "README.md").read_text()
    missing = [f"{s}.{k}" for s, model in STAGES.items() for k in model.model_fields if f"`{k}`" not in guide]
    assert not missing


def write(tmp_path, text: str) -> str:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    return str(file)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("04_train:\n  epoch: 3\n", ["mine.yaml", "04_train", "'epoch'", "epochs"]),
        ("04_train:\n  learning_rate: 1e-4\n", ["learning_rate", "'1e-4'", "1.0e-04"]),
        ("04_train:\n  epochs: 010\n", ["010", "read by YAML as 8", "write 10"]),
        ("04_train:\n  epochs: 1:30\n", ["1:30", "read by YAML as 90"]),
        ("04_train:\n  epochs: 2.5\n", ["epochs", "2.5"]),
        ("04_train:\n  epochs: 0\n", ["epochs", "greater than 0"]),
        ("04_train:\n  epochs: true\n", ["epochs", "True"]),
        ("04_train:\n  train_lm_head: 'yes'\n", ["train_lm_head", "'yes'"]),
        ("04_train:\n  optimizer: sgd\n", ["optimizer", "adamw"]),
        ("04_train:\n  epochs: 1\n  epochs: 2\n", ["epochs", "twice"]),
        ("4_train:\n  epochs: 1\n", ["4_train", "04_train"]),
        ("common:\n  epoks: 1\n", ["epoks", "common"]),
        ("- 1\n", ["not blocks"]),
        ("04_train: [1\n", ["not YAML"]),
    ],
)
def test_wrong_files_are_named_with_key_and_fix(tmp_path, text: str, names: list[str]) -> None:
    with pytest.raises(UserError) as error:
        load(write(tmp_path, text))
    assert all(name in str(error.value) for name in [*names, "next:"])


def test_merge_order_is_default_common_block_set(tmp_path) -> None:
    file = write(tmp_path, "common:\n  epochs: 5\n04_train:\n  epochs: 6\n")
    assert load(file)["00_preflight"].epochs == 5
    assert load(file)["04_train"].epochs == 6
    assert load(file, ["04.epochs=7"])["04_train"].epochs == 7
    assert load(file, ["04_train.epochs=7"])["00_preflight"].epochs == 5


def test_set_values_take_the_fields_type() -> None:
    changed = load(
        "smollm2", ["04.train_lm_head=true", "01.prompt_source=jsonl:007.jsonl", "02.aux_hidden_state_layer_ids=[1, 2]"]
    )
    assert changed["04_train"].train_lm_head is True
    assert changed["01_responses"].prompt_source == "jsonl:007.jsonl"
    assert changed["02_hidden_states"].aux_hidden_state_layer_ids == [1, 2]


@pytest.mark.parametrize(
    "text", ["epochs=2", "04_train=2", "99.epochs=2", "04.epochs=010", "04.nothing=1", "04.learning_rate=1e-3"]
)
def test_wrong_overrides_are_refused(text: str) -> None:
    with pytest.raises(UserError):
        load("smollm2", [text])


@given(st.integers(1, 10_000), st.floats(1e-8, 0.5), st.booleans())
def test_what_a_run_used_reads_back_equal(epochs: int, rate: float, flag: bool) -> None:
    params = Train(epochs=epochs, learning_rate=rate, norm_output=flag)
    text = yaml.safe_dump(params.model_dump())
    assert Train(**yaml.safe_load(text)) == params


def test_a_notebooks_namespace_is_read_strictly() -> None:
    namespace = {"epochs": 3, "learning_rate": "1e-4", "something_else": 1}
    with pytest.raises(UserError, match="learning_rate"):
        Train.from_namespace(namespace)
    assert Train.from_namespace({"epochs": 9, "other": 1}).epochs == 9


def test_a_file_changes_its_base_key_by_key(tmp_path) -> None:
    (tmp_path / "below.yaml").write_text("base: smoke\n04_train:\n  ttt_steps: 5\n  learning_rate: 1.0e-3\n")
    loaded = load(
        write(tmp_path, f"base: {tmp_path / 'below.yaml'}\ncommon:\n  epochs: 7\n04_train:\n  ttt_steps: 6\n")
    )
    train = loaded["04_train"]
    assert (train.ttt_steps, train.learning_rate, train.epochs) == (6, 1.0e-3, 7)
    assert loaded["01_responses"].max_new_tokens == load("smoke")["01_responses"].max_new_tokens


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("base: no-such\n", "mine.yaml: base 'no-such'"),
        ("base: {mine}\n", "it is its own base"),
        ("base: [smoke]\n", "not blocks"),
    ],
)
def test_a_base_that_leads_nowhere_is_refused(tmp_path, text: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        load(write(tmp_path, text.replace("{mine}", str(tmp_path / "mine.yaml"))))


def test_common_sets_every_notebook_that_has_the_key() -> None:
    loaded = load("smollm2", ["common.max_new_tokens=32", "07.max_new_tokens=16"])
    assert [loaded[s].max_new_tokens for s in ("00_preflight", "01_responses", "07_serve")] == [32, 32, 16]
    with pytest.raises(UserError, match="a key that some notebook has"):
        load("smollm2", ["common.nothing=1"])


@pytest.mark.parametrize("preset", names())
def test_00_plans_with_what_the_others_do(preset: str) -> None:
    """A key that 00 shares with a later notebook has the same value there, or the plan is of another run."""
    loaded = load(preset)
    own = {
        "benchmarks",
        "max_benchmark_prompts",
        "max_new_tokens",
        "kv_cache_gb",
    }  # 07 measures with sets and sizes of its own
    for stem in list(STAGES)[1:]:
        for key, value in loaded["00_preflight"].model_dump().items():
            if (
                key not in {"preset", "run_dir"}
                and hasattr(loaded[stem], key)
                and not (stem == "07_serve" and key in own)
            ):
                assert getattr(loaded[stem], key) == value, (stem, key)
