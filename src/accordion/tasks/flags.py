"""Read a task on the command line of other commands: `--task my_task.py --task.width 64`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field, make_dataclass

from accordion.options import values_of
from accordion.tasks.classes import options_kind, part_of
from accordion.tasks.loaded import LoadedTask, loaded


def split_task(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the words of a command line into (options `--task.*` with their values, all other words)."""
    task_words, others = list[str](), list[str]()
    into = others
    for word in words:
        if word.startswith("--"):
            into = task_words if word.startswith("--task.") else others
        into.append(word)
    return task_words, others


def read_task(class_path: str, words: Sequence[str], prog: str) -> LoadedTask:
    """Return the task at `class_path` with the options in `words`. Raises `UsageError`, or `TaskError` if its code fails."""
    kind = options_kind("task", class_path)
    keys = make_dataclass("Keys", [("task", kind, field(default_factory=kind))])
    flags = values_of(keys, words, prog, "") or {}
    values = {name.removeprefix("task."): value for name, value in flags.items()}
    return loaded({"task": part_of("task", {**values, "class_path": class_path})})
