"""Names of a checkpoint and of the hidden paths next to it: check if a save may use a path, lock it, remove leftovers.

Next to the checkpoint `NAME`: the file `.NAME.lock` is locked by a job that saves or removes `NAME`. A folder `.NAME.HEX.tmp`,
with 8 hexadecimal digits, is being written or removed. The folder `.NAME.old` is the older checkpoint while a save replaces it;
if the new one is never completed, the next save gives the older one its name back.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import shutil
import time
from contextlib import suppress
from pathlib import Path

from accordion.checkpoint.format import MANIFEST
from accordion.errors import CheckpointError, some_of
from accordion.files import is_open_at

RANK_FILE = re.compile(r"rank-\d{5,}\.safetensors")
# NFS renames a file that is removed while a process has it open to .nfs and a number.
OF_SAVES = re.compile(rf"{RANK_FILE.pattern}|\.nfs[0-9a-f]+")
HIDDEN = re.compile(r"\.(.+)\.([0-9a-f]{8}\.tmp|old)")
LOCK_TIMEOUT_S = 10.0  # a process that a killed job forked, such as a loader's worker, may keep its lock for 5 s
POLL_S = 0.05
SHOWN = 5  # names that a message lists


def hidden(path: Path, ending: str) -> Path:
    """Return the path `.NAME.ENDING` in the parent folder of `path`, for a checkpoint `NAME` at `path`."""
    return path.with_name(f".{path.name}.{ending}")


def replaced(text: str) -> str | None:
    """Return `NAME` if `text` is `.NAME.old`, the name of a checkpoint while a save replaces it; else None."""
    match = HIDDEN.fullmatch(text)
    return match[1] if match and match[2] == "old" else None


def drafts(folder: Path) -> list[tuple[str, Path]]:
    """Return (`NAME`, path) of each folder `.NAME.HEX.tmp` in `folder`, of running jobs and of jobs that were killed."""
    matches = filter(None, map(HIDDEN.fullmatch, sorted(_names(folder))))
    return [(match[1], folder / match[0]) for match in matches if match[2] != "old"]


def leftovers(folder: Path) -> list[tuple[str, Path]]:
    """Return (`NAME`, path) of each folder `.NAME.HEX.tmp` in `folder` that a killed job has left: no running job has locked
    `NAME`. Empty ones, and those with files of other programs, are left out."""
    left = [(name, path) for name, path in drafts(folder) if _names(path) and not foreign_in(path)]
    return [(name, path) for name, path in left if not is_locked(folder / name)]


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []


# -- may a save take a name?


def check_free(path: Path) -> None:
    """Raise `CheckpointError`, naming what is at `path`, unless a save may create or replace the folder `path`: if nothing is
    there, or an empty folder, or a folder with a checkpoint, damaged or not, and no other files; but no link or mount point."""
    if what := _occupied(path):
        raise CheckpointError(f"{path} {what}; pass another path, a folder in it for example, or move it away.")


def _occupied(path: Path) -> str:
    """Return what is at `path`, as the end of a sentence; "" if a save may create or replace the folder `path`."""
    if path.is_symlink():
        return f"is a link to {os.readlink(path)}, and a save replaces none"
    try:
        names = os.listdir(path)
    except FileNotFoundError:
        return ""
    except NotADirectoryError:
        if not os.path.lexists(path):  # one of the folders above it is a file
            raise
        return "exists and is no checkpoint but a file"
    if os.path.ismount(path):
        return "is a mount point, which cannot be renamed"
    if names and not (MANIFEST in names and any(map(RANK_FILE.fullmatch, names))):
        return f"exists and is no checkpoint, it holds {some_of(sorted(names), SHOWN)}"
    others = foreign_in(path)
    return f"holds {some_of(sorted(others), SHOWN)} beside a checkpoint, which a save would remove" if others else ""


def foreign_in(path: Path) -> list[str]:
    """Return the names in the folder `path` that no save writes; [] if there is no such folder."""
    return [text for text in _names(path) if text != MANIFEST and not OF_SAVES.fullmatch(text)]


# -- lock a name, remove a folder


class NameLock:
    """A file lock on the name of a checkpoint, for a job that saves or removes the checkpoint. `take` locks the name, until
    `release` or the job's exit. On a file system without locks, `take` excludes no other job."""

    def __init__(self, file: Path, handle: int) -> None:
        self._file, self._handle = file, handle

    @classmethod
    def take(cls, path: Path, timeout_s: float = 0.0) -> NameLock:
        """Lock the name of the checkpoint at `path` on all machines that share its file system's locks; return the lock. Raises
        `CheckpointError` if another job still has the lock after `timeout_s`, `OSError` if no lock file can be created."""
        file, deadline = hidden(path, "lock"), time.monotonic() + timeout_s
        while True:
            handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
            if not _locks(handle):
                holder = os.pread(handle, 300, 0).decode(errors="replace") or "another job"
                os.close(handle)
                if time.monotonic() >= deadline:
                    raise CheckpointError(
                        f"{path} is being saved or removed by {holder}; no other job may save under this name."
                    )
                time.sleep(POLL_S)
            elif is_open_at(handle, file):
                with suppress(OSError):  # the disk may be full; the text is only for an error message
                    os.truncate(handle, 0)
                    os.write(handle, f"process {os.getpid()} on {os.uname().nodename}".encode())
                return cls(file, handle)
            else:  # the job that had the lock has removed its file meanwhile
                os.close(handle)

    def release(self) -> None:
        """Unlock the name and remove the lock file. Further calls do nothing."""
        handle, self._handle = self._handle, -1
        if handle >= 0:
            # Removed before it is unlocked, so that a job that has opened it meanwhile opens it again.
            with suppress(OSError):
                os.unlink(self._file)
            os.close(handle)


def is_locked(path: Path) -> bool:
    """Return True if a job is saving or removing the checkpoint at `path`."""
    try:
        handle = os.open(hidden(path, "lock"), os.O_RDWR)
    except OSError:
        return False
    try:
        return not _locks(handle)
    finally:
        os.close(handle)


def _locks(handle: int) -> bool:
    """Try to lock an open file. Return False if another job has locked it, else True, also on a file system without locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EWOULDBLOCK, errno.EACCES)
    return True


def remove(path: Path) -> None:
    """Rename a folder to `.NAME.HEX.tmp`, unless it has such a name, then delete it, so that no half deleted checkpoint is read.
    Raises `OSError` if this fails."""
    match = HIDDEN.fullmatch(path.name)
    if match is None or match[2] == "old":
        name = path.with_name(match[1]) if match else path
        path = path.rename(hidden(name, f"{secrets.token_hex(4)}.tmp"))
    shutil.rmtree(path)


def remove_quietly(path: Path) -> None:
    """Remove the folder at `path` if it exists, and ignore errors: a later save tries again."""
    with suppress(OSError):
        if os.path.lexists(path):
            remove(path)
