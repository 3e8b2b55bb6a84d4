"""A file that `torch.save` wrote on one rank of a sharded model is refused on all ranks if another rank loads it."""

import copy
import io

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import accordion as acc
from accordion.compat.fsdp2 import fully_shard
from accordion.row_marks import MADE
from tests.support import models
from tests.support.checks import assert_equal, full, go_on
from tests.support.ranked import on_num_ranks, on_world
from tests.support.sample import sampled

REFUSED = r"rank 1 was given .* of another rank, .*acc\.full_state_dict.*acc\.save"


def written(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def of_first_rank(mesh, value):
    data = [written(value)]
    dist.broadcast_object_list(data, group=mesh.get_group(), group_src=0)
    return data[0]


def read(data, weights_only=True):
    return torch.load(io.BytesIO(data), weights_only=weights_only)


def built(mesh, seed=0, **options):
    model = acc.shard(models.seeded(seed), mesh=mesh, **options)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


@pytest.mark.parametrize("weights_only", sampled([True, False], bool))
@on_world(2)
def test_rows_of_another_rank_are_refused_on_all_ranks(mesh, weights_only):
    model, optimizer = built(mesh)
    go_on(model, optimizer, range(2))
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "list": list(model.parameters())}
    data = of_first_rank(mesh, state)

    other, its = built(mesh, seed=3)
    before = full(other)
    with pytest.raises(acc.UsageError, match=REFUSED):
        other.load_state_dict(read(data, weights_only)["model"])
    name, part = next((name, child) for name, child in other.named_children() if list(child.parameters()))
    states = read(data, weights_only)["model"]
    with pytest.raises(acc.UsageError, match=REFUSED):
        part.load_state_dict({key[len(name) + 1 :]: t for key, t in states.items() if key.startswith(name + ".")})
    other_rows = read(data, weights_only)["list"][0]
    with pytest.raises(acc.UsageError, match=REFUSED), torch.no_grad():
        next(other.parameters()).copy_(other_rows)
    assert_equal(full(other), before)

    with pytest.raises(acc.UsageError, match=REFUSED):
        optimizer.load_state_dict(read(data, weights_only)["optimizer"])
    with pytest.raises(acc.UsageError, match=REFUSED):
        acc.wrap_optimizer(built(mesh)[1]).load_state_dict(read(data, weights_only)["optimizer"])
    its.load_state_dict(read(data, weights_only)["optimizer"])  # nobody asks before its first step
    with pytest.raises(acc.UsageError, match=REFUSED):
        go_on(other, its, range(1))
    assert_equal(full(other), before)


@pytest.mark.parametrize("num_ranks", [1, 3])
@on_num_ranks
def test_rank_resumes_from_its_own_file(mesh):
    model, optimizer = built(mesh)
    go_on(model, optimizer, range(2))
    other, its = built(mesh, seed=3)
    other.load_state_dict(read(written(model.state_dict())))
    its.load_state_dict(read(written(optimizer.state_dict())))
    go_on(model, optimizer, range(2, 4))
    go_on(other, its, range(2, 4))
    assert_equal(full(other), full(model))


@on_world(2)
def test_fsdp2_models_refuse_rows_of_another_rank(mesh):
    model, other = (fully_shard(models.seeded(seed), mesh=mesh) for seed in (0, 3))
    with pytest.raises(acc.UsageError, match=REFUSED):
        other.load_state_dict(read(of_first_rank(mesh, model.state_dict())))
    other.load_state_dict(read(written(model.state_dict())))


@on_world(2)
def test_rows_of_this_process_load_without_communication(mesh):
    """They may be on an equal mesh, which DTensor may give the result of an operator."""
    equal = copy.copy(mesh)
    vars(equal).pop(MADE, None)
    model = acc.shard(models.plain(), mesh=mesh)
    own_rows = {
        name: DTensor.from_local(
            tensor.to_local().clone(), equal, tensor.placements, shape=tensor.shape, stride=tensor.stride()
        )
        for name, tensor in model.state_dict().items()
    }
    assert all(tensor.device_mesh is equal for tensor in own_rows.values())
    if mesh.get_rank() == 1:
        model.load_state_dict(own_rows)
        with torch.no_grad():
            for name, param in model.named_parameters():
                param.copy_(own_rows[name])
    dist.barrier(mesh.get_group())
