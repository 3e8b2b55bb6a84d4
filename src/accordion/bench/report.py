"""Where a page goes: tables on the screen, JSON, and one HTML file that needs nothing beside it."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path

import plotly.graph_objects as go  # type: ignore[import-untyped]
from plotly.io import to_html  # type: ignore[import-untyped]
from rich import box
from rich.console import Console
from rich.table import Table as RichTable

from accordion.bench.page import Chart, Page, Table

PLAIN_WIDTH = 200  # of tables where there is no terminal to ask
HEAD = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 70em; padding: 0 1em; color: #222 }}
table {{ border-collapse: collapse; margin: 1em 0; font-variant-numeric: tabular-nums }}
th, td {{ border-bottom: 1px solid #ddd; padding: .25em .7em; text-align: right }}
th:first-child, td:first-child {{ text-align: left }} li {{ color: #555 }}
</style></head><body><h1>{title}</h1>"""


def show(page: Page) -> None:
    """Print the page's notes and tables."""
    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    for table in page.tables:
        drawn = RichTable(title=table.title, title_justify="left", box=box.SIMPLE_HEAD)
        for i, column in enumerate(table.columns):
            drawn.add_column(column, justify="left" if i == 0 else "right", no_wrap=i == 0)
        for row in table.rows:
            drawn.add_row(*row)
        console.print(drawn)
    for note in page.notes:
        console.print(note, style="dim", markup=False)


def write(page: Page, folder: Path) -> tuple[Path, Path]:
    """Write `<name>.json` and `<name>.html` into `folder`; their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    data, html = folder / f"{page.name}.json", folder / f"{page.name}.html"
    data.write_text(json.dumps(page.data, indent=1) + "\n", encoding="utf-8")
    html.write_text(as_html(page), encoding="utf-8")
    return data, html


def as_html(page: Page) -> str:
    """The whole page, plotly's script included once."""
    notes = "".join(f"<li>{escape(note)}</li>" for note in page.notes)
    charts = [
        to_html(figure(chart), full_html=False, include_plotlyjs=i == 0, div_id=f"chart-{i}")
        for i, chart in enumerate(page.charts)
    ]
    machine = page.data.get("machine") or page.data.get("comparison", {}).get("machine", {})
    about = _html_table(Table(title="machine", columns=["", ""], rows=[[k, str(v)] for k, v in machine.items()]))
    body = "".join([f"<ul>{notes}</ul>", *charts, *map(_html_table, page.tables), about])
    return HEAD.format(title=escape(page.title)) + body + "</body></html>\n"


def figure(chart: Chart) -> go.Figure:
    """Bars side by side or on each other, or lines over a logarithmic number of ranks."""
    drawn = go.Figure()
    for name, points in chart.series.items():
        x, y = list(points), list(points.values())
        if chart.kind == "lines":
            drawn.add_trace(go.Scatter(name=name, x=[float(v) for v in x], y=y, mode="lines+markers"))
        else:
            drawn.add_trace(go.Bar(name=name, x=x, y=y))
    drawn.update_layout(title=chart.title, yaxis_title=chart.unit, template="plotly_white", height=420)
    drawn.update_yaxes(rangemode="tozero")
    if chart.kind == "lines":
        drawn.update_xaxes(type="log", title="ranks")
    else:
        drawn.update_layout(barmode="stack" if chart.kind == "stacked" else "group")
    return drawn


def _html_table(table: Table) -> str:
    head = "".join(f"<th>{escape(c)}</th>" for c in table.columns)
    rows = "".join("<tr>" + "".join(f"<td>{escape(c)}</td>" for c in row) + "</tr>" for row in table.rows)
    return f"<h2>{escape(table.title)}</h2><table><tr>{head}</tr>{rows}</table>"
