"""The values that `Offload` accepts and refuses."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
import torch

import accordion as acc
from accordion.offload.budget import MemoryEstimate, estimate_memory
from tests.support import models


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
        ({"step": "host"}, "pass optimizer='host' too, or step='device'"),
        ({"grads": "device", "optimizer": "host"}, "leave out grads, or pass params='device' and step='device'"),
        ({"grads": "device", "params": "disk:/tmp"}, "leave out grads, or pass params='device' and step='device'"),
    ],
)
def test_places_that_make_no_sense_are_refused(options, message):
    with pytest.raises(acc.UsageError, match=message):
        acc.Offload(**options)


PLACES = ("device", "host", "disk:/scratch")


def policies() -> list[acc.Offload]:
    """Return every combination of tiers that has a meaning."""
    found = []
    for params, grads, optimizer, step in itertools.product(PLACES, (None, *PLACES), PLACES, (None, "device", "host")):
        try:
            found.append(acc.Offload(params=params, grads=grads, optimizer=optimizer, step=step))
        except acc.UsageError:
            continue
    return [policy for policy in found if policy.is_any]


def test_budgets_of_any_size_are_kept_or_refused_and_move_nothing_farther():
    """The model's parameters are smaller than pages, to which states that are stepped chunk by chunk are rounded up."""
    with torch.device("meta"):
        model = models.frozen()
    drawn, kept = random.Random(0), 0
    for policy in policies():
        most = estimate_memory(model, policy, 2).host + estimate_memory(model, acc.Offload(), 2).device
        device, host = (drawn.choice((None, 1, drawn.randrange(most), most)) for _ in range(2))
        said = unless_refused(model, replace(policy, device_bytes=device, host_bytes=host))
        if said is None:
            continue
        kept += 1
        assert device is None or said.device <= device, (policy, device, host)
        assert host is None or said.arena + said.host_states <= host, (policy, device, host)
        for kind, place in itertools.product(("params", "rest_of_grads", "optimizer"), said.places):
            assert PLACES.index(getattr(place, kind)) <= PLACES.index(getattr(policy, kind)), (policy, kind)
    assert kept > len(policies()) / 2


def unless_refused(model: torch.nn.Module, policy: acc.Offload) -> MemoryEstimate | None:
    try:
        return estimate_memory(model, policy, 2)
    except acc.UsageError as error:
        if "is less than the" not in str(error):
            raise
        return None


def test_units_without_room_on_the_host_stay_on_the_device():
    with torch.device("meta"):
        model = models.plain()
    policy = acc.Offload(optimizer="host", step="device")
    whole = estimate_memory(model, policy, 1)
    for share in (0.0, 0.4, 0.8):
        budget = int(share * whole.host)
        said = estimate_memory(model, replace(policy, host_bytes=budget), 1)
        assert said.host_states <= budget < said.host_states + max_states(model), "and no unit more than that"
        near = [not place.is_any for place in said.places]
        assert near == sorted(near, reverse=True), "the first units, which the next forward needs first"
    with pytest.raises(acc.UsageError, match="host_bytes=7 is less than the"):
        estimate_memory(model, replace(policy, host_bytes=7, device_bytes=whole.device), 1)


def max_states(model: torch.nn.Module) -> int:
    """Return the bytes of the states of the largest unit, rounded up to pages."""
    return 2 * max(sum(4 * p.numel() + 4096 for p in block.parameters()) for block in [*model.blocks, model])
