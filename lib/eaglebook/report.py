"""An executed notebook as one HTML file that needs nothing else: code folded, figures inside, no remote script."""

from __future__ import annotations

import html
from pathlib import Path
from typing import Any

import nbformat

from eaglebook import manifests, paths
from eaglebook.manifests import Manifest

_STYLE = (paths.DATA / "report.css").read_text(encoding="utf-8")


def write_stage_report(folder: Path, manifest: Manifest) -> Path:
    """``report.html`` beside ``notebook.ipynb``: the run card, then the notebook's prose, figures and folded code."""
    try:
        body = _body(folder / "notebook.ipynb")
    except (OSError, ValueError, nbformat.reader.NotJSONError):
        body = "<p>The notebook was not executed.</p>"
    card = {
        "Status": f'<span class="{manifest.status}">{manifest.status}</span>',
        "Run": html.escape(f"{manifest.run} · preset {manifest.preset}"),
        "Took": f"{manifest.seconds:,.0f} s, {html.escape(manifest.started[:16].replace('T', ' '))} UTC",
        "Machine": html.escape(_machine(manifest.machine)),
        "Versions": html.escape(", ".join(f"{k} {v}" for k, v in manifest.versions.items() if k not in {"papermill"})),
        "Commit": html.escape(manifest.commit or "unknown"),
    }
    if manifest.error:
        card["Error"] = (
            f'<span class="failed">{html.escape(manifest.error)}</span> {html.escape(manifest.failing_cell)}'
        )
    rows = "".join(f"<div><b>{name}</b>{value}</div>" for name, value in card.items())
    text = _page(manifest.stage, f'<p><a href="../../index.html">All runs</a></p><div class="card">{rows}</div>{body}')
    file = folder / "report.html"
    file.write_text(paths.scrub(text), encoding="utf-8")
    return file


def write_index(outputs: Path) -> Path:
    """``outputs/index.html``: every run, every stage, its status, key numbers and report."""
    from eaglebook import runs
    from eaglebook.params import STAGES

    sections = []
    for run in reversed(runs.run_dirs()):
        rows = []
        for stem in STAGES:
            for folder in (runs.stage_dir(run, stem), runs.next_dir(run, stem)):
                manifest = manifests.read(folder)
                if manifest is None:
                    continue
                link = f"{run.name}/{folder.name}/report.html"
                name = f'<a href="{link}">{stem}</a>' if (folder / "report.html").exists() else stem
                status = manifest.shown_status
                later = " (last attempt)" if folder.name.endswith(".next") else ""
                rows.append(
                    f'<tr><td>{name}</td><td class="{status}">{status}{later}</td>'
                    f'<td class="number">{manifest.seconds:,.0f} s</td><td>{html.escape(headline(manifest))}</td></tr>'
                )
        sections.append(
            f"<h2>{html.escape(run.name)}</h2><table><tr><th>Notebook</th><th>Status</th>"
            f'<th class="number">Time</th><th>Result</th></tr>{"".join(rows)}</table>'
        )
    outputs.mkdir(parents=True, exist_ok=True)
    file = outputs / "index.html"
    body = "".join(sections) or "<p>No run yet: <code>make demo</code>.</p>"
    manifests.write_atomically(file, _page("EAGLE-3 workbook: runs", f"<h1>EAGLE-3 workbook: runs</h1>{body}"))
    return file


def headline(manifest: Manifest) -> str:
    """One line that says what a stage found: the sentence it left in ``metrics.answer``, or its error."""
    return str(manifest.metrics.get("answer") or manifest.error.split("\n")[0])


def _body(notebook: Path) -> str:
    """The cells of an executed notebook as HTML, by nbconvert with our template; papermill's error banners left out."""
    import jinja2
    from nbconvert import HTMLExporter

    node = nbformat.read(notebook, as_version=4)
    node.cells = [c for c in node.cells if "papermill-error-cell-tag" not in c.metadata.get("tags", [])]
    exporter = HTMLExporter(
        template_name="basic",
        template_file="report.html.j2",
        extra_loaders=[jinja2.FileSystemLoader(paths.DATA)],
        embed_images=True,
        anchor_link_text="",
        preprocessors=["nbconvert.preprocessors.CoalesceStreamsPreprocessor"],
    )
    body, _ = exporter.from_notebook_node(node)
    return body


def _machine(card: dict[str, Any]) -> str:
    if not card:
        return "unknown"
    memory = f"{card['memory_bytes'] / 1e9:.0f} GB"
    return ", ".join(filter(None, [card["accelerator"], card["processor"], f"{card['cores']} cores", memory]))


def _page(title: str, body: str) -> str:
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width,initial-scale=1"><style>{_STYLE}</style></head>'
        f"<body><main>{body}</main></body></html>"
    )
