"""Which checkpoints of a folder are good, which is the newest, and removing old ones."""

from __future__ import annotations

import os
import re

from accordion.checkpoint.folders import Folder, Local, folder_at, readable
from accordion.checkpoint.format import MANIFEST
from accordion.checkpoint.reading import faults_in, read_manifest
from accordion.errors import CheckpointError, UsageError

NUMBER = re.compile(r"(\d+)$")


def latest(folder: str | os.PathLike[str]) -> str | None:
    """Path of the newest checkpoint in `folder`, None if there is none; folders that are not complete do not count.

    Newest by the number at the end of its name, then by time. What decides is the manifests and the sizes of the files that
    they list; no file points anywhere. `accordion checkpoint verify` reads every byte.
    """
    found = good_ones(folder_at(folder))
    return str(found[-1]) if found else None


def good_ones(folder: Folder) -> list[Folder]:
    """The complete checkpoints in `folder`, the newest last."""
    names = set(folder.folders())
    if isinstance(folder, Local):
        names |= folder.replaced_names()
    found = [(_age(at, name), at) for name in names if is_complete(at := readable(folder.inside(name)))]
    return [at for _, at in sorted(found, key=lambda pair: pair[0])]


def is_complete(folder: Folder) -> bool:
    """Whether its manifest is sound, and its files are all there with their sizes."""
    try:
        held = folder.sizes()
        return MANIFEST in held and all(
            held.get(name) == file.num_bytes for name, file in read_manifest(folder).files.items()
        )
    except (CheckpointError, OSError):
        return False


def prune(folder: str | os.PathLike[str], keep: int, *, dry: bool = False) -> list[str]:
    """Remove all but the `keep` newest good checkpoints in `folder`; returns which. With `dry` it only says which.

    What is not complete is neither counted nor removed: a save may be writing it; nor are links. Before any is removed one of
    those that stay is read, every byte; where none of them is as it was written, more of the older ones stay, up to one that
    is. Raises `UsageError` for `keep` below 1.
    """
    if keep < 1:
        raise UsageError(f"keep is {keep}; the last good checkpoint is never removed, so it takes 1 or more.")
    found = _own(good_ones(folder_at(folder)))
    doomed = found[:-keep]
    if doomed:
        sound = next((i for i in reversed(range(len(found))) if not faults_in(found[i])), 0)
        doomed = doomed[:sound]
    for one in [] if dry else doomed:
        one.discard()
    return [str(one) for one in doomed]


def prune_before(newest: Folder, keep: int) -> None:
    """Remove old checkpoints beside `newest` whose names differ from its in the number at their end alone."""
    parent, _, own = str(newest).rpartition("/")
    stem = NUMBER.sub("", own)
    like = [at for at in _own(good_ones(folder_at(parent))) if NUMBER.sub("", str(at).rpartition("/")[2]) == stem]
    older = [at for at in like if str(at) != str(newest)]
    for one in older[: max(0, len(like) - keep)]:
        one.discard()


def _own(found: list[Folder]) -> list[Folder]:
    """Without links, of which each would count as one more checkpoint than there is."""
    return [at for at in found if not (isinstance(at, Local) and at.path.is_symlink())]


def _age(folder: Folder, name: str) -> tuple[int, int, str]:
    number = NUMBER.search(name)
    return int(number[1]) if number else -1, folder.written_at(MANIFEST), name
