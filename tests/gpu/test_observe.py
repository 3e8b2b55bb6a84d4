"""Names of units in snapshots of CUDA's allocator."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import accordion as acc
from tests.observe.test_observe import trained
from tests.support import models

pytestmark = [
    pytest.mark.accelerator,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="the allocator of CUDA alone records annotations"),
]


def names_units(mesh: DeviceMesh) -> None:
    model = acc.shard(models.seeded(), mesh=mesh)
    torch.cuda.memory._record_memory_history(global_record_annotations=True)
    try:
        with acc.observe(model, steps=1):
            trained(model, 2)
        annotations = torch.cuda.memory._snapshot()["external_annotations"]
    finally:
        torch.cuda.memory._record_memory_history(None)
    assert {"forward blocks.0", "backward blocks.2", "optimizer"} <= {entry["name"] for entry in annotations}


def test_a_memory_snapshot_names_the_units_of_observed_steps(device_world):
    device_world.run(device_world.num_ranks, names_units)
