"""What lies at the name of a checkpoint and hidden beside it: whether a save may take it, and whose rests they are.

Beside `NAME`, each with a word of its own: `.NAME.WORD.tmp` is being written, `.NAME.WORD.old` was replaced, `.NAME.WORD.gone` is
being removed. Whoever removes one renames it first: of two that rename it one fails, so that nobody writes into, or gives a
name to, what another removes.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import shutil
from contextlib import suppress
from pathlib import Path

from accordion.checkpoint.format import MANIFEST, parse
from accordion.errors import CheckpointError, UsageError
from accordion.files import NOT_REGULAR, is_open_at, open_regular

LOCK = ".lock"  # in a folder that is being written; a crash leaves the file behind, and not the lock
RANK_FILE = re.compile(r"rank-\d{5,}\.safetensors")
OF_NETWORKS = re.compile(r"\.nfs[0-9a-f]+")  # what NFS makes of a file that is removed while somebody has it open
BEGINS = re.compile(rb'\s*\{\s*"schema"\s*:\s*\d')
HIDDEN = re.compile(r"\.(.+?)\.(?:[0-9a-f]{8}\.)?(tmp|old|gone)")
LONGEST_NAME = 240  # bytes: file systems take 255, of which a hidden folder's name uses 15 for itself
SHOWN = 5  # names that a message lists


def hidden(path: Path, word: str, kind: str) -> Path:
    """A hidden folder of the checkpoint at `path`."""
    return path.with_name(f".{path.name}.{word}.{kind}")


def beside(path: Path, kind: str) -> list[Path]:
    """All hidden folders of that kind that belong to the checkpoint at `path`."""
    return [path.with_name(text) for text in _names(path.parent) if _whose(text) == (path.name, kind)]


def rests(folder: Path) -> list[tuple[str, Path]]:
    """What in `folder` was to be removed and is still there, of which checkpoint; nothing else is in it."""
    named = [(_whose(text), folder / text) for text in sorted(_names(folder))]
    return [(whose[0], path) for whose, path in named if whose and whose[1] == "gone" and not foreign_in(path)]


def replaced(text: str) -> str | None:
    """The checkpoint whose replaced one lies under this hidden name."""
    whose = _whose(text)
    return whose[0] if whose and whose[1] == "old" else None


def _whose(text: str) -> tuple[str, str] | None:
    found = HIDDEN.fullmatch(text)
    return (found[1], found[2]) if found else None


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []


# -- whether a save may take a name


def check_name(path: Path) -> None:
    """Raise `UsageError` where no folder can have this name, or none can be written beside it."""
    if not path.name:
        raise UsageError(f"{path} is the root of a file system; name a folder in it.")
    if (num_bytes := len(os.fsencode(path.name))) > LONGEST_NAME:
        raise UsageError(
            f"the name {path.name[:20]}... has {num_bytes} bytes, and a checkpoint's at most {LONGEST_NAME}; "
            "pass a shorter one."
        )


def check_free(path: Path) -> None:
    """Raise `CheckpointError`, saying what lies there, unless a save may take `path`.

    It may where there is nothing, an empty folder, or a checkpoint of ours and nothing else. A damaged one is ours too.
    """
    if path.is_symlink():
        raise CheckpointError(
            f"{path} is a link to {os.readlink(path)}, and a save replaces none; pass the path that it stands for, or remove it."
        )
    try:
        held = os.listdir(path)
        os.stat(path)  # what another job has renamed before we listed it may have been half removed then
    except FileNotFoundError:
        return
    except NotADirectoryError:
        if not os.path.lexists(path):
            raise
        raise CheckpointError(
            f"{path} exists and is no checkpoint but a file; pass another path or remove it."
        ) from None
    if os.path.ismount(path):
        raise CheckpointError(f"{path} is a mount point, which cannot be renamed; pass a folder in it.")
    if _is_current(path):
        raise CheckpointError(f"{path} is the current folder, which a save would replace; pass a folder in it.")
    if not held:
        return
    if MANIFEST not in held:
        raise CheckpointError(
            f"{path} exists and is no checkpoint, it holds {_listed(held)}; pass another path or remove it."
        )
    others = foreign_in(path)
    if others:
        raise CheckpointError(
            f"{path} holds {_listed(others)} beside a checkpoint, which a save would remove; move it away or pass another path."
        )
    if not _is_ours(path, held):
        raise CheckpointError(
            f"{path} exists and is no checkpoint, its {MANIFEST} is another program's; pass another path or remove it."
        )


def foreign_in(path: Path) -> list[str]:
    """Names in a folder that no save has written."""
    own = (MANIFEST, LOCK)
    return [
        text
        for text in _names(path)
        if text not in own and not RANK_FILE.fullmatch(text) and not OF_NETWORKS.fullmatch(text)
    ]


def _is_ours(path: Path, held: list[str]) -> bool:
    """Whether the manifest is one of ours, be it damaged or of another version."""
    try:
        with open_regular(path / MANIFEST) as file:
            text = file.read()
        parse(text)
    except FileNotFoundError:
        return True  # another job has removed it, or is replacing it
    except CheckpointError:
        return BEGINS.match(text) is not None and any(map(RANK_FILE.fullmatch, held))
    except OSError as error:
        if error.strerror == NOT_REGULAR:
            return False
        raise
    return True


def _is_current(path: Path) -> bool:
    try:
        return os.path.samefile(path, os.curdir)
    except FileNotFoundError:  # this process has none any more
        return False


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(sorted(names)[:SHOWN]) + more


# -- who writes, and removing


def lock(folder: Path) -> int | None:
    """Have others see that the save that writes `folder` lives; gives the handle to `unlock`.

    None where another save takes the folder for a rest in this moment: it has another name now, or soon will. Raises `OSError`.
    """
    try:
        handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    except FileNotFoundError:
        return None
    if _locks(handle) and is_open_at(handle, folder / LOCK):
        return handle
    os.close(handle)
    return None


def unlock(folder: Path, handle: int) -> None:
    """The inverse of `lock`: what is complete holds no such file."""
    with suppress(FileNotFoundError):
        os.unlink(folder / LOCK)
    os.close(handle)


def lives(folder: Path) -> bool:
    """Whether a save is writing it, on any machine whose locks this file system knows."""
    try:
        handle = os.open(folder / LOCK, os.O_RDWR)
    except OSError:
        return False
    try:
        return not _locks(handle)
    finally:
        os.close(handle)


def _locks(handle: int) -> bool:
    """Lock it, unless somebody else has. On a file system without locks nobody has."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EWOULDBLOCK, errno.EACCES)
    return True


def remove_rest(folder: Path) -> None:
    """Remove what a killed save was writing, if this can be done now; a save that lives keeps it.

    The lock is held until the folder has its other name: a save that has just made it sees in `lock` that it is gone.
    """
    try:
        handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError:  # a full disk: it is to go all the more
        remove_quietly(folder)
        return
    try:
        if not _locks(handle):
            return
        doomed = hide(folder)
    except OSError:  # another save was faster
        return
    finally:
        os.close(handle)
    remove_quietly(doomed)


def remove(path: Path) -> None:
    """Remove a folder and all in it, of which nothing is seen any more once this has begun. Raises `OSError`."""
    whose = _whose(path.name)
    shutil.rmtree(path if whose and whose[1] == "gone" else hide(path))


def hide(path: Path) -> Path:
    """Rename a folder to one of those that are being removed, and give that. Raises `OSError`."""
    whose = _whose(path.name)
    doomed = hidden(path.with_name(whose[0]) if whose else path, secrets.token_hex(4), "gone")
    path.rename(doomed)
    return doomed


def remove_quietly(path: Path) -> None:
    """`remove`, where it is no matter who does it, or whether it can be done now."""
    with suppress(OSError):
        remove(path)
