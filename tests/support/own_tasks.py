"""Small tasks as users of `accordion train` write them; each uses one feature of tasks."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

COUNT, FEATURES = 60, 6


def numbers() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (inputs (COUNT, 4, FEATURES), targets (COUNT, 4), weights 0 or 1 (COUNT, 4), with more 1 in later samples)."""
    draw = torch.Generator().manual_seed(5)
    x = torch.randn(COUNT, 4, FEATURES, generator=draw)
    weights = torch.rand(COUNT, 4, generator=draw) < torch.linspace(0.1, 1.0, COUNT).unsqueeze(1)
    return x, x.sum(-1) + torch.randn(COUNT, 4, generator=draw), weights.float()


class Net(nn.Module):
    def __init__(self, width: int = 8, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(FEATURES, width), nn.Tanh(), nn.Dropout(dropout), nn.Linear(width, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (..., FEATURES) -> (...,)
        return self.layers(x).squeeze(-1)


@dataclass
class Task:
    """Finds sums.

    Args:
        width: of the hidden layer
        dropout: of it
    """

    width: int = 8
    dropout: float = 0.0

    def model(self) -> nn.Module:
        return Net(self.width, self.dropout)

    def dataset(self, split: str):
        return TensorDataset(*numbers()) if split == "train" else None

    def loss(self, model, batch):
        x, y, _ = batch
        return F.mse_loss(model(x), y)

    def optimizer(self, params):
        return torch.optim.SGD(params, lr=0.02, momentum=0.9)


class Weighed(Task):
    """A task whose loss is a pair, (weighted sum, sum of weights), because samples have unequal weights."""

    def loss(self, model, batch):
        x, y, weight = batch
        return ((model(x) - y).square() * weight).sum(), weight.sum()


class Held(Weighed):
    """A task with seven samples for validation, which ranks cannot share evenly, and two metrics: a mean and a (sum, count)."""

    def dataset(self, split: str):
        return TensorDataset(*(t[: COUNT if split == "train" else 7] for t in numbers()))

    def metrics(self, model, batch):
        x, y, _ = batch
        return {"off": (model(x) - y).abs().mean(), "pair": ((model(x) - y).abs().sum(), y.numel())}


class Stream(IterableDataset):
    """The first `count` samples of `numbers`, in another random order in each epoch, with random noise up to `noise` on the
    targets. Order and noise come from Python's `random`."""

    def __init__(self, count: int, noise: float) -> None:
        self.count, self.noise = count, noise

    def __iter__(self):
        order = list(range(self.count))
        random.shuffle(order)
        x, y, weight = numbers()
        for i in order:
            yield x[i], y[i] + self.noise * random.random(), weight[i]


class Streamed(Held):
    """A task with iterable datasets, whose samples ranks take in turn. The training samples do not divide into whole steps."""

    def dataset(self, split: str):
        return Stream(COUNT - 7, 1.0) if split == "train" else Stream(7, 0.0)


class Loaded(Weighed):
    """A task that returns a `DataLoader` for each rank. Its last batch may be smaller than the others."""

    def dataset(self, split: str, rank: int, world: int):
        data = TensorDataset(*numbers())
        sampler = DistributedSampler(data, world, rank, shuffle=True, seed=3)
        return DataLoader(data, batch_size=4, sampler=sampler) if split == "train" else None


class Scheduled(Task):
    def scheduler(self, optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)


class OnMeta(Task):
    """A task that creates its model on the meta device and initialises it itself, and that has a state of its own to save."""

    def __init__(self, width: int = 8) -> None:
        super().__init__(width)
        self.seen = 0

    def model(self) -> nn.Module:
        with torch.device("meta"):
            return super().model()

    def init(self, model):
        import accordion as acc

        acc.initialise(model)

    def state(self):
        return {"counter": self}

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]

    def loss(self, model, batch):
        self.seen += 1
        return super().loss(model, batch) + 0.0 * self.seen


class Slow(Held):
    """A task whose training steps take `slow` seconds longer."""

    def __init__(self, slow: float = 0.0) -> None:
        super().__init__()
        self.slow = slow

    def loss(self, model, batch):
        time.sleep(self.slow if model.training else 0)
        return super().loss(model, batch)


class Hangs(Task):
    """A task in which rank 1 sleeps before the forward of step `step`."""

    def __init__(self, step: int = 3) -> None:
        super().__init__()
        self.step, self.calls = step, 0

    def loss(self, model, batch):
        self.calls += 1
        if self.calls == self.step and dist.get_rank() == 1:
            time.sleep(1000)
        return super().loss(model, batch)
