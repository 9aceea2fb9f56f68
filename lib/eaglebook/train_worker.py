"""The training process: ``python -m eaglebook.train_worker train.yaml [--warm-start VERIFIER] [--threads N]``.

Runs speculators' own ``train.cli.main`` on a config file, the same on a CPU (with `cpu_shim`) and under torchrun.
Beside it: every metric as one JSON line in ``metrics.jsonl``, a warm start if asked, and an exit code that says whether
anything was trained.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from pathlib import Path
from typing import Any


class JsonLines(logging.Handler):
    """Appends the dicts that speculators sends to its metric logger (``train/trainer.py:587, 671``) to a file."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self._stream = file.open("a", buffering=1)

    def emit(self, record: logging.LogRecord) -> None:
        if isinstance(record.msg, dict):
            self._stream.write(json.dumps({"time": record.created, **record.msg}) + "\n")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("config", type=Path)
    parser.add_argument("--metrics", type=Path, required=True)
    parser.add_argument("--warm-start", metavar="VERIFIER", default="")
    parser.add_argument("--train-lm-head", action="store_true")
    parser.add_argument("--threads", type=int, default=0)
    args = parser.parse_args(argv)

    import torch
    from speculators.train import cli
    from speculators.train.config import TrainConfig

    from eaglebook import cpu_shim

    if args.threads:
        torch.set_num_threads(args.threads)
    cpu_shim.install()
    set_up = cli.setup_metric_logger

    def set_up_and_listen(*options: Any, **named: Any) -> None:
        set_up(*options, **named)  # replaces the logger's handlers, so ours comes after
        logger = logging.getLogger("speculators.metrics")
        logger.setLevel(logging.INFO)
        logger.propagate = False  # else forty console lines a step
        logger.addHandler(JsonLines(args.metrics))

    cli.setup_metric_logger = set_up_and_listen
    config = TrainConfig.from_sources(cli={}, config_path=str(args.config), argv=sys.argv)
    build = cli.build_draft_model

    def build_as_asked(options: Any, *rest: Any) -> Any:
        wanted = config.flatten()["draft_vocab_size"]
        model = build(options, *rest)
        if wanted and model.draft_vocab_size != wanted:  # cli.py:422: a missing mapping means the full vocabulary
            raise SystemExit(f"draft vocabulary of {wanted} asked for, {model.draft_vocab_size} built")
        if args.warm_start:
            from eaglebook import verifier, warm_start

            warm_start.from_verifier(model, verifier.resolve(args.warm_start))
        model.lm_head.weight.requires_grad_(args.train_lm_head)
        return model

    cli.build_draft_model = build_as_asked  # type: ignore[assignment]
    cli.main(config)
    if (Path(config.flatten()["save_path"]) / "interrupted").exists():
        return 130  # the Trainer catches SIGINT and SIGTERM, saves, and returns as if it had finished
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
