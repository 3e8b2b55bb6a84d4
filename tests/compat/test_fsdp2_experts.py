"""`accordion.compat.fsdp2` with several meshes: experts on some ranks, inside data parallelism over all."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import Shard

import accordion as acc
import accordion.compat.fsdp2 as ours
from accordion import _torch
from tests.compat.test_fsdp2 import SIDES, assert_same_gradients, assert_same_parameters
from tests.devices import device
from tests.shard.test_own_meshes import RANKS, assert_trains_as_unsharded
from tests.support import experts
from tests.support.ranked import on_mesh

PLACES = hasattr(_fsdp_common, "ShardPlacementResult")
NEW = pytest.mark.skipif(not PLACES, reason="torch 2.11 has no ShardPlacementResult")
WAYS = ("a module", pytest.param("a parameter", marks=[NEW, pytest.mark.slow]))


def sharded(api: Any, mesh: Any, way: str, dtype: torch.dtype = torch.float32, **options: Any) -> experts.Model:
    """Place experts over one axis of two ranks and shard them over the other; shard everything else over all four."""
    everybody, same = mesh["edp", "ep"]._flatten("dp"), mesh["edp"]
    model = experts.spread(mesh, dtype)
    for block in model.blocks:
        if way == "a module":
            api.fully_shard(block.experts, mesh=same, **options)
            # They see the tokens of all ranks, and lie over two.
            block.experts.set_gradient_divide_factor(float(RANKS))
            block.experts.set_force_sum_reduction_for_comms(True)  # gloo has no other for torch's
            api.fully_shard(block, mesh=everybody, **options)
        else:
            mine = set(block.experts.parameters())
            rule = partial(placed_if, mine, placed(same))
            api.fully_shard(block, mesh=everybody, shard_placement_fn=rule, **options)
    return api.fully_shard(model, mesh=everybody, **options)


def placed_if(mine: set[nn.Parameter], info: Any, param: nn.Parameter) -> Any:
    return info if param in mine else None


def placed(mesh: Any) -> Any:
    return _fsdp_common.ShardPlacementResult(Shard(0), _fsdp_common.FSDPMeshInfo(mesh, shard_mesh_dim=0))


def trains_alike(mesh: Any, way: str, **options: Any) -> None:
    """Compare in float64, since in float32 the order of sums alone changes gradients by 2e-6 of their largest element."""
    pair = [sharded(api, mesh, way, torch.float64, **options) for api in SIDES]
    assert_same_parameters(*pair)
    for m in pair:
        m.loss(experts.tokens(0, dist.get_rank())).backward()
    assert_same_gradients(*pair)
    pair[1].zero_grad()
    # Sums of a parameter's own mesh are divided by its ranks, as in torch's.
    assert_trains_as_unsharded(pair[1], expert_scale=2.0 if way == "a parameter" else 1.0)


@pytest.mark.parametrize("way", WAYS)
def test_experts_train_as_unsharded_and_as_torchs(world: Any, way: str) -> None:
    world.run_mesh((2, 2), ("edp", "ep"), trains_alike, way)


@pytest.mark.slow
def test_experts_stay_sharded_until_the_backward_if_asked(world: Any) -> None:
    """An int that does not divide the experts' ranks frees their full parameters."""
    world.run_mesh((2, 2), ("edp", "ep"), trains_alike, "a module", reshard_after_forward=2)


@on_mesh((2, 2), ("edp", "ep"))
def test_the_norm_is_over_all_meshes(mesh: Any) -> None:
    """The norm covers experts that are ordinary tensors and differ between ranks."""
    everybody, same = mesh["edp", "ep"]._flatten("dp"), mesh["edp"]
    torch.manual_seed(mesh["ep"].get_local_rank())
    own = nn.Linear(6, 5).to(device())
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(6, 6), own).to(device())
    model[1].gain = nn.Parameter(torch.ones((), device=device()))  # kept whole on its ranks
    ours.fully_shard(own, mesh=same)
    ours.fully_shard(model, mesh=everybody)
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(dist.get_rank())).to(device())
    (model(x).square().sum() * own.gain.full_tensor().detach()).backward()
    for p in model.parameters():
        p.grad = torch.full_like(p, 0.5) if p.grad is None else p.grad
    squares = {"all": torch.zeros((), device=device()), "experts": torch.zeros((), device=device())}
    for name, p in model.named_parameters():
        squares["experts" if name.startswith("1.") else "all"] += p.grad.full_tensor().square().sum()
    dist.all_reduce(squares["experts"], group=mesh["ep"].get_group())
    wanted = (squares["all"] + squares["experts"]).sqrt()
    assert torch.allclose(acc.clip_grad_norm_(model, 1e9), wanted, rtol=1e-5)


@on_mesh((2, 2), ("edp", "ep"))
def test_meshes_outside_the_models_ranks_are_refused(mesh: Any) -> None:
    model = experts.seeded()
    ours.fully_shard(model.blocks[0], mesh=mesh["edp", "ep"]._flatten("dp"))
    ours.fully_shard(model, mesh=mesh["edp"])
    with pytest.raises(ValueError, match="Shard the outermost module on the ranks of all meshes"):
        model(experts.tokens(0, 0))
    if not PLACES:
        return
    info = placed(mesh["edp"])
    info.mesh_info.shard_mesh_dim = None
    assert _torch.is_shard_placement_result(info)
    with pytest.raises(ValueError, match="return an FSDPMeshInfo of one axis"):
        ours.fully_shard(experts.seeded(), mesh=mesh["edp"], shard_placement_fn=lambda p: info)
