"""`accordion.compat.fsdp2` with tensor parallelism, experts on some ranks, replicas, and tensor subclasses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as theirs
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._pytree import tree_map

import accordion as acc
import accordion.compat.fsdp2 as ours
from accordion import _torch
from tests.compat.test_fsdp2 import SIDES, assert_same_gradients, assert_same_parameters, assert_trains_as_plain
from tests.devices import device, here
from tests.inside import unit_in
from tests.pool import Pool
from tests.shard.test_own_meshes import RANKS, assert_trains_as_unsharded
from tests.support import experts, models
from tests.support.checks import assert_close, step_all
from tests.support.ranked import on_mesh, on_world


def assert_steps_alike(pair: Any, loss_of: Callable[[nn.Module, int], Tensor], tolerance: float = 1e-6) -> None:
    """Compare parameters, and losses `loss_of(model, step)` and gradients of two steps, of both sides. Collective."""
    assert_same_parameters(*pair)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in pair]
    for step in range(2):
        losses = [loss_of(m, step) for m in pair]
        for loss in losses:
            loss.backward()
        assert torch.allclose(*losses, rtol=tolerance)
        assert_same_gradients(*pair, tolerance=tolerance)
        step_all(optimizers)


def parallel(mesh) -> None:
    """With tensor parallelism inside, parameters are DTensors on all axes, and the numbers equal torch's."""
    dp = mesh.mesh_dim_names[:-1]
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    pair = []
    for api in SIDES:
        model = models.seeded(num_blocks=2)
        for block in model.blocks:
            parallelize_module(block, mesh["tp"], plan)
            api.fully_shard(block, mesh=mesh[dp])
        pair.append(api.fully_shard(model, mesh=mesh[dp]))
    row = dist.get_rank() // mesh["tp"].size()  # ranks of one tensor-parallel group train on one batch

    def loss_of(m: nn.Module, step: int) -> Tensor:
        tokens, targets = models.batch(step, 0, row, vocab=48)
        return models.loss_of(m(tokens), targets)

    assert_steps_alike(pair, loss_of, 1e-5)
    model = pair[1]
    assert list(model.state_dict()) == list(pair[0].state_dict())
    model.blocks[0].unshard()
    assert model.blocks[0].up.weight.placements == (Shard(0),)
    assert model.blocks[0].up.weight.device_mesh == mesh["tp"]
    model.blocks[0].reshard()
    whole_and_clipped(pair)


def whole_and_clipped(pair) -> None:
    """The library's own functions use the tensors of the model without any parallelism."""
    reference, model = pair
    whole = {n: p.full_tensor() for n, p in reference.state_dict().items()}
    assert_close(acc.full_state_dict(model, rank0_only=False), whole, 1e-5)
    assert bool(acc.full_state_dict(model)) == (dist.get_rank() == 0)
    with acc.full_params(model, write=True):
        weight = model.blocks[0].up.weight
        assert (weight.placements, weight.shape) == ((Shard(0),), (64, 32))
        weight.data.mul_(2.0)
    assert_close({"": model.blocks[0].up.weight.full_tensor()}, {"": 2 * whole["blocks.0.up.weight"]}, 1e-5)
    model.load_state_dict(reference.state_dict())
    assert_close({n: p.full_tensor() for n, p in model.state_dict().items()}, whole, 0.0)
    for norm_type in (2.0, float("inf")):
        for m in pair:
            for i, p in enumerate(m.parameters()):
                p.grad = torch.full_like(p, 0.1 * i)
        full = [p.grad.full_tensor() for p in reference.parameters()]
        norm = torch.linalg.vector_norm(torch.cat([g.flatten() for g in full]), norm_type)
        assert torch.allclose(acc.clip_grad_norm_(model, 0.5, norm_type), norm)
        for p, grad in zip(model.parameters(), full, strict=True):
            assert torch.allclose(p.grad.full_tensor(), grad * (0.5 / norm))


def test_tensor_parallelism_inside(world):
    world.run_mesh((2, 2), ("dp", "tp"), parallel)


@pytest.mark.slow
def test_replicas_shards_and_tensor_parallelism_on_eight_ranks():
    ranks = Pool(8)
    try:
        ranks.run_mesh((2, 2, 2), ("replicate", "dp", "tp"), parallel, timeout_s=300.0)
    finally:
        ranks.close()


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(4)]


# -- several meshes: experts on some ranks, inside data parallelism over all

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
            own = dict.fromkeys(block.experts.parameters(), placed(same))
            api.fully_shard(block, mesh=everybody, shard_placement_fn=own.get, **options)
    return api.fully_shard(model, mesh=everybody, **options)


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


# -- several axes of other parallelism


def spread(mesh, placements: dict[str, list[Any]]) -> nn.Module:
    """Return two layers whose weights, and the batch, are DTensors on all axes of `mesh`."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8))

    def place(name: str, module: nn.Module, mesh) -> None:
        for attr, p in list(module._parameters.items()):
            own = placements.get(f"{name}.{attr}", [Replicate()] * mesh.ndim)
            module.register_parameter(attr, nn.Parameter(distribute_tensor(p.detach(), mesh, own)))

    return distribute_module(model, mesh, place)


@pytest.mark.slow  # of three axes, DTensor looks for a sharding of each operator for seconds
@on_mesh((1, 2, 2), ("dp", "ep", "tp"))
def test_several_axes_inside(mesh) -> None:
    inner = mesh["ep", "tp"]
    placements = {"0.weight": [Shard(0), Shard(0)], "0.bias": [Shard(0), Shard(0)], "2.weight": [Shard(1), Replicate()]}
    pair = []
    for api in SIDES:
        model = spread(inner, placements)
        for layer in (model[0], model[2]):
            api.fully_shard(layer, mesh=mesh["dp"])
        pair.append(api.fully_shard(model, mesh=mesh["dp"]))
    x = distribute_tensor(torch.randn(2, 4, 8, device=device()), inner, [Replicate(), Replicate()])
    assert_steps_alike(pair, lambda m, step: m(x[step]).square().mean().full_tensor())
    for m in pair:
        m(x[0]).square().mean().backward()
    norm: Any = torch.nn.utils.clip_grad_norm_(pair[0].parameters(), 1e9)
    assert torch.allclose(acc.clip_grad_norm_(pair[1], 1e9), norm.full_tensor())


# -- tensor subclasses


KEPT = ["detach", "_to_copy", "split", "new_zeros", "slice", "clone", "view", "as_strided", "copy_", "empty_like"]


class Wrapped(Tensor):
    """A tensor subclass that unwraps to its inner tensor in operators."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapped:
        return Tensor._make_wrapper_subclass(
            cls, inner.shape, inner.stride(), inner.storage_offset(), dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, op, types, args=(), kwargs=None) -> Any:
        unwrap = lambda t: t.inner if isinstance(t, Wrapped) else t  # noqa: E731
        out = op(*tree_map(unwrap, args), **tree_map(unwrap, kwargs or {}))
        if op.overloadpacket.__name__.endswith("_") and isinstance(args[0], Wrapped):
            return args[0]
        if op.overloadpacket.__name__ not in KEPT:
            return out
        return tree_map(lambda t: cls(t) if isinstance(t, Tensor) else t, out)


class Packed(Wrapped):
    """Rows in float32 that are sent as bfloat16."""

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy) -> Any:
        assert isinstance(mp_policy, theirs.MixedPrecisionPolicy)
        assert module.weight.shape == outer_size
        rows = -(-outer_size[0] // mesh.size()) - self.inner.shape[0]
        return (torch.cat([self.inner, self.inner.new_zeros(rows, *outer_size[1:])]).to(torch.bfloat16),), ("scale",)

    def fsdp_post_all_gather(self, gathered, metadata, param_dtype, *, out=None) -> Any:
        assert metadata == ("scale",)
        (full,) = gathered
        if out is not None:
            assert out.untyped_storage().data_ptr() == full.untyped_storage().data_ptr()
            return None
        return full, (full,)


class Levels(Packed):
    """Rows that stay int8 until a product needs them, with one scale for all, like the frozen base of an adapter."""

    def fsdp_pre_all_gather(self, mesh) -> Any:
        return ((self.inner * 64).round().to(torch.int8),), None

    def fsdp_post_all_gather(self, gathered, metadata, param_dtype, *, out=None) -> Any:
        (full,) = gathered
        if out is not None:
            with torch.autograd._unsafe_preserve_version_counter(out):  # the graph has saved it
                out.copy_(full.to(out.dtype) / 64)
            return None
        made = full.to(param_dtype) / 64
        return made, (made,)


def assert_steps_agree(pair: Any, optimizers: Any, inputs: Callable[[int], Tensor]) -> None:
    """Train both models for three steps on `inputs(step)`; compare losses, bit for bit, and this rank's gradients."""
    for step in range(3):
        losses = [m(inputs(step)).float().square().mean() for m in pair]
        for loss in losses:
            loss.backward()
        assert torch.equal(*losses)
        for a, b in zip(pair[0].parameters(), pair[1].parameters(), strict=True):
            assert (a.grad is None) == (b.grad is None) == (not a.requires_grad)
            assert a.grad is None or torch.allclose(a.grad.to_local(), b.grad.to_local(), rtol=1e-6, atol=1e-7)
        step_all(optimizers)


@on_world(2)
def test_tensor_subclasses_say_how_they_are_gathered(mesh) -> None:
    policy = theirs.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    pair = []
    for api in SIDES:
        torch.manual_seed(0)
        model = here(nn.Sequential(nn.Linear(8, 7), nn.GELU(), nn.Linear(7, 7), nn.GELU(), nn.Linear(7, 4)))
        model[0].weight = nn.Parameter(Packed(model[0].weight.detach()))
        model[4].weight = nn.Parameter(Levels(model[4].weight.detach()), requires_grad=False)
        for i in (0, 4):
            api.fully_shard(model[i], mesh=mesh, mp_policy=policy)
        pair.append(api.fully_shard(model, mesh=mesh, mp_policy=policy))
    kinds = [type(model[i].weight.to_local()) for model in pair for i in (0, 4)]
    assert kinds == [Packed, Levels] * 2
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in pair]
    x = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(dist.get_rank())).to(device())
    assert_steps_agree(pair, optimizers, lambda step: x[step].bfloat16())
    model = pair[1]
    model[0].unshard()
    assert model[0].weight.dtype is torch.bfloat16
    model[0].reshard()
    full_buffer = unit_in(model[0]).groups[-1].full_buffer
    assert [full.untyped_storage().nbytes() for e in full_buffer._params for full in e.gathered] == [0]
    with pytest.raises(ValueError, match="with its own all-gather"):
        acc.full_state_dict(model)


class Positions(nn.Module):
    """Its forward returns rows of its weight, a view."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(Packed(torch.arange(32.0).view(4, 8)))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight[: x.shape[0]]


@on_world(2)
def test_a_view_of_a_tensor_subclass_has_memory_of_its_own(mesh) -> None:
    """A view of the tensor that a subclass made of gathered rows stays valid after these are freed."""
    model = nn.Sequential(Positions(), nn.Linear(8, 8))
    for module in (*model, model):
        policy = theirs.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        ours.fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    seen = []
    model[1].register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    for _ in range(2):
        model(torch.ones(3, 8)).sum().backward()
    assert torch.equal(seen[1].detach().float().cpu(), torch.arange(24.0).view(3, 8))


# -- replicas


@pytest.mark.parametrize("around", [False, pytest.param(True, marks=pytest.mark.slow)])
@on_world(4)
def test_replicas_inside_and_around(mesh, around: bool) -> None:
    """torch's `replicate` works on a module inside, and around sharded modules."""
    plain, model = models.plain(), models.plain()
    for block in model.blocks:
        ours.fully_shard(block, mesh=mesh)
    if around:
        replicate(model)
    else:
        replicate(model.embed)
        ours.fully_shard(model, mesh=mesh)
    assert type(model.embed.weight) is nn.Parameter
    assert_trains_as_plain(mesh, plain, model)
