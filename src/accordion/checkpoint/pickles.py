"""Pickles that somebody else wrote, read without running anything of them: what they name becomes a record.

Memory is at most 90 times the pickle, time goes with its length: every opcode does a bounded amount of work, nothing is copied,
and nothing is hashed but plain keys. The opcodes are those that torch and `pickle` write for state dicts and metadata.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from accordion.errors import CheckpointError

FREE_PICKLE = 2**19  # bytes of a pickle that any file may have
DATA_PER_BYTE = 128  # beyond it: bytes of tensors for each byte of the pickle that describes them
LONGEST_KEY = 64  # items of a tuple that is a key


@dataclass(frozen=True, slots=True)
class Name:
    """A name of a module that a pickle refers to; nothing is imported."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(slots=True, eq=False)
class Record:
    """What a pickle wants made: `what` called with `args`, then given `state`. It stays as it is."""

    what: Any
    args: Any
    state: Any = None

    def get(self, key: str) -> Any:
        """An attribute of the object that it stands for. Raises `KeyError`."""
        return self.state[key]


@dataclass(frozen=True, slots=True, kw_only=True)
class Meaning:
    """What a kind of pickle may say. `allowed`: whether it may refer to a name; `called`: what a call of a name gives.

    `stored`: what a persistent id stands for.
    """

    allowed: Callable[[Name], bool]
    called: Callable[[Any, Any], Any] = Record
    stored: Callable[[Any], Any] | None = None


def most_pickle(data_bytes: int) -> int:
    """How many bytes of a pickle may describe so many bytes of tensors, that memory stays near that of the tensors."""
    return FREE_PICKLE + data_bytes // DATA_PER_BYTE


def read_pickle(data: bytes, meaning: Meaning) -> Any:
    """The value of a pickle. Raises `CheckpointError` for names that are not allowed, and for whatever is no sound pickle."""
    try:
        return _Machine(meaning).run(data)
    except CheckpointError:
        raise
    except Exception as error:  # whatever broken bytes meet
        raise CheckpointError(f"its pickle is damaged: {type(error).__name__}: {str(error)[:200]}.") from error


def is_bounded(value: Any, most: int) -> bool:
    """Whether lists, tuples and dicts in `value` hold `most` items in all: one that holds itself has no end."""
    left = [value]
    while left:
        item = left.pop()
        most -= 1
        if most < 0 or (isinstance(item, dict | list | tuple) and len(item) > most):
            return False
        if isinstance(item, dict):
            left += item.values()
        elif isinstance(item, list | tuple):
            left += item
    return True


PLAIN = {
    *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"),
    *("SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "SHORT_BINSTRING"),
}
SINGLE: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_TUPLE": tuple,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
}
TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class _Machine:
    """Owns the stack, the places of marks on it, and the memo."""

    def __init__(self, meaning: Meaning) -> None:
        self.meaning = meaning
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self.names: dict[tuple[str, str], Name] = {}

    def run(self, data: bytes) -> Any:
        stack, memo = self.stack, self.memo
        for opcode, arg, _ in pickletools.genops(data):
            word = opcode.name
            if word in PLAIN:
                stack.append(arg)
            elif word in SINGLE:
                stack.append(SINGLE[word]())
            elif word in ("BINGET", "LONG_BINGET"):
                stack.append(memo[arg])  # type: ignore[index]
            elif word in ("MEMOIZE", "BINPUT", "LONG_BINPUT"):
                memo[len(memo) if arg is None else arg] = stack[-1]
            elif word == "MARK":
                self.marks.append(len(stack))
            elif word in TUPLES:
                stack.append(tuple(self._taken(len(stack) - TUPLES[word])))
            elif word == "STOP":
                return stack.pop()
            elif word not in ("PROTO", "FRAME"):
                self._act(word, arg)
        raise CheckpointError("its pickle has no end.")

    def _taken(self, at: int) -> list[Any]:
        """Take what lies on the stack from `at` on."""
        low = self.marks[-1] if self.marks else 0
        if at < low:
            raise CheckpointError("its pickle takes more than it gave.")
        items = self.stack[at:]
        del self.stack[at:]
        return items

    def _to_mark(self) -> list[Any]:
        return self._taken(self.marks.pop())

    def _pair(self) -> list[Any]:
        return self._taken(len(self.stack) - 2)

    def _act(self, word: str, arg: Any) -> None:
        stack = self.stack
        if word == "TUPLE":
            stack.append(tuple(self._to_mark()))
        elif word in ("APPEND", "APPENDS"):
            items = self._to_mark() if word == "APPENDS" else self._taken(len(stack) - 1)
            _of_kind(stack[-1], list).extend(items)
        elif word in ("SETITEM", "SETITEMS"):
            items = self._to_mark() if word == "SETITEMS" else self._pair()
            _fill(_of_kind(stack[-1], dict), items)
        elif word in ("GLOBAL", "STACK_GLOBAL"):
            module, name = arg.split(" ", 1) if word == "GLOBAL" else self._pair()
            stack.append(self._name(_of_kind(module, str), _of_kind(name, str)))
        elif word in ("REDUCE", "NEWOBJ"):
            what, args = self._pair()
            stack.append(self.meaning.called(_of_kind(what, Name), _of_kind(args, tuple)))
        elif word == "BUILD":
            (state,) = self._taken(len(stack) - 1)
            if isinstance(stack[-1], Record):
                stack[-1].state = state
            else:
                _of_kind(stack[-1], dict)  # attributes of an OrderedDict, as state dicts have
        elif word == "BINPERSID" and self.meaning.stored is not None:
            (key,) = self._taken(len(stack) - 1)
            stack.append(self.meaning.stored(key))
        else:
            raise CheckpointError(f"its pickle has the opcode {word}, which is not allowed.")

    def _name(self, module: str, name: str) -> Name:
        if (module, name) not in self.names:
            made = Name(module, name)
            if not self.meaning.allowed(made):
                raise CheckpointError(f"its pickle names {str(made)[:200]}, which is not allowed.")
            self.names[module, name] = made
        return self.names[module, name]


def _of_kind(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise CheckpointError(f"its pickle has a {type(value).__name__} where a {kind.__name__} is due.")
    return value


def _fill(into: dict[Any, Any], items: list[Any]) -> None:
    if len(items) % 2:
        raise CheckpointError("its pickle has a key without a value.")
    for key, value in zip(items[::2], items[1::2], strict=True):
        if not _is_key(key):
            raise CheckpointError(f"its pickle has a {type(key).__name__} as a key.")
        if key in into:
            raise CheckpointError(f"its pickle has the key {ascii(key)[:100]} twice.")
        into[key] = value


def _is_key(key: Any) -> bool:
    """Whether its hash is found at once: a tuple of tuples of tuples may have one that takes for ever."""
    if isinstance(key, tuple):
        return len(key) <= LONGEST_KEY and not any(isinstance(item, tuple) for item in key) and all(map(_is_key, key))
    return key is None or isinstance(key, str | bytes | int | float | Name | Record)
