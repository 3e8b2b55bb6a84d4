"""Which checkpoints of a folder are good, which is the newest, and removing old ones."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch.distributed as dist

from accordion.checkpoint import claims
from accordion.checkpoint.format import MANIFEST
from accordion.checkpoint.reading import TURNS, faults_in, look_into, steady
from accordion.checkpoint.storage.folders import Folder, Local, folder_at, readable
from accordion.errors import CheckpointError, UsageError

NUMBER = re.compile(r"(\d+)$")
BEST = "best"  # what `accordion train` keeps by name, however many of the others stay
NO_CHECKPOINTS = ("lost+found",)  # what a file system has in its first folder, for its administrator alone
NEVER = 2**63  # when something was written of which no time is known: it may be the newest


def latest(folder: str | os.PathLike[str]) -> str | None:
    """Path of the newest complete checkpoint in `folder`, None if there is no checkpoint at all.

    Newest by the number at the end of its name, then by time. What decides is the manifests and the sizes of the files that
    they list; no file points anywhere. `accordion checkpoint verify` reads every byte. Newer ones that are damaged are
    passed over with a warning that names them. Raises `CheckpointError` where one that may be the newest cannot be read, or
    where there are checkpoints and all are damaged.
    """
    found = newest(folder)
    if found.path is None and found.passed_over:
        raise CheckpointError(f"in {folder_at(folder)} {found.words()}")
    if found.passed_over and not (dist.is_initialized() and dist.get_rank()):
        warnings.warn(found.words(), stacklevel=2)
    return found.path


@dataclass(frozen=True, slots=True, kw_only=True)
class Newest:
    """`path`: the newest complete checkpoint of a folder, None if there is none.

    `passed_over`: what is wrong with each newer one, the newest first; each names its path. Where there are some and `path` is
    None, all checkpoints are damaged, and to begin anew would be a mistake.
    """

    path: str | None
    passed_over: tuple[str, ...]

    def words(self) -> str:
        """What was passed over and how to go on, for a log or an error; "" where nothing was."""
        wrong = "; ".join(text.rstrip(".") for text in self.passed_over)
        if not wrong:
            return ""
        if self.path is None:
            return f"there are checkpoints, and none is complete: {wrong}. Mend them, or move them away to begin anew."
        return f"{self.path} is the newest complete checkpoint, newer ones are damaged: {wrong}. Mend them, or move them away."


def newest(folder: str | os.PathLike[str]) -> Newest:
    """What `latest` gives, with what it passed over and without a warning: for those who log in their own way.

    Raises `CheckpointError` where a checkpoint that may be the newest cannot be read: nothing that cannot be read is taken for
    absent.
    """
    at, listed, wrong = folder_at(folder), None, list[str]()
    for _ in range(TURNS):
        candidates, wrong = _by_age(at), []
        for one in reversed(candidates):
            try:
                why = _fault(one)
            except OSError as error:
                raise CheckpointError(
                    f"{one} cannot be read ({error.strerror or error}), and it may be the newest checkpoint of {at}; "
                    "try again, or pass the path of the one to take."
                ) from error
            if why is None:
                return Newest(path=str(one), passed_over=tuple(wrong))
            wrong += [why] if why else []
        names = list(map(str, candidates))
        if names == listed:
            break
        listed = names  # else a job may have saved there, and removed what was the newest when it was listed
    return Newest(path=None, passed_over=tuple(wrong))


def before(folder: Folder) -> str | None:
    """The newest complete checkpoint beside `folder` that is older; None if there is none, or it cannot be found."""
    with suppress(CheckpointError, UsageError, OSError):
        older = _by_age(_split(folder)[0])
        names = list(map(str, older))
        for one in reversed(older[: names.index(str(folder))] if str(folder) in names else []):
            with suppress(OSError):
                if _fault(one) is None:
                    return str(one)
    return None


def _split(folder: Folder) -> tuple[Folder, str]:
    """The folder that holds `folder`, and the name of `folder` in it."""
    parent, _, name = str(folder).rpartition("/")
    return folder_at(parent or "/"), name


def _by_age(folder: Folder, wanted: Callable[[str], bool] = lambda name: True) -> list[Folder]:
    """Return the folders in `folder`, those that hold an older checkpoint first; only their names and times were read."""
    try:
        names = [name for name in folder.folders() if name not in NO_CHECKPOINTS and wanted(name)]
    except NotADirectoryError:
        raise CheckpointError(f"{folder} is a file, and no folder of checkpoints.") from None
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error.strerror or error}.") from error

    def age(one: Folder) -> tuple[int, int, str]:
        number, written_at = NUMBER.search(str(one)), NEVER
        with suppress(OSError):
            written_at = readable(one).written_at(MANIFEST)
        return int(number[1]) if number else -1, written_at, str(one)

    return sorted(map(folder.inside, names), key=age)


def _fault(folder: Folder) -> str | None:
    """`fault_of` the checkpoint that has the name of `folder`, which may be another one with each look."""
    return steady(partial(readable, folder), fault_of, lambda why: why is not None)


def fault_of(folder: Folder) -> str | None:
    """None if it is a complete checkpoint: its manifest is sound, and its files are all there with their sizes.

    Else what is wrong, "" where nothing of a checkpoint is there, or not any more. Raises `OSError` where it cannot be read.
    """
    ours = False
    try:
        held = folder.sizes()
        ours = any(map(claims.RANK_FILE.fullmatch, held))
        if MANIFEST not in held and not isinstance(folder, Local):
            return ""  # a save is writing it, or was killed
        files = look_into(folder)
        ours = True
        files.check_sizes()
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except CheckpointError as error:
        return str(error) if ours else ""
    return None


def prune(folder: str | os.PathLike[str], keep: int, *, dry: bool = False) -> list[str]:
    """Remove all but the `keep` newest good checkpoints in `folder`; returns which. With `dry` it only says which.

    What is not complete is neither counted nor removed: a save may be writing it; nor are links, nor what holds other files
    too. What an earlier removal has left is removed. Before any is removed one of those that stay is read, every byte; where
    none of them is as it was written, more of the older ones stay, up to one that is. Raises `UsageError` for `keep` below 1,
    `CheckpointError` where one cannot be removed.
    """
    check_keep(keep)
    if not keep:
        raise UsageError(f"keep is {keep}; the last good checkpoint is never removed, so it takes 1 or more.")
    at = folder_at(folder)
    good = _good(_by_age(at, lambda name: name != BEST))
    doomed = good[:-keep]
    if doomed:
        sound = next((i for i in reversed(range(len(good))) if not faults_in(good[i][0])), 0)
        doomed = doomed[:sound]
    left = [path for _, path in claims.leftovers(at.path)] if isinstance(at, Local) else []
    for one, mark in [] if dry else doomed:
        _remove(str(one), partial(one.remove, mark))
    for path in [] if dry else left:
        _remove(str(path), partial(claims.remove, path))
    return [*(str(one) for one, _ in doomed), *map(str, left)]


def check_keep(keep: int) -> None:
    """Raise `UsageError` unless it is a number of checkpoints."""
    if not isinstance(keep, int) or isinstance(keep, bool) or keep < 0:
        raise UsageError(f"keep is {keep!r}; it takes 1 or more, a number of checkpoints, and for a save 0 keeps all.")


def prune_before(saved: Folder, keep: int) -> None:
    """Remove old checkpoints beside `saved` whose names differ from its in the number at their end alone.

    The `keep` newest of them stay, and so do `saved` and all that are newer. Raises `CheckpointError` where one that is to go
    cannot be removed; a later call tries again, and says no more of it.
    """
    try:
        at, own = _split(saved)
        stem = NUMBER.sub("", own)
        good = _good(_by_age(at, lambda name: NUMBER.sub("", name) == stem))
        names = [str(one) for one, _ in good]
        older = good[: names.index(str(saved)) if str(saved) in names else 0]
        for name, path in claims.leftovers(at.path) if isinstance(at, Local) else []:
            if NUMBER.sub("", name) == stem:
                claims.remove_quietly(path)
        for one, mark in older[: max(0, len(good) - keep)]:
            _remove(str(one), partial(one.remove, mark))
    except (CheckpointError, OSError) as error:
        raise CheckpointError(f"{saved} is written, but not all older ones are removed: {error}") from error


def _good(candidates: list[Folder]) -> list[tuple[Folder, object]]:
    """Complete checkpoints that may be removed, each with its mark: no links, which would count twice, and no other files."""
    good = []
    for one in candidates:
        with suppress(OSError, CheckpointError):  # what cannot be read is not counted, so that more stay
            folder = readable(one)
            mark = folder.mark()
            shared = isinstance(folder, Local) and (folder.path.is_symlink() or claims.foreign_in(folder.path))
            if not shared and _fault(one) is None:
                good.append((folder, mark))
    return good


def _remove(name: str, remove: Callable[[], None]) -> None:
    try:
        remove()
    except FileNotFoundError:
        return  # another job was faster
    except OSError as error:
        raise CheckpointError(f"{name} cannot be removed, all of it: {error}") from error
