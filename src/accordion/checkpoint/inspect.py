"""Looking at checkpoints: what is in one, whether every byte of it is as it was written, and how two differ."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from typing import Any

import torch

from accordion.checkpoint.contents import OF_RANKS
from accordion.checkpoint.format import Manifest, TensorEntry
from accordion.checkpoint.reading import Files, faults_in, opened, read_manifest, steady
from accordion.checkpoint.storage.folders import Folder, checkpoint_at

BLOCK = 2**22  # elements that are compared at once


def inspect(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What the manifest says: who saved, tensors with dtype, shape, bytes and chunks, groups of the optimizer, `extra`.

    `rank_states`: states of the optimizer that hold for the rows of their rank, [parameter, key] each, and how many ranks.
    """
    manifest = steady(lambda: checkpoint_at(path), read_manifest)
    optimizer = manifest.optimizer
    return {
        "path": str(checkpoint_at(path)),
        "saved_by": manifest.saved_by,
        "checksum": manifest.checksum,
        "files": {name: file.num_bytes for name, file in manifest.files.items()},
        "num_bytes": sum(file.num_bytes for file in manifest.files.values()),
        "tensors": {name: _about(entry) for name, entry in manifest.tensors.items()},
        "aliases": dict(manifest.aliases),
        "optimizer": None if optimizer is None else [group["options"] for group in optimizer["groups"]],
        "rank_states": {
            "num_ranks": manifest.saved_by.get("num_ranks"),
            "states": (optimizer or {}).get("of_rows", []),
        },
        "extra": manifest.extra,
    }


def _about(entry: TensorEntry) -> dict[str, Any]:
    num_bytes = sum(entry.num_bytes(chunk.box) for chunk in entry.chunks)
    about = {"dtype": entry.dtype, "shape": entry.shape, "placements": entry.placements}
    return {**about, "num_bytes": num_bytes, "num_chunks": len(entry.chunks)}


def verify(path: str | os.PathLike[str]) -> list[str]:
    """Read every byte; everything that is not as it was written, each naming file and tensor. Empty: all is good."""
    return steady(lambda: checkpoint_at(path), faults_in, bool)


def diff(one: str | os.PathLike[str], other: str | os.PathLike[str]) -> dict[str, Any]:
    """How two checkpoints differ: names in one alone, other shapes and dtypes, values that differ, other words.

    Tensors are compared by value, whatever ranks saved them; `values`: name -> how many elements differ, and by how much at
    most. What ranks keep of `state` is not compared; what they keep of the optimizer is. Host memory: twice the largest tensor.
    Every byte is checked first. Raises `CheckpointError` where one of them is damaged.
    """
    first, second = partial(checkpoint_at, one), partial(checkpoint_at, other)
    return steady(first, lambda a: steady(second, lambda b: _diff(a, b)))


def _diff(first: Folder, second: Folder) -> dict[str, Any]:
    with closing(opened(first)) as a, closing(opened(second)) as b:
        for files in (a, b):
            files.check(_is_compared, ", so it is not compared")
        ours, theirs = _names(a.manifest), _names(b.manifest)
        both = [name for name in ours if name in theirs]
        unlike = {name: _unlike(a.manifest.tensors[ours[name]], b.manifest.tensors[theirs[name]]) for name in both}
        pairs = ((name, ours[name], theirs[name]) for name in both if unlike[name] is None)
        return {
            "only_first": [name for name in ours if name not in theirs],
            "only_second": [name for name in theirs if name not in ours],
            "kinds": {name: what for name, what in unlike.items() if what is not None},
            "values": dict(_values(a, b, pairs)),
            "words": [key for key in ("optimizer", "extra") if getattr(a.manifest, key) != getattr(b.manifest, key)],
        }


def _is_compared(name: str) -> bool:
    return not name.startswith(OF_RANKS) or name.split("/")[2:3] == ["optimizer"]


def _names(manifest: Manifest) -> dict[str, str]:
    """Every name of a tensor but those of `state` and of checksums, and the name that has the data."""
    own = {name: name for name in manifest.tensors if _is_compared(name)}
    return {**own, **manifest.aliases}


def _unlike(a: TensorEntry, b: TensorEntry) -> str | None:
    kinds = [f"{entry.dtype} {entry.shape}" for entry in (a, b)]
    return None if kinds[0] == kinds[1] else " -> ".join(kinds)


def _values(a: Files, b: Files, pairs: Iterator[tuple[str, str, str]]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, ours, theirs in pairs:
        x, y = a.whole(ours).flatten(), b.whole(theirs).flatten()
        count, most = 0, 0.0
        for p, q in zip(x.split(BLOCK), y.split(BLOCK), strict=True):
            bits = [t.contiguous().view(torch.uint8).view(t.numel(), -1) for t in (p, q)]
            apart = (bits[0] != bits[1]).any(1)
            if apart.any():
                count += int(apart.sum())
                wide = torch.complex128 if p.is_complex() else torch.float64
                most = max(most, float((p[apart].to(wide) - q[apart].to(wide)).abs().max()))
        if count:
            yield name, {"num_different": count, "num_elements": x.numel(), "largest": most}
