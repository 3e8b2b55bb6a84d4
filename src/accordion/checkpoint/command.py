"""The command `accordion checkpoint`: inspect, verify and convert, for people and, with `--json`, for programs."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from accordion.checkpoint.convert import convert
from accordion.checkpoint.reading import opened, steady, verify
from accordion.checkpoint.storage.folders import checkpoint_at
from accordion.errors import CheckpointError
from accordion.options import check_subcommand, listed, place, read

PROG = "accordion checkpoint"


Answer: TypeAlias = tuple[dict[str, Any], list[str], int]
"""(data to print with `--json`, lines to print without it, exit code) of a subcommand."""


@dataclass(frozen=True, kw_only=True)
class PathOptions:
    """Options of `inspect` and `verify`.

    Args:
        path: the checkpoint
        json: print JSON
    """

    path: str = place()
    json: bool = False


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """Options of `convert`.

    Args:
        source: the path to read
        target: the checkpoint to write
        json: print JSON
    """

    source: str = place()
    target: str = place()
    json: bool = False


def run(words: list[str]) -> int:
    """Run the subcommand in `words`, the arguments after `accordion checkpoint`, and print its result; without words print the
    help. Return the exit code: 0, or 1 if `verify` found damage. Raises `UsageError` for unknown words, `CheckpointError` if
    the checkpoint cannot be read."""
    if not words or words[0] in ("-h", "--help"):
        subcommands = listed({name: about for name, (about, _, _) in JOBS.items()}, PROG)
        print(
            f"usage: {PROG} <subcommand> [options]\n\n{subcommands}\n\n{PROG} <subcommand> --help tells more; "
            "`accordion export` writes the model in other formats."
        )
        return 0
    check_subcommand(words[0], JOBS, PROG)
    about, kind, job = JOBS[words[0]]
    options = read(kind, words[1:], f"{PROG} {words[0]}", about)
    if options is None:
        return 0
    try:
        data, lines, code = job(options)
    except OSError as error:
        raise CheckpointError(str(error)) from error
    print(json.dumps(_plain(data), indent=2) if options.json else "\n".join(lines), flush=True)
    return code


def _plain(value: Any) -> Any:
    """Return `value` with NaN, infinities and keys as strings and tuples as lists, for JSON that any program can read."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def inspect(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the manifest of the checkpoint at `path` as a dict for people: "path", "saved_by", "checksum", "files" (name ->
    bytes), "num_bytes" of all files, "tensors" (name -> dict), "aliases", "optimizer" (the options of each group, or None), and
    "extra" as JSON. Raises `CheckpointError` if the manifest is missing, damaged or cannot be read."""
    manifest = steady(lambda: checkpoint_at(path), opened).manifest
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
        "extra": manifest.extra,
    }


def _inspect(options: PathOptions) -> Answer:
    about = inspect(options.path)
    tensors, saved_by = about["tensors"], about["saved_by"]
    lines = [
        f"{about['path']}: {len(tensors)} tensors, {about['num_bytes']:,} bytes in {len(about['files'])} files",
        f"saved by {saved_by.get('num_ranks')} ranks, torch {saved_by.get('torch')}",
        f"checksums: {about['checksum']}; optimizer: {'none' if about['optimizer'] is None else 'yes'}",
    ]
    lines += [f"  {name}  {t['dtype']} {list(t['shape'])}  {t['num_chunks']} chunks" for name, t in tensors.items()]
    return about, [*lines, *(f"  {a} is {b}" for a, b in about["aliases"].items())], 0


def _verify(options: PathOptions) -> Answer:
    folder = checkpoint_at(options.path)
    try:
        folder.sizes()
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{folder} is no checkpoint: there is no such folder.") from None
    faults = verify(options.path)
    data = {"path": options.path, "good": not faults, "faults": faults}
    return data, faults or [f"{options.path} is as it was written, every byte"], int(bool(faults))


def _convert(options: ConvertOptions) -> Answer:
    source = convert(options.source, options.target)
    num_tensors = len(source.tensors)
    data = {"path": options.target, "from": source.kind, "tensors": num_tensors, "left_out": list(source.left)}
    lines = [f"{options.target}: {num_tensors} tensors from {source.kind}"]
    return data, [*lines, *(f"left out: {name}" for name in source.left)], 0


JOBS: Mapping[str, tuple[str, type[Any], Callable[[Any], Answer]]] = {
    "inspect": ("List what is in a checkpoint.", PathOptions, _inspect),
    "verify": ("Read every byte of a checkpoint and compare it with its checksum.", PathOptions, _verify),
    "convert": ("Make a checkpoint of a folder of safetensors or a torch.save file.", ConvertOptions, _convert),
}
