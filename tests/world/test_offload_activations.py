"""Inputs of recomputed units on the host: gone from the device between their forward and their backward, and no bit differs."""

from __future__ import annotations

import gc

import pytest
import torch

import accordion as acc
from tests.world import models
from tests.world.checks import one_loss, units_of
from tests.world.meters import Allocations
from tests.world.reference import local_of, params_of

PARKED = acc.Offload(activations="host")


def same(mesh) -> None:
    """With every kind of recomputation, other offload, two losses of which one is walked twice, and late arrivals."""
    cases = [
        ("full", {}, ()),
        ("selective", {}, ()),
        ("every:2", {"params": "host", "optimizer": "host"}, ("streams",)),
    ]
    for checkpointing, places, debug in cases:
        found = []
        for offload in (acc.Offload(**places), acc.Offload(activations="host", **places)):
            model = acc.shard(
                models.plain(), mesh=mesh, checkpoint_activations=checkpointing, offload=offload, debug=debug
            )
            optimizer = acc.wrap_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
            for step in range(2):
                first, second = one_loss(model, step), one_loss(model, step + 7)
                second.backward(retain_graph=True)
                (first + second).backward()
                optimizer.step()
                optimizer.zero_grad()
            acc.synchronize(model)
            found.append([local_of(v).clone() for v in params_of(model).values()])
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True)), checkpointing


def counted(mesh) -> None:
    """What is live after a forward falls by the inputs of all blocks; the host has them, in memory that is used again."""
    live, parking = [], None
    num_blocks, inputs = 6, 8 * 64 * 32 * 4
    for offload in (None, PARKED):
        model = acc.shard(
            models.seeded(num_blocks=num_blocks), mesh=mesh, checkpoint_activations="full", offload=offload
        )
        tokens = torch.zeros(8, 64, dtype=torch.int64)
        model(tokens).sum().backward()
        if offload is not None:
            parking = units_of(model)[0].engine.wiring.home.parking
            assert parking.num_bytes == num_blocks * inputs
        with Allocations() as memory:
            loss = model(tokens).sum()
            gc.collect()
            memory.mark("forward")
            loss.backward()
        live.append(memory.live("forward"))
    assert parking is not None
    assert parking.num_bytes == num_blocks * inputs, "the second step used what the first one took"
    saved = live[0] - live[1]
    assert (num_blocks - 1) * inputs - 4096 <= saved <= num_blocks * inputs + 4096, (live, inputs)


def test_inputs_of_recomputed_units_on_the_host(world):
    world.run(2, same)
    world.run(1, counted)


def in_order(mesh) -> None:
    """What is parked in another forward, after a backward, is not brought with it; a write into what leaves is told."""
    model = acc.shard(models.plain(), mesh=mesh, checkpoint_activations="full", offload=PARKED)
    parking = units_of(model)[0].engine.wiring.home.parking
    parked = []
    for value in (1.0, 2.0, 3.0):
        parked.append(parking.park(torch.full((4,), value)))
        parked[-1].leave()
        if value != 2:  # in the first and the last one a backward comes
            assert torch.equal(parked[-1].tensor(), torch.full((4,), value))
    first, second, _ = parked
    assert first._coming is None, "of a forward before a backward"
    assert second._coming is not None, "of the same forward"
    live = torch.zeros(4)
    parking.park(live)
    live.add_(1)
    with pytest.raises(acc.UsageError, match=r"the input \(4,\) of a recomputed unit was changed in place while"):
        parking.park(torch.zeros(4))


def nothing_recomputed(mesh) -> None:
    with pytest.raises(acc.UsageError, match="checkpoint_activations is 'none'; pass 'full'"):
        acc.shard(models.plain(), mesh=mesh, offload=PARKED)


def test_without_recomputation_there_is_nothing_to_keep(world):
    world.run(1, nothing_recomputed)
    world.run(1, in_order)
    with pytest.raises(
        acc.UsageError, match=r"Offload\(activations='disk:/tmp'\) is no place for them; valid: device, host"
    ):
        acc.Offload(activations="disk:/tmp")
