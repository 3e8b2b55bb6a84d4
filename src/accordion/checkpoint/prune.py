"""Find the newest complete checkpoint of a folder, and remove old ones."""

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
from accordion.checkpoint.reading import TURNS, look_into, steady
from accordion.checkpoint.storage.folders import Folder, folder_at, readable
from accordion.checkpoint.storage.local import Local
from accordion.errors import CheckpointError, UsageError

NUMBER = re.compile(r"(\d+)$")
BEST = "best"  # a checkpoint of `accordion train` that is never removed
NO_CHECKPOINTS = ("lost+found",)  # in the root of a file system, readable by its administrator only
NEVER = 2**63  # time of a checkpoint whose time is not known: it may be the newest


def latest(folder: str | os.PathLike[str]) -> str | None:
    """Return the path of the newest complete checkpoint in `folder`, None if there is no checkpoint at all.

    The newest has the largest number at the end of its name; among equal numbers, or names without any, it is the last one
    written. A checkpoint is complete if its manifest is sound and the files that it lists have their sizes;
    `accordion checkpoint verify` reads every byte. Newer ones that are damaged are skipped; rank 0 names them in a warning.
    Raises `CheckpointError` if one that may be the newest cannot be read, or if there are checkpoints and all are damaged.
    """
    result = newest(folder)
    if result.path is None and result.passed_over:
        raise CheckpointError(f"in {folder_at(folder)} {result.words()}")
    if result.passed_over and not (dist.is_initialized() and dist.get_rank()):
        warnings.warn(result.words(), stacklevel=2)
    return result.path


@dataclass(frozen=True, slots=True, kw_only=True)
class Newest:
    """The newest complete checkpoint of a folder, if any, and the damaged ones that are newer.

    `path`: its path. `passed_over`: path and fault of each damaged one, as text, newest first. If there are some and `path` is
    None, all checkpoints are damaged, and to begin anew would be a mistake.
    """

    path: str | None
    passed_over: tuple[str, ...]

    def words(self) -> str:
        """Return text for a log or an error that names the damaged checkpoints and how to go on; "" if there are none."""
        wrong = "; ".join(text.rstrip(".") for text in self.passed_over)
        if not wrong:
            return ""
        if self.path is None:
            return f"there are checkpoints, and none is complete: {wrong}. Repair them or move them away to begin anew."
        return f"{self.path} is the newest complete checkpoint, newer ones are damaged: {wrong}. Repair them or move them away."


def newest(folder: str | os.PathLike[str]) -> Newest:
    """Find the newest complete checkpoint in `folder`; return its path, and the faults of newer, damaged ones. Raises
    `CheckpointError` if a checkpoint that may be the newest cannot be read."""
    at, listed, wrong = folder_at(folder), None, list[str]()
    for _ in range(TURNS):
        candidates, wrong = _by_age(at), []
        for one in reversed(candidates):
            try:
                why = _fault(one)
            except OSError as error:
                raise CheckpointError(
                    f"{one} cannot be read ({error.strerror or error}), and it may be the newest checkpoint of {at}; "
                    "try again, or pass the path of the checkpoint to load."
                ) from error
            if why is None:
                return Newest(path=str(one), passed_over=tuple(wrong))
            wrong += [why] if why else []
        names = list(map(str, candidates))
        if names == listed:
            break
        listed = names  # if they change, a job saves there, and may have removed the newest of the previous list
    return Newest(path=None, passed_over=tuple(wrong))


def _by_age(folder: Folder, wanted: Callable[[str], bool] = lambda name: True) -> list[Folder]:
    """Return the folders in `folder` with a `wanted` name, oldest first: sorted by the number at the end of the name (without one
    first), then by time of writing. Raises `CheckpointError` if `folder` is a file or cannot be read."""
    try:
        names = [name for name in folder.folders() if name not in NO_CHECKPOINTS and wanted(name)]
    except NotADirectoryError:
        raise CheckpointError(f"{folder} is a file, and not a folder of checkpoints.") from None
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error.strerror or error}.") from error

    def age(one: Folder) -> tuple[int, int, str]:
        number, written_at = NUMBER.search(str(one)), NEVER
        with suppress(OSError):
            written_at = readable(one).written_at(MANIFEST)
        return int(number[1]) if number else -1, written_at, str(one)

    return sorted(map(folder.inside, names), key=age)


def _fault(checkpoint: Folder) -> str | None:
    """Return the fault of a checkpoint as text; None if it is complete, "" if no checkpoint is there. It is complete if its
    manifest is undamaged and its files have their sizes. Raises `OSError` if it cannot be read."""

    def fault_in(folder: Folder) -> str | None:
        ours = False
        try:
            sizes = folder.sizes()
            ours = any(map(claims.RANK_FILE.fullmatch, sizes))
            if MANIFEST not in sizes and not isinstance(folder, Local):
                return ""  # a save is writing it, or was killed
            files = look_into(folder)
            ours = True
            files.check_sizes()
        except (FileNotFoundError, NotADirectoryError):
            return ""
        except CheckpointError as error:
            return str(error) if ours else ""
        return None

    return steady(partial(readable, checkpoint), fault_in, lambda why: why is not None)


def check_keep(keep: int) -> None:
    """Raise `UsageError` unless `keep` is an integer of 0 or more."""
    if not isinstance(keep, int) or isinstance(keep, bool) or keep < 0:
        raise UsageError(f"keep is {keep!r}; it takes a number of checkpoints, and 0 keeps all.")


def prune_before(saved: Folder, keep: int) -> None:
    """Remove old checkpoints next to `saved` whose names differ from its name only in the number at the end.

    The `keep` (1 or more) newest complete ones stay, and `saved` and all newer ones. Damaged ones, links, and checkpoints with
    files of other programs stay and do not count. In file systems, leftovers of killed saves are removed too. Raises
    `CheckpointError` if a checkpoint cannot be removed completely; in file systems a later call tries again, without an error.
    """
    try:
        parent, _, last = str(saved).rpartition("/")
        at, stem = folder_at(parent or "/"), NUMBER.sub("", last)
        good = _good(_by_age(at, lambda name: NUMBER.sub("", name) == stem))
        names = [str(one) for one, _ in good]
        older = good[: names.index(str(saved)) if str(saved) in names else 0]
        for name, path in claims.leftovers(at.path) if isinstance(at, Local) else []:
            if NUMBER.sub("", name) == stem:
                claims.remove_quietly(path)
        for one, mark in older[: max(0, len(good) - keep)]:
            try:
                one.remove(mark)
            except FileNotFoundError:  # another job was faster
                continue
            except OSError as error:
                raise CheckpointError(f"{one} cannot be removed completely: {error}") from error
    except (CheckpointError, OSError) as error:
        raise CheckpointError(f"{saved} is written, but not all older ones are removed: {error}") from error


def _good(candidates: list[Folder]) -> list[tuple[Folder, object]]:
    """Return (folder, its `mark()`) of the complete checkpoints in `candidates`, without links and folders with other files."""
    good = []
    for one in candidates:
        with suppress(OSError, CheckpointError):  # a checkpoint that cannot be read does not count
            folder = readable(one)
            mark = folder.mark()
            is_link = isinstance(folder, Local) and folder.path.is_symlink()
            if not is_link and not folder.foreign() and _fault(one) is None:
                good.append((folder, mark))
    return good
