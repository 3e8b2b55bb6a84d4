"""Training of a task of the user's."""

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
    count_of,
    data_of,
    loaded,
    loss_of,
    made_optimizer,
    model_of,
    of_object,
    scalar_of,
)
from accordion.train.batches import (
    Batches,
    batches_of,
    kind_of,
    on_device,
    rows_of,
    seed_all,
    validation_of,
)
from accordion.train.config import JobConfig, TrainConfig
from accordion.train.data import GlobalOrder, Share
from accordion.train.metrics import Validation
from accordion.train.screen import Screen
from accordion.weights.initialise import initialise


@dataclass(frozen=True, kw_only=True)
class OwnTask:
    """The task that `parts` name, or `task` itself. `size`: samples of the training data, where it can be said.

    A copy that is pickled has none of what was loaded, and loads it again.
    """

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
        """Ranks draw different random numbers afterwards, for dropout."""
        seed_all(seed)
        if self.loaded.init is not None:
            self.loaded.init(model)
        elif on_meta:
            initialise(model)
        seed_all(seed + 1 + dist.get_rank())

    def optimizer(self, model: nn.Module) -> Optimizer | None:
        return None if self.loaded.optimizer is None else made_optimizer(self.loaded.optimizer, model)

    def scheduler(self, optimizer: Optimizer) -> Any:
        if self.loaded.scheduler is None:
            return None
        made = self.loaded.scheduler(optimizer)
        if not all(hasattr(made, name) for name in ("step", "state_dict", "load_state_dict")):
            raise UsageError(
                f"the task's scheduler(optimizer) gave a {type(made).__name__}; it takes a torch.optim.lr_scheduler.LRScheduler."
            )
        return made

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
        """Of a loader, as many samples of each rank as of this one."""
        return share.global_batch if self.size is not None else share.world * sum(rows_of(batch) for batch in batches)

    def progress(self, model: nn.Module) -> dict[str, Any]:
        return {"task": self.loaded.name, "samples": self.size}

    def kept(self) -> None:
        return None

    def has_data_of(self, extra: Mapping[str, Any]) -> bool:
        return bool(extra.get("samples") == self.size)

    def state(self) -> dict[str, Any]:
        return dict(self.loaded.state()) if self.loaded.state is not None else {}

    @cached_property
    def validation(self) -> Any:
        """The held-out data of this rank, which is made once."""
        return data_of(self.loaded, "validation", dist.get_rank(), dist.get_world_size())

    @torch.no_grad()
    def validate(self, model: nn.Module, share: Share, device: torch.device) -> Validation | None:
        """Means over all samples of all ranks; a mean of the task's counts for the samples of its batch."""
        if self.validation is None:
            return None
        drawn, was_training = RandomState().state_dict(), model.training
        model.eval()
        sums: dict[str, Tensor] = {}  # name -> sum and count, (2,)
        for batch, num_samples in validation_of(self.validation, share, self.loaded.collate, device):
            here = on_device(batch, device)
            found: dict[str, Any] = {"loss": self.loss(model, here)}
            if self.loaded.metrics is not None:
                found |= _metrics(self.loaded.metrics(model, here))
            for name, value in found.items():
                sums[name] = sums.get(name, 0.0) + _weighed(name, value, num_samples, device)
        model.train(was_training)
        RandomState().load_state_dict(drawn)
        if not sums:
            return None
        total = torch.stack(list(sums.values()))
        dist.all_reduce(total)
        means = {name: float(pair[0] / pair[1]) for name, pair in zip(sums, total, strict=True)}
        loss = means.pop("loss")
        return Validation(
            loss=loss, words="".join(f", {name} {value:.4f}" for name, value in means.items()), metrics=means
        )

    def finish(self, model: nn.Module, device: torch.device, seed: int, screen: Screen) -> None:
        """Nothing: what a task's model makes is the task's to show."""


# -- before ranks start

SMALL_PARAMS = 20_000_000  # a model is tried on the CPU of this process below it


OF_OPTIMIZER = ("train.lr", "train.weight_decay", "train.deepspeed")
OF_SCHEDULER = ("train.schedule", "train.warmup", "train.deepspeed")


def check_own_keys(optimizer: object | None, scheduler: object | None, config: JobConfig) -> None:
    """Raises `UsageError` for keys of `train` to which an optimizer or a scheduler of the user's leaves no meaning."""
    unused = dict.fromkeys(OF_SCHEDULER, "scheduler") if scheduler is not None else {}
    if optimizer is not None:
        unused |= dict.fromkeys(OF_OPTIMIZER, "optimizer")
        if config.train.schedule == "auto":
            unused |= {"train.warmup": "optimizer", "train.final_lr": "optimizer"}
    for key, what in unused.items():
        value = getattr(config.train, key.removeprefix("train."))
        if value != getattr(TrainConfig(), key.removeprefix("train.")):
            also = "; train.schedule gives it one" if key in ("train.warmup", "train.final_lr") else ""
            raise UsageError(f"{key} is {value}, which the {what} of your own has no use for; say it there{also}.")


def check_optimizer(make: Callable[[Any], Optimizer] | None) -> None:
    """Try an optimizer that is named beside text, on a matrix and a vector. Raises `UsageError` where it refuses its options."""
    if make is None:
        return
    params = [nn.Parameter(torch.zeros((2,) * dim, device="cpu")) for dim in (2, 1)]
    try:
        made = make(params)
    except (ValueError, TypeError, RuntimeError) as error:
        if is_own(error):
            raise
        raise UsageError(f"optimizer: {brief(error)}") from None
    if not isinstance(made, Optimizer):
        raise UsageError(f"optimizer(params) gave a {type(made).__name__}; it takes a torch.optim.Optimizer.")
    closure = inspect.signature(type(made).step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise UsageError(
            f"optimizer {type(made).__name__} computes the loss anew in its step, which the loop does not; take another one."
        )


def check_data(work: OwnTask, share: Share, options: TrainConfig) -> int | None:
    """How many samples there are to train on, None where nobody can say. Raises `UsageError`."""
    with of_the_task("dataset('train')"):
        data = data_of(work.loaded, "train", share.rank, share.world)
        if data is None:
            raise UsageError(f"the task {work.loaded.name!r} has no training data: its dataset('train') gave None.")
        kind = kind_of(data, "train")
    with of_the_task("dataset('validation')"):
        held_out = data_of(work.loaded, "validation", share.rank, share.world)
        if held_out is not None:
            kind_of(held_out, "validation")
        elif options.patience or options.keep_best:
            key = "patience" if options.patience else "keep_best"
            raise UsageError(
                f"train.{key} compares validations, and the task {work.loaded.name!r} has no data for them: its "
                "dataset('validation') gave None; give some, or leave the key out."
            )
    if kind != "dataset":
        return None
    if len(data) < share.global_batch:
        raise UsageError(
            f"one step takes {share.global_batch} samples (ranks x train.micro_batch x train.accumulate), and the training data "
            f"has {len(data)}; lower one of these or give more data."
        )
    return len(data)


def tried(work: OwnTask, model: nn.Module, share: Share, seed: int) -> None:
    """Read a batch, and where the model is real and small take its loss, as the first rank will. Raises what that raises."""
    drawn = RandomState().state_dict()
    with of_the_task("the first batch of dataset('train')"):
        batch = next(work.batches(share, seed, pins=False))
    tensors = [*model.parameters(), *model.buffers()]
    if all(t.device.type == "cpu" for t in tensors) and sum(t.numel() for t in tensors) < SMALL_PARAMS:
        with of_the_task("loss(model, batch)"):
            found = work.loss(model.train(), batch)
        first = found if isinstance(found, Tensor) else found[0]
        if not first.requires_grad:
            raise UsageError(
                "the task's loss does not depend on a parameter of the model; nothing would be trained by it."
            )
    RandomState().load_state_dict(drawn)


def _metrics(found: object) -> dict[str, Any]:
    if not isinstance(found, Mapping):
        raise UsageError(f"the task's metrics gave a {type(found).__name__}; it takes a dict of names and values.")
    if "loss" in found:
        raise UsageError(
            "the task's metrics have one named 'loss', which is that of the task's loss; give it another name."
        )
    return dict(found)


def _weighed(name: str, value: Any, num_samples: int, device: torch.device) -> Tensor:
    """Sum and count, (2,) float64; nothing of a batch of which no sample counts."""
    if num_samples == 0:
        return torch.zeros(2, dtype=torch.float64, device=device)
    if isinstance(value, tuple) and len(value) == 2:
        top = torch.as_tensor(value[0], device=device)
        return torch.stack([top.double(), count_of(value[1], device, f"the task's {name}").double()])
    mean = scalar_of(torch.as_tensor(value, device=device), f"the task's {name}").double()
    return torch.stack([mean * num_samples, torch.full_like(mean, num_samples)])
