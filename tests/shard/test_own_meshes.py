"""`shard(meshes=)`: parameters on some of the ranks, experts under data parallelism over all."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import accordion as acc
from tests.devices import device, here
from tests.inside import unit_in
from tests.support import experts
from tests.support.checks import assert_as_exact, assert_close, assert_equal, step_all
from tests.support.meters import Wire
from tests.support.ranked import on_mesh
from tests.support.sample import sampled

RANKS = 4
GUIDE = Path(__file__).parents[2] / "docs/guide.md"


def sharded(mesh: Any, dtype: torch.dtype = torch.float32, meshes: Any = None, **options: Any) -> nn.Module:
    """Experts over the axis "ep", each sharded over "edp"; everything else over all ranks."""
    everybody = mesh["edp", "ep"]._flatten("dp")
    own = {experts.Experts: mesh["edp"]} if meshes is None else meshes
    return acc.shard(experts.spread(mesh, dtype), everybody, meshes=own, **options)


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
    model, reduce_op = sharded(mesh, torch.float64, **CASES[case]), CASES[case].get("reduce_op", "mean")
    assert_trains_as_unsharded(model, reduce_op, gathers=case != "on the host")


def assert_trains_as_unsharded(
    model: Any, reduce_op: str = "mean", *, gathers: bool = True, expert_scale: float = 1.0
) -> None:
    """Train three clipped steps in float64, where only the order of sums differs; compare losses, gradients, norms and weights.

    `gathers`: compare gradients too; DTensor's collectives cannot gather them from the host if ranks have accelerators.
    `expert_scale`: factor of the gradients of experts.
    """
    plain = experts.seeded().double()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.3) for m in (model, plain)]
    acc.wrap_optimizer(optimizers[0])
    for step in range(3):
        wanted_losses, wanted = unsharded(step, plain, reduce_op)
        for name, p in plain.named_parameters():
            if ".experts." in name:
                p.grad.mul_(expert_scale)
                wanted[name].mul_(expert_scale)
        loss = model.loss(experts.tokens(step, dist.get_rank()))
        assert loss.item() == pytest.approx(wanted_losses[dist.get_rank()], rel=1e-12)
        loss.backward()
        acc.synchronize(model)
        norm = torch.linalg.vector_norm(torch.cat([g.flatten() for g in wanted.values()]))
        if gathers:
            assert_as_exact({n: p.grad.full_tensor() for n, p in model.named_parameters()}, wanted)
        found = acc.clip_grad_norm_(model, 0.5)
        assert torch.allclose(found.double(), norm, rtol=1e-6)  # a norm is float32, and so is what it scales by
        for p in plain.parameters():
            p.grad.mul_(torch.clamp(0.5 / (found + 1e-6), max=1.0))
        step_all(optimizers)
    acc.synchronize(model)
    whole = {n: p.detach() for n, p in plain.named_parameters()}
    assert_as_exact(acc.full_state_dict(model, rank0_only=False, cpu=False), whole)
    assert bool(acc.full_state_dict(model)) == (dist.get_rank() == 0)


def assert_gradients_of_unsharded(model: Any) -> None:
    """Compare this rank's loss and all gradients of one step in float32."""
    losses, wanted = unsharded(0, experts.seeded())
    loss = model.loss(experts.tokens(0, dist.get_rank()))
    assert loss.item() == pytest.approx(losses[dist.get_rank()], rel=1e-5)
    loss.backward()
    assert_close({n: p.grad.full_tensor() for n, p in model.named_parameters()}, wanted, 1e-6)


TRAINED = [((2, 2), case) for case in CASES] + [((1, 4), "experts are units"), ((4, 1), "experts are units")]
USUAL = (((2, 2), "optimizer alone"), ((2, 2), "on the host"), ((1, 4), "experts are units"))


@pytest.mark.parametrize(("shape", "case"), sampled(TRAINED, lambda *row: row in USUAL))
def test_experts_train_as_the_unsharded_model(world: Any, shape: tuple[int, int], case: str) -> None:
    """Whatever the size of its mesh, a gradient is divided by all ranks."""
    world.run_mesh(shape, ("edp", "ep"), trains_alike, case)


@on_mesh((2, 2), ("edp", "ep"))
def test_experts_communicate_with_their_own_ranks_only(mesh: Any) -> None:
    """Experts are gathered and reduced over their own ranks only, messages name these, and bytes are those of their rows."""
    model = sharded(mesh, units={experts.Mixture, experts.Experts})
    for step in range(2):
        with Wire() as wire:
            model.loss(experts.tokens(step, dist.get_rank())).backward()
    same = [mesh.get_local_rank("ep"), mesh.get_local_rank("ep") + 2]
    numel = 2 * experts.EXPERTS // 2 * experts.WIDTH * experts.HIDDEN  # of a block's experts on these ranks
    for kind in ("gather", "reduce"):
        numels = [sum(call.numels) for call in wire.of(kind) if call.group == "2"]
        found = [n for n in numels if n >= numel]  # the others are the all-to-alls of tokens
        assert len(found) >= 2
        assert max(found) <= numel + 16
    unit = unit_in(model.blocks[0].experts)
    assert unit.groups[0].context.shard.gather.ranks == same
    assert unit.groups[0].place.endswith(f"(blocks.0.experts) of ranks {same}")
    assert "of ranks" not in unit_in(model.blocks[0]).groups[0].place
    report = {each.name: each for each in acc.describe(model).units}["blocks.0.experts"]
    assert report.num_params == 2 * numel  # in whole
    assert report.parameter_bytes == numel // 2 * 4
    assert acc.describe(model).total_params == sum(p.numel() for p in experts.seeded().parameters())


@on_mesh((2, 2), ("edp", "ep"))
def test_a_mesh_is_named_by_class_or_pattern(mesh: Any) -> None:
    """Patterns of modules or of parameters mean the same; of several that name one the last holds."""
    own = mesh["edp"]
    for meshes in ({"blocks.*.experts": own}, {"*.up": own, "*.down": own}, {"blocks.0": own, "*.experts": own}):
        if "blocks.0" in meshes:
            with pytest.raises(acc.UsageError, match=r"router.*is a plain tensor on the mesh .* ranks are unknown"):
                sharded(mesh, meshes=meshes)
            continue
        model = sharded(mesh, meshes=meshes)
        assert model.blocks[1].experts.up.device_mesh.mesh_dim_names == ("edp", "ep")
    model = acc.shard(
        experts.seeded(), mesh["edp", "ep"]._flatten("dp"), meshes={"embed": mesh, "head": mesh["edp", "ep"]}
    )
    assert model.embed.weight.placements == (Replicate(), Shard(0))
    assert model.blocks[0].router.weight.placements == (Shard(0),)
    assert_gradients_of_unsharded(model)


@on_mesh((2, 2), ("replicate", "shard"))
def test_beside_a_hybrid(mesh: Any) -> None:
    """Two replicas of two shards, experts over the shards and cut over the replicas; and with secondary shards."""
    spread = experts.spread(mesh, axis="shard")
    model = acc.shard(spread, mesh, strategy=acc.HYBRID_SHARD, meshes={experts.Experts: mesh["replicate"]})
    assert_gradients_of_unsharded(model)


@on_mesh((2, 2), ("edp", "ep"))
def test_beside_secondary_shards(mesh: Any) -> None:
    """Two ranks keep one copy of what lies over four; experts lie over two, and are gathered again."""
    model = sharded(mesh, secondary=2)
    assert_gradients_of_unsharded(model)
    kinds = {bool(g.context.where): g.secondary_bytes > 0 for g in unit_in(model.blocks[0]).groups}
    assert kinds == {True: False, False: True}


def written(mesh: Any, folder: str) -> dict[str, Tensor]:
    model = sharded(mesh)
    optimizer = acc.wrap_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    for step in range(2):
        model.loss(experts.tokens(step, dist.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()
    acc.save(folder, model, optimizer)
    whole = acc.full_state_dict(model, rank0_only=False)

    again = sharded(mesh)
    again.load_state_dict(whole)
    assert all(
        torch.equal(a.full_tensor(), b.full_tensor())
        for a, b in zip(again.parameters(), model.parameters(), strict=True)
    )
    with acc.full_params(model, write=True):
        for p in model.parameters():
            p.data.mul_(2)
    halved = acc.full_state_dict(model, rank0_only=False)
    assert all(torch.equal(halved[name], 2 * whole[name]) for name in whole)
    return whole


def read(mesh: Any, folder: str) -> dict[str, Tensor]:
    model = acc.shard(experts.seeded(), mesh)
    optimizer = acc.wrap_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    acc.load(folder, model, optimizer)
    assert all(state["exp_avg"].full_tensor().abs().sum() > 0 for state in optimizer.state.values())
    return acc.full_state_dict(model)


def on_meta(mesh: Any) -> nn.Module:
    with torch.device("meta"):
        model = experts.Model()
    everybody = mesh["edp", "ep"]._flatten("dp")
    return acc.shard(experts.parallelized(model, mesh["ep"]), everybody, meshes={experts.Experts: mesh["edp"]})


def read_back(mesh: Any, folder: str) -> dict[str, Tensor]:
    """On meta, and other ranks have the experts."""
    model = on_meta(mesh)
    acc.load(folder, model)
    return acc.full_state_dict(model)


def test_a_checkpoint_says_the_whole(world: Any, tmp_path: Path) -> None:
    """It is read where no expert is anywhere special, on another number of ranks, and by other ranks."""
    folder = str(tmp_path / "c")
    wanted = world.run_mesh((2, 2), ("edp", "ep"), written, folder)[0]
    for found in (world.run(3, read, folder)[0], world.run_mesh((1, 4), ("edp", "ep"), read_back, folder)[0]):
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def from_meta(mesh: Any, folder: str) -> None:
    """Drawn as one device draws them, and read from a folder of the whole, also over what is there."""
    torch.manual_seed(5)
    wanted = here(experts.Model())
    torch.manual_seed(6)
    wanted.apply(lambda m: m.reset_parameters() if hasattr(m, "reset_parameters") else None)
    model = on_meta(mesh)
    torch.manual_seed(6)
    acc.initialise(model)
    assert_equal(acc.full_state_dict(model, rank0_only=False), dict(wanted.state_dict()))
    model.loss(experts.tokens(0, dist.get_rank())).backward()
    for started in (model, on_meta(mesh)):
        acc.load_pretrained(started, folder)
        assert_equal(acc.full_state_dict(started, rank0_only=False), dict(experts.seeded().state_dict()))
    with pytest.raises(
        acc.CheckpointError, match=r"1 that do not fit: blocks\.0\.experts\.up is float32 \(2, 16, 24\)"
    ):
        acc.load_pretrained(model, f"{folder}/part")
    left = on_meta(mesh)
    acc.load_pretrained(left, f"{folder}/part", ignore=["*.experts.*"])
    assert all(t.count_nonzero() > 0 for t in acc.full_state_dict(left, rank0_only=False).values())


def test_a_model_on_meta_is_initialised_and_loaded(world: Any, tmp_path: Path) -> None:
    whole = {name: t.cpu() for name, t in experts.seeded().state_dict().items()}
    part = {n: t[:2].clone() if n == "blocks.0.experts.up" else t for n, t in whole.items()}
    for folder, tensors in ((tmp_path, whole), (tmp_path / "part", part)):
        folder.mkdir(exist_ok=True)
        save_file(tensors, folder / "model.safetensors")
    world.run_mesh((2, 2), ("edp", "ep"), from_meta, str(tmp_path))


@on_mesh((2, 2), ("edp", "ep"))
def test_the_example_of_the_guide_runs(mesh: Any) -> None:
    """On two ranks for each axis."""
    code = GUIDE.read_text().partition("## Experts on some of the ranks")[2].split("```")[1]
    assert code.startswith('python\nmesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("edp", "ep"))')
    model = experts.seeded()
    names = {"acc": acc, "nn": nn, "distribute_tensor": distribute_tensor, "Shard": Shard, "Experts": experts.Experts}
    given = {"init_device_mesh": lambda *asked, **named: mesh, "model": model, **names}
    exec(code.removeprefix("python"), given)
    for block in model.blocks:
        block.group = mesh["ep"].get_group()
    assert model.blocks[0].experts.up.device_mesh.mesh_dim_names == ("edp", "ep")
    assert_gradients_of_unsharded(model)


@on_mesh((2, 2), ("edp", "ep"))
def test_what_it_cannot_be_is_one_sentence_on_every_rank(mesh: Any) -> None:
    everybody, own = mesh["edp", "ep"]._flatten("dp"), mesh["edp"]
    other = DeviceMesh(device().type, [[0, 2], [1, 3]], mesh_dim_names=("a", "b"))
    wrong: list[tuple[Any, dict[str, Any], str]] = [
        ({"*.expert": own}, {}, r"names '\*.expert', but the model has no such parameter"),
        ({experts.Experts: own}, {"sync": True}, "with sync=True"),
        ({experts.Experts: mesh}, {"strategy": acc.NO_SHARD}, "no_shard takes a slice of .*, of one axis"),
        ({}, {}, "is a DTensor already; .* in meshes="),
        ({"*.up": own}, {}, r"experts.down' is a DTensor already"),
        ({experts.Experts: mesh["ep"]}, {}, "must name another slice, which completes"),
        ({experts.Experts: other["b"]}, {}, "must name another slice, which completes"),
        ({experts.Experts: own, "*.router": own}, {}, "router.weight' is a plain tensor on the mesh"),
    ]
    for meshes, options, words in wrong:
        model = experts.spread(mesh)
        with pytest.raises(acc.UsageError, match=words):
            acc.shard(model, everybody, meshes=meshes, **options)
        assert all(not hasattr(p, "moved_to") for p in model.parameters()), "nothing was changed"
    square = {"strategy": acc.HYBRID_SHARD_OPTIM, "meshes": {experts.Experts: own}}
    with pytest.raises(acc.UsageError, match="which cuts rows twice"):
        acc.shard(experts.spread(mesh), mesh, **square)
    model = experts.seeded()
    for name, p in list(model.blocks[0].experts.named_parameters()):
        setattr(model.blocks[0].experts, name, nn.Parameter(distribute_tensor(p.detach(), mesh["ep"], [Replicate()])))
    with pytest.raises(acc.UsageError, match=r"must be Shard\(dim\) on every axis"):
        acc.shard(model, everybody, meshes={"blocks.0.experts": own})
    model = experts.spread(mesh)
    with pytest.raises(acc.UsageError, match="takes a slice of the model's mesh that includes this rank"):
        acc.shard(model, own, meshes={experts.Experts: mesh["edp", "ep"]._flatten("dp")})


@on_mesh((2, 2), ("edp", "ep"))
def test_ranks_that_part_hear_of_it(mesh: Any) -> None:
    """One rank asks for something else, or holds other values than the ranks that share its experts: all hear of it."""
    everybody, own, rank = mesh["edp", "ep"]._flatten("dp"), mesh["edp"], dist.get_rank()
    model = experts.spread(mesh)
    kind, words = acc.DivergenceError, "rank 3 has a refusal: meshes names '*.expert', but the"
    if rank == 3:
        kind, words = acc.UsageError, "meshes names '*.expert', but the model has no such parameter"
    with pytest.raises(kind, match=re.escape(words)), Wire() as wire:
        acc.shard(model, everybody, meshes={"*.expert" if rank == 3 else "*.experts": own})
    assert not wire.of("all_reduce"), "ranks hear of it where they compare their models"
    with pytest.raises(acc.DivergenceError, match=r"mesh of parameter 'head.weight'"):
        acc.shard(model, everybody, meshes={"*.experts": own} | ({"head": mesh} if rank == 2 else {}))
    if rank == 3:
        with torch.no_grad():
            model.blocks[1].experts.down.to_local().add_(1)
    with pytest.raises(
        acc.DivergenceError, match=r"own mesh: 'blocks.1.experts.down'; use the same seed on these ranks"
    ):
        acc.shard(model, everybody, meshes={"*.experts": own})
    assert all(type(p) is nn.Parameter for p in model.head.parameters())
    assert all(isinstance(p, DTensor) for p in model.blocks[0].experts.parameters())
