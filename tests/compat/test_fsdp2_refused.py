"""`accordion.compat.fsdp2`: what is refused, and in which words."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import accordion as acc
import accordion.compat.fsdp2 as ours
from tests.compat.test_fsdp2 import sharded
from tests.devices import device
from tests.support import models
from tests.support.checks import one_loss


class Quantised(Tensor):
    pass


def refused(mesh) -> None:
    def refuses(match: str, *args: Any, **options: Any) -> None:
        with pytest.raises(ValueError, match=match):
            ours.fully_shard(*args, **{"mesh": mesh, **options})

    model = models.plain()
    refuses("takes a module or a list of modules, not int", 3)
    refuses("an empty list", [])
    refuses("takes a module or a list of modules, not str", [model, "head"])
    refuses("ModuleList, which nobody calls", model.blocks)
    refuses("mesh is a str", model, mesh="cpu")
    refuses("the mesh has 3 axes", model, mesh=init_device_mesh("cpu", (4, 1, 1)))
    cuda = DeviceMesh("cuda", [0, 1, 2, 3], _init_backend=False)
    refuses("one of 'cuda' devices, and this machine has (no accelerator|accelerators of type)", model, mesh=cuda)
    refuses("dp_mesh_dims is a object", model, dp_mesh_dims=object())
    refuses("mp_policy is a dtype", model, mp_policy=torch.bfloat16)
    refuses("offload_policy is a bool", model, offload_policy=True)
    refuses("no nn.Parameter", model, ignored_params={"head.weight"})
    refuses("divides the 4 ranks", model, reshard_after_forward=3)
    refuses("divides the 4 ranks", model, reshard_after_forward="yes")
    refuses("return None or Shard", model, shard_placement_fn=lambda p: Replicate() if p.dim() == 1 else None)
    refuses("returned Shard.1. for a parameter of shape", model, shard_placement_fn=lambda p: Shard(1))
    assert all(type(p) is nn.Parameter for p in model.parameters()), "a refusal leaves the model as it was"
    wrong = models.plain()
    ours.fully_shard(wrong, mesh=mesh)
    refuses("a call on a module around this one; shard the inner", wrong.blocks[0])
    refuses("was applied to this FSDPTiny before", wrong)
    refuses("sharded by accordion.shard already", acc.shard(models.plain(), mesh=mesh))
    parallel = models.plain()
    other = init_device_mesh("cpu", (4,))
    parallel.head.weight = nn.Parameter(distribute_tensor(parallel.head.weight.detach(), other, [Shard(1)]))
    refuses("slices of one mesh with named axes", parallel, mesh=init_device_mesh("cpu", (1, 4)))
    subclass = models.plain()
    subclass.head.weight = nn.Parameter(torch.randn(48, 32, device=device()).as_subclass(Quantised))
    refuses("is a Quantised, a tensor subclass without", subclass)
    Quantised.fsdp_pre_all_gather = lambda self, mesh: None  # type: ignore[attr-defined]
    refuses("only one of fsdp_pre_all_gather and", subclass)
    Quantised.fsdp_post_all_gather = Quantised.fsdp_pre_all_gather  # type: ignore[attr-defined]
    refuses("such tensors are not offloaded", subclass, offload_policy=ours.CPUOffloadPolicy())
    del Quantised.fsdp_pre_all_gather, Quantised.fsdp_post_all_gather  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="is no FSDPModule"):
        wrong.set_modules_to_forward_prefetch([models.plain()])


def empty(mesh) -> None:
    """Modules without parameters are sharded as torch does it: nothing lies in them, and they run."""
    model = nn.Sequential(ours.fully_shard(nn.ReLU(), mesh=mesh), nn.Linear(4, 4))
    ours.fully_shard(model, mesh=mesh)
    alone = ours.fully_shard(nn.Sequential(nn.ReLU()), mesh=mesh)
    for _ in range(2):
        model(torch.ones(2, 4, device=device())).sum().backward()
        assert torch.equal(alone(torch.ones(2, 4, device=device())), torch.ones(2, 4, device=device()))
    alone.unshard()
    alone.reshard()
    assert model[1].weight.grad is not None


def misused(mesh) -> None:
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
        with pytest.raises(ValueError, match="cannot be copied"):
            copy.deepcopy(copied)
        one_loss(copied)
    mixed = models.plain()
    for block in mixed.blocks:
        ours.fully_shard(block, mesh=init_device_mesh("cpu", (1, 4), mesh_dim_names=("replicate", "shard")))
    ours.fully_shard(mixed, mesh=mesh)
    with pytest.raises(ValueError, match="one model has one mesh"):
        one_loss(mixed)
    assigned = sharded(ours, mesh)
    assigned.load_state_dict({n: p.clone() for n, p in models.plain().state_dict().items()}, assign=True)
    one_loss(assigned).backward()


def test_what_is_refused_says_why(world):
    world.run(4, refused)  # all ranks of the job: meshes are made in it
    world.run(4, misused)
    world.run(4, empty)
