"""The step of what is offloaded: behind the next forward, on the host or the device, bit for bit the same kernel."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import accordion as acc
from tests.world import models
from tests.world.checks import assert_equal, one_loss
from tests.world.offloads import HOST, MIXED, disk, disk_of_all
from tests.world.reference import local_of, params_of
from tests.world.test_optimizers import OPTIMIZERS


def deferred(mesh, kind: str, path: Path) -> None:
    """Bit for bit the same kernel stepping before `step` returns: groups, schedulers, hooks, frozen parts, kept gradients."""
    make, options = OPTIMIZERS[kind]
    results = []
    options_of = {"disk": disk(path, overrides=MIXED.overrides), "away": disk_of_all(path, overrides=MIXED.overrides)}
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
            assert all(torch.equal(local_of(state[index][key]), local_of(value)) for key, value in entry.items())


@pytest.mark.parametrize("kind", ["adamw_fused", *(pytest.param(k, marks=pytest.mark.slow) for k in OPTIMIZERS)])
def test_a_step_behind_the_next_forward_changes_no_bit(world, kind, tmp_path):
    world.run(2, deferred, kind, tmp_path)


def scaled(mesh, path: Path) -> None:
    """A fused optimizer is told of the scale and of overflows by attributes that are gone when its units are stepped."""
    results = []
    for offload in (None, HOST, disk(path), disk_of_all(path, step="device")):
        model = acc.shard(models.plain(), mesh=mesh, offload=offload, precision=acc.Precision(params=torch.float16))
        optimizer = acc.wrap_optimizer(torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-2), fused=True))
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        losses = []
        for step in range(5):
            loss = one_loss(model, step) * (float("inf") if step == 2 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            schedule.step()
            losses.append(loss.item())
        results.append((losses, scaler.get_scale(), acc.full_state_dict(model, rank0_only=False)))
    for losses, scale, params in results[1:]:
        assert (losses, scale) == results[0][:2]
        assert_equal(params, results[0][2])


def test_a_gradient_scaler_is_exact_behind_the_next_forward(world, tmp_path):
    world.run(2, scaled, tmp_path)
