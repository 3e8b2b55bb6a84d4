"""The training loop: what every rank does from joining the group to the sample at the end."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore, Store

from accordion import _torch
from accordion.checkpoint import RandomState, load, save
from accordion.checkpoint.background import Saving, saver_of
from accordion.checkpoint.prune import BEST
from accordion.compat.deepspeed import Settings
from accordion.config import COMPUTE_DTYPES, Place, Precision, Strategy, strategy_named
from accordion.describe import describe
from accordion.devices import HostCopy, backend_of
from accordion.errors import CheckpointError, DivergenceError, NonFiniteError, UsageError
from accordion.offload.step.deferred_step import engines_of
from accordion.optim import ELEMENTWISE, clip_grad_norm_, scale_gradients, wrap_optimizer
from accordion.shard.api import shard as shard_model
from accordion.sharding import Sharding
from accordion.state import no_sync
from accordion.train import checkpoints, run_state
from accordion.train.auto_plan import beside
from accordion.train.batches import Batches, on_device
from accordion.train.config import JobConfig, as_yaml, flat
from accordion.train.data import Share
from accordion.train.deepspeed import digest_of, settings_of
from accordion.train.ending import IS_PREEMPTED, PREEMPTED, TIME_IS_OVER, Best, Ending, Signals
from accordion.train.launch import RankPlace, first_of_all
from accordion.train.metrics import MetricsLog, StepMetrics, lines_of, peak_bytes
from accordion.train.nonfinite import FLEETING, Skips, came_up_in
from accordion.train.owner import Claim
from accordion.train.prepare import Prepared
from accordion.train.rates import LearningRates, rates_of
from accordion.train.report import page_of
from accordion.train.screen import Screen
from accordion.train.tokens import write_whole
from accordion.train.trackers import trackers_of
from accordion.units import units_named

T = TypeVar("T")
# Keys from which the options and rates of an optimizer follow.
OF_RATES = ("task.", "optimizer.", "train.lr", "train.weight_decay")


def train(
    place: RankPlace,
    store: Store,
    prepared: Prepared,
    kind: str,
    signals: Signals | None = None,
    held: ExitStack | None = None,
) -> int:
    """Train as `prepared.config` says: the whole of one rank. Its exit code: 0, or `PREEMPTED` if a signal ended the run early.

    A process that goes on behind the run gives the two last. `signals`: noted in here; else the handlers stay. `held`: takes what
    gives folders and process group back; else a run that fails keeps both until its process ends.
    """
    signals = Signals() if signals is None else signals
    held = ExitStack() if held is None else held
    config = prepared.config
    with ExitStack() as stack:
        screen = stack.enter_context(Screen(speaks=place.rank == 0))
        claim = first_of_all(place, store, lambda: _claim(config, prepared, place, screen))
        if claim is not None:
            held.callback(claim.release)
        state = stack.enter_context(
            run_state.StateFile(
                Path(prepared.run_dir), config.train.steps, prepared.checkpoint_dir, leads=place.rank == 0
            )
        )
        device = _join(place, store, kind, timedelta(seconds=config.launch.timeout_s))
        held.callback(dist.destroy_process_group)
        _agree(config, prepared, place)
        run = _make(config, prepared, place, device, signals)
        held.callback(_wait_for_save, run.model)
        screen.units(describe(run.model))
        for line in prepared.work.notes(run.share):
            screen.note(line)
        done = _resume(run, screen)
        log = stack.enter_context(_open_record(run, done, screen)) if place.rank == 0 else None
        if run.owes_validation and _validate(run, done, screen, log):
            _save(run, done, screen, last=_over(run, done) is not None, name=BEST)
        screen.start(done, config.train.steps)
        seen: list[StepMetrics] = []

        def tell(metrics: StepMetrics) -> None:
            seen.append(metrics)
            screen.step(metrics)
            run.ending.step_took(metrics.step_s)
            if log is not None:
                log.step(metrics)

        steps = stack.enter_context(Steps(run, screen, tell))
        lost: CheckpointError | None = None  # why the last step's weights were not kept
        step, over = done, _over(run, done)
        while over is None:
            step += 1
            steps.take(step)
            _look_after_save(run, screen)
            if run.ending.decided or step == config.train.steps or _due(config.train.eval_every, step):
                steps.settle()
            # Validated before it is saved, so that what is saved knows of it.
            at_the_end = step == config.train.steps and config.train.keep_best
            run.owes_validation = _due(config.train.eval_every, step) or at_the_end
            is_best = run.owes_validation and not run.ending.decided and _validate(run, step, screen, log)
            over = _over(run, step)
            saves = over is not None or _due(config.checkpoint.every, step)
            if is_best and not (saves and run.links):
                _save(run, step, screen, last=False, name=BEST)
            if saves:
                steps.settle()
                lost = _save(run, step, screen, last=over is not None)
            if over is None and _due(config.train.sample_every, step):
                steps.settle()
                screen.note(f"after {step} steps:")
                prepared.work.finish(run.model, device, config.train.seed, screen)
        screen.stop()
        _finish(run, step, over, screen, log, lost)
        if prepared.expected is not None and seen:
            screen.note(beside(prepared.expected, seen, device.type))
        if lost is not None:
            raise _not_kept(run, step, lost)
        state.ended(over.state, over.why)
        if log is not None and config.run.report and run.ending.decided != IS_PREEMPTED:
            _report(run, over, log, screen)
        dist.barrier()  # the first rank that exits with a code of its own may have its launcher end the others
    held.close()
    return PREEMPTED if run.ending.decided == IS_PREEMPTED else 0


def _wait_for_save(model: nn.Module) -> None:
    """The save under way takes the group and the folders; what became of it was told, or there is worse to tell."""
    with suppress(CheckpointError):
        saver_of(model).wait()


def _report(run: Run, over: Over, log: MetricsLog, screen: Screen) -> None:
    """Write report.html; a run is worth more than its page, so what fails is told."""
    folder = Path(run.prepared.run_dir)
    try:
        from accordion.pages.show import as_html  # plotly takes a second, which other runs do not wait for
    except ImportError:
        screen.note("no report.html: it is drawn with plotly; pip install 'accordion-fsdp[plan]'")
        return
    try:
        found = page_of(
            folder,
            run.prepared.work.name,
            run.config,
            lines_of(folder),
            log.validations,
            run.device.type,
            over.why or over.state,
            describe(run.model),
            run.prepared.expected,
        )
        write_whole(folder / f"{found.name}.html", as_html(found))
    except Exception as error:  # no room, or whatever plotly says; the other ranks wait for this one
        screen.note(f"no report.html: {' '.join(f'{type(error).__name__}: {error}'.split())}")
        return
    screen.note(f"report: {folder / found.name}.html")


def _due(every: int, step: int) -> bool:
    return every != 0 and step % every == 0


@dataclass(frozen=True, slots=True)
class Over:
    """That nothing is trained any more. `state`: as `state.json` has it. `why`: a sentence where the state does not say it."""

    state: str
    why: str = ""


def _over(run: Run, step: int) -> Over | None:
    """Whether training ends behind `step`, None where it goes on; the same on all ranks."""
    if run.ending.decided == IS_PREEMPTED:
        return Over(run_state.PREEMPTED)
    if step >= run.config.train.steps:
        return Over(run_state.FINISHED)
    if run.ending.decided == TIME_IS_OVER:
        return Over(run_state.STOPPED, f"train.hours {run.config.train.hours:g} are over")
    if run.best.is_over:
        return Over(run_state.STOPPED, f"no lower validation loss in {run.best.waited} validations (train.patience)")
    return None


def _claim(config: JobConfig, prepared: Prepared, place: RankPlace, screen: Screen) -> Claim:
    """Have the run's folders, or raise `UsageError`; before anything in them is changed."""
    # What is left of an earlier start ends by itself: a time-out in a collective, and one more where it then asks the store.
    claim = Claim(prepared.folders, place.job, 2 * config.launch.timeout_s, screen.note)
    now = checkpoints.choose(Path(prepared.checkpoint_dir), config, lambda line: None)
    if (None if now is None else str(now)) != prepared.resume:
        claim.release()
        raise UsageError(
            f"another job wrote to checkpoint.dir {prepared.checkpoint_dir!r} while this one prepared: the checkpoint to go on "
            f"from was {prepared.resume} and is {now}; start again."
        )
    return claim


@dataclass(frozen=True, slots=True)
class UnderWay:
    """A save, since when by `time.perf_counter`, and of which step; None of the best."""

    saving: Saving
    began_s: float
    step: int | None


@dataclass(slots=True, kw_only=True)
class Run:
    """What the parts of the loop share. `done`: steps when it began; `owes_validation`: of the step that was done last."""

    config: JobConfig
    prepared: Prepared
    place: RankPlace
    device: torch.device
    share: Share
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    skips: Skips
    rates: LearningRates
    batches: Batches
    sums_locally: bool
    # The device decides whether a step is left out: the optimizer is a fused one whose states are on an accelerator.
    decides_on_device: bool
    ending: Ending
    best: Best
    done: int = 0
    owes_validation: bool = False
    validated: int = -1  # the step behind which it was last
    under_way: UnderWay | None = None
    links: bool  # the best is kept, and is a link of its step's checkpoint where that is saved anyway
    saves_in_background: bool  # not with states on disk: a copy of them in memory is what they are there to avoid


def _join(place: RankPlace, store: Store, kind: str, timeout: timedelta) -> torch.device:
    """Take this rank's device and join the group of all ranks, whose collectives fail after `timeout`."""
    if kind == "cpu":
        device = torch.device("cpu")
    else:
        device = torch.device(kind, place.local_rank)
        torch.accelerator.set_device_index(place.local_rank)
    dist.init_process_group(
        backend_of(kind),
        store=PrefixStore("accordion/group", store),
        rank=place.rank,
        world_size=place.world,
        timeout=timeout,
        device_id=None if kind == "cpu" else device,
    )
    return device


def _agree(config: JobConfig, prepared: Prepared, place: RankPlace) -> None:
    """Raise `DivergenceError` on every rank where ranks found different data or another checkpoint."""
    mine = {
        **prepared.work.agreed(),
        "a checkpoint to go on from": str(prepared.resume),
        "what train.deepspeed says": digest_of(config),
    }
    found: list[dict[str, str]] = [{}] * place.world
    dist.all_gather_object(found, mine)
    for what, value in found[0].items():
        other = next((rank for rank, theirs in enumerate(found) if theirs[what] != value), None)
        if other is not None:
            raise DivergenceError(
                f"ranks differ in {what}: rank 0 has {value}, rank {other} has {found[other][what]}; give every machine the same "
                "data.path and checkpoint.dir, on storage that they share."
            )


def _make(config: JobConfig, prepared: Prepared, place: RankPlace, device: torch.device, signals: Signals) -> Run:
    """Build, shard, and connect what a run needs."""
    shard, options = config.shard, config.train
    strategy = strategy_named(shard.strategy)
    name = _precision(shard.precision, device)
    theirs = settings_of(config, name)
    offload, work = shard.offload(), prepared.work
    built = work.model(options.seed)
    on_meta = any(p.is_meta for p in built.parameters())
    units = units_named(shard.units)
    base = theirs.sharding if theirs else Sharding()
    sharding = replace(
        base,
        strategy=strategy,
        precision=replace(base.precision or Precision(), params=COMPUTE_DTYPES[name]),
        offload=offload,
        units=work.units() if units is None else units,
        checkpoint_activations=shard.checkpoint_activations,
        secondary=shard.secondary or None,
    )
    model = shard_model(built, _mesh(strategy, prepared, place, device), sharding)
    work.fill(model, options.seed, on_meta=on_meta)
    own = work.optimizer(model)
    optimizer = _optimizer(model, config, theirs, own)
    share = Share(rank=place.rank, world=place.world, micro_batch=options.micro_batch, accumulate=options.accumulate)
    state_bytes = sum(unit.parameter_bytes + unit.optimizer_bytes for unit in describe(model).units)
    return Run(
        ending=Ending(signals, hours=options.hours, began_s=prepared.began_s, state_bytes=state_bytes),
        best=Best(options.patience, options.min_delta),
        config=config,
        prepared=prepared,
        place=place,
        device=device,
        share=share,
        model=model,
        optimizer=optimizer,
        scaler=theirs.scaler(device.type) if theirs else torch.amp.GradScaler(device.type, enabled=name == "fp16"),
        skips=Skips(options.on_nonfinite, options.max_skips),
        rates=rates_of(options, optimizer, work.scheduler(optimizer), theirs, is_own=own is not None),
        batches=work.batches(share, options.seed, pins=device.type != "cpu"),
        decides_on_device=device.type != "cpu"
        and theirs is None
        and not engines_of(optimizer)
        and _is_fused(optimizer),
        sums_locally=strategy.grads is Place.REPLICATE,
        links=options.keep_best and _of_first(place, lambda: checkpoints.can_link(Path(prepared.checkpoint_dir))),
        saves_in_background=config.checkpoint.background and not offload.uses_disk,
    )


def _of_first(place: RankPlace, ask: Callable[[], T]) -> T:
    """What the first rank finds, for all of them."""
    found: list[Any] = [ask() if place.rank == 0 else None]
    dist.broadcast_object_list(found)
    answer: T = found[0]
    return answer


def _mesh(strategy: Strategy, prepared: Prepared, place: RankPlace, device: torch.device) -> DeviceMesh:
    """All ranks: over the shards, and for a hybrid over its replicas too."""
    sizes = {"shard": place.world // prepared.replicas}
    if strategy.hybrid:
        sizes = {"replicate": prepared.replicas, **sizes}
    return init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def _precision(name: str, device: torch.device) -> str:
    if name != "auto":
        return name
    if device.type == "cpu":
        return "fp32"
    return "bf16" if _torch.has_bf16(device) else "fp16"


def _optimizer(
    model: nn.Module, config: JobConfig, theirs: Settings | None, own: torch.optim.Optimizer | None
) -> torch.optim.Optimizer:
    """AdamW that decays matrices and leaves vectors alone, or what a task, a class path or a DeepSpeed configuration names."""
    options = config.train
    if own is not None:
        return wrap_optimizer(own) if isinstance(own, ELEMENTWISE) else own
    if theirs is not None and theirs.optimizer is not None:
        return wrap_optimizer(theirs.optimizer(model.parameters()))
    matrices = [p for p in model.parameters() if p.dim() >= 2 and p.requires_grad]
    vectors = [p for p in model.parameters() if p.dim() < 2 and p.requires_grad]
    groups = [{"params": matrices, "weight_decay": options.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    present = [group for group in groups if group["params"]]
    return wrap_optimizer(torch.optim.AdamW(present, lr=options.lr, betas=(0.9, 0.95), fused=True))


def _is_fused(optimizer: torch.optim.Optimizer) -> bool:
    return all(group.get("fused") for group in optimizer.param_groups)


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

    def __init__(self, run: Run, screen: Screen, tell: Callable[[StepMetrics], None]) -> None:
        """`tell` is called with each step's figures, in order."""
        self._run, self._screen, self._tell = run, screen, tell
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
        sums, figures = _of_all_ranks(run, loss, norm)
        self._unread = Taken(step=step, lr=lr, began_s=began_s, seen=seen, drawn=drawn, figures=figures)
        if run.decides_on_device:
            _optimize(run, partial(_step_if_finite, run.optimizer, sums), self._screen)
            _end(run)
        else:
            self.settle()

    def settle(self) -> bool:
        """Read and tell what was not read yet. Whether that was finite; raises `NonFiniteError` where the run ends by it."""
        taken, self._unread = self._unread, None
        if taken is None:
            return True
        run, metrics = self._run, self._metrics(taken)
        if metrics.skipped:
            _leave_out(run, taken, metrics, self._screen)
            run.optimizer.zero_grad()
        else:
            run.skips.passed()
        if not run.decides_on_device:
            if not metrics.skipped:
                _optimize(run, partial(run.scaler.step, run.optimizer), self._screen)
            _end(run)
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


def _of_all_ranks(run: Run, loss: Tensor, norm: Tensor) -> tuple[Tensor, HostCopy]:
    """The sums of loss and norm over ranks, (2,) on the device; and, on their way to the host, these, the largest peak of memory
    with what ranks wish, and the scale.

    The norm is summed too, though it is the same on all ranks: so they decide alike whatever one of them has.
    """
    sums = torch.stack([loss, norm])
    told = (peak_bytes(run.device), run.ending.wish())
    # Filled on the device: a copy of a host's list would wait for it.
    most = torch.stack([torch.full((), number, dtype=torch.int64, device=run.device) for number in told])
    dist.all_reduce(sums)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    scale = run.scaler.scale(torch.ones((), device=run.device))
    return sums, HostCopy([sums, most, scale])


def _end(run: Run) -> None:
    """What a step ends with, whether it was left out or not."""
    run.scaler.update()
    run.optimizer.zero_grad()


def _optimize(run: Run, do: Callable[[], object], screen: Screen) -> None:
    """One step of the optimizer."""
    try:
        do()
    except CheckpointError as error:  # of a save in the background; the step is done
        _not_written(run, error, screen)


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
            self._first = _at_least_something(self._first) * (self._share.accumulate / self._share.world)
        return total / self._first

    def left(self) -> Tensor | None:
        """By what gradients and losses are to be multiplied still, 0-d and the same on all ranks; None by nothing."""
        if self._own is None or self._first is None or self._share.accumulate == 1:
            return None
        dist.all_reduce(self._own)
        return self._first * self._share.world / _at_least_something(self._own)


def _at_least_something(count: Tensor) -> Tensor:
    """Where nothing counts, the sums are zero too, whatever divides them."""
    return torch.where(count == 0, torch.ones_like(count), count)


def _leave_out(run: Run, taken: Taken, metrics: StepMetrics, screen: Screen) -> None:
    """Do the step again at scale 1 to find where NaN or inf came up, and do what `train.on_nonfinite` says."""
    after, found = RandomState().state_dict(), f"loss {metrics.loss}, gradient norm {metrics.grad_norm}"

    def again(scale: Callable[[Tensor], Tensor]) -> None:
        RandomState().load_state_dict(taken.drawn)
        _backward(run, taken.seen, scale)
        norm = clip_grad_norm_(run.model, math.inf)
        dist.all_reduce(norm)
        if not math.isfinite(float(norm)):
            raise NonFiniteError("the sum of squares of finite gradients is not.")

    run.optimizer.zero_grad()
    where = came_up_in(run.model, again, found)
    RandomState().load_state_dict(after)
    if where is None and run.scaler.is_enabled():
        run.skips.overflowed()
        *_, scale = taken.figures.read()
        screen.note(f"step {taken.step} is left out: gradients overflowed at scale {scale:g}, which is lowered")
        return
    try:
        screen.note(run.skips.found(taken.step, where or f"{found}; {FLEETING}."))
    except NonFiniteError:
        with suppress(CheckpointError):  # there is worse to tell
            saver_of(run.model).wait()
        raise


def _open_record(run: Run, done: int, screen: Screen) -> MetricsLog:
    """Write down what is run, and open the record; rank 0 only. Raises `UsageError` where the folder takes nothing even now."""
    folder = Path(run.prepared.run_dir)
    try:
        (folder / "config.yaml").write_text(as_yaml(run.config), encoding="utf-8")
        return MetricsLog(folder, done, screen.note, trackers_of(run.config, folder, done, screen.note))
    except OSError as error:
        raise UsageError(
            f"the record of the run cannot be written in run.dir {str(folder)!r}: {error.strerror or error}; make room, or take "
            "another run.dir."
        ) from None


def _settings(run: Run) -> dict[str, Any]:
    """The keys of the run, its number of ranks, and the batch that follows from these."""
    return {**flat(run.config), "ranks": run.place.world, checkpoints.BATCH: run.share.global_batch}


def _progress(run: Run, step: int) -> dict[str, Any]:
    """What a checkpoint keeps of a run beside its tensors; `_resume` reads it."""
    return {
        **run.prepared.work.progress(run.model),
        "step": step,
        "config": _settings(run),
        "loader": run.batches.kept(),
        "scaler": run.scaler.state_dict(),
        "skipped": run.skips.total,
        "best": run.best.state(),
        "owes_validation": run.owes_validation,
    }


def _state_of(run: Run) -> dict[str, Any]:
    """What a checkpoint keeps for each rank."""
    return {"random": RandomState(), **run.batches.state(), **run.rates.state(), **run.prepared.work.state()}


def _save(run: Run, step: int, screen: Screen, *, last: bool, name: str | None = None) -> CheckpointError | None:
    """Save, or do what `checkpoint.on_error` says; why nothing was written, where that is known already.

    `name`: of the checkpoint, where its step is not.
    """
    options, extra = run.config.checkpoint, _progress(run, step)
    folder = Path(run.prepared.checkpoint_dir)
    path = folder / name if name else checkpoints.path_of(folder, step)
    state = _state_of(run)
    try:
        saver_of(run.model).wait()
    except CheckpointError as error:  # of the save before, which says nothing of this one
        _not_written(run, error, screen)
    _look_after_save(run, screen)
    try:
        background, began_s = run.saves_in_background and not last, time.perf_counter()
        keep, only = 0 if name else options.keep, run.prepared.work.kept()
        saving = save(
            path, run.model, run.optimizer, extra=extra, state=state, background=background, keep=keep, only=only
        )
        run.under_way = UnderWay(saving, began_s, None if name else step)
        if not background:
            _look_after_save(run, screen)
    except CheckpointError as error:
        _not_written(run, error, screen)
        return error
    return None


def _look_after_save(run: Run, screen: Screen) -> None:
    """If the save under way is done: note how long it took, and have it be the best too if it is."""
    saved = run.under_way
    if saved is None or not saved.saving.is_done:
        return
    run.ending.save_took(time.perf_counter() - saved.began_s)
    run.under_way = None
    if saved.step is not None:
        _link_best(run, saved.step, screen)


def _link_best(run: Run, step: int, screen: Screen) -> None:
    """Have the checkpoint after `step` be the best too if it is."""
    if run.links and run.place.rank == 0:
        try:
            checkpoints.keep_as_best(Path(run.prepared.checkpoint_dir), step)
        except CheckpointError as error:
            _not_written(run, error, screen)


def _not_kept(run: Run, step: int, error: CheckpointError) -> CheckpointError:
    """For the end of a run that trained on past the failure and has nothing to show for its last steps."""
    newest = checkpoints.kept(Path(run.prepared.checkpoint_dir))
    kept = (
        f"the newest checkpoint is {newest}, from which {_same_command(run)} goes on"
        if newest
        else "there is no checkpoint"
    )
    return CheckpointError(f"the weights after step {step} were not kept, {kept}: {error}")


def _same_command(run: Run) -> str:
    """What goes on from the newest checkpoint."""
    refuses = run.config.checkpoint.resume == "none"
    return "the same command with --checkpoint.resume auto" if refuses else "the same command"


def _not_written(run: Run, error: CheckpointError, screen: Screen) -> None:
    """Do what `checkpoint.on_error` says."""
    if run.config.checkpoint.on_error == "stop":
        raise error
    screen.note(f"no checkpoint: {error}; training goes on")


def _resume(run: Run, screen: Screen) -> int:
    """Fill the run from the checkpoint that was chosen; how many steps are done."""
    path = run.prepared.resume
    if path is None:
        return 0
    try:
        extra = load(path, run.model, run.optimizer, state=_state_of(run), only=run.prepared.work.kept())
    except CheckpointError as error:
        raise CheckpointError(f"{error} --checkpoint.resume takes the path of another one.") from None
    if run.scaler.is_enabled() and (scale := extra["scaler"]):  # empty if it was not enabled there
        ours = run.scaler.state_dict()
        run.scaler.load_state_dict({**ours, "scale": scale["scale"], "_growth_tracker": scale["_growth_tracker"]})
    run.skips.total = int(extra.get("skipped", 0))
    run.best.load(extra.get("best", run.best.state()))
    run.owes_validation = bool(extra.get("owes_validation"))
    run.done = done = int(extra["step"])
    screen.note(f"resumed from {path}: {done} of {run.config.train.steps} steps are done")
    if run.config.checkpoint.resume != "auto" and run.place.rank == 0:
        # They would be the newest for every later start. Only now, when the one to go back to is known to load.
        aside = checkpoints.set_aside(Path(run.prepared.checkpoint_dir), done)
        if aside is not None:
            screen.note(f"checkpoints of later steps are in {aside} now")
    folder = Path(run.prepared.checkpoint_dir)
    if Path(path).resolve() == checkpoints.path_of(folder, done).resolve():
        _link_best(run, done, screen)  # where a run was killed between the two
    if run.config.train.keep_best:
        # What the folder holds later ones are to be below, wherever this run comes from.
        run.best.loss, run.best.step = _of_first(run.place, lambda: checkpoints.best_in(folder)) or (None, 0)
    if not (run.prepared.work.has_data_of(extra) and run.batches.go_on(extra["loader"])):
        screen.note("the data, data.seq_len or train.seed changed since: the order of sequences starts anew")
    before, now = extra["config"], _settings(run)
    changed = checkpoints.differing(before, now)
    if changed:
        screen.note("changed since: " + ", ".join(f"{key} {before[key]} -> {now[key]}" for key in changed))
    run.rates.resume(done - run.skips.total, changed=any(key.startswith(OF_RATES) for key in changed))
    if done == run.config.train.steps:
        screen.note("nothing is left to train; raise train.steps to go on, or take another run.dir to start over")
    return done


def _validate(run: Run, step: int, screen: Screen, log: MetricsLog | None) -> bool:
    """Whether it is the best so far, and to be kept as such. All ranks answer alike."""
    began_s = time.perf_counter()
    found = run.prepared.work.validate(run.model, run.share, run.device)
    run.owes_validation, run.validated = False, step
    if found is None:
        return False
    run.ending.validation_took(time.perf_counter() - began_s)
    is_best = run.best.look(step, found.loss) and run.config.train.keep_best
    screen.note(f"validation loss {found.loss:.4f} after {step} steps{found.words}{', the best so far' * is_best}")
    if log is not None:
        log.validation(step, found.loss, found.metrics)
    return is_best


def _finish(
    run: Run, steps: int, over: Over, screen: Screen, log: MetricsLog | None, lost: CheckpointError | None
) -> None:
    """The end: validation loss, where things lie, and what the trained model does; no more of it than there is time for."""
    has_time = not run.ending.decided
    if has_time and run.validated != steps and _validate(run, steps, screen, log):
        _save(run, steps, screen, last=True, name=BEST)
    is_finished = over.state == run_state.FINISHED
    if not is_finished:
        screen.note(f"stopped after {steps} of {run.config.train.steps} steps: {over.why or over.state}")
    folder = Path(run.prepared.checkpoint_dir)
    newest = checkpoints.path_of(folder, steps)
    held = str(newest) if lost is None and newest.is_dir() else None
    at = held or (checkpoints.kept(folder) if lost is not None else None) or run.prepared.resume
    screen.note(f"checkpoint: {at}" if at else f"no checkpoint in {folder}")
    screen.note(f"metrics: {Path(run.prepared.run_dir) / 'metrics.jsonl'}; tensorboard --logdir {run.prepared.run_dir}")
    if run.config.train.keep_best and run.place.rank == 0 and (best := checkpoints.best_in(folder)) is not None:
        screen.note(f"best: {folder / BEST}, validation loss {best[0]:.4f} after {best[1]} steps")
    if not has_time:
        left_out = "makes up for the last validation, for which no time was left"
        screen.note(f"{_same_command(run)} {left_out if is_finished else 'goes on from there'}")
        return
    run.prepared.work.finish(run.model, run.device, run.config.train.seed, screen)
