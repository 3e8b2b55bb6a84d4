"""A plan's HTML page: what its charts and tables show."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import accordion as acc
from accordion.plan.cli.html import PIECES, as_html, memory_chart, streams_chart
from accordion.plan.cli.pages import of_plan
from tests.plan.builders import planned


def total(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).float().square().sum()


@pytest.fixture(scope="module")
def plan():
    model = nn.Sequential(*[nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(4)])
    return planned(model, total, torch.randn(4096, 256), gpus=2, strategy="full_shard", checkpoint_activations="none")


def test_the_longest_operator_name_is_broken_to_a_phones_width():
    name = "aten._scaled_dot_product_efficient_attention_backward.default"
    pieces = PIECES.findall(name)
    assert "".join(pieces) == name
    assert max(map(len, pieces)) < 40
    assert PIECES.findall("peak 13.4 GiB") == ["peak 13.4 GiB"]


def test_the_peak_label_does_not_extend_the_axis(plan):
    chart = memory_chart(plan)
    assert list(chart.layout.xaxis.range) == [0, len(chart.data[0].y) - 1]
    assert chart.layout.annotations[0].xref == "x domain"


def test_the_page_shows_what_its_figures_hold_for_and_marks_lower_bounds(plan):
    best = plan.found.best
    bounds = [replace(best, fits=False, memory=None, steps=None, least_bytes=n, bound="no") for n in (12 << 30, 0)]
    page = as_html(
        replace(plan, found=replace(plan.found, candidates=[best, *bounds]), task=replace(plan.task, vocab=512))
    )
    for said in (
        "sequence length 4,096, loss plain, computed in bfloat16, reduced in ",
        ", 1 node of 2 GPUs",
        "host memory: 2 TiB a node of 8, the usual one; host_memory_gib changes it",
        "batches/s per GPU",
        "over 12.0",
    ):
        assert said in page
    assert ">0.0<" not in page


def test_a_small_models_bytes_are_shown_with_enough_digits(plan):
    table = next(t for t in of_plan(plan).tables if t.title.startswith("where the bytes go"))
    shown = {row[0]: float(row[1]) for row in table.rows}
    assert all(shown[key] > 0 for key in ("parameters", "optimizer", "activations", "all"))
    assert sum(shown.values()) == pytest.approx(2 * shown["all"], abs=0.004)


def test_the_chart_has_every_stream():
    """FSDP2 has one more, which copies; offload has those of copies, host and disk. All work is on one of them."""
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 64)) for _ in range(3)])
    fixed = {"gpus": 2, "checkpoint_activations": "none", "strategy": "full_shard", "units": acc.only_blocks()}
    ours = {"compute", "gather", "reduce"}
    for options, streams in (
        ({}, ours),
        ({"engine": "fsdp2"}, {*ours, "copy in"}),
        ({"offload": "optimizer=host"}, {*ours, "fetch", "store", "host", "host step"}),
        ({"offload": "params=host,optimizer=disk:/x"}, {*ours, "fetch", "store", "host", "host step", "disk"}),
    ):
        made = planned(model, total, torch.randn(64, 64), **options, **fixed)
        drawn = {bar.name for bar in streams_chart(made).data}
        assert streams == drawn == {s.stream for s in made.chosen.steps["middle"].stretches}
