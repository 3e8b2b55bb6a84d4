"""The checkpoints of a run: names, and which one to go on from."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from accordion.checkpoint.format import MANIFEST
from accordion.checkpoint.prune import newest
from accordion.checkpoint.reading import read_manifest
from accordion.checkpoint.storage.folders import checkpoint_at
from accordion.config import nearest
from accordion.errors import CheckpointError, UsageError

BEST = "best"  # name of what `train.keep_best` keeps, beside those of the steps
NAME = re.compile(r"step-\d{6,}")
SHOWN = 3  # tensors named in a message of one line


def path_of(folder: Path, step: int) -> Path:
    """Where the checkpoint after `step` steps lies; names sort by age."""
    return folder / f"step-{step:06d}"


def choose(folder: Path, resume: str, say: Callable[[str], None]) -> Path | None:
    """The checkpoint that `checkpoint.resume` means, None for a fresh start. Raises `UsageError` where it is none.

    `say`: is told which newer ones were passed over and why.
    """
    if resume in ("auto", "none"):
        try:
            found = newest(folder)
        except CheckpointError as error:
            raise UsageError(str(error)) from None
        if resume == "none" and (found.path is not None or found.passed_over):
            what = "checkpoints" if found.path is None else f"checkpoints, the newest {Path(found.path).name!r}"
            raise UsageError(
                f"checkpoint.resume is 'none' but {str(folder)!r} holds {what}; take another run.dir, or remove them. "
                f"{found.words()}"
            )
        if found.path is None and found.passed_over:
            raise UsageError(
                f"checkpoint.dir {str(folder)!r}: {found.words()} Or take another run.dir, or give --checkpoint.resume "
                "the path of a checkpoint elsewhere."
            )
        if found.passed_over:
            _check_free(folder, Path(str(found.path)))
            say(f"{found.words()} --checkpoint.resume takes the path of another.")
        return None if found.path is None else Path(found.path)
    path = Path(folder, BEST) if resume == BEST else Path(resume)
    if resume == BEST and not path.is_dir():
        raise UsageError(
            f"checkpoint.resume is 'best', and there is no {str(path)!r}; train.keep_best keeps one, and 'auto' takes the newest."
        )
    if not path.is_dir():
        near = [p.name for p in path.parent.iterdir() if p.is_dir()] if path.parent.is_dir() else []
        valid = nearest(path.name, ["auto", "none", BEST, *near])
        raise UsageError(f"checkpoint.resume {resume!r} is neither 'auto', 'none' nor 'best' nor a folder; {valid}")
    if not (path / MANIFEST).is_file() and (inside := kept(path)) is not None:
        raise UsageError(f"checkpoint.resume {resume!r} is a folder of checkpoints; its newest is {inside!r}.")
    _extra(path)
    return path


def _check_free(folder: Path, taken: Path) -> None:
    """Raise `UsageError` where a save of the steps after `taken` would find something that it does not replace."""
    done = int(taken.name.rpartition("-")[2]) if NAME.fullmatch(taken.name) else 0
    for path in folder.iterdir():
        later = NAME.fullmatch(path.name) and int(path.name.rpartition("-")[2]) > done and path.is_dir()
        if later and not (path / MANIFEST).exists() and any(path.iterdir()):
            raise UsageError(
                f"{str(path)!r} has lost its {MANIFEST}, and no save replaces what may be no checkpoint; move it away to go on "
                f"from {taken}, or take another run.dir."
            )


def kept(folder: Path) -> str | None:
    """The newest complete checkpoint, for a message; None also where nobody can tell."""
    try:
        return newest(folder).path
    except CheckpointError:
        return None


def _extra(path: Path) -> Mapping[str, Any]:
    """What the run that saved `path` kept beside the tensors."""
    try:
        extra = read_manifest(checkpoint_at(path)).extra
    except (CheckpointError, OSError) as error:
        raise UsageError(str(error)) from None
    if not isinstance(extra, dict) or not {"step", "config"} <= set(extra) or not {"tokenizer", "task"} & set(extra):
        raise UsageError(f"{str(path)!r} is a checkpoint, but not one of `accordion train`.")
    return extra


def best_in(folder: Path) -> tuple[float, int] | None:
    """Validation loss and step of what is kept as the best in `folder`; None where nothing is, or nobody can tell."""
    try:
        best = _extra(folder / BEST)["best"]
        return float(best["loss"]), int(best["step"])
    except (UsageError, KeyError, TypeError, ValueError):
        return None


def check_run(path: Path, steps: int) -> None:
    """Raise `UsageError` where the run is over before `path`."""
    extra = _extra(path)
    if not isinstance(extra["step"], int) or extra["step"] > steps:
        raise UsageError(
            f"checkpoint {str(path)!r} is at step {extra['step']}, beyond train.steps {steps}; raise train.steps or take another "
            "run.dir."
        )


def check_task(path: Path) -> None:
    """Raise `UsageError` where the checkpoint is of a run on text."""
    if "task" not in _extra(path):
        raise UsageError(
            f"checkpoint {str(path)!r} is of a run on text, and this one trains a task; take another run.dir."
        )


def check_tokenizer(path: Path, tokenizer_digest: str) -> None:
    """Raise `UsageError` where the checkpoint's tokens mean something else."""
    extra = _extra(path)
    if "tokenizer" not in extra:
        raise UsageError(
            f"checkpoint {str(path)!r} is of the task {extra['task']!r}, and this run trains on text; take another run.dir."
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
