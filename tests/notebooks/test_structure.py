"""The anatomy of every notebook, by reading its JSON."""

from __future__ import annotations

import itertools
import json
import re
import statistics
import subprocess
import sys

import nbformat
import pytest
from eaglebook import paths
from eaglebook.params import STAGES

STEMS = list(STAGES)
ORDER = ["parameters", "setup", "checks", "results"]
FORBIDDEN = [r"sys\.path", r"^\s*[%!]", r"\binput\(", r"pip install", r"tqdm\.auto", r"import vllm", r"from vllm",
             r"import \*", r"[\"'](/|~/)[a-z]+/", r"hf_[A-Za-z0-9]{20}"]  # fmt: skip
# A result stated in prose: a decimal fraction, a percentage, a speed or a duration.
MEASURED = re.compile(r"\b\d+[.,]\d+\b(?!\.)|\b\d+ ?%|\b\d+(\.\d+)? ?(tokens/s|seconds|ms|GB|MB)\b")


def read(stem: str):
    return nbformat.read(paths.NOTEBOOKS / f"{stem}.ipynb", as_version=4)


def code_cells(stem: str):
    return [c for c in read(stem).cells if c.cell_type == "code"]


def prose(stem: str):
    return [c.source for c in read(stem).cells if c.cell_type == "markdown"]


def test_the_notebooks_are_the_stages() -> None:
    assert sorted(f.stem for f in paths.NOTEBOOKS.glob("*.ipynb")) == STEMS


@pytest.mark.parametrize("stem", STEMS)
def test_is_stripped_small_and_of_one_kernel(stem: str) -> None:
    file = paths.NOTEBOOKS / f"{stem}.ipynb"
    notebook = json.loads(file.read_text())
    nbformat.validate(nbformat.from_dict(notebook))
    assert file.stat().st_size <= 40_000
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    ids = [c["id"] for c in notebook["cells"]]
    assert len(ids) == len(set(ids))
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            assert cell["execution_count"] is None


@pytest.mark.parametrize("stem", STEMS)
def test_has_the_tagged_cells_once_and_in_order(stem: str) -> None:
    tags = [t for c in read(stem).cells for t in c.metadata.get("tags", []) if t in ORDER]
    assert tags == ORDER
    assert read(stem).cells[1].metadata.tags == ["parameters"]


@pytest.mark.parametrize("stem", STEMS)
def test_opens_with_its_question_and_closes_with_limits_and_next(stem: str) -> None:
    texts = prose(stem)
    assert re.match(rf"# {stem[:2]} · .+\?\n", texts[0])
    assert "## Before you run" in texts[1]
    assert texts[-2].startswith("## What this does not show")
    assert texts[-1].startswith("## Next")
    assert f"eaglebook run --preset smollm2 --stage {stem[:2]}" in texts[-1]
    assert "Try:" in texts[-1]
    following = STEMS[(STEMS.index(stem) + 1) % len(STEMS)]
    assert f"({following}.ipynb)" in texts[-1]


@pytest.mark.parametrize("stem", STEMS)
def test_headings_nest(stem: str) -> None:
    levels = [len(m[1]) for text in prose(stem) for m in re.finditer(r"^(#+) ", text, re.M)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(later - earlier <= 1 for earlier, later in itertools.pairwise(levels))


@pytest.mark.parametrize("stem", STEMS)
def test_cells_are_short_and_prose_is_there(stem: str) -> None:
    own = [c for c in code_cells(stem) if "parameters" not in c.metadata.get("tags", [])]  # that one is a list
    lines = [len([line for line in c.source.splitlines() if line.strip()]) for c in own]
    assert max(lines) <= 30
    assert statistics.median(lines) <= 14
    words = [len(text.split()) for text in prose(stem)]
    assert max(words) <= 150
    assert len(words) >= 0.6 * len(lines)


@pytest.mark.parametrize("stem", STEMS)
def test_links_between_notebooks_resolve(stem: str) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", "\n".join(prose(stem))):
        assert (paths.NOTEBOOKS / target).exists(), target


@pytest.mark.parametrize("stem", STEMS)
def test_code_keeps_the_rules(stem: str) -> None:
    for cell in code_cells(stem):
        for pattern in FORBIDDEN:
            assert not re.search(pattern, cell.source, re.M), (pattern, cell.source)


@pytest.mark.parametrize("stem", STEMS)
def test_prose_states_no_measured_number(stem: str) -> None:
    for text in prose(stem):
        plain = re.sub(r"`[^`]*`", "", text)
        assert not MEASURED.search(plain), MEASURED.search(plain)


@pytest.mark.parametrize("stem", STEMS)
def test_every_figure_is_saved_under_its_tag(stem: str) -> None:
    figures = [c for c in code_cells(stem) if "figure" in c.metadata.get("tags", [])]
    assert all("run.figure(" in c.source for c in figures)
    assert all("figure" in c.metadata.get("tags", []) for c in code_cells(stem) if "run.figure(" in c.source)


def test_readme_table_and_notebooks_agree() -> None:
    readme = (paths.ROOT / "README.md").read_text()
    for stem in STEMS:
        question = prose(stem)[0].splitlines()[0].split(" · ")[1]
        assert f"(notebooks/{stem}.ipynb)" in readme
        assert question in readme, question


@pytest.mark.parametrize(
    "page", ["README.md", "CONTRIBUTING.md", "docs/metrics.md", "docs/conventions.md", "params/README.md"]
)
def test_links_of_the_pages_resolve(page: str) -> None:
    file = paths.ROOT / page
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)|src=\"([^\":]+)\"", file.read_text()):
        assert (file.parent / (target[0] or target[1])).exists(), target


def test_stripping_is_checked_by_the_tool_the_makefile_uses() -> None:
    files = sorted(map(str, paths.NOTEBOOKS.glob("*.ipynb")))
    done = subprocess.run(
        [sys.executable, "-m", "nbstripout", "--verify", "--keep-id", *files], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
