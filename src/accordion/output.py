"""Standard output that neither a reader who is gone, a full disk nor a narrow encoding turns into an error."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from typing import Any, TextIO


class _Dropping(io.FileIO):
    """A file descriptor of others, which stays open; what cannot be written to it is dropped."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or len(data)
        except OSError:
            return len(data)


def lasting_stream(stream: TextIO) -> TextIO:
    """Return a stream to the file of `stream`, or `stream` itself if that is no file, as in a notebook."""
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    try:
        raw = _Dropping(stream.fileno(), "w", closefd=False)
    except (OSError, ValueError):
        return stream
    with suppress(OSError):
        stream.flush()
    return io.TextIOWrapper(io.BufferedWriter(raw), stream.encoding, "backslashreplace", line_buffering=True)


@contextmanager
def lasting_output() -> Iterator[None]:
    """Make `sys.stdout` and `sys.stderr` last, so that no print ends a run; those that are closed go nowhere."""
    for handle in range(3):
        try:
            os.fstat(handle)
        except OSError:  # else the next file that is opened gets this number, and what C code and other processes print
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    with redirect_stdout(lasting_stream(sys.stdout)), redirect_stderr(lasting_stream(sys.stderr)):
        yield
