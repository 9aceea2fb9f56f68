"""Two servers and two machines' shares, one of each killed midway: nothing is lost, nothing is there twice."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from eaglebook import manifests, responses, states_files, verifier
from eaglebook.engine import server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
PROMPTS, SMALL = 24, [
    "common.max_prompts=24", "common.max_new_tokens=64", "common.benchmarks=[package:mtbench]", "01.max_benchmark_prompts=2",
    "01.held_out_fraction=0.2", "02.compare_engines=0", "02.token_budget=256",
]  # fmt: skip


def command(run: Path, *args: str) -> list[str]:
    settings = [word for text in SMALL for word in ("--set", text)]
    return [sys.executable, "-m", "eaglebook.cli", "run", "--preset", "smoke", "--run-dir", str(run), *settings, *args]


def ran(argv: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, capture_output=True, text=True, timeout=600)


def wait_for(happens: Callable[[], object], process: subprocess.Popen[str], timeout_s: float = 300) -> None:
    began = time.monotonic()
    while not happens():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() - began < timeout_s
        time.sleep(0.005)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run whose 01 was answered by two servers, one of which was killed over it."""
    folder = tmp_path_factory.mktemp("scale") / "out"
    model = verifier.resolve(verifier.EMBEDDED).path
    with contextlib.ExitStack() as up:
        both = [
            up.enter_context(server.serve(
                model, log=folder.parent / f"server{n}.log", max_model_len=1024, max_num_seqs=8, kv_cache_bytes=1 << 29
            ))
            for n in range(2)
        ]  # fmt: skip
        endpoints = f"01.endpoints=[{', '.join(s.url for s in both)}]"
        process = subprocess.Popen(
            command(folder, "--stage", "01", "--set", endpoints, "--set", "01.concurrency=4"),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        answers = folder / "01_responses.next" / "answers.jsonl"
        wait_for(lambda: answers.exists() and len(answers.read_bytes().splitlines()) >= 5, process)
        victim = psutil.Process(both[0].pid)
        for one in [*victim.children(recursive=True), victim]:
            one.kill()
        out, err = process.communicate(timeout=600)
        assert process.returncode == 0, out + err
        with contextlib.suppress(ProcessLookupError):
            os.kill(both[1].pid, 0)
    return folder


def test_a_server_that_dies_loses_no_answer(run: Path) -> None:
    conversations = responses.read(run / "01_responses" / "artifacts" / "conversations.jsonl")
    ids = [c.id for c in conversations]
    assert len(ids) == len(set(ids))
    assert len([c for c in conversations if c.split != responses.BENCHMARK]) == PROMPTS
    assert "died" not in manifests.read(run / "01_responses").error


def test_two_shares_are_one_set_of_states_and_a_killed_one_goes_on(run: Path) -> None:
    conversations = responses.read(run / "01_responses" / "artifacts" / "conversations.jsonl")
    sequences = [c.input_ids for c in conversations]
    share = range(1, len(sequences), 2)
    second = command(run, "--stage", "02", "--set", "02.world_size=2", "--set", "02.rank=1")
    process = subprocess.Popen(
        second, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    begun = run.with_name("out-rank1") / "02_hidden_states.next" / "artifacts" / "hidden_states"
    wait_for(lambda: list(begun.glob("hs_*.safetensors")), process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    time.sleep(1)
    kept = {f: f.stat().st_mtime_ns for f in begun.glob("hs_*.safetensors")}
    assert 0 < len(kept) < len(share), "killed midway"

    first = command(run, "--stage", "02", "--set", "02.world_size=2")
    alone = ran(first)
    assert alone.returncode == 2
    assert "rank 1: 12 files missing" in alone.stdout + alone.stderr or "rank 1: 13 files missing" in alone.stderr
    assert "--set 02.rank=1" in alone.stderr

    again = ran(second)
    assert again.returncode == 0, again.stderr
    assert "goes on from the artifacts" in again.stdout
    done = run.with_name("out-rank1") / "02_hidden_states" / "artifacts" / "hidden_states"
    assert sorted(f.name for f in done.iterdir()) == sorted(map(states_files.file_name, share))
    whole = [f.name for f in kept if (done / f.name).stat().st_mtime_ns == kept[f]]
    assert len(whole) >= len(kept) - 2, "what was whole was not computed again"

    together = ran(first)
    assert together.returncode == 0, together.stdout + together.stderr
    folder = run / "02_hidden_states" / "artifacts" / "hidden_states"
    assert sorted(f.name for f in folder.iterdir()) == sorted(map(states_files.file_name, range(len(sequences))))
    assert states_files.validate(folder, sequences) == {}
    metrics = json.loads((run / "02_hidden_states" / "metrics.json").read_text())
    assert (metrics["files"], metrics["tokens"]) == (len(sequences), sum(map(len, sequences)))
    assert ran(command(run, "--stage", "03", "--set", "02.rank=1")).returncode == 2  # a share is of 02 alone
    assert ran(command(run, "--stage", "03")).returncode == 0
