"""The step of offloaded parameters during the next forward: bit for bit the same kernel; calls that need its results wait."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import accordion as acc
from accordion.offload.step.deferred_step import UnitStep
from tests.offload.test_programs import end_of
from tests.optim.test_kinds_of_optimizers import OPTIMIZERS
from tests.support import models
from tests.support.checks import full, one_loss
from tests.support.offloads import HOST, MIXED, disk, disk_of_all, fresh
from tests.support.ranked import on_num_ranks, on_world
from tests.support.reference import local_of, params_of
from tests.support.sample import sampled


@pytest.mark.parametrize("kind", ["adamw_fused", *(pytest.param(k, marks=pytest.mark.slow) for k in OPTIMIZERS)])
@on_world(2)
def test_a_step_during_the_next_forward_changes_no_bit(mesh, kind: str, tmp_path: Path) -> None:
    """Training equals, bit for bit, a step before `step` returns: groups, schedulers, hooks, frozen parts, kept gradients."""
    make, options = OPTIMIZERS[kind]
    results = []
    options_of = {"away": disk_of_all(tmp_path, overrides=MIXED.overrides)}
    options_of["device"] = acc.Offload(params="host", optimizer="host", step="device", overrides=MIXED.overrides)
    for way in ("plain", "waits", "deferred", "device", "late", "late away"):
        debug = ("streams",) if "late" in way else ()
        offload = None if way == "plain" else options_of.get(way.split()[-1], MIXED)
        model = acc.shard(models.frozen(), mesh=mesh, offload=offload, debug=debug)
        trained = [p for p in model.parameters() if p.requires_grad]
        groups = [{"params": trained[::2], "weight_decay": 0.1}, {"params": trained[1::2]}]
        optimizer = acc.wrap_optimizer(make(groups, **options))
        calls: list[str] = []
        optimizer.register_step_pre_hook(lambda *_, calls=calls: calls.append("before"))
        optimizer.register_step_post_hook(lambda *_, calls=calls: calls.append("after"))
        optimizer.load_state_dict(optimizer.state_dict())  # torch then wraps the step in its hooks again
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
        losses = []
        for step in range(4):
            loss = one_loss(model, step)
            loss.backward()
            if step == 1:
                acc.clip_grad_norm_(model, 0.1)
            optimizer.step()
            if way == "waits":
                acc.synchronize(model)
            if "late" in way:
                assert local_of(model.head.weight).isnan().all(), "a read that does not wait is not a number"
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            schedule.step()
            losses.append(loss.item())
        assert calls == ["before", "after"] * 4
        names = [(index, *entry) for index, entry in optimizer.state_dict()["state"].items()]
        results.append(((losses, names), end_of(model, optimizer)))
    for lists, tensors in results[1:]:
        assert lists == results[0][0]
        assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(tensors, results[0][1], strict=True))


@on_world(1)
def test_a_gather_waits_for_the_step_of_its_own_unit(mesh) -> None:
    """The step of the last unit begins after the forward of the first one: units are stepped in the forward's order."""
    model = acc.shard(models.plain(), mesh=mesh, offload=HOST)
    optimizer = acc.wrap_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    begun, order = threading.Event(), []
    real = UnitStep.run

    def run(job: UnitStep) -> Any:
        names = [name for name, p in model.named_parameters() if any(e.param is p for e in job.entries)]
        order.append(".".join(names[0].split(".")[:2]))
        if names[0].startswith("blocks.2"):
            assert begun.wait(60), "a gather waited for the steps of other units"
        return real(job)

    for step in range(2):
        one_loss(model, step).backward()
        with mock.patch.object(UnitStep, "run", run):
            optimizer.step()
            if step == 1:
                model.blocks[0].register_forward_hook(lambda *_: begun.set())
                one_loss(model, step)
            else:
                begun.set()
            acc.synchronize(model)
        begun.clear()
    assert order == ["embed.weight", "blocks.0", "blocks.1", "blocks.2"] * 2


# -- calls that wait


Ask = Callable[[nn.Module, Optimizer, Path], list[Any]]


def rows(state: dict[str, Any]) -> list[Tensor]:
    return [local_of(value).clone() for value in state.values()]


def states_of(optimizer: Optimizer) -> list[Tensor]:
    return [local_of(v).clone() for entry in optimizer.state_dict()["state"].values() for v in entry.values()]


def loaded_into_a_part(model: nn.Module, optimizer: Optimizer, path: Path) -> list[Any]:
    acc.synchronize(model)
    kept = {name: value.clone() for name, value in model.blocks[1].up.state_dict().items()}
    optimizer.step()
    model.blocks[1].up.load_state_dict(kept)
    return []


def in_the_registry(model: nn.Module, optimizer: Optimizer, path: Path) -> list[Any]:
    with acc.full_params(model):
        return [p.detach().clone() for p in model.parameters()]


def saved(model: nn.Module, optimizer: Optimizer, path: Path) -> list[Any]:
    acc.save(path, model, optimizer)
    other, its = fresh(next(model.parameters()).device_mesh, seed=5)
    acc.load(path, other, its)
    return [*params_of(other).values(), *states_of(its)]


def restored(model: nn.Module, optimizer: Optimizer, path: Path) -> list[Any]:
    acc.save(path, model, optimizer)
    optimizer.step()
    acc.load(path, model, optimizer)
    return states_of(optimizer)


def stepped_again(model: nn.Module, optimizer: Optimizer, path: Path) -> list[Any]:
    optimizer.step()
    acc.synchronize(model)
    return states_of(optimizer)


FOR_ALL: dict[str, Ask] = {
    "state dict": lambda model, optimizer, path: rows(model.state_dict()),
    "loaded": lambda model, optimizer, path: model.load_state_dict(models.seeded(9).state_dict()) and [],
    "states": lambda model, optimizer, path: states_of(optimizer),
    "states loaded": lambda model, optimizer, path: optimizer.load_state_dict(optimizer.state_dict()) or [],
    "full state dict": lambda model, optimizer, path: list(full(model).values()),
    "full parameters": in_the_registry,
    "saved": saved,
    "restored": restored,
    # The gradients that the step reads are scaled after it.
    "clipped": lambda model, optimizer, path: [acc.clip_grad_norm_(model, 1e-3)],
    "cleared": lambda model, optimizer, path: optimizer.zero_grad(set_to_none=False) or [],
    "asked": lambda model, optimizer, path: acc.synchronize(model) or [],
    "stepped again": stepped_again,
}
FOR_A_PART: dict[str, Ask] = {
    "a unit's": lambda model, optimizer, path: rows(model.blocks[1].state_dict()),
    "of a part of a unit": lambda model, optimizer, path: rows(model.blocks[1].up.state_dict()),
    "loaded into a part": loaded_into_a_part,
}
PART = "blocks.1.up."


@pytest.mark.parametrize("num_ranks", sampled([1, 2], (1).__eq__))
@on_num_ranks
def test_calls_that_need_a_step_wait_for_it(mesh, tmp_path: Path) -> None:
    """With debug="streams" shards are NaN until a call waits; after each call none is, and results are as without offload.

    Each call is tested in one tier, in turn.
    """
    places = HOST, disk(tmp_path), disk_of_all(tmp_path)
    for which, (name, way) in enumerate({**FOR_ALL, **FOR_A_PART}.items()):
        found = []
        for i, offload in enumerate((None, places[which % len(places)])):
            model, optimizer = fresh(mesh, offload=offload, debug=() if offload is None else ("streams",))
            one_loss(model).backward()
            optimizer.step()
            if offload is not None:
                assert all(local_of(p).isnan().all() for p in model.parameters()), "a step is under way"
            said = way(model, optimizer, tmp_path / f"{name} {i}")
            missed = [n for n, p in model.named_parameters() if local_of(p).isnan().any()]
            assert not [n for n in missed if name in FOR_ALL or n.startswith(PART)], (name, offload)
            acc.synchronize(model)
            found.append([*said, *params_of(model).values()])
        assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(*found, strict=True)), name
