"""The pool of rank processes itself: results, failures, hangs, and that the next test never notices."""

import os
import time
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor, empty

from tests.devices import device


def ranks_sum(mesh, value):
    total = torch.tensor([float(value + mesh.get_rank())], device=device())
    dist.all_reduce(total, group=mesh.get_group())
    return mesh.get_rank(), mesh.size(), total.item()


def coordinates(mesh):
    return mesh.mesh_dim_names, tuple(mesh.get_coordinate())


def raise_on(mesh, failing):
    if mesh.get_rank() in failing:
        raise ValueError("this one is meant")
    return mesh.get_rank()


def hang_on(mesh, hanging):
    if mesh.get_rank() == hanging:
        time.sleep(60)
    dist.barrier(group=mesh.get_group())


def die_on(mesh, dying):
    if mesh.get_rank() == dying:
        os._exit(3)
    dist.barrier(group=mesh.get_group())


def warn(mesh):
    warnings.warn("careless", stacklevel=1)


def process_and_draw(mesh):
    return os.getpid(), torch.rand(1, device=device()).item()


def rows_held(mesh, rows):
    return distribute_tensor(torch.arange(float(rows), device=device()), mesh, [Shard(0)]).to_local()


def rows_without_data(mesh, rows):
    return mesh.size(), tuple(empty(rows, 2, device_mesh=mesh, placements=[Shard(mesh.ndim - 1)]).to_local().shape)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_results_come_in_rank_order(world, num_ranks):
    total = sum(range(num_ranks)) + 5.0 * num_ranks
    assert world.run(num_ranks, ranks_sum, 5) == [(rank, num_ranks, total) for rank in range(num_ranks)]


def test_tensors_come_back(world):
    assert torch.cat(world.run(3, rows_held, 7)).tolist() == list(range(7))


def test_two_axes(world):
    names = ("replicate", "shard")
    answers = world.run_mesh((2, 2), names, coordinates)
    assert answers == [(names, place) for place in ((0, 0), (0, 1), (1, 0), (1, 1))]


def test_ranks_persist_and_are_seeded(world):
    assert world.run(4, process_and_draw) == world.run(4, process_and_draw)


@pytest.mark.parametrize("failing", [[1], [0, 1, 2]])
def test_exception_surfaces_once_for_all_ranks_alike(world, failing):
    with pytest.raises(AssertionError, match="ValueError: this one is meant") as caught:
        world.run(3, raise_on, failing)
    text = str(caught.value)
    assert text.count("this one is meant") == 2  # the message and the line of source above it
    assert text.startswith("rank " + ", ".join(map(str, failing)) + ":")
    assert world.run(3, raise_on, []) == [0, 1, 2]


def flatten(mesh):
    return mesh._flatten("all").size()


def test_groups_are_made_by_all_ranks_or_named(world):
    """Else the test that makes the next one would hang, and would be blamed for it."""
    names = ("replicate", "shard")
    with pytest.raises(AssertionError, match="2 of 4 ranks made a process group"):
        world.run_mesh((2, 1), names, flatten)
    assert world.run_mesh((2, 2), names, flatten) == [4] * 4


def test_rank_that_hangs_is_named_with_its_stack(world):
    start = time.monotonic()
    with pytest.raises(AssertionError, match=r"(?s)rank 1: no answer after 1\.\d s.* in hang_on"):
        world.run(2, hang_on, 1, timeout_s=1)
    assert world.run(2, ranks_sum, 0) == [(0, 2, 1.0), (1, 2, 1.0)]
    assert time.monotonic() - start < 30


def test_rank_that_dies_is_named(world):
    with pytest.raises(AssertionError, match="rank 1: the process ended with exit code 3"):
        world.run(2, die_on, 1)
    assert world.run(2, hang_on, None) == [None, None]


def test_warnings_are_errors_unless_the_test_says_otherwise(world):
    with pytest.raises(AssertionError, match="UserWarning: careless"):
        world.run(1, warn)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert world.run(1, warn) == [None]


@pytest.mark.parametrize("num_ranks", [8, 64, 1024])
def test_fake_world(run_fake, num_ranks):
    assert run_fake(num_ranks, 3, rows_without_data, 4 * num_ranks) == (num_ranks, (4, 2))


def test_fake_world_of_two_axes(run_fake):
    assert run_fake((4, 16), 63, coordinates) == (("replicate", "shard"), (3, 15))


@pytest.mark.accelerator
def test_device_world(device_world):
    assert device_world.run(1, ranks_sum, 5) == [(0, 1, 5.0)]
