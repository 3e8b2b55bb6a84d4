"""Full parameters come and go in every step; under our own commands their memory stays with the process on a CPU."""

import platform
import resource
from statistics import median

import pytest
import torch
from torch import nn

import accordion as acc
from accordion.safety.own_process import keep_freed_memory
from tests.devices import device
from tests.support.ranked import on_world

NUM_BLOCKS, WIDTH = 2, 2**11  # a block of 32 MiB in float32


@pytest.mark.cpu("it counts pages of the process")
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library keeps what it likes")
@on_world(2)
def test_a_step_is_done_in_memory_of_the_step_before(mesh):
    """Count the bytes of new pages per step. By default glibc needs 4 weights or more in each step, of the 12 allocated."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(NUM_BLOCKS)))
    keep_freed_memory()
    acc.shard(model, mesh, units=lambda name, _: name.isdigit())
    new_bytes = []
    for _ in range(7):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        model(torch.ones(2, WIDTH, device=device())).sum().backward()
        model.zero_grad()
        new_bytes.append((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) * resource.getpagesize())
    # Which free block malloc picks depends on the threads: single steps extend the heap by a weight or two.
    assert median(new_bytes[2:]) < 3 * 4 * WIDTH * WIDTH, (
        "three weights; a step gathers 8 of them and makes 4 gradients"
    )
