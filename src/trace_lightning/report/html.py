"""What our pages share: one file that opens offline, light or dark as the reader has it, and tables."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

Rows = Sequence[Sequence[str]]


def asset(name: str) -> str:
    """The text of a file in report/assets."""
    return files("trace_lightning.report").joinpath("assets", name).read_text(encoding="utf-8")


def document(title: str, body: str, *, scripts: Sequence[str] = (), data: Any = None) -> str:
    """A whole page. `scripts` are names of assets, `data` what they read from the element `data`."""
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{html.escape(title)}</title><style>{asset('page.css')}</style>"
    )
    parts = [] if data is None else [f'<script type="application/json" id="data">{_json(data)}</script>']
    parts += [f"<script>{asset(name)}</script>" for name in scripts]
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{body}{"".join(parts)}</body></html>\n'


def _json(data: Any) -> str:
    # No text of a completion can end the script element: "<" is written as an escape, which JSON reads back.
    return json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def table(columns: Sequence[str], rows: Rows, marks: Rows | None = None, *, texts: Sequence[str] = ()) -> str:
    """A table without the columns that are empty in every row.

    Args:
        columns: of the head.
        rows: cells, not escaped.
        marks: class names of the cells.
        texts: columns of running text, left-aligned and wrapped.
    """
    kept = [index for index in range(len(columns)) if any(row[index] for row in rows)]
    kinds = ["text" if column in texts else "" for column in columns]
    head = "".join(f'<th class="{kinds[index]}">{html.escape(columns[index])}</th>' for index in kept)
    body = []
    for number, row in enumerate(rows):
        classes = marks[number] if marks else [""] * len(columns)
        cells = (f'<td class="{classes[i]} {kinds[i]}">{html.escape(row[i])}</td>' for i in kept)
        body.append(f"<tr>{''.join(cells)}</tr>")
    return f'<div class="wide"><table><tr>{head}</tr>{"".join(body)}</table></div>'
