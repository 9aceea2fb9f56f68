"""Training on a CPU, two ways in one run on one machine: speculators' own path and ours, alternately, the same in all else.

    .venv/bin/python benchmarks/bench_training.py [RUN] [conversations] [adamw or muon]

RUN is a run's directory with 01–03 done (default: outputs/smoke). Same conversations, seed, packs, steps and precision.
Prints tokens a second, what a whole epoch took, the last losses, and the machine's bound for the matrix products alone.
"""

from __future__ import annotations

import contextlib
import io
import json
import statistics
import sys
import tempfile
from pathlib import Path

from eaglebook import machine, paths, responses, train, train_config, verifier, vocab
from eaglebook.params import Train

ROUNDS = 3


def flops_per_token(found: verifier.Verifier, draft_vocab: int, num_aux: int, steps: int) -> int:
    """Of one token's training: forward twice a parameter, backward twice for the input and twice for the weight.

    A frozen head has no gradient of its weight, the verifier's head none at all.
    """
    hidden, query = found.hidden_size, found.num_heads * found.head_dim
    layer = 2 * hidden * (query + 2 * found.num_kv_heads * found.head_dim) + query * hidden
    layer += 3 * hidden * found.config["intermediate_size"]
    head = hidden * draft_vocab
    return steps * (6 * layer + 4 * head) + 4 * num_aux * hidden**2 + 2 * head


def main(run: Path, count: int, optimizer: str) -> None:
    found = verifier.resolve(verifier.EMBEDDED)
    states, mapping = run / "02_hidden_states/artifacts/hidden_states", run / "03_vocab_mapping/artifacts"
    if not mapping.is_dir():
        sys.exit(f"{paths.show(run)} has no 01–03. Next: make demo PRESET=smoke")
    ids = json.loads((states.parent / "index.json").read_text())["aux_hidden_state_layer_ids"]
    every = responses.read(run / "01_responses/artifacts/conversations.jsonl")
    chosen = [c for c in every if c.split == responses.TRAIN][:count]
    chosen += [responses.Conversation(**{**vars(c), "split": responses.HELD_OUT}) for c in chosen[:2]]
    size = len(vocab.load(mapping)[0])
    speeds: dict[str, list[float]] = {"speculators": [], "ours": []}
    losses: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as base:
        for number in range(ROUNDS):
            for name in speeds:  # alternating, so that a noisy moment hits both
                folder = Path(base) / f"{name} {number}"
                folder.mkdir()
                (folder / "hs").mkdir()
                for row in range(len(chosen)):
                    (folder / f"hs/hs_{row}.safetensors").symlink_to(states / f"hs_{row % count}.safetensors")
                params = Train.model_validate(
                    {"epochs": 1, "stock_trainer": name == "speculators", "optimizer": optimizer}
                )
                config = train_config.build(
                    params, found, dataset=folder / "data", hidden_states=folder / "hs", mapping=mapping,
                    draft_vocab_size=size, aux_hidden_state_layer_ids=ids, save_path=folder / "checkpoints",
                    train_data_ratio=train_config.write_dataset(chosen, folder / "data"),
                )  # fmt: skip
                with contextlib.redirect_stdout(io.StringIO()):
                    curves = train.run(config, folder, params)
                speeds[name].append(curves.tokens_per_s)
                last = [step["loss"] for step in curves.steps[-20:]]
                losses[name] = sum(last) / len(last)
    bound = machine.gemm_flops() / flops_per_token(found, size, len(ids), params.ttt_steps)
    for name, values in speeds.items():
        rate = statistics.median(values)
        print(
            f"{name:12} {rate:7,.0f} tokens/s  {rate / bound:4.0%} of the bound  loss of the last steps {losses[name]:.3f}"
        )
    print(f"{'GEMM bound':12} {bound:7,.0f} tokens/s")
    print(
        f"ours against speculators: {statistics.median(speeds['ours']) / statistics.median(speeds['speculators']):.2f}"
    )


if __name__ == "__main__":
    main(
        Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else paths.outputs() / "smoke",
        int(sys.argv[2]) if len(sys.argv) > 2 else 80,
        sys.argv[3] if len(sys.argv) > 3 else "adamw",
    )
