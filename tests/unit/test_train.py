"""Training: the library's parser takes our config, its Trainer runs on the tiny verifier, nothing is believed blindly."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import signal
import subprocess
import sys
import time

import pytest
import torch
import yaml
from eaglebook import acceptance, guard, hidden_states, train, verifier, vocab
from eaglebook.errors import UserError
from eaglebook.params import Train
from eaglebook.responses import HELD_OUT, TRAIN, Conversation
from hypothesis import given
from hypothesis import strategies as st

IDS = [2, 4, 5]


def conversations(count: int, held_out: int, seed: int = 0) -> list[Conversation]:
    """Answers that are easy to learn: each token follows from the one before."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for number in range(count):
        start = int(torch.randint(10, 100, (1,), generator=generator))
        ids = [1, *[10 + (start + 7 * k) % 90 for k in range(30)]]
        split = TRAIN if number < count - held_out else HELD_OUT
        made.append(Conversation(f"c{number}", "all", split, ids, [0] * 6 + [1] * 25, "length"))
    return made


@pytest.fixture(scope="module")
def job(tiny_verifier, tmp_path_factory):
    """A data set, hidden states and a mapping for the tiny verifier; the function builds a training config."""
    folder = tmp_path_factory.mktemp("job")
    found = verifier.resolve(str(tiny_verifier))
    rows = conversations(24, 4)
    (folder / "hs").mkdir()
    model = verifier.load_model(found)
    hidden_states.extract(model, [c.input_ids for c in rows], IDS, folder / "hs", token_budget=512)
    vocab.save(folder, *vocab.build(vocab.count(rows), 100, found.vocab_size))
    ratio = train.write_dataset(rows, folder / "dataset")
    params = Train(epochs=2, pack_tokens=128, verifier_name_or_path=str(tiny_verifier), threads=1, timeout_s=200)

    def config(save_path, params=params):
        return train.config(
            params, found, dataset=folder / "dataset", hidden_states=folder / "hs", mapping=folder, draft_vocab_size=100,
            aux_hidden_state_layer_ids=IDS, train_data_ratio=ratio, save_path=save_path,
        )  # fmt: skip

    return config, params, found, rows, folder


def test_the_librarys_own_parser_takes_the_config(job, tmp_path) -> None:
    from speculators.train.config import TrainConfig

    config, params, *_ = job
    file = tmp_path / "train.yaml"
    file.write_text(yaml.safe_dump(config(tmp_path / "out")))
    flat = TrainConfig.from_sources(cli={}, config_path=str(file), argv=["test"]).flatten()
    assert flat["draft_vocab_size"] == 100
    assert flat["on_missing"] == "raise"
    assert flat["full_attention_indices"] == [0]
    assert (flat["norm_before_residual"], flat["norm_output"]) == (params.norm_before_residual, params.norm_output)
    assert flat["epochs"] == 2


@pytest.mark.timeout(300)
def test_it_trains_for_real_and_leaves_the_verifiers_parts_alone(job, tmp_path) -> None:
    config, params, found, rows, folder = job
    curves = train.run(config(tmp_path / "checkpoints"), tmp_path, params)
    assert len(curves.epochs) == 2
    assert curves.steps[-1]["loss"] < curves.steps[0]["loss"]
    checkpoint = train.last_checkpoint(tmp_path / "checkpoints")
    assert checkpoint.name == "1"
    draft = acceptance.load_draft(checkpoint, found.path)
    model = verifier.load_model(found, dtype="float32")
    kept = torch.from_numpy(vocab.target_ids(vocab.load(folder)[0]))
    assert torch.equal(draft.lm_head.weight, model.lm_head.weight[kept])
    assert torch.equal(draft.embed_tokens.weight, model.model.embed_tokens.weight)
    held_out = [(r, c) for r, c in enumerate(rows) if c.split == HELD_OUT]
    samples = [
        (hidden_states.read(folder / "hs" / f"hs_{r}.safetensors")[0], c.input_ids, c.loss_mask) for r, c in held_out
    ]
    result = acceptance.evaluate(draft, samples, 3)
    assert result["every_position"].drafts == 4 * 24
    # a second call resumes behind the last epoch: nothing is trained twice, the curves are the same
    before = hashlib.sha256((checkpoint / "model.safetensors").read_bytes()).hexdigest()
    again = train.run(config(tmp_path / "checkpoints"), tmp_path, params)
    assert again.steps == curves.steps
    assert hashlib.sha256((checkpoint / "model.safetensors").read_bytes()).hexdigest() == before


@pytest.mark.timeout(300)
def test_a_stopped_training_says_so_and_the_next_one_goes_on(job, tmp_path) -> None:
    config, params, *_ = job
    longer = params.model_copy(update={"epochs": 200})
    file, metrics = tmp_path / "train.yaml", tmp_path / "metrics.jsonl"
    file.write_text(yaml.safe_dump(config(tmp_path / "checkpoints", longer)))
    argv = [sys.executable, "-m", "eaglebook.train_worker", str(file), "--metrics", str(metrics), "--threads", "1"]
    process = guard.start(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while len(train.read(metrics).epochs) < 2:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) != 0, "a stopped training must not look like a finished one"
    done = len(train.read(metrics).epochs)
    assert done < 200
    # worse than a signal: the last epoch saved but not validated, and one cut while it was written
    lines = metrics.read_text().splitlines()
    last = max(number for number, line in enumerate(lines) if '"val"' in line)
    metrics.write_text("\n".join(lines[:last]) + "\n")
    (tmp_path / "checkpoints" / str(done)).mkdir(exist_ok=True)
    shorter = params.model_copy(update={"epochs": done + 1, "warm_start": False})
    curves = train.run(config(tmp_path / "checkpoints", shorter), tmp_path, shorter)
    assert not (tmp_path / "checkpoints" / "interrupted").exists()
    assert [e["epoch"] for e in curves.epochs] == list(range(done + 1))


@pytest.mark.timeout(200)
def test_a_missing_hidden_state_stops_the_training(job, tmp_path) -> None:
    config, params, *_ = job
    changed = config(tmp_path / "checkpoints")
    (tmp_path / "empty").mkdir()
    changed["train"]["backend"]["hidden_states_path"] = str(tmp_path / "empty")
    with pytest.raises(UserError, match="Failed to load hidden states"):
        train.run(changed, tmp_path, params)


def test_what_a_pack_cuts_off_is_counted_and_nothing_left_is_refused() -> None:
    rows = conversations(4, 1)  # 31 tokens, the first 6 a prompt
    assert train.clipped(rows, 30) == (0, 0)
    assert train.clipped(rows, 20) == (4, 40)
    with pytest.raises(UserError, match="no supervised token within pack_tokens"):
        train.clipped(rows, 5)


def test_the_warm_start_copies_the_verifiers_last_layer(job, tmp_path) -> None:
    from eaglebook import warm_start
    from speculators.models.eagle3 import Eagle3DraftModel
    from speculators.train.cli import create_transformer_layer_config

    _, _, found, _, folder = job
    d2t, t2d = vocab.load(folder)
    draft = Eagle3DraftModel.from_training_args(
        create_transformer_layer_config(str(found.path), 1, "llama", "silu", 2048, [0]),
        t2d=torch.from_numpy(t2d), d2t=torch.from_numpy(d2t), draft_vocab_size=100, norm_before_residual=False,
        verifier_name_or_path=str(found.path), ttt_steps=3, target_layer_ids=IDS, draft_attn_impl="sdpa",
    )  # fmt: skip
    assert warm_start.from_verifier(draft, found) == 11
    last = verifier.load_model(found, dtype="float32").model.layers[-1]
    assert torch.equal(draft.layers[0].self_attn.v_proj.weight[:, 64:], last.self_attn.v_proj.weight)
    assert torch.equal(draft.layers[0].mlp.down_proj.weight, last.mlp.down_proj.weight)
    assert torch.equal(draft.fc.weight[:, -64:], torch.eye(64))
    assert not draft.fc.weight[:, :-64].any()


def test_the_split_needs_both_sides_in_order(tmp_path) -> None:
    rows = conversations(10, 2)
    ratio = train.write_dataset(rows, tmp_path / "d")
    assert int(len(rows) * ratio) == 8
    for bad in (rows[:8], rows[8:], rows[::-1]):
        with pytest.raises(UserError, match="split"):
            train.write_dataset(bad, tmp_path / "x")


@given(st.integers(1, 500), st.integers(1, 500))
def test_rounding_never_moves_a_row_across_the_split(training: int, held_out: int) -> None:
    count = training + held_out
    assert int(count * ((training + 0.5) / count)) == training


STEP = {"train": {"loss": 5.0, "full_acc_0": 0.1, "error_records": 0}, "profile": {"tokens_per_s": 10.0}, "lr": 0.1}


def curves(tmp_path, *rows: dict, tail: str = "") -> train.Curves:
    file = tmp_path / "m.jsonl"
    file.write_text("".join(json.dumps(r) + "\n" for r in rows) + tail)
    return train.read(file)


def test_curves_survive_a_torn_line_and_repeated_steps(tmp_path) -> None:
    first = STEP | {"global_step": 0, "epoch": 0}
    repeated = first | {"train": STEP["train"] | {"loss": 4.0}}
    read = curves(tmp_path, first, repeated, {"val": {"loss_epoch": 3.0}, "epoch": 0}, tail='{"train": {"lo')
    assert [s["loss"] for s in read.steps] == [4.0]
    assert read.epochs == [{"epoch": 0, "loss": 3.0}]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({}, None),
        ({"loss": 0.0}, "loss was 0"),
        ({"loss": float("nan")}, "not a number"),
        ({"error_records": 1}, "samples were dropped"),
    ],
)
def test_a_run_that_cannot_have_learnt_is_not_believed(tmp_path, change, says) -> None:
    step = STEP | {"global_step": 0, "epoch": 0, "train": STEP["train"] | change}
    found = curves(tmp_path, step, {"val": {"loss_epoch": 3.0}, "epoch": 0})
    if says is None:
        train.refuse_nothing_learnt(found, 1)
    else:
        with pytest.raises(UserError, match=says):
            train.refuse_nothing_learnt(found, 1)
    with pytest.raises(UserError, match="no training step"):
        train.refuse_nothing_learnt(dataclasses.replace(found, steps=[]), 1)
    with pytest.raises(UserError, match="of 2 validations"):
        train.refuse_nothing_learnt(found, 2)
