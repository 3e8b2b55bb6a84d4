"""Contracts of the engine's parts: shard buffers, full memory, observers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import accordion as acc
from accordion import _torch
from accordion.engine.engine import Engine
from accordion.engine.observer import GATHERED, MOMENTS, Observer
from accordion.engine.shards import ShardBuffer
from tests.compat.test_fsdp2_parallel import Packed
from tests.devices import device
from tests.inside import engine_in, units_of
from tests.support import models
from tests.support.checks import PlantedError, mesh_of

# -- shard buffers, and the full parameters that are gathered from them

TIERS = ("device", "inner shard", "host", "disk", "subclass")


def model_in(tier: str, mesh: DeviceMesh, folder: str) -> nn.Module:
    """A sharded model whose shards lie in a tier; where the mesh has two axes, in a hybrid."""
    if tier == "subclass":
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(device())
        for layer in model:
            layer.weight = nn.Parameter(Packed(layer.weight.detach()))
        return acc.shard(model, mesh)
    places = {"host": acc.Offload(params="host"), "disk": acc.Offload(params=f"disk:{folder}")}
    strategy = acc.HYBRID_SHARD_OPTIM if tier == "inner shard" else acc.FULL_SHARD
    return acc.shard(models.seeded(), mesh, strategy=strategy, offload=places.get(tier))


def keeps_the_contract(mesh: DeviceMesh, tier: str, folder: str) -> None:
    model = model_in(tier, mesh, folder)
    engine, units = engine_in(model), units_of(model)
    for unit in units:
        for group in unit.groups:
            buffer = group.shard_buffer
            assert isinstance(buffer, ShardBuffer)
            assert len(buffer.locals) == len(group.params) == len(group.views)
            for local, param, view in zip(buffer.locals, group.params, group.views, strict=True):
                own = _torch.local_of(param.sharded)
                assert own.shape == local.shape
                if own.numel() and tier != "subclass":  # a subclass keeps its rows in tensors of its own
                    assert own.data_ptr() == local.data_ptr()
                assert view.shape == torch.Size(param.cut.shape)
            for _ in range(2):  # waits may be asked for at any time, and again
                buffer.ready()
                buffer.synchronize()
            follows_writes(engine, unit, group)
            takes_gradients(buffer, group)


def follows_writes(engine: Any, unit: Any, group: Any) -> None:
    """A write to shards is seen by the next gather; full memory is its own while it is open, and nobody's when it is let go."""
    with torch.no_grad():
        for param in group.params:
            own = _torch.local_of(param.sharded)
            if isinstance(own, Packed):
                torch.autograd.graph.increment_version(own)
            else:
                own.fill_(3.0)
    group.shard_buffer.mark_stale()
    unit.drop_stale()
    engine.acquire(unit)
    for view, param in zip(group.views, group.params, strict=True):
        if param.extension is None:
            assert torch.equal(view, torch.full_like(view, 3.0))
    memory = group.full_buffer
    if memory is not None:
        assert memory.num_bytes > 0
        strange = torch.empty(4, device=device())
        assert _torch.storage_key(strange.untyped_storage()) not in memory.storage_keys
        if group.params[0].extension is None:
            assert all(_torch.storage_key(view.untyped_storage()) in memory.storage_keys for view in group.views)
    unit.release()


def takes_gradients(buffer: ShardBuffer, group: Any) -> None:
    """`put` gives rows of the same numbers, None where there were none."""
    rows: list[Tensor | None] = [
        None if k == 0 else torch.full(local.shape, float(k), dtype=local.dtype, device=device())
        for k, local in enumerate(buffer.locals)
    ]
    if any(isinstance(local, Packed) for local in buffer.locals):
        return  # their gradients have the dtype in which modules compute
    kept, copy = buffer.put(range(len(rows)), rows, [False] * len(rows), None)
    if copy is not None:
        copy.synchronize()
    assert kept[0] is None
    for k, (row, local) in enumerate(zip(kept[1:], buffer.locals[1:], strict=True), 1):
        assert row is not None
        assert row.shape == local.shape
        assert bool((row == float(k)).all())


@pytest.mark.parametrize("tier", TIERS)
def test_shard_buffers_of_every_tier_keep_one_contract(world: Any, tmp_path: Path, tier: str) -> None:
    shape = mesh_of(acc.HYBRID_SHARD_OPTIM if tier == "inner shard" else acc.FULL_SHARD)
    world.run_mesh(*shape, keeps_the_contract, tier, str(tmp_path))


# -- observers


class Written(Observer):
    """Writes down the moments of a step."""

    def __init__(self) -> None:
        self.seen: list[str] = []


def written(moment: str) -> Any:
    """A method that writes `moment` down, and does what the base class does."""

    def told(self: Written, *args: Any) -> Any:
        self.seen.append(moment)
        return getattr(Observer, moment)(self, *args)

    return told


for _moment in MOMENTS:  # an observer hears what its class overrides
    setattr(Written, _moment, written(_moment))


def moments_of_a_step(mesh: DeviceMesh) -> list[str]:
    model = acc.shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(device()), mesh, units=[nn.Linear])
    seen = Written()
    engine_in(model).observers.attach(seen)
    model(torch.ones(2, 8, device=device())).sum().backward()
    told = [name for name in seen.seen if not name.startswith("memory_")]
    seen.seen.clear()
    engine_in(model).observers.detach(seen)
    model(torch.ones(2, 8, device=device()))
    assert seen.seen == [], "who is detached hears nothing"
    return told


def test_observers_hear_the_moments_of_a_step_in_order(world: Any) -> None:
    for told in world.run(2, moments_of_a_step):
        memory = {name: told.count(name) for name in ("unit_unshards", "unit_reshards")}
        assert memory == {"unit_unshards": 5, "unit_reshards": 5}
        told = [name for name in told if name not in memory]
        ends = ["unit_leaves", "outputs_are_ready"]
        layer = ["unit_is_called", "unit_enters", "unit_is_full", *ends]
        assert told[:14] == ["unit_is_called", "forward_begins", "unit_enters", "unit_is_full", *layer, *layer]
        assert told[14:17] == [*ends, "forward_ends"]
        assert told[17:19] == ["backward_begins", "unit_returns"]
        assert told.count("unit_returns") == 3
        assert told.count("full_gradients") == 3
        assert told[-2:] == ["backward_ends", "backward_ended"]


def raise_planted() -> None:
    raise PlantedError


def test_the_purpose_of_memory_ends_with_an_allocation_that_raises() -> None:
    purposes: list[Any] = []
    engine: Any = SimpleNamespace(observers=SimpleNamespace(memory_is_for=[purposes.append]))
    with pytest.raises(PlantedError):
        Engine.allocate(engine, GATHERED, raise_planted)
    assert purposes == [GATHERED, None]
