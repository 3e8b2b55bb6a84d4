"""A task on the command line of another command: `--task my_task.py --task.width 64`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field, make_dataclass

from accordion.options import values_of
from accordion.tasks.classes import options_kind, part_of
from accordion.tasks.loaded import LoadedTask, loaded


def split_task(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The options of a task among `words`, with their values, and all other words."""
    own, rest = list[str](), list[str]()
    into = rest
    for word in words:
        if word.startswith("--"):
            into = own if word.startswith("--task.") else rest
        into.append(word)
    return own, rest


def read_task(class_path: str, words: Sequence[str], prog: str) -> LoadedTask:
    """The task with the options in `words`. Raises `UsageError` for mistakes in them, `TaskError` for the user's code."""
    kind = options_kind("task", class_path)
    keys = make_dataclass("Keys", [("task", kind, field(default_factory=kind))])
    found = values_of(keys, words, prog, "") or {}
    values = {name.removeprefix("task."): value for name, value in found.items()}
    return loaded({"task": part_of("task", {**values, "class_path": class_path})})
