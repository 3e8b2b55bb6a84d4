"""The pool of rank processes itself: failures and hangs, which no other test has, and that the next test never notices."""

import os
import time
import warnings

import pytest
import torch
import torch.distributed as dist

from tests.devices import device


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


@pytest.mark.parametrize("failing", [[1], [0, 1, 2]])
def test_exception_surfaces_once_for_all_ranks_alike(world, failing):
    with pytest.raises(AssertionError, match="ValueError: this one is meant") as caught:
        world.run(3, raise_on, failing)
    text = str(caught.value)
    assert text.count("this one is meant") == 2  # the message and the line of source above it
    assert text.startswith("rank " + ", ".join(map(str, failing)) + ":")
    assert world.run(3, raise_on, []) == [0, 1, 2]


def test_ranks_persist_and_are_seeded(world):
    assert world.run(4, process_and_draw) == world.run(4, process_and_draw)


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
    assert world.run(2, raise_on, []) == [0, 1]
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
