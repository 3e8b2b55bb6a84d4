"""The table of DeepSpeed's keys in keys.toml: used, not needed here, or not supported, and why. Written as a page of the docs.

`python -m accordion.compat.deepspeed > docs/compat_deepspeed.md` writes the page anew.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any


class Use(Enum):
    """How a key is treated."""

    USED = "used"
    NOT_NEEDED = "not needed"
    REFUSED = "not supported"


@dataclass(frozen=True, slots=True)
class Key:
    """One row of the table.

    Args:
        takes: the values of a used key: words, `bool`, `float` for 0 and more, or a whole number for it and more.
        off: further values of a refused key that ask for nothing.
        asked: the key of `accordion train` that answers an `"auto"`, which otherwise the caller must.
        auto: the value of `"auto"` without an answer: the default of transformers' TrainingArguments.
        follows: what `"auto"` follows from, if from other keys.
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
        """Read one row of keys.toml."""
        (use,) = (use for use in Use if use.name.lower() in row)
        others: dict[str, Any] = {k: tuple(value) if isinstance(value, list) else value for k, value in row.items()}
        why, takes = others.pop(use.name.lower()), others.pop("takes", None)
        takes = bool if takes == "bool" else float if takes == "number" else takes
        return cls(use, why, takes, **others)


PARTS: dict[str, dict[str, Key]] = {
    title: {names: Key.of(row) for names, row in part.items()}
    for title, part in tomllib.loads(Path(__file__).with_name("keys.toml").read_text(encoding="utf-8")).items()
}
_NAMED = [(name, key) for part in PARTS.values() for names, key in part.items() for name in names.split()]
KEYS: Mapping[str, Key] = {name.removesuffix(".*"): key for name, key in _NAMED}
SECTIONS = {name.removesuffix(".*") for name, _ in _NAMED if name.endswith(".*")}


def render() -> str:
    """Return the table as Markdown."""
    lines = [
        "# DeepSpeed's configuration, key by key",
        "",
        "Written by `python -m accordion.compat.deepspeed > docs/compat_deepspeed.md`; a test compares. How to use a",
        "file: [compat.md](compat.md).",
        "",
        "A key that is not here is refused with the nearest that is. `name.*`: the keys below it share the row. A key",
        'that is not supported is accepted if it asks for nothing: `false`, `null`, `"enabled": false`, or its value',
        "in brackets.",
    ]
    for title, part in PARTS.items():
        lines += ["", f"## {title}", "", "| key | | how, or why |", "|---|---|---|"]
        for names, key in part.items():
            off = f" ({', '.join(str(value).lower() for value in key.off)})" if key.off else ""
            lines.append(f"| {', '.join(f'`{n}`' for n in names.split())} | {key.use.value}{off} | {key.why} |")
    lines += ["", '## `"auto"`', "", "| key | becomes |", "|---|---|"]
    for name, key in KEYS.items():
        becomes = [f"`{key.asked}` in `accordion train`, else what `read(auto=)` gives"] if key.asked else []
        becomes += [f"{'else ' if key.asked else ''}`{key.auto}`"] if key.auto is not None else []
        becomes += [key.follows] if key.follows else []
        lines += [f"| `{name}` | {', '.join(becomes)} |"] if becomes else []
    lines += ["", 'Keys that are not needed may be `"auto"` too. Any other `"auto"` is refused.', ""]
    return "\n".join(lines)
