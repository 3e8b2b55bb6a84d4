"""The values of `Offload`: combinations with a meaning train bit for bit as without offload, the others are refused."""

from __future__ import annotations

import gc
import itertools
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

import accordion as acc
from accordion.offload.budget import estimate_memory
from tests.devices import device
from tests.offload.test_programs import end_of
from tests.support import models
from tests.support.checks import one_loss, step_all
from tests.support.offloads import chunks_of_at_most
from tests.support.ranked import on_world
from tests.support.sample import sampled

PLACES = ("device", "host", "disk")
NUM_COMBINATIONS = 33  # of where parameters, gradients and states rest and where the step is; the first is no offload


def combinations(path: Path) -> dict[tuple[str, ...], acc.Offload]:
    """Return a policy for each combination that has a meaning, and check that the others are refused."""
    found: dict[tuple[str, ...], acc.Offload] = {}
    refusal = (
        r"Offload\((step='host', optimizer='device'.* pass optimizer='host' too, or step='device'"
        r"|grads='device', .* leave out grads, or pass params='device' and step='device')"
    )
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
            with pytest.raises(acc.UsageError, match=refusal):
                acc.Offload(**places, step=step)
            continue
        offload = acc.Offload(**places, step=step)
        assert (offload.rest_of_grads.partition(":")[0], offload.stepped_on) == (grads, step)
        found[params, grads, optimizer, step] = offload
    return found


def trained(mesh, **options: Any) -> list[Tensor]:
    """Return losses, norms, parameters and states of steps with accumulation and clipping."""
    model = acc.shard(models.seeded(num_blocks=2), mesh=mesh, precision=acc.Precision(params=torch.bfloat16), **options)
    optimizer = acc.wrap_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True, weight_decay=0.1))
    results = []
    for step in range(2):
        for micro in range(2):
            loss = one_loss(model, step + 5 * micro)
            loss.backward()
            results.append(loss.detach())
        results.append(acc.clip_grad_norm_(model, 0.1))
        step_all([optimizer])
    return results + end_of(model, optimizer)


def in_every_combination(mesh, path: Path) -> None:
    """Activations are on the device in half of the combinations, and on the host in the other half."""
    found = combinations(path)
    assert len(found) == NUM_COMBINATIONS
    wanted = trained(mesh)
    for i, (names, offload) in enumerate(found.items()):
        offload = replace(offload, activations="host" if i % 2 else "device")
        with chunks_of_at_most(4096):
            got = trained(mesh, offload=offload, checkpoint_activations="full" if i % 2 else "none")
        pairs = enumerate(zip(got, wanted, strict=True))
        wrong = [at for at, (a, b) in pairs if not torch.equal(a.cpu(), b.cpu())]
        assert not wrong, (names, wrong)


@pytest.mark.parametrize("num_ranks", sampled([1, 3], (1).__eq__))
def test_every_combination_trains_the_same_bits_or_is_refused(world, num_ranks, tmp_path):
    world.run(num_ranks, in_every_combination, tmp_path, timeout_s=600)


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"params": "hots"}, r"params='hots'\) is no place; did you mean 'host'"),
        ({"optimizer": "gpu"}, r"optimizer='gpu'\) is no place; valid: device, host, disk:/path"),
        ({"optimizer": "disk:"}, r"optimizer='disk:'\) is no place"),
        ({"params": "disk:"}, r"params='disk:'\) is no place; did you mean"),
        ({"step": "hots"}, r"step='hots'\) is no place to step; did you mean 'host'"),
        ({"device_bytes": 7}, r"Offload\(device_bytes=7\) limits how much"),
        ({"host_bytes": -1, "optimizer": "host"}, r"Offload\(host_bytes=-1\) limits how much"),
    ],
)
def test_places_that_make_no_sense_are_refused(options, message):
    with pytest.raises(acc.UsageError, match=message):
        acc.Offload(**options)


def test_budgets_of_any_size_are_kept_or_refused_and_move_nothing_farther():
    """The model's parameters are smaller than pages, to which states that are stepped chunk by chunk are rounded up."""
    with torch.device("meta"):
        model = models.frozen()
    drawn, kept, policies = random.Random(0), 0, combinations(Path("/scratch"))
    policies.pop(("device", "device", "device", "device"))
    for policy in policies.values():
        most = estimate_memory(model, policy, 2).host + estimate_memory(model, acc.Offload(), 2).device
        device, host = (drawn.choice((None, 1, drawn.randrange(most), most)) for _ in range(2))
        try:
            estimate = estimate_memory(model, replace(policy, device_bytes=device, host_bytes=host), 2)
        except acc.UsageError as error:
            if "is less than the" not in str(error):
                raise
            continue
        kept += 1
        assert device is None or estimate.device <= device, (policy, device, host)
        assert host is None or estimate.arena + estimate.host_states <= host, (policy, device, host)
        for kind, place in itertools.product(("params", "rest_of_grads", "optimizer"), estimate.places):
            tier, farthest = (PLACES.index(getattr(one, kind).partition(":")[0]) for one in (place, policy))
            assert tier <= farthest, (policy, kind)
    assert kept > len(policies) / 2


def test_units_without_room_on_the_host_stay_on_the_device():
    with torch.device("meta"):
        model = models.plain()
    policy = acc.Offload(optimizer="host", step="device")
    whole = estimate_memory(model, policy, 1)
    # Bytes of the states of the largest unit, rounded up to pages.
    largest = 2 * max(sum(4 * p.numel() + 4096 for p in unit.parameters()) for unit in [*model.blocks, model])
    for share in (0.0, 0.4, 0.8):
        budget = int(share * whole.host)
        estimate = estimate_memory(model, replace(policy, host_bytes=budget), 1)
        assert estimate.host_states <= budget < estimate.host_states + largest, "and no unit more than that"
        near = [not place.is_any for place in estimate.places]
        assert near == sorted(near, reverse=True), "the first units, which the next forward needs first"
    with pytest.raises(acc.UsageError, match="host_bytes=7 is less than the"):
        estimate_memory(model, replace(policy, host_bytes=7, device_bytes=whole.device), 1)
