"""States of optimizers that are neither rows of their rank nor equal on all ranks: refused by saves, loads and other ranks."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import accordion as acc
from tests.checkpoint.test_torch_save import read, written
from tests.support import models
from tests.support.checks import assert_equal, everyone, full, go_on, one_loss
from tests.support.ranked import on_world
from tests.support.reference import local_of
from tests.support.row_states import InBlocks, Packed
from tests.support.sample import sampled


def built(mesh, seed=0, make=torch.optim.AdamW, **options):
    model = acc.shard(models.seeded(seed), mesh=mesh, **options)
    return model, acc.wrap_optimizer(make(model.parameters(), lr=1e-2), elementwise=True)


def trained(mesh, steps=2, **options):
    model, optimizer = built(mesh, **options)
    go_on(model, optimizer, range(steps))
    return model, optimizer


def values(optimizer):
    """Return (key, value, copy of the value) of each state."""
    return [
        (key, value, local_of(value).clone() if isinstance(value, torch.Tensor) else value)
        for group in optimizer.param_groups
        for p in group["params"]
        for key, value in optimizer.state[p].items()
    ]


def assert_states(optimizer, before):
    """Check that the states of `optimizer` equal those in `before`, a result of `values`."""
    for (key, _, value), (key_then, _, value_then) in zip(values(optimizer), before, strict=True):
        assert key == key_then
        assert torch.equal(value, value_then) if isinstance(value, torch.Tensor) else value == value_then


def assert_untouched(optimizer, before):
    assert_states(optimizer, before)
    assert all(state is then for (_, state, _), (_, then, _) in zip(values(optimizer), before, strict=True))


def one_rank_for_all(mesh, path):
    model, optimizer = trained(mesh)
    before, weights = values(optimizer), full(model)
    for theirs in everyone(mesh, written(optimizer.state_dict())):
        for state in (read(theirs), copy.deepcopy(read(theirs))):
            with pytest.raises(acc.UsageError, match=r"states of another rank.*other rows.*acc\.save") as caught:
                optimizer.load_state_dict(state)
            assert_untouched(optimizer, before)
            assert str(caught.value).startswith("rank ")
    assert_equal(full(model), weights)
    (path / f"{dist.get_rank()}").write_bytes(written((model.state_dict(), optimizer.state_dict())))
    assert len(set(everyone(mesh, str(caught.value)))) == 1


def test_states_of_another_rank_are_refused_on_all_ranks(world, tmp_path):
    world.run(2, one_rank_for_all, tmp_path)
    world.run(3, of_another_world, tmp_path, {})
    world.run(2, of_another_world, tmp_path, {"strategy": acc.NO_SHARD})


def of_another_world(mesh, path, options):
    """Load weights and states of another number of ranks and other shards."""
    model, optimizer = trained(mesh, **options)
    before, weights = values(optimizer), full(model)
    rows, states = read((path / f"{dist.get_rank() % 2}").read_bytes())
    if not options:  # an unsharded model takes rows of the same ranks, from which DTensor makes the whole
        with pytest.raises(acc.UsageError, match="of another rank"):
            model.load_state_dict(rows)
    with pytest.raises(acc.UsageError, match="states of another rank"):
        optimizer.load_state_dict(states)
    assert_untouched(optimizer, before)
    assert_equal(full(model), weights)


@on_world(2)
def test_states_of_the_same_rank_are_loaded(mesh):
    """Check that a rank resumes from its own states bit for bit, however they were stored."""
    for make in (torch.optim.AdamW, InBlocks):
        for way in (copy.deepcopy, lambda state: read(written(state))):
            model, optimizer = trained(mesh, make=make)
            before = values(optimizer)
            state = way(optimizer.state_dict())
            assert set(state) == {"state", "param_groups"}
            other, its = built(mesh, seed=3, make=make)
            its.load_state_dict(state)
            assert_states(its, before)
            go_on(other, its, range(1))
    model, optimizer = trained(mesh)
    optimizer.load_state_dict(optimizer.state_dict())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(one_loss(model)).backward()
    scaler.step(optimizer)
    scaler.update()
    schedule.step()
    optimizer.load_state_dict(read(written(optimizer.state_dict())))


def replicas(mesh):
    """Load weights and states of other ranks with the same rows: of unsharded models, and of replicas."""
    strategy = acc.NO_SHARD if mesh.ndim == 1 else acc.HYBRID_SHARD
    model, optimizer = trained(mesh, strategy=strategy)
    before = values(optimizer)
    saved = everyone(mesh, written((model.state_dict(), optimizer.state_dict())))
    weights, states = read(saved[(dist.get_rank() + mesh.ndim) % 4])
    optimizer.load_state_dict(states)
    assert_states(optimizer, before)
    other, _ = built(mesh, seed=3, strategy=strategy)
    other.load_state_dict(weights)
    assert_equal(full(other), full(model))


def test_replicas_load_states_of_each_other(world):
    world.run(4, replicas)
    world.run_mesh((2, 2), ("replicate", "shard"), replicas)


@on_world(2)
def test_state_dicts_without_names_pass_through_dcp(mesh, tmp_path):
    """Use torch's DCP, which reshards by itself, with an optimizer's own state dict."""
    model, optimizer = trained(mesh)
    group = mesh.get_group()
    dcp.save(optimizer.state_dict(), checkpoint_id=tmp_path / "dcp", process_group=group)
    other, its = trained(mesh, seed=4, steps=3)
    state = its.state_dict()
    dcp.load(state, checkpoint_id=tmp_path / "dcp", process_group=group)
    its.load_state_dict(state)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(local_of(optimizer.state[p]["exp_avg"]), local_of(its.state[q]["exp_avg"]))


# -- what a save refuses


@pytest.mark.parametrize(
    ("make", "key"),
    sampled([(InBlocks, "absmax"), (Packed, "packed")], lambda make, _: make is InBlocks),
)
@on_world(2)
def test_states_of_another_shape_are_refused_before_anything_is_written(mesh, tmp_path, make, key):
    model, optimizer = trained(mesh, make=make)
    before = full(model)
    message = rf"states.*'{key}' of .*neither shaped.*nor equal on all ranks"
    for background in (False, True):
        with pytest.raises(acc.CheckpointError, match=message) as caught:
            acc.save(tmp_path / "new" / "ckpt", model, optimizer, background=background)
        assert str(caught.value).count(". ") == 0
        dist.barrier(mesh.get_group())
        assert not (tmp_path / "new").exists()
    assert_equal(full(model), before)
    acc.save(tmp_path / "weights", model)  # and all is at rest
    assert len(set(everyone(mesh, str(caught.value)))) == 1


@on_world(1)
def test_states_of_rows_are_refused_on_one_rank_too(mesh, tmp_path):
    """They are equal on all ranks, but wrong for any other number of ranks."""
    with pytest.raises(acc.CheckpointError, match=r"'absmax' of .*neither shaped"):
        acc.save(tmp_path / "c", *trained(mesh, make=InBlocks))


@on_world(2)
def test_an_optimizer_in_state_resumes_bit_for_bit(mesh, tmp_path):
    model, optimizer = trained(mesh, 3, make=InBlocks)
    acc.save(tmp_path / "c", model, state={"optimizer": optimizer}, extra=3)
    go_on(model, optimizer, range(3, 6))
    other, its = trained(mesh, 1, make=InBlocks, seed=5)
    assert acc.load(tmp_path / "c", other, state={"optimizer": its}) == 3
    go_on(other, its, range(3, 6))
    assert_equal(full(other), full(model))


@on_world(2)
def test_values_that_differ_are_refused(mesh, tmp_path):
    """Check that floats, ints, 0-d tensors and keys are compared over ranks."""
    rank = dist.get_rank()
    model, optimizer = trained(mesh, 1)
    state = optimizer.state[model.head.weight]
    for value in (0.5 * rank, rank, torch.tensor(0.5 * rank)):
        state["own"] = value
        with pytest.raises(acc.CheckpointError, match=r"'own' of head.weight"):
            acc.save(tmp_path / "c", model, optimizer)
    del state["own"]
    for only in (0, 1):
        if rank == only:
            state["mine"] = 3
        with pytest.raises(acc.CheckpointError, match=r"'mine' of head.weight"):
            acc.save(tmp_path / "c", model, optimizer)
        state.pop("mine", None)
    acc.save(tmp_path / "c", model, optimizer)


@on_world(2)
def test_differences_between_optimizers_are_named(mesh, tmp_path):
    path = tmp_path / "ckpt"
    rank = dist.get_rank()
    model = acc.shard(models.seeded(0), mesh=mesh)
    one_loss(model).backward()

    def says(words, optimizer):
        with pytest.raises(acc.CheckpointError, match=words):
            acc.save(path, model, optimizer)

    kinds = [torch.optim.AdamW(model.parameters()), torch.optim.SGD(model.parameters(), lr=0.1)]
    for optimizer in kinds:
        acc.wrap_optimizer(optimizer).step()
    says("rank 0.*AdamW.*rank 1.*SGD", kinds[rank])
    for which in (0, 1):
        words = ("no optimizer", "AdamW")
        says(f"rank 0 has {words[which == 0]} and rank 1 has {words[which == 1]}", kinds[0] if rank == which else None)
    says(
        "rank 0.*0.1.*rank 1.*0.2",
        acc.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=(0.1, 0.2)[rank])),
    )
    some = list(model.parameters())[rank:]
    says("group/0/params rank 0 has 22 .* rank 1 has 21", acc.wrap_optimizer(torch.optim.SGD(some, lr=0.1)))
    assert not path.exists()
    acc.save(path, model, kinds[0])
    for which in (0, 1):
        with pytest.raises(acc.CheckpointError, match=r"rank 0 has .* and rank 1 has .*optimizer"):
            acc.load(path, model, kinds[0] if rank == which else None)


class Halves(torch.Tensor):
    """A tensor subclass, as in libraries of low-bit optimizers."""


@on_world(2)
def test_a_tensor_subclass_among_states_is_refused_by_name(mesh, tmp_path):
    path = tmp_path / "ckpt"
    model = acc.shard(models.seeded(0), mesh=mesh)
    optimizer = acc.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    go_on(model, optimizer, range(1))
    own = model.head.weight.to_local().detach()
    optimizer.state[model.head.weight]["low"] = own.clone().as_subclass(Halves)
    with pytest.raises(acc.CheckpointError, match=r"low of head.weight|head.weight/low.*Halves"):
        acc.save(path, model, optimizer)
    assert not path.exists()
