"""Training of a user's task, and the checks of the task before ranks start."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from accordion.checkpoint import RandomState
from accordion.errors import UsageError
from accordion.models.language import brief
from accordion.tasks.classes import PartConfig
from accordion.tasks.errors import is_own, of_the_task
from accordion.tasks.loaded import (
    LoadedTask,
    data_of,
    is_indexed,
    is_loader,
    loaded,
    loss_of,
    made_optimizer,
    model_of,
    of_object,
)
from accordion.train.batches import Batches, batches_of, check_kind, means_of, rows_of, seed_all, validation_of
from accordion.train.config import JobConfig, TrainConfig
from accordion.train.data import GlobalOrder, Share
from accordion.train.metrics import Validation
from accordion.train.screen import Screen
from accordion.weights.initialise import initialise


@dataclass(frozen=True, kw_only=True)
class OwnTask:
    """A user's task, as the training loop calls it: the object `task`, or if that is None, an object of the class named in
    `parts`. `size`: number of training samples; None if unknown. `counted`: unit of the reported speed. `loaded` (the task's
    functions) and `validation` (its data) are computed at first use and not pickled."""

    parts: Mapping[str, PartConfig]
    task: object | None = None
    size: int | None = None
    counted: str = field(default="samples", init=False)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key not in ("loaded", "validation")}

    @cached_property
    def loaded(self) -> LoadedTask:
        return of_object(self.task) if self.task is not None else loaded(self.parts)

    def agreed(self) -> dict[str, str]:
        return {"samples of the training data": str(self.size)}

    def model(self, seed: int) -> nn.Module:
        seed_all(seed)
        return model_of(self.loaded)

    def units(self) -> Any:
        return self.loaded.units

    def fill(self, model: nn.Module, seed: int, *, on_meta: bool) -> None:
        """Fill the weights of the sharded `model` with the task's `init`. Without an `init`, draw them if the model was built on
        the meta device (`on_meta`), else keep them. Leaves the random generators seeded differently on each rank. Collective."""
        seed_all(seed)
        if self.loaded.init is not None:
            self.loaded.init(model)
        elif on_meta:
            initialise(model)
        seed_all(seed + 1 + dist.get_rank())

    def optimizer(self, model: nn.Module) -> Optimizer | None:
        return None if self.loaded.optimizer is None else made_optimizer(self.loaded.optimizer, model)

    def scheduler(self, optimizer: Optimizer) -> Any:
        return None if self.loaded.scheduler is None else self.loaded.scheduler(optimizer)

    def batches(self, share: Share, seed: int, *, pins: bool) -> Batches:
        data = data_of(self.loaded, "train", share.rank, share.world)
        return batches_of(data, share, seed, self.loaded.collate, pins=pins)

    def notes(self, share: Share) -> list[str]:
        if self.size is None:
            return []
        return GlobalOrder(self.size, share, 0).notes("samples")

    def loss(self, model: nn.Module, batch: Any) -> Tensor | tuple[Tensor, Tensor]:
        return loss_of(self.loaded, model, batch)

    def num_counted(self, share: Share, batches: list[Any]) -> int:
        """Return the number of samples that all ranks read in a step; without `size`, estimated from this rank's `batches`."""
        return share.global_batch if self.size is not None else share.world * sum(rows_of(batch) for batch in batches)

    def progress(self, model: nn.Module) -> dict[str, Any]:
        return {"task": self.loaded.name, "samples": self.size}

    def only(self) -> None:
        return None

    def has_data_of(self, extra: Mapping[str, Any]) -> bool:
        return bool(extra.get("samples") == self.size)

    def state(self) -> dict[str, Any]:
        return dict(self.loaded.state()) if self.loaded.state is not None else {}

    @cached_property
    def validation(self) -> Any:
        return data_of(self.loaded, "validation", dist.get_rank(), dist.get_world_size())

    @torch.no_grad()
    def validate(self, model: nn.Module, share: Share, device: torch.device) -> Validation | None:
        """Return the mean loss and metrics over the validation samples of all ranks; None if there are none. A mean that the
        task returns is weighted by batch size. Collective. Raises `UsageError` if a metric is named "loss" or is no number."""
        if self.validation is None:
            return None

        def values_of(batch: Any) -> dict[str, Any]:
            metrics = {} if self.loaded.metrics is None else dict(self.loaded.metrics(model, batch))
            if "loss" in metrics:
                raise UsageError(
                    "the task's metrics have one named 'loss', which is the name of the task's loss; give it another name."
                )
            return {"loss": self.loss(model, batch), **metrics}

        batches = validation_of(self.validation, share, self.loaded.collate, device)
        means = means_of(model, batches, values_of, device)
        if not means:
            return None
        loss = means.pop("loss")
        words = "".join(f", {name} {value:.4f}" for name, value in means.items())
        return Validation(loss=loss, words=words, metrics=means)

    def finish(self, model: nn.Module, device: torch.device, seed: int, screen: Screen) -> None:
        """Do nothing: a task has no sample to show."""


# -- before ranks start

SMALL_PARAMS = 20_000_000  # a smaller model is tried on the CPU before ranks start
OF_OPTIMIZER = ("train.lr", "train.weight_decay", "train.deepspeed")
OF_SCHEDULER = ("train.schedule", "train.warmup", "train.deepspeed")


def check_own_keys(optimizer: object | None, scheduler: object | None, config: JobConfig) -> None:
    """Raise `UsageError` if a key of `train` in `config` is not at its default, but has no effect because of the user's
    `optimizer` or `scheduler`. Either is None if the user gives none."""
    unused = dict.fromkeys(OF_SCHEDULER, "scheduler") if scheduler is not None else {}
    if optimizer is not None:
        unused |= dict.fromkeys(OF_OPTIMIZER, "optimizer")
        if config.train.schedule == "auto":
            unused |= {"train.warmup": "optimizer", "train.final_lr": "optimizer"}
    for key, what in unused.items():
        value = getattr(config.train, key.removeprefix("train."))
        if value != getattr(TrainConfig(), key.removeprefix("train.")):
            also = ", or set train.schedule too" if key in ("train.warmup", "train.final_lr") else ""
            raise UsageError(f"{key} is {value}, but has no effect with your own {what}; set it there{also}.")


def check_optimizer(make: Callable[[Any], Optimizer] | None) -> None:
    """Check that `make`, unless it is None, makes an optimizer for the parameters of a small layer. Raises `UsageError` if it
    rejects its options, or returns no optimizer or one whose step needs a closure. Raises other errors of the user's code."""
    if make is None:
        return
    params = nn.ParameterList(torch.zeros((2,) * dim, device="cpu") for dim in (2, 1))
    try:
        optimizer = made_optimizer(make, params)
    except UsageError:
        raise
    except (ValueError, TypeError, RuntimeError) as error:
        if is_own(error):
            raise
        raise UsageError(f"optimizer: {brief(error)}") from None
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise UsageError(
            f"optimizer {type(optimizer).__name__} recomputes the loss in its step, which this loop does not; take another one."
        )


def check_data(work: OwnTask, share: Share, options: TrainConfig) -> int | None:
    """Call `dataset` of the task for both splits, and return the number of training samples; None for an iterable or a loader.
    Raises `UsageError` if there is no training data, if data has a wrong type or is too little for a step, or if `options` need
    validation data and there is none. Raises `TaskError` if the user's code fails."""
    with of_the_task("dataset('train')"):
        data = data_of(work.loaded, "train", share.rank, share.world)
        check_kind(data, "train")
    with of_the_task("dataset('validation')"):
        held_out = data_of(work.loaded, "validation", share.rank, share.world)
        if held_out is not None:
            check_kind(held_out, "validation")
        elif options.patience or options.keep_best:
            key = "patience" if options.patience else "keep_best"
            raise UsageError(
                f"train.{key} compares validations, and the task {work.loaded.name!r} has no data for them: its "
                "dataset('validation') returned None; give some, or leave out the key."
            )
    if is_loader(data) or not is_indexed(data):
        return None
    if len(data) < share.global_batch:
        raise UsageError(
            f"one step takes {share.global_batch} samples (ranks x train.micro_batch x train.accumulate), and the training data "
            f"has {len(data)}; lower one of these or give more data."
        )
    return len(data)


def tried(work: OwnTask, model: nn.Module, share: Share, seed: int) -> None:
    """Try a task: read a training batch, and if `model` is small and on the CPU, compute the batch's loss.
    Restores random generators. Raises `TaskError` if the user's code fails, `UsageError` if the loss requires no gradient."""
    drawn = RandomState().state_dict()
    with of_the_task("the first batch of dataset('train')"):
        batch = next(work.batches(share, seed, pins=False))
    tensors = [*model.parameters(), *model.buffers()]
    if all(t.device.type == "cpu" for t in tensors) and sum(t.numel() for t in tensors) < SMALL_PARAMS:
        with of_the_task("loss(model, batch)"):
            loss = work.loss(model, batch)
        first = loss if isinstance(loss, Tensor) else loss[0]
        if not first.requires_grad:
            raise UsageError(
                "the task's loss does not depend on a parameter of the model, so nothing would be trained."
            )
    RandomState().load_state_dict(drawn)
