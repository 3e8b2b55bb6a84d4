"""Every combination of tiers: those with a meaning train bit for bit as without offload, the others are refused."""

from __future__ import annotations

import gc
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

import accordion as acc
from tests.devices import device
from tests.offload.test_programs import end_of
from tests.support import models
from tests.support.checks import one_loss
from tests.support.offloads import chunks_of_at_most
from tests.support.ranked import on_world
from tests.support.sample import sampled

PLACES = ("device", "host", "disk")
NUM_COMBINATIONS = 33  # of where parameters, gradients and states rest and where the step is; the first is no offload


def combinations(path: Path) -> dict[tuple[str, ...], acc.Offload]:
    """Return a policy for each combination that has a meaning, and check that the others are refused."""
    found: dict[tuple[str, ...], acc.Offload] = {}
    for params, grads, optimizer, step in itertools.product(PLACES, PLACES, PLACES, ("device", "host")):
        without_meaning = (
            # a step there with states elsewhere, gradients away from the parameters that are stepped
            (step == "host" and optimizer == "device") or (grads == "device" and (params != "device" or step == "host"))
        )
        places = {
            kind: f"disk:{path}" if place == "disk" else place
            for kind, place in (("params", params), ("grads", grads), ("optimizer", optimizer))
        }
        if without_meaning:
            with pytest.raises(acc.UsageError, match=r"Offload\((step='host', optimizer='device'|grads='device', )"):
                acc.Offload(**places, step=step)
            continue
        offload = acc.Offload(**places, step=step)
        assert (offload.rest_of_grads.partition(":")[0], offload.stepped_on) == (grads, step)
        found[params, grads, optimizer, step] = offload
    return found


def trained(mesh, kind: str, **options: Any) -> list[Tensor]:
    """Return losses, norms, parameters and states of steps with accumulation and clipping, or a scaler with an overflow."""
    model = acc.shard(models.seeded(num_blocks=2), mesh=mesh, precision=acc.Precision(params=torch.bfloat16), **options)
    make = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[kind]
    settings = {"fused": True, "weight_decay": 0.1} if kind == "adamw" else {"momentum": 0.9}
    optimizer = acc.wrap_optimizer(make(model.parameters(), lr=1e-2, **settings))
    scaler = torch.amp.GradScaler(device().type, enabled=kind == "sgd", init_scale=2.0**8, growth_interval=2)
    found = []
    for step in range(2 if kind == "adamw" else 3):  # one more after the overflow
        for micro in range(2):
            overflows = kind == "sgd" and (step, micro) == (1, 1)
            loss = one_loss(model, step + 5 * micro) * (float("inf") if overflows else 1.0)
            scaler.scale(loss).backward()
            found.append(loss.detach())
        scaler.unscale_(optimizer)
        found.append(acc.clip_grad_norm_(model, 0.1))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return found + end_of(model, optimizer)


def in_every_combination(mesh, path: Path, kind: str) -> None:
    """Activations are on the device in half of the combinations, and on the host in the other half."""
    found = combinations(path)
    assert len(found) == NUM_COMBINATIONS
    wanted = trained(mesh, kind)
    for i, (names, offload) in enumerate(found.items()):
        offload = replace(offload, activations="host" if i % 2 else "device")
        with chunks_of_at_most(4096):
            got = trained(mesh, kind, offload=offload, checkpoint_activations="full" if i % 2 else "none")
        pairs = enumerate(zip(got, wanted, strict=True))
        pairs = ((at, a.cpu(), b.cpu()) for at, (a, b) in pairs)
        wrong = [at for at, a, b in pairs if not torch.equal(a, b) and not (a.isnan().all() and b.isnan().all())]
        assert not wrong, (kind, names, wrong)


@pytest.mark.parametrize(("num_ranks", "kind"), sampled([(1, "adamw"), (3, "adamw"), (3, "sgd")], lambda n, _: n == 1))
def test_every_combination_trains_the_same_bits_or_is_refused(world, num_ranks, kind, tmp_path):
    world.run(num_ranks, in_every_combination, tmp_path, kind, timeout_s=600)


@on_world(1)
def test_a_model_collected_during_a_step_does_not_disturb_it(mesh) -> None:
    """A model that is garbage-collected during the step of another optimizer does not disturb that step."""
    model = models.Tiny(width=16, hidden=32, num_blocks=1)
    acc.shard(model, mesh=mesh, offload=acc.Offload(optimizer="host", step="device"), units={models.Block})
    gone = [model]
    del model

    def collect(*_: Any) -> None:
        gone.clear()
        gc.collect()

    first, last = (register_optimizer_step_pre_hook(hook) for hook in (collect, lambda *_: None))
    try:
        other = torch.nn.Parameter(torch.ones(2, device=device()))
        other.grad = torch.ones(2, device=device())
        torch.optim.SGD([other], lr=1.0).step()
        assert other.tolist() == [0.0, 0.0]
    finally:
        first.remove()
        last.remove()
