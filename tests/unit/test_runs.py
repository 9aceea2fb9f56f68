"""Run directories: nothing is lost, nothing stale is used, nothing private is shown."""

from __future__ import annotations

import json
from pathlib import Path

import nbformat
import pytest
from eaglebook import manifests, paths, runs, verifier
from eaglebook.errors import UserError
from eaglebook.params import CompareRuns, Responses, VocabMapping
from eaglebook.stage import Stage


def finished(
    run_dir: Path, stem: str, *, mark: str = "out", inputs: dict | None = None, status: str = "succeeded"
) -> Path:
    folder = run_dir / stem
    (folder / "artifacts").mkdir(parents=True)
    manifest = manifests.new(stem, run_dir.name, Responses(), inputs or {}, "fp")
    manifest.status, manifest.output_fingerprint = status, mark  # type: ignore[assignment]
    manifests.write(folder, manifest)
    return folder


def test_a_swap_replaces_whole_and_survives_being_cut(outputs) -> None:
    run = outputs / "r"
    finished(run, "01_responses")
    (run / "01_responses" / "old").touch()
    finished(run, "01_responses.next")
    runs.swap_in(run, "01_responses")
    assert not (run / "01_responses" / "old").exists()
    assert not (run / "01_responses.next").exists()
    # killed between the two renames: the old one comes back
    (run / "01_responses").rename(run / "01_responses.old")
    runs.repair(run, "01_responses")
    assert (run / "01_responses").exists()
    # killed while the old one was removed: the rest goes, and the next swap works
    finished(run, "01_responses.old")
    finished(run, "01_responses.next")
    runs.swap_in(run, "01_responses")
    assert sorted(p.name for p in run.iterdir()) == ["01_responses"]


def test_an_unfinished_attempt_is_continued_only_when_nothing_changed(outputs) -> None:
    folder = finished(outputs / "r", "01_responses.next", status="killed")
    (folder / "artifacts" / "half").touch()
    (folder / "metrics.json").write_text("{}")
    assert runs.prepare(folder, "fp") is True
    assert (folder / "artifacts" / "half").exists()
    assert not (folder / "metrics.json").exists()
    folder = finished(outputs / "s", "01_responses.next", status="failed")
    (folder / "artifacts" / "half").touch()
    assert runs.prepare(folder, "another") is False
    assert not (folder / "artifacts" / "half").exists()
    folder = finished(outputs / "t", "01_responses.next", status="failed")
    (folder / "artifacts" / "half").touch()
    assert runs.prepare(folder, "fp", keep=False) is False
    assert not (folder / "artifacts" / "half").exists()


def test_checkpoints_of_an_attempt_with_other_parameters_are_set_aside(outputs) -> None:
    folder = finished(outputs / "r", "04_train.next", status="failed")
    for mark in ("more epochs", "another loss"):
        (folder / "artifacts/checkpoints/3").mkdir(parents=True)
        (folder / "artifacts/checkpoints/3" / mark).touch()
        assert runs.prepare(folder, mark) is False
        assert not (folder / "artifacts/checkpoints").exists()
        assert [f.name for f in (outputs / "r/04_train.left/artifacts/checkpoints/3").iterdir()] == [mark]


def test_prose_does_not_make_a_stage_run_again(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(runs.paths, "NOTEBOOKS", tmp_path)

    def mark(prose: str, code: str) -> str:
        cells = [nbformat.v4.new_markdown_cell(prose), nbformat.v4.new_code_cell(code)]
        nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "04_train.ipynb")
        return runs.notebook_hash("04_train")

    assert mark("a", "1") == mark("b", "1") != mark("a", "2")


def test_a_missing_upstream_names_the_command(outputs) -> None:
    with pytest.raises(UserError, match="eaglebook run --preset smoke --stage 01_responses"):
        runs.find_upstream("02_hidden_states", "01_responses", outputs / "smoke", "smoke")
    with pytest.raises(UserError, match=r"--preset my\.yaml --run-dir outputs/six --stage 01_responses"):
        runs.find_upstream("02_hidden_states", "01_responses", outputs / "six", "my.yaml")
    finished(outputs / "smoke", "01_responses", status="failed")
    with pytest.raises(UserError, match="has not succeeded"):
        runs.find_upstream("02_hidden_states", "01_responses", outputs / "smoke", "smoke")


def test_by_hand_the_lab_run_comes_first_and_the_presets_second(outputs) -> None:
    preset = finished(outputs / "smollm2", "01_responses")
    assert runs.find_upstream("03_vocab_mapping", "01_responses", outputs / "lab") == preset
    lab = finished(outputs / "lab", "01_responses")
    assert runs.find_upstream("03_vocab_mapping", "01_responses", outputs / "lab") == lab


def test_the_fingerprint_follows_what_matters_and_nothing_else(outputs) -> None:
    base = runs.fingerprint("03_vocab_mapping", VocabMapping(), {"01_responses": "a"})
    assert base == runs.fingerprint(
        "03_vocab_mapping", VocabMapping(run_dir="x", cell_timeout_s=9), {"01_responses": "a"}
    )
    assert base != runs.fingerprint("03_vocab_mapping", VocabMapping(draft_vocab_size=4), {"01_responses": "a"})
    assert base != runs.fingerprint("03_vocab_mapping", VocabMapping(), {"01_responses": "b"})
    assert base != runs.fingerprint("01_responses", VocabMapping(), {"01_responses": "a"})


def test_a_jsonl_source_counts_by_its_content(outputs, tmp_path) -> None:
    file = tmp_path / "p.jsonl"
    params = Responses(prompt_source=f"jsonl:{file}")
    missing = runs.inputs("01_responses", params, outputs / "r")
    file.write_text('{"prompt": "a"}')
    first = runs.inputs("01_responses", params, outputs / "r")
    file.write_text('{"prompt": "b"}')
    assert len({m["prompt_source"] for m in (missing, first, runs.inputs("01_responses", params, outputs / "r"))}) == 3


def test_stages_made_from_different_data_are_not_mixed(outputs, monkeypatch) -> None:
    run = outputs / "r"
    finished(run, "01_responses", mark="new")
    verifier_mark = verifier.fingerprint(verifier.EMBEDDED)
    finished(run, "02_hidden_states", inputs={"01_responses": "old", "verifier": verifier_mark})
    finished(run, "03_vocab_mapping", inputs={"01_responses": "new", "verifier": verifier_mark})
    with pytest.raises(UserError, match="different versions of 01_responses"):
        Stage("04_train", Responses(run_dir="outputs/r"))


def test_a_stage_of_another_verifier_is_refused(outputs) -> None:
    finished(outputs / "r", "01_responses", inputs={"verifier": "another"})
    with pytest.raises(UserError, match="different versions of verifier"):
        Stage("03_vocab_mapping", Responses(run_dir="outputs/r"))


def test_serving_refuses_a_checkpoint_that_training_did_not_make(outputs) -> None:
    mark = {"verifier": verifier.fingerprint(verifier.EMBEDDED)}
    finished(outputs / "r", "01_responses", mark="o", inputs=mark)
    finished(outputs / "r", "04_train", inputs=mark | {"01_responses": "o"})
    finished(outputs / "r", "05_checkpoint", inputs=mark | {"draft": "x"})
    with pytest.raises(UserError, match="was not made from this run's 04_train"):
        Stage("07_serve", Responses(run_dir="outputs/r"))


def test_comparing_is_done_again_when_a_run_was(outputs) -> None:
    before = runs.inputs("08_compare_runs", CompareRuns(), outputs / "r")
    finished(outputs / "r", "07_serve")
    after = runs.inputs("08_compare_runs", CompareRuns(), outputs / "r")
    assert before != after
    assert list(after) == ["run r"]


def test_artifacts_are_described_by_content(outputs, tmp_path) -> None:
    folder = tmp_path / "artifacts" / "many"
    folder.mkdir(parents=True)
    (folder / "a").write_text("1")
    (tmp_path / "artifacts" / "one.json").write_text("{}")
    before = manifests.describe_artifacts(tmp_path)
    assert {(a.path, a.files, a.bytes) for a in before} == {("many/", 1, 1), ("one.json", 1, 2)}
    (folder / "a").write_text("2")
    assert manifests.output_fingerprint(manifests.describe_artifacts(tmp_path)) != manifests.output_fingerprint(before)


def test_a_failed_check_stops_the_notebook_and_is_written(outputs, capsys) -> None:
    stage = Stage("00_preflight", Responses())
    stage.check("good", True)
    stage.check("bad", False, "2 of 3")
    with pytest.raises(UserError, match="1 of 2 checks failed"):
        stage.finish({"answer": "x"})
    assert json.loads((stage.dir / "checks.json").read_text()) == {"good": True, "bad": False}
    assert "FAIL  bad  (2 of 3)" in capsys.readouterr().out
    signed = manifests.read(stage.dir)
    assert signed is not None
    assert signed.status == "failed"
    stage.check("bad", True)  # the cell was corrected and run again
    stage.finish({"answer": "x"})


def test_by_hand_a_finished_notebook_signs_and_swaps(outputs) -> None:
    stage = Stage("00_preflight", Responses())
    stage.finish({"answer": "x"})
    manifest = manifests.read(outputs / "lab" / "00_preflight")
    assert manifest is not None
    assert (manifest.status, manifest.written_by, manifest.metrics) == ("succeeded", "notebook", {"answer": "x"})


def test_a_running_manifest_without_its_process_is_shown_as_killed(outputs) -> None:
    folder = finished(outputs / "r", "01_responses", status="running")
    manifest = manifests.read(folder)
    assert manifest is not None
    assert manifest.shown_status == "running"
    manifest.pid_created -= 1000  # the pid was given to another process since
    assert manifest.shown_status == "killed"


def test_paths_and_names_of_this_machine_are_taken_out() -> None:
    import getpass
    import sys

    text = f"{paths.outputs()}/run {paths.ROOT}/lib {sys.prefix}/bin {Path.home()}/x /tmp/abc/def.log"
    clean = paths.scrub(text)
    assert clean == "outputs/run ./lib <env>/bin ~/x <tmp>"
    assert getpass.getuser() == "root" or getpass.getuser() not in clean


def test_paths_are_shown_relative_and_read_back(outputs) -> None:
    assert paths.show(outputs / "r" / "x") == "outputs/r/x"
    assert paths.resolve("outputs/r/x") == outputs / "r" / "x"
    assert paths.resolve("params/smoke.yaml") == paths.PARAMS / "smoke.yaml"
    assert paths.show("/a/b/c/d") == ".../c/d"
