"""`accordion plan`: make the plan that the options describe, print it, and cache it in the user's cache folder."""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from accordion.files import read_text
from accordion.models.llama import PUBLISHED
from accordion.options import read
from accordion.pages.page import Page, Table
from accordion.pages.show import show
from accordion.plan.cli.options import ABOUT, Options
from accordion.plan.cli.pages import of_plan
from accordion.plan.cli.planned import planned
from accordion.tasks.loaded import split_task
from accordion.version import VERSION

NOT_FOUND = 1  # exit code if nothing fits


def run(words: list[str]) -> int:
    """Print the plan that the arguments `words` describe, and return the exit code: 0, or 1 if nothing fits. A plan that is not
    in the cache is made and, unless it is of a task or with --html, written to it. With --html, also write a page that draws
    the step. With --help, print only the help. Raises `UsageError` for wrong arguments, `TaskError` if a task's code fails."""
    task_words: list[str] = []
    if any(word.startswith("--task") for word in words):
        task_words, words = split_task(words)
    o = read(Options, words, "accordion plan", ABOUT)
    if o is None:
        return 0
    place = place_of(o)
    answer = cached(place)
    if answer is None:
        plan = planned(o, task_words)
        data = {**plan.as_dict(), **({"free_bytes": plan.free_bytes} if o.reserve_gb else {})}
        answer = SavedAnswer(fits=plan.fits, data=data, page=of_plan(plan, shows_free=o.reserve_gb > 0))
        save(place, answer)
        if o.html is not None:
            plan.trace().html(o.html)
    if o.json:
        print(json.dumps(answer.data, indent=1))
    else:
        show(answer.page)
    return 0 if answer.fits else NOT_FOUND


# -- the cache, for named models


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedAnswer:
    """The output of `accordion plan`: `data` for `--json`, `page` for the screen. `fits`: False if no configuration fits."""

    fits: bool
    data: dict[str, Any]
    page: Page


def place_of(o: Options) -> Path | None:
    """Return the path of the cache file for the options `o`, which may be missing; None if the plan is not cached: for a task,
    with `--html`, or if `o.model` is not a preset, a JSON file, or a folder with a config.json. The path depends on the
    options, the model's configuration, the versions of packages, and Accordion's sources, but not on `--json`."""
    folder, config = Path(o.model), ""
    with suppress(OSError, ValueError):
        config = read_text(folder / "config.json" if folder.is_dir() else folder)
    if o.task is not None or o.html is not None or (o.model not in PUBLISHED and not config.lstrip().startswith("{")):
        return None
    package = Path(__file__).parents[2]
    asked = (
        replace(o, json=False),
        config,
        {name: version(name) for name in ("torch", "transformers") if find_spec(name) is not None},
        VERSION,
        sorted((str(p), p.stat().st_mtime_ns) for p in package.rglob("*.py")),
    )
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "accordion"
    return cache / "plans" / f"{hashlib.sha256(repr(asked).encode()).hexdigest()[:32]}.json"


def cached(place: Path | None) -> SavedAnswer | None:
    """Return the answer in the file `place`; None if `place` is None, or if the file is missing or broken."""
    if place is None:
        return None
    try:
        saved = json.loads(read_text(place))
        tables = [Table(**table) for table in saved["page"].pop("tables")]
        return SavedAnswer(fits=saved["fits"], data=saved["data"], page=Page(**saved["page"], tables=tables))
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def save(place: Path | None, answer: SavedAnswer) -> None:
    """Write `answer` to the file `place` atomically, and create its folder if it is missing. Do nothing if `place` is None. An
    error of the file system is ignored."""
    if place is None:
        return
    with suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        part = place.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(asdict(answer)), encoding="utf-8")
        part.replace(place)
