"""`accordion plan`: make the plan that the options describe, and print it."""

from __future__ import annotations

import json

from accordion.options import read
from accordion.pages.show import show
from accordion.plan.cli import cache
from accordion.plan.cli.options import ABOUT, Options
from accordion.plan.cli.pages import of_plan
from accordion.plan.cli.planned import planned
from accordion.tasks.loaded import split_task

NOT_FOUND = 1  # exit code if nothing fits


def run(words: list[str]) -> int:
    """Print the plan that the arguments `words` describe, from the cache if it is there; a new plan is written to the cache, and
    with --html to a page. With --help, print the help alone. Returns the exit code: 0, or 1 if nothing fits. Raises `UsageError`
    for wrong arguments, and `TaskError` if the code of a task fails."""
    task_words: list[str] = []
    if any(word.startswith("--task") for word in words):
        task_words, words = split_task(words)
    o = read(Options, words, "accordion plan", ABOUT)
    if o is None:
        return 0
    place = cache.place_of(o)
    answer = cache.read(place)
    if answer is None:
        plan = planned(o, task_words)
        data = {**plan.as_dict(), **({"free_bytes": plan.free_bytes} if o.reserve_gb else {})}
        answer = cache.SavedAnswer(fits=plan.fits, data=data, page=of_plan(plan, shows_free=o.reserve_gb > 0))
        cache.write(place, answer)
        if o.html is not None:
            plan.trace().html(o.html)
    if o.json:
        print(json.dumps(answer.data, indent=1))
    else:
        show(answer.page)
    return 0 if answer.fits else NOT_FOUND
