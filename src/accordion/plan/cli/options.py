"""The words of a command line as a frozen dataclass: one flag a field, every mistake one sentence with the nearest flag."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn, TypeVar, get_args, get_origin, get_type_hints

from accordion.config import nearest
from accordion.errors import UsageError

T = TypeVar("T")
KINDS = {int: "a whole number", float: "a number", str: "text"}


class _Parser(argparse.ArgumentParser):
    """Raises instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        wrong = re.fullmatch(r"argument (\S+): (.*)", message, re.DOTALL)
        flag, what = (wrong[1], wrong[2]) if wrong else ("", message)
        if what.startswith("expected"):
            raise UsageError(f"option {flag!r} is given no value; {self.prog} --help tells what it takes.")
        if what.startswith("ignored explicit argument"):
            raise UsageError(f"option {flag!r} takes no value; write it alone.")
        raise UsageError(what)


def read(kind: type[T], words: Sequence[str], prog: str, about: str) -> T | None:
    """`words` as a `kind`; None where they asked for help, which is printed then. Raises `UsageError`.

    A field `gpu_memory_gib` is `--gpu-memory-gib`; one of `bool` takes no value. What a flag is for stands under `Args:` in the
    docstring of `kind`.
    """
    parser, flags = _parser(kind, prog, about), [flag_of(f.name) for f in fields(kind)]  # type: ignore[arg-type]
    spelled = [_spelled(word) for word in words]
    for word in spelled:
        flag = word.partition("=")[0]
        if flag.startswith("--") and flag not in (*flags, "--help"):
            raise UsageError(f"option {flag!r} does not exist; {nearest(flag, flags)}")
    try:
        found, rest = parser.parse_known_args(spelled)
    except SystemExit:  # of --help
        return None
    if rest:
        raise UsageError(f"{rest[0]!r} belongs to no option; {prog} --help lists all.")
    return kind(**vars(found))


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def _spelled(word: str) -> str:
    """Underscores in the name of an option are hyphens."""
    return re.sub(r"^--[\w-]+", lambda flag: flag.group().replace("_", "-"), word)


def _parser(kind: type[Any], prog: str, about: str) -> _Parser:
    parser = _Parser(prog=prog, description=about, allow_abbrev=False)
    hints, told = get_type_hints(kind), _told(kind)
    for field in fields(kind):
        flag, hint = flag_of(field.name), hints[field.name]
        assert field.default is not MISSING, f"{flag} has no default"
        default = "" if field.default in (None, "") else f" (default {field.default})"
        if hint is bool:
            parser.add_argument(flag, action="store_true", help=told[field.name])
        else:
            name = "|".join(get_args(hint)) if get_origin(hint) is Literal else KINDS[_plain(hint)].split()[-1].upper()
            parser.add_argument(
                flag, type=_reader(flag, hint), default=field.default, metavar=name, help=told[field.name] + default
            )
    return parser


def _plain(hint: Any) -> Any:
    """The type beside None."""
    return next(t for t in get_args(hint) if t is not NoneType) if isinstance(hint, UnionType) else hint


def _reader(flag: str, hint: Any) -> Any:
    def of_choices(text: str) -> str:
        choices = list(get_args(hint))
        if text not in choices:
            raise argparse.ArgumentTypeError(f"{flag} {text!r} does not exist; {nearest(text, choices)}")
        return text

    def of_kind(text: str) -> Any:
        try:
            return _plain(hint)(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{flag} is {text!r}; it takes {KINDS[_plain(hint)]}.") from None

    return of_choices if get_origin(hint) is Literal else of_kind


def _told(kind: type[Any]) -> Mapping[str, str]:
    """What the docstring says of each field; a line that goes on is indented deeper."""
    text = (kind.__doc__ or "").partition("Args:")[2]
    found = re.findall(r"^ {8}(\w+): (.*(?:\n {9,}\S.*)*)", text, re.MULTILINE)
    return {name: " ".join(said.split()).replace("%", "%%") for name, said in found}
