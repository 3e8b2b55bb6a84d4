"""Names that torch's FSDP2 has since 2.15, with every version of torch; compared with torch's own if it has them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as theirs
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe, ScheduleInterleaved1F1B

import accordion.compat.fsdp2 as ours
from accordion import _torch
from tests.compat.test_fsdp2 import SIDES, assert_same_gradients, both, sharded
from tests.compat.test_fsdp2_parallel import layers
from tests.devices import device, here
from tests.inside import unit_in, units_of
from tests.support import models
from tests.support.checks import FLAT, HYBRID, assert_close, mean_grads, one_loss
from tests.support.meters import Wire
from tests.support.ranked import Mesh, on_mesh, on_world
from tests.support.reference import grads_of
from tests.support.sample import sampled

NEW = hasattr(theirs.FSDPModule, "finalize_backward")
since_2_15 = pytest.mark.skipif(not NEW, reason="torch 2.15 has it")


@on_world(2)
def test_finalize_backward_reduces_accumulated_gradients(mesh: Any) -> None:
    """`finalize_backward` reduces accumulated gradients once, and none before the first forward."""
    assert sharded(ours, mesh).finalize_backward() is None
    sides = SIDES if NEW else (ours,)
    plain, *pair = [sharded(ours, mesh), *[sharded(api, mesh) for api in sides]]
    for micro in range(2):
        one_loss(plain, micro).backward()
    for m, async_op in [(m, async_op) for m in pair for async_op in (False, True)]:
        m.zero_grad()
        m.set_manual_backward_finalization(True)
        m.set_reshard_after_backward(False)
        m.set_requires_gradient_sync(False)
        with Wire() as wire:
            for micro in range(2):
                one_loss(m, micro).backward()
        assert not wire.of("reduce")
        m.set_requires_gradient_sync(True)
        m.set_reshard_after_backward(True)
        with Wire() as wire:
            handle = m.finalize_backward(async_op=async_op)
            if async_op:
                assert isinstance(handle, (ours if m is pair[-1] else theirs).GradientReductionHandle)
                handle.wait()
        assert len(wire.of("reduce")) == 4, type(m)
        assert_close(grads_of(m), grads_of(plain), 1e-6)
        m.finalize_backward()  # nothing has been added up since
        m.set_manual_backward_finalization(False)
    assert not any(unit.is_unsharded for unit in units_of(pair[-1]))
    with pytest.raises(RuntimeError, match="root"):
        pair[-1].blocks[0].finalize_backward()


WAYS: dict[str, tuple[Mesh, dict[str, Any]]] = {
    "two axes": (((2, 2), HYBRID), {}),
    "secondary shards": (((4,), FLAT), {"reshard_after_forward": 2}),
    "kept": (((4,), FLAT), {"reshard_after_forward": False}),
    "bf16": (((4,), FLAT), {"mp_policy": theirs.MixedPrecisionPolicy(torch.bfloat16, torch.float32)}),
    "on the host": (((4,), FLAT), {"offload_policy": theirs.CPUOffloadPolicy(pin_memory=False)}),
}


@pytest.mark.parametrize("way", sampled(WAYS, {"two axes"}.__contains__))
@on_mesh(lambda given: WAYS[given["way"]][0])
def test_a_finalized_step_has_torchs_gradients(mesh: Any, way: str) -> None:
    """After `finalize_backward` gradients equal torch's, whichever backwards of a step have communicated."""
    pair = [sharded(api, mesh, **WAYS[way][1]) for api in (SIDES if NEW else (ours,))]
    plain = models.plain()
    tolerance = 2e-2 if way == "bf16" else 1e-5
    for syncs in ((False, False), (False, True), (True, False), (True, True)):
        plain.zero_grad()
        for micro in range(2):
            one_loss(plain, micro).backward()
        for m in pair:
            m.zero_grad()
            m.set_manual_backward_finalization(True)
            for micro, sync in enumerate(syncs):
                m.set_requires_gradient_sync(sync)
                one_loss(m, micro).backward()
            m.set_requires_gradient_sync(True)
            m.finalize_backward()
            m.set_manual_backward_finalization(False)
            assert not any(unit.is_unsharded for unit in (units_of(m) if m is pair[-1] else ()))
        assert_close(grads_of(pair[-1]), mean_grads(mesh, plain), tolerance)
        if NEW:
            # Of what waits to be finalized torch's adds up in bf16, this in float32.
            assert_same_gradients(*pair, tolerance=4e-3 if way == "bf16" else 1e-6)


@pytest.mark.parametrize("api", [pytest.param(0, marks=since_2_15), 1])
@on_world(2)
def test_full_parameters_may_keep_their_memory(mesh: Any, api: int) -> None:
    """Full parameters stay at one address until their memory is freed for good."""
    model = sharded(SIDES[api], mesh)
    model.set_keep_unsharded_storage(True)
    addresses: list[set[int]] = []
    for step in range(3):
        seen: set[int] = set()
        for block in model.blocks:
            block.up.register_forward_pre_hook(lambda m, args, s=seen: s.add(m.weight.data_ptr()))
        one_loss(model, step).backward()
        addresses.append(seen)
    assert addresses[0] == addresses[1] == addresses[2]
    if api:
        memory = unit_in(model.blocks[0]).groups[0].full_buffer.flat.untyped_storage()
        assert memory.nbytes() > 0
        model.set_keep_unsharded_storage(False)
        assert memory.nbytes() == 0
    one_loss(model, 3).backward()


@on_world(2)
def test_the_dtype_of_sums_is_that_of_the_installed_torch(mesh: Any) -> None:
    """Without a `reduce_dtype`, gradients are summed in the dtype that the installed torch uses."""
    pair = both(mesh, mp_policy=theirs.MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    for m in pair:
        one_loss(m).backward()
    assert_same_gradients(*pair, tolerance=1e-6 if NEW else 3e-2)
    wanted = torch.float32 if NEW else torch.bfloat16
    assert {g.reduce_dtype for unit in units_of(pair[1]) for g in unit.groups} == {wanted}
    assert _torch.reduces_in_own_dtype() == NEW


@pytest.mark.parametrize("kind", [ScheduleGPipe, pytest.param(ScheduleInterleaved1F1B, marks=since_2_15)])
@on_mesh((2, 2), ("pp", "dp"))
def test_stages_of_a_pipeline(mesh: Any, kind: type) -> None:
    """Stages of torch's pipelines have the unsharded model's gradients, and since 2.15 are reduced once a step."""
    at, data = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    plain, target = layers(), torch.zeros(8, 8, device=device())
    xs = [torch.randn(8, 8, generator=torch.Generator().manual_seed(rank)).to(device()) for rank in range(2)]
    sum(nn.functional.mse_loss(here(nn.Sequential(*plain))(x), target) for x in xs).div(2).backward()
    each = 1 if kind is ScheduleInterleaved1F1B else 2
    numbers = range(at, 4 // each, 2)
    stages = [here(nn.Sequential(*layers()[each * i : each * (i + 1)])) for i in numbers]
    for stage in stages:
        for layer in stage:
            ours.fully_shard(layer, mesh=mesh["dp"])
        ours.fully_shard(stage, mesh=mesh["dp"])
        assert isinstance(stage, theirs.FSDPModule) == NEW
    ours.share_comm_ctx(stages)
    group = mesh["pp"].get_group()
    running = [
        PipelineStage(stage, i, 4 // each, device(), group=group) for i, stage in zip(numbers, stages, strict=True)
    ]
    schedule = kind(running if each == 1 else running[0], n_microbatches=4, loss_fn=nn.functional.mse_loss)
    for _ in range(2):
        with Wire() as wire:
            schedule.step(xs[data]) if at == 0 else schedule.step(target=target, losses=[])
        assert len(wire.of("reduce")) == 2 * (1 if NEW else 4), (
            "one for each layer, before 2.15 for each micro-batch too"
        )
        for i, stage in zip(numbers, stages, strict=True):
            wanted = {n: p.grad for n, p in nn.Sequential(*plain[each * i : each * (i + 1)]).named_parameters()}
            assert_close(grads_of(stage), wanted, 1e-5)
            stage.zero_grad()
    dist.barrier()
