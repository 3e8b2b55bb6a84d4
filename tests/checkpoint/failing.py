"""Functions that fail, in place of broken disks and storage."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock


@contextmanager
def failing(of: Any, name: str, number: int, fails: Callable[..., bool] = lambda *args: True) -> Iterator[None]:
    """Context manager in which `of.name(*args)` raises `OSError` with this error number if `fails(*args)`."""
    function = getattr(of, name)

    def call(*args: Any, **options: Any) -> Any:
        if fails(*args):
            raise OSError(number, os.strerror(number))
        return function(*args, **options)

    with mock.patch.object(of, name, call):
        yield
