"""`shard(meshes=)`: parameters on some of the ranks, experts under data parallelism over all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import accordion as acc
from tests.devices import device
from tests.inside import unit_in, units_of
from tests.support import experts
from tests.support.checks import assert_close
from tests.support.meters import Wire

RANKS = 4


def sharded(mesh: Any, meshes: Any = None, **options: Any) -> nn.Module:
    """Experts over the axis "ep", each sharded over "edp"; everything else over all ranks."""
    everybody = mesh["edp", "ep"]._flatten("dp")
    own = {experts.Experts: mesh["edp"]} if meshes is None else meshes
    return acc.shard(experts.spread(mesh), everybody, meshes=own, **options)


def unsharded(step: int, model: experts.Model, reduce_op: str = "mean") -> tuple[list[float], dict[str, Tensor]]:
    """Losses of all ranks' batches, and gradients of their mean or sum."""
    losses = [model.loss(experts.tokens(step, rank)) for rank in range(RANKS)]
    (sum(losses) / (RANKS if reduce_op == "mean" else 1)).backward()
    return [loss.item() for loss in losses], {name: p.grad.clone() for name, p in model.named_parameters()}


CASES: dict[str, dict[str, Any]] = {
    "experts are units": {"units": {experts.Mixture, experts.Experts}},
    "experts lie in their block's unit": {"units": {experts.Mixture}},
    "sum": {"reduce_op": "sum"},
    "kept until the backward": {"strategy": acc.SHARD_GRAD_OP},
    "optimizer alone": {"strategy": acc.SHARD_OPTIM},
    "nothing": {"strategy": acc.NO_SHARD},
    "recomputed": {"checkpoint_activations": "full"},
    "late and filled": {"debug": "streams"},
    "on the host": {"offload": acc.Offload(params="host", optimizer="host")},
}


def trains_alike(mesh: Any, case: str) -> None:
    """Three clipped steps, in float64: what is left are orders of sums, and nothing that a divisor or a missing rank makes."""
    options = CASES[case]
    model, plain = sharded_in(mesh, torch.float64, **options), experts.seeded().double()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.3) for m in (model, plain)]
    acc.wrap_optimizer(optimizers[0])
    for step in range(3):
        wanted_losses, wanted = unsharded(step, plain, options.get("reduce_op", "mean"))
        loss = model.loss(experts.tokens(step, dist.get_rank()))
        assert loss.item() == pytest.approx(wanted_losses[dist.get_rank()], rel=1e-12)
        loss.backward()
        acc.synchronize(model)
        norm = torch.linalg.vector_norm(torch.cat([g.flatten() for g in wanted.values()]))
        for name, p in model.named_parameters():
            if p.grad.device == device():  # a collective, and offloaded gradients rest elsewhere beside an accelerator
                off = torch.linalg.vector_norm(p.grad.full_tensor() - wanted[name])
                assert off <= 1e-12 * torch.linalg.vector_norm(wanted[name]), name
        found = acc.clip_grad_norm_(model, 0.5)
        assert torch.allclose(found.double(), norm, rtol=1e-6)  # a norm is float32, and so is what it scales by
        for p in plain.parameters():
            p.grad.mul_(torch.clamp(0.5 / (found + 1e-6), max=1.0))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    acc.synchronize(model)
    whole = {n: p.detach() for n, p in plain.named_parameters()}
    assert_close(acc.full_state_dict(model, rank0_only=False, cpu=False), whole, 1e-12)
    assert bool(acc.full_state_dict(model)) == (dist.get_rank() == 0)


def sharded_in(mesh: Any, dtype: torch.dtype, meshes: Any = None, **options: Any) -> nn.Module:
    everybody = mesh["edp", "ep"]._flatten("dp")
    own = {experts.Experts: mesh["edp"]} if meshes is None else meshes
    return acc.shard(experts.spread(mesh, dtype), everybody, meshes=own, **options)


@pytest.mark.parametrize("case", CASES)
def test_experts_train_as_the_unsharded_model(world: Any, case: str) -> None:
    world.run_mesh((2, 2), ("edp", "ep"), trains_alike, case)


@pytest.mark.parametrize("shape", [(1, 4), (4, 1)])
def test_a_gradient_is_divided_by_all_ranks_whatever_the_size_of_its_mesh(world: Any, shape: tuple[int, int]) -> None:
    world.run_mesh(shape, ("edp", "ep"), trains_alike, "experts are units")
