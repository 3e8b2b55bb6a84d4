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
from tests.support.ranked import on_mesh, on_world

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


def mesh_for(given: dict[str, Any]) -> Any:
    return mesh_of(acc.HYBRID_SHARD_OPTIM if given["tier"] == "inner shard" else acc.FULL_SHARD)


@pytest.mark.parametrize("tier", TIERS)
@on_mesh(mesh_for)
def test_shard_buffers_of_every_tier_keep_one_contract(mesh: DeviceMesh, tmp_path: Path, tier: str) -> None:
    model = model_in(tier, mesh, str(tmp_path))
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


# -- observers


def recorder(moments: list[str]) -> Observer:
    """Return an observer that appends the name of each moment to `moments`, and otherwise does what the base class does."""

    def method(moment: str) -> Any:
        def record(self: Observer, *args: Any) -> Any:
            moments.append(moment)
            return getattr(Observer, moment)(self, *args)

        return record

    return type("Recorder", (Observer,), {moment: method(moment) for moment in MOMENTS})()


@on_world(2)
def test_observers_hear_the_moments_of_a_step_in_order(mesh: DeviceMesh) -> None:
    model = acc.shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(device()), mesh, units=[nn.Linear])
    moments: list[str] = []
    observer = recorder(moments)
    engine_in(model).observers.attach(observer)
    model(torch.ones(2, 8, device=device())).sum().backward()
    engine_in(model).observers.detach(observer)
    assert [moments.count(name) for name in ("unit_unshards", "unit_reshards")] == [5, 5]
    step = [name for name in moments if not name.startswith("memory_") and not name.endswith("shards")]
    ends = ["unit_leaves", "outputs_are_ready"]
    layer = ["unit_is_called", "unit_enters", "unit_is_full", *ends]
    assert step[:14] == ["unit_is_called", "forward_begins", "unit_enters", "unit_is_full", *layer, *layer]
    assert step[14:17] == [*ends, "forward_ends"]
    assert step[17:19] == ["backward_begins", "unit_returns"]
    assert step.count("unit_returns") == 3
    assert step.count("full_gradients") == 3
    assert step[-2:] == ["backward_ends", "backward_ended"]
    moments.clear()
    model(torch.ones(2, 8, device=device()))
    assert moments == [], "a detached observer is not called"


def raise_planted() -> None:
    raise PlantedError


def test_the_purpose_of_memory_ends_with_an_allocation_that_raises() -> None:
    purposes: list[Any] = []
    engine: Any = SimpleNamespace(observers=SimpleNamespace(memory_is_for=[purposes.append]))
    with pytest.raises(PlantedError):
        Engine.allocate(engine, GATHERED, raise_planted)
    assert purposes == [GATHERED, None]
