"""Print a page as tables."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table as RichTable

from accordion.pages.page import Page, Table

MANY = 3  # a cell with this many words is text, not a figure with its unit
PLAIN_WIDTH = 200  # width of tables if the output is no terminal


def show(page: Page) -> None:
    """Print the tables of `page` to stdout, then its notes. On a narrow terminal, long cells take several lines."""
    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    for table in page.tables:
        drawn, words = RichTable(title=table.title, title_justify="left", box=box.SIMPLE_HEAD), _words(table)
        for i, column in enumerate(table.columns):
            drawn.add_column(column, justify="left" if i == 0 or i in words else "right", overflow="fold")
        for row in table.rows:
            drawn.add_row(*row)
        console.print(drawn)
    for note in page.notes:
        console.print(note, style="dim", markup=False)


def _words(table: Table) -> set[int]:
    """Return the indices of the columns of text: those with a cell of `MANY` words or more, and those without any digit."""
    words = set()
    for i in range(len(table.columns)):
        cells = [row[i] for row in table.rows]
        is_text = any(sum(word.strip(",;:.").isalpha() for word in cell.split()) >= MANY for cell in cells)
        if is_text or not any(map(str.isdigit, "".join(cells))):
            words.add(i)
    return words
