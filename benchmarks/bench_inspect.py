"""``eaglebook inspect`` of a 4.7 GB draft beside a 594 GB verifier, against starting Python at all, in one run.

    .venv/bin/python benchmarks/bench_inspect.py

Both checkpoints are sparse files with true headers (Kimi-K2.5, 64 shards, 200,000 names), so the disk holds some 30 MB of
them. Prints median seconds and the peak memory of each command, against the limits of 0.5 s and 60 MB.
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests/checkpoint"))
import drafts

ROUNDS, LIMIT_S, LIMIT_MB = 7, 0.5, 60
HIDDEN, HEADS, INNER, VOCAB, DRAFT_VOCAB, LAYERS, EXPERTS, SHARDS = 7168, 64, 18432, 163840, 32000, 61, 384, 64
IDS = [2, 30, 58]
_LAUNCH = """
import os, sys, time
began = time.perf_counter()
child = os.posix_spawnp(sys.argv[2], sys.argv[2:], os.environ)
_, status, usage = os.wait4(child, 0)
ended = time.perf_counter()
if sys.argv[1]:
    os.fsync(os.open(sys.argv[1], os.O_RDONLY))
flushed = time.perf_counter()
print(f"\\n{ended - began} {flushed - began} {usage.ru_maxrss / 1024} {os.waitstatus_to_exitcode(status)}", end="")
"""
ROPE = {"rope_type": "yarn", "rope_theta": 50000.0, "factor": 64.0, "original_max_position_embeddings": 4096,
        "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}  # fmt: skip
LAYER = {"hidden_size": HIDDEN, "intermediate_size": INNER, "num_attention_heads": HEADS, "num_key_value_heads": HEADS,
         "head_dim": 128, "vocab_size": VOCAB, "max_position_embeddings": 262144, "rms_norm_eps": 1e-5, "rope_parameters": ROPE,
         "bos_token_id": 163584, "eos_token_id": 163585}  # fmt: skip
KIMI: dict[str, Any] = {
    "architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "vision_config": {"hidden_size": 1152, "num_hidden_layers": 27},
    "text_config": {
        **LAYER, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2", "num_hidden_layers": LAYERS,
        "head_dim": None, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "v_head_dim": 128, "moe_intermediate_size": 2048, "n_routed_experts": EXPERTS, "n_shared_experts": 1,
        "first_k_dense_replace": 1, "rope_theta": 50000.0, "rope_parameters": None, "rope_scaling": {**ROPE, "type": "yarn"},
        "quantization_config": {
            "quant_method": "compressed-tensors", "format": "pack-quantized",
            "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 32, "type": "int"}}},
        },
    },
}  # fmt: skip


def configs(hidden: int = HIDDEN) -> dict[str, dict[str, Any]]:
    """The same draft as speculators writes it and as vLLM reads it."""
    told = {"name_or_path": "moonshotai/Kimi-K2.5", "architectures": KIMI["architectures"]}
    methods = [{"proposal_type": "greedy", "speculative_tokens": 3, "accept_tolerance": 0.0, "verifier_accept_k": 1}]
    spec = {"algorithm": "eagle3", "default_proposal_method": "greedy", "proposal_methods": methods, "verifier": told}
    layer, ids = {**LAYER, "hidden_size": hidden}, {"eagle_aux_hidden_state_layer_ids": IDS}
    eagle = {"use_aux_hidden_state": True, "verifier_name_or_path": told["name_or_path"], **ids}
    scaling = {key: value for key, value in ROPE.items() if key != "rope_theta"}
    flat = {"target_hidden_size": hidden, "rope_theta": 50000.0, "rope_scaling": scaling, "eagle_config": eagle}
    return {
        "nested": drafts.nested(layer, draft_vocab_size=DRAFT_VOCAB, speculators_config=spec, **ids),
        "flat": drafts.flat(**layer, draft_vocab_size=DRAFT_VOCAB, **flat, **ids),
    }


def sparse(file: Path, tensors: drafts.Shapes, values: dict[str, bytes] | None = None) -> int:
    """A safetensors file whose data is a hole but for ``values``. Its size."""
    header, at = {}, 0
    for name, (shape, dtype) in tensors.items():
        size = math.prod(shape) * drafts.ITEM[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        start = out.tell()
        out.truncate(start + at)
        for name, value in (values or {}).items():
            out.seek(start + header[name]["data_offsets"][0])
            out.write(value)
    return start + at


def draft(folder: Path, layout: str, hidden: int = HIDDEN) -> int:
    """A draft of Kimi-K2.5 with a valid vocabulary mapping and all weights zero. Bytes of the weights."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(configs(hidden)[layout]))
    widths = {"heads": HEADS, "kv": HEADS, "head_dim": 128, "inner": INNER, "hidden": hidden}
    tensors = drafts.shapes(**widths, draft_vocab=DRAFT_VOCAB, vocab=VOCAB)
    d2t, t2d = drafts.mapping(DRAFT_VOCAB, VOCAB)
    return sparse(folder / "model.safetensors", tensors, {"d2t": d2t, "t2d": t2d})


def kimi_names() -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Tensors of Kimi-K2.5's language model: latent attention in bf16, experts packed to 4 bits with a scale per 32."""
    top = "language_model."
    yield f"{top}model.embed_tokens.weight", (VOCAB, HIDDEN), "BF16"
    for i in range(LAYERS):
        at = f"{top}model.layers.{i}."
        for name, shape in (
            ("self_attn.q_a_proj", (1536, HIDDEN)), ("self_attn.q_a_layernorm", (1536,)), ("self_attn.q_b_proj", (12288, 1536)),
            ("self_attn.kv_a_proj_with_mqa", (576, HIDDEN)), ("self_attn.kv_a_layernorm", (512,)),
            ("self_attn.kv_b_proj", (16384, 512)), ("self_attn.o_proj", (HIDDEN, 8192)),
            ("input_layernorm", (HIDDEN,)), ("post_attention_layernorm", (HIDDEN,)),
        ):  # fmt: skip
            yield f"{at}{name}.weight", shape, "BF16"
        plain = [("mlp.", INNER)] if i == 0 else [("mlp.shared_experts.", 2048)]
        for name, inner in plain:
            for part, shape in (("gate", (inner, HIDDEN)), ("up", (inner, HIDDEN)), ("down", (HIDDEN, inner))):
                yield f"{at}{name}{part}_proj.weight", shape, "BF16"
        if i == 0:
            continue
        yield f"{at}mlp.gate.weight", (EXPERTS, HIDDEN), "BF16"
        yield f"{at}mlp.gate.e_score_correction_bias", (EXPERTS,), "F32"
        for expert in range(EXPERTS):
            for part, rows, columns in (("down", HIDDEN, 2048), ("gate", 2048, HIDDEN), ("up", 2048, HIDDEN)):
                name = f"{at}mlp.experts.{expert}.{part}_proj."
                yield f"{name}weight_packed", (rows, columns // 8), "I32"
                yield f"{name}weight_scale", (rows, columns // 32), "BF16"
                yield f"{name}weight_shape", (2,), "I32"
    yield f"{top}model.norm.weight", (HIDDEN,), "BF16"
    yield f"{top}lm_head.weight", (VOCAB, HIDDEN), "BF16"


def verifier(folder: Path) -> tuple[int, int]:
    """Shards, index and config. Bytes and tensors of the whole."""
    folder.mkdir()
    names = list(kimi_names())
    each = math.ceil(len(names) / SHARDS)
    index, total = {}, 0
    for shard in range(SHARDS):
        file = f"model-{shard + 1:05}-of-{SHARDS:06}.safetensors"
        part = {name: (shape, dtype) for name, shape, dtype in names[shard * each : (shard + 1) * each]}
        total += sparse(folder / file, part)
        index |= dict.fromkeys(part, file)
    whole = {"metadata": {"total_size": total}, "weight_map": dict(sorted(index.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(whole, indent=2))
    (folder / "config.json").write_text(json.dumps(KIMI))
    return total, len(names)


@dataclass(frozen=True)
class Run:
    """Wall seconds until the process ended, and until ``written`` was on the disk; peak MB of the process alone."""

    seconds: float
    to_disk: float
    peak: float
    output: str


def measured(command: list[str], written: Path | None = None) -> Run:
    """Run a command. Ends the benchmark when it fails."""
    # A child's peak is counted from its parent's at the fork, hence a small parent between.
    launcher = [sys.executable, "-ISc", _LAUNCH, str(written or "")]
    done = subprocess.run([*launcher, *command], stdout=subprocess.PIPE, text=True, check=False)
    output, _, numbers = done.stdout.rpartition("\n")
    seconds, to_disk, peak, code = numbers.split() if numbers else ("0", "0", "0", "unknown")
    if code != "0":
        raise SystemExit(f"{output}\nexit code {code}: {' '.join(command)}")
    return Run(float(seconds), float(to_disk), float(peak), output)


def main() -> int:
    eaglebook = str(Path(sys.executable).with_name("eaglebook"))
    with tempfile.TemporaryDirectory(prefix="eaglebook-bench-") as name:
        work = Path(name)
        total, count = verifier(work / "Kimi-K2.5")
        commands = {"python -c pass": [sys.executable, "-c", "pass"]}
        for layout in ("nested", "flat"):
            size = draft(work / layout, layout)
            verified = ["--verifier", str(work / "Kimi-K2.5"), "--json"]
            commands[f"inspect, {layout}"] = [eaglebook, "inspect", str(work / layout), *verified]
        index_mb = (work / "Kimi-K2.5/model.safetensors.index.json").stat().st_size / 1e6
        print(f"draft {size / 1e9:.2f} GB; verifier {total / 1e9:,.0f} GB, {count:,} tensors, index {index_mb:.0f} MB")
        found: dict[str, list[Run]] = {name: [] for name in commands}
        for _ in range(ROUNDS):  # alternating, so that a noisy moment hits all
            for name, command in commands.items():
                found[name].append(measured(command))
    peer, passed = statistics.median(run.seconds for run in found["python -c pass"]), True
    for name, runs in found.items():
        took, peak = statistics.median(run.seconds for run in runs), max(run.peak for run in runs)
        print(f"{name:16} {took:6.3f} s  {took / peer:5.1f} × python  {peak:5.1f} MB at most")
        if not name.startswith("inspect"):
            continue
        said = json.loads(runs[0].output)["findings"]
        assert not [f for f in said if f["severity"] == "error"], said
        for finding in said:
            if finding["severity"] == "warning":
                print(f"  warning {finding['code']}: {finding['message']}")
        passed = passed and took <= LIMIT_S and peak <= LIMIT_MB
    print(f"limits {LIMIT_S} s, {LIMIT_MB} MB: {'kept' if passed else 'NOT kept'}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
