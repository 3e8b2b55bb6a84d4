"""The step of offloaded parameters: during the next forward, on the host or the device, bit for bit the same kernel."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import accordion as acc
from accordion.offload.step.deferred_step import UnitStep
from tests.devices import device
from tests.optim.test_kinds_of_optimizers import OPTIMIZERS
from tests.support import models
from tests.support.checks import assert_equal, one_loss
from tests.support.offloads import HOST, MIXED, disk, disk_of_all, places
from tests.support.ranked import on_num_ranks, on_world
from tests.support.reference import local_of, params_of
from tests.support.sample import sampled


@pytest.mark.parametrize("kind", ["adamw_fused", *(pytest.param(k, marks=pytest.mark.slow) for k in OPTIMIZERS)])
@on_world(2)
def test_a_step_during_the_next_forward_changes_no_bit(mesh, kind: str, tmp_path: Path) -> None:
    """Training equals, bit for bit, a step before `step` returns: groups, schedulers, hooks, frozen parts, kept gradients."""
    make, options = OPTIMIZERS[kind]
    results = []
    options_of = {"disk": disk(tmp_path, overrides=MIXED.overrides)}
    options_of["away"] = disk_of_all(tmp_path, overrides=MIXED.overrides)
    options_of["device"] = acc.Offload(params="host", optimizer="host", step="device", overrides=MIXED.overrides)
    for way in ("plain", "waits", "deferred", "disk", "away", "device", "late", "late disk", "late away"):
        debug = ("streams",) if "late" in way else ()
        offload = None if way == "plain" else options_of.get(way.split()[-1], MIXED)
        model = acc.shard(models.frozen(), mesh=mesh, offload=offload, debug=debug)
        trained = [p for p in model.parameters() if p.requires_grad]
        groups = [{"params": trained[::2], "weight_decay": 0.1}, {"params": trained[1::2]}]
        optimizer = acc.wrap_optimizer(make(groups, **options))
        calls: list[str] = []
        optimizer.register_step_pre_hook(lambda *_, calls=calls: calls.append("before"))
        optimizer.register_step_post_hook(lambda *_, calls=calls: calls.append("after"))
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
        state = optimizer.state_dict()["state"]
        results.append((losses, params_of(model), state))
    for losses, params, state in results[1:]:
        assert losses == results[0][0]
        assert_equal(params, results[0][1])
        assert list(state) == list(results[0][2])
        for index, entry in results[0][2].items():
            assert list(state[index]) == list(entry)
            pairs = [(local_of(state[index][key]), local_of(value)) for key, value in entry.items()]
            assert all(torch.equal(a.cpu(), b.cpu()) for a, b in pairs)


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


# -- in the backward


@pytest.mark.parametrize(("num_ranks", "num_ways"), sampled([(2, 3), (1, 100), (3, 100)], lambda n, ways: ways == 3))
@on_num_ranks
def test_a_step_in_backward_changes_no_bit(mesh, num_ways: int, tmp_path: Path) -> None:
    """Each unit is stepped once its gradients are reduced, in every tier, bit for bit as after the backward."""
    ways = {"device": acc.Offload()}
    ways |= {"host": HOST, **places(tmp_path), "states on disk": disk(tmp_path)}
    asked = {name: dataclasses.replace(offload, step_in_backward=True) for name, offload in ways.items()}
    wanted = None
    for name, offload in [("none", None), *list(asked.items())[:num_ways]]:
        model = acc.shard(models.frozen(), mesh=mesh, offload=offload, precision=acc.Precision(params=torch.bfloat16))
        optimizer = acc.wrap_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True))
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
        losses = []
        for step in range(3):
            loss = one_loss(model, step)
            loss.backward()
            if offload is not None:
                assert all(p.grad is None for p in model.parameters()), "gradients go with the step"
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            losses.append(loss.item())
        state = [local_of(v).clone() for _, e in sorted(optimizer.state_dict()["state"].items()) for v in e.values()]
        found = (losses, state, list(params_of(model).values()))
        wanted = wanted or found
        assert found[0] == wanted[0], name
        pairs = zip(found[1] + found[2], wanted[1] + wanted[2], strict=True)
        assert all(torch.equal(a.cpu(), b.cpu()) for a, b in pairs), name


@on_world(1)
def test_a_step_in_backward_refuses_broken_promises(mesh) -> None:
    model = acc.shard(models.plain(), mesh=mesh, offload=acc.Offload(step_in_backward=True))
    optimizer = acc.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    scaler = torch.amp.GradScaler(device().type)
    promise = r"Offload\(step_in_backward=True\) promised one backward a step, no clipping and no scaler; "
    scaler.scale(one_loss(model)).backward()
    with pytest.raises(acc.UsageError, match=promise + "a gradient scaler"):
        scaler.step(optimizer)
    with pytest.raises(acc.UsageError, match=promise + "clip_grad_norm_"):
        acc.clip_grad_norm_(model, 1.0)
    with pytest.raises(acc.UsageError, match=promise + "no_sync"), acc.no_sync(model):
        pass
    before = params_of(model)
    with pytest.raises(acc.UsageError, match=promise + "this is another backward before optimizer.step"):
        one_loss(model).backward()
    assert_equal(params_of(model), before)
    model = acc.shard(
        Twice(), mesh=mesh, units=lambda name, _: name == "block", offload=acc.Offload(step_in_backward=True)
    )
    acc.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(acc.UsageError, match="unit 'block' has gradients more than once in a backward"):
        model(torch.ones(2, 8, device=device())).sum().backward()


class Twice(nn.Module):
    """A model that calls its block twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.block = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(self.block(self.first(x)).tanh())


@on_world(1)
def test_hooks_of_a_step_run_once_after_a_load_too(mesh) -> None:
    model = acc.shard(models.plain(), mesh=mesh, offload=HOST)
    optimizer = acc.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.load_state_dict(optimizer.state_dict())
    one_loss(model).backward()
    optimizer.step()
    acc.synchronize(model)
    assert calls == ["before"], "torch wraps a step in its hooks again when a state dict is loaded"
