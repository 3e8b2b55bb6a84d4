"""The step of offloaded parameters: during the next forward, on the host or the device, bit for bit the same kernel."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import accordion as acc
from accordion.offload.step.deferred_step import UnitStep
from tests.offload.test_programs import end_of
from tests.optim.test_kinds_of_optimizers import OPTIMIZERS
from tests.support import models
from tests.support.checks import go_on, one_loss
from tests.support.offloads import HOST, MIXED, disk_of_all
from tests.support.ranked import on_world
from tests.support.reference import local_of


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


@on_world(1)
def test_hooks_of_a_step_run_once_after_a_load_too(mesh) -> None:
    model = acc.shard(models.plain(), mesh=mesh, offload=HOST)
    optimizer = acc.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.load_state_dict(optimizer.state_dict())
    go_on(model, optimizer, [0])
    acc.synchronize(model)
    assert calls == ["before"], "torch wraps a step in its hooks again when a state dict is loaded"
