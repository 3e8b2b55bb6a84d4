"""What a run trains, as the loop sees it: text and a task of the user's are two of a kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from accordion.state import Only
from accordion.train.batches import Batches
from accordion.train.data import Share
from accordion.train.screen import Screen


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """What held-out data says. `words`: what a person reads behind the loss."""

    loss: float
    words: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)


class Work(Protocol):
    """Made before ranks start, and sent to each of them: so it can be pickled, and loads on first use what cannot."""

    @property
    def counted(self) -> str:
        """What the speed of a run is counted in: `tokens` or `samples`."""
        ...

    @property
    def name(self) -> str:
        """Name of the model, for messages."""
        ...

    def agreed(self) -> dict[str, str]:
        """What must be the same on all ranks, by the names that messages have."""
        ...

    def model(self, seed: int) -> nn.Module:
        """Before it is sharded."""
        ...

    def units(self) -> Any:
        """What `shard` takes where `shard.units` is auto."""
        ...

    def fill(self, model: nn.Module, seed: int, *, on_meta: bool) -> None:
        """Give the sharded model the values that it begins with, where it was built on the meta device."""
        ...

    def optimizer(self, model: nn.Module) -> Optimizer | None:
        """Its own; None leaves it to `train`'s keys."""
        ...

    def scheduler(self, optimizer: Optimizer) -> Any:
        """A scheduler of torch; None leaves the rate to `train`'s keys, or constant where the optimizer is its own."""
        ...

    def batches(self, share: Share, seed: int, *, pins: bool) -> Batches: ...

    def notes(self, share: Share) -> list[str]:
        """What to say of a step and an epoch."""
        ...

    def loss(self, model: nn.Module, batch: Any) -> Tensor | tuple[Tensor, Tensor]:
        """0-d: the mean of this rank's micro-batch, or a sum and the count it is divided by, over all ranks."""
        ...

    def num_counted(self, share: Share, batches: list[Any]) -> int:
        """What was counted in a step of all ranks, of which `batches` are this rank's."""
        ...

    def progress(self, model: nn.Module) -> dict[str, Any]:
        """What a checkpoint says of it, for whoever reads it or goes on from it."""
        ...

    def kept(self) -> Only:
        """Which tensors of the model a checkpoint holds."""
        ...

    def has_data_of(self, extra: Mapping[str, Any]) -> bool:
        """Whether `extra`, a checkpoint's, says that it was trained on the same data."""
        ...

    def state(self) -> dict[str, Any]:
        """Name -> object with `state_dict` and `load_state_dict`, kept for each rank."""
        ...

    def validate(self, model: nn.Module, share: Share, device: torch.device) -> Validation | None:
        """By all ranks together; None without held-out data."""
        ...

    def finish(self, model: nn.Module, device: torch.device, seed: int, screen: Screen) -> None:
        """What is shown of the trained model at the end."""
        ...
