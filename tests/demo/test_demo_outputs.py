"""What a finished run left behind. CI runs this after `make demo PRESET=smoke`: ``EAGLEBOOK_DEMO=smoke pytest tests/demo``."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from eaglebook import manifests, paths, runs, train_serve
from eaglebook.checkpoint import headers
from eaglebook.params import STAGES

RUN = os.environ.get("EAGLEBOOK_DEMO", "")
STEMS = list(STAGES)


def folder(stem: str) -> Path:
    return paths.outputs() / RUN / stem


@pytest.mark.parametrize("stem", STEMS)
def test_every_stage_succeeded_and_left_its_files(stem: str) -> None:
    manifest = manifests.read(folder(stem))
    assert manifest is not None
    assert (manifest.status, manifest.exit_code) == ("succeeded", 0)
    assert manifest.checks
    assert all(manifest.checks.values())
    assert manifest.metrics["answer"]
    for name in ("notebook.ipynb", "report.html", "params.yaml", "metrics.json", "log.txt"):
        assert (folder(stem) / name).stat().st_size > 0, name
    assert not runs.next_dir(paths.outputs() / RUN, stem).exists()


@pytest.mark.parametrize("stem", STEMS)
def test_reports_are_self_contained_and_name_no_machine(stem: str) -> None:
    page = (folder(stem) / "report.html").read_text()
    assert not re.findall(r'(?:src|href)="(?:https?:)?//', page)
    assert "<script" not in page
    assert len(page) < 2_000_000
    for text in (page, (folder(stem) / "manifest.json").read_text(), (folder(stem) / "notebook.ipynb").read_text()):
        for private in (str(paths.ROOT), str(Path.home()) + "/", sys.prefix):
            assert private not in text, private


@pytest.mark.parametrize("stem", STEMS)
def test_figures_are_in_the_report_with_alternative_text(stem: str) -> None:
    notebook = nbformat.read(paths.NOTEBOOKS / f"{stem}.ipynb", as_version=4)
    wanted = sum("figure" in c.metadata.get("tags", []) for c in notebook.cells)
    page = (folder(stem) / "report.html").read_text()
    images = re.findall(r"<img[^>]*>", page)
    assert len(images) == wanted == len(list((folder(stem) / "figures").glob("*.png")))
    assert all('alt="' in image for image in images)
    assert all(file.stat().st_size > 5_000 for file in (folder(stem) / "figures").glob("*.png"))


def test_serving_left_the_promised_metrics_in_their_ranges() -> None:
    metrics = json.loads((folder("07_serve") / "metrics.json").read_text())
    for name in ("heldout", "mtbench", "humaneval"):
        found = metrics["acceptance"][name]
        rates, length, interval = found["position_rates"], found["mean_acceptance_length"], found["interval"]
        assert 1 < length <= len(rates) + 1
        assert rates == sorted(rates, reverse=True)
        assert length == pytest.approx(1 + sum(rates)) == interval["value"]
        assert interval["low"] <= length <= interval["high"]
    assert len([group for group in metrics["acceptance_by_category"] if group.startswith("mtbench: ")]) == 8
    assert 0 < metrics["answers_identical"] <= metrics["answers_compared"]
    assert abs(metrics["train_serve_gap"]) <= train_serve.LIMIT
    assert metrics["tokens_per_s"]["verifier_only"] > 0
    curve = metrics["speed_up_by_concurrency"]
    assert metrics["speed_up"] == curve["1"]["value"]
    assert all(0 < point["low"] <= point["value"] <= point["high"] for point in curve.values())
    assert all(cost >= 0 for cost in metrics["costs"].values())


def test_both_checkpoints_hold_the_same_numbers() -> None:
    trained = folder("04_train") / "artifacts"
    nested = trained / json.loads((trained / "last.json").read_text())["checkpoint"]
    flat = folder("05_checkpoint") / "artifacts" / "flat"
    before, after = headers.read_folder(nested), headers.read_folder(flat)
    assert len(before) == len(after) > 10
    assert sorted(t.bytes for t in before.values()) == sorted(t.bytes for t in after.values())
    assert (flat / "config_speculators.json").read_bytes() == (nested / "config.json").read_bytes()


def test_speculators_prepare_data_accepts_the_conversations(tmp_path) -> None:
    file = folder("01_responses") / "artifacts" / "conversations.jsonl"
    model = paths.models() / "smollm2-135m-instruct"
    done = subprocess.run(
        [Path(sys.prefix) / "bin" / "speculators", "prepare-data", "--model", model, "--data", file, "--output", tmp_path / "out"],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert list((tmp_path / "out").glob("*.arrow"))


def test_the_index_links_every_report() -> None:
    page = (paths.outputs() / "index.html").read_text()
    assert all(f'href="{RUN}/{stem}/report.html"' in page for stem in STEMS)


def test_the_plan_was_right_about_the_bytes() -> None:
    """What 00 planned from configs alone, against the files, within 2 %."""
    planned = json.loads((folder("00_preflight") / "metrics.json").read_text())
    states = list((folder("02_hidden_states") / "artifacts" / "hidden_states").glob("*.safetensors"))
    conversations = (folder("01_responses") / "artifacts" / "conversations.jsonl").read_text().splitlines()
    tokens = sum(len(json.loads(line)["input_ids"]) for line in conversations)
    trained = folder("04_train") / "artifacts"
    last = trained / json.loads((trained / "last.json").read_text())["checkpoint"]
    flat = folder("05_checkpoint") / "artifacts" / "flat" / "model.safetensors"
    saved = sum(last.joinpath(name).stat().st_size for name in ("model.safetensors", "optimizer_state_dict.pt"))
    assert sum(f.stat().st_size for f in states) / tokens == pytest.approx(planned["planned_bytes_per_token"], rel=0.02)
    assert flat.stat().st_size == pytest.approx(planned["planned_checkpoint_bytes"], rel=0.02)
    assert saved == pytest.approx(planned["planned_saved_bytes"], rel=0.02)
