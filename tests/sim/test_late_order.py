"""A rank that leaves the order of the last passes: the others are in collectives of their device, where nobody can ask them."""

from __future__ import annotations

import logging
from unittest import mock

import pytest
import torch

import accordion as acc
from accordion.safety import divergence
from accordion.safety.liveness import hub
from tests.support import models
from tests.support.checks import batch, logged

pytestmark = pytest.mark.sim


def leaves_late(mesh, log: str) -> None:
    model = acc.shard(models.plain(), mesh, units={models.Block})
    tokens, _ = batch(model)
    for _ in range(6):
        model(tokens).square().mean().backward()
        model.zero_grad()
    torch.accelerator.synchronize()
    logging.getLogger("accordion").addHandler(logging.FileHandler(f"{log}/{mesh.get_local_rank()}"))
    with (
        mock.patch.multiple(divergence, REPORT_AFTER_S=0.1, POLL_S=0.05, LOST_S=6.0),
        mock.patch.object(hub, "NAMED_S", 1.0),
        logged() as said,
    ):
        try:
            model(tokens, skip=() if mesh.get_local_rank() else (1,)).square().mean().backward()
        except acc.DivergenceError as error:
            raise AssertionError("; ".join([*said, str(error)])) from None
        torch.accelerator.synchronize()  # for good


def test_who_waits_says_what_each_does_and_who_waits_on_its_device_is_told_by_a_thread(world, tmp_path):
    with pytest.raises(
        AssertionError, match=r"rank 1 .* at test_late_order.py:\d+ .* ranks have made no progress"
    ) as found:
        world.run(2, leaves_late, str(tmp_path))
    assert divergence.CANNOT_ASK in str(found.value)
    said = (tmp_path / "1").read_text()
    assert "rank 0 enters unit 3 (blocks.2) in its forward" in said
    assert "`torch.accelerator.synchronize()  # for good` and may wait for it on its device" in said
