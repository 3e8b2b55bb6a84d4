"""`Task`: the interface of a user's class with a model, data and a loss to train."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor, nn

Loss = Tensor | tuple[Tensor, Tensor | float]
"""The mean over a batch, 0-d; or a 0-d sum and a count, each summed over ranks before the sum is divided by the count."""


class Task(Protocol):
    """Interface of a task: a model, data and a loss. A class with these methods is a task; it need not inherit from this one.

    The parameters of its constructor are options: `width: int = 64` is the flag `--task.width`, and `width` under `task` in a
    run file, so a dataclass is the shortest way to write a task. Optional members:

    `optimizer(params)`: a torch.optim.Optimizer of this list of parameters; default: AdamW, set up by the keys of `train`.
    `scheduler(optimizer)`: a torch.optim.lr_scheduler.LRScheduler, stepped after each optimizer step. `metrics(model, batch)`:
    name -> mean or (sum, count), on validation data. `collate(samples)`: a batch from a list of samples; default:
    `torch.utils.data.default_collate`. `units`: modules that are gathered together, as in `acc.shard(units=)`. `init(model)`:
    fills the sharded model, on every rank; default: `acc.initialise` if it was built on the meta device. `state()`: name ->
    object with `state_dict` and `load_state_dict`, saved in checkpoints for each rank.
    """

    def model(self) -> nn.Module:
        """Return the model: on the meta device, or with values, which are equal on all ranks since all are seeded equally."""
        ...

    def dataset(self, split: str) -> Any:
        """Return the data of `split`, "train" or "validation": a dataset with `__len__` and `__getitem__`, an iterable of
        samples, a loader of batches, or None if there is none. May also take `rank` and `world`, to load one rank's share."""
        ...

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        """Return the loss of `batch`, which is on the model's device: a mean, or (sum, count)."""
        ...
