"""An executed notebook as one HTML file that needs nothing else: code folded, figures inside, no remote script."""

from __future__ import annotations

import html
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nbformat

from eaglebook import paths

if TYPE_CHECKING:
    from eaglebook.runs import Manifest

_STYLE = """
:root { --ink:#1f2328; --soft:#59636e; --line:#d1d9e0; --paper:#fff; --wash:#f6f8fa; --good:#1a7f37; --bad:#cf222e; --link:#0969da; }
@media (prefers-color-scheme: dark) { :root { --ink:#e6edf3; --soft:#9198a1; --line:#3d444d; --paper:#0d1117; --wash:#151b23; --good:#3fb950; --bad:#f85149; --link:#58a6ff; }
  main img { background:#fff; border-radius:4px; } }
* { box-sizing: border-box; }
body { margin:0; background:var(--paper); color:var(--ink); font:16px/1.55 system-ui,-apple-system,"Segoe UI",sans-serif; }
main { max-width: 58rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
h1 { font-size:1.7rem; line-height:1.25; } h2 { font-size:1.25rem; margin-top:2.2rem; border-top:1px solid var(--line); padding-top:1.2rem; }
a { color:var(--link); } img { max-width:100%; height:auto; display:block; margin:.8rem 0; }
table { border-collapse:collapse; margin:.8rem 0; font-size:.92rem; display:block; overflow-x:auto; }
th,td { padding:.3rem .7rem; border-bottom:1px solid var(--line); text-align:left; vertical-align:top; } th { color:var(--soft); font-weight:600; }
td.number, th.number { text-align:right; white-space:nowrap; font-variant-numeric:tabular-nums; }
pre { background:var(--wash); border:1px solid var(--line); border-radius:6px; padding:.6rem .8rem; overflow-x:auto; font:.82rem/1.45 ui-monospace,Menlo,Consolas,monospace; }
code { font-family:ui-monospace,Menlo,Consolas,monospace; font-size:.88em; background:var(--wash); padding:.1em .3em; border-radius:4px; } pre code { background:none; padding:0; font-size:inherit; }
details.code { margin:.4rem 0; } details.code summary { cursor:pointer; color:var(--soft); font-size:.8rem; }
.output pre { background:none; white-space:pre-wrap; } .output .error pre { border-color:var(--bad); color:var(--bad); }
.card { border:1px solid var(--line); border-radius:8px; padding:.7rem 1rem; background:var(--wash); font-size:.9rem; display:grid; grid-template-columns:repeat(auto-fit,minmax(11rem,1fr)); gap:.4rem 1.2rem; }
.card b { display:block; color:var(--soft); font-weight:600; font-size:.75rem; text-transform:uppercase; letter-spacing:.04em; }
.succeeded { color:var(--good); font-weight:600; } .failed,.killed,.timed_out { color:var(--bad); font-weight:600; } .running { color:var(--link); font-weight:600; }
.soft { color:var(--soft); }
"""  # noqa: E501


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
                manifest = runs.read_manifest(folder)
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
    runs.write_atomically(file, _page("EAGLE-3 workbook: runs", f"<h1>EAGLE-3 workbook: runs</h1>{body}"))
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
