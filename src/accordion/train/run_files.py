"""Run files: YAML with the keys of `accordion train`. Every mistake is one sentence with the nearest valid name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accordion.errors import UsageError, check_installed, nearest
from accordion.options import Option

RUN_CONFIG = "config.yaml"  # in the run folder
# Keys of earlier versions. They are ignored, so that commands and run files that set them go on working.
IGNORED = frozenset({"run.report"})


def values_of_file(file: str, options: Sequence[Option]) -> dict[str, Any]:
    """Return `group.key` -> value, converted to the key's type, of a run file. `options`: all keys that exist. Raises
    `UsageError` if the file cannot be read, and for wrong keys and values."""
    known = {option.key: option for option in options}
    groups = sorted({key.partition(".")[0] for key in known})
    content = content_of(file)
    for name, group in content.items():
        if str(name) in known:
            continue
        if name not in groups:
            raise UsageError(f"run file {file!r}: key {str(name)!r} does not exist; {nearest(str(name), groups)}")
        if not isinstance(group, dict):
            raise UsageError(f"run file {file!r}: {name!r} is {group!r}; it takes keys of its own, `{name}: {{...}}`.")
        inner = [key.partition(".")[2] for key in known if key.startswith(f"{name}.")]
        wrong = next((key for key in group if key not in inner), None)
        if wrong is not None:
            raise UsageError(f"run file {file!r}: key '{name}.{wrong}' does not exist; {nearest(str(wrong), inner)}")
    return {key: known[key].converted(value, key) for key, value in flattened(content).items()}


def flattened(content: dict[str, Any]) -> dict[str, Any]:
    """Return `group.key` -> value for the content of a run file, which may have groups of keys next to keys `group.key`."""
    values: dict[str, Any] = {}
    for name, group in content.items():
        values |= {f"{name}.{key}": value for key, value in group.items()} if isinstance(group, dict) else {name: group}
    return values


def split(words: list[str]) -> tuple[list[str], list[str]]:
    """Split the words of a command line into (files given by `--config`, all other words), without the keys in `IGNORED` and
    their values. Raises `UsageError` if `--config` has no file."""
    files, flags = [], []
    rest = iter(words)
    for word in rest:
        name, equals, value = word.partition("=")
        if name.removeprefix("--") in IGNORED:
            if not equals:
                next(rest, None)
            continue
        if name != "--config":
            flags.append(word)
            continue
        value = value if equals else next(rest, "")
        if not value or value.startswith("--"):
            raise UsageError("option '--config' names no file.")
        files.append(value)
    return files, flags


def content_of(file: str) -> dict[str, Any]:
    """Return the content of a run file, without the keys in `IGNORED`: group -> key -> text, or `group.key` -> text. Raises
    `UsageError` if the file cannot be read, is no YAML or has no keys."""
    check_installed("a run file", ["yaml"], "train")
    import yaml  # type: ignore[import-untyped]  # here, because `accordion doctor` needs nothing else of the extras

    path = Path(file)
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            raise UsageError(f"run file {file!r} is no regular file, which it must be because it is read twice.")
        # All scalars as text, which is converted by the type of its key: YAML would read 010 as 8 and 1:30 as 90.
        content = yaml.load(path.read_text(encoding="utf-8"), yaml.BaseLoader)
    except FileNotFoundError:
        raise UsageError(f"run file {file!r} does not exist.") from None
    except OSError as error:
        raise UsageError(f"run file {file!r} cannot be read: {error.strerror}.") from None
    except (UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise UsageError(f"run file {file!r} is no YAML: {error}") from None
    if not isinstance(content, dict):
        raise UsageError(f"run file {file!r} holds no keys; `accordion train --print_config` prints a whole one.")
    for key in IGNORED:
        group, _, name = key.partition(".")
        content.pop(key, None)
        if isinstance(content.get(group), dict):
            content[group].pop(name, None)
    return content


def config_of_run(folder: Path) -> dict[str, Any]:
    """Return the configuration that a run wrote into `folder`, `group.key` -> text. Raises `UsageError` if it cannot be read."""
    path = folder / RUN_CONFIG
    if not path.is_file():
        raise UsageError(
            f"{str(folder)!r} is no folder of a run: it has no {RUN_CONFIG}; give the run.dir of `accordion train`."
        )
    return flattened(content_of(str(path)))
