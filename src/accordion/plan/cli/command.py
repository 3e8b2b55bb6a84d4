"""`accordion plan`: print the cached plan for the same options, or make one."""

from __future__ import annotations

import json

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
    place = cache.place_of(o)
    answer = cache.read(place) if not task_words else None
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
