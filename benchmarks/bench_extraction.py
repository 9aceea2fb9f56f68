"""Hidden-state extraction, four ways in one run on one machine: ours by hooks, ours through a vLLM server, speculators' own
command against the same server, and a plain loop of transformers, one conversation at a time.

    .venv/bin/python benchmarks/bench_extraction.py [conversations]

Prints tokens a second (medians of alternating rounds), ratios, the memory of this process, and the bound from the machine's
measured matrix-product rate. Conversations have the lengths of the demo's.
"""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import torch
from eaglebook import hidden_states, machine, verifier
from eaglebook.engine import extraction, server
from eaglebook.engine.server import Server

ROUNDS, CONCURRENCY = 3, 8
Way = Callable[[Path], float]


def plain_loop(model, sequences, ids) -> Way:
    """One conversation at a time through ``output_hidden_states=True``, written with safetensors."""
    from safetensors.torch import save_file

    def run(folder: Path) -> float:
        began = time.perf_counter()
        for row, sequence in enumerate(sequences):
            with torch.inference_mode():
                out = model(torch.tensor([sequence]), output_hidden_states=True).hidden_states
            states = torch.stack([out[k][0] for k in [*ids, len(out) - 1]], dim=1)
            save_file({"hidden_states": states.contiguous(), "token_ids": torch.tensor(sequence)}, folder / f"{row}")
        return time.perf_counter() - began

    return run


def by_hooks(model, sequences, ids) -> Way:
    return lambda folder: hidden_states.extract(model, sequences, ids, folder, token_budget=1024).seconds


def by_vllm(vllm: Server, sequences, ids, hidden_size: int, scratch: Path) -> Way:
    return lambda folder: (
        extraction.extract([vllm], sequences, ids, hidden_size, folder, scratch, concurrency=CONCURRENCY).seconds
    )


def by_speculators(vllm: Server, sequences, scratch: Path) -> Way:
    """``speculators generate-offline-data`` as its documentation shows it, on a data set in its own format; its start is
    taken off, measured on an empty share of the work."""
    import datasets

    data = scratch.parent / "prepared"
    rows = [{"input_ids": s, "loss_mask": [1] * len(s), "seq_len": len(s)} for s in sequences]
    prepared = datasets.Dataset.from_list(rows)
    prepared.set_format("torch")
    prepared.save_to_disk(str(data))
    command = [str(Path(sys.prefix) / "bin" / "speculators"), "generate-offline-data", "--endpoint", f"{vllm.url}/v1",
               "--preprocessed-data", str(data), "--concurrency", str(CONCURRENCY)]  # fmt: skip

    def run(folder: Path) -> float:
        def seconds(*more: str) -> float:
            began = time.perf_counter()
            subprocess.run([*command, "--output", str(folder), *more], check=True, capture_output=True, timeout=600)
            return time.perf_counter() - began

        whole = seconds()
        return whole - seconds()  # a second call finds every file and does nothing else

    return run


def main(count: int) -> None:
    found = verifier.resolve(verifier.EMBEDDED)
    model = verifier.load_model(found)
    ids = verifier.default_aux_layer_ids(found.num_layers)
    draw = random.Random(0)
    sequences = [[draw.randrange(found.vocab_size) for _ in range(draw.randint(60, 260))] for _ in range(count)]
    tokens = sum(map(len, sequences))
    with tempfile.TemporaryDirectory() as base:
        scratch = Path(base) / "vllm"
        with server.serve(
            found.path, log=Path(base) / "log", max_model_len=300, max_num_seqs=CONCURRENCY, kv_cache_bytes=1 << 30,
            extra_args=extraction.server_args(ids, found.num_layers, scratch),
        ) as vllm:  # fmt: skip
            ways = {
                "plain loop": plain_loop(model, sequences, ids),
                "ours, hooks": by_hooks(model, sequences, ids),
                "ours, vLLM": by_vllm(vllm, sequences, ids, found.hidden_size, scratch),
                "speculators": by_speculators(vllm, sequences, scratch),
            }
            rates: dict[str, list[float]] = {name: [] for name in ways}
            for number in range(ROUNDS):  # alternating, so that a noisy moment hits all
                for name, way in ways.items():
                    time.sleep(1.5)  # vLLM's workers spin for a second after their last request
                    folder = Path(base) / f"{name} {number}"
                    folder.mkdir()
                    rates[name].append(tokens / way(folder))
    median = {name: statistics.median(values) for name, values in rates.items()}
    bound = machine.gemm_flops() / (2 * (found.parameters - found.vocab_size * found.hidden_size))
    for name, value in median.items():
        against = f"{value / median['plain loop']:5.2f} times the loop  {value / bound:4.0%} of the bound"
        print(f"{name:12} {value:8,.0f} tokens/s  {against}")
    print(f"{'GEMM bound':12} {bound:8,.0f} tokens/s at SmolLM2's MLP on 512 tokens")
    hooks, served = (median[name] / median["speculators"] for name in ("ours, hooks", "ours, vLLM"))
    print(f"ours against speculators: hooks {hooks:.2f}, vLLM {served:.2f}")
    print(
        f"{psutil.Process().memory_info().rss / 1e6:,.0f} MB in this process, {count} conversations, {tokens:,} tokens"
    )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100)
