"""The folder of a path or a URL. `Local` and `Remote` have the same methods, except `replaced`; `Local` describes them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TypeAlias

from accordion.checkpoint.storage.local import Local, LocalReader
from accordion.checkpoint.storage.remote import Remote, RemoteReader
from accordion.errors import UsageError

NUM_TRIES = 3  # to find a folder, since between the two renames of a save none has its name
Folder: TypeAlias = Local | Remote
Reader: TypeAlias = LocalReader | RemoteReader


def folder_at(path: str | os.PathLike[str]) -> Folder:
    """Return the folder of a path, or of a URL such as `s3://bucket/run`, which needs the package fsspec. Raises `UsageError` for
    anything else, such as None or an empty string, and for a URL that fsspec cannot open."""
    if path is None:
        raise UsageError("the path is None; if `latest` returned it, there is no checkpoint yet.")
    text = os.fspath(path).removeprefix("file://") if isinstance(path, str | os.PathLike) else ""
    if not text or "\0" in text:
        raise UsageError(f'the path is {path!r}; pass a string or a pathlib.Path (the current folder is called ".").')
    return Remote.at(text) if "://" in text else Local(Path(os.path.abspath(text)))


def checkpoint_at(path: str | os.PathLike[str]) -> Folder:
    """Return the folder to read for the checkpoint at `path`: while a save replaces it, the hidden folder with the older one.
    Raises `UsageError` if `path` is neither a path nor a URL that fsspec can open."""
    return readable(folder_at(path))


def readable(folder: Folder) -> Folder:
    """Return the folder to read for the checkpoint in `folder`: `folder` itself, or the hidden folder with the older checkpoint
    if a save, running or killed, is replacing it."""
    if isinstance(folder, Local):
        for _ in range(NUM_TRIES):
            if os.path.lexists(folder.path):
                break
            if (old := folder.replaced()) is not None:
                return old
    return folder
