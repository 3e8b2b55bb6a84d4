"""What a DeepSpeed configuration gives trains: the example's program, and every stage as the same model."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import accordion as acc
from accordion.compat import deepspeed

EXAMPLES = Path(__file__).parents[2] / "examples" / "migrate"
ZERO: dict[str, dict[str, Any]] = {
    **{f"stage {stage}": {"stage": stage} for stage in (0, 1, 2, 3)},
    "stage 3 in groups of 2": {"stage": 3, "zero_hpz_partition_size": 2},
    "MiCS in groups of 2": {"stage": 3, "mics_shard_size": 2},
}


def program() -> Any:
    spec = importlib.util.spec_from_file_location("deepspeed_after", EXAMPLES / "deepspeed_after.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def runs(mesh: DeviceMesh, folder: str) -> dict[str, list[float]]:
    module, found = program(), {}
    content = json.loads(module.CONFIG.read_text())
    for name, zero in ZERO.items():
        module.CONFIG = Path(folder) / f"{mesh.get_local_rank()}.json"
        module.CONFIG.write_text(json.dumps({**content, "bf16": {"enabled": False}, "zero_optimization": zero}))
        found[name] = module.train(steps=8)
    module.CONFIG = EXAMPLES / "ds_config.json"
    found["as it is"] = module.train(steps=30)
    return found


def test_the_program_trains_in_every_stage_alike(world, tmp_path):
    for found in world.run(4, runs, str(tmp_path)):
        for name in ZERO:
            assert found[name] == pytest.approx(found["stage 3"], abs=1e-4), name
        assert found["as it is"][-1] < found["as it is"][0] / 4
        assert found["as it is"][0] == pytest.approx(found["stage 3"][0], rel=0.02)


def sums(mesh: DeviceMesh) -> None:
    """Gradients that are summed and not averaged, and fp16 with the scale of the file."""
    grads = {}
    for op in ("mean", "sum"):
        settings = deepspeed.read(
            {"zero_optimization": {"stage": 3}, "gradient_allreduce_op": op, "fp16": {"enabled": True}}
        )
        torch.manual_seed(0)
        model = acc.shard(torch.nn.Linear(4, 4), mesh, **settings.shard)
        scaler = settings.scaler()
        scaler.scale(model(torch.ones(2, 4)).float().mean()).backward()
        assert scaler.get_scale() == 2.0**16
        grads[op] = model.weight.grad.full_tensor()
    torch.testing.assert_close(grads["sum"], grads["mean"] * mesh.size())


def test_sums_of_gradients(world):
    world.run(2, sums)
