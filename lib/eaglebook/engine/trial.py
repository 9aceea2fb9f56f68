"""Many drafts through vLLM's real engine, quickly: one import of vLLM, one fork a draft.

For small models and short answers, where starting a server each time would be all the cost. Says whether a draft loads,
fails at the first request, or is served, and how much of it is accepted.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eaglebook import guard, paths
from eaglebook.acceptance import Acceptance
from eaglebook.engine.server import python
from eaglebook.errors import UserError


@dataclass(frozen=True)
class Trial:
    """``stage``: where it failed, "load" or "request", "" when it was served. ``acceptance`` is None unless drafts were made."""

    draft: Path | None
    stage: str
    error: str
    tokens: tuple[tuple[int, ...], ...]
    acceptance: Acceptance | None
    seconds: float


def run(
    verifier: Path,
    drafts: Sequence[Path | None],
    prompts: Sequence[Sequence[int]],
    *,
    num_speculative_tokens: int = 3,
    max_tokens: int = 81,
    max_model_len: int = 256,
    dtype: str = "float32",
    timeout_s: float = 60,
) -> Iterator[Trial]:
    """Serve the prompts greedily with each draft in turn (None: the verifier alone). Trials come as they are done."""
    common = {
        "verifier": str(verifier), "prompts": [list(ids) for ids in prompts], "num_speculative_tokens": num_speculative_tokens,
        "max_tokens": max_tokens, "max_model_len": max_model_len, "dtype": dtype, "timeout_s": timeout_s,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        jobs, log = Path(scratch) / "jobs.jsonl", Path(scratch) / "log.txt"
        jobs.write_text("".join(json.dumps({**common, "draft": str(d) if d else ""}) + "\n" for d in drafts))
        argv = [python(), str(Path(__file__).with_name("trial_worker.py")), str(jobs)]
        with log.open("w") as errors:
            environment = os.environ | {"TMPDIR": scratch}  # vLLM leaves a rendezvous file behind for each engine
            worker = guard.start(argv, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            answers = (json.loads(line) for line in worker.stdout or () if line.startswith("{"))
            for draft in drafts:
                answer = next(answers, None)
                if answer is None:
                    raise UserError(
                        "the trial process ended",
                        found=paths.scrub((log.read_text().strip().splitlines() or ["no output"])[-1]),
                        fix="see whether `import vllm` works in its environment",
                    )
                yield _trial(draft, answer)
        finally:
            guard.stop(worker)


def _trial(draft: Path | None, answer: dict[str, Any]) -> Trial:
    return Trial(
        draft=draft,
        stage=answer["stage"],
        error=paths.scrub(answer["error"]),
        tokens=tuple(tuple(ids) for ids in answer.get("tokens", ())),
        acceptance=Acceptance(answer["drafts"], tuple(answer["accepted"])) if answer.get("drafts") else None,
        seconds=answer["seconds"],
    )
