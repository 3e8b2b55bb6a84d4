"""What a module of one layer shows of its parameters to code outside of its own forward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


class Registry(dict[str, Any]):
    """The `_parameters` of a module: a look at one of them is told first.

    `module.weight` looks here, `parameters()` and state dicts go through the items and are not heard.
    """

    __slots__ = ("_read",)

    def __init__(self, parameters: Mapping[str, Any], read: Callable[[], None]) -> None:
        super().__init__(parameters)
        self._read = read

    def __getitem__(self, name: str) -> Any:
        self._read()
        return super().__getitem__(name)
