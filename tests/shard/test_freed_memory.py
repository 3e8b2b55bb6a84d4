"""Full parameters come and go in every step; under our own commands their memory stays with the process on a CPU."""

import platform
import resource

import pytest
import torch
from torch import nn

import accordion as acc
from accordion.safety.own_process import keep_freed_memory
from tests.devices import device

NUM_BLOCKS, WIDTH = 2, 2**11  # a block of 32 MiB in float32


def bytes_first_touched(mesh, num_steps):
    """In each step: what the system had to find pages for."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(NUM_BLOCKS)))
    keep_freed_memory()
    acc.shard(model, mesh, units=lambda name, _: name.isdigit())
    found = []
    for _ in range(num_steps):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        model(torch.ones(2, WIDTH, device=device())).sum().backward()
        model.zero_grad()
        found.append((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) * resource.getpagesize())
    return found


@pytest.mark.cpu("it counts pages of the process")
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library keeps what it likes")
def test_a_step_is_done_in_memory_of_the_step_before(world):
    for found in world.run(2, bytes_first_touched, 5):
        assert min(found[2:]) < 4 * WIDTH * WIDTH, "one weight; a step gathers 8 of them and makes 4 gradients"
