"""What lifts acceptance most within the demo's budget: variants of notebook 04 on one run's data, one row a variant.

    .venv/bin/python benchmarks/experiments.py outputs/smollm2 RESULTS.jsonl [NAME …]

Needs 01–03 of that run, 02 with every stream that a variant reads (``--set "02_hidden_states.aux_hidden_state_layer_ids=[2,
8,11,15,19,22,27,28,29]"``). Every variant trains with `train.run`, as 04 does, and its last checkpoint is judged by what it
would be served with: mean acceptance length, greedy, K = 3 whatever it was trained for, on held-out conversations and on the
benchmark's.
Variants already in RESULTS are skipped; ``docs/experiments.md`` holds what such files said.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from eaglebook import acceptance, responses, states_files, train, train_config, train_inputs, verifier, vocab
from eaglebook.params import Train

BASE: dict[str, Any] = dict(
    optimizer="muon", learning_rate=3.0e-3, epochs=1, pack_tokens=512, evaluated_conversations=2, _ids=[15, 22, 29]
)
K = 3  # draft tokens a step when judged
# name: parameters of 04, and with a leading underscore what is no parameter (see `measure`).
VARIANTS: dict[str, dict[str, Any]] = {
    "base": {},
    "adamw, 3e-3": dict(optimizer="adamw"),
    "muon, 1e-3": dict(learning_rate=1.0e-3),
    "muon, 1e-2": dict(learning_rate=1.0e-2),
    "muon, 3 Newton-Schulz steps": dict(_optimizer=dict(muon_ns_steps=3)),
    "packs of 256": dict(pack_tokens=256),
    "packs of 1024": dict(pack_tokens=1024),
    "start: noise": dict(warm_start="noise"),
    "start: copy of the last layer": dict(warm_start="copy"),
    "start: copy, ids 2, 15, 27": dict(warm_start="copy", _ids=[2, 15, 27]),
    "9 key-value heads": dict(draft_kv_heads=9),
    "18 heads, 18 key-value heads": dict(draft_heads=18, draft_kv_heads=18),
    "9 key-value heads, MLP of 3072": dict(draft_kv_heads=9, draft_intermediate_size=3072),
    "ids 2, 15, 29": dict(_ids=[2, 15, 29]),
    "ids 2, 15, 27": dict(_ids=[2, 15, 27]),
    "ids 8, 19, 28": dict(_ids=[8, 19, 28]),
    "ids 11, 22, 27, 29": dict(_ids=[11, 22, 27, 29]),
    "head trained": dict(train_lm_head=True),
    "step decay 0.8": dict(ttt_step_loss_decay=0.8),
    "1 step": dict(ttt_steps=1),
    "2 steps": dict(ttt_steps=2),
    "5 steps": dict(ttt_steps=5),
    "loss ce": dict(loss="ce"),
    "loss lk_hybrid": dict(loss="lk_hybrid"),
    "loss tv": dict(loss="tv"),
    "loss rkl": dict(loss="rkl"),
    "the prompts taught too": dict(_whole=True),
    "MLP of 768": dict(draft_intermediate_size=768),
    "norm_before_residual": dict(norm_before_residual=True),
    "norm_output": dict(norm_output=True),
    "fc_norm": dict(fc_norm=True),
    "norm_before_fc": dict(norm_before_fc=True),
    "draft vocabulary 2,048": dict(_size=2048),
    "draft vocabulary 8,192": dict(_size=8192),
    "draft vocabulary 16,384": dict(_size=16384),
    "2 epochs": dict(epochs=2),
    "4 epochs": dict(epochs=4),
    "half of the prompts, 2 epochs": dict(_share=0.5, epochs=2),
    "a quarter of the prompts, 4 epochs": dict(_share=0.25, epochs=4),
}


def main(run: Path, results: Path, names: list[str]) -> None:
    results.parent.mkdir(parents=True, exist_ok=True)
    done = {json.loads(line)["name"] for line in results.read_text().splitlines()} if results.exists() else set()
    for name in names or VARIANTS:
        if name not in done:
            row = {"name": name, **measure(run, results.parent, {**BASE, **VARIANTS[name]})}
            with results.open("a") as stream:
                stream.write(json.dumps(row) + "\n")
            print(row, flush=True)
    print(table([json.loads(line) for line in results.read_text().splitlines()]))


def measure(run: Path, cache: Path, wanted: dict[str, Any]) -> dict[str, Any]:
    """Train one variant and judge its last checkpoint."""
    own = {key: wanted.pop(key) for key in list(wanted) if key.startswith("_")}
    params = Train(**wanted)
    model = verifier.resolve(params.verifier_name_or_path)
    file = run / "01_responses/artifacts/conversations.jsonl"
    states, mapping = run / "02_hidden_states/artifacts", run / "03_vocab_mapping/artifacts"
    states, ids = with_ids(states, own["_ids"], cache), own["_ids"]
    conversations = responses.read(file)
    with tempfile.TemporaryDirectory() as base:
        folder = Path(base)
        if "_size" in own:
            mapping = folder
            counts = vocab.count([c for c in conversations if c.split == responses.TRAIN])
            vocab.save(folder, *vocab.build(counts, own["_size"], model.vocab_size))
        if "_share" in own:
            keep = [
                c.split != responses.TRAIN or n % round(1 / own["_share"]) == 0 for n, c in enumerate(conversations)
            ]
            conversations, file, states = subset(conversations, keep, states, folder)
        d2t, _ = vocab.load(mapping)
        taught = (
            [replace(c, loss_mask=[1] * len(c.input_ids)) for c in conversations] if "_whole" in own else conversations
        )
        ratio = train_config.write_dataset(taught, folder / "dataset")
        config = train_config.build(
            params, model, dataset=folder / "dataset", hidden_states=states / "hidden_states", mapping=mapping,
            draft_vocab_size=len(d2t), aux_hidden_state_layer_ids=ids, train_data_ratio=ratio,
            save_path=folder / "checkpoints",
        )  # fmt: skip
        config["train"]["optimizer"] |= own.get("_optimizer", {})
        began = time.monotonic()
        curves = train.run(config, folder, params, file)
        seconds = time.monotonic() - began
        draft = acceptance.load_draft(folder / f"checkpoints/{params.epochs - 1}", model.path)
        last = {
            split: acceptance.evaluate(
                draft, train_inputs.samples(conversations, states / "hidden_states", split)(), K
            )["as_served"].summary()
            for split in (responses.HELD_OUT, responses.BENCHMARK)
            if any(c.split == split for c in conversations)
        }
        return {
            "seconds": seconds,
            "steps": len(curves.steps),
            "tokens_per_s": curves.tokens_per_s,
            "loss": curves.epochs[-1]["loss"],
            **{split: a["mean_acceptance_length"] for split, a in last.items()},
            "rates": {split: a["position_rates"] for split, a in last.items()},
        }


def with_ids(states: Path, ids: list[int], cache: Path) -> Path:
    """The states of these ids alone, and of the last slot, in a folder that is kept for the next variant."""
    target = cache / ("states_" + "_".join(map(str, ids)))
    index = json.loads((states / "index.json").read_text())
    there = index["aux_hidden_state_layer_ids"]
    if there == ids:
        return states
    if not (target / "index.json").is_file():
        (target / "hidden_states").mkdir(parents=True, exist_ok=True)
        slots = [*(there.index(i) for i in ids), -1]
        for row in range(len(index["rows"])):
            full, tokens = states_files.read(states / "hidden_states" / states_files.file_name(row))
            states_files.write(target / "hidden_states" / states_files.file_name(row), full[:, slots], tokens.tolist())
        (target / "index.json").write_text(json.dumps(index | {"aux_hidden_state_layer_ids": ids}))
    return target


def subset(conversations: list, keep: list[bool], states: Path, folder: Path) -> tuple[list, Path, Path]:
    """Some of the conversations, with their hidden states under the numbers they have now."""
    (folder / "hidden_states").mkdir()
    chosen = [(n, c) for n, c in enumerate(conversations) if keep[n]]
    for new, (old, _) in enumerate(chosen):
        (folder / f"hidden_states/hs_{new}.safetensors").symlink_to(states / f"hidden_states/hs_{old}.safetensors")
    shutil.copy(states / "index.json", folder)
    file = folder / "conversations.jsonl"
    file.write_text("".join(json.dumps(vars(c)) + "\n" for _, c in chosen))
    return [c for _, c in chosen], file, folder


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| variant | held-out | benchmark | positions, benchmark | loss | steps | tokens/s | minutes |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        rates = " / ".join(f"{x:.3f}" for x in r["rates"].get("benchmark", r["rates"]["held_out"]))
        lines.append(
            f"| {r['name']} | {r['held_out']:.3f} | {r.get('benchmark', float('nan')):.3f} | {rates} | {r['loss']:.2f} "
            f"| {r['steps']:,} | {r['tokens_per_s']:,.0f} | {r['seconds'] / 60:.1f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]), sys.argv[3:])
