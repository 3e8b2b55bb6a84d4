"""`accordion plan`: print the cached plan for the same options, or make one."""

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
    """Run `accordion plan` with the arguments `words` and print the plan. Returns the exit code: 0, or 1 if nothing fits."""
    task_words: list[str] = []
    if any(word.startswith("--task") for word in words):
        from accordion.tasks.loaded import split_task

        task_words, words = split_task(words)
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
    answer = cache.read(place) if o.html is None and not task_words else None
    if answer is None:
        from accordion.plan.cli.planned import planned  # imports torch, which a cached plan does not need

        answer = planned(o, task_words)
        cache.write(place, answer)
    if o.json:
        print(json.dumps(answer.data, indent=1))
    else:
        show(answer.page)
    return 0 if answer.fits else NOT_FOUND


def show(page: Page) -> None:
    from accordion.pages import show  # slow to import, and not needed for JSON

    show.show(page)


def check_place(path: Path) -> None:
    """Raise `UsageError` if `path` is a folder, or if the folder above it is missing. Called before the search, which is slow."""
    folder = path.absolute().parent
    if path.is_dir() or not folder.is_dir():
        problem = "is a folder" if path.is_dir() else f"cannot be written: there is no folder {str(folder)!r}"
        raise UsageError(f"--html {str(path)!r} {problem}; name a file.")
