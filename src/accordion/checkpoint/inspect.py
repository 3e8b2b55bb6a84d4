"""Inspect a checkpoint, and verify that every byte of it is as it was written."""

from __future__ import annotations

import os
from typing import Any

from accordion.checkpoint.reading import faults_in, read_manifest, steady
from accordion.checkpoint.storage.folders import checkpoint_at


def inspect(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the manifest of the checkpoint at `path` as a dict: its writer, files, tensors, options of the optimizer, `extra`.

    "rank_states" has "num_ranks" and "states", [parameter, key] of each optimizer state that belongs to the rows of one rank.
    """
    manifest = steady(lambda: checkpoint_at(path), read_manifest)
    optimizer = manifest.optimizer
    return {
        "path": str(checkpoint_at(path)),
        "saved_by": manifest.saved_by,
        "checksum": manifest.checksum,
        "files": {name: file.num_bytes for name, file in manifest.files.items()},
        "num_bytes": sum(file.num_bytes for file in manifest.files.values()),
        "tensors": {
            name: {
                "dtype": entry.dtype,
                "shape": entry.shape,
                "placements": entry.placements,
                "num_bytes": sum(entry.num_bytes(chunk.box) for chunk in entry.chunks),
                "num_chunks": len(entry.chunks),
            }
            for name, entry in manifest.tensors.items()
        },
        "aliases": dict(manifest.aliases),
        "optimizer": None if optimizer is None else [group["options"] for group in optimizer["groups"]],
        "rank_states": {
            "num_ranks": manifest.saved_by.get("num_ranks"),
            "states": (optimizer or {}).get("of_rows", []),
        },
        "extra": manifest.extra,
    }


def verify(path: str | os.PathLike[str]) -> list[str]:
    """Read every byte of the checkpoint at `path`; return its faults, each naming file and tensor, empty if there are none."""
    return steady(lambda: checkpoint_at(path), faults_in, bool)
