"""`accordion plan`: says what was planned before with the same options, or plans."""

from __future__ import annotations

import json
from pathlib import Path

from accordion.errors import UsageError
from accordion.options import read
from accordion.pages.page import Page
from accordion.plan.cli import cache
from accordion.plan.cli.options import ABOUT, Options

NOT_FOUND = 1  # exit code if nothing fits


def run(words: list[str]) -> int:
    """The subcommand. Returns the exit code: 1 if nothing fits."""
    own: list[str] = []
    if any(word.startswith("--task") for word in words):
        from accordion.tasks.flags import split_task

        own, words = split_task(words)
    o = read(Options, words, "accordion plan", ABOUT)
    if o is None:
        return 0
    if o.gpu == "table":
        from accordion.plan.cli.pages import of_table

        show(of_table())
        return 0
    if o.html is not None:
        check_place(Path(o.html))
    place = cache.place_of(o)
    answer = cache.read(place) if o.html is None and not own else None
    if answer is None:
        from accordion.plan.cli.planned import planned  # with torch and transformers, which an answer does not need

        answer = planned(o, own)
        cache.write(place, answer)
    if o.json:
        print(json.dumps(answer.data, indent=1))
    else:
        show(answer.page)
    return 0 if answer.fits else NOT_FOUND


def show(page: Page) -> None:
    """On the screen; what draws there is not needed for JSON, and takes a while to import."""
    from accordion.pages import show

    show.show(page)


def check_place(path: Path) -> None:
    """Before a search that takes a minute: the file can be written. Raises `UsageError`."""
    folder = path.absolute().parent
    if path.is_dir() or not folder.is_dir():
        found = "is a folder" if path.is_dir() else f"has no folder {str(folder)!r} to lie in"
        raise UsageError(f"--html {str(path)!r} {found}; name a file.")
