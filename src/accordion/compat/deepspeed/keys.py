"""Read keys.toml, which says how each key of DeepSpeed's configuration is treated."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any


class Use(Enum):
    USED = "used"
    NOT_NEEDED = "not needed"
    REFUSED = "not supported"


@dataclass(frozen=True, slots=True)
class Key:
    """One row of keys.toml: how a key of DeepSpeed's configuration is treated.

    Args:
        why: how the key is used, or why it is not.
        takes: values of a used key: a tuple of words, `bool`, `float` (at least 0), or an int, the least whole number.
        off: values of a refused key that are accepted, because they ask for nothing.
        asked: the key of `accordion train` whose value replaces an `"auto"`. Other callers of `read` have to pass a value,
            unless `auto` is set.
        auto: the value of an `"auto"` if the caller passes none: the default of transformers' TrainingArguments.
        follows: the other keys that decide an `"auto"`, in words.
    """

    use: Use
    why: str
    takes: Any = None
    off: tuple[Any, ...] = ()
    asked: str = ""
    auto: Any = None
    follows: str = ""

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Key:
        (use,) = (use for use in Use if use.name.lower() in row)
        others: dict[str, Any] = {k: tuple(value) if isinstance(value, list) else value for k, value in row.items()}
        why, takes = others.pop(use.name.lower()), others.pop("takes", None)
        takes = bool if takes == "bool" else float if takes == "number" else takes
        return cls(use, why, takes, **others)


# Title of a table in keys.toml -> dotted keys -> `Key`. Dotted keys that are treated alike are one entry, joined by spaces.
PARTS: dict[str, dict[str, Key]] = {}
for _title, _table in tomllib.loads(Path(__file__).with_name("keys.toml").read_text(encoding="utf-8")).items():
    _prefix = _table.pop("prefix", "")  # of each dotted key in the table
    PARTS[_title] = {
        " ".join(f"{_prefix}{name}" for name in names.split()): Key.of(row) for names, row in _table.items()
    }
_NAMED = [(name, key) for part in PARTS.values() for names, key in part.items() for name in names.split()]
KEYS: Mapping[str, Key] = {name.removesuffix(".*"): key for name, key in _NAMED}
SECTIONS = {name.removesuffix(".*") for name, _ in _NAMED if name.endswith(".*")}
