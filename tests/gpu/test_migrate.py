"""The programs that came from torch's FullyShardedDataParallel, on accelerators: they learn what they learned there."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from tests.compat.test_migrate import program

pytestmark = pytest.mark.accelerator


def runs_both(mesh: DeviceMesh) -> None:
    device = f"{mesh.device_type}:{torch.accelerator.current_device_index()}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        digits = [program(f"fsdp1_digits_{kind}").train(device=device) for kind in ("before", "after")]
        modules = [program(f"fsdp1_transformer_{kind}") for kind in ("before", "after")]
        losses = [module.train(*module.build(device), 10, device=device) for module in modules]
    assert digits[1][0] == pytest.approx(digits[0][0], rel=0.02)
    assert digits[1][1] > 0.5
    assert losses[1] == pytest.approx(losses[0], abs=0.05)


def test_the_programs_learn_the_same_on_accelerators(device_world):
    device_world.run(device_world.num_ranks, runs_both)
