"""`accordion.compat.fsdp2` beside torch's own FSDP2 in one process: the same numbers, names, shapes and placements."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed.fsdp as theirs
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import accordion.compat.fsdp2 as ours
from tests.world import models
from tests.world.checks import assert_close, one_loss

SIDES = (theirs, ours)


def sharded(api: Any, mesh: Any, build: str = "plain", **options: Any) -> models.Tiny:
    """A model of `models`, sharded block by block and then as a whole."""
    model = getattr(models, build)()
    for block in model.blocks:
        api.fully_shard(block, mesh=mesh, **options)
    return api.fully_shard(model, mesh=mesh, **options)


def both(mesh: Any, build: str = "plain", **options: Any) -> list[models.Tiny]:
    return [sharded(api, mesh, build, **options) for api in SIDES]


def full(tensors: Any) -> dict[str, Tensor | None]:
    return {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in tensors}


def grads_of(model: nn.Module) -> dict[str, Tensor | None]:
    return full((n, p.grad) for n, p in model.named_parameters())


def params_of(model: nn.Module) -> dict[str, Tensor | None]:
    return full((n, p.detach()) for n, p in model.named_parameters())


def assert_same_gradients(reference: nn.Module, model: nn.Module, tolerance: float = 1e-6) -> None:
    assert_close(grads_of(model), grads_of(reference), tolerance)


def describe(tensor: Any) -> tuple[Any, ...]:
    local = tensor.to_local()
    return tensor.shape, tensor.dtype, tensor.placements, tensor.device_mesh, local.shape, tensor.requires_grad


def like_theirs(mesh, build: str) -> None:
    reference, model = both(mesh, build)
    assert type(model).__name__ == type(reference).__name__ == "FSDPTiny"
    assert isinstance(model, ours.FSDPModule)
    assert isinstance(model, models.Tiny)
    wanted, found = reference.state_dict(), model.state_dict()
    assert list(found) == list(wanted)
    assert {n: describe(t) for n, t in found.items()} == {n: describe(t) for n, t in wanted.items()}
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in reference.named_parameters()]
    held = list(model.parameters())
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (reference, model)]
    for step in range(3):
        losses = [one_loss(m, step) for m in (reference, model)]
        assert torch.allclose(*losses, rtol=1e-6), losses
        for loss in losses:
            loss.backward()
        assert_same_gradients(reference, model)
        for p in model.parameters():
            assert p.grad is None or describe(p.grad)[:5] == describe(p)[:5]
        norms = [torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1) for m in (reference, model)]
        assert torch.allclose(*[n.full_tensor() for n in norms], rtol=1e-5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert all(a is b for a, b in zip(held, model.parameters(), strict=True)), (
        "the optimizer's parameters are the model's"
    )
    assert_close(params_of(model), params_of(reference), 1e-5)
    assert {n: describe(t) for n, t in model.state_dict().items()} == {
        n: describe(t) for n, t in reference.state_dict().items()
    }


@pytest.mark.parametrize("build", ["plain", "frozen", "wide"])
def test_training_is_that_of_fully_shard(world, build):
    world.run(2, like_theirs, build)


def test_rows_that_ranks_do_not_divide_lie_as_with_fully_shard(world):
    world.run(4, like_theirs, "narrow")
