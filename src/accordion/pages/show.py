"""Print a page as tables, and make the parts of self-contained HTML files."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table as RichTable

from accordion.pages.page import Page, Table

if TYPE_CHECKING:
    import plotly.graph_objects as go  # type: ignore[import-untyped]

MANY = 3  # a cell with this many words is text, not a figure with its unit
PLAIN_WIDTH = 200  # width of tables if the output is no terminal
HEAD = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 1em auto; max-width: 70em; padding: 0 .8em; color: #222 }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums }} .wide {{ overflow-x: auto }}
th, td {{ border-bottom: 1px solid #ddd; padding: .25em .6em; text-align: right }}
th:first-child, td:first-child {{ text-align: left; min-width: 7.5em }} th.words, td.words {{ text-align: left }}
li {{ color: #555 }} h1 {{ font-size: 1.4em }} h2 {{ font-size: 1.1em }}
h1, h2, li {{ overflow-wrap: anywhere }} td {{ overflow-wrap: break-word }}
@media (max-width: 40em) {{ td {{ overflow-wrap: anywhere }}
  .cards tr {{ display: block; padding: .5em 0; border-bottom: 1px solid #ddd }}
  .cards tr:first-child {{ display: none }} .cards td {{ display: block; border: 0; padding: .05em 0; text-align: left }}
  .cards td:first-child {{ font-weight: 600 }} .cards td:empty {{ display: none }}
  .cards td:not(:first-child)::before {{ content: attr(data-column) ": "; color: #777 }} }}
</style></head><body><h1>{title}</h1>"""
# Without buttons, which would cover the titles on a phone; a double click zooms out.
CONFIG = {"responsive": True, "displayModeBar": False}


def show(page: Page) -> None:
    """Print the page's tables and notes. If the screen is too narrow for a table, print each of its rows as a list."""
    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    for table in page.tables:
        drawn, words = RichTable(title=table.title, title_justify="left", box=box.SIMPLE_HEAD), _words(table)
        for i, column in enumerate(table.columns):
            drawn.add_column(column, justify="left" if i == 0 or i in words else "right", no_wrap=i == 0)
        for row in table.rows:
            drawn.add_row(*row)
        # rich breaks cells only between words, and those of the first column not at all.
        columns = list(zip(table.columns, *table.rows, strict=True))
        parts = [
            [part for cell in column for part in (cell.split() if i else [cell])] for i, column in enumerate(columns)
        ]
        if sum(max(map(len, column), default=0) + 3 for column in parts) < console.width:
            console.print(drawn)
            continue
        console.print(table.title, style="italic", markup=False)
        for name, *cells in table.rows:
            console.print(f"  {name}", style="bold", markup=False)
            for column, cell in zip(table.columns[1:], cells, strict=True):
                if cell:
                    console.print(f"    {column}: {cell}", markup=False)
    for note in page.notes:
        console.print(note, style="dim", markup=False)


def _words(table: Table) -> set[int]:
    """Return the indices of the columns to align left: those in which a cell has `MANY` words, or no cell has a digit."""
    words = set()
    for i in range(len(table.columns)):
        cells = [row[i] for row in table.rows]
        is_text = any(sum(word.strip(",;:.").isalpha() for word in cell.split()) >= MANY for cell in cells)
        if is_text or not any(map(str.isdigit, "".join(cells))):
            words.add(i)
    return words


def drawn(charts: Sequence[go.Figure]) -> list[str]:
    """Return plotly charts as HTML; the first one includes plotly's script."""
    return [
        chart.to_html(config=CONFIG, full_html=False, include_plotlyjs=i == 0, div_id=f"chart-{i}")
        for i, chart in enumerate(charts)
    ]


def laid_out(chart: go.Figure, title: str, unit: str, height: int = 420) -> go.Figure:
    """Set title, unit of the y axis and height of `chart`, with the legend below so that it fits a phone. Return `chart`."""
    chart.update_layout(
        title=title, template="plotly_white", height=height, margin={"l": 60, "r": 20, "t": 50, "b": 70},
        legend={"orientation": "h", "y": -0.3, "yanchor": "top"}, yaxis_title=unit or None,
    )  # fmt: skip
    return chart


def html_table(table: Table) -> str:
    """Return the table as HTML, below its title; on a phone, each row of more than two columns is shown as a card."""
    words = _words(table)
    kinds = [' class="words"' if i in words else "" for i in range(len(table.columns))]
    head = "".join(f"<th{k}>{escape(c)}</th>" for c, k in zip(table.columns, kinds, strict=True))
    rows = "".join(
        "<tr>"
        + "".join(
            f'<td{k} data-column="{escape(column)}">{escape(cell)}</td>'
            for column, cell, k in zip(table.columns, row, kinds, strict=True)
        )
        + "</tr>"
        for row in table.rows
    )
    kind = ' class="cards"' if len(table.columns) > 2 else ""
    return f'<h2>{escape(table.title)}</h2><div class="wide"><table{kind}><tr>{head}</tr>{rows}</table></div>'
