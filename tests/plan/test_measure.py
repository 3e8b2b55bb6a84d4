"""Measuring the machine: what is stored, that a plan takes it, and files that hold no card."""

from __future__ import annotations

import os

import pytest
import torch

import accordion as acc
from accordion.plan.cli import measure
from accordion.plan.events import Collective, Op
from accordion.plan.hardware import GB, REACHED, Cluster, gpu_named
from accordion.plan.replay.cost import costs_of
from tests.plan.test_plan import total

TINY = measure.MeasureSizes(products=(64, 96), seq=64, copy_bytes=1 << 20, message_bytes=1 << 16, seconds=0.01)


def test_a_machine_is_measured_and_planned_with(tmp_path):
    found = measure.measured("cpu", 2, TINY)
    path = tmp_path / "here" / "measured.json"
    measure.write(found, path)
    card = gpu_named(str(path))
    assert card.name == "measured cpu"
    assert gpu_named(str(path), memory_gib=7).memory_gib == 7

    seen = found["measured"]
    costs = costs_of(Cluster(gpu=card), REACHED["high"], 2, hybrid=False)  # at the high rates: what was measured
    copied = Op("aten.copy_.default", 0.0, int(seen["copies_gbps"] * GB), "bfloat16", "compute")
    assert costs.of(copied) == pytest.approx(1.0, rel=1e-3)
    product = Op("aten.mm.default", max(seen["products_tflops"]["bfloat16"].values()) * 1e12, 0, "bfloat16", "compute")
    assert costs.of(product) == pytest.approx(1.0)
    attention = Op("aten._attention", seen["attention_tflops"] * 1e12, 0, "bfloat16", "compute")
    assert costs.of(attention) == pytest.approx(1.0)
    gathered = Collective("gather", int(seen["gathers_gbps"] * GB * 2), "shard", "gather")
    assert costs.of_collective(gathered) == pytest.approx(1.0 + card.latency_s, rel=1e-3)

    shown = measure.of_measured(found, path)
    assert len(shown.tables[0].rows) == 9
    made = acc.plan(torch.nn.Linear(64, 64), total, torch.randn(4, 64), gpu=card, gpus=2, strategy="full_shard")
    assert made.as_dict()["hardware"]["source"].startswith("measured, 2 ranks")


def test_a_place_where_nothing_can_be_stored_is_told_of(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(acc.UsageError, match=r"cannot be stored.*--measured-file"):
        measure.write({}, tmp_path / "file" / "measured.json")


@pytest.mark.parametrize("text", ["", "[]", '{"card": {"name": "x"}}', '{"card": {"speed": 1}}'])
def test_a_file_without_a_card_is_told_of(tmp_path, text):
    path = tmp_path / "m.json"
    path.write_text(text)
    with pytest.raises(acc.UsageError, match="holds no measured card"):
        gpu_named(str(path))
    with pytest.raises(acc.UsageError, match="accordion plan --measure"):
        gpu_named(str(tmp_path / "none.json"))


@pytest.mark.usefixtures("no_waiting")
def test_a_pipe_is_no_card(tmp_path):
    path = tmp_path / "m.json"
    os.mkfifo(path)
    with pytest.raises(acc.UsageError, match=r"m\.json holds no measured card .*no regular file"):
        gpu_named(str(path))
