"""The checkpoints of a run: their names, the one to resume from, and the best one."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from accordion.checkpoint.format import MANIFEST
from accordion.checkpoint.prune import BEST, newest
from accordion.checkpoint.reading import opened
from accordion.checkpoint.storage.folders import checkpoint_at
from accordion.checkpoint.storage.local import Local
from accordion.errors import CheckpointError, UsageError
from accordion.train.config import Job, JobConfig

BATCH = "sequences in a step"  # stored in a checkpoint with the keys of the run
SHOWN = 3  # tensors named in a message


def path_of(folder: Path, step: int) -> Path:
    return folder / f"step-{step:06d}"


def choose(folder: Path, config: JobConfig, say: Callable[[str], None]) -> Path | None:
    """Return the checkpoint to resume from: the newest usable one in `folder`, the run's folder of checkpoints. If `folder` has
    none, return the path that `checkpoint.resume` names, or None, for a fresh start, if that is "auto". `say`: shows a line
    about unusable newer checkpoints, or about a named path that is not used. Raises `UsageError` if all checkpoints in `folder`
    are unusable, if the named path is no folder, or if it is an older checkpoint in `folder`."""
    try:
        latest = newest(folder)
    except CheckpointError as error:
        raise UsageError(str(error)) from None
    resume = config.checkpoint.resume
    named = None if resume == "auto" else Path(resume)
    if named is not None:
        if not named.is_dir():
            raise UsageError(f"checkpoint.resume {resume!r} is neither 'auto' nor a folder.")
        is_newest = latest.path is None or named.resolve() == Path(latest.path).resolve()
        if named.resolve().parent == folder.resolve() and not is_newest:
            raise UsageError(
                f"checkpoint.resume {resume!r} is not the newest checkpoint of its folder, {latest.path} is; take another "
                "run.dir, or move newer ones away."
            )
    if latest.passed_over:
        if latest.path is None:
            raise UsageError(f"checkpoint.dir {str(folder)!r}: {latest.words()} Or take another run.dir.")
        say(latest.words())
    if latest.path is None:
        return named
    if named is not None and named.resolve() != Path(latest.path).resolve():
        say(f"the run goes on from {latest.path}; to begin at {named} again, take another run.dir")
    return Path(latest.path)


def differing(before: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Return the keys whose values differ between the configurations `before` and `current` (`group.key` -> value) and that
    change the computation. Keys that only one of the two has are left out."""
    changed = [key for key in current if key in before and before[key] != current[key]]
    others = ("shard.", "checkpoint.", "launch.", "run.", "log.")  # keys that do not change the computation
    return [key for key in changed if key == "shard.precision" or not key.startswith(others)]


def with_batch_of(path: Path | None, config: Job, named: Collection[str], num_ranks: int) -> Job:
    """Return `config` with as many sequences in a step, on `num_ranks` ranks (or groups that share each sequence), as the run
    that saved the checkpoint `path` had. Sets `train.accumulate`, and lowers `train.micro_batch` if it does not divide a rank's
    share. Returns `config` itself if `path` is None, if `num_ranks` does not divide that number of sequences, or if the user
    determined it by `train.accumulate` (in `named`, the keys that the user set), `train.global_batch` or `train.deepspeed`."""
    options = config.train
    decided = options.global_batch or options.deepspeed is not None or "train.accumulate" in named
    before = None if path is None or decided else setting(path, BATCH)
    if before is None or before % num_ranks:
        return config
    each = before // num_ranks
    micro_batch = next(n for n in range(min(each, options.micro_batch), 0, -1) if each % n == 0)
    return replace(config, train=replace(options, micro_batch=micro_batch, accumulate=each // micro_batch))


def _extra(path: Path) -> Mapping[str, Any]:
    """Return the dict that a run stored as `extra` in the checkpoint `path`, with the keys "step", "config" and more. Raises
    `UsageError` if the checkpoint cannot be read, or was not written by `accordion train`."""
    try:
        extra: Mapping[str, Any] = opened(checkpoint_at(path)).manifest.extra
    except (CheckpointError, OSError) as error:
        raise UsageError(str(error)) from None
    is_of_run = isinstance(extra, dict) and isinstance(extra.get("step"), int) and isinstance(extra.get("config"), dict)
    if not is_of_run or not {"tokenizer", "task"} & set(extra):
        raise UsageError(f"{str(path)!r} is a checkpoint, but not one of `accordion train`.")
    return extra


def setting(path: Path, key: str) -> Any:
    """Return the value of the configuration key `key` in the run that saved the checkpoint `path`; None if that run had no such
    key. Raises `UsageError` if the checkpoint cannot be read, or was not written by `accordion train`."""
    return _extra(path)["config"].get(key)


def best_in(folder: Path) -> tuple[float, int] | None:
    """Return (validation loss, step) of the checkpoint `best` in `folder`; None if there is none, or if it cannot be read."""
    try:
        best = _extra(folder / BEST)["best"]
        return float(best["loss"]), int(best["step"])
    except (UsageError, KeyError, TypeError, ValueError):
        return None


def keep_as_best(folder: Path, step: int) -> None:
    """Copy the checkpoint after `step`, in `folder`, to the checkpoint `best` there, which is replaced, with hard links if
    possible. Does nothing if the checkpoint after `step` does not exist, does not record `step` as the best, or was copied
    already. Raises `CheckpointError` if copying fails."""
    source, target = Local(path_of(folder, step)), Local(folder / BEST)
    try:
        best = _extra(source.path).get("best")
    except UsageError:  # it was not written, which is reported elsewhere
        return
    if not isinstance(best, dict) or best.get("step") != step or best_in(folder) == (best.get("loss"), step):
        return
    try:
        begun = target.begin(secrets.token_hex(4))
        try:
            for name in source.sizes():
                if name != MANIFEST:
                    _link_or_copy(source.path / name, begun.path / name)
            # Not linked, because checkpoints are distinguished by the time of this file.
            begun.commit(source.read(MANIFEST))
        except BaseException:
            with suppress(OSError):  # report the first failure
                begun.discard()
            raise
    except OSError as error:
        raise CheckpointError(f"{source} cannot be kept as {target}: {error.strerror or error}.") from None


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # the file system has no hard links
        shutil.copyfile(source, target)


def check_run(path: Path, steps: int, tokenizer_digest: str | None) -> None:
    """Raise `UsageError` if the checkpoint `path` is beyond step `steps`, was trained with another tokenizer, or is of a run on
    text and this run trains a task, or the reverse. `tokenizer_digest`: hash of this run's tokenizer; None for a task."""
    extra = _extra(path)
    if extra["step"] > steps:
        raise UsageError(
            f"checkpoint {str(path)!r} is at step {extra['step']}, beyond train.steps {steps}; raise train.steps or take another "
            "run.dir."
        )
    kind = "task" if tokenizer_digest is None else "tokenizer"
    if kind not in extra:
        of_task, of_text = "of a run on a task", "of a run on text"
        raise UsageError(
            f"checkpoint {str(path)!r} is {of_text if kind == 'task' else of_task}, and this one is not; take another run.dir."
        )
    if tokenizer_digest is not None and extra["tokenizer"] != tokenizer_digest:
        raise UsageError(
            f"checkpoint {str(path)!r} was trained with another tokenizer (other data, or another model folder); take the data "
            "it was trained on, another run.dir, or a model.path with its tokenizer.json."
        )


def check_base(path: Path, quantize: str) -> None:
    """Raise `UsageError` if the run that saved the adapters in `path` had a `model.quantize` other than `quantize`."""
    before = _extra(path)["config"].get("model.quantize", "none")
    if before != quantize:
        raise UsageError(
            f"checkpoint {str(path)!r} has adapters of a base with model.quantize {before!r}, and this run has {quantize!r}; "
            f"take --quantize {before}, or another run.dir."
        )


def check_model(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise `UsageError` if the model in the checkpoint `path` has other tensors or shapes than `shapes`, name -> shape."""
    manifest = opened(checkpoint_at(path)).manifest
    saved = {
        name.removeprefix("model/"): entry.shape
        for name, entry in manifest.tensors.items()
        if name.startswith("model/")
    }
    wrong = [
        f"{name} is {saved[name]} in it and {shape} in the model"
        for name, shape in shapes.items()
        if saved.get(name, shape) != shape
    ]
    wrong += [
        f"{name} is not in it" for name in shapes if name not in saved and f"model/{name}" not in manifest.aliases
    ]
    wrong += [f"{name} is not in the model" for name in saved if name not in shapes]
    if wrong:
        more = f", and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
        raise UsageError(
            f"checkpoint {str(path)!r} is of another model: {'; '.join(wrong[:SHOWN])}{more}. Take the model.preset or "
            "model.path it was trained with, or another run.dir."
        )
