"""`param.grad_dtype`: the dtype of a sharded gradient where the caller names one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as theirs
from torch import nn

import accordion as acc
import accordion.compat.fsdp2 as ours
from tests.compat.test_fsdp2 import SIDES
from tests.devices import device, here
from tests.support import models
from tests.support.ranked import on_world

BF16, FP32 = torch.bfloat16, torch.float32
SINCE_2_15 = pytest.mark.skipif(
    not hasattr(theirs.FSDPModule, "finalize_backward"), reason="torch follows grad_dtype from 2.15 on"
)


def asking(dtype: torch.dtype | None = FP32) -> nn.Module:
    """A model in bf16 whose matrices take gradients of another dtype."""
    model = here(models.plain().to(BF16))
    for p in model.parameters():
        if p.dim() > 1:
            p.grad_dtype = dtype
    return model


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    tokens, targets = (t.to(device()) for t in models.batch(step, 0, dist.get_rank(), vocab=48))
    return models.loss_of(model(tokens), targets)


def grads(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.grad.full_tensor() for n, p in model.named_parameters()}


@pytest.mark.parametrize(("dtype", "accumulates"), [(FP32, False), (FP32, True), (None, False)])
@on_world(2)
def test_a_gradient_has_the_dtype_that_was_asked_for(mesh: Any, dtype: torch.dtype | None, accumulates: bool) -> None:
    """The sum in float32 is not rounded if float32 or None was asked for; what nobody asked for is as ever."""
    precision = acc.Precision(master=None)
    plain = acc.shard(here(models.plain().to(BF16)), mesh, precision=precision)
    model = acc.shard(asking(dtype), mesh, precision=precision)
    for m in (plain, model):
        if accumulates:
            with acc.no_sync(m):
                loss_of(m, 0).backward()
        loss_of(m, 1).backward()
    found, rounded = grads(model), grads(plain)
    for name, p in model.named_parameters():
        asked = FP32 if p.dim() > 1 else BF16
        assert (found[name].dtype, p.grad.dtype, p.grad.to_local().dtype) == (asked, asked, asked), name
        assert torch.equal(found[name].to(BF16), rounded[name]), name
    assert any(not torch.equal(g, g.to(BF16).to(FP32)) for g in found.values()), "more than bf16 holds"
    kept = {unit.name: unit.gradient_bytes for unit in acc.describe(model).units}
    assert sum(kept.values()) == sum(p.grad.to_local().nbytes for p in model.parameters())
    loss_of(model, 2).backward()  # adds to what stands
    assert acc.clip_grad_norm_(model, 0.5) > 0.5
    optimizer = acc.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, foreach=False))
    before = acc.full_state_dict(model, rank0_only=False)
    optimizer.step()
    assert not torch.equal(acc.full_state_dict(model, rank0_only=False)["head.weight"], before["head.weight"])


@SINCE_2_15
@pytest.mark.parametrize("reduce", [None, BF16, FP32])
@pytest.mark.parametrize("asked", [FP32, None])
@on_world(2)
def test_fsdp2_follows_it_as_torchs(mesh: Any, asked: torch.dtype | None, reduce: torch.dtype | None) -> None:
    """Beside torch's FSDP2: the same dtypes and numbers, without a `reduce_dtype` and with one."""
    pair = []
    for api in SIDES:
        model = asking(asked)
        policy = theirs.MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=reduce)
        for block in model.blocks:
            api.fully_shard(block, mesh=mesh, mp_policy=policy)
        pair.append(api.fully_shard(model, mesh=mesh, mp_policy=policy))
    for step in range(2):
        for model in pair:
            loss_of(model, step).backward()
    wanted, found = (grads(model) for model in pair)
    assert {n: g.dtype for n, g in found.items()} == {n: g.dtype for n, g in wanted.items()}
    for name, grad in found.items():
        assert torch.allclose(grad, wanted[name], rtol=2e-2, atol=1e-3), name


@on_world(2)
def test_it_may_be_set_until_the_first_use(mesh: Any) -> None:
    """What is set between `fully_shard` and the first forward counts too."""
    model = ours.fully_shard(here(models.plain().to(BF16)), mesh=mesh)
    model.head.weight.grad_dtype = FP32
    loss_of(model, 0).backward()
    assert (model.head.weight.grad.dtype, model.blocks[0].up.weight.grad.dtype) == (FP32, BF16)


@on_world(2)
def test_offload_and_it_are_refused_together(mesh: Any) -> None:
    with pytest.raises(acc.UsageError, match=r"has grad_dtype torch.float32, and an offloaded gradient is stored"):
        acc.shard(asking(), mesh, precision=acc.Precision(master=None), offload=acc.Offload(params="host"))
