"""Flags and run files: read by jsonargparse, every mistake told as one sentence with the nearest valid name."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from jsonargparse import ArgumentError, ArgumentParser

from accordion.config import nearest
from accordion.errors import UsageError
from accordion.train.config import LARGEST

# Octal numbers and those of base 60, as YAML 1.1 has them; to JSON, YAML 1.2 and people they are something else.
AMBIGUOUS = re.compile(r"[-+]?(0[0-9_]+|[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?)")
UNCLEAR = "readers take this for different numbers; write it without zeros in front, and without colons."
LONGEST = 60  # characters of a value in a message
OTHERS = ("--config", "--help", "--print_config")  # flags that are no keys


def parse(parser: ArgumentParser, words: list[str], keys: Sequence[str], numbers: Collection[str]) -> Mapping[str, Any]:
    """Parse `words` and the run files they name; flags win over files, wherever they stand.

    `keys`: every `group.key` that exists. `numbers`: those that take a number. Raises `UsageError` naming the key, what was
    given and the nearest valid name.
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
    for word, following in zip(flags, [*flags[1:], ""], strict=False):
        name, equals, value = word.removeprefix("--").partition("=")
        if name in numbers and AMBIGUOUS.fullmatch(value := value if equals else following):
            raise UsageError(f"{name} is {value!r}; {UNCLEAR}")
    try:
        parsed = parser.parse_args([word for file in files for word in ("--config", file)] + flags)
    except (ArgumentError, ValueError) as error:  # ValueError: Python converts no number of thousands of digits
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
        if path.exists() and not path.is_file() and not path.is_dir():
            raise UsageError(f"run file {file!r} is no regular file; it is read more than once, so write it to one.")
        text = path.read_text(encoding="utf-8")
        _check_scalars(file, yaml.compose(text, Loader=yaml.SafeLoader))
        content = yaml.safe_load(text)
    except FileNotFoundError:
        raise UsageError(f"run file {file!r} does not exist.") from None
    except OSError as error:
        raise UsageError(f"run file {file!r} cannot be read: {error.strerror}.") from None
    except (UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise UsageError(f"run file {file!r} is no YAML: {error}") from None
    except ValueError as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"run file {file!r} holds a value that cannot be read: {error}") from None
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


def _check_scalars(file: str, root: yaml.Node | None) -> None:
    """Raise `UsageError` for a key given twice, of which YAML takes the last, and for a number that can be read two ways."""
    seen: set[str] = set()
    for group, value in root.value if isinstance(root, yaml.MappingNode) else []:
        inner = value.value if isinstance(value, yaml.MappingNode) else []
        for name, held in [(str(group.value), value), *((f"{group.value}.{key.value}", held) for key, held in inner)]:
            if name in seen:
                raise UsageError(f"run file {file!r}: key {name!r} is given twice; say it once.")
            seen.add(name)
            if isinstance(held, yaml.ScalarNode) and held.style is None and AMBIGUOUS.fullmatch(held.value):
                raise UsageError(f"run file {file!r}: {name} is {_short(held.value)!r}; {UNCLEAR}")


def _short(value: str) -> str:
    return value if len(value) <= LONGEST else f"{value[:LONGEST]}... ({len(value):,} characters)"


KIND = {"int": "a whole number", "float": "a number", "str": "text", "bool": "true or false"}


def _explain(message: str) -> str:
    """jsonargparse's words about one value, as one sentence."""
    if message.startswith("unrecognized arguments: "):
        return f"{message.replace(' arguments', '', 1)}; a key is given as --train.steps 50 or --train.steps=50."
    key = re.search(r'Parser key "([\w.]+)"', message)
    value = re.search(r"(?:Got value|Given value): (.*)", message)
    wanted = re.search(r"<class '(\w+)'>|Literal\[(.*?)\]", message)
    if key and "integer string conversion" in message:
        return f"{key[1]} has more digits than any number here; at most {LARGEST}."
    if not (key and value and wanted):
        return message
    given = _short(value[1].strip())
    if wanted[1]:
        return f"{key[1]} is {given!r}; it takes {KIND.get(wanted[1], wanted[1])}."
    choices = re.findall(r"'([^']*)'", wanted[2])
    return f"{key[1]} {given!r} does not exist; {nearest(given, choices)}"
