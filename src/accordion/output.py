"""Output of the commands: streams that do not raise if their reader is gone, and no warnings of imports that nobody uses."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from typing import Any, TextIO


class _Dropping(io.FileIO):
    """A file that silently drops data which cannot be written, because the reader is gone or the disk is full."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or len(data)
        except OSError:
            return len(data)


def lasting_stream(stream: TextIO) -> TextIO:
    """Return a new stream to the file of `stream` whose writes never raise; `stream` itself if it has no file (notebooks)."""
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
    """Context manager that replaces `sys.stdout` and `sys.stderr` by streams to the same files, whose writes never raise."""
    with redirect_stdout(lasting_stream(sys.stdout)), redirect_stderr(lasting_stream(sys.stderr)):
        yield


def quiet_imports() -> None:
    """Make torchao and `torch.utils._pytree` log only errors in this process. transformers imports torchao, which would warn of
    kernels for devices that are not here."""
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
