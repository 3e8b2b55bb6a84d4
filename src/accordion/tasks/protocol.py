"""The task: what a user says of a training, and nothing of how it runs."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor, nn

Loss = Tensor | tuple[Tensor, Tensor | float]
"""The mean over a batch, 0-d; or a sum, 0-d, and the count that it is divided by once all ranks' are added up."""


class Task(Protocol):
    """What a training needs; a class of one's own with these methods, which need not inherit from this one.

    The parameters of its constructor are its options: `width: int = 64` is the flag `--task.width` and `width` under `task` in a
    run file. So a dataclass is the shortest way to write one. It may have, beside the methods below:

    `optimizer(params)`: a torch.optim.Optimizer; without it AdamW, as the keys of `train` say.
    `scheduler(optimizer)`: a torch.optim.lr_scheduler.LRScheduler, stepped after each step of the optimizer.
    `metrics(model, batch)`: name -> value like the loss's, over the validation data.
    `collate(samples)`: a batch of a list of samples; without it `torch.utils.data.default_collate`.
    `units`: what is gathered together, as `acc.shard(units=)` takes it.
    `init(model)`: fills a model that was built on the meta device, once it is sharded; without it `acc.initialise`.
    `state()`: name -> object with `state_dict` and `load_state_dict`, which checkpoints keep for each rank.
    """

    def model(self) -> nn.Module:
        """The model: real and then equal on all ranks, whose generators are seeded alike, or on the meta device."""
        ...

    def dataset(self, split: str) -> Any:
        """The data of "train" or "validation", None where there is none: a dataset with `__len__` and `__getitem__`, an iterable
        of samples, or a loader of batches. It may take `rank` and `world` too, for a loader that reads this rank's part.
        """
        ...

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        """The loss of a batch, on the model's device."""
        ...
