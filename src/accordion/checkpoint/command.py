"""`accordion checkpoint`: inspect, verify, diff, convert and prune, for people and, with `--json`, for programs."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from accordion.checkpoint.convert import convert
from accordion.checkpoint.inspect import diff, inspect, verify
from accordion.checkpoint.prune import prune
from accordion.checkpoint.storage.folders import Folder, checkpoint_at, folder_at
from accordion.errors import CheckpointError
from accordion.options import check_subcommand, listed, place, read

PROG = "accordion checkpoint"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a subcommand found: `words` for programs, `lines` for people, and its exit code."""

    words: dict[str, Any]
    lines: list[str]
    code: int = 0


@dataclass(frozen=True, kw_only=True)
class PathOptions:
    """Options of subcommands that read one checkpoint.

    Args:
        path: the checkpoint
        json: print JSON
    """

    path: str = place()
    json: bool = False


@dataclass(frozen=True, kw_only=True)
class PairOptions:
    """Options of subcommands that take two paths.

    Args:
        first: the path to read
        second: the checkpoint to compare with, or to write
        json: print JSON
    """

    first: str = place()
    second: str = place()
    json: bool = False


@dataclass(frozen=True, kw_only=True)
class PruneOptions:
    """Options of `prune`.

    Args:
        folder: the folder that holds them
        keep: how many of the newest good ones stay, 1 or more
        dry_run: only say which would go
        json: print JSON
    """

    folder: str = place()
    keep: int
    dry_run: bool = False
    json: bool = False


def run(words: list[str]) -> int:
    """The subcommand in `words`; returns the exit code: 0, or 1 where `verify` found damage or `diff` a difference."""
    if not words or words[0] in ("-h", "--help"):
        _print(
            f"usage: {PROG} <subcommand> [options]\n\n{listed(SUBCOMMANDS, PROG)}\n\n{PROG} <subcommand> --help tells more; "
            "`accordion export` writes the model in other formats."
        )
        return 0
    check_subcommand(words[0], JOBS, PROG)
    about, kind, job = JOBS[words[0]]
    options = read(kind, words[1:], f"{PROG} {words[0]}", about)
    if options is None:
        return 0
    try:
        found = job(options)
    except OSError as error:
        raise CheckpointError(str(error)) from error
    _print(json.dumps(_plain(found.words), indent=2) if options.json else "\n".join(found.lines))
    return found.code


def _print(text: str) -> None:
    """Write it out to its last byte.

    Raises `CheckpointError` where it cannot be written, to a full disk say.
    """
    try:
        print(text, flush=True)
    except BrokenPipeError:  # `| head`
        raise
    except OSError as error:
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # what is left of it would fail at exit once more
        raise CheckpointError(f"what was found cannot be written out: {error.strerror}.") from error


def _plain(value: Any) -> Any:
    """`value` without what JSON has no word for."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _inspect(options: PathOptions) -> Answer:
    found = inspect(options.path)
    tensors = found["tensors"]
    lines = [
        f"{found['path']}: {len(tensors)} tensors, {found['num_bytes']:,} bytes in {len(found['files'])} files",
        f"saved by {found['saved_by'].get('num_ranks')} ranks, torch {found['saved_by'].get('torch')}",
        f"checksums: {found['checksum']}; optimizer: {'none' if found['optimizer'] is None else 'yes'}",
    ]
    places, num_ranks = found["rank_states"]["states"], found["rank_states"]["num_ranks"]
    if places:
        keys = ", ".join(sorted({str(key) for _, key in places}))
        lines.append(
            f"states of {num_ranks} ranks that load on as many alone: {keys} of {len({p for p, _ in places})} parameters"
        )
    lines += [f"  {name}  {t['dtype']} {list(t['shape'])}  {t['num_chunks']} chunks" for name, t in tensors.items()]
    return Answer(words=found, lines=[*lines, *(f"  {a} is {b}" for a, b in found["aliases"].items())])


def _there(folder: Folder, what: str) -> None:
    """Raises `CheckpointError` where there is no such folder: a name mistyped, and nothing that was found out."""
    try:
        folder.sizes()
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{folder} is {what}: there is no such folder.") from None


def _verify(options: PathOptions) -> Answer:
    _there(checkpoint_at(options.path), "no checkpoint")
    faults = verify(options.path)
    lines = faults or [f"{options.path} is as it was written, every byte"]
    return Answer(
        words={"path": options.path, "good": not faults, "faults": faults}, lines=lines, code=int(bool(faults))
    )


def _diff(options: PairOptions) -> Answer:
    found = diff(options.first, options.second)
    lines = [f"only in {options.first}: {name}" for name in found["only_first"]]
    lines += [f"only in {options.second}: {name}" for name in found["only_second"]]
    lines += [f"{name}: {what}" for name, what in found["kinds"].items()]
    lines += [
        f"{name}: {v['num_different']:,} of {v['num_elements']:,} elements differ, by {v['largest']:.3g} at most"
        for name, v in found["values"].items()
    ]
    lines += [f"other {word}" for word in found["words"]]
    return Answer(words=found, lines=lines or ["they are equal"], code=int(bool(lines)))


def _convert(options: PairOptions) -> Answer:
    found = convert(options.first, options.second)
    has_optimizer = found.optimizer is not None
    words = {"path": options.second, "from": found.kind, "tensors": len(found.shapes), "left_out": list(found.left)}
    lines = [
        f"{options.second}: {len(found.shapes)} tensors from {found.kind}{', with its optimizer' if has_optimizer else ''}"
    ]
    return Answer(
        words={**words, "optimizer": has_optimizer}, lines=lines + [f"left out: {name}" for name in found.left]
    )


def _prune(options: PruneOptions) -> Answer:
    gone = prune(options.folder, options.keep, dry=options.dry_run)
    if not gone:
        _there(folder_at(options.folder), "no folder of checkpoints")
    verb = "would remove" if options.dry_run else "removed"
    lines = [f"{verb} {path}" for path in gone] or ["nothing to remove"]
    return Answer(words={"removed": gone, "dry_run": options.dry_run}, lines=lines)


JOBS: Mapping[str, tuple[str, type[Any], Callable[[Any], Answer]]] = {
    "inspect": ("Tell what is in a checkpoint.", PathOptions, _inspect),
    "verify": ("Read every byte and hold it against its checksum.", PathOptions, _verify),
    "diff": ("Tell how two checkpoints differ.", PairOptions, _diff),
    "convert": ("Make a checkpoint of a safetensors or DCP folder, or of a torch.save file.", PairOptions, _convert),
    "prune": ("Remove old checkpoints, never the last good one.", PruneOptions, _prune),
}
SUBCOMMANDS = {name: about for name, (about, _, _) in JOBS.items()}
