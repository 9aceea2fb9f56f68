"""The load ladder for a draft of real size, rung by rung: seconds and verdict, against importing vLLM alone, in one run.

    .venv/bin/python benchmarks/bench_ladder.py [DRAFT VERIFIER]

Without arguments: a sparse Kimi-K2.5 draft (4.7 GB) beside its verifier's config.json, rungs 0 to 4; rung 5 would need two
full heads of the verifier, about 5 GB more. With a draft and a verifier: all six rungs of those.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import bench_inspect
from eaglebook.engine import ladder
from eaglebook.engine.server import python


def import_s() -> float:
    """Seconds to start Python and import vLLM: what every rung but the first pays."""
    began = time.perf_counter()
    subprocess.run([python(), "-c", "import vllm"], check=True, capture_output=True)
    return time.perf_counter() - began


def show(draft: Path, verifier: Path, rungs: list[int]) -> int:
    peer = import_s()
    print(f"{'import vllm':18} {peer:6.1f} s")
    passed = True
    for v in ladder.climb(draft, verifier, rungs, num_speculative_tokens=3, stop_at_first_no=False, timeout_s=600):
        verdict = "pass" if v.passed else "FAIL"
        print(
            f"{v.rung.number} {v.rung.name:16} {v.wall_s:6.1f} s  {v.wall_s / peer:4.1f} × import  {verdict}  {v.detail[:160]}"
        )
        passed = passed and v.passed
    return 0 if passed else 1


def main() -> int:
    if len(sys.argv) == 3:
        return show(Path(sys.argv[1]), Path(sys.argv[2]), [0, 1, 2, 3, 4, 5])
    with tempfile.TemporaryDirectory(prefix="eaglebook-bench-") as folder:
        draft, verifier = Path(folder) / "draft", Path(folder) / "verifier"
        size = bench_inspect.draft(draft, "flat")
        verifier.mkdir()
        (verifier / "config.json").write_text(json.dumps(bench_inspect.KIMI))
        print(f"draft {size / 1e9:.2f} GB, verifier config of {bench_inspect.LAYERS} layers")
        return show(draft, verifier, [0, 1, 2, 3, 4])


if __name__ == "__main__":
    raise SystemExit(main())
