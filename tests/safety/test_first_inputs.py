"""If data-parallel ranks train on the same data, there is one warning; other equal inputs cause none."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import accordion as acc
from accordion.safety.first_inputs import FirstInputs, checksums_of, digest_of
from tests.inside import engine_in
from tests.support.chains import Plain
from tests.support.checks import logged
from tests.support.ranked import on_mesh, on_world, under_strategies

WIDTH = 8
HEARD_S = 5.0  # in which a digest has come to the first rank
WARNS = "got the same inputs in their first two training steps"


class Net(nn.Module):
    """Model of data, a mask, and an object that hides its tensors; `recomputes` its layers in the backward."""

    def __init__(self, recomputes: bool = False) -> None:
        super().__init__()
        self.up, self.down, self.recomputes = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH), recomputes

    def forward(self, x: Tensor | None = None, mask: Tensor | None = None, hidden: Any = None) -> Tensor:
        x = hidden.x if x is None else x
        x = x if mask is None else x * mask
        return checkpoint(self._layers, x, use_reentrant=False) if self.recomputes else self._layers(x)

    def _layers(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


def drawn(seed: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))


def own(step: int) -> Tensor:
    return drawn(10 * dist.get_rank() + step)


def evaluates(model: nn.Module, step: int) -> Tensor:
    model.eval()
    with torch.no_grad():
        model(drawn(100 + step))
    model.train()
    return model(own(step))


STEPS: dict[str, tuple[Callable[[nn.Module, int], Tensor], bool]] = {
    "the same batches": (lambda m, i: m(drawn(i)), True),
    "the same batches by keyword": (lambda m, i: m(x=drawn(i), mask=torch.ones(4, 1)), True),
    "batches of each rank": (lambda m, i: m(own(i)), False),
    "the same mask with batches of each rank": (lambda m, i: m(own(i), (drawn(i) > 0).float()), False),
    "the same first batch alone": (lambda m, i: m(drawn(10 * dist.get_rank() * i + i)), False),
    "one batch for ever": (lambda m, i: m(drawn(0)), False),
    "constants": (lambda m, i: m(torch.full((4, WIDTH), float(i))), False),
    "no tensors": (lambda m, i: m(hidden=Plain(drawn(i))), False),
    "empty tensors": (lambda m, i: m(drawn(i)[:0]), False),
    "the same evaluations": (evaluates, False),
}


def check_warnings(mesh: Any, strategy: acc.Strategy, name: str, recomputes: bool = False) -> None:
    """Train as `name` says. The first rank must warn of equal inputs once, or never."""
    step, warns = STEPS[name]
    num_warnings = int(warns and dist.get_rank() == 0)
    torch.manual_seed(0)
    model = acc.shard(Net(recomputes), mesh, strategy=strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with logged() as messages:
        for i in range(4):
            step(model, i).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        deadline = time.monotonic() + HEARD_S
        while num_warnings and not messages and time.monotonic() < deadline:
            time.sleep(0.01)
    assert engine_in(model).observers.find(FirstInputs) is None  # it costs nothing from then on
    equal = [text for text in messages if WARNS in text]
    assert len(equal) == num_warnings, messages
    assert all("DistributedSampler" in text for text in equal)


@pytest.mark.parametrize("name", STEPS)
@on_world(2)
def test_ranks_warn_once_of_equal_inputs(mesh: Any, name: str) -> None:
    check_warnings(mesh, acc.FULL_SHARD, name)


BOTH = ("the same batches", "batches of each rank")


@pytest.mark.parametrize("name", BOTH)
@on_world(2)
def test_a_recomputed_forward_counts_once(mesh: Any, name: str) -> None:
    check_warnings(mesh, acc.FULL_SHARD, name, recomputes=True)


@pytest.mark.parametrize("name", BOTH)
@under_strategies("no_shard", "hybrid_shard")
def test_equal_inputs_are_detected_with_every_strategy(mesh: Any, strategy: acc.Strategy, name: str) -> None:
    check_warnings(mesh, strategy, name)


@on_mesh((2,), ("dp_cp",))
def test_ranks_that_share_data_are_not_compared(mesh: Any) -> None:
    """Ranks of a sequence parallel axis have the same batch."""
    assert engine_in(acc.shard(Net(), mesh)).observers.find(FirstInputs) is None


def digest(tensors: list[Tensor]) -> int | None:
    return digest_of(checksums_of(tensors))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.bool, torch.int64, torch.complex64])
def test_a_digest_depends_on_all_tensors(dtype: torch.dtype) -> None:
    tensor = torch.tensor([[0, 1], [1, 0]]).to(dtype)
    same, other = digest([torch.ones(()), tensor]), digest([torch.zeros(()), tensor])
    assert same == digest([torch.ones(()), tensor.clone().T]) != other
    assert digest([torch.ones(3), torch.ones((), dtype=dtype), torch.empty(0, 3), torch.ones(2, device="meta")]) is None
