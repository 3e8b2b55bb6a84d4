"""Whether a checkpoint that a library keeps among files of its own is there as a whole."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from accordion.checkpoint.reading import opened
from accordion.checkpoint.storage.folders import checkpoint_at
from accordion.errors import CheckpointError


def why_incomplete(folder: Path) -> str:
    """What a folder of `accordion.save` lacks by its manifest and the sizes of its files, in words; "" where nothing."""
    try:
        with closing(opened(checkpoint_at(folder))) as files:
            files.check_sizes()
    except CheckpointError as error:
        return str(error)
    return ""


def is_whole(folder: Path, name: str) -> bool:
    return not why_incomplete(folder / name)
