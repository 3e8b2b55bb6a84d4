"""`accordion checkpoint`: inspect, verify, diff, export, convert and prune, for people and, with `--json`, for programs."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from accordion.checkpoint.convert import FORMATS, convert, export
from accordion.checkpoint.format import CODES, DTYPES
from accordion.checkpoint.inspect import diff, inspect, verify
from accordion.checkpoint.prune import prune
from accordion.checkpoint.storage.folders import Folder, checkpoint_at, folder_at
from accordion.errors import CheckpointError, UsageError

SHOWN = 40  # tensors that are listed without --all


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a subcommand found: `words` for programs, `lines` for people, and its exit code."""

    words: dict[str, Any]
    lines: list[str]
    code: int = 0


class _Parser(argparse.ArgumentParser):
    """Raises instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message}; --help tells more.")


def run(words: list[str]) -> int:
    """The subcommand in `words`; returns the exit code: 0, or 1 where `verify` found damage or `diff` a difference."""
    try:
        options = _parser().parse_args(words or ["--help"])
    except SystemExit as end:  # of --help
        return int(end.code or 0)
    try:
        found = JOBS[options.job][2](options)
    except OSError as error:
        raise CheckpointError(str(error)) from error
    _print(json.dumps(_plain(found.words), indent=2) if options.json else "\n".join(found.lines))
    return found.code


def _print(text: str) -> None:
    """Write it out to its last byte; letters that the terminal has not are written as escapes.

    Raises `CheckpointError` where it cannot be written, to a full disk say.
    """
    try:
        try:
            print(text, flush=True)
        except UnicodeEncodeError as error:
            print(text.encode(error.encoding, "backslashreplace").decode(error.encoding), flush=True)
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


def _parser() -> _Parser:
    parser = _Parser(prog="accordion checkpoint", description="Look at checkpoints, check, convert and remove them.")
    jobs = parser.add_subparsers(dest="job", required=True, metavar="|".join(JOBS))
    for name, (about, places, _) in JOBS.items():
        job = jobs.add_parser(name, help=about, description=about)
        for place, what in places.items():
            job.add_argument(place, help=what)
        job.add_argument("--json", action="store_true", help="print JSON")
        if name == "inspect":
            job.add_argument("--all", action="store_true", help=f"list every tensor, not the first {SHOWN}")
        if name == "export":
            job.add_argument(
                "--format", choices=FORMATS, default="hf", help="hf: loadable by from_pretrained (default)"
            )
            job.add_argument("--like", help="folder whose config.json and tokenizer are copied beside the weights")
            job.add_argument("--dtype", choices=sorted(CODES.values()), help="cast floating-point tensors, say BF16")
        if name == "prune":
            job.add_argument("--keep", type=int, required=True, help="how many of the newest good ones stay, 1 or more")
            job.add_argument("--dry-run", action="store_true", help="only say which would go")
    return parser


def _inspect(options: argparse.Namespace) -> Found:
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
    shown = list(tensors.items())[: None if options.all else SHOWN]
    lines += [f"  {name}  {t['dtype']} {list(t['shape'])}  {t['num_chunks']} chunks" for name, t in shown]
    if len(shown) < len(tensors):
        lines.append(f"  and {len(tensors) - len(shown)} more (--all)")
    return Found(words=found, lines=[*lines, *(f"  {a} is {b}" for a, b in found["aliases"].items())])


def _there(folder: Folder, what: str) -> None:
    """Raises `CheckpointError` where there is no such folder: a name mistyped, and nothing that was found out."""
    try:
        folder.sizes()
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{folder} is {what}: there is no such folder.") from None


def _verify(options: argparse.Namespace) -> Found:
    _there(checkpoint_at(options.path), "no checkpoint")
    faults = verify(options.path)
    lines = faults or [f"{options.path} is as it was written, every byte"]
    return Found(
        words={"path": options.path, "good": not faults, "faults": faults}, lines=lines, code=int(bool(faults))
    )


def _diff(options: argparse.Namespace) -> Found:
    found = diff(options.first, options.second)
    lines = [f"only in {options.first}: {name}" for name in found["only_first"]]
    lines += [f"only in {options.second}: {name}" for name in found["only_second"]]
    lines += [f"{name}: {what}" for name, what in found["kinds"].items()]
    lines += [
        f"{name}: {v['num_different']:,} of {v['num_elements']:,} elements differ, by {v['largest']:.3g} at most"
        for name, v in found["values"].items()
    ]
    lines += [f"other {word}" for word in found["words"]]
    return Found(words=found, lines=lines or ["they are equal"], code=int(bool(lines)))


def _export(options: argparse.Namespace) -> Found:
    dtype = None if options.dtype is None else DTYPES[options.dtype]
    if dtype is not None and not dtype.is_floating_point:
        raise UsageError(f"dtype {options.dtype} is no floating-point dtype; take F32, BF16 or F16.")
    files = export(options.path, options.target, options.format, like=options.like, dtype=dtype)
    lines = [f"written: {file}" for file in files]
    if options.format == "hf" and not any(file.endswith("config.json") for file in files):
        lines.append("no config.json: from_pretrained needs one; give --like a folder that has it")
    return Found(words={"files": files}, lines=lines)


def _convert(options: argparse.Namespace) -> Found:
    found = convert(options.source, options.target)
    has_optimizer = found.optimizer is not None
    words = {"path": options.target, "from": found.kind, "tensors": len(found.shapes), "left_out": list(found.left)}
    lines = [
        f"{options.target}: {len(found.shapes)} tensors from {found.kind}{', with its optimizer' if has_optimizer else ''}"
    ]
    return Found(
        words={**words, "optimizer": has_optimizer}, lines=lines + [f"left out: {name}" for name in found.left]
    )


def _prune(options: argparse.Namespace) -> Found:
    gone = prune(options.folder, options.keep, dry=options.dry_run)
    if not gone:
        _there(folder_at(options.folder), "no folder of checkpoints")
    verb = "would remove" if options.dry_run else "removed"
    lines = [f"{verb} {path}" for path in gone] or ["nothing to remove"]
    return Found(words={"removed": gone, "dry_run": options.dry_run}, lines=lines)


Job = Callable[[argparse.Namespace], Found]
JOBS: Mapping[str, tuple[str, dict[str, str], Job]] = {
    "inspect": ("tell what is in a checkpoint", {"path": "the checkpoint"}, _inspect),
    "verify": ("read every byte and hold it against its checksum", {"path": "the checkpoint"}, _verify),
    "diff": ("tell how two checkpoints differ", {"first": "a checkpoint", "second": "another"}, _diff),
    "export": ("write the model in another format", {"path": "the checkpoint", "target": "what to write"}, _export),
    "convert": (
        "make a checkpoint of a safetensors or DCP folder, or of a torch.save file",
        {"source": "what to read", "target": "the checkpoint to write"},
        _convert,
    ),
    "prune": ("remove old checkpoints, never the last good one", {"folder": "the folder that holds them"}, _prune),
}
