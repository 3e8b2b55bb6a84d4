"""Read files that users name, if they are regular (a read of a pipe waits for its writer), and write small files atomically."""

from __future__ import annotations

import errno
import os
import stat
import uuid
from pathlib import Path
from typing import BinaryIO

NOT_REGULAR = "no regular file, and only those are read"


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a regular file for reading. Raises `OSError` if it cannot be opened, or is a pipe, a device or a folder."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, NOT_REGULAR, os.fspath(path))
    return os.fdopen(handle, "rb")


def read_text(path: str | os.PathLike[str]) -> str:
    """Return the text of a UTF-8 file. Raises `OSError` if it cannot be read or is no regular file, or `UnicodeDecodeError`."""
    with open_regular(Path(path)) as file:
        return file.read().decode("utf-8")


def write_whole(path: Path, text: str) -> None:
    """Write a small file atomically: a reader sees the old file, if there was one, or the whole new one. Creates its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def is_open_at(handle: int, path: str | os.PathLike[str]) -> bool:
    """Return True if `path` still names the file that is open as descriptor `handle`; False if `path` cannot be opened."""
    try:  # opened again, because network file systems look up a name only then
        other = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        return os.path.samestat(os.fstat(handle), os.fstat(other))
    finally:
        os.close(other)
