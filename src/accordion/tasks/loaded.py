"""A task that runs can use: made of an object or of class paths, looked through, and its answers checked."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sized
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset, default_collate

from accordion.errors import UsageError
from accordion.tasks.classes import PartConfig, target_of
from accordion.tasks.errors import of_the_task

NEEDED = {"model": (), "dataset": ("split",), "loss": ("model", "batch")}
OPTIONAL = {
    "optimizer": ("params",),
    "scheduler": ("optimizer",),
    "metrics": ("model", "batch"),
    "collate": ("samples",),
    "init": ("model",),
    "state": (),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedTask:
    """The functions of a task, each looked through. `name`: for messages and folders. None is what it leaves to the run."""

    name: str
    model: Callable[[], nn.Module]
    dataset: Callable[..., Any]
    loss: Callable[[nn.Module, Any], Any]
    optimizer: Callable[[Any], Optimizer] | None = None
    scheduler: Callable[[Optimizer], Any] | None = None
    metrics: Callable[[nn.Module, Any], Mapping[str, Any]] | None = None
    collate: Callable[[list[Any]], Any] = default_collate
    units: Any = None
    init: Callable[[nn.Module], object] | None = None
    state: Callable[[], Mapping[str, Any]] | None = None


def loaded(parts: Mapping[str, PartConfig]) -> LoadedTask:
    """The task that class paths name. Raises `UsageError` where they make none, `TaskError` where the user's code fails."""
    made: dict[str, Any] = {}
    for key, part in parts.items():
        target = target_of(f"{key}.class_path" if key != "task" else "task", part.class_path)
        if key == "task":
            if not inspect.isclass(target):
                raise UsageError(f"task {part.class_path!r} is no class; write a class with model, dataset and loss.")
            with of_the_task(f"{target.__name__}()"):
                made |= _functions(target(**part.options))
        elif key == "data":
            made["dataset"] = _with_options(target, part.options, NEEDED["dataset"], key)
        else:
            made[key] = _with_options(target, part.options, {**NEEDED, **OPTIONAL}[key], key)
    missing = [name for name in NEEDED if name not in made]
    if missing:
        keys = " and ".join(f"--{'data' if name == 'dataset' else name}" for name in missing)
        raise UsageError(
            f"what to train is only half said: give {keys} a class path too, or --task a class with all of them."
        )
    first = parts.get("task") or parts["model"]
    return LoadedTask(name=_short(first.class_path), **made)


def optimizer_of(parts: Mapping[str, PartConfig]) -> Callable[[Any], Optimizer] | None:
    """The optimizer that a class path names, beside whatever is trained. Raises `UsageError`."""
    part = parts.get("optimizer")
    if part is None:
        return None
    made: Callable[[Any], Optimizer] = _with_options(
        target_of("optimizer.class_path", part.class_path), part.options, OPTIONAL["optimizer"], "optimizer"
    )
    return made


def made_optimizer(make: Callable[[Any], Optimizer], model: nn.Module) -> Optimizer:
    """Of the parameters that are trained. Raises `UsageError` for what is no optimizer."""
    made: object = make([p for p in model.parameters() if p.requires_grad])
    if not isinstance(made, Optimizer):
        raise UsageError(f"optimizer(params) gave a {type(made).__name__}; it takes a torch.optim.Optimizer.")
    return made


def of_object(task: object) -> LoadedTask:
    """The task that an object is. Raises `UsageError` where it is none."""
    return LoadedTask(name=type(task).__name__, **_functions(task))


def _short(class_path: str) -> str:
    """`examples/tasks/digits.py:Task` -> `digits`, `package.module:Corpus` -> `Corpus`."""
    where, _, name = class_path.partition(":")
    if where.endswith(".py"):
        where = where.removesuffix(".py").replace("\\", "/").rpartition("/")[2]
        return where if name in ("", "Task") else f"{where}-{name}"
    return (name or where).rpartition(".")[2]


def _functions(task: object) -> dict[str, Any]:
    kind = type(task).__name__
    for name in NEEDED:
        if not callable(getattr(task, name, None)):
            raise UsageError(
                f"{kind} is no task: it has no method {name}({', '.join(NEEDED[name])}); a task has model, dataset and loss."
            )
    found: dict[str, Any] = {name: getattr(task, name) for name in NEEDED}
    for name in OPTIONAL:
        given = getattr(task, name, None)
        if given is not None:
            if not callable(given):
                raise UsageError(
                    f"{kind}.{name} is a {type(given).__name__}; it takes a method {name}({', '.join(OPTIONAL[name])})."
                )
            found[name] = given
    for name, function in found.items():
        _check_takes(function, {**NEEDED, **OPTIONAL}[name], f"{kind}.{name}")
    if getattr(task, "units", None) is not None:
        found["units"] = task.units  # type: ignore[attr-defined]
    return found


def _with_options(target: Callable[..., Any], options: Mapping[str, Any], takes: tuple[str, ...], key: str) -> Any:
    function = partial(target, **options)
    _check_takes(function, takes, key)
    return function


def _check_takes(function: Callable[..., Any], takes: tuple[str, ...], name: str) -> None:
    """Raises `UsageError` where `function` cannot be called with as many arguments, in this order."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    asked = {name: name for name in ("rank", "world") if name in signature.parameters and takes == NEEDED["dataset"]}
    try:
        signature.bind(*takes, **asked)
    except TypeError as error:
        raise UsageError(f"{name}{signature} cannot be called as {name}({', '.join(takes)}): {error}.") from None


# -- what the functions answer


def model_of(task: LoadedTask) -> nn.Module:
    """Raises `UsageError` for what is no model."""
    model: object = task.model()
    if not isinstance(model, nn.Module):
        raise UsageError(f"the task's model() gave a {type(model).__name__}; it takes a torch.nn.Module.")
    if not any(p.requires_grad for p in model.parameters()):
        raise UsageError(
            "the task's model() gave a model without a parameter that requires a gradient; nothing would be trained."
        )
    return model


def data_of(task: LoadedTask, split: str, rank: int, world: int) -> Any:
    """What the task has of a split; None where it has nothing."""
    places = {"rank": rank, "world": world}
    try:
        takes = inspect.signature(task.dataset).parameters
    except (TypeError, ValueError):
        takes = {}  # type: ignore[assignment]
    return task.dataset(split, **{name: value for name, value in places.items() if name in takes})


def loss_of(task: LoadedTask, model: nn.Module, batch: Any) -> Tensor | tuple[Tensor, Tensor]:
    """The task's loss of a batch: a mean, or a sum and a count, all 0-d. Raises `UsageError` for anything else."""
    found = task.loss(model, batch)
    if isinstance(found, tuple) and len(found) == 2:
        return scalar_of(found[0], "the task's loss"), count_of(found[1], found[0].device, "the task's loss")
    return scalar_of(found, "the task's loss")


def mean_loss(task: LoadedTask, model: nn.Module, batch: Any) -> Tensor:
    """The loss of a batch as one number."""
    found = loss_of(task, model, batch)
    return found if isinstance(found, Tensor) else found[0] / found[1]


def example_of(task: LoadedTask, micro_batch: int) -> Any:
    """A batch of the training data, of as many samples where it is no loader's. Raises `UsageError` where there is none."""
    data = data_of(task, "train", 0, 1)
    if data is None:
        raise UsageError(f"the task {task.name!r} has no training data: its dataset('train') gave None.")
    if is_loader(data):
        return next(iter(data))
    samples = list(islice((data[i] for i in range(len(data))) if is_indexed(data) else iter(data), micro_batch))
    if not samples:
        raise UsageError(f"the training data of the task {task.name!r} has no sample.")
    return task.collate(samples)


def is_loader(data: object) -> bool:
    """Whether it gives batches and not samples."""
    return isinstance(data, DataLoader) or (hasattr(data, "batch_size") and hasattr(data, "__iter__"))


def is_indexed(data: object) -> bool:
    """Whether it is a dataset of which any rank may take any sample."""
    return hasattr(data, "__getitem__") and isinstance(data, Sized) and not isinstance(data, IterableDataset)


def scalar_of(value: object, what: str) -> Tensor:
    if not isinstance(value, Tensor):
        raise UsageError(
            f"{what} gave a {type(value).__name__}; it takes a tensor, the mean of the batch, or a pair (sum, count)."
        )
    if value.dim():
        raise UsageError(
            f"{what} gave a tensor of shape {tuple(value.shape)}; it takes one number: call .mean() or .sum()."
        )
    return value


def count_of(value: object, device: torch.device, what: str) -> Tensor:
    if isinstance(value, Tensor):
        if value.dim():
            raise UsageError(f"{what} gave a count of shape {tuple(value.shape)}; it takes one number: call .sum().")
        return value.detach().to(device=device, dtype=torch.float32)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UsageError(f"{what} gave a count that is a {type(value).__name__}; it takes a number.")
    return torch.full((), value, dtype=torch.float32, device=device)
