"""Steps of a run: forward and backward of micro-batches, the optimizer step, and the metrics of a step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from accordion.checkpoint import RandomState
from accordion.devices import HostCopy
from accordion.engine.hooks import engine_of
from accordion.errors import NonFiniteError
from accordion.optimizers.wrap import clip_grad_norm_, scale_gradients
from accordion.safety.finite import FiniteCheck
from accordion.state import no_sync
from accordion.train.batches import on_device
from accordion.train.build import Run
from accordion.train.metrics import StepMetrics, peak_bytes
from accordion.train.saves import RunSaves

FLEETING = (
    "it did not happen again when the step was repeated, so data and weights are not the cause: look for a faulty machine or a "
    "nondeterministic operation"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreadStep:
    """A step whose metrics the host has not read yet, with its inputs, so that the step can be repeated."""

    step: int
    lr: float
    began_s: float  # by `time.perf_counter`
    seen: list[Any]  # its micro-batches
    drawn: dict[str, Any]  # state of the random generators before it
    figures: HostCopy  # [loss, norm] summed over ranks; largest [peak bytes, wish]; gradient scale


class Steps:
    """Runs training steps and records their metrics. Call `settle` before a save, a validation or the end of the run. If
    `run.decides_on_device`, the host reads the metrics of a step after the backward of the next step, so that the device always
    has work. A nonfinite step is then repeated one step later, to find the source of NaN or inf; the weights are unchanged,
    because the device skipped the optimizer step. Afterwards the gradients of the next step are computed again."""

    def __init__(self, run: Run, saves: RunSaves, record: Callable[[StepMetrics], None]) -> None:
        """`record`: called with the metrics of each step, in order. `saves`: waited for before a `NonFiniteError`."""
        self._run, self._saves, self._record = run, saves, record
        self._unread: UnreadStep | None = None
        self._recorded_s = 0.0

    def take(self, step: int) -> None:
        """Run step number `step`: forward and backward of each micro-batch, and an optimizer step unless loss or gradients are
        NaN or inf. Records the metrics now or in the next call. Collective. Raises `NonFiniteError` if the run has to end."""
        run, began_s = self._run, time.perf_counter()
        seen = [on_device(next(run.batches), run.device) for _ in range(run.share.accumulate)]
        drawn = RandomState().state_dict()  # reading the data draws random numbers too
        loss = _backward(run, seen, run.scaler.scale)
        if not self.settle():  # the gradients were lost when the previous step was repeated
            RandomState().load_state_dict(drawn)
            loss = _backward(run, seen, run.scaler.scale)
        lr = run.rates.before(step - run.skips.total)
        run.scaler.unscale_(run.optimizer)
        norm = clip_grad_norm_(run.model, run.config.train.clip or math.inf)
        # The norm is equal on all ranks. Summing it makes all of them decide alike even if it is not.
        sums = torch.stack([loss, norm])
        numbers = (peak_bytes(run.device), run.ending.wish())
        # Filled on the device, because a copy from the host would wait for it.
        most = torch.stack([torch.full((), number, dtype=torch.int64, device=run.device) for number in numbers])
        dist.all_reduce(sums)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        figures = HostCopy([sums, most, run.scaler.scale(torch.ones((), device=run.device))])
        self._unread = UnreadStep(step=step, lr=lr, began_s=began_s, seen=seen, drawn=drawn, figures=figures)
        if run.decides_on_device:
            _step_if_finite(run.optimizer, sums)
            run.scaler.update()
            run.optimizer.zero_grad()
        else:
            self.settle()

    def settle(self) -> bool:
        """Read and record the metrics of the last step, if not done yet. If loss and gradients are finite, also take the
        optimizer step unless the device has, and update learning rates and averaged weights. Otherwise repeat the step to find
        the cause, and zero the gradients. Returns False if the step was repeated, else True. Collective. Raises
        `NonFiniteError` if the run has to end."""
        unread, self._unread = self._unread, None
        if unread is None:
            return True
        run, work = self._run, self._run.prepared.work
        (loss_sum, norm_sum), (peak, wish), scale = unread.figures.read()  # waits for the device
        run.ending.decide(wish)
        loss, norm = loss_sum / run.place.world, norm_sum / run.place.world
        is_finite = math.isfinite(loss) and math.isfinite(norm)
        if is_finite:
            run.skips.in_row = 0
        else:
            self._leave_out(unread, f"loss {loss}, gradient norm {norm}", scale)
            run.optimizer.zero_grad()
        if not run.decides_on_device:
            if is_finite:
                run.scaler.step(run.optimizer)
            run.scaler.update()
            run.optimizer.zero_grad()
        if is_finite:
            run.rates.after()
            # Here and not after the optimizer step: only now does the host know that the device has not skipped it.
            if run.ema is not None:
                run.ema.update()
        now_s = time.perf_counter()
        step_s, self._recorded_s = now_s - max(unread.began_s, self._recorded_s), now_s
        speed: dict[str, Any] = {f"{work.counted}_per_s": work.num_counted(run.share, unread.seen) / step_s}
        metrics = StepMetrics(
            step=unread.step,
            loss=loss,
            grad_norm=norm,
            lr=unread.lr,
            step_s=step_s,
            peak_bytes=peak,
            skipped=not is_finite,
            **speed,
        )
        self._record(metrics)
        return is_finite

    def _leave_out(self, unread: UnreadStep, figures: str, scale: float) -> None:
        """Repeat a nonfinite step at scale 1 to find the source of NaN or inf, and report that the step is skipped. With a
        gradient scaler, a step that is finite at scale 1 counts as an overflow. `figures`: text with loss and norm. `scale`:
        the scaler's. Raises `NonFiniteError` if `train.on_nonfinite` allows no more skipped steps."""
        run, after = self._run, RandomState().state_dict()
        run.optimizer.zero_grad()
        where = _source_of(run, unread, figures)
        RandomState().load_state_dict(after)
        if where is None and run.scaler.is_enabled():
            run.skips.total += 1
            run.screen.note(f"step {unread.step} is skipped: gradients overflowed at scale {scale:g}, which is lowered")
            return
        try:
            run.screen.note(run.skips.nonfinite(unread.step, where or f"{figures}; {FLEETING}."))
        except NonFiniteError:
            self._saves.settle()
            raise


def _source_of(run: Run, unread: UnreadStep, figures: str) -> str | None:
    """Repeat forwards and backwards of a step with its random numbers. Return text that names where NaN or inf first appears,
    equal on all ranks; None if all values are finite this time. Collective. `figures`: beginning of the text."""
    engine = engine_of(run.model)
    assert engine is not None, "the main job shards its model"
    check = FiniteCheck(engine)
    engine.observers.attach(check)
    RandomState().load_state_dict(unread.drawn)
    try:
        _backward(run, unread.seen, _finite_everywhere)
        norm = clip_grad_norm_(run.model, math.inf)
        dist.all_reduce(norm)
        if not math.isfinite(float(norm)):
            raise NonFiniteError("the gradients are finite, but the sum of their squares is not.")
    except NonFiniteError as error:
        return f"{figures}; {error}"
    finally:
        engine.observers.detach(check)
    return None


def _finite_everywhere(loss: Tensor) -> Tensor:
    """Return `loss`. Raises `NonFiniteError` on every rank if the loss of any rank is NaN or inf. Collective."""
    losses: list[Tensor] = [torch.empty_like(loss.detach()) for _ in range(dist.get_world_size())]
    dist.all_gather(losses, loss.detach())
    wrong = next((rank for rank, value in enumerate(losses) if not math.isfinite(float(value))), None)
    if wrong is not None:
        raise NonFiniteError(f"the model's outputs are finite and the loss is {float(losses[wrong])} on rank {wrong}.")
    return loss


def _step_if_finite(optimizer: Any, sums: Tensor) -> None:
    """Run a step of a fused optimizer, which changes nothing if one of `sums` is NaN or inf. The host does not wait."""
    # By this attribute `torch.amp.GradScaler` reports overflowed gradients to a fused optimizer.
    optimizer.found_inf = 1.0 - torch.isfinite(sums).all().float()
    try:
        optimizer.step()
    finally:
        del optimizer.found_inf


def _backward(run: Run, batches: list[Any], scale: Callable[[Tensor], Any]) -> Tensor:
    """Run forward and backward of `batches`, a step's micro-batches. `scale(loss)` returns the value whose backward is run.
    Returns this rank's unscaled loss, 0-d and detached; the mean over ranks is the loss of the step. Collective."""
    loss, mean_loss = torch.zeros((), device=run.device), MeanLoss(run.share.accumulate, run.place.world)
    for i, batch in enumerate(batches):
        is_summed_later = run.sums_locally and i + 1 < len(batches)
        with no_sync(run.model) if is_summed_later else nullcontext():
            mean = mean_loss.mean_of(run.prepared.work.loss(run.model, batch))
            torch.autograd.backward(scale(mean))
        loss += mean.detach()
    left = mean_loss.left()
    if left is not None:
        scale_gradients(run.model, left)
        loss *= left
    return loss


class MeanLoss:
    """Turns the (sum, count) losses of a step into the mean over all micro-batches of all ranks. The total count is known only
    after the last forward, but backwards must not wait for it. So all sums are divided by the count that results if every
    micro-batch is like the first, and gradients are multiplied by `left()` at the end."""

    def __init__(self, accumulate: int, num_ranks: int) -> None:
        self._accumulate, self._num_ranks = accumulate, num_ranks
        self._first: Tensor | None = None
        self._own: Tensor | None = None

    def mean_of(self, loss: Tensor | tuple[Tensor, Tensor]) -> Tensor:
        """Return `loss`, a mean or (sum, count) of a micro-batch, divided so that the sum over micro-batches, times `left()`, is
        this rank's loss in the step. Collective for the first (sum, count) of a step."""
        if isinstance(loss, Tensor):
            return loss / self._accumulate
        total, count = loss
        self._own = count if self._own is None else self._own + count
        if self._first is None:
            self._first = count.clone()
            dist.all_reduce(self._first)
            # If nothing counts, the sums are zero too, whatever divides them.
            self._first = torch.where(self._first == 0, 1.0, self._first) * (self._accumulate / self._num_ranks)
        return total / self._first

    def left(self) -> Tensor | None:
        """Return the factor, 0-d, by which gradients and losses have to be multiplied after the last micro-batch; None if that
        is 1. Call it once. Collective if a micro-batch had a (sum, count) loss and there are several micro-batches."""
        if self._own is None or self._first is None or self._accumulate == 1:
            return None
        dist.all_reduce(self._own)
        return self._first * self._num_ranks / torch.where(self._own == 0, 1.0, self._own)
