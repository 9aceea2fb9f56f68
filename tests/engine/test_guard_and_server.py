"""Owned processes: nothing outlives its owner; a server that cannot start says why."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest
from eaglebook import guard
from eaglebook.engine import extraction, server
from eaglebook.errors import UserError
from eaglebook.presets import load

# A command that starts a grandchild in a session of its own and prints both pids.
FAMILY = (
    "import subprocess, sys, time; c = subprocess.Popen(['sleep', '300'], start_new_session=True); "
    "print(c.pid, flush=True); time.sleep({})"
)


def start(seconds: float) -> tuple[subprocess.Popen[str], int]:
    process = guard.start([sys.executable, "-c", FAMILY.format(seconds)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def gone(pid: int, seconds: float = 15) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.1)
    return False


def test_grandchildren_end_with_the_command() -> None:
    process, grandchild = start(0.2)
    assert process.wait(20) == 0
    assert gone(grandchild)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_whole_tree(signum) -> None:
    process, grandchild = start(300)
    process.send_signal(signum)
    assert process.wait(30) != 0
    assert gone(grandchild)


def test_the_owners_death_ends_the_whole_tree() -> None:
    owner = (
        "import subprocess,sys,time,os\nfrom eaglebook import guard\n"
        f"p=guard.start([sys.executable,'-c',{FAMILY.format(300)!r}])\n"
        "time.sleep(300)"
    )
    process = subprocess.Popen([sys.executable, "-c", owner], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    grandchild = int(process.stdout.readline())
    process.kill()
    process.wait()
    assert gone(grandchild)


def test_the_exit_code_is_the_commands() -> None:
    assert guard.start([sys.executable, "-c", "raise SystemExit(7)"]).wait(30) == 7


def test_stop_ends_what_ignores_a_signal() -> None:
    stubborn = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(300)"
    )
    process = guard.start([sys.executable, "-c", stubborn], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    guard.stop(process)
    assert process.poll() is not None


def test_a_taken_port_is_refused_before_anything_starts(tmp_path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with (
            pytest.raises(UserError, match=f"port {port}"),
            server.serve(tmp_path, log=tmp_path / "log", port=port, max_model_len=8, max_num_seqs=1, kv_cache_bytes=1),
        ):
            pass
    assert server.free_port(0) > 0


def test_a_server_that_dies_while_starting_shows_its_last_words(tmp_path, monkeypatch) -> None:
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\necho 'ValueError: head_dim 112 does not fit' >&2\nexit 3\n")
    fake.chmod(0o755)
    monkeypatch.setenv("VLLM_PYTHON", str(fake))
    with (
        pytest.raises(UserError, match="head_dim 112 does not fit"),
        server.serve(tmp_path, log=tmp_path / "log", max_model_len=8, max_num_seqs=1, kv_cache_bytes=1),
    ):
        pass


@pytest.mark.parametrize(
    ("cores", "users", "told"), [({0, 1}, None, "0"), ({0, 1}, "1", "1"), (set(range(8)), None, "unset")]
)
def test_a_small_machine_keeps_no_core_back_unless_told_to(tmp_path, monkeypatch, cores, users, told) -> None:
    fake = tmp_path / "python"
    fake.write_text('#!/bin/sh\necho "reserved: ${VLLM_CPU_NUM_OF_RESERVED_CPU-unset}."\nexit 3\n')
    fake.chmod(0o755)
    monkeypatch.setenv("VLLM_PYTHON", str(fake))
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: cores)
    monkeypatch.delenv("VLLM_CPU_NUM_OF_RESERVED_CPU", raising=False)
    if users:
        monkeypatch.setenv("VLLM_CPU_NUM_OF_RESERVED_CPU", users)
    with (
        pytest.raises(UserError, match=rf"reserved: {told}\."),
        server.serve(tmp_path, log=tmp_path / "log", max_model_len=8, max_num_seqs=1, kv_cache_bytes=1),
    ):
        pass


def test_a_server_that_never_answers_is_ended(tmp_path, monkeypatch) -> None:
    fake = tmp_path / "python"
    fake.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 300\n")
    fake.chmod(0o755)
    monkeypatch.setenv("VLLM_PYTHON", str(fake))
    with (
        pytest.raises(UserError, match="not up after 1 s"),
        server.serve(
            tmp_path, log=tmp_path / "log", startup_timeout_s=1, max_model_len=8, max_num_seqs=1, kv_cache_bytes=1
        ),
    ):
        pass
    assert gone(int((tmp_path / "pid").read_text()))


def test_the_command_line_says_what_was_asked_and_nothing_else(tmp_path) -> None:
    plain = server.command(tmp_path, port=1, max_model_len=8, max_num_seqs=1, kv_cache_bytes=1)
    assert not {"--tensor-parallel-size", "--speculative-config", "--trust-remote-code"} & set(plain)
    wide = server.command(
        tmp_path, port=1, max_model_len=8, max_num_seqs=1, kv_cache_bytes=1, tensor_parallel_size=8, draft=tmp_path,
        num_speculative_tokens=3, measured=True,
    )  # fmt: skip
    assert wide[wide.index("--tensor-parallel-size") + 1] == "8"
    assert json.loads(wide[wide.index("--speculative-config") + 1])["method"] == "eagle3"
    assert wide[wide.index("--per-request-spec-decode-metrics") + 1] == "detailed"


@pytest.mark.parametrize("preset", ["smollm2", "llama-3.1-8b", "qwen3-8b", "kimi-k2.5"])
@pytest.mark.timeout(180)
def test_vllms_own_parser_takes_every_command_of_a_preset(tmp_path, preset) -> None:
    """Also those that cannot run here: eight GPUs, several copies, executors over machines, a seeing verifier."""
    (tmp_path / "config.json").write_text(json.dumps({"vision_config": {}}))
    told = load(preset)
    ask, states, serve = (told[stem] for stem in ("01_responses", "02_hidden_states", "07_serve"))
    wide = ("--data-parallel-size", "2", "--distributed-executor-backend", "ray", "--enable-expert-parallel")
    common = dict(
        port=1,
        max_model_len=4096,
        trust_remote_code=ask.trust_remote_code,
        tensor_parallel_size=ask.tensor_parallel_size,
    )
    gb = 2**30
    commands = [
        server.command(tmp_path, **common, max_num_seqs=ask.concurrency, kv_cache_bytes=int(ask.kv_cache_gb * gb), extra_args=wide),
        server.command(
            tmp_path, **common, max_num_seqs=states.concurrency, kv_cache_bytes=int(states.kv_cache_gb * gb), dtype=states.dtype,
            extra_args=extraction.server_args(states.aux_hidden_state_layer_ids, 61, tmp_path / "scratch"),
        ),
        server.command(
            tmp_path, **common, max_num_seqs=serve.concurrency, kv_cache_bytes=int(serve.kv_cache_gb * gb), draft=tmp_path,
            num_speculative_tokens=serve.num_speculative_tokens, measured=True,
        ),
    ]  # fmt: skip
    code = (
        "import json, sys\n"
        "from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args\n"
        "from vllm.utils.argparse_utils import FlexibleArgumentParser\n"
        "for line in json.loads(sys.argv[1]):\n"
        "    told = make_arg_parser(FlexibleArgumentParser()).parse_args(line)\n"
        "    validate_parsed_serve_args(told)\n"
        "    print(told.tensor_parallel_size, told.data_parallel_size, told.language_model_only)\n"
    )
    lines = [argv[argv.index("--model") :] for argv in commands]
    done = subprocess.run([server.python(), "-c", code, json.dumps(lines)], capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr[-2000:]
    size = ask.tensor_parallel_size
    assert done.stdout.splitlines()[-3:] == [f"{size} 2 True", f"{size} 1 True", f"{size} 1 True"]


def test_a_logs_end_names_the_error_that_its_last_lines_hide(tmp_path) -> None:
    noise = [
        "[31mnanobind: leaked 514 functions!",
        ' - leaked type "x"',
        "resource_tracker: There appear to be 1 leaked objects",
    ]
    log = tmp_path / "log"
    log.write_text(
        "\n".join(["\x1b[31mERROR\x1b[0m RuntimeError: the cause", *[f"INFO line {n}" for n in range(40)], *noise])
    )
    lines = [line.strip() for line in server.tail(log).splitlines()]
    assert lines[0] == "RuntimeError: the cause"
    assert lines[-1] == "INFO line 39"
    assert not any("leaked" in line for line in lines)
    assert server.tail(tmp_path / "none") == ""
