"""The checkpoints that a run saves while it trains, and resuming from one."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from accordion.checkpoint import RandomState, load, save
from accordion.checkpoint.background import Saving, saver_of
from accordion.errors import CheckpointError
from accordion.train import checkpoints
from accordion.train.build import Run
from accordion.train.config import flat


class RunSaves:
    """Saves checkpoints of a run, in the background if possible, and resumes from one. Call `resume` before the first step,
    `poll` after each step, and `settle` at the end."""

    def __init__(self, run: Run) -> None:
        self._run, self._options = run, run.config.checkpoint
        self.folder = run.prepared.checkpoint_dir
        # Not with states on disk, because a background save copies them into memory.
        self._in_background = self._options.background and not run.config.shard.offload.uses_disk
        # The save under way, its start by `time.perf_counter`, and its step (None for the best).
        self._under_way: tuple[Saving, float, int | None] | None = None

    def save(self, step: int, *, last: bool, name: str | None = None) -> None:
        """Wait for the previous save, then save a checkpoint of the run after `step`. Collective. `last`: do not save in the
        background. `name`: of the checkpoint's folder; None: named after the step. Raises `CheckpointError` if the previous
        save failed, or if this one fails in the foreground; the next call raises a failure in the background."""
        run = self._run
        saver_of(run.model).wait()
        self.poll()
        background, began_s = self._in_background and not last, time.perf_counter()
        extra = {  # stored once, next to the tensors
            **run.prepared.work.progress(run.model),
            "step": step,
            "config": self._settings(),
            "loader": run.batches.position(),
            "scaler": run.scaler.state_dict(),
            "skipped": run.skips.total,
            "best": run.best.state(),
        }
        saving = save(
            self.folder / name if name else checkpoints.path_of(self.folder, step),
            run.model,
            run.optimizer,
            extra=extra,
            state=self._state(),
            background=background,
            keep=0 if name else self._options.keep,
            only=run.prepared.work.only(),
        )
        self._under_way = saving, began_s, None if name else step
        if not background:
            self.poll()

    def poll(self) -> None:
        """If a save has finished since the last call, record how long it took, and with `train.keep_best`, copy its checkpoint
        to `best` if its validation loss is the lowest so far."""
        if self._under_way is None or not self._under_way[0].is_done:
            return
        (_, began_s, step), self._under_way = self._under_way, None
        self._run.ending.took("save", time.perf_counter() - began_s)
        if step is not None:
            self._link_best(step)

    def settle(self) -> None:
        """Wait for the save under way, without raising its error. Call this before process group and folders are released."""
        with suppress(CheckpointError):
            saver_of(self._run.model).wait()

    def resume(self) -> int:
        """Load the checkpoint `prepared.resume` into the objects of the run, show settings that changed since, and return the
        number of steps done. Without one, return 0. Collective. Raises `CheckpointError` if the checkpoint cannot be loaded."""
        run, path = self._run, self._run.prepared.resume
        if path is None:
            return 0
        state = self._state()
        if run.ema is not None and checkpoints.setting(path, "train.ema") != run.config.train.ema:
            del state["ema"]
            run.screen.note(f"{path} has no average of decay {run.config.train.ema}: it begins with the next step")
        try:
            extra = load(path, run.model, run.optimizer, state=state, only=run.prepared.work.only())
        except CheckpointError as error:
            raise CheckpointError(f"{error} To resume from the one before it, move it away.") from None
        if run.scaler.is_enabled() and (scale := extra["scaler"]):  # empty if it was not enabled there
            ours = run.scaler.state_dict()
            run.scaler.load_state_dict({**ours, "scale": scale["scale"], "_growth_tracker": scale["_growth_tracker"]})
        run.skips.total = int(extra.get("skipped", 0))
        run.best.load(extra.get("best", run.best.state()))
        done, steps = int(extra["step"]), run.config.train.steps
        run.screen.note(f"resumed from {path}: {done} of {steps} steps are done")
        self._find_best(path, done)
        if not (run.prepared.work.has_data_of(extra) and run.batches.resume(extra["loader"])):
            run.screen.note("the data, data.seq_len or train.seed changed since: the order of sequences starts again")
        before, current = extra["config"], self._settings()
        changed = [f"{key} {before[key]} -> {current[key]}" for key in checkpoints.differing(before, current)]
        if changed:
            run.screen.note(f"changed since: {', '.join(changed)}")
        run.rates.resume()
        if done == steps:
            run.screen.note(
                "nothing is left to train; raise train.steps to train on, or take another run.dir to start over"
            )
        return done

    def _find_best(self, path: Path, done: int) -> None:
        """With `train.keep_best`, read loss and step of the folder's best checkpoint into `run.best`. Before that, copy the
        loaded checkpoint `path` to `best` if the run was killed before it did. `done`: steps of `path`. Collective."""
        run = self._run
        if path.resolve() == checkpoints.path_of(self.folder, done).resolve():
            self._link_best(done)  # in case the run was killed between save and copy
        if run.config.train.keep_best:
            # New validations must be below the best in this folder, even if the run resumes from elsewhere.
            best = [checkpoints.best_in(self.folder) if run.place.rank == 0 else None]
            dist.broadcast_object_list(best)
            run.best.loss, run.best.step = best[0] or (None, 0)

    def _settings(self) -> dict[str, Any]:
        """Return `group.key` -> value of the run's configuration, and with them its number of ranks and its global batch."""
        return {
            **flat(self._run.config),
            "ranks": self._run.place.world,
            checkpoints.BATCH: self._run.share.global_batch,
        }

    def _state(self) -> dict[str, Any]:
        """Return name -> object with `state_dict`, for all objects whose state a checkpoint stores for each rank."""
        run = self._run
        average = {} if run.ema is None else {"ema": run.ema}
        own = {"random": RandomState(), **average}
        return {**own, **run.batches.state(), **run.rates.state(), **run.prepared.work.state()}

    def _link_best(self, step: int) -> None:
        """On rank 0, with `train.keep_best`, copy the checkpoint after `step` to `best` if its loss is the lowest so far."""
        if self._run.config.train.keep_best and self._run.place.rank == 0:
            checkpoints.keep_as_best(self.folder, step)
