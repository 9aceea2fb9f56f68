"""Small rooms: counters, parity, report, verifier, progress."""

from __future__ import annotations

import itertools
import json
import re
import shutil

import nbformat
import pytest
import torch
from eaglebook import evenly, machine, manifests, parity, paths, progress, report, verifier
from eaglebook.acceptance import Acceptance
from eaglebook.engine import counters
from eaglebook.errors import UserError
from eaglebook.params import Preflight
from hypothesis import given
from hypothesis import strategies as st

PAGE = """
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="verifier"} 200.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="verifier"} 600.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="verifier"} 90.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="verifier",position="0"} 60.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="verifier",position="1"} 20.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="verifier",position="2"} 1e+01
"""


def test_counters_are_read_and_differenced() -> None:
    now = counters.parse(PAGE, 3)
    assert now == Acceptance(200, (60, 20, 10))
    assert counters.since(Acceptance(100, (30, 10, 5)), now).mean_acceptance_length == 1.45
    with pytest.raises(UserError, match="counters"):
        counters.parse("# nothing\n", 3)


def test_first_difference() -> None:
    assert parity.first_difference([1, 2, 3], [1, 2, 3]) is None
    assert parity.first_difference([1, 2, 3], [1, 9, 3]) == 1
    assert parity.first_difference([1, 2], [1, 2, 3]) == 2


def test_a_tie_is_a_few_bf16_steps_and_an_end_is_none() -> None:
    def difference(a: float, b: float) -> parity.Difference:
        return parity.Difference(0, 0, 1, 2, a, b)

    assert difference(16.0, 16.0).is_tie
    assert difference(16.0, 16.0 + 0.125).is_tie  # one step between 16 and 32
    assert not difference(16.0, 15.0).is_tie
    assert not difference(16.0, float("-inf")).is_tie


def test_differing_answers_are_shown_with_the_verifiers_logits(tiny_verifier) -> None:
    model = verifier.load_model(verifier.resolve(str(tiny_verifier)), dtype="float32")
    prompt = [1, 5, 6, 7]
    with torch.inference_mode():
        logits = model(torch.tensor([prompt])).logits[0, -1]
    best, worst = int(logits.argmax()), int(logits.argmin())
    (found,) = parity.compare(model, [prompt], [[best, 9]], [[worst, 9]])
    assert (found.position, found.token_a, found.token_b) == (0, best, worst)
    assert found.logit_a == pytest.approx(logits[best].item(), rel=1e-4)
    assert parity.compare(model, [prompt], [[best]], [[best]]) == []


def test_the_verifier_is_read_from_headers(tiny_verifier) -> None:
    found = verifier.resolve(str(tiny_verifier))
    assert (found.hidden_size, found.num_layers, found.head_dim, found.vocab_size) == (64, 8, 32, 300)
    assert (found.head_key, found.tied, found.chat_template) == ("lm_head.weight", False, True)
    assert verifier.default_aux_layer_ids(30) == [2, 15, 27]


def test_a_nested_prefixed_verifier_is_resolved(tiny_verifier, tmp_path) -> None:
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "nested"
    shutil.copytree(tiny_verifier, folder)
    tensors = {f"language_model.{n}": t for n, t in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors")
    inner = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"architectures": ["Outer"], "text_config": inner}))
    found = verifier.resolve(str(folder))
    assert (found.hidden_size, found.architectures) == (64, ("Outer",))
    assert found.embed_key == "language_model.model.embed_tokens.weight"


def test_bad_verifiers_are_named(tiny_verifier, tmp_path) -> None:
    from safetensors.torch import load_file, save_file

    with pytest.raises(UserError, match="not found"):
        verifier.resolve(str(tmp_path / "nowhere"))
    for damaged, says in (("{", "not a config"), ("{}", "keys are missing")):
        (tmp_path / "config.json").write_text(damaged)
        with pytest.raises(UserError, match=says):
            verifier.resolve(str(tmp_path))
    folder = tmp_path / "headless"
    shutil.copytree(tiny_verifier, folder)
    tensors = load_file(folder / "model.safetensors")
    save_file({n: t for n, t in tensors.items() if n != "lm_head.weight"}, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"lm_head\.weight"):
        verifier.resolve(str(folder))
    save_file(
        tensors | {"lm_head.weight": tensors["lm_head.weight"].to(torch.float8_e4m3fn)}, folder / "model.safetensors"
    )
    with pytest.raises(UserError, match="quantised"):
        verifier.resolve(str(folder))


def test_a_verifier_without_chat_template_is_refused(tiny_verifier, tmp_path) -> None:
    folder = tmp_path / "base"
    shutil.copytree(tiny_verifier, folder)
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(UserError, match="no chat template"):
        verifier.load_tokenizer(verifier.resolve(str(folder)))


def test_the_embedded_verifier_is_made_once_and_repaired(tmp_path, monkeypatch) -> None:
    first = verifier.resolve(verifier.EMBEDDED)
    assert (first.hidden_size, first.num_layers, first.vocab_size, first.tied) == (576, 30, 49152, True)
    stamp = (first.path / "materialised.json").stat().st_mtime_ns
    assert verifier.resolve(verifier.EMBEDDED).path == first.path
    assert (first.path / "materialised.json").stat().st_mtime_ns == stamp
    monkeypatch.setenv("EAGLEBOOK_MODELS", str(tmp_path))
    copy = tmp_path / first.path.name
    shutil.copytree(first.path, copy)
    (copy / "config.json").write_text("{}")  # damaged: written again from the package
    assert verifier.resolve(verifier.EMBEDDED).hidden_size == 576
    assert (copy / "model.safetensors").read_bytes() == (first.path / "model.safetensors").read_bytes()


def test_the_machine_card_names_nobody() -> None:
    import socket

    card = machine.card()
    assert card["cores"] >= 1
    assert socket.gethostname() not in json.dumps(card) or len(socket.gethostname()) < 4
    assert machine.gemm_flops(repeats=1) > 1e8


def test_a_report_needs_nothing_from_elsewhere(outputs, tmp_path) -> None:
    folder = outputs / "r" / "00_preflight"
    folder.mkdir(parents=True)
    image = nbformat.v4.new_output(
        "display_data", {"image/png": "iVBORw0KGgo="}, metadata={"image/png": {"alt": "a plot"}}
    )
    cells = [
        nbformat.v4.new_markdown_cell("# 00 · A question?\n\nProse with `code`."),
        nbformat.v4.new_code_cell(
            "print('<b>')", outputs=[nbformat.v4.new_output("stream", text=f"<b> {tmp_path}/x\n"), image]
        ),
        nbformat.v4.new_code_cell(
            "1/0", outputs=[nbformat.v4.new_output("error", ename="E", evalue="<v>", traceback=["t"])]
        ),
    ]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), folder / "notebook.ipynb")
    manifest = manifests.new("00_preflight", "r", Preflight(), {}, "fp")
    manifest.error = "<script>alert(1)</script>"
    page = report.write_stage_report(folder, manifest).read_text()
    assert not re.findall(r'(?:src|href)="https?:', page)
    assert "<script" not in page
    assert 'alt="a plot"' in page
    assert "A question?" in page
    assert "&lt;b&gt;" in page
    assert "&lt;v&gt;" in page
    assert str(tmp_path) not in page
    manifests.write(folder, manifest)
    index = report.write_index(outputs).read_text()
    assert 'href="r/00_preflight/report.html"' in index


def test_progress_speaks_by_time_and_tells_the_runner(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("EAGLEBOOK_PROGRESS", str(tmp_path / "p"))
    bar = progress.Progress("work", 1000, unit="items")
    for _ in range(1000):
        bar.step(tokens=2)
    bar.close()
    assert len(capsys.readouterr().out.splitlines()) == 1
    assert json.loads((tmp_path / "p").read_text())["line"].startswith("work 1000/1000 items")


def test_scrubbing_leaves_json_as_json() -> None:
    """A notebook is scrubbed as text: a path in a string of a cell's source stands before an escaped quote."""
    cell = json.dumps({"source": ['foreign_mapping = "/tmp/mine.pt"\n', "x = '/tmp/a'"]})
    assert json.loads(paths.scrub(cell)) == {"source": ['foreign_mapping = "<tmp>"\n', "x = '<tmp>'"]}


@given(st.lists(st.integers(), max_size=40, unique=True), st.integers(0, 50))
def test_a_few_of_many_are_in_order_and_apart(items: list[int], count: int) -> None:
    taken = evenly.take(items, count)
    assert len(taken) == (min(count, len(items)) if count else len(items))
    places = [items.index(item) for item in taken]
    gaps = [b - a for a, b in itertools.pairwise(places)]
    assert places[:1] in ([], [0])
    assert all(gap > 0 for gap in gaps)
    assert not gaps or max(gaps) - min(gaps) <= 1
