"""The public surface: what shard makes, full parameters, clipping, state dicts, errors."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import accordion as acc
from tests.devices import device
from tests.inside import engine_in
from tests.support import models
from tests.support.checks import (
    HYBRID,
    PlantedError,
    assert_at_rest,
    assert_close,
    assert_equal,
    batch,
    mean_grads,
    one_loss,
    unit_names,
)
from tests.support.models import Block
from tests.support.ranked import on_mesh, on_world, under_strategies
from tests.support.reference import grads_of, local_of, params_of

# -- what shard makes


@under_strategies("full_shard", "hybrid_shard_optim")
def test_parameters_are_dtensors_at_the_placement_of_their_optimizer(mesh, strategy: acc.Strategy) -> None:
    wanted = {
        "no_shard": (Replicate(),),
        "hybrid_shard": (Replicate(), Shard(0)),
        "hybrid_shard_optim": (_StridedShard(0, split_factor=2), Shard(0)),
    }.get(strategy.name, (Shard(0),))
    plain, model = models.plain(), acc.shard(models.plain(), mesh=mesh, strategy=strategy)
    one_loss(model).backward()
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert isinstance(p, nn.Parameter)
        assert isinstance(p, DTensor)
        assert isinstance(p.grad, DTensor)
        assert p.placements == p.grad.placements == wanted
        assert (p.shape, p.stride(), p.dtype, p.requires_grad) == (q.shape, q.stride(), q.dtype, q.requires_grad)
        assert p.device_mesh == mesh
        assert torch.equal(p.full_tensor(), q), name
        rank, rows = mesh.get_local_rank(mesh.ndim - 1), p.shape[0] // mesh.size(mesh.ndim - 1)
        if strategy.name in ("full_shard", "hybrid_shard"):
            assert torch.equal(p.to_local(), q[rank * rows : (rank + 1) * rows])


@on_mesh((2, 2), HYBRID)
def test_without_a_mesh_all_ranks_shard_and_a_slice_uses_only_its_axes(mesh) -> None:
    model = acc.shard(models.plain())
    assert model.head.weight.device_mesh.size() == 4
    one_loss(model).backward()
    sliced = acc.shard(models.plain(), mesh=mesh["shard"])
    assert sliced.head.weight.device_mesh == mesh["shard"]
    assert sliced.head.weight.to_local().shape[0] == sliced.head.weight.shape[0] // 2
    one_loss(sliced).backward()
    assert_at_rest(sliced)


@on_world(1)
def test_units_are_found_or_given_by_class_size_or_callable(mesh) -> None:
    blocks = ["", "blocks.0", "blocks.1", "blocks.2"]
    assert unit_names(acc.shard(models.plain(), mesh=mesh, units=acc.only_blocks())) == blocks
    wide = models.Tiny(vocab=512)
    assert unit_names(acc.shard(wide, mesh=mesh)) == ["", "embed", *blocks[1:], "head"]
    assert unit_names(acc.shard(models.plain(), mesh=mesh, units={Block})) == blocks
    assert unit_names(acc.shard(models.plain(), mesh=mesh, units=["Block"])) == blocks
    assert unit_names(acc.shard(models.plain(), mesh=mesh, units=set())) == [""]
    by_name = acc.shard(models.plain(), mesh=mesh, units=lambda name, module: name.endswith(("0.up", "1")))
    assert unit_names(by_name) == ["", "blocks.0.up", "blocks.1"]
    nested = acc.shard(models.plain(), mesh=mesh, units={Block, nn.Linear})
    assert unit_names(nested)[:4] == ["", "blocks.0", "blocks.0.up", "blocks.0.down"]
    assert unit_names(nested)[-1] == "head"
    by_size = acc.shard(models.plain(), mesh=mesh, units=acc.min_params(2000))
    wanted = ["", "blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down", "blocks.2.up", "blocks.2.down"]
    assert unit_names(by_size) == wanted
    stages = models.plain()  # lists in a list, which nobody calls
    stages.blocks = nn.ModuleList(nn.ModuleList([block]) for block in stages.blocks)
    assert unit_names(acc.shard(stages, mesh=mesh, units=acc.only_blocks())) == [
        "",
        "blocks.0.0",
        "blocks.1.0",
        "blocks.2.0",
    ]
    named = models.plain()
    named._no_split_modules = ["LayerNorm"]
    assert unit_names(acc.shard(named, mesh=mesh, units=acc.only_blocks()))[1:] == [
        f"blocks.{i}.norm" for i in range(3)
    ] + ["norm"]
    with pytest.raises(acc.UsageError, match=r"names Blok.*did you mean 'Block'"):
        acc.shard(models.plain(), mesh=mesh, units=["Blok"])
    with pytest.raises(acc.UsageError, match="Conv2d"):
        acc.shard(models.plain(), mesh=mesh, units={nn.Conv2d})
    model = models.plain()
    for units in (model.blocks, nn.ModuleList(), list(model.blocks), model.head, 3):
        with pytest.raises(acc.UsageError, match=r"^units has an object of type \w+; pass classes"):
            acc.shard(model, mesh=mesh, units=units)


@on_world(1)
def test_misuse_is_said_by_name(mesh) -> None:
    model = acc.shard(models.plain(), mesh=mesh)
    with pytest.raises(acc.UsageError, match="sharded already"):
        acc.shard(model, mesh=mesh)
    with pytest.raises(acc.UsageError, match="sharded already"):
        acc.shard(nn.Sequential(model), mesh=mesh)
    with pytest.raises(acc.UsageError, match=r"hybrid_shard needs a mesh with the axes \('replicate', 'shard'\)"):
        acc.shard(models.plain(), mesh=mesh, strategy=acc.HYBRID_SHARD)
    with pytest.raises(acc.UsageError, match="'mean' or 'sum'"):
        acc.shard(models.plain(), mesh=mesh, reduce_op="average")
    with pytest.raises(acc.UsageError, match="did you mean 'selective'"):
        acc.shard(models.plain(), mesh=mesh, checkpoint_activations="selektive")
    with pytest.raises(acc.UsageError, match="no parameters"):
        acc.shard(nn.ReLU(), mesh=mesh)
    for name, given in {
        "strategy": 3,
        "precision": torch.bfloat16,
        "prefetch": 2,
        "offload": 2,
        "checkpoint_activations": True,
    }.items():
        with pytest.raises(acc.UsageError, match=f"^{name} is {given!r}.*; pass"):
            acc.shard(models.plain(), **{"mesh": mesh, name: given})
    for debug in (True, "ordr", ["order", "ordr"]):
        with pytest.raises(acc.UsageError, match=r"debug=(True|'ordr') is not known; .*valid: streams, order, finite"):
            acc.shard(models.plain(), mesh=mesh, debug=debug)
    with pytest.raises(acc.UsageError, match="whole number"):
        acc.min_params("1M")
    with pytest.raises(acc.UsageError, match=r"write clip_grad_norm_\(model, 1.0\)"):
        acc.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(acc.UsageError, match="this generator is not sharded"):
        acc.full_state_dict(model.parameters())
    for call in (acc.full_state_dict, lambda m: acc.clip_grad_norm_(m, 1.0), acc.describe):
        with pytest.raises(acc.UsageError, match="not sharded"):
            call(models.plain())
    for context in (acc.no_sync, acc.full_params):
        with pytest.raises(acc.UsageError, match="not sharded"), context(models.plain()):
            pass


# -- ranks that differ


@under_strategies("full_shard")
def test_parameters_and_buffers_that_differ_over_ranks_are_synchronised(mesh, strategy: acc.Strategy) -> None:
    synced = models.seeded(dist.get_rank())
    synced.register_buffer("scale", torch.tensor([float(dist.get_rank())], device=device()))
    for dtype in (torch.uint16, torch.complex64, torch.float8_e4m3fn):  # which gloo does not know
        synced.register_buffer(
            str(dtype)[6:], torch.full((2, 3), float(dist.get_rank() + 1), device=device()).to(dtype).t()
        )
    synced = acc.shard(synced, mesh=mesh, strategy=strategy, sync=True)
    assert_equal(params_of(synced), dict(models.seeded(0).named_parameters()))
    assert synced.scale.item() == 0.0
    assert all((b.to(torch.complex64) == 1).all() for name, b in synced.named_buffers() if name != "scale")
    one_loss(synced).backward()


# -- full parameters


@under_strategies("full_shard", "hybrid_shard_optim", num_ranks=3)
def test_full_params_reads_and_writes_and_forgets_changes_otherwise(mesh, strategy: acc.Strategy) -> None:
    for make in (models.uneven, models.tied):
        plain, model = make(), acc.shard(make(), mesh=mesh, strategy=strategy)
        tokens, _ = batch(plain)
        one_loss(model).backward()
        with acc.full_params(model):
            found = dict(model.named_parameters())
            assert all(type(p) is nn.Parameter for p in found.values())
            assert_equal(found, dict(plain.named_parameters()))
            assert torch.equal(model(tokens), plain(tokens))
            with torch.no_grad():
                model.embed.weight.zero_()
            if make is models.tied:
                assert model.head.weight is model.embed.weight
            with pytest.raises(acc.UsageError, match="open already"), acc.full_params(model):
                pass
        assert all(isinstance(p, DTensor) for p in model.parameters())
        assert_equal(params_of(model), dict(plain.named_parameters()))
        one_loss(model).backward()
        assert_at_rest(model)
        with torch.no_grad():
            model(tokens)  # full copies that outlive this must not be the old ones
            with acc.full_params(model, write=True):
                for p in model.parameters():
                    p.mul_(1.5)
            for p in plain.parameters():
                p.mul_(1.5)
        assert_equal(params_of(model), dict(plain.named_parameters()))
        assert one_loss(model).item() == one_loss(plain).item()


# -- the norm of gradients


@under_strategies("full_shard", "hybrid_shard_optim", num_ranks=3)
def test_clip_grad_norm_is_that_of_one_device_for_any_norm(mesh, strategy: acc.Strategy) -> None:
    plain, model = models.uneven(), acc.shard(models.uneven(), mesh=mesh, strategy=strategy)
    for norm_type, max_norms in {2: (0.05, 1e4), 1: (0.05,), 3.0: (0.05,), float("inf"): (0.05,)}.items():
        for max_norm in max_norms:
            one_loss(plain).backward()
            one_loss(model).backward()
            for p, grad in zip(plain.parameters(), mean_grads(mesh, plain).values(), strict=True):
                p.grad = grad
            wanted = nn.utils.clip_grad_norm_(plain.parameters(), max_norm, norm_type)
            found = acc.clip_grad_norm_(model, max_norm, norm_type)
            assert type(found) is Tensor
            assert found.dim() == 0
            assert found.dtype == torch.float32
            assert found.item() == pytest.approx(wanted.item(), rel=1e-5)
            assert_close(grads_of(model), {name: p.grad for name, p in plain.named_parameters()}, 1e-5)
            plain.zero_grad()
            model.zero_grad()
    assert acc.clip_grad_norm_(model, 1.0).item() == 0.0, "no gradients at all"


# -- state dicts


@under_strategies("hybrid_shard_optim", num_ranks=3)
def test_full_state_dict_is_that_of_the_unsharded_model(mesh, strategy: acc.Strategy) -> None:
    for make in (models.uneven, models.tied):
        plain, model = make(), make()
        for m in (plain, model):
            m.register_buffer("steps", torch.arange(3, device=device()))
        model = acc.shard(model, mesh=mesh, strategy=strategy)
        one_loss(model).backward()
        found = acc.full_state_dict(model)
        if dist.get_rank() == 0:
            assert all(type(t) is Tensor for t in found.values())
            assert_equal(found, plain.state_dict())
        else:
            assert found == {}
        assert_equal(acc.full_state_dict(model, rank0_only=False, cpu=False), plain.state_dict())
        with torch.no_grad():
            for t in acc.full_state_dict(model, rank0_only=False).values():
                t.zero_()
        assert_equal(params_of(model), dict(plain.named_parameters()))


@under_strategies("shard_optim", num_ranks=3)
def test_load_state_dict_takes_full_tensors(mesh, strategy: acc.Strategy) -> None:
    for options in ({"vocab": 19, "width": 10, "hidden": 7, "scalar": True}, {"tied": True}):
        old, new = models.seeded(0, **options), models.seeded(1, **options)
        model = acc.shard(old, mesh=mesh, strategy=strategy)
        with torch.no_grad():
            model(batch(new)[0])
        assert not any(model.load_state_dict(new.state_dict()))
        assert all(isinstance(p, DTensor) for p in model.parameters())
        assert_equal(params_of(model), dict(new.named_parameters()))
        assert one_loss(model).item() == one_loss(new).item()
        state = new.state_dict()
        state["blocks.0.up.weight"] = state["blocks.0.up.weight"][:-1]
        del state["norm.bias"]
        with pytest.raises(RuntimeError, match=r"(?s)norm\.bias.*size mismatch for blocks\.0\.up\.weight"):
            model.load_state_dict(state)


# -- the rest


@under_strategies("full_shard", "no_shard")
def test_describe_says_what_a_rank_holds(mesh, strategy: acc.Strategy) -> None:
    model = acc.shard(models.frozen(), mesh=mesh, strategy=strategy)
    report = acc.describe(model)
    params = list(model.parameters())
    assert report.total_params == sum(p.numel() for p in params)
    assert report.world == mesh.size()
    assert report.strategy == strategy.name
    held = sum(local_of(p).nbytes for p in params)
    trained_bytes = sum(local_of(p).nbytes for p in params if p.requires_grad)
    assert sum(unit.parameter_bytes for unit in report.units) == held
    assert sum(unit.gradient_bytes for unit in report.units) == trained_bytes
    assert sum(unit.optimizer_bytes for unit in report.units) == 2 * trained_bytes
    assert [unit.name for unit in report.units] == ["(root)", "blocks.0", "blocks.1", "blocks.2"]


@on_world(2)
def test_contexts_end_after_an_error_and_no_sync_nests(mesh) -> None:
    model = acc.shard(models.plain(), mesh=mesh)
    with pytest.raises(PlantedError), acc.full_params(model, write=True):
        raise PlantedError
    assert_at_rest(model)
    one_loss(model).backward()
    engine = engine_in(model)
    with contextlib.suppress(PlantedError), acc.no_sync(model):
        with acc.no_sync(model):
            assert not engine.sync
        assert not engine.sync
        raise PlantedError
    assert engine.sync


class Wrapping(nn.Module):
    """As adapters' wrappers, it asks another one for attributes that it does not have, and fails because there is none."""

    def __getattr__(self, name: str) -> object:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_"):
                raise
            raise IndexError(name) from None

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


@on_world(1)
def test_modules_are_asked_for_nothing_that_they_do_not_have(mesh) -> None:
    model = Wrapping()
    model.inner = nn.Linear(4, 4)
    acc.shard(model.to(device()), mesh=mesh)
    model(torch.ones(2, 4, device=device())).sum().backward()
