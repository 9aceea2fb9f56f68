"""The templates for batch systems: what they would start is a command that the real parsers take."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import yaml
from eaglebook import cli_runs, params, paths, presets

BATCH = paths.ROOT / "docs" / "batch"


def words(script: str, *args: str, **environment: str) -> list[str]:
    """What a script executes in the end, an ``echo`` standing for the program."""
    bin_ = {"EAGLEBOOK": "/bin/echo", "PYTHON": "/bin/echo"}
    done = subprocess.run(
        [BATCH / script, *args], capture_output=True, text=True, timeout=30, env=os.environ | bin_ | environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def taken(argv: list[str]) -> tuple[list[str], dict[str, params.Notebook]]:
    """The stages and parameters of an ``eaglebook run`` command; an unknown option, stage or key raises."""
    assert argv[0] == "run"
    told = dict.fromkeys(("--preset", "--stage", "--set"))
    values: dict[str, list[str]] = {name: [] for name in told}
    for name, value in zip(argv[1::2], argv[2::2], strict=True):
        values[name].append(value)
    return cli_runs._stems(values["--stage"], ""), presets.load(values["--preset"][0], values["--set"])


def test_a_job_runs_the_stages_it_is_given() -> None:
    stages, _ = taken(words("slurm.sh", "kimi-k2.5", "02", "03", "04"))
    assert stages == ["02_hidden_states", "03_vocab_mapping", "04_train"]
    assert subprocess.run([BATCH / "slurm.sh"], capture_output=True, timeout=30).returncode != 0


@pytest.mark.parametrize("rank", ["0", "3"])
def test_an_array_is_the_ranks_of_02(rank: str) -> None:
    stages, told = taken(words("slurm_shares.sh", "kimi-k2.5", "4", SLURM_ARRAY_TASK_ID=rank))
    assert stages == ["02_hidden_states"]
    shares = told["02_hidden_states"].model_dump()
    assert (shares["world_size"], shares["rank"]) == (4, int(rank))


def test_training_on_several_machines_is_one_torchrun(tmp_path: Path) -> None:
    from torch.distributed.run import parse_args

    job = tmp_path / "kimi-k2.5" / "04_train.next" / "artifacts" / "job.json"
    job.parent.mkdir(parents=True)
    job.write_text("{}")
    slurm = {"EAGLEBOOK_FIRST": "first", "SLURM_NNODES": "2", "EAGLEBOOK_OUTPUTS": str(tmp_path)}
    stages, told = taken(words("slurm_train.sh", "kimi-k2.5", SLURM_PROCID="0", **slurm))
    train = told["04_train"].model_dump()
    assert (stages, train["nodes"], train["rendezvous"], train["processes"]) == (["04_train"], 2, "first:29500", 8)
    second = parse_args(words("slurm_train.sh", "kimi-k2.5", SLURM_PROCID="1", **slurm)[2:])
    assert (second.nnodes, second.node_rank, second.rdzv_endpoint) == ("2", 1, "first:29500")
    assert (second.training_script, second.training_script_args) == ("eaglebook.train_worker", [str(job)])


def test_the_workers_command_is_the_one_the_notebook_prints(tmp_path: Path, monkeypatch) -> None:
    from eaglebook import train

    monkeypatch.setattr(train.machine, "accelerators", lambda: 8)
    (tmp_path / "kimi-k2.5" / "04_train.next" / "artifacts").mkdir(parents=True)
    job = tmp_path / "kimi-k2.5" / "04_train.next" / "artifacts" / "job.json"
    job.write_text("{}")
    slurm = {"EAGLEBOOK_FIRST": "first", "SLURM_NNODES": "2", "EAGLEBOOK_OUTPUTS": str(tmp_path), "SLURM_PROCID": "1"}
    printed = train.command(params.Train(processes=8, nodes=2, rendezvous="first:29500"), job, 1)
    assert words("slurm_train.sh", "kimi-k2.5", **slurm) == printed[1:]


def test_every_kubernetes_job_runs_stages_and_together_they_are_the_run() -> None:
    jobs = [d for d in yaml.safe_load_all((BATCH / "kubernetes.yaml").read_text()) if d["kind"] == "Job"]
    seen: list[str] = []
    for job in jobs:
        container = job["spec"]["template"]["spec"]["containers"][0]
        command = container["command"]
        if command[0] == "/bin/sh":
            command = command[2].removeprefix("exec ").replace("$((JOB_COMPLETION_INDEX + 1))", "3").split()
        stages, told = taken(command[1:])
        seen += [s for s in stages if s not in seen]
        assert (
            container["resources"]["limits"]["nvidia.com/gpu"] >= told["07_serve"].model_dump()["tensor_parallel_size"]
        )
    assert seen == list(params.STAGES)[:8]
