"""`accordion.compat.fsdp2`: what is refused, and the words of the errors."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import accordion as acc
import accordion.compat.fsdp2 as ours
from tests.compat.test_fsdp2 import SIDES, sharded
from tests.devices import device
from tests.support import models
from tests.support.checks import one_loss
from tests.support.ranked import on_world


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
    refuses("dp_mesh_dims is a object", model, dp_mesh_dims=object())
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
    ours.fully_shard(subclass.head, mesh=mesh)  # the methods may still be set
    with pytest.raises(ValueError, match="is a Quantised, a tensor subclass without"):
        subclass.head(torch.ones(2, 32, device=device()))
    half = nn.Linear(4, 4, device=device())
    ours.fully_shard(half, mesh=mesh, offload_policy=ours.CPUOffloadPolicy())
    local: Any = half.weight._local_tensor
    local.fsdp_pre_all_gather = lambda mesh: None
    with pytest.raises(ValueError, match="only one of fsdp_pre_all_gather and"):
        half(torch.ones(2, 4, device=device()))
    local.fsdp_post_all_gather = local.fsdp_pre_all_gather
    with pytest.raises(ValueError, match="such tensors are not offloaded"):
        half(torch.ones(2, 4, device=device()))
    subclass = models.plain()
    subclass.head.weight = nn.Parameter(torch.randn(48, 32, device=device()).as_subclass(Quantised))
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
        for kind in (ValueError, AssertionError):  # torch's raises the latter
            with pytest.raises(kind, match="FSDP does not support deepcopy"):
                copy.deepcopy(copied)
        with pytest.raises(AssertionError, match="get_ema_multi_avg_fn"):
            AveragedModel(copied)
        one_loss(copied)
    assigned = sharded(ours, mesh)
    with pytest.raises(RuntimeError, match=r"got mixed torch\.Tensor and DTensor"):
        assigned.load_state_dict(models.plain().state_dict())
    assigned.load_state_dict(models.plain().state_dict(), assign=True)
    with pytest.raises(ValueError, match=r"is a plain tensor now\. Assign a DTensor"):
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
    """The advice in the refusal of AveragedModel gives the averages of an unsharded model."""
    model, plain = sharded(ours, mesh), models.plain()
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
    for found, p in zip(averages, wanted.module.parameters(), strict=True):
        assert torch.allclose(found.full_tensor(), p, rtol=1e-6)
