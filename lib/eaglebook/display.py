"""What a notebook shows besides figures: tables and coloured tokens, as plain HTML that also reads in a report."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_MISS, _HIT = "rgba(140,149,159,.22)", "rgba(46,160,67,.30)"


def table(rows: Iterable[Mapping[str, Any]]) -> Any:
    """Rows of one shape as an HTML table; numbers to the right."""
    from IPython.display import HTML

    rows = list(rows)
    if not rows:
        return HTML("<p>none</p>")
    numeric = {
        key: all(isinstance(row[key], int | float) and not isinstance(row[key], bool) for row in rows)
        for key in rows[0]
    }
    mark = {key: ' class="number"' if numeric[key] else "" for key in rows[0]}
    head = "".join(f"<th{mark[key]}>{html.escape(str(key))}</th>" for key in rows[0])
    body = "".join(
        "<tr>" + "".join(f"<td{mark[key]}>{html.escape(_text(row[key]))}</td>" for key in rows[0]) + "</tr>"
        for row in rows
    )
    return HTML(f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>")


def tokens(texts: Sequence[str], on: Sequence[bool], title: str = "") -> Any:
    """Token texts in a row, those marked ``on`` in green, the others in grey; line breaks kept and shown."""
    from IPython.display import HTML

    spans = "".join(
        f'<span style="background:{_HIT if lit else _MISS};border-radius:2px">{html.escape(text).replace(chr(10), "↵<br>")}</span>'
        for text, lit in zip(texts, on, strict=True)
    )
    head = f"<b>{html.escape(title)}</b><br>" if title else ""
    return HTML(f'<div style="line-height:1.7;margin:.6rem 0;white-space:pre-wrap">{head}{spans}</div>')


def show(*shown: Any) -> None:
    """Show several things from one cell."""
    from IPython.display import display

    display(*shown)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.3f}" if abs(value) < 100 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
