"""Steps of a run: forward and backward of micro-batches, the optimizer's step, and the figures of it all."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from accordion.checkpoint import RandomState
from accordion.devices import HostCopy
from accordion.errors import CheckpointError, NonFiniteError
from accordion.optim import clip_grad_norm_, scale_gradients
from accordion.state import no_sync
from accordion.train.batches import on_device
from accordion.train.build import Run
from accordion.train.data import Share
from accordion.train.metrics import StepMetrics, peak_bytes
from accordion.train.nonfinite import FLEETING, came_up_in
from accordion.train.saves import RunSaves


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """A step that the device was given: what it will tell of it, and what doing it again takes."""

    step: int
    lr: float
    began_s: float  # by `time.perf_counter`
    seen: list[Any]  # its micro-batches
    drawn: dict[str, Any]  # the random numbers' state before it
    figures: HostCopy


class Steps:
    """Owns the step whose figures the host has not read yet, and says when they are read: at once, or one step later.

    Where the device decides by itself whether a step changes anything, the host reads a step's figures behind the next one's
    backward: the device has that to do meanwhile. What was not finite is then looked into one step later, with the weights that
    it had, which the device left alone; the gradients of the step under way are made anew behind that. `settle` before
    whatever asks how far training has come: a save, a validation, the end.
    """

    def __init__(self, run: Run, saves: RunSaves, tell: Callable[[StepMetrics], None]) -> None:
        """`tell` is called with each step's figures, in order."""
        self._run, self._saves, self._tell = run, saves, tell
        self._unread: Taken | None = None
        self._told_s = 0.0

    def __enter__(self) -> Steps:
        return self

    def __exit__(self, *exception: object) -> None:
        """After an error the record has the last step that was done all the same, if that can be read without waiting."""
        taken = self._unread
        with suppress(RuntimeError):  # of a device that answers nobody any more; there is worse to tell
            if taken is not None and taken.figures.is_ready():
                metrics = self._metrics(taken)
                if not metrics.skipped:
                    self._tell(metrics)

    def take(self, step: int) -> None:
        """Forward and backward of each micro-batch, and one optimizer step where all is finite on all ranks."""
        run, began_s = self._run, time.perf_counter()
        seen = [on_device(next(run.batches), run.device) for _ in range(run.share.accumulate)]
        drawn = RandomState().state_dict()  # after those that reading the data draws
        loss = _backward(run, seen, run.scaler.scale)
        if not self.settle():  # the gradients went when the step before was done again
            RandomState().load_state_dict(drawn)
            loss = _backward(run, seen, run.scaler.scale)
        lr = run.rates.before(step - run.skips.total)
        run.scaler.unscale_(run.optimizer)
        norm = clip_grad_norm_(run.model, run.config.train.clip or math.inf)
        # The norm is summed too, though it is the same on all ranks, so that they decide alike whatever one of them has.
        sums = torch.stack([loss, norm])
        own = (peak_bytes(run.device), run.ending.wish())
        # Filled on the device, since a copy of a host's list would wait for it.
        most = torch.stack([torch.full((), number, dtype=torch.int64, device=run.device) for number in own])
        dist.all_reduce(sums)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        figures = HostCopy([sums, most, run.scaler.scale(torch.ones((), device=run.device))])
        self._unread = Taken(step=step, lr=lr, began_s=began_s, seen=seen, drawn=drawn, figures=figures)
        if run.decides_on_device:
            self._optimize(partial(_step_if_finite, run.optimizer, sums))
        else:
            self.settle()

    def settle(self) -> bool:
        """Read and tell what was not read yet. Whether that was finite; raises `NonFiniteError` where the run ends by it."""
        taken, self._unread = self._unread, None
        if taken is None:
            return True
        run, metrics = self._run, self._metrics(taken)
        if metrics.skipped:
            self._leave_out(taken, metrics)
            run.optimizer.zero_grad()
        else:
            run.skips.passed()
        if not run.decides_on_device:
            self._optimize(None if metrics.skipped else partial(run.scaler.step, run.optimizer))
        if not metrics.skipped:
            run.rates.after()
        now_s = time.perf_counter()
        step_s, self._told_s = now_s - max(taken.began_s, self._told_s), now_s
        work = run.prepared.work
        speed: dict[str, Any] = {f"{work.counted}_per_s": work.num_counted(run.share, taken.seen) / step_s}
        self._tell(replace(metrics, step_s=step_s, **speed))
        return not metrics.skipped

    def _metrics(self, taken: Taken) -> StepMetrics:
        """Waits for the device where it has not come so far; without the time, which goes on."""
        (loss_sum, norm_sum), (peak, wish), _ = taken.figures.read()
        self._run.ending.decide(wish)
        loss, norm = loss_sum / self._run.place.world, norm_sum / self._run.place.world
        return StepMetrics(
            step=taken.step,
            loss=loss,
            grad_norm=norm,
            lr=taken.lr,
            step_s=0.0,
            peak_bytes=peak,
            skipped=not (math.isfinite(loss) and math.isfinite(norm)),
        )

    def _optimize(self, step: Callable[[], object] | None) -> None:
        """Do a step of the optimizer, None if it is left out, and what follows one."""
        try:
            if step is not None:
                step()
        except CheckpointError as error:  # of a save in the background; the step is done
            self._saves.failed(error)
        self._run.scaler.update()
        self._run.optimizer.zero_grad()

    def _leave_out(self, taken: Taken, metrics: StepMetrics) -> None:
        """Do the step again at scale 1 to find where NaN or inf came up, and do what `train.on_nonfinite` says."""
        run, after = self._run, RandomState().state_dict()
        figures = f"loss {metrics.loss}, gradient norm {metrics.grad_norm}"

        def again(scale: Callable[[Tensor], Tensor]) -> None:
            RandomState().load_state_dict(taken.drawn)
            _backward(run, taken.seen, scale)
            norm = clip_grad_norm_(run.model, math.inf)
            dist.all_reduce(norm)
            if not math.isfinite(float(norm)):
                raise NonFiniteError("the sum of squares of finite gradients is not.")

        run.optimizer.zero_grad()
        where = came_up_in(run.model, again, figures)
        RandomState().load_state_dict(after)
        if where is None and run.scaler.is_enabled():
            run.skips.overflowed()
            *_, scale = taken.figures.read()
            run.screen.note(f"step {taken.step} is left out: gradients overflowed at scale {scale:g}, which is lowered")
            return
        try:
            run.screen.note(run.skips.found(taken.step, where or f"{figures}; {FLEETING}."))
        except NonFiniteError:
            self._saves.settle()
            raise


def _step_if_finite(optimizer: Any, sums: Tensor) -> None:
    """A step that changes nothing where a sum is NaN or inf, which the device decides: the host need not know.

    A fused optimizer heeds `found_inf`, by which `torch.amp.GradScaler` tells it of gradients that overflowed.
    """
    optimizer.found_inf = 1.0 - torch.isfinite(sums).all().float()
    try:
        optimizer.step()
    finally:
        del optimizer.found_inf


def _backward(run: Run, batches: list[Any], scale: Callable[[Tensor], Any]) -> Tensor:
    """Forward and backward of a step's micro-batches; this rank's part of the loss, 0-d, whose mean over ranks is the loss."""
    loss, counted = torch.zeros((), device=run.device), Counted(run.share)
    for i, batch in enumerate(batches):
        later = run.sums_locally and i + 1 < len(batches)
        with no_sync(run.model) if later else nullcontext():
            mean = counted.mean_of(run.prepared.work.loss(run.model, batch))
            torch.autograd.backward(scale(mean))
        loss += mean.detach()
    left = counted.left()
    if left is not None:
        scale_gradients(run.model, left)
        loss *= left
    return loss


class Counted:
    """Owns the counts of a step, by which sums of losses become the mean over the micro-batches of all ranks.

    The first micro-batch divides by as many as it would be if all others counted alike; what is left to scale is known behind
    the last one. So a backward never waits for the forwards that come after it.
    """

    def __init__(self, share: Share) -> None:
        self._share = share
        self._first: Tensor | None = None
        self._own: Tensor | None = None

    def mean_of(self, loss: Tensor | tuple[Tensor, Tensor]) -> Tensor:
        """This rank's part of the step's mean, of which the mean over ranks is taken."""
        if isinstance(loss, Tensor):
            return loss / self._share.accumulate
        total, count = loss
        self._own = count if self._own is None else self._own + count
        if self._first is None:
            self._first = count.clone()
            dist.all_reduce(self._first)
            # If nothing counts, the sums are zero too, whatever divides them.
            self._first = torch.where(self._first == 0, 1.0, self._first) * (self._share.accumulate / self._share.world)
        return total / self._first

    def left(self) -> Tensor | None:
        """By what gradients and losses are to be multiplied still, 0-d and the same on all ranks; None by nothing."""
        if self._own is None or self._first is None or self._share.accumulate == 1:
            return None
        dist.all_reduce(self._own)
        return self._first * self._share.world / torch.where(self._own == 0, 1.0, self._own)
