"""Helpers for tests of offload: `Offload`s with each place, and comparisons of training with and without them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

import accordion as acc
from accordion.offload.activations import ActivationOffload, HostActivationStore
from accordion.offload.step import chunks
from tests.support import models
from tests.support.compare import Scenario, assert_same, train

HOST = acc.Offload(params="host", optimizer="host")
OPTIMIZER = acc.Offload(optimizer="host")
MIXED = acc.Offload(params="host", optimizer="host", overrides={models.Block: OPTIMIZER, "blocks.1": acc.Offload()})


def disk(path: Path, **options: Any) -> acc.Offload:
    return acc.Offload(params="host", optimizer=f"disk:{path}", **options)


def taken_by(activation_offload: ActivationOffload) -> tuple[int, int]:
    """Return (bytes of host memory, bytes on disk) that offloaded inputs take."""
    on_host = on_disk = 0
    for store in activation_offload._stores.values():
        if isinstance(store, HostActivationStore):
            on_host += store.host_bytes
        else:
            on_host += sum(stage.buffer.num_bytes for stage in store._stages if stage.buffer is not None)
            on_disk += store.file.num_bytes
    return on_host, on_disk


def places(path: Path) -> dict[str, acc.Offload]:
    """Return name -> `Offload`. Together they have each kind of state in each place that it may have. `path`: folder on disk."""
    on_disk = f"disk:{path}"
    return {
        "all on disk": disk_of_all(path),
        "parameters on disk": acc.Offload(params=on_disk, optimizer="host"),
        "gradients on disk": acc.Offload(grads=on_disk, optimizer="host"),
        "states on the device": acc.Offload(params="host"),
        "gradients on the host": acc.Offload(grads="host"),
        "on the device, states on the host": acc.Offload(optimizer="host", step="device"),
        "on the device, states on disk": acc.Offload(optimizer=on_disk, step="device"),
        "on the device, all on the host": acc.Offload(params="host", optimizer="host", step="device"),
        "on the device, all on disk": disk_of_all(path, step="device"),
    }


def disk_of_all(path: Path, **options: Any) -> acc.Offload:
    on_disk = f"disk:{path}"
    return acc.Offload(params=on_disk, grads=on_disk, optimizer=on_disk, **options)


BF16, FP16 = {"compute": torch.bfloat16}, {"compute": torch.float16, "scale": 1024.0}
SCENARIOS = [
    Scenario(build="wide", micros=2, **BF16),
    Scenario(build="tied", micros=3, no_sync=True),
    Scenario(build="frozen", **BF16),
    Scenario(build="uneven", skip_last=(1,), micros=2, **FP16),
    Scenario(build="spare", sometimes=True),
    Scenario(build="experts", **BF16),
]


def same_as_without(
    mesh,
    strategy: acc.Strategy,
    scenarios: list[Scenario],
    offloads: list[acc.Offload],
    chunk_numel: int = chunks.CHUNK_NUMEL,
) -> None:
    for i, scenario in enumerate(scenarios):
        wanted = train(mesh, scenario.case(is_wrapped=True, strategy=strategy))
        debug = ("streams",) if i % 2 else ()
        for offload in offloads:
            case = scenario.case(is_wrapped=True, strategy=strategy, offload=offload, debug=debug)
            with chunks_of_at_most(chunk_numel):
                assert_same(train(mesh, case), wanted)


def fresh(mesh, seed: int = 0, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = acc.shard(models.seeded(seed, tied=True), mesh=mesh, **options)
    return model, acc.wrap_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))


@contextmanager
def chunks_of_at_most(numel: int) -> Iterator[None]:
    """Context manager in which offloaded state is copied in chunks of at most `numel` elements, less than most tensors have."""
    before, chunks.CHUNK_NUMEL = chunks.CHUNK_NUMEL, numel
    try:
        yield
    finally:
        chunks.CHUNK_NUMEL = before
