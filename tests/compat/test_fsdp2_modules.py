"""`accordion.compat.fsdp2`: lists of modules, the order of calls, tied parameters, and what is refused."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import accordion as acc
import accordion.compat.fsdp2 as ours
from tests.compat.test_fsdp2 import (
    SIDES,
    assert_backwards_agree,
    assert_gradients_are_means,
    assert_same_parameters,
    assert_trains_as_plain,
    leases,
    sharded,
)
from tests.devices import device
from tests.inside import engine_in, units_of
from tests.support import models
from tests.support.checks import assert_equal, full, one_loss
from tests.support.ranked import on_world


@on_world(2)
def test_a_list_of_modules_is_gathered_together(mesh) -> None:
    pair: list[models.Tiny] = []
    for api in SIDES:
        model = models.plain()
        group = [model.norm, model.head]
        assert api.fully_shard(group, mesh=mesh) is group
        api.fully_shard([model.blocks[0], model.blocks[1]], mesh=mesh)
        pair.append(api.fully_shard(model, mesh=mesh))
    assert type(pair[1].norm).__name__ == "FSDPLayerNorm"
    assert_backwards_agree(pair)
    model = pair[1]
    assert [unit.name for unit in units_of(model)] == ["", "blocks.0", "norm"]
    model.norm.unshard()
    assert type(model.head.weight) is nn.Parameter
    model.head.reshard()
    assert isinstance(model.norm.weight, DTensor)


@on_world(2)
def test_modules_without_a_root(mesh) -> None:
    """Without a module around them, each list and each block is a root."""
    plain, model = models.plain(), models.plain()
    ours.fully_shard([model.embed, *model.blocks], mesh=mesh)
    ours.fully_shard([model.norm, model.head], mesh=mesh)
    assert_trains_as_plain(mesh, plain, model)
    plain, model = models.plain(), models.plain()
    for one in (plain, model):
        for module in (one.embed, one.norm, one.head):
            module.requires_grad_(False)
    for block in model.blocks:
        ours.fully_shard(block, mesh=mesh)
    assert_trains_as_plain(mesh, plain, model)


@on_world(2)
def test_calls_in_another_order(mesh) -> None:
    """The root is sharded after a block was used, and a block is called before the root."""
    plain, model = models.plain(), models.plain()
    x = torch.randn(2, 3, 32, device=device())
    for block in model.blocks:
        ours.fully_shard(block, mesh=mesh)
    wanted = plain.blocks[1](x)
    assert torch.allclose(model.blocks[1](x), wanted)
    ours.fully_shard(model, mesh=mesh)
    assert torch.allclose(model.blocks[1](x), wanted)
    assert len(leases(model)) == 4
    assert_trains_as_plain(mesh, plain, model)


def crossed() -> models.Tiny:
    """Return a model in which two blocks share a weight, and the embedding and the head another one."""
    model = models.tied()
    model.blocks[1].up.weight = model.blocks[0].up.weight
    return model


@on_world(2)
def test_tied_parameters_are_sharded_in_one_call(mesh) -> None:
    plain, model = crossed(), crossed()
    ours.fully_shard([model.blocks[0], model.blocks[1].up], mesh=mesh)
    ours.fully_shard(model, mesh=mesh)
    assert model.blocks[1].up.weight is model.blocks[0].up.weight
    assert model.head.weight is model.embed.weight
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert_trains_as_plain(mesh, plain, model)
    apart, late = crossed(), models.tied()
    ours.fully_shard(apart.blocks[0], mesh=mesh)
    ours.fully_shard(late.embed, mesh=mesh)
    late.head.weight = late.embed.weight  # tied between the calls
    for wrong in (apart.blocks[1], apart, late):
        with pytest.raises(ValueError, match="is tied to one that another call of fully_shard has sharded"):
            ours.fully_shard(wrong, mesh=mesh)


@on_world(2)
def test_other_dims_and_ignored_parameters(mesh) -> None:
    pair = []
    for api in SIDES:
        model = models.plain()
        for block in model.blocks:
            api.fully_shard(block, mesh=mesh, shard_placement_fn=lambda p: Shard(1) if p.dim() == 2 else None)
        pair.append(api.fully_shard(model, mesh=mesh, ignored_params={model.head.weight}))
    assert_same_parameters(*pair)
    assert type(pair[1].head.weight) is nn.Parameter
    assert_backwards_agree(pair)
    uneven = ours.fully_shard(models.narrow(), mesh=mesh, shard_placement_fn=lambda p: Shard(-1))
    assert_trains_as_plain(mesh, models.narrow(), uneven)
    scalar = ours.fully_shard(models.uneven(), mesh=mesh)
    assert scalar.gain.placements == (Replicate(),)
    assert_trains_as_plain(mesh, models.uneven(), scalar)


@on_world(2)
def test_stages_share_communicators(mesh) -> None:
    torch.manual_seed(0)
    stages = [nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2)]
    for stage in stages:
        ours.fully_shard(stage, mesh=mesh)
    ours.share_comm_ctx(stages)
    x = torch.randn(4, 8, device=device())
    stages[1](stages[0](x)).sum().backward()
    first, second = [engine_in(stage) for stage in stages]
    assert first is not second
    assert first.context is second.context
    assert all(p.grad is not None for stage in stages for p in stage.parameters())


@on_world(2)
def test_memory_is_freed_with_the_last_reference_to_the_model(mesh) -> None:
    model = sharded(ours, mesh)
    one_loss(model).backward()  # the first of a process imports, and imports keep frames
    del model
    gc.collect()
    gc.disable()
    try:
        model = sharded(ours, mesh)
        for one, other in zip(model.blocks, model.blocks[1:], strict=False):
            one.set_modules_to_forward_prefetch([other])
            other.set_modules_to_backward_prefetch([one])
        one_loss(model).backward()
        held = [weakref.ref(g.shard_buffer) for unit in units_of(model) for g in unit.groups]
        assert held
        assert all(ref() is not None for ref in held)
        del model, one, other
        assert not [ref for ref in held if ref() is not None]
    finally:
        gc.enable()


@on_world(2)
def test_other_functions_of_the_library_take_the_model(mesh, tmp_path: Path) -> None:
    model = sharded(ours, mesh)
    optimizer = acc.wrap_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    one_loss(model).backward()
    optimizer.step()
    acc.save(f"{tmp_path}/step-1", model, optimizer)
    other = acc.shard(models.plain(), mesh=mesh)
    again = acc.wrap_optimizer(torch.optim.AdamW(other.parameters(), lr=1e-2))
    acc.load(f"{tmp_path}/step-1", other, again)
    assert_equal(full(other), full(model))
    with acc.no_sync(model):
        one_loss(model, 1).backward()
    one_loss(model, 2).backward()


@pytest.mark.parametrize("first", [pytest.param(True, marks=pytest.mark.slow), False])
@on_world(2)
def test_blocks_are_compiled_before_and_after(mesh, first: bool) -> None:
    import torch._dynamo.testing

    plain, model = models.plain(), models.plain()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager" if first else "eager")
    # dynamo looks at `.grad` of what it takes in, and a full parameter is no leaf
    warnings.filterwarnings("ignore", message=".*grad attribute of a Tensor that is not a leaf.*")
    for block in model.blocks:
        if first:
            block.compile(backend=counter, fullgraph=True)
        ours.fully_shard(block, mesh=mesh)
        if not first:
            block.compile(backend=counter, fullgraph=True)
    ours.fully_shard(model, mesh=mesh)
    for step in range(3):
        assert_gradients_are_means(mesh, plain, model, step, 3e-6)
        plain.zero_grad()
        model.zero_grad()
    assert counter.frame_count == 1, "one graph serves all blocks and steps"


# -- refusals and misuse


class Quantised(Tensor):
    pass


@on_world(4)  # all ranks of the job: meshes are made in it
def test_refusals_name_the_reason(mesh) -> None:
    def refuses(match: str, *args: Any, **options: Any) -> None:
        with pytest.raises(ValueError, match=match):
            ours.fully_shard(*args, **{"mesh": mesh, **options})

    model = models.plain()
    refuses("takes a module or a list of modules, not int", 3)
    refuses("an empty list", [])
    refuses("takes a module or a list of modules, not str", [model, "head"])
    refuses("ModuleList: it is never called", model.blocks)
    refuses("mesh is a str", model, mesh="cpu")
    refuses("the mesh has 3 axes", model, mesh=init_device_mesh("cpu", (4, 1, 1)))
    cuda = DeviceMesh("cuda", [0, 1, 2, 3], _init_backend=False)
    refuses("one of 'cuda' devices, and this machine has (no accelerator|accelerators of type)", model, mesh=cuda)
    refuses("dp_mesh_dims is not supported", model, dp_mesh_dims=object())
    newer = type("Newer", (ours.MixedPrecisionPolicy,), {})
    policy = newer()
    object.__setattr__(policy, "param_dtype_override_fn", len)  # a field since torch 2.15, with a default
    refuses("param_dtype_override_fn=. is not supported", model, mp_policy=policy)
    refuses("mp_policy is a dtype", model, mp_policy=torch.bfloat16)
    refuses("offload_policy is a bool", model, offload_policy=True)
    refuses("not an nn.Parameter", model, ignored_params={"head.weight"})
    refuses("divides the 4 ranks", model, reshard_after_forward=3)
    refuses("divides the 4 ranks", model, reshard_after_forward="yes")
    refuses(
        "return None, Shard.dim., or a ShardPlacementResult",
        model,
        shard_placement_fn=lambda p: Replicate() if p.dim() == 1 else None,
    )
    refuses("returned Shard.1. for a parameter of shape", model, shard_placement_fn=lambda p: Shard(1))
    assert all(type(p) is nn.Parameter for p in model.parameters()), "a refusal leaves the model as it was"
    wrong = models.plain()
    ours.fully_shard(wrong, mesh=mesh)
    refuses("a call on an outer module. Shard inner modules", wrong.blocks[0])
    refuses("has been applied to this FSDPTiny already", wrong)
    refuses("sharded by accordion.shard already", acc.shard(models.plain(), mesh=mesh))
    parallel = models.plain()
    other = init_device_mesh("cpu", (4,))
    parallel.head.weight = nn.Parameter(distribute_tensor(parallel.head.weight.detach(), other, [Shard(1)]))
    refuses("slices of one mesh with named axes", parallel, mesh=init_device_mesh("cpu", (1, 4)))
    subclass = models.plain()
    subclass.head.weight = nn.Parameter(torch.randn(48, 32, device=device()).as_subclass(Quantised))
    refuses("is a Quantised, a tensor subclass without", subclass.head)
    Quantised.fsdp_pre_all_gather = lambda self, mesh: None  # type: ignore[attr-defined]
    refuses("only one of fsdp_pre_all_gather and", subclass)
    Quantised.fsdp_post_all_gather = Quantised.fsdp_pre_all_gather  # type: ignore[attr-defined]
    refuses("such tensors are not offloaded", subclass, offload_policy=ours.CPUOffloadPolicy())
    del Quantised.fsdp_pre_all_gather, Quantised.fsdp_post_all_gather  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="is not an FSDPModule"):
        wrong.set_modules_to_forward_prefetch([models.plain()])


@on_world(4)
def test_modules_without_parameters_run(mesh) -> None:
    """Modules without parameters can be sharded, as in torch, and run."""
    model = nn.Sequential(ours.fully_shard(nn.ReLU(), mesh=mesh), nn.Linear(4, 4))
    ours.fully_shard(model, mesh=mesh)
    alone = ours.fully_shard(nn.Sequential(nn.ReLU()), mesh=mesh)
    for _ in range(2):
        model(torch.ones(2, 4, device=device())).sum().backward()
        assert torch.equal(alone(torch.ones(2, 4, device=device())), torch.ones(2, 4, device=device()))
    alone.unshard()
    alone.reshard()
    assert model[1].weight.grad is not None
    assert type(model[:1]) is nn.Sequential, "a slice is of the original class"


@on_world(4)
def test_misuse_is_reported(mesh) -> None:
    model = sharded(ours, mesh)
    one_loss(model)
    model.head.weight = nn.Parameter(torch.zeros(48, 32, device=device()))
    with pytest.raises(ValueError, match="was replaced after shard"):
        one_loss(model)
    early = models.plain()
    optimizer = torch.optim.SGD(early.parameters(), lr=0.1)
    ours.fully_shard(early, mesh=mesh)
    with pytest.raises(ValueError, match="made before shard"):
        optimizer.step()
    copied = sharded(ours, mesh)
    for _ in range(2):
        with pytest.raises(ValueError, match="FSDP does not support deepcopy"):
            copy.deepcopy(copied)
        with pytest.raises(AssertionError, match=r"acc\.EMA"):
            AveragedModel(copied)
        one_loss(copied)
    assigned = sharded(ours, mesh)
    with pytest.raises(RuntimeError, match=r"got mixed torch\.Tensor and DTensor"):
        assigned.load_state_dict(models.plain().state_dict())
    assigned.load_state_dict(models.plain().state_dict(), assign=True)
    with pytest.raises(ValueError, match=r"but it is a plain tensor now\. Assign a DTensor"):
        one_loss(assigned)


@on_world(2)
def test_errors_have_torchs_classes_and_words(mesh) -> None:
    """Errors have the classes of torch's errors and contain their words."""
    for api in SIDES:
        model = sharded(api, mesh)
        with pytest.raises(
            AssertionError, match="Each distinct composable distributed API can only be applied to a module once"
        ):
            api.fully_shard(model, mesh=mesh)
        with pytest.raises(ValueError, match="fully_shard does not support containers that do not implement forward"):
            api.fully_shard(nn.ModuleList([nn.Linear(2, 2)]), mesh=mesh)
        with pytest.raises(AssertionError, match="FSDP does not support deepcopy"):
            copy.deepcopy(model)
        assert api.fully_shard.state(model) is not None
        assert api.fully_shard.state(model.blocks[0]) is not api.fully_shard.state(model)
        assert api.fully_shard.state(model.head) is None


@on_world(2)
def test_averages_of_clones_equal_those_of_averaged_model(mesh) -> None:
    """So do those of `acc.EMA`, which the refusal of AveragedModel names."""
    model, plain = sharded(ours, mesh), models.plain()
    one_loss(model)
    ema = acc.EMA(model, 0.9)
    ema.update()
    update = get_ema_multi_avg_fn(0.9)
    averages = [p.detach().clone() for p in model.parameters()]
    wanted = AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    wanted.update_parameters(plain)
    for _ in range(2):
        with torch.no_grad():
            for m in (model, plain):
                for p in m.parameters():
                    p.mul_(1.5)
        update(averages, [p.detach() for p in model.parameters()], 1)
        wanted.update_parameters(plain)
        ema.update()
    with ema.applied():
        weights = acc.full_state_dict(model, rank0_only=False)
    assert all(torch.equal(weights[name], p.cpu()) for name, p in wanted.module.named_parameters())
    for found, p in zip(averages, wanted.module.parameters(), strict=True):
        assert torch.allclose(found.full_tensor(), p, rtol=1e-6)
