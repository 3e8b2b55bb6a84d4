"""What `Offload` takes and refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

import accordion as acc


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"params": "hots"}, r"params='hots'\) is no place; did you mean 'host'"),
        ({"optimizer": "gpu"}, r"optimizer='gpu'\) is no place; valid: device, host, disk:/path"),
        ({"optimizer": "disk:"}, r"optimizer='disk:'\) is no place"),
        ({"params": "disk:"}, r"params='disk:'\) is no place; did you mean"),
        ({"step": "hots"}, r"step='hots'\) is no place to step; did you mean 'host'"),
        ({"device_bytes": 7}, r"Offload\(device_bytes=7\) says how much"),
        ({"host_bytes": -1, "optimizer": "host"}, r"Offload\(host_bytes=-1\) says how much"),
        ({"step": "host"}, "pass optimizer='host' too, or step='device'"),
        ({"grads": "device", "optimizer": "host"}, "leave out grads, or pass params='device' and step='device'"),
        ({"grads": "device", "params": "disk:/tmp"}, "leave out grads, or pass params='device' and step='device'"),
    ],
)
def test_places_that_make_no_sense_are_refused(options, message):
    with pytest.raises(acc.UsageError, match=message):
        acc.Offload(**options)


def test_what_offloads():
    assert not acc.Offload().offloads
    assert acc.Offload(optimizer="host").offloads
    assert acc.Offload(params="host", grads="host", optimizer="host").offloads


def test_the_folder_of_states():
    assert acc.Offload(optimizer="disk:/scratch/swap").folder == Path("/scratch/swap")
    assert acc.Offload(optimizer="host").folder is None
