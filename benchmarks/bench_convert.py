"""``eaglebook convert`` of a 4.7 GB draft against ``cp`` of its weights, alternating in one run on one disk.

    .venv/bin/python benchmarks/bench_convert.py [--gigabytes 4.7]

Source in the page cache, target removed and disk quiet before each run. Prints the seconds until the process ends and until
its file is on the disk (fsync by this script, for both), the ratio of speeds (0.9 wanted) and convert's peak (200 MB).
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import statistics
import sys
import tempfile
from pathlib import Path

from bench_inspect import DRAFT_VOCAB, HIDDEN, VOCAB, Run, draft, measured

ROUNDS, WANTED_RATIO, LIMIT_MB, WHOLE_GB = 3, 0.9, 200, 4.73
_BLOCK = 64 << 20


def fill(file: Path, first: int, last: int) -> None:
    """Random bytes between two places, one block of them repeated, and all of the file left in the page cache."""
    block = os.urandom(_BLOCK)
    with file.open("r+b") as out:
        out.seek(first)
        for at in range(first, last, _BLOCK):
            out.write(block[: last - at])
    with file.open("rb") as stream:
        while stream.read(_BLOCK):
            pass


def main(gigabytes: float) -> int:
    eaglebook = str(Path(sys.executable).with_name("eaglebook"))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the files go away then, too
    with tempfile.TemporaryDirectory(prefix="eaglebook-bench-") as name:
        work = Path(name)
        free = shutil.disk_usage(work).free / 1e9
        if free < 3 * gigabytes:
            print(f"{3 * gigabytes:.0f} GB of disk are needed, {free:.0f} are free. Next: --gigabytes {free / 4:.1f}")
            return 2
        hidden = max(64, round(HIDDEN * gigabytes / WHOLE_GB / 64) * 64)  # a side of nearly every matrix
        size = draft(work / "draft", "nested", hidden)
        source, out, copy = work / "draft/model.safetensors", work / "out", work / "copy.safetensors"
        with source.open("rb") as stream:
            start = 8 + int.from_bytes(stream.read(8), "little")
        fill(source, start, size - 8 * DRAFT_VOCAB - VOCAB)  # d2t and t2d at the end stay
        commands = {
            "cp": (["cp", str(source), str(copy)], copy),
            "convert": ([eaglebook, "convert", str(work / "draft"), str(out)], out / source.name),
        }
        runs: dict[str, list[Run]] = {name: [] for name in commands}
        for _ in range(ROUNDS):
            for name, (command, written) in commands.items():
                copy.unlink(missing_ok=True)
                shutil.rmtree(out, ignore_errors=True)
                os.sync()
                runs[name].append(measured(command, written))
        said = measured([eaglebook, "diff", str(work / "draft"), str(out)]).output
        assert said.strip() == "identical", said
    print(f"{size / 1e9:.2f} GB       process ended    on the disk")
    for name, done in runs.items():
        print(f"{name:10} {told(done, 'seconds')}   {told(done, 'to_disk')}")
    cached, disk = (middle(runs["cp"], key) / middle(runs["convert"], key) for key in ("seconds", "to_disk"))
    peak = max(run.peak for run in runs["convert"])
    passed = disk >= WANTED_RATIO and peak <= LIMIT_MB
    print(f"convert reaches {cached:.2f} × the speed of cp, {disk:.2f} × with the disk (wanted {WANTED_RATIO})")
    print(f"peak {peak:.0f} MB (limit {LIMIT_MB}); tensors identical; {'kept' if passed else 'NOT kept'}")
    return 0 if passed else 1


def middle(runs: list[Run], key: str) -> float:
    return statistics.median(getattr(run, key) for run in runs)


def told(runs: list[Run], key: str) -> str:
    values = [getattr(run, key) for run in runs]
    return f"{middle(runs, key):6.2f} s ({min(values):.2f} to {max(values):.2f})"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=WHOLE_GB)
    sys.exit(main(parser.parse_args().gigabytes))
