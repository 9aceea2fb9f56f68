"""Hidden-state extraction against a plain per-sample loop of transformers, in one run on one machine.

    .venv/bin/python benchmarks/bench_extraction.py [conversations]

Prints tokens a second of both, their ratio, and the bound from the machine's measured matrix-product rate.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from eaglebook import hidden_states, machine, verifier

ROUNDS = 3


def plain_loop(model, sequences, ids) -> float:
    """One conversation at a time through ``output_hidden_states=True``, written with safetensors. Tokens a second."""
    from safetensors.torch import save_file

    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        for row, sequence in enumerate(sequences):
            with torch.inference_mode():
                out = model(torch.tensor([sequence]), output_hidden_states=True).hidden_states
            states = torch.stack([out[k][0] for k in [*ids, len(out) - 1]], dim=1)
            save_file({"hidden_states": states.contiguous(), "token_ids": torch.tensor(sequence)}, f"{folder}/{row}")
        return sum(map(len, sequences)) / (time.perf_counter() - began)


def ours(model, sequences, ids) -> float:
    with tempfile.TemporaryDirectory() as folder:
        return hidden_states.extract(model, sequences, ids, Path(folder), token_budget=1024).tokens_per_s


def main(count: int) -> None:
    found = verifier.resolve(verifier.EMBEDDED)
    model = verifier.load_model(found)
    ids = verifier.default_aux_layer_ids(found.num_layers)
    draw = random.Random(0)
    sequences = [[draw.randrange(found.vocab_size) for _ in range(draw.randint(60, 260))] for _ in range(count)]
    rates: dict[str, list[float]] = {"plain loop": [], "ours": []}
    for _ in range(ROUNDS):  # alternating, so that a noisy moment hits both
        rates["plain loop"].append(plain_loop(model, sequences, ids))
        rates["ours"].append(ours(model, sequences, ids))
    median = {name: statistics.median(values) for name, values in rates.items()}
    bound = machine.gemm_flops() / (2 * (found.parameters - found.vocab_size * found.hidden_size))
    for name, value in median.items():
        print(f"{name:12} {value:8,.0f} tokens/s")
    print(f"{'ratio':12} {median['ours'] / median['plain loop']:8.2f}")
    print(f"{'GEMM bound':12} {bound:8,.0f} tokens/s, of which ours reaches {median['ours'] / bound:.0%}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 60)
