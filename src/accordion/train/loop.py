"""The training loop: what every rank does from joining the group to the sample at the end."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore, Store
from torchdata.stateful_dataloader import StatefulDataLoader

import accordion as acc
from accordion import _torch
from accordion.checkpoint import RandomState, load, save
from accordion.checkpoint.background import saver_of
from accordion.compat.deepspeed import Schedule, Settings
from accordion.config import COMPUTE_DTYPES, Place, strategy_named
from accordion.devices import backend_of
from accordion.models.language import language_model
from accordion.offload.step.deferred_step import engines_of
from accordion.train import checkpoints
from accordion.train.auto_plan import beside
from accordion.train.config import Config, TrainConfig, as_yaml, flat
from accordion.train.data import GlobalOrder, Share, make_loader, validation_batches
from accordion.train.deepspeed import digest_of, settings_of
from accordion.train.evaluate import sample, token_losses, validation_loss
from accordion.train.launch import RankPlace, first_of_all
from accordion.train.metrics import MetricsLog, StepMetrics, peak_bytes
from accordion.train.model import configuration, fill
from accordion.train.nonfinite import FLEETING, Skips, came_up_in
from accordion.train.owner import Claim
from accordion.train.prepare import Prepared
from accordion.train.screen import Screen
from accordion.units import units_named

LAST_LR = 0.1  # the cosine ends at this share of the peak
PROMPT_TOKENS, SAMPLE_TOKENS = 16, 64


def train(place: RankPlace, store: Store, config: Config, prepared: Prepared, kind: str) -> None:
    """Train as `config` says: the whole of one rank."""
    with ExitStack() as stack:
        screen = stack.enter_context(Screen(speaks=place.rank == 0))
        claim = first_of_all(place, store, lambda: _claim(config, prepared, place, screen))
        device = _join(place, store, kind, timedelta(seconds=config.launch.timeout_s))
        _agree(config, prepared, place)
        run = _make(config, prepared, place, device)
        screen.units(acc.describe(run.model))
        _say_share(run, screen)
        done = _resume(run, screen)
        log = stack.enter_context(_open_record(run, done, screen)) if place.rank == 0 else None
        screen.start(done, config.train.steps)
        seen: list[StepMetrics] = []

        def tell(metrics: StepMetrics) -> None:
            seen.append(metrics)
            screen.step(metrics)
            if log is not None:
                log.step(metrics)

        steps = stack.enter_context(Steps(run, screen, tell))
        lost: acc.CheckpointError | None = None  # why the last step's weights were not kept
        for step in range(done + 1, config.train.steps + 1):
            steps.take(step)
            last = step == config.train.steps
            if last or (config.checkpoint.every and step % config.checkpoint.every == 0):
                steps.settle()
                lost = _save(run, step, screen, last=last)
            if not last and config.train.eval_every and step % config.train.eval_every == 0:
                steps.settle()
                _validate(run, step, screen, log)
        screen.stop()
        _finish(run, screen, log, lost)
        if prepared.expected is not None and seen:
            screen.note(beside(prepared.expected, seen, device.type))
        if lost is not None:
            raise _not_kept(run, lost)
    dist.destroy_process_group()
    if claim is not None:
        claim.release()


def _claim(config: Config, prepared: Prepared, place: RankPlace, screen: Screen) -> Claim:
    """Have the run's folders, or raise `UsageError`; before anything in them is changed."""
    # What is left of an earlier start ends by itself: a time-out in a collective, and one more where it then asks the store.
    claim = Claim(prepared.folders, place.job, 2 * config.launch.timeout_s, screen.note)
    now = checkpoints.choose(Path(prepared.checkpoint_dir), config.checkpoint.resume, lambda line: None)
    if (None if now is None else str(now)) != prepared.resume:
        claim.release()
        raise acc.UsageError(
            f"another job wrote to checkpoint.dir {prepared.checkpoint_dir!r} while this one prepared: the checkpoint to go on "
            f"from was {prepared.resume} and is {now}; start again."
        )
    return claim


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What the parts of the loop share."""

    config: Config
    prepared: Prepared
    place: RankPlace
    device: torch.device
    share: Share
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    skips: Skips
    rate: Callable[[int], float]  # the learning rate of step 1, 2, ...
    loader: StatefulDataLoader
    sums_locally: bool
    # The device decides whether a step is left out: the optimizer is a fused one whose states are on an accelerator.
    decides_on_device: bool
    saves_behind: bool  # not with states on disk: a copy of them in memory is what they are there to avoid


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


def _agree(config: Config, prepared: Prepared, place: RankPlace) -> None:
    """Raise `DivergenceError` on every rank where ranks found different data or another checkpoint."""
    tokens = prepared.tokens
    mine = {
        "training tokens": f"{tokens.num_train:,} ({tokens.digest[:12]})",
        "a tokenizer": tokens.tokenizer_digest[:12],
        "a checkpoint to go on from": str(prepared.resume),
        "what train.deepspeed says": digest_of(config),
    }
    found: list[dict[str, str]] = [{}] * place.world
    dist.all_gather_object(found, mine)
    for what, value in found[0].items():
        other = next((rank for rank, theirs in enumerate(found) if theirs[what] != value), None)
        if other is not None:
            raise acc.DivergenceError(
                f"ranks differ in {what}: rank 0 has {value}, rank {other} has {found[other][what]}; give every machine the same "
                "data.path and checkpoint.dir, on storage that they share."
            )


def _make(config: Config, prepared: Prepared, place: RankPlace, device: torch.device) -> Run:
    """Build, shard, and connect what a run needs."""
    shard, options = config.shard, config.train
    strategy = strategy_named(shard.strategy)
    name = _precision(shard.precision, device)
    theirs = settings_of(config, name)
    offload = shard.offload()
    model = acc.shard(
        language_model(configuration(config.model, config.data), config.model.path or config.model.preset),
        _mesh(strategy, prepared, place, device),
        units=units_named(shard.units),
        strategy=strategy,
        precision=replace(theirs.precision if theirs else acc.Precision(), params=COMPUTE_DTYPES[name]),
        checkpoint_activations=shard.checkpoint_activations,
        secondary=shard.secondary or None,
        offload=offload,
        reduce_op=theirs.reduce_op if theirs else "mean",
    )
    fill(model, config.model, options.seed)
    optimizer = _optimizer(model, options, theirs)
    share = Share(rank=place.rank, world=place.world, micro_batch=options.micro_batch, accumulate=options.accumulate)
    return Run(
        config=config,
        prepared=prepared,
        place=place,
        device=device,
        share=share,
        model=model,
        optimizer=optimizer,
        scaler=theirs.scaler(device.type) if theirs else torch.amp.GradScaler(device.type, enabled=name == "fp16"),
        skips=Skips(options.on_nonfinite, options.max_skips),
        rate=partial(lr_at, options=options, schedule=theirs.scheduler if theirs else None),
        loader=make_loader(
            prepared.tokens.read("train"), config.data.seq_len, share, options.seed, pins=device.type != "cpu"
        ),
        decides_on_device=device.type != "cpu" and theirs is None and not engines_of(optimizer),
        sums_locally=strategy.grads is Place.REPLICATE,
        saves_behind=config.checkpoint.background and not offload.uses_disk,
    )


def _mesh(strategy: acc.Strategy, prepared: Prepared, place: RankPlace, device: torch.device) -> DeviceMesh:
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


def _optimizer(model: nn.Module, options: TrainConfig, theirs: Settings | None) -> torch.optim.Optimizer:
    """AdamW that decays matrices and leaves vectors alone, or what a DeepSpeed configuration names."""
    if theirs is not None and theirs.optimizer is not None:
        return acc.wrap_optimizer(theirs.optimizer(model.parameters()))
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": options.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    present = [group for group in groups if group["params"]]
    return acc.wrap_optimizer(torch.optim.AdamW(present, lr=options.lr, betas=(0.9, 0.95), fused=True))


def _say_share(run: Run, screen: Screen) -> None:
    order, share = _order_of(run), run.share
    sizes = f"{share.world} ranks x {share.micro_batch} x {share.accumulate}"
    screen.note(f"a step is {share.global_batch} sequences of {run.config.data.seq_len} tokens: {sizes}")
    uneven = f"; {order.num_dropped} more are left out, so that ranks stay even" if order.num_dropped else ""
    screen.note(f"an epoch is {order.steps_per_epoch:,} steps{uneven}")


def _order_of(run: Run) -> GlobalOrder:
    """The order of sequences, of which each rank takes its share."""
    order = run.loader.batch_sampler
    assert isinstance(order, GlobalOrder)
    return order


def lr_at(step: int, options: TrainConfig, schedule: Schedule | None = None) -> float:
    """The learning rate of step 1, 2, ...: that of `schedule`, else linear warmup, then a cosine down to a tenth."""
    if schedule is not None:
        return schedule.lr(step - 1, options.lr)
    if step <= options.warmup:
        return options.lr * step / options.warmup
    left = (step - options.warmup) / max(1, options.steps - options.warmup)
    return options.lr * (LAST_LR + (1 - LAST_LR) * 0.5 * (1 + math.cos(math.pi * min(1.0, left))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """A step that the device was given: what it will tell of it, and what doing it again takes."""

    step: int
    lr: float
    began_s: float  # by `time.perf_counter`
    seen: list[Tensor]  # its micro-batches
    drawn: dict[str, Any]  # the random numbers' state before it
    figures: Figures


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
        self._batches = iter(run.loader)
        self._unread: Taken | None = None
        self._told_s = 0.0

    def __enter__(self) -> Steps:
        return self

    def __exit__(self, *exception: object) -> None:
        """After an error the record has the last step that was done all the same, if that can be read without waiting."""
        taken = self._unread
        with suppress(RuntimeError):  # of a device that answers nobody any more; there is worse to tell
            if taken is not None and taken.figures.have_come():
                metrics = self._metrics(taken)
                if not metrics.skipped:
                    self._tell(metrics)

    def take(self, step: int) -> None:
        """Forward and backward of each micro-batch, and one optimizer step where all is finite on all ranks."""
        run, began_s = self._run, time.perf_counter()
        drawn, seen = RandomState().state_dict(), list[Tensor]()
        loss = _backward(run, self._batches, seen, run.scaler.scale)
        if not self.settle():  # the gradients went when the step before was done again
            RandomState().load_state_dict(drawn)
            loss = _backward(run, iter(seen), [], run.scaler.scale)
        lr = run.rate(step - run.skips.total)
        for group in run.optimizer.param_groups:
            group["lr"] = lr
        run.scaler.unscale_(run.optimizer)
        norm = acc.clip_grad_norm_(run.model, run.config.train.clip or math.inf)
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
        now_s = time.perf_counter()
        step_s, self._told_s = now_s - max(taken.began_s, self._told_s), now_s
        tokens = run.share.global_batch * run.config.data.seq_len
        self._tell(replace(metrics, step_s=step_s, tokens_per_s=tokens / step_s))
        return not metrics.skipped

    def _metrics(self, taken: Taken) -> StepMetrics:
        """Waits for the device where it has not come so far; without the time, which goes on."""
        (loss_sum, norm_sum), peak, _ = taken.figures.read()
        loss, norm = loss_sum / self._run.place.world, norm_sum / self._run.place.world
        return StepMetrics(
            step=taken.step,
            loss=loss,
            grad_norm=norm,
            lr=taken.lr,
            tokens_per_s=0.0,
            step_s=0.0,
            peak_bytes=peak,
            skipped=not (math.isfinite(loss) and math.isfinite(norm)),
        )


def _of_all_ranks(run: Run, loss: Tensor, norm: Tensor) -> tuple[Tensor, Figures]:
    """The sums of loss and norm over ranks, (2,) on the device; and they, the largest peak of memory and the scale, on their way
    to the host.

    The norm is summed too, though it is the same on all ranks: so they decide alike whatever one of them has.
    """
    sums = torch.stack([loss, norm])
    most = torch.full((), peak_bytes(run.device), dtype=torch.int64, device=run.device)
    dist.all_reduce(sums)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    scale = run.scaler.scale(torch.ones((), device=run.device))
    return sums, Figures([sums, most, scale])


def _end(run: Run) -> None:
    """What a step ends with, whether it was left out or not."""
    run.scaler.update()
    run.optimizer.zero_grad()


class Figures:
    """Owns numbers of the device on their way to the host, which may give the device more to do meanwhile."""

    def __init__(self, tensors: list[Tensor]) -> None:
        """Begin to copy them behind all that the current stream was given."""
        device = tensors[0].device
        self._event: torch.Event | None = None
        self._held = tensors
        if device.type != "cpu":
            self._held = [torch.empty_like(tensor, device="cpu", pin_memory=True) for tensor in tensors]
            for held, tensor in zip(self._held, tensors, strict=True):
                held.copy_(tensor, non_blocking=True)
            self._event = torch.Event(device)
            self._event.record()

    def have_come(self) -> bool:
        return self._event is None or self._event.query()

    def read(self) -> list[Any]:
        """Wait for them, and for nothing that the device was given since."""
        if self._event is not None and not self._event.query():
            self._event.synchronize()
        return [held.tolist() for held in self._held]


def _optimize(run: Run, do: Callable[[], object], screen: Screen) -> None:
    """One step of the optimizer."""
    try:
        do()
    except acc.CheckpointError as error:  # of a save in the background; the step is done
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


def _backward(run: Run, batches: Iterator[Tensor], seen: list[Tensor], scale: Callable[[Tensor], Any]) -> Tensor:
    """Forward and backward of the next micro-batches, which `seen` keeps; this rank's loss, 0-d."""
    options = run.config.train
    num_tokens = options.micro_batch * run.config.data.seq_len  # of a micro-batch, the same in each
    loss = torch.zeros((), device=run.device)
    for i in range(options.accumulate):
        seen.append(next(batches).to(run.device, non_blocking=True))
        later = run.sums_locally and i + 1 < options.accumulate
        with acc.no_sync(run.model) if later else nullcontext():
            mean = token_losses(run.model, seen[-1]) / (num_tokens * options.accumulate)
            torch.autograd.backward(scale(mean))
        loss += mean.detach()
    return loss


def _leave_out(run: Run, taken: Taken, metrics: StepMetrics, screen: Screen) -> None:
    """Do the step again at scale 1 to find where NaN or inf came up, and do what `train.on_nonfinite` says."""
    after, found = RandomState().state_dict(), f"loss {metrics.loss}, gradient norm {metrics.grad_norm}"

    def again(scale: Callable[[Tensor], Tensor]) -> None:
        RandomState().load_state_dict(taken.drawn)
        _backward(run, iter(taken.seen), [], scale)
        norm = acc.clip_grad_norm_(run.model, math.inf)
        dist.all_reduce(norm)
        if not math.isfinite(float(norm)):
            raise acc.NonFiniteError("the sum of squares of finite gradients is not.")

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
    except acc.NonFiniteError:
        with suppress(acc.CheckpointError):  # there is worse to tell
            saver_of(run.model).wait()
        raise


def _open_record(run: Run, done: int, screen: Screen) -> MetricsLog:
    """Write down what is run, and open the record; rank 0 only. Raises `UsageError` where the folder takes nothing even now."""
    folder = Path(run.prepared.run_dir)
    try:
        (folder / "config.yaml").write_text(as_yaml(run.config))
        return MetricsLog(folder, done, screen.note)
    except OSError as error:
        raise acc.UsageError(
            f"the record of the run cannot be written in run.dir {str(folder)!r}: {error.strerror or error}; make room, or take "
            "another run.dir."
        ) from None


def _progress(run: Run, step: int) -> dict[str, Any]:
    """What a checkpoint keeps of a run beside its tensors; `_resume` reads it."""
    return {
        "model_config": json.loads(run.model.config.to_json_string(use_diff=False)),  # type: ignore[operator, union-attr]
        "step": step,
        "config": flat(run.config),
        "data": run.prepared.tokens.digest,
        "tokenizer": run.prepared.tokens.tokenizer_digest,
        "loader": dict(run.loader.state_dict()),
        "scaler": run.scaler.state_dict(),
        "skipped": run.skips.total,
    }


def _save(run: Run, step: int, screen: Screen, *, last: bool) -> acc.CheckpointError | None:
    """Save, or do what `checkpoint.on_error` says; why nothing was written, where that is known already."""
    options, extra = run.config.checkpoint, _progress(run, step)
    path = checkpoints.path_of(Path(run.prepared.checkpoint_dir), step)
    state = {"random": RandomState()}
    try:
        saver_of(run.model).wait()
    except acc.CheckpointError as error:  # of the save before, which says nothing of this one
        _not_written(run, error, screen)
    try:
        behind = run.saves_behind and not last
        save(path, run.model, run.optimizer, extra=extra, state=state, background=behind, keep=options.keep)
    except acc.CheckpointError as error:
        _not_written(run, error, screen)
        return error
    return None


def _not_kept(run: Run, error: acc.CheckpointError) -> acc.CheckpointError:
    """For the end of a run that trained on past the failure and has nothing to show for its last steps."""
    newest = checkpoints.kept(Path(run.prepared.checkpoint_dir))
    kept = (
        f"the newest checkpoint is {newest}, from which the same command goes on"
        if newest
        else "there is no checkpoint"
    )
    return acc.CheckpointError(f"the weights after step {run.config.train.steps} were not kept, {kept}: {error}")


def _not_written(run: Run, error: acc.CheckpointError, screen: Screen) -> None:
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
        extra = load(path, run.model, run.optimizer, state={"random": RandomState()})
    except acc.CheckpointError as error:
        raise acc.CheckpointError(f"{error} --checkpoint.resume takes the path of another one.") from None
    run.scaler.load_state_dict(extra["scaler"])
    run.skips.total = int(extra.get("skipped", 0))
    done = int(extra["step"])
    screen.note(f"resumed from {path}: {done} of {run.config.train.steps} steps are done")
    same_data = extra["data"] == run.prepared.tokens.digest
    if same_data and _order_of(run).continues(extra["loader"]["_index_sampler_state"]):
        run.loader.load_state_dict(extra["loader"])
    else:
        screen.note("the data, data.seq_len or train.seed changed since: the order of sequences starts anew")
    changed = _changes(extra["config"], flat(run.config))
    if changed:
        screen.note(f"changed since: {', '.join(changed)}")
    if done == run.config.train.steps:
        screen.note("nothing is left to train; raise train.steps to go on, or take another run.dir to start over")
    return done


def _changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Settings of the maths that differ from those of the checkpoint, as `key old -> new`."""
    keys = [key for key in now if key.startswith(("model.", "data.", "train.", "shard.precision"))]
    return [f"{key} {before[key]} -> {now[key]}" for key in keys if key in before and before[key] != now[key]]


def _validate(run: Run, step: int, screen: Screen, log: MetricsLog | None) -> float:
    tokens = run.prepared.tokens.read("validation")
    loss = validation_loss(run.model, validation_batches(tokens, run.config.data.seq_len, run.share), run.device)
    screen.note(f"validation loss {loss:.4f} after {step} steps (perplexity {math.exp(min(loss, 700.0)):,.1f})")
    if log is not None:
        log.validation(step, loss)
    return loss


def _finish(run: Run, screen: Screen, log: MetricsLog | None, lost: acc.CheckpointError | None) -> None:
    """The end: validation loss, where things lie, and generated text."""
    steps = run.config.train.steps
    _validate(run, steps, screen, log)
    folder = Path(run.prepared.checkpoint_dir)
    newest = checkpoints.path_of(folder, steps)
    held = str(newest) if lost is None and newest.is_dir() else None
    at = held or (checkpoints.kept(folder) if lost is not None else None) or run.prepared.resume
    screen.note(f"checkpoint: {at}" if at else f"no checkpoint in {folder}")
    screen.note(f"metrics: {Path(run.prepared.run_dir) / 'metrics.jsonl'}; tensorboard --logdir {run.prepared.run_dir}")
    prompt = [int(token) for token in run.prepared.tokens.read("validation")[:PROMPT_TOKENS]]
    written = sample(run.model, run.device, prompt, SAMPLE_TOKENS, run.config.data.seq_len, run.config.train.seed)
    tokenizer = run.prepared.tokens.tokenizer()
    screen.sample(tokenizer.decode(prompt), tokenizer.decode(written))
