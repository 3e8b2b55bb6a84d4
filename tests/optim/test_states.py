"""An optimizer's state dict of one rank's rows is refused on other ranks before anything changes."""

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
from tests.support.row_states import InBlocks


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
    return str(caught.value)


def test_states_of_another_rank_are_refused_on_all_ranks(world, tmp_path):
    said = world.run(2, one_rank_for_all, tmp_path)
    assert said[0] == said[1]
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
