"""The checkpoints of a run: names, and which one to go on from."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from accordion.checkpoint import latest
from accordion.checkpoint.folders import checkpoint_at
from accordion.checkpoint.format import MANIFEST
from accordion.checkpoint.prune import is_complete
from accordion.checkpoint.reading import read_manifest
from accordion.config import nearest
from accordion.errors import CheckpointError, UsageError

NAME = re.compile(r"step-\d{6,}")
SHOWN = 3  # tensors named in a message of one line


def path_of(folder: Path, step: int) -> Path:
    """Where the checkpoint after `step` steps lies; names sort by age."""
    return folder / f"step-{step:06d}"


def choose(folder: Path, resume: str, say: Callable[[str], None]) -> Path | None:
    """The checkpoint that `checkpoint.resume` means, None for a fresh start. Raises `UsageError` where it is none.

    `say`: is told which newer ones were passed over and why.
    """
    if resume == "auto":
        found, passed_over = _newest(folder)
        if found is None and passed_over:
            raise UsageError(
                f"checkpoint.dir {str(folder)!r} holds no checkpoint that can be read: {'; '.join(passed_over)}. Take another "
                "run.dir, or move these away to begin at step 1; --checkpoint.resume takes the path of one elsewhere."
            )
        if passed_over:
            say(f"checkpoints passed over: {'; '.join(passed_over)}")
            say(
                f"the newest that can be read is {found}, and is gone on from; --checkpoint.resume takes the path of another"
            )
        return found
    if resume == "none":
        found, passed_over = _newest(folder)
        if found is not None or passed_over:
            what = (
                f"checkpoints, the newest {found.name!r}"
                if found
                else f"what is left of some: {'; '.join(passed_over)}"
            )
            raise UsageError(
                f"checkpoint.resume is 'none' but {str(folder)!r} holds {what}; take another run.dir, or remove them."
            )
        return None
    path = Path(resume)
    if not path.is_dir():
        near = [p.name for p in path.parent.iterdir() if p.is_dir()] if path.parent.is_dir() else []
        valid = nearest(path.name, ["auto", "none", *near])
        raise UsageError(f"checkpoint.resume {resume!r} is neither 'auto' nor 'none' nor a folder; {valid}")
    if not (path / MANIFEST).is_file() and (inside := latest(path)) is not None:
        raise UsageError(f"checkpoint.resume {resume!r} is a folder of checkpoints; its newest is {inside!r}.")
    _extra(path)
    return path


def _newest(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest complete checkpoint in `folder`, and what is wrong with each newer one."""
    found = latest(folder) if folder.is_dir() else None
    wrong = []
    for path in reversed(_in(folder)):
        if found is not None and path.name == Path(found).name:
            break
        wrong.append(f"{path.name}: {_fault(path)}")
    return None if found is None else Path(found), wrong


def _in(folder: Path) -> list[Path]:
    """The folders in it that have the name of a checkpoint, the oldest first."""
    named = (
        [path for path in folder.iterdir() if NAME.fullmatch(path.name) and path.is_dir()] if folder.is_dir() else []
    )
    return sorted(named, key=lambda path: int(path.name.rpartition("-")[2]))


def _fault(path: Path) -> str:
    try:
        read_manifest(folder_at(path))
    except (CheckpointError, OSError) as error:
        return str(error)
    return "files that its manifest lists are missing or cut"


def damaged(path: Path, error: CheckpointError) -> CheckpointError:
    """`error` of a load of `path`, with a way to go on."""
    older = [at for at in _in(path.parent) if at.name < path.name and is_complete(folder_at(at))]
    way = (
        f"move it away to go on from {older[-1]}, or pass that as" if older else "move it away, or pass another one as"
    )
    return CheckpointError(f"{str(error).rstrip('.')}; {way} --checkpoint.resume.")


def _extra(path: Path) -> Mapping[str, Any]:
    """What the run that saved `path` kept beside the tensors."""
    try:
        extra = read_manifest(checkpoint_at(path)).extra
    except (CheckpointError, OSError) as error:
        raise UsageError(str(error)) from None
    if not isinstance(extra, dict) or not {"step", "tokenizer", "config"} <= set(extra):
        raise UsageError(f"{str(path)!r} is a checkpoint, but not one of `accordion train`.")
    return extra


def check_run(path: Path, steps: int, tokenizer_digest: str) -> None:
    """Raise `UsageError` where the run is over before `path`, or where the checkpoint's tokens mean something else."""
    extra = _extra(path)
    if not isinstance(extra["step"], int) or extra["step"] > steps:
        raise UsageError(
            f"checkpoint {str(path)!r} is at step {extra['step']}, beyond train.steps {steps}; raise train.steps or take another "
            "run.dir."
        )
    if extra["tokenizer"] != tokenizer_digest:
        raise UsageError(
            f"checkpoint {str(path)!r} was trained with another tokenizer (other data, or another model folder); take the data "
            "it was trained on, another run.dir, or a model.path that holds its tokenizer.json."
        )


def check_model(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise `UsageError` where the checkpoint is of another model, naming what differs.

    `shapes`: of everything in the model's state dict.
    """
    manifest = read_manifest(checkpoint_at(path))
    held = {
        name.removeprefix("model/"): entry.shape
        for name, entry in manifest.tensors.items()
        if name.startswith("model/")
    }
    wrong = [
        f"{name} is {held[name]} there and {shape} here"
        for name, shape in shapes.items()
        if held.get(name, shape) != shape
    ]
    wrong += [f"{name} is not in it" for name in shapes if name not in held and f"model/{name}" not in manifest.aliases]
    wrong += [f"{name} is not in the model" for name in held if name not in shapes]
    if wrong:
        more = f", and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
        raise UsageError(
            f"checkpoint {str(path)!r} is of another model: {'; '.join(wrong[:SHOWN])}{more}. Take the model.preset or "
            "model.path it was trained with, or another run.dir."
        )
