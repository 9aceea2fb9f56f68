"""Training: the library's parser takes our config, its Trainer runs on the tiny verifier, nothing is believed blindly."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
import yaml
from eaglebook import (
    acceptance,
    guard,
    hidden_states,
    responses,
    states_files,
    train,
    train_config,
    train_curves,
    train_inputs,
    train_watch,
    verifier,
    vocab,
    warm_start,
)
from eaglebook.errors import UserError
from eaglebook.params import Train
from eaglebook.responses import HELD_OUT, TRAIN, Conversation
from eaglebook.train_worker import Job
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

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
    ratio = train_config.write_dataset(rows, folder / "dataset")
    responses.write(folder / "conversations.jsonl", rows)
    params = Train(epochs=2, pack_tokens=128, verifier_name_or_path=str(tiny_verifier), threads=1, timeout_s=200)

    def config(save_path, params=params):
        return train_config.build(
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
    file = folder / "conversations.jsonl"
    curves = train.run(config(tmp_path / "checkpoints"), tmp_path, params, file)
    assert len(curves.epochs) == 2
    assert curves.steps[-1]["loss"] < curves.steps[0]["loss"]
    assert all(0 < step["grad_norm"] < 1000 for step in curves.steps)
    checkpoint = train.best_checkpoint(tmp_path / "checkpoints")
    assert checkpoint.name == str(curves.best_epoch)
    assert not train.changed_frozen(checkpoint, found, vocab.load(folder)[0], params)
    assert curves.points[0]["passes"] == 0
    assert [at["passes"] for at in curves.points][-2:] == [1, 2]
    draft = acceptance.load_draft(checkpoint, found.path)
    model = verifier.load_model(found, dtype="float32")
    kept = torch.from_numpy(vocab.target_ids(vocab.load(folder)[0]))
    assert torch.equal(draft.lm_head.weight, model.lm_head.weight[kept])
    assert torch.equal(draft.embed_tokens.weight, model.model.embed_tokens.weight)
    held_out = [(r, c) for r, c in enumerate(rows) if c.split == HELD_OUT]
    samples = [
        (states_files.read(folder / "hs" / f"hs_{r}.safetensors")[0], c.input_ids, c.loss_mask) for r, c in held_out
    ]
    result = acceptance.evaluate(draft, samples, 3)
    assert result["every_position"].drafts == 4 * 24
    measured = curves.points[curves.best_epoch - 2]["held_out"]  # on the way, in the training process
    assert measured["drafts"] == result["as_served"].drafts
    assert measured["mean_acceptance_length"] == pytest.approx(result["as_served"].mean_acceptance_length, abs=0.05)
    # a second call resumes behind the last epoch: nothing is trained twice, the curves are the same
    before = hashlib.sha256((checkpoint / "model.safetensors").read_bytes()).hexdigest()
    again = train.run(config(tmp_path / "checkpoints"), tmp_path, params, file)
    assert again.steps == curves.steps
    assert hashlib.sha256((checkpoint / "model.safetensors").read_bytes()).hexdigest() == before


@pytest.mark.timeout(300)
def test_a_stopped_training_says_so_and_the_next_one_goes_on(job, tmp_path) -> None:
    config, params, *_ = job
    longer = params.model_copy(update={"epochs": 200})
    file, metrics = tmp_path / "train.yaml", tmp_path / "metrics.jsonl"
    file.write_text(yaml.safe_dump(config(tmp_path / "checkpoints", longer)))
    (tmp_path / "job.json").write_text(Job(config=file, metrics=metrics, threads=1).model_dump_json())
    argv = [sys.executable, "-m", "eaglebook.train_worker", str(tmp_path / "job.json")]
    process = guard.start(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while len(train_curves.read(metrics).epochs) < 2:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) != 0, "a stopped training must not look like a finished one"
    done = len(train_curves.read(metrics).epochs)
    assert done < 200
    # worse than a signal: the last epoch saved but not validated, and one cut while it was written
    lines = metrics.read_text().splitlines()
    last = max(number for number, line in enumerate(lines) if '"val"' in line)
    metrics.write_text("\n".join(lines[:last]) + "\n")
    (tmp_path / "checkpoints" / str(done)).mkdir(exist_ok=True)
    shorter = params.model_copy(update={"epochs": done + 1, "warm_start": "noise"})
    curves = train.run(config(tmp_path / "checkpoints", shorter), tmp_path, shorter)
    assert not (tmp_path / "checkpoints" / "interrupted").exists()
    assert [e["epoch"] for e in curves.epochs] == list(range(done + 1))


@pytest.mark.timeout(300)
def test_the_faster_path_reaches_the_stock_paths_loss(job, tmp_path) -> None:
    config, params, *_ = job
    losses = {}
    for stock in (False, True):
        chosen = params.model_copy(update={"stock_trainer": stock})
        curves = train.run(config(tmp_path / str(stock)), make(tmp_path / f"of {stock}"), chosen)
        losses[stock] = [step["loss"] for step in curves.steps]
    assert losses[False] == pytest.approx(losses[True], rel=0.02)


@pytest.mark.timeout(300)
def test_one_conversation_is_learnt_by_heart(job, tmp_path) -> None:
    """A draft that cannot even memorise has lost its gradient somewhere."""
    _, params, found, rows, folder = job
    states = make(tmp_path / "hs")
    for row in range(2):
        (states / f"hs_{row}.safetensors").symlink_to(folder / "hs/hs_0.safetensors")
    twice = [rows[0], dataclasses.replace(rows[0], id="again", split=HELD_OUT)]
    often = params.model_copy(update={"epochs": 60, "learning_rate": 1.0e-2, "warm_start": "noise", "loss": "ce"})
    config = train_config.build(
        often, found, dataset=tmp_path / "data", hidden_states=states, mapping=folder, draft_vocab_size=100,
        aux_hidden_state_layer_ids=IDS, train_data_ratio=train_config.write_dataset(twice, tmp_path / "data"),
        save_path=tmp_path / "checkpoints",
    )  # fmt: skip
    curves = train.run(config, tmp_path, often)
    assert curves.epochs[0]["full_acc_0"] < 0.5
    assert curves.epochs[-1]["full_acc_0"] > 0.95
    assert curves.epochs[-1]["full_acc_2"] > 0.9


def make(folder):
    folder.mkdir()
    return folder


@pytest.mark.timeout(200)
def test_another_runs_checkpoints_are_not_gone_on_from(job, tmp_path) -> None:
    config, params, *_ = job
    shorter = params.model_copy(update={"epochs": 1})
    train.run(config(tmp_path / "checkpoints", shorter), tmp_path, shorter)
    other = shorter.model_copy(update={"norm_output": True})
    with pytest.raises(UserError, match="another training") as error:
        train.run(config(tmp_path / "checkpoints", other), tmp_path, other)
    assert "draft.norm_output True" in str(error.value)


@pytest.mark.parametrize(
    ("code", "said", "expected"),
    [
        (137, "", True),  # by the guard
        (-9, "", True),
        (0, "a log that speaks of out of memory", False),
        (1, "torch.OutOfMemoryError: CUDA out of memory", True),
        (1, "KeyError: 'x'", False),
        (0, "", False),
    ],
)
def test_out_of_memory_is_told_from_other_ends(code, said, expected) -> None:
    assert train.ran_out_of_memory(code, said) is expected


def test_a_killed_training_is_out_of_memory_only_where_the_kernel_may_have_done_it() -> None:
    assert not train.ran_out_of_memory(137, "", by_kernel=False)
    assert train.ran_out_of_memory(1, "CUDA out of memory", by_kernel=False)


def test_half_a_pack_is_whole_blocks_and_the_learning_rate_ends_where_it_should() -> None:
    config = {"train": {"data": {"total_seq_len": 640}, "scheduler": {}}}
    train.halve_packs(config, train_curves.Curves([], []), 4)
    assert config == {"train": {"data": {"total_seq_len": 256}, "scheduler": {}}}, (
        "nothing done: the library's own count"
    )
    steps = [{"epoch": epoch, "step": step, "loss": 1.0} for epoch in range(2) for step in range(10)]
    begun = [*steps, {"epoch": 2, "step": 20, "loss": 1.0}]  # an epoch that is trained again
    train.halve_packs(config, train_curves.Curves(begun, [{"epoch": 0}, {"epoch": 1}]), 4)
    assert config["train"]["scheduler"] == {"scheduler_total_steps": 20 + 2 * 10 * 2}
    from speculators.train.config import TrainConfig

    assert "scheduler_total_steps" in str(TrainConfig.model_json_schema())


def test_packs_that_leave_a_conversation_nothing_to_learn_are_refused_when_they_are_halved(
    job, tmp_path, monkeypatch
) -> None:
    config, params, *_ = job
    params = params.model_copy(update={"pack_tokens": 256, "warm_start": "noise"})
    long = Conversation("long", "all", TRAIN, [1] * 250, [0] * 200 + [1] * 50, "length")
    responses.write(tmp_path / "conversations.jsonl", [*conversations(4, 1), long])
    monkeypatch.setattr(train, "_process", lambda *_: (1, "out of memory"))
    with pytest.raises(UserError, match="no supervised token within pack_tokens"):
        train.run(config(tmp_path / "checkpoints", params), tmp_path, params, tmp_path / "conversations.jsonl")


def test_fc_is_fitted_only_to_enough_tokens(job, tmp_path, capsys) -> None:
    config, params, *_ = job
    for count, enough in ((20, False), (100, True)):  # of 31 tokens; fc has 3 x 64 columns
        responses.write(tmp_path / "c.jsonl", conversations(count, 1))
        assert train._enough_to_fit(config(tmp_path), params, tmp_path / "c.jsonl") is enough
    assert "589 tokens are too few" in capsys.readouterr().out


def test_out_of_memory_halves_the_pack_and_goes_on(job, tmp_path, monkeypatch) -> None:
    config, params, *_ = job
    params = params.model_copy(update={"pack_tokens": 256})
    tried = []

    def process(folder, params, began):
        tried.append(yaml.safe_load((folder / "train.yaml").read_text())["train"]["data"]["total_seq_len"])
        return (1, "out of memory") if len(tried) < 5 else (0, "")

    monkeypatch.setattr(train, "_process", process)
    with pytest.raises(UserError, match="ended with code 1"):  # 256 tokens, then 128, and no smaller
        train.run(config(tmp_path / "checkpoints", params), tmp_path, params)
    assert tried == [256, 128]


@pytest.mark.timeout(300)
def test_a_training_that_goes_on_with_half_the_pack_ends_with_its_learning_rate_at_zero(
    job, tmp_path, monkeypatch
) -> None:
    config, params, *_, folder = job
    params = params.model_copy(update={"epochs": 4, "pack_tokens": 256, "warm_start": "noise"})
    process, packs = train._process, []

    def first_one_ends_half_way(where, asked, began):
        file = where / "train.yaml"
        written = yaml.safe_load(file.read_text())
        packs.append(written["train"]["data"]["total_seq_len"])
        if len(packs) > 1:
            return process(where, asked, began)
        written["train"]["trainer"]["epochs"] = 2
        written["train"]["scheduler"]["scheduler_total_steps"] = 4 * 3
        file.write_text(yaml.safe_dump(written))
        assert process(where, asked, began)[0] == 0
        return 1, "out of memory"

    monkeypatch.setattr(train, "_process", first_one_ends_half_way)
    curves = train.run(config(tmp_path / "checkpoints", params), tmp_path, params, folder / "conversations.jsonl")
    assert packs == [256, 128]
    assert [epoch["epoch"] for epoch in curves.epochs] == [0, 1, 2, 3]
    steps = [sum(step["epoch"] == epoch for step in curves.steps) for epoch in range(4)]
    assert steps[0] == steps[1] == 3
    assert steps[2] == steps[3] > 3, "twice as many, of half the length"
    assert curves.steps[-1]["lr"] < 0.1 * params.learning_rate


def test_several_processes_are_torchruns_own_command(tmp_path, monkeypatch) -> None:
    from torch.distributed.run import parse_args

    assert train.command(Train(), tmp_path / "job.json")[1:] == [
        "-m",
        "eaglebook.train_worker",
        str(tmp_path / "job.json"),
    ]
    with pytest.raises(UserError, match="8 training processes") as error:
        train.command(Train(processes=8), tmp_path / "job.json")
    assert "0 GPUs" in str(error.value)
    monkeypatch.setattr(train.machine, "accelerators", lambda: 8)
    one = parse_args(train.command(Train(processes=8), tmp_path / "job.json")[3:])
    assert (one.standalone, one.nproc_per_node, one.module) == (True, "8", True)
    assert (one.training_script, one.training_script_args) == ("eaglebook.train_worker", [str(tmp_path / "job.json")])
    several = Train(processes=8, nodes=2, rendezvous="first:29500")
    two = parse_args(train.command(several, tmp_path / "job.json", 1)[3:])
    assert (two.nnodes, two.node_rank, two.rdzv_backend, two.rdzv_endpoint) == ("2", 1, "c10d", "first:29500")
    for wrong, says in (
        ({"nodes": 2}, "need rendezvous"),
        ({"fsdp_shard": True}, "nobody to share"),
        ({"norm_before_fc": True, "fc_norm": True}, "exclude each other"),
    ):
        with pytest.raises(ValueError, match=says):
            Train(**wrong)


def test_checkpoints_are_pruned_to_the_best_and_the_last(tmp_path) -> None:
    for epoch, length in enumerate([1.2, 1.5, 1.4, 1.5]):
        (tmp_path / str(epoch)).mkdir()
        (tmp_path / f"epoch{epoch}_end").symlink_to(str(epoch))
        record = {"held_out": {"mean_acceptance_length": length}}
        (tmp_path / str(epoch) / train_watch.RECORD).write_text(json.dumps(record))
    assert train_watch.best_epoch(tmp_path) == 1, "the earlier of two equal ones"
    train_watch.prune(tmp_path, keep={1, 3})
    assert sorted(f.name for f in tmp_path.iterdir()) == ["1", "3", "epoch1_end", "epoch3_end"]


def test_an_epoch_whose_acceptance_was_not_measured_is_trained_again(tmp_path) -> None:
    """Killed between the library's validation and ours: the library would go on behind it, and it could never be chosen."""
    for epoch in (0, 1):
        (make(tmp_path / str(epoch)) / "training_state.json").write_text("{}")
    (tmp_path / "0" / train_watch.RECORD).write_text("{}")
    so_far = train_curves.Curves([], [{"epoch": 0, "loss": 1.0}, {"epoch": 1, "loss": 1.0}])
    train.discard_unfinished(tmp_path, so_far, watched=False)
    assert (tmp_path / "1").is_dir()
    train.discard_unfinished(tmp_path, so_far, watched=True)
    assert [f.name for f in tmp_path.iterdir()] == ["0"]


@pytest.mark.timeout(400)
def test_it_stops_when_acceptance_no_longer_grows_and_stays_stopped(job, tmp_path) -> None:
    config, params, *_, folder = job
    patient = params.model_copy(update={"epochs": 40, "patience": 2, "learning_rate": 2.0e-2, "warm_start": "noise"})
    curves = train.run(config(tmp_path / "checkpoints", patient), tmp_path, patient, folder / "conversations.jsonl")
    assert curves.stopped_early
    assert len(curves.epochs) < 40
    assert curves.epochs[-1]["epoch"] - curves.best_epoch == 2
    kept = {int(f.name) for f in (tmp_path / "checkpoints").iterdir() if f.name.isdigit()}
    assert kept == {curves.best_epoch, int(curves.epochs[-1]["epoch"])}
    again = train.run(config(tmp_path / "checkpoints", patient), tmp_path, patient, folder / "conversations.jsonl")
    assert len(again.epochs) == len(curves.epochs)


@pytest.mark.timeout(400)
def test_a_draft_is_continued_from_where_it_was(job, tmp_path, monkeypatch) -> None:
    config, params, found, rows, folder = job
    file = folder / "conversations.jsonl"
    params = params.model_copy(update={"loss": "ce", "epochs": 6})
    first = train.run(config(make(tmp_path / "a") / "checkpoints", params), tmp_path / "a", params, file)
    draft = train.best_checkpoint(tmp_path / "a/checkpoints")
    # as published: it names its verifier by a name that is no folder here
    published = json.loads((draft / "config.json").read_text())
    published["speculators_config"]["verifier"]["name_or_path"] = "org/no-such-verifier"
    (draft / "config.json").write_text(json.dumps(published))
    going_on = params.model_copy(update={"continue_from": str(draft), "epochs": 1, "learning_rate": 1.0e-4})
    index = {"rows": [c.id for c in rows], "verifier": found.name, "aux_hidden_state_layer_ids": IDS}
    mapping = vocab.load(folder)
    fits = train_inputs.checks(going_on, found, rows, folder / "hs", index, *mapping)["the draft to continue fits"]
    assert fits[0], fits
    with pytest.raises(UserError, match="accepts nothing before its first step"):  # a random verifier is never guessed
        train.run(config(make(tmp_path / "gate") / "checkpoints", going_on), tmp_path / "gate", going_on, file)
    monkeypatch.setattr(train, "_LEAST_START", 0.0)
    second = train.run(config(make(tmp_path / "b") / "checkpoints", going_on), tmp_path / "b", going_on, file)
    chosen = next(e for e in first.epochs if int(e["epoch"]) == first.best_epoch)
    assert second.steps[0]["loss"] < 0.95 * first.steps[0]["loss"]
    assert second.epochs[0]["loss"] == pytest.approx(chosen["loss"], rel=0.05)
    assert not train.changed_frozen(train.best_checkpoint(tmp_path / "b/checkpoints"), found, mapping[0], going_on)
    other = going_on.model_copy(update={"norm_output": True})
    ok, why = train_inputs.checks(other, found, rows, folder / "hs", index, *mapping)["the draft to continue fits"]
    assert not ok
    assert "norm_output is False" in why

    def refused(says, mapping=mapping, **changed) -> None:
        asked = going_on.model_copy(update=changed)
        ok, why = train_inputs.checks(asked, found, rows, folder / "hs", index, *mapping)["the draft to continue fits"]
        assert not ok
        assert says in why

    refused("num_attention_heads is 4, draft_heads asks for 2", draft_heads=2)
    refused("does not exist", continue_from=str(tmp_path / "nowhere"))
    refused("holds no weights", continue_from=str(make(tmp_path / "empty")))
    refused(
        "would be replaced", run_dir=str(make(tmp_path / "run")), continue_from=str(tmp_path / "run/04_train/artifacts")
    )
    tensors = load_file(draft / "model.safetensors")
    for name, says in (("layers.0.mlp.down_proj.weight", "down_proj"), ("d2t", "d2t")):
        lacking = make(tmp_path / f"without {name}")
        (lacking / "config.json").write_text((draft / "config.json").read_text())
        save_file({n: t for n, t in tensors.items() if n != name}, lacking / "model.safetensors")
        refused(says, continue_from=str(lacking))
    shards = make(tmp_path / "shards")  # as large drafts are published
    for number, names in enumerate((["embed_tokens.weight"], [n for n in tensors if n != "embed_tokens.weight"])):
        save_file({n: tensors[n] for n in names}, shards / f"model-{number}.safetensors")
    weight_map = {n: f"model-{int(n != 'embed_tokens.weight')}.safetensors" for n in tensors}
    (shards / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    sharded = going_on.model_copy(update={"continue_from": str(shards)})
    assert not train.changed_frozen(draft, found, mapping[0], sharded)
    del tensors["embed_tokens.weight"]
    save_file(tensors | {"lm_head.weight": tensors["lm_head.weight"] + 1}, shards / "model-1.safetensors")
    assert train.changed_frozen(draft, found, mapping[0], sharded) == ["lm_head.weight"]


def test_what_is_watched_is_never_trained_on(tmp_path) -> None:
    rows = conversations(20, 6)
    chosen = train_watch.choose(rows, tmp_path, 4)
    assert set(chosen) == {HELD_OUT}
    assert [c.id for _, c in chosen[HELD_OUT]] == ["c14", "c15", "c17", "c18"]
    assert chosen[HELD_OUT][0][0].name == "hs_14.safetensors"


def test_inputs_that_belong_together_pass_and_each_fault_is_named(job, tmp_path, monkeypatch) -> None:
    _, params, found, rows, folder = job
    d2t, t2d = vocab.load(folder)
    index = {"rows": [c.id for c in rows], "verifier": found.name, "aux_hidden_state_layer_ids": IDS}

    def failed(states=folder / "hs", index=index, d2t=d2t, t2d=t2d, rows=rows, params=params) -> list[str]:
        return [n for n, (ok, _) in train_inputs.checks(params, found, rows, states, index, d2t, t2d).items() if not ok]

    assert failed() == []
    assert failed(index=index | {"rows": index["rows"][::-1]}) == ["02 has the rows of 01, in order"]
    assert failed(index=index | {"verifier": "other"}) == ["02 was made from this verifier"]
    assert (
        failed(index=index | {"aux_hidden_state_layer_ids": [2, 4]})[0]
        == "the files hold these aux ids of this verifier"
    )
    assert failed(index=index | {"aux_hidden_state_layer_ids": [4, 2, 5]}) == ["the ids are of this verifier"]
    assert failed(t2d=t2d[:-1]) != []
    twice = d2t.copy()
    twice[0] += 1
    assert failed(d2t=twice) == ["the mapping is whole"]
    assert failed(states=make(tmp_path / "none"))[0] == "every conversation has its hidden states"
    assert "every token is of this verifier" in failed(
        rows=[dataclasses.replace(rows[0], input_ids=[999] * 31), *rows[1:]]
    )
    assert failed(params=params.model_copy(update={"continue_from": str(folder)})) == ["the draft to continue fits"]
    eight = params.model_copy(update={"processes": 8})  # and four held-out conversations
    assert failed(params=eight) == ["every process has a conversation to train on, and one to validate on"]
    monkeypatch.setattr(train_inputs.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    assert failed() == ["the disk holds the checkpoints"]


def test_a_fault_of_the_states_names_the_file_and_the_command(job, tmp_path) -> None:
    _, params, found, rows, folder = job
    index = {"rows": [c.id for c in rows], "verifier": found.name, "aux_hidden_state_layer_ids": IDS}
    states = tmp_path / "mine/02_hidden_states/artifacts/hidden_states"
    states.mkdir(parents=True)
    for file in (folder / "hs").iterdir():
        (states / file.name).symlink_to(file)
    (states / "hs_3.safetensors").unlink()
    (states / "hs_5.safetensors").unlink()
    (states / "hs_5.safetensors").write_bytes((folder / "hs/hs_5.safetensors").read_bytes()[:-100])
    checks = train_inputs.checks(params, found, rows, states, index, *vocab.load(folder))
    said = {name: detail for name, (ok, detail) in checks.items() if not ok}
    assert "hs_3.safetensors" in said["every conversation has its hidden states"]
    assert "hs_5.safetensors" in said["the files hold these aux ids of this verifier"]
    assert all(
        "/mine --stage 02_hidden_states --force" in detail or "not looked at" in detail for detail in said.values()
    )


def test_states_that_are_not_numbers_are_seen_before_training(job, tmp_path) -> None:
    _, params, found, rows, folder = job
    states = make(tmp_path / "hs")
    for file in (folder / "hs").iterdir():
        (states / file.name).symlink_to(file)
    broken, ids = states_files.read(folder / "hs/hs_0.safetensors")
    broken[3, 1, 7] = float("nan")
    (states / "hs_0.safetensors").unlink()
    states_files.write(states / "hs_0.safetensors", broken, ids.tolist())
    index = {"rows": [c.id for c in rows], "verifier": found.name, "aux_hidden_state_layer_ids": IDS}
    found_out = train_inputs.checks(params, found, rows, states, index, *vocab.load(folder))
    assert [name for name, (ok, _) in found_out.items() if not ok] == [
        "their numbers are finite and their tokens the conversations'"
    ]


def test_hidden_states_are_deleted_on_request_alone(tmp_path) -> None:
    states = make(tmp_path / "hs")
    (states / "hs_0.safetensors").write_bytes(b"x" * 1000)
    assert "1 files" in train_inputs.delete(states)
    assert not states.exists()


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
    assert train_config.clipped(rows, 30) == (0, 0)
    assert train_config.clipped(rows, 20) == (4, 40)
    with pytest.raises(UserError, match="no supervised token within pack_tokens"):
        train_config.clipped(rows, 5)


def fresh_draft(job, **geometry):
    from speculators.models.eagle3 import Eagle3DraftModel
    from speculators.train.cli import create_transformer_layer_config

    _, _, found, _, folder = job
    d2t, t2d = vocab.load(folder)
    layer = create_transformer_layer_config(str(found.path), 1, "llama", "silu", 2048, [0])
    for key, value in geometry.items():
        setattr(layer, key, value)
    return Eagle3DraftModel.from_training_args(
        layer, t2d=torch.from_numpy(t2d), d2t=torch.from_numpy(d2t), draft_vocab_size=100, norm_before_residual=False,
        verifier_name_or_path=str(found.path), ttt_steps=3, target_layer_ids=IDS, draft_attn_impl="sdpa",
    )  # fmt: skip


def test_the_warm_start_copies_the_verifiers_last_layer(job) -> None:
    found, draft = job[2], fresh_draft(job)
    assert warm_start.from_verifier(draft, found) == 11
    last = verifier.load_model(found, dtype="float32").model.layers[-1]
    assert torch.equal(draft.layers[0].self_attn.v_proj.weight[:, 64:], last.self_attn.v_proj.weight)
    assert torch.equal(draft.layers[0].mlp.down_proj.weight, last.mlp.down_proj.weight)
    assert torch.equal(draft.fc.weight[:, -64:], torch.eye(64))
    assert not draft.fc.weight[:, :-64].any()


def test_the_fitted_start_is_the_least_squares_guess_of_the_next_positions_state(job) -> None:
    _, _, _, _, folder = job
    draft = fresh_draft(job)
    states = [states_files.read(folder / f"hs/hs_{row}.safetensors")[0] for row in range(20)]
    warm_start.fit(draft, states, ridge=0.0)
    now = torch.cat([s[1:-1, :-1].flatten(1) for s in states]).double()
    following = torch.cat([s[2:, -2] for s in states]).double()
    best = torch.linalg.lstsq(now, following).solution
    fitted = (now @ draft.fc.weight.T.double() - following).norm()
    assert fitted <= (now @ best - following).norm() * 1.05
    assert fitted < 0.7 * following.norm()


@pytest.mark.parametrize(
    "larger",
    [
        {"num_key_value_heads": 4},
        {"num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 128},
        {"num_attention_heads": 6, "num_key_value_heads": 3},
    ],
)
def test_a_larger_draft_starts_as_the_same_function(job, larger) -> None:
    outputs = []
    for geometry in ({}, larger):
        draft = fresh_draft(job, **geometry).eval()
        assert warm_start.from_verifier(draft, job[2]) == 11
        for module in (
            draft.layers[0].self_attn.q_proj,
            draft.layers[0].self_attn.k_proj,
            draft.layers[0].self_attn.v_proj,
        ):
            torch.nn.init.zeros_(module.weight[:, :64].data)  # the embedding's half is noise: left out
        logits = []
        draft.lm_head.register_forward_hook(lambda module, args, out, kept=logits: kept.append(out))
        features = torch.randn(1, 9, 3 * 64, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            draft(features, torch.arange(9)[None], torch.zeros(1, 9, dtype=torch.long), ttt_steps=2)
        outputs.append(torch.cat(logits))
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-3, atol=1e-4)


def test_a_draft_too_small_for_the_verifiers_heads_keeps_its_noise(job) -> None:
    draft = fresh_draft(job, num_attention_heads=2, num_key_value_heads=2, intermediate_size=32)
    before = draft.layers[0].self_attn.q_proj.weight.clone()
    assert warm_start.from_verifier(draft, job[2]) == 4  # the norms and fc
    assert torch.equal(draft.layers[0].self_attn.q_proj.weight, before)


def test_a_geometry_of_ones_own_is_what_is_trained(job, tmp_path) -> None:
    from speculators.train.cli import load_draft_transformer_layer_config

    config, params, found, *_ = job
    wide = params.model_copy(update={"draft_heads": 8, "draft_kv_heads": 4, "draft_intermediate_size": 160})
    made = config(tmp_path / "checkpoints", wide)["train"]["draft"]
    assert "num_layers" not in made
    layer = load_draft_transformer_layer_config(made["draft_config"], str(found.path))
    assert (layer.num_attention_heads, layer.num_key_value_heads, layer.head_dim) == (8, 4, 32)
    assert (layer.intermediate_size, layer.num_hidden_layers, layer.hidden_size) == (160, 1, 64)
    with pytest.raises(UserError, match="do not divide"):
        config(tmp_path / "checkpoints", params.model_copy(update={"draft_heads": 5}))


def test_the_split_needs_both_sides_in_order(tmp_path) -> None:
    rows = conversations(10, 2)
    ratio = train_config.write_dataset(rows, tmp_path / "d")
    assert int(len(rows) * ratio) == 8
    for bad in (rows[:8], rows[8:], rows[::-1]):
        with pytest.raises(UserError, match="split"):
            train_config.write_dataset(bad, tmp_path / "x")


@given(st.integers(1, 500), st.integers(1, 500))
def test_rounding_never_moves_a_row_across_the_split(training: int, held_out: int) -> None:
    count = training + held_out
    assert int(count * ((training + 0.5) / count)) == training


STEP = {"train": {"loss": 5.0, "full_acc_0": 0.1, "error_records": 0}, "profile": {"tokens_per_s": 10.0}, "lr": 0.1}


def curves(tmp_path, *rows: dict, tail: str = "") -> train_curves.Curves:
    file = tmp_path / "m.jsonl"
    file.write_text("".join(json.dumps(r) + "\n" for r in rows) + tail)
    return train_curves.read(file)


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
        train_curves.refuse_nothing_learnt(found, 1)
    else:
        with pytest.raises(UserError, match=says):
            train_curves.refuse_nothing_learnt(found, 1)
    for nothing in ({}, {"loss_epoch": float("nan")}):
        without = curves(make(tmp_path / f"{len(nothing)}"), step, {"val": nothing, "epoch": 0})
        with pytest.raises(UserError, match="a validation has no loss"):
            train_curves.refuse_nothing_learnt(without, 1)
    with pytest.raises(UserError, match="no training step"):
        train_curves.refuse_nothing_learnt(dataclasses.replace(found, steps=[]), 1)
    with pytest.raises(UserError, match="of 2 validations"):
        train_curves.refuse_nothing_learnt(found, 2)


@pytest.mark.parametrize(
    ("losses", "fell"),
    [
        ([9.0, 8.0], True),
        ([8.0, 9.0], False),
        ([16.1, 12.7, 10.5, 9.5], True),
        ([14.7, 297.0, 280.0, 90.0, 60.0, 31.0, 30.0, 29.0, 29.0, 29.0], False),  # exploded, and came back half-way
        ([5.0], True),
    ],
)
def test_the_end_of_the_loss_is_compared_with_its_very_beginning(losses, fell) -> None:
    found = train_curves.loss_fell(train_curves.Curves([{"loss": loss} for loss in losses], []))
    assert found[0] is fell


def test_what_training_gained_is_told_from_before_its_first_step() -> None:
    points = [
        {"passes": p, HELD_OUT: {"mean_acceptance_length": a}} for p, a in ((0, 1.3), (0.5, 2.0), (1, 1.2), (2, 1.25))
    ]
    assert train_curves.Curves([], [], points).gain == (1.3, 1.25)
