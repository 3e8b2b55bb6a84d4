"""Parse a command line into a frozen dataclass: one flag per field, and for every mistake one sentence with the nearest flag.

The field `max_new_tokens` becomes `--max-new-tokens`; a bool field that defaults to False takes no value. A field `train` whose
type is a dataclass is a group: its `steps` becomes `--train.steps`, the key in a run file. A field made by `place` is
positional. The help of a flag is the text under its field, or next to its name under `Args:` in the docstring of the
dataclass. A dataclass may have a static method `parsers` that returns field name -> function that parses its text.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import math
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from itertools import pairwise
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn, TypeVar, get_args, get_origin, get_type_hints

from accordion.errors import UsageError, nearest

T = TypeVar("T")
SEVERAL = {tuple[float, float]: 2, tuple[float, float, float]: 3}
"""Tuple type of an option with several numbers, written as 0.9,0.95 -> how many numbers."""
KINDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
METAVARS = {int: "NUMBER", float: "NUMBER", str: "TEXT", bool: "true|false"}
TRUTHS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}  # as YAML has them
LONGEST = 60  # characters of a value in a message
LARGEST = 2**31 - 1  # fits into torch's seeds, sizes and counters
HELP_WIDTH = 110


def place(default: Any = MISSING) -> Any:
    """Return a dataclass field for a positional argument, which may be left out if the field has a `default`."""
    return field(default=default, metadata={"place": True})


def unread(make: Callable[[], Any]) -> Any:
    """Return a dataclass field that no flag sets, and whose default is the result of `make()`."""
    return field(default_factory=make, metadata={"unread": True})


def at_least(least: float, default: Any, most: float = LARGEST, **needs: Any) -> Any:
    """Return a dataclass field for a number from `least` to `most`. `needs`: other field -> allowed values (see `needing`)."""
    return field(default=default, metadata={"limits": (least, most), "needs": needs})


def needing(default: Any, **needs: Any) -> Any:
    """Return a dataclass field that may be set only if other fields have certain values, which `check_values` checks. `needs`:
    name of the other field -> its allowed values, or True if any value but an empty one will do."""
    return field(default=default, metadata={"needs": needs})


def check_values(group: Any, name: str) -> None:
    """Raise `UsageError` if a field of the dataclass instance `group` is outside of its limits, not finite, an empty text, or
    set without the fields that it needs. `name`: name of the group in messages, such as "train"."""
    for f in fields(group):
        key, value = f"{name}.{f.name}", getattr(group, f.name)
        if isinstance(value, float) and not math.isfinite(value):
            raise UsageError(f"{key} is {value}; it takes a number.")
        if "limits" in f.metadata:
            least, most = f.metadata["limits"]
            if not least <= value <= most:
                raise UsageError(f"{key} is {value}; it must be between {least} and {most}.")
        if isinstance(value, str) and (not value.strip() or "\0" in value):
            raise UsageError(f"{key} is empty; leave it out for its default.")
        for other, wanted in f.metadata.get("needs", {}).items() if value != f.default else ():
            current = getattr(group, other)
            if wanted is True and not current:
                raise UsageError(f"{key} is {value!r}, which needs {name}.{other}; give that too.")
            if wanted is not True and current not in wanted:
                raise UsageError(
                    f"{key} is {value!r}, which {name}.{other} {current!r} does not use; it is for {' or '.join(wanted)}."
                )


def check_limits(options: Any) -> None:
    """Raise `UsageError`, which names the flag, if a number in the dataclass instance `options` is outside of its limits."""
    for f in fields(options):
        value, (least, most) = getattr(options, f.name), f.metadata.get("limits", (0, 0))
        if "limits" in f.metadata and value is not None and not least <= value <= most:
            flag = "--" + f.name.replace("_", "-")
            raise UsageError(f"{flag} is {value}; it must be between {least:g} and {most:.10g}.")


def one_of(choices: Sequence[str], default: str | None) -> Any:
    """Return a dataclass field for one of `choices` that are known only at run time. Use `Literal` for fixed choices."""
    return field(default=default, metadata={"choices": tuple(choices)})


def read(kind: type[T], words: Sequence[str], prog: str, about: str) -> T | None:
    """Parse `words` into an instance of the dataclass `kind`. For --help, print the help and return None. `prog`, `about`: name
    and description of the command. Raises `UsageError` for a wrong flag or value."""
    values = values_of(kind, words, prog, about)
    return None if values is None else made(kind, values)


def values_of(
    kind: type[Any], words: Sequence[str], prog: str, about: str, more: Mapping[str, tuple[str, str]] | None = None
) -> dict[str, Any] | None:
    """Parse `words` and return key ("steps" or "train.steps") -> value of each option that is given. For --help, print the help
    and return None. `kind`: dataclass of the options. `prog`, `about`: name and description of the command. `more`: flags that
    the caller has removed from `words`, for the help: flag -> (name of its value, help). Raises `UsageError` for bad words."""
    options = options_of(kind)
    parser = _parser(options, prog, about, more or {}, with_texts=bool({"-h", "--help"} & set(words)))
    flags = [option.flag for option in options if not option.is_place]
    for flag in (word.partition("=")[0] for word in words):
        if flag.startswith("--") and flag not in (*flags, "--help"):
            hint = hint_of(flag, [*flags, *(more or {}), "--help"], prog)
            raise UsageError(f"option {flag!r} does not exist; {hint}")
    try:
        namespace, rest = parser.parse_known_args(words)
    except SystemExit:  # of --help
        return None
    if rest:
        if rest[0].endswith((".yaml", ".yml")) and "--config" in (more or {}):
            raise UsageError(f"{short(rest[0])!r} follows no option; a run file is given as --config {short(rest[0])}.")
        hint = hint_of("--" + rest[0].partition("=")[0].lstrip("-"), flags, prog)
        raise UsageError(f"unrecognized: {short(rest[0])!r} belongs to no option; {hint}")
    return vars(namespace)


def listed(subcommands: Mapping[str, str], prog: str) -> str:
    """Return help text with one line for each of `subcommands` (name -> what it does). `prog`: the command before the names."""
    return "\n".join(f"  {prog} {name:<12}{does}" for name, does in subcommands.items())


def check_subcommand(name: str, subcommands: Mapping[str, object], prog: str) -> None:
    """Raise `UsageError` if `name` is not a key of `subcommands`. `prog`: the command, for the message."""
    if name not in subcommands:
        raise UsageError(f"{prog} {short(name)!r} is an invalid choice; {nearest(name, subcommands)}")


def hint_of(flag: str, flags: Sequence[str], prog: str) -> str:
    near = get_close_matches(flag, flags, n=1, cutoff=0.5)
    return (f"did you mean {near[0]!r}? " if near else "") + f"{prog} --help lists all."


def made(kind: type[T], values: Mapping[str, Any]) -> T:
    """Return an instance of the dataclass `kind`. `values`: field name or "group.field" -> value; others get defaults."""
    hints = get_type_hints(kind)
    arguments = {key: value for key, value in values.items() if "." not in key}
    for name, group in hints.items():
        if is_dataclass(group):
            arguments[name] = group(**{k.partition(".")[2]: v for k, v in values.items() if k.startswith(f"{name}.")})  # type: ignore[operator]
    return kind(**arguments)


# -- the fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A dataclass field as an option of the command line, as `options_of` returns it; `converted` checks and converts a value.

    `key`: its name in a run file, such as "train.steps". `owner`: the dataclass of the field. `hint`: its type. `default`:
    MISSING if it is required. `group`: title of its group in the help; "" if in no group. `is_place`: True if positional.
    `choices`: the values that it takes; () if these are not listed. `parse`: function that converts its text; None: the text is
    converted by type.
    """

    key: str
    owner: type[Any]
    hint: Any
    default: Any
    group: str
    is_place: bool
    choices: tuple[str, ...]
    parse: Callable[[str], Any] | None

    @property
    def flag(self) -> str:
        # `from_`, for example, because `from` is a keyword.
        return "--" + (self.key if self.group else self.key.rstrip("_").replace("_", "-"))

    @property
    def kind(self) -> Any:
        """The type of the value without `| None`."""
        return next(t for t in get_args(self.hint) if t is not NoneType) if self.is_optional else self.hint

    @property
    def is_optional(self) -> bool:
        return isinstance(self.hint, UnionType)

    def converted(self, value: Any, name: str) -> Any:
        """Return `value`, text or parsed YAML, converted to the field's type. The text "null" becomes None if the field may
        be None; None itself is allowed only as the default. Raises `UsageError`, which names `name`, if `value` does not fit."""
        if value is None and self.default is not None:
            raise UsageError(f"{name} is null; leave it out for its default.")
        if value is None or (value == "null" and self.is_optional):
            return None
        if self.parse is not None and isinstance(value, str):
            return self.parse(value)
        if self.choices:
            if value not in self.choices:
                shown = short(str(value))
                raise UsageError(f"{name} {shown!r} is an invalid choice; {nearest(shown, list(self.choices))}")
            return value
        kind, shown = str if self.parse else self.kind, short(str(value))
        if kind in SEVERAL:
            return _several(value, SEVERAL[kind], name)
        if kind is bool and str(value).lower() in TRUTHS:
            return TRUTHS[str(value).lower()]
        fits = {int: (int, str), float: (int, float, str), str: (str,), bool: ()}[kind]
        try:
            if isinstance(value, bool) or not isinstance(value, fits):
                raise ValueError
            return kind(value)
        except (ValueError, OverflowError):  # Python refuses numbers of thousands of digits
            raise UsageError(f"{name} is {shown!r}; it takes {KINDS[kind]}.") from None


def _several(value: Any, count: int, name: str) -> tuple[float, ...]:
    """Return the `count` numbers in a text ("0.9,0.95") or list. Raises `UsageError` for others; `name` begins the message."""
    parts = value.split(",") if isinstance(value, str) else value
    try:
        if not isinstance(parts, list | tuple) or len(parts) != count or any(isinstance(p, bool) for p in parts):
            raise ValueError
        return tuple(float(part) for part in parts)
    except (ValueError, TypeError):
        raise UsageError(
            f"{name} is {short(str(value))!r}; it takes {count} numbers separated by commas, for example 0.9,0.95."
        ) from None


def options_of(kind: type[Any], prefix: str = "", group: str = "") -> list[Option]:
    """Return an `Option` for each field of the dataclass `kind`, except those made by `unread`. A field that is a dataclass is
    replaced by its own fields, unless `kind` has a parser for it. `prefix`: begins each key. `group`: the title in the help."""
    options: list[Option] = []
    hints, parsers = get_type_hints(kind), kind.parsers() if hasattr(kind, "parsers") else {}
    for f in fields(kind):
        hint = hints[f.name]
        if "unread" in f.metadata:
            continue
        if is_dataclass(hint) and f.name not in parsers:
            options += options_of(hint, f"{f.name}.", (hint.__doc__ or f.name).splitlines()[0].rstrip("."))  # type: ignore[arg-type]
            continue
        option = Option(
            key=prefix + f.name,
            owner=kind,
            hint=hint,
            default=f.default if f.default_factory is MISSING else f.default_factory(),
            group=group,
            is_place="place" in f.metadata,
            choices=get_args(hint) if get_origin(hint) is Literal else f.metadata.get("choices", ()),
            parse=parsers.get(f.name),
        )
        options.append(option)
    return options


@cache
def _texts(kind: type[Any]) -> Mapping[str, str]:
    """Return field name -> help of a dataclass and its bases: the string below a field, or under `Args:` in the docstring."""
    texts: dict[str, str] = {}
    for owner in reversed(kind.__mro__[:-1]):
        args = (owner.__doc__ or "").partition("Args:")[2]
        texts |= re.findall(r"^ {8}(\w+): (.*(?:\n {9,}\S.*)*)", args, re.MULTILINE)
        try:
            body = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0].body  # type: ignore[attr-defined]
        except (OSError, TypeError):  # no source file
            continue
        for item, below in pairwise(body):
            match item, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    texts[name] = text
    return {name: " ".join(text.split()) for name, text in texts.items()}


def short(value: str) -> str:
    return value if len(value) <= LONGEST else f"{value[:LONGEST]}... ({len(value):,} characters)"


# -- parsing


class _Parser(argparse.ArgumentParser):
    """Argument parser that raises `UsageError` for wrong arguments instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help.")


class _Set(argparse.Action):
    """Argparse action that stores `option.converted(value)`, which raises `UsageError` for a wrong value."""

    def __init__(self, option: Option, **more: Any) -> None:
        super().__init__(**more)
        self._option = option

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, flag: str | None = None) -> None:
        setattr(namespace, self.dest, self._option.converted(values, flag or self._option.key))


def _parser(
    options: Sequence[Option], prog: str, about: str, more: Mapping[str, tuple[str, str]], *, with_texts: bool
) -> _Parser:
    """Return a parser of `options` and of the flags `more`: flag -> (name of its value, or "" without one, help). The parsed
    result has only the flags that were given. `with_texts`: read the help of `options`, which takes time."""
    parser = _Parser(
        prog=prog,
        description=about if "\n" in about else textwrap.fill(about, HELP_WIDTH),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    for flag, (metavar, text) in more.items():
        if metavar:
            parser.add_argument(flag, metavar=metavar, help=text)
        else:
            parser.add_argument(flag, action="store_true", help=text)
    groups: dict[str, Any] = {"": parser}
    for option in options:
        if option.group not in groups:
            groups[option.group] = parser.add_argument_group(option.group)
        texts = _texts(option.owner) if with_texts else {}  # type: ignore[arg-type]
        _add(groups[option.group], option, texts.get(option.key.rpartition(".")[2], ""))
    return parser


def _add(group: Any, option: Option, text: str) -> None:
    text = text.replace("%", "%%")
    if option.default not in (None, "", MISSING, False) and option.parse is None:
        text += f" (default {option.default})".replace("%", "%%")
    if option.is_place:
        times = {} if option.default is MISSING else {"nargs": "?"}
        group.add_argument(option.key, action=_Set, option=option, help=text, **times)
    elif option.hint is bool and option.default is False:
        group.add_argument(option.flag, dest=option.key, action="store_true", help=text)
    else:
        several = ",".join(["NUMBER"] * SEVERAL.get(option.kind, 0))
        metavar = "|".join(option.choices) or several or METAVARS[str if option.parse else option.kind]
        required = option.default is MISSING
        group.add_argument(
            option.flag, dest=option.key, action=_Set, option=option, metavar=metavar, required=required, help=text
        )
