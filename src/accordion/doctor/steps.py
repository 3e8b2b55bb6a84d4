"""Five steps of a small model on this engine, beside the same steps without it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import accordion as acc

STEPS, ROWS, WIDTH, HIDDEN = 5, 7, 24, 37  # rows that no number of ranks divides: uneven shards are in it
ROUNDING = 1e-5  # of float32: sums in another order differ so much, relatively


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, HIDDEN)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh()) for _ in range(3))
        self.last = nn.Linear(HIDDEN, 1)

    def forward(self, x: Tensor) -> Tensor:  # (rows, WIDTH) -> (rows, 1)
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Between both ways. `exact`: bit for bit, parameters and losses. `largest`: relative, of any step's loss or parameter."""

    exact: bool
    largest: float
    losses: tuple[list[float], list[float]]


def compare_steps(rank: int, num_ranks: int, device: torch.device) -> Difference:
    """Both ways on this rank; every rank calls it. The model is float32 and trained by SGD on the mean over all ranks."""
    with torch.random.fork_rng(devices=[], device_type=device.type):
        torch.manual_seed(7)
        plain = _Net()
    plain = plain.to(device)
    sharded = _Net().to(device)
    sharded.load_state_dict(plain.state_dict())
    expected, whole = _unsharded(plain, rank, num_ranks, device)
    found, own = _sharded(sharded, rank, num_ranks, device)
    exact = expected == found and all(torch.equal(own[name], value) for name, value in whole.items())
    cpu = torch.device("cpu")
    apart = [_relative(torch.tensor(found, device=cpu), torch.tensor(expected, device=cpu))]
    apart += [_relative(own[name], value) for name, value in whole.items()]
    return Difference(exact=exact, largest=max(apart), losses=(found, expected))


def _relative(found: Tensor, expected: Tensor) -> float:
    """NaN where either has one, which is more than anything allowed."""
    return float((found - expected).abs().max() / expected.abs().max())


def _batch(step: int, rank: int, device: torch.device) -> tuple[Tensor, Tensor]:
    draw = torch.Generator("cpu").manual_seed(1000 * step + rank)
    x = torch.randn(ROWS, WIDTH, generator=draw, device="cpu")
    return x.to(device), x.sum(-1, keepdim=True).sin().to(device)


def _loss(model: nn.Module, step: int, rank: int, device: torch.device) -> Tensor:
    x, y = _batch(step, rank, device)
    return F.mse_loss(model(x), y)


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW would not show gradients that are all too large."""
    return torch.optim.SGD(model.parameters(), lr=5e-2, momentum=0.9, foreach=False)


def _unsharded(
    model: nn.Module, rank: int, num_ranks: int, device: torch.device
) -> tuple[list[float], dict[str, Tensor]]:
    """The batches of all ranks one after the other, gradients summed in the order of ranks; the losses of `rank`."""
    optimizer, losses = _optimizer(model), []
    for step in range(STEPS):
        sums: list[Tensor] = []
        for other in range(num_ranks):
            loss = _loss(model, step, other, device)
            grads = torch.autograd.grad(loss, list(model.parameters()))
            sums = [a + b for a, b in zip(sums, grads, strict=True)] if sums else list(grads)
            losses += [float(loss.detach())] if other == rank else []
        for parameter, total in zip(model.parameters(), sums, strict=True):
            parameter.grad = total * (1 / num_ranks)
        optimizer.step()
    return losses, {name: p.detach() for name, p in model.named_parameters()}


def _sharded(
    model: nn.Module, rank: int, num_ranks: int, device: torch.device
) -> tuple[list[float], dict[str, Tensor]]:
    mesh = init_device_mesh(device.type, (num_ranks,), mesh_dim_names=("shard",))
    acc.shard(model, mesh, units=[nn.Sequential], precision=acc.Precision(params=torch.float32))
    optimizer, losses = _optimizer(model), []
    for step in range(STEPS):
        loss = _loss(model, step, rank, device)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    dist.barrier()
    with acc.full_params(model), torch.no_grad():
        return losses, {name: p.detach().clone() for name, p in model.named_parameters()}
