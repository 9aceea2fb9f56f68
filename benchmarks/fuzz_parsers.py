"""Random and mutated files against everything that reads a stranger's checkpoint: headers, indexes, lists, folders.

    .venv/bin/python benchmarks/fuzz_parsers.py [--count 100000] [--seed 0] [--only NUMBER]

Compared with one rule: a normal result or a UserError, in a second of processor time, in 200 MB. Seed and number make
an input (--only repeats one), with the words of the code it is for. The smallest input of each failure is kept.
"""

from __future__ import annotations

import argparse
import copy
import gc
import io
import json
import math
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests/checkpoint"))
import drafts  # noqa: E402
from eaglebook import cli_checkpoint  # noqa: E402
from eaglebook.checkpoint import convert, diff, headers, inspection, source  # noqa: E402
from eaglebook.errors import UserError  # noqa: E402
from rich.console import Console  # noqa: E402

LIMIT_S, LIMIT_MB, STUCK_S, ADDRESS_SPACE = 1.0, 200, 5, 6 << 30
CODE = "\n".join(file.read_text() for file in sorted((ROOT / "lib/eaglebook/checkpoint").glob("*.py")))
WORDS = sorted(set(re.findall(r'"([A-Za-z_][\w.]{1,50})"', CODE)))  # every key the code looks up, every value it knows
TENSOR_NAMES = sorted({f"{name}.weight" for name in drafts.shapes()} | {*drafts.shapes(), *drafts.mla_shapes()})
PREFIXES = ("module.", "model.", "draft_model.", "midlayer.", "layers.0.", "layers.7.", "layers.9999.", "verifier.")
RAW = {  # written into the JSON text as they are: what json.dumps refuses, or recurses on
    "@list": "[" * 300 + "]" * 300, "@object": '{"a":' * 200 + "1" + "}" * 200, "@deep": "[" * 900 + "]" * 900,
    "@deeper": "[" * 100_000, "@nan": "NaN", "@infinity": "-Infinity", "@1e999": "1e999", "@int": "9" * 4200,
    "@longer": "9" * 5000, "@twice": '1, "hidden_size": 2',
}  # fmt: skip
GARBAGE: list[Any] = [
    None, True, False, 0, -1, 1, 2, 3, 7, 64, 2**31, 2**53, 2**60, 2**63, 2**64, 10**30, 10**309, -(10**309), 0.0, -0.5, 1.5,
    64.0, 1e308, 1e-320, "", " ", "3", "x" * 3000, "\x00", "\ud800", "🦅", "[bold]", "[/x]", "../x", "/etc/x", "a\nb", [], [[]],
    [None], [0], [1, "a"], [True], [2, 4, 5], [-1, 0, 1], [2**63], ["\ud800"], [1.5, 2, 3], [[1, 2], [3]], [{}], [*range(300)],
    {}, {"": 1}, {"a": {"b": [{}]}}, {"type": []}, {"rope_type": {}, "factor": None}, {"name": 3}, {"\ud800": "\ud800"}, *RAW,
]  # fmt: skip
MLA = {"model_type": "kimi_k2", "architectures": ["Eagle3DeepseekV2ForCausalLM"], "q_lora_rank": 24, "kv_lora_rank": 512,
       "qk_nope_head_dim": 32, "qk_rope_head_dim": 64, "v_head_dim": 32}  # fmt: skip
QUANTISED = {"quantization_config": {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
             "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4}}}}}  # fmt: skip
DRAFTS = [
    drafts.flat(), drafts.nested(), drafts.nested({"model_type": "qwen3"}), drafts.flat(**MLA), drafts.flat(**QUANTISED),
    {"model_type": "eagle", "method": "eagle3", "architectures": ["EAGLE3"], "model": drafts.flat()},
    drafts.nested(speculators_model_type="peagle"), drafts.flat(rope_scaling={"type": "yarn", "factor": 4.0, "rope_theta": 1e6}),
]  # fmt: skip
INDEX = {"metadata": {"total_size": 8}, "weight_map": dict.fromkeys(drafts.shapes(), "model.safetensors")}
INDEX_NAME, KINDS = "model.safetensors.index.json", {"folder": 45, "header": 25, "index": 15, "list": 15}
KIMI = {"model_type": "kimi_k25", "text_config": {**drafts.VERIFIER, **MLA}, "vision_config": {}, **QUANTISED}


class Stuck(BaseException):
    """No answer after STUCK_S; no `except` of the code under test may swallow it."""


def stuck(*_: object) -> None:
    raise Stuck


def spots(tree: Any) -> list[tuple[Any, Any]]:
    items = list(tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ())
    return [(tree, key) for key, _ in items] + [spot for _, value in items for spot in spots(value)]


def mutated(draw: random.Random, tree: Any, times: int) -> Any:
    tree = copy.deepcopy(tree)
    for _ in range(times):
        if not (found := spots(tree)):
            return copy.deepcopy(draw.choice(GARBAGE))
        (where, key), (other, name), word = draw.choice(found), draw.choice(found), draw.choice(WORDS)
        garbage, kind = copy.deepcopy(draw.choice([*GARBAGE, word, {word: draw.choice(GARBAGE)}])), draw.randrange(7)
        if kind == 0:
            del where[key]
        elif kind <= 2:
            where[key] = garbage
        elif kind == 3:
            where[key] = copy.deepcopy(other[name])
        elif kind == 4:
            where[key] = draw.choice([[where[key]], {word: where[key]}, str(where[key]), word])
        elif isinstance(where, dict):
            where[draw.choice([*[draw.choice(WORDS)] * 9, "\ud800"])] = garbage
        else:
            where.insert(key, garbage)
    return tree


def text_of(tree: Any) -> bytes:
    text = json.dumps(tree)
    for mark in re.findall(r'"(@\w+)"(?!:)', text):
        text = text.replace(f'"{mark}"', RAW[mark]) if mark in RAW else text
    return text.encode()


def damaged(draw: random.Random, data: bytes) -> bytes:
    """A few bytes changed, removed or repeated."""
    for _ in range(draw.randint(1, 4)):
        at, end = sorted(draw.choices(range(len(data) + 1), k=2))
        end = min(end, at + 40) if draw.random() < 0.9 else end
        short = [b"", b"\xff", b"\x00", b'"', b"{", b"]", b"\xef\xbb\xbf", b"\n", b"\t", draw.randbytes(8)]
        data = data[:at] + draw.choice([*short, (data[at:end] * 1000)[: 1 << 16]]) + data[draw.choice([at, end]) :]
    return data


def header(draw: random.Random, lies: float) -> tuple[bytes, int, dict[str, Any]]:
    """Header of a draft with odd names, shapes and types, correct but for ``lies``; bytes of its data; its entries."""
    shapes: Any = dict(draw.choice([drafts.shapes, drafts.shapes, drafts.mla_shapes])())
    for _ in range(draw.choice([0, 0, 1, 1, 2, 5])):
        name, kind = draw.choice(sorted(shapes)), draw.randrange(5)
        shape, dtype = shapes[name]
        if draw.random() < 0.5 and len(shapes) > 1:
            del shapes[name]
        if kind == 0:
            name = draw.choice(PREFIXES) + name.removeprefix("layers.0.")
        elif kind == 1:
            shape = tuple(draw.choice([0, 1, n, n, n + 1, 2 * n, 7]) for n in shape)[: draw.choice([0, 1, 9, 9])]
        elif kind == 2:
            shape = draw.choice([(), (2**40, 0), (0, 2**61), (*shape, 1), (1,) * 16, (6_000_000,), shape[::-1]])
        elif kind == 3:
            dtype = draw.choice([*headers.DTYPE_BYTES, "I4", "", "bfloat16"])
        shapes[draw.choice([name, name, draw.choice(TENSOR_NAMES), draw.choice(WORDS)])] = (shape, dtype)
    entries, at = {}, 0
    for name, (shape, dtype) in shapes.items():
        count = math.prod(shape) * headers.DTYPE_BYTES.get(dtype, 1) % (1 << 40)
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + count]}
        at += count
    tree: Any = dict(entries)
    if draw.random() < 0.2:
        tree["__metadata__"] = draw.choice([{"format": "pt"}, {"torchspec_version": "1"}, *GARBAGE])
    return text_of(mutated(draw, tree, draw.choice([1, 1, 3])) if draw.random() < lies else tree), at, entries


def weights(draw: random.Random, file: Path, lies: float) -> None:
    text, size, entries = header(draw, lies)
    length = len(text)
    if draw.random() < lies / 3:
        length = draw.choice([0, 1, length - 1, length + 1, 2**31, 2**60, 2**64 - 1])
    elif draw.random() < lies / 2:
        broken = [damaged(draw, text), draw.randbytes(draw.randrange(300)), b"[]", b"{}", b"null", b"[" * 100_000]
        text = draw.choice([*broken[:1] * 4, *broken])
        length = len(text)
    with file.open("wb") as out:
        out.write(length.to_bytes(8, "little") + text)
        start = out.tell()
        out.truncate(max(0, start + size - (draw.randrange(9) if draw.random() < lies / 4 else 0)))
        for name, data in zip(("d2t", "t2d"), drafts.mapping(), strict=True):
            if name in entries and draw.random() < 0.9:
                first, end = entries[name]["data_offsets"]
                out.seek(start + first)
                out.write((data if draw.random() < 0.8 else draw.randbytes(len(data)))[: end - first])


def document(draw: random.Random, file: Path, seeds: list[dict[str, Any]], damage: float = 0.03) -> None:
    text = text_of(mutated(draw, draw.choice(seeds), draw.choice([0, 1, 1, 2, 4, 12])))
    file.write_bytes(damaged(draw, text) if draw.random() < damage else text)


def listing(draw: random.Random, file: Path) -> None:
    forms = ("{}\t{}\t{}", "{} {} {}", "{}\t{}", "{}  {}", "{}", "# {}", "\t{}\t{}\t{}\t", "{}\t\t{}")
    lines = []
    for name, (shape, dtype) in draw.sample(sorted(drafts.shapes().items()), draw.randrange(12)):
        shown = [list(shape), "x".join(map(str, shape)), f"torch.Size({list(shape)})", shape, "[" * 9, 10**30, ""]
        dtype = draw.choice([dtype, "torch.bfloat16", "🦅", ""])
        lines.append(draw.choice(forms).format(name, draw.choice(shown), dtype))
    if draw.random() < 0.03:  # long lines that nearly match
        many = draw.choice(["a", " ", "[", "1,", "é", "a.", "("]) * 30_000
        lines.append(draw.choice(["x ", "x\t", "x\t1\t"]) + many + draw.choice(["", "!", "]", "\t", "(", "1"]))
    data = "\n".join(lines).encode()
    file.write_bytes(damaged(draw, data) if draw.random() < 0.5 else data)


def whole(draw: random.Random, folder: Path) -> Callable[[], object]:
    """A folder as ``eaglebook inspect``, ``convert`` and ``diff`` see it: read, checked, shown, planned, compared."""
    document(draw, folder / "config.json", DRAFTS)
    alone, verifier = draw.random() < 0.2, None
    given = folder / "list.txt" if alone and draw.random() < 0.5 else None
    if given:
        listing(draw, given)
    if not alone:
        weights(draw, folder / "model.safetensors", lies=0.05)
    if draw.random() < 0.1:
        document(draw, folder / source.BACKUP, DRAFTS[1:2])
    if draw.random() < 0.1:
        document(draw, folder / INDEX_NAME, [INDEX])
    if draw.random() < 0.4:
        verifier = folder / "verifier"
        verifier.mkdir()
        document(draw, verifier / "config.json", [drafts.VERIFIER, KIMI])
        if draw.random() < 0.6:
            weights(draw, verifier / "model.safetensors", lies=0.3)
        if draw.random() < 0.2:
            document(draw, verifier / INDEX_NAME, [INDEX])
    version, to = draw.choice([(0, 16), (0, 22), (0, 32), (0, 33)]), draw.choice(convert.LAYOUTS)
    told = draw.choice([convert.Told(), convert.Told("input", (2, 30, 58), "org/name", 3)])
    mean, fix, after = draw.choice(["", "input", "output"]), draw.random() < 0.5, draw.randrange(4)

    def call() -> None:
        said = inspection.inspect(folder, verifier=verifier, version=version, tensor_list=given, ids_mean=mean)
        if after == 0:
            json.dumps(said.as_dict(), indent=1)
        elif after == 1:
            cli_checkpoint.out = Console(file=io.TextIOWrapper(io.BytesIO(), "utf-8"), highlight=False, soft_wrap=True)
            cli_checkpoint.show(said)
        elif after == 2:
            convert.check(convert.plan(said.case, to, told, fix=fix), to, said.case.verifier)
        else:
            diff.compare(said.case, said.case, hashes=False)

    return call


def single(draw: random.Random, folder: Path, kind: str) -> Callable[[], object]:
    """One file alone, and its parser."""
    if kind == "header":
        weights(draw, file := folder / "model.safetensors", lies=0.7)
        return lambda: headers.read_header(file)
    if kind == "index":
        document(draw, file := folder / INDEX_NAME, [INDEX], damage=0.3)
        return lambda: headers.read_index(file)
    listing(draw, file := folder / "list.txt")
    return lambda: source.read_list(file)


def failure(run: Callable[[], object], kind: str) -> tuple[tuple[str, ...], str] | None:
    """A key that tells failures apart, and the message; None when all is well."""
    before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() >> 20
    peak, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    signal.setitimer(signal.ITIMER_REAL, STUCK_S)
    try:
        run()
    except UserError:
        pass
    except (Exception, Stuck) as error:
        frames = traceback.extract_tb(error.__traceback__)
        ours = [f"{Path(f.filename).name}:{f.lineno}" for f in frames if "/eaglebook/" in f.filename]
        key = (kind, type(error).__name__, ours[-1] if ours else "?")
        return key, f"{str(error)[:150]!r} via {' < '.join(ours[::-1][:4])}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    took, after = time.process_time() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if after > peak and after // 1024 - before > LIMIT_MB:
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # the peak counts anew
        return (kind, "memory"), f"{after // 1024 - before} MB"
    return ((kind, "slow"), f"{took:.1f} s") if took > LIMIT_S else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="repeat this input alone, and keep its files")
    given = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    signal.signal(signal.SIGALRM, stuck)
    work = Path(tempfile.mkdtemp(prefix="eaglebook-fuzz-"))
    seen: dict[tuple[str, ...], tuple[int, int, str]] = {}  # size and number of the smallest input, message
    counts: Counter[tuple[str, ...]] = Counter()
    numbers, began = range(given.count) if given.only is None else [given.only], time.perf_counter()
    for number in numbers:
        draw = random.Random(f"{given.seed}:{number}")
        kind = draw.choices(list(KINDS), list(KINDS.values()))[0]
        folder = work / "input"
        folder.mkdir()
        found = failure(whole(draw, folder) if kind == "folder" else single(draw, folder, kind), kind)
        if found:
            key, message = found
            counts[key] += 1
            size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
            if key not in seen:
                print(f"seed {given.seed} input {number}: {' '.join(key)}: {message}", flush=True)
            if key not in seen or size < seen[key][0]:
                seen[key] = (size, number, message)
                kept = work / "-".join(key).replace(":", "-")
                shutil.rmtree(kept, ignore_errors=True)
                folder.rename(kept)
            gc.collect()
        if given.only is None:
            shutil.rmtree(folder, ignore_errors=True)
    print(f"{len(numbers):,} inputs in {time.perf_counter() - began:.0f} s, {sum(counts.values())} failures")
    for key, times in counts.most_common():
        print(f"{times:7,} × {' '.join(key)}: {seen[key][2]} (--seed {given.seed} --only {seen[key][1]})")
    if seen or given.only is not None:
        print(f"files: {work}")
    else:
        shutil.rmtree(work)
    return 1 if seen else 0


if __name__ == "__main__":
    sys.exit(main())
