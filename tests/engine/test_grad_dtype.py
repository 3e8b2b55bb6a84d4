"""`param.grad_dtype`: the dtype of a sharded gradient where the caller names one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed.fsdp as theirs
from torch import nn

import accordion as acc
import accordion.compat.fsdp2 as ours
from tests.compat.test_fsdp2 import SIDES
from tests.support import models
from tests.support.checks import one_loss
from tests.support.ranked import on_world
from tests.support.reference import grads_of

BF16, FP32 = torch.bfloat16, torch.float32
SINCE_2_15 = pytest.mark.skipif(
    not hasattr(theirs.FSDPModule, "finalize_backward"), reason="torch follows grad_dtype from 2.15 on"
)


def asking(dtype: torch.dtype | None = FP32) -> nn.Module:
    """A model in bf16 whose matrices take gradients of another dtype."""
    model = models.plain().to(BF16)
    for p in model.parameters():
        if p.dim() > 1:
            p.grad_dtype = dtype
    return model


@pytest.mark.parametrize(("dtype", "accumulates"), [(FP32, False), (FP32, True), (None, False)])
@on_world(2)
def test_a_gradient_has_the_dtype_that_was_asked_for(mesh: Any, dtype: torch.dtype | None, accumulates: bool) -> None:
    """The sum in float32 is not rounded if float32 or None was asked for; what nobody asked for is as ever."""
    precision = acc.Precision(master=None)
    plain = acc.shard(models.plain().to(BF16), mesh, precision=precision)
    model = acc.shard(asking(dtype), mesh, precision=precision)
    for m in (plain, model):
        if accumulates:
            with acc.no_sync(m):
                one_loss(m, 0).backward()
        one_loss(m, 1).backward()
    grads, rounded = grads_of(model), grads_of(plain)
    for name, p in model.named_parameters():
        asked = FP32 if p.dim() > 1 else BF16
        assert (grads[name].dtype, p.grad.dtype, p.grad.to_local().dtype) == (asked, asked, asked), name
        assert torch.equal(grads[name].to(BF16), rounded[name]), name
    assert any(not torch.equal(g, g.to(BF16).to(FP32)) for g in grads.values()), "more than bf16 holds"
    kept = {unit.name: unit.gradient_bytes for unit in acc.describe(model).units}
    assert sum(kept.values()) == sum(p.grad.to_local().nbytes for p in model.parameters())
    one_loss(model, 2).backward()  # adds to the gradients
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
            one_loss(model, step).backward()
    wanted, grads = (grads_of(model) for model in pair)
    assert {n: g.dtype for n, g in grads.items()} == {n: g.dtype for n, g in wanted.items()}
    for name, grad in grads.items():
        assert torch.allclose(grad, wanted[name], rtol=2e-2, atol=1e-3), name


@on_world(2)
def test_it_may_be_set_until_the_first_use(mesh: Any) -> None:
    """What is set between `fully_shard` and the first forward counts too."""
    model = ours.fully_shard(models.plain().to(BF16), mesh=mesh)
    model.head.weight.grad_dtype = FP32
    one_loss(model, 0).backward()
    assert (model.head.weight.grad.dtype, model.blocks[0].up.weight.grad.dtype) == (FP32, BF16)


@on_world(2)
def test_offload_and_it_are_refused_together(mesh: Any) -> None:
    with pytest.raises(acc.UsageError, match=r"has grad_dtype torch.float32, and an offloaded gradient is stored"):
        acc.shard(asking(), mesh, precision=acc.Precision(master=None), offload=acc.Offload(params="host"))
