"""Make tasks from an object, a class path or a command line; check their functions and the results of these functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass, field, make_dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset, default_collate

from accordion.errors import UsageError
from accordion.options import values_of
from accordion.tasks.classes import PartConfig, options_kind, part_of, target_of
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
    """The functions of a task, called as `Task` describes; those that it lacks are None, but `collate` is `default_collate`
    then. `name`: for messages and for the run folder. `units`: modules that are gathered together; None: Accordion chooses."""

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
    """Make an object of the class `parts["task"]` and return its methods and units; `parts["optimizer"]`, if present, replaces
    its optimizer. Raises `UsageError` if a class is missing or is no task, and `TaskError` if the user's code fails."""
    part = parts["task"]
    target = target_of("task", part.class_path)
    if not inspect.isclass(target):
        raise UsageError(f"task {part.class_path!r} is no class; write a class with model, dataset and loss.")
    path, _, name = part.class_path.partition(":")
    if path.endswith(".py"):  # "examples/digits.py:Task" -> "digits"
        stem = path.removesuffix(".py").replace("\\", "/").rpartition("/")[2]
        name = stem if name in ("", "Task") else f"{stem}-{name}"
    else:  # "package.module:Corpus" -> "Corpus"
        name = (name or path).rpartition(".")[2]
    with of_the_task(f"{target.__name__}()"):
        task = of_object(target(**part.options))
    return replace(task, name=name, optimizer=optimizer_of(parts) or task.optimizer)


def optimizer_of(parts: Mapping[str, PartConfig]) -> Callable[[Any], Optimizer] | None:
    """Return a function that takes parameters and makes the optimizer `parts["optimizer"]` for them; None if `parts` has no
    "optimizer". Raises `UsageError` if its class or function does not exist, and `TaskError` if the import fails."""
    part = parts.get("optimizer")
    if part is None:
        return None
    return partial(target_of("optimizer.class_path", part.class_path), **part.options)


def made_optimizer(make: Callable[[Any], Optimizer], model: nn.Module) -> Optimizer:
    """Return `make(params)`; `params`: list of `model`'s trained parameters. Raises `UsageError` if that is no optimizer."""
    optimizer: object = make([p for p in model.parameters() if p.requires_grad])
    if not isinstance(optimizer, Optimizer):
        raise UsageError(f"optimizer(params) is a {type(optimizer).__name__}; return a torch.optim.Optimizer.")
    return optimizer


def of_object(task: object) -> LoadedTask:
    """Return the methods and units of `task`, an object with the interface `Task`, as a `LoadedTask` with the name of its
    class. Raises `UsageError` if a needed method is missing, or if an attribute with the name of a method cannot be called."""
    kind = type(task).__name__
    functions: dict[str, Any] = {}
    for name, takes in {**NEEDED, **OPTIONAL}.items():
        value, method = getattr(task, name, None), f"{name}({', '.join(takes)})"
        if callable(value):
            functions[name] = value
        elif name in NEEDED:
            raise UsageError(f"{kind} is no task: it has no method {method}; a task has model, dataset and loss.")
        elif value is not None:
            raise UsageError(f"{kind}.{name} is a {type(value).__name__}; it must be a method {method}.")
    return LoadedTask(name=kind, units=getattr(task, "units", None), **functions)


def split_task(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the words of a command line into (flags `--task.*` with the words up to the next flag, all other words)."""
    task_words, others = list[str](), list[str]()
    into = others
    for word in words:
        if word.startswith("--"):
            into = task_words if word.startswith("--task.") else others
        into.append(word)
    return task_words, others


def read_task(class_path: str, words: Sequence[str], prog: str) -> LoadedTask:
    """Return a task of the class at `class_path` with the options in `words`: flags `--task.*` alone, see `split_task`. `prog`:
    the command's name, for messages. Raises `UsageError` for a wrong class or option, and `TaskError` if the task's code
    fails."""
    kind = options_kind("task", class_path)
    keys = make_dataclass("Keys", [("task", kind, field(default_factory=kind))])
    flags = values_of(keys, words, prog, "") or {}
    values = {name.removeprefix("task."): value for name, value in flags.items()}
    return loaded({"task": part_of("task", {**values, "class_path": class_path})})


# -- results of the functions


def model_of(task: LoadedTask) -> nn.Module:
    """Call the task's `model()` and return the module. Raises `UsageError` unless it is a module with a trained parameter."""
    model: object = task.model()
    if not isinstance(model, nn.Module):
        raise UsageError(f"the task's model() returned a {type(model).__name__}; it must return a torch.nn.Module.")
    if not any(p.requires_grad for p in model.parameters()):
        raise UsageError(
            "the task's model() returned a model without a parameter that requires a gradient; nothing would be trained."
        )
    return model


def data_of(task: LoadedTask, split: str, rank: int, world: int) -> Any:
    """Call the task's `dataset(split)`, with `rank` and `world` if it takes them, and return the data. Returns None if there is
    no validation data, and raises `UsageError` if there is no training data."""
    places = {"rank": rank, "world": world}
    try:
        takes = inspect.signature(task.dataset).parameters
    except (TypeError, ValueError):
        takes = {}  # type: ignore[assignment]
    data = task.dataset(split, **{name: value for name, value in places.items() if name in takes})
    if data is None and split == "train":
        raise UsageError(f"the task {task.name!r} has no training data: its dataset('train') returned None.")
    return data


def loss_of(task: LoadedTask, model: nn.Module, batch: Any) -> Tensor | tuple[Tensor, Tensor]:
    """Return the task's loss of `batch`: a mean, or (sum, detached count), 0-d. Raises `UsageError` for another result."""
    loss = task.loss(model, batch)
    if isinstance(loss, tuple) and len(loss) == 2:
        return scalar_of(loss[0], "the task's loss"), count_of(loss[1], loss[0].device, "the task's loss")
    return scalar_of(loss, "the task's loss")


def mean_loss(task: LoadedTask, model: nn.Module, batch: Any) -> Tensor:
    """Return the task's loss of `batch` as a mean, 0-d; for a pair, sum / count. Raises `UsageError` for any other result."""
    loss = loss_of(task, model, batch)
    return loss if isinstance(loss, Tensor) else loss[0] / loss[1]


def example_of(task: LoadedTask, micro_batch: int) -> Any:
    """Return a training batch of `task`: if its data is a loader, the first batch; else the first `micro_batch` samples (all,
    if there are fewer), collated. Raises `UsageError` if there is no data or no sample."""
    data = data_of(task, "train", 0, 1)
    values = (data[i] for i in range(len(data))) if is_indexed(data) and not is_loader(data) else iter(data)
    samples = list(islice(values, 1 if is_loader(data) else micro_batch))
    if not samples:
        raise UsageError(f"the training data of the task {task.name!r} has no sample.")
    return samples[0] if is_loader(data) else task.collate(samples)


def is_loader(data: object) -> bool:
    """Return True if `data` yields batches, not samples: if it is a `DataLoader`, or an iterable with `batch_size`."""
    return isinstance(data, DataLoader) or (hasattr(data, "batch_size") and hasattr(data, "__iter__"))


def is_indexed(data: object) -> bool:
    """Return True if `data` can be read at any index: it has `__len__` and `__getitem__`, and is no `IterableDataset`."""
    return hasattr(data, "__getitem__") and isinstance(data, Sized) and not isinstance(data, IterableDataset)


def scalar_of(value: object, what: str) -> Tensor:
    if not isinstance(value, Tensor):
        raise UsageError(
            f"{what} is a {type(value).__name__}; it must be a tensor (the mean of the batch) or a pair (sum, count)."
        )
    if value.dim():
        raise UsageError(
            f"{what} is a tensor of shape {tuple(value.shape)}; it must be one number: call .mean() or .sum()."
        )
    return value


def number_of(value: object, device: torch.device, what: str) -> Tensor:
    try:
        number = torch.as_tensor(value, device=device)
    except (TypeError, ValueError, RuntimeError):  # of torch, for text, None and lists of unequal length
        raise UsageError(f"{what} is a {type(value).__name__}; it must be a number, or a pair (sum, count).") from None
    return scalar_of(number, what).double()


def count_of(value: object, device: torch.device, what: str) -> Tensor:
    if isinstance(value, Tensor):
        if value.dim():
            raise UsageError(f"{what} has a count of shape {tuple(value.shape)}; it must be one number: call .sum().")
        return value.detach().to(device=device, dtype=torch.float32)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UsageError(f"{what} has a count that is a {type(value).__name__}; it must be a number.")
    return torch.full((), value, dtype=torch.float32, device=device)
