"""The training process: ``python -m eaglebook.train_worker job.json``, the same on a CPU and under torchrun.

Runs speculators' own ``train.cli.main`` on its config file. Beside it, through its seams: every metric as one JSON line,
a start from the verifier if asked, on a CPU what it needs to run (`cpu_shim`) and to run fast (`cpu_training`), acceptance
after every epoch, and checkpoints pruned to the best by acceptance and the last.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

from pydantic import BaseModel


class Job(BaseModel):
    """What one training process is to do; written by `train.run` beside its log."""

    config: Path  # of speculators' TrainConfig
    metrics: Path
    warm_start: str = ""  # the verifier whose last layer the draft starts from, "" for noise
    fitted: int = 0  # training conversations that its fc is fitted on, 0 for the plain copy
    train_lm_head: bool = False
    threads: int = 0
    stock: bool = False  # leave the library's CPU path as it is
    conversations: Path | None = None  # those whose acceptance is measured on the way; None for none
    states: Path | None = None  # their hidden states
    evaluated: int = 0  # at most, of each split
    least_start: float = 0.0  # an acceptance length that a draft to continue must pass before its first step
    patience: int = 0  # epochs without a better acceptance that end the training, 0 for never


class JsonLines(logging.Handler):
    """Appends the dicts that speculators sends to its metric logger (``train/trainer.py:587, 671``) to a file.

    ``beside``: what is known of the step and not in them.
    """

    def __init__(self, file: Path, beside: dict[str, float]) -> None:
        super().__init__()
        self._stream, self._beside = file.open("a", buffering=1), beside

    def emit(self, record: logging.LogRecord) -> None:
        if isinstance(record.msg, dict):
            row = record.msg | ({"train": record.msg["train"] | self._beside} if "train" in record.msg else {})
            self._stream.write(json.dumps({"time": record.created, **row}) + "\n")


def main(argv: list[str]) -> int:
    job = Job.model_validate_json(Path(argv[0]).read_text())

    import torch
    from speculators.train import cli
    from speculators.train.config import TrainConfig

    from eaglebook import cpu_shim, train_watch

    if job.threads:
        torch.set_num_threads(job.threads)
    fast = cpu_shim.install() and not job.stock
    if fast:
        from eaglebook import cpu_training

        cpu_training.install()
    beside: dict[str, float] = {}
    train_watch.gradients(beside)
    set_up = cli.setup_metric_logger

    def set_up_and_listen(*options: Any, **named: Any) -> None:
        set_up(*options, **named)  # replaces the logger's handlers, so ours comes after
        logger = logging.getLogger("speculators.metrics")
        logger.setLevel(logging.INFO)
        logger.propagate = False  # else forty console lines a step
        if os.environ.get("RANK", "0") == "0":  # under torchrun every process comes here
            logger.addHandler(JsonLines(job.metrics, beside))

    cli.setup_metric_logger = set_up_and_listen
    config = TrainConfig.from_sources(cli={}, config_path=str(job.config), argv=sys.argv)
    options = config.flatten()
    build = cli.build_draft_model

    def build_as_asked(*arguments: Any) -> Any:
        wanted = options["draft_vocab_size"]
        model = build(*arguments)
        if wanted and model.draft_vocab_size != wanted:  # cli.py:422: a missing mapping means the full vocabulary
            raise SystemExit(f"draft vocabulary of {wanted} asked for, {model.draft_vocab_size} built")
        if options["from_pretrained"]:
            model.float()  # transformers loads it as stored, bf16; fresh drafts are trained in fp32
        if job.warm_start:
            from eaglebook import verifier, warm_start

            warm_start.from_verifier(model, verifier.resolve(job.warm_start))
            if job.fitted and job.conversations and job.states:
                warm_start.fit(model, train_watch.training_states(job.conversations, job.states, job.fitted))
        model.lm_head.weight.requires_grad_(job.train_lm_head)
        if fast:
            cpu_training.prepare(model)
        return model

    cli.build_draft_model = build_as_asked  # type: ignore[assignment]
    if job.conversations and job.states:
        train_watch.install(
            job.conversations, job.states, options["ttt_steps"], job.evaluated, job.patience, job.least_start
        )
    cli.main(config)
    if (Path(options["save_path"]) / "interrupted").exists():
        return 130  # the Trainer catches SIGINT and SIGTERM, saves, and returns as if it had finished
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
