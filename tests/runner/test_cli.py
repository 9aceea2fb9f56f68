"""The command: errors as messages with exit code 2, never a traceback."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


def eaglebook(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "eaglebook.cli", *args], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["run", "--preset", "nothing"], "no preset 'nothing'"),
        (["run", "--set", "04_train.epoch=3"], "unknown key 'epoch'"),
        (["run", "--set", "04_train.learning_rate=1e-4"], "1.0e-04"),
        (["run", "--stage", "9"], "no stage '9'"),
        (["run", "--preset", "smoke", "--stage", "02"], "--preset smoke --stage 01_responses"),
        (
            ["run", "--preset", "smoke", "--stage", "00", "--set", "00.verifier_name_or_path=no/such"],
            "'no/such' not found",
        ),
        (["run", "--nothing"], "No such option"),
    ],
)
def test_errors_are_messages(outputs, args, says) -> None:
    done = eaglebook(*args)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr + done.stdout


def test_debug_shows_the_traceback(outputs) -> None:
    assert "Traceback" in eaglebook("--debug", "run", "--preset", "nothing").stderr


def test_status_of_nothing_names_the_first_command(outputs) -> None:
    done = eaglebook("status")
    assert done.returncode == 0
    assert "eaglebook run --preset smoke" in done.stdout


@pytest.mark.usefixtures("outputs")
def test_a_plan_is_made_from_a_config_alone_and_refused_when_it_does_not_fit(tmp_path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "intermediate_size": 14336,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "max_position_embeddings": 8192,
    }))  # fmt: skip
    ask = ("plan", "llama-3.1-8b", "--set", f"common.verifier_name_or_path={config}", "--set", "00.free_disk_gb=20000")
    fits = json.loads(eaglebook(*ask, "--json").stdout)
    assert fits["problems"] == []
    assert fits["verifier"]["parameters"] == 8_030_261_248
    assert eaglebook(*ask).returncode == 0
    small = eaglebook(*ask, "--set", "00.gpu_memory_gb=16")
    assert small.returncode == 1
    assert "does not fit: the memory for 01_responses" in small.stdout
    assert eaglebook("plan", "no-such").returncode == 2


def test_a_disk_too_small_for_the_plan_is_refused_by_00(outputs) -> None:
    done = eaglebook("run", "--preset", "smoke", "--stage", "00", "--set", "00.reserve_disk_gb=1.0e+9")
    assert done.returncode == 2
    assert "the plan fits (the disk: " in done.stderr
    assert "fewer prompts" in done.stderr
    assert (outputs / "smoke" / "00_preflight.next" / "report.html").exists()
    assert "failed" in eaglebook("status").stdout
