"""The checkpoints of a run: names, and which one to go on from."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from accordion.checkpoint import claims
from accordion.checkpoint.format import MANIFEST
from accordion.checkpoint.prune import BEST, newest
from accordion.checkpoint.reading import read_manifest
from accordion.checkpoint.storage.folders import Local, checkpoint_at
from accordion.errors import CheckpointError, UsageError, nearest
from accordion.train.config import Job, JobConfig, flat

NAME = re.compile(r"step-\d{6,}")
ASIDE = "abandoned"  # with a number behind it: the folder of what came behind the step that a run went back to
BATCH = "sequences in a step"  # beside the keys of a run that a checkpoint keeps
SHOWN = 3  # tensors named in a message of one line
# Keys of `train` in which two starts of one command may differ: the number of ranks decides them, or the time that is left.
OF_A_START = ("train.accumulate", "train.micro_batch", "train.hours")


def path_of(folder: Path, step: int) -> Path:
    """Where the checkpoint after `step` steps lies."""
    return folder / f"step-{step:06d}"


def choose(folder: Path, config: JobConfig, say: Callable[[str], None]) -> Path | None:
    """The checkpoint that `checkpoint.resume` means, None for a fresh start. Raises `UsageError` where it is none.

    Where an earlier start of the same command has gone on from there, the checkpoint that it came to: a job that is queued
    again goes forward. `say`: is told which newer ones were passed over and why.
    """
    resume = config.checkpoint.resume
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
    later = _of_same_command(folder, path, config)
    if later is None:
        return path
    say(
        f"this same command has gone on from {path} to {later} already, and goes on from there; move that away to go back once "
        "more."
    )
    return later


def _of_same_command(folder: Path, origin: Path, config: JobConfig) -> Path | None:
    """The newest checkpoint beyond `origin` that a start with the settings of `config` has written; None if there is none."""
    found, step, now, key = None, _extra(origin)["step"], flat(config), "checkpoint.resume"
    for path in (folder / BEST, kept(folder)):
        try:
            extra = _extra(Path(path)) if path is not None else None
        except UsageError:
            continue
        if extra is None or extra["step"] <= step:
            continue
        before = extra["config"]
        if before.get(key) == now[key] and not set(differing(before, now)) - set(OF_A_START):
            found, step = Path(str(path)), extra["step"]
    return found


def differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Settings of the maths that differ, of those that both have."""
    keys = [
        key
        for key in now
        if not key.startswith(("shard.", "checkpoint.", "launch.", "run.", "log.")) or key == "shard.precision"
    ]
    return [key for key in keys if key in before and before[key] != now[key]]


def with_batch_of(path: Path | None, config: Job, named: Collection[str], num_ranks: int) -> Job:
    """Return `config` with the global batch of the run that `path` is a checkpoint of, for `num_ranks` ranks.

    The batch is left as `config` says if the ranks do not divide that of the run, or if the keys in `named`, which flags and
    run files gave, decide it. `train.micro_batch` is lowered if it does not divide the share of a rank.
    """
    options = config.train
    decided = options.global_batch or options.deepspeed is not None or "train.accumulate" in named
    before = None if path is None or decided else _extra(path)["config"].get(BATCH)
    if before is None or before % num_ranks:
        return config
    each = before // num_ranks
    micro_batch = next(n for n in range(min(each, options.micro_batch), 0, -1) if each % n == 0)
    return replace(config, train=replace(options, micro_batch=micro_batch, accumulate=each // micro_batch))


def set_aside(folder: Path, step: int) -> Path | None:
    """Move the checkpoints in `folder` that are beyond `step` into a folder of their own there, so that they are kept, and are
    no longer the newest. Where to; None if there are none. Raises `CheckpointError`.
    """
    beyond = [path for path in folder.iterdir() if path.is_dir() and _step_of(path) > step] if folder.is_dir() else []
    if not beyond:
        return None
    number = 1
    try:
        while (aside := folder / f"{ASIDE}-{number}").exists():
            number += 1
        aside.mkdir()
        for path in beyond:
            path.rename(aside / path.name)
    except OSError as error:
        raise CheckpointError(
            f"what is beyond step {step} in {folder} cannot be moved into {aside.name}: {error.strerror or error}; move it "
            "away, or take another run.dir."
        ) from None
    return aside


def _step_of(path: Path) -> int:
    """Of which step a folder is, be it complete or not; -1 for what is no checkpoint of a run."""
    name = claims.replaced(path.name) or path.name  # a save that was killed may have left it under a hidden name
    if NAME.fullmatch(name):
        return int(name.rpartition("-")[2])
    try:
        return int(_extra(path)["step"]) if name == BEST else -1
    except UsageError:
        return -1


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
    kinds = {"step": int, "config": dict}
    if (
        not isinstance(extra, dict)
        or not {"tokenizer", "task"} & set(extra)
        or not all(isinstance(extra.get(key), kind) for key, kind in kinds.items())
    ):
        raise UsageError(f"{str(path)!r} is a checkpoint, but not one of `accordion train`.")
    return extra


def best_in(folder: Path) -> tuple[float, int] | None:
    """Validation loss and step of what is kept as the best in `folder`; None where nothing is, or nobody can tell."""
    try:
        best = _extra(folder / BEST)["best"]
        return float(best["loss"]), int(best["step"])
    except (UsageError, KeyError, TypeError, ValueError):
        return None


def can_link(folder: Path) -> bool:
    """Whether the file system of `folder` gives a file a second name."""
    try:
        with TemporaryDirectory(dir=folder, prefix=".") as made:
            Path(made, "a").touch()
            os.link(Path(made, "a"), Path(made, "b"))
    except OSError:
        return False
    return True


def keep_as_best(folder: Path, step: int) -> None:
    """Keep the checkpoint after `step` as the best too, if it says that it is: its files get second names, and nothing is copied.

    Nothing is done where it is kept already, or where there is no such checkpoint. Raises `CheckpointError`.
    """
    source, target = Local(path_of(folder, step)), Local(folder / BEST)
    try:
        best = _extra(source.path).get("best")
    except UsageError:  # it was not written, which is told elsewhere
        return
    if not isinstance(best, dict) or best.get("step") != step or best_in(folder) == (best.get("loss"), step):
        return
    try:
        begun = target.begin(secrets.token_hex(4))
        try:
            for name in source.sizes():
                if name != MANIFEST:
                    os.link(source.path / name, begun.path / name)
            target.commit(begun, source.read(MANIFEST))  # not linked: by its time checkpoints are told apart
        except BaseException:
            with suppress(OSError):  # the first failure is what counts
                begun.discard()
            raise
    except OSError as error:
        raise CheckpointError(f"{source} cannot be kept as {target}: {error.strerror or error}.") from None


def check_run(path: Path, steps: int, tokenizer_digest: str | None) -> None:
    """Raise `UsageError` if the run is over before `path`, or if `path` is of other tokens or of another kind of run.

    `tokenizer_digest`: None if the run trains a task.
    """
    extra = _extra(path)
    if extra["step"] > steps:
        raise UsageError(
            f"checkpoint {str(path)!r} is at step {extra['step']}, beyond train.steps {steps}; raise train.steps or take another "
            "run.dir."
        )
    if tokenizer_digest is None and "task" not in extra:
        raise UsageError(
            f"checkpoint {str(path)!r} is of a run on text, and this one trains a task; take another run.dir."
        )
    if tokenizer_digest is not None and "tokenizer" not in extra:
        raise UsageError(
            f"checkpoint {str(path)!r} is of the task {extra['task']!r}, and this run trains on text; take another run.dir."
        )
    if tokenizer_digest is not None and extra["tokenizer"] != tokenizer_digest:
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
