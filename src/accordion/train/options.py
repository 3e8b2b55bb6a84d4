"""Flags and run files: read by jsonargparse, every mistake told as one sentence with the nearest valid name."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from jsonargparse import ArgumentError, ArgumentParser

from accordion.config import nearest
from accordion.errors import UsageError

OTHERS = ("--config", "--help", "--print_config")  # flags that are no keys


def parse(parser: ArgumentParser, words: list[str], keys: Sequence[str]) -> Mapping[str, Any]:
    """Parse `words` and the run files they name; flags win over files, wherever they stand.

    `keys`: every `group.key` that exists. Raises `UsageError` naming the key, what was given and the nearest valid
    name.
    """
    files, flags = _split_files(words)
    known = [*(f"--{key}" for key in keys), *(f"--{key.partition('.')[0]}" for key in keys)]
    for word in flags:
        name = word.partition("=")[0]
        if name.startswith("--") and name not in (*known, *OTHERS):
            near = get_close_matches(name, [*known, *OTHERS], n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise UsageError(f"option {name!r} does not exist; {hint}{parser.prog} --help lists all.")
    for file in files:
        _check_file(file, keys)
    try:
        parsed = parser.parse_args([word for file in files for word in ("--config", file)] + flags)
    except ArgumentError as error:
        raise UsageError(_explain(str(error))) from None
    return dict(parsed.as_dict())


def given(words: list[str], keys: Sequence[str]) -> frozenset[str]:
    """The keys that flags and run files in `words` give a value, whichever it is; `parse` has found no mistake in them."""
    files, flags = _split_files(words)
    found = {name for word in flags if (name := word.removeprefix("--").partition("=")[0]) in keys}
    for file in files:
        for name, group in yaml.safe_load(Path(file).read_text(encoding="utf-8")).items():
            found |= {f"{name}.{key}" for key in group} if isinstance(group, dict) else {str(name)}
    return frozenset(found)


def _split_files(words: list[str]) -> tuple[list[str], list[str]]:
    """The values of `--config`, and all other words."""
    files, flags = [], []
    rest = iter(words)
    for word in rest:
        name, equals, value = word.partition("=")
        if name != "--config":
            flags.append(word)
            continue
        value = value if equals else next(rest, "")
        if not value or value.startswith("--"):
            raise UsageError("option '--config' names no file.")
        files.append(value)
    return files, flags


def _check_file(file: str, keys: Sequence[str]) -> None:
    path = Path(file)
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"run file {file!r} does not exist.") from None
    except OSError as error:
        raise UsageError(f"run file {file!r} cannot be read: {error.strerror}.") from None
    except (UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise UsageError(f"run file {file!r} is no YAML: {error}") from None
    if not isinstance(content, dict):
        raise UsageError(f"run file {file!r} holds no keys; `accordion train --print_config` prints a whole one.")
    groups = sorted({key.partition(".")[0] for key in keys})
    for name, group in content.items():
        if "." in str(name) and str(name) in keys:
            continue
        if name not in groups:
            raise UsageError(f"run file {file!r}: key {str(name)!r} does not exist; {nearest(str(name), groups)}")
        if not isinstance(group, dict):
            raise UsageError(f"run file {file!r}: {name!r} is {group!r}; it takes keys of its own, `{name}: {{...}}`.")
        inner = [key.partition(".")[2] for key in keys if key.startswith(f"{name}.")]
        for key in group:
            if key not in inner:
                raise UsageError(f"run file {file!r}: key '{name}.{key}' does not exist; {nearest(str(key), inner)}")


KIND = {"int": "a whole number", "float": "a number", "str": "text", "bool": "true or false"}


def _explain(message: str) -> str:
    """jsonargparse's words about one value, as one sentence."""
    if message.startswith("unrecognized arguments: "):
        return f"{message.replace(' arguments', '', 1)}; a key is given as --train.steps 50 or --train.steps=50."
    key = re.search(r'Parser key "([\w.]+)"', message)
    value = re.search(r"(?:Got value|Given value): (.*)", message)
    wanted = re.search(r"<class '(\w+)'>|Literal\[(.*?)\]", message)
    if not (key and value and wanted):
        return message
    given = value[1].strip()
    if wanted[1]:
        return f"{key[1]} is {given!r}; it takes {KIND.get(wanted[1], wanted[1])}."
    choices = re.findall(r"'([^']*)'", wanted[2])
    return f"{key[1]} {given!r} does not exist; {nearest(given, choices)}"
