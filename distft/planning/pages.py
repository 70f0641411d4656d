"""The report of a plan as one HTML file, its pictures inside."""

from __future__ import annotations

import base64
import html
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from distft.planning.plots import draw
from distft.planning.reasons import reasons

if TYPE_CHECKING:
    from distft.planner import Plan

_STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:1100px;margin:2em auto;padding:0 1em}
table{border-collapse:collapse;font-size:13px;width:100%}td,th{padding:.3em .6em;text-align:right;
border-bottom:1px solid #ddd}td:first-child,th:first-child,td:nth-last-child(-n+2),
th:nth-last-child(-n+2){text-align:left}tr.no{color:#888}img{width:100%}"""


def page(plan: Plan, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return the report: what is best and why, the table, the pictures, what it assumes.

    Collective: none.
    """
    with tempfile.TemporaryDirectory() as folder:
        picture = draw(plan, Path(folder) / "plan.png").read_bytes()
    body = [
        f"<h1>{_text(_title(plan))}</h1>",
        _list(reasons(plan.best)),
        "<h2>All strategies</h2>",
        _table(head, rows),
        '<h2>Memory, time, wires</h2><img alt="memory, time and roofline of each strategy" '
        f'src="data:image/png;base64,{base64.b64encode(picture).decode()}">',
        "<h2>What this rests on</h2>",
        _list(plan.notes),
        "<h2>The others, one by one</h2>",
        *(f"<h3>{_text(option.label)}</h3>{_list(reasons(option))}" for option in plan.options[1:]),
    ]
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{_text(_title(plan))}</title>'
        f'<meta name="viewport" content="width=device-width">'
        f"<style>{_STYLE}</style><body>{''.join(body)}</body></html>\n"
    )


def _title(plan: Plan) -> str:
    label, number = plan.best.label, len(plan.options)
    return (
        f"{label}, first of {number}" if plan.best.fits else f"None of {number} fits; {label} first"
    )


def _text(value: str) -> str:
    return html.escape(value)


def _list(sentences: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{_text(each)}</li>' for each in sentences)}</ul>"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = "".join(f"<th>{_text(name)}</th>" for name in head)
    lines = [
        f'<tr class="{row[1]}">{"".join(f"<td>{_text(cell)}</td>" for cell in row)}</tr>'
        for row in rows
    ]
    return f"<table><tr>{cells}</tr>{''.join(lines)}</table>"
