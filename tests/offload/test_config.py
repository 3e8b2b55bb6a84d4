"""The values that `Offload` accepts and refuses."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import accordion as acc
from accordion.offload.budget import estimate_memory
from tests.offload.test_places import PLACES, combinations
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
