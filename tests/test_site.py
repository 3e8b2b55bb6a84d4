"""The documentation site: its navigation, its API reference, its pictures, and the figures of docs/strategies.md."""

from __future__ import annotations

import contextlib
import re
import runpy
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import accordion as acc
from accordion.bench.meters import Wire
from accordion.config import STRATEGIES
from tests import pool

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"


def pages_of(part: Any) -> list[str]:
    """Return the pages in a part of the navigation, in order."""
    if isinstance(part, str):
        return [part]
    parts = part.values() if isinstance(part, dict) else part
    return [page for inner in parts for page in pages_of(inner)]


def test_the_navigation_has_every_page_once() -> None:
    listed = pages_of(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"])
    assert len(listed) == len(set(listed))
    assert {f"docs/{page.name}" for page in DOCS.glob("*.md")} <= set(listed)
    assert all((ROOT / page).is_file() for page in listed)


def test_the_reference_has_every_public_name_once() -> None:
    assert sorted(re.findall(r"^::: accordion[\w.]*\.(\w+)$", (DOCS / "api.md").read_text(), re.MULTILINE)) == sorted(
        acc.__all__
    )


def test_the_pictures_are_those_that_the_script_draws() -> None:
    pictures = runpy.run_path(str(DOCS / "draw.py"))["PICTURES"]
    outdated = [name for name, draw in pictures.items() if (DOCS / f"{name}.svg").read_text(encoding="utf-8") != draw()]
    assert not outdated, "run: python docs/draw.py"


def sent_by_strategy(mesh: DeviceMesh) -> dict[str, list[str]]:
    """Return what one rank sends in a step, as a multiple of the model: of one micro-batch, and of four."""
    nodes = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
    return {
        name: [sent(nodes if strategy.hybrid else mesh, name, count) for count in (1, 4)]
        for name, strategy in STRATEGIES.items()
    }


def sent(mesh: DeviceMesh, strategy: str, micro_batches: int) -> str:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256, bias=False), nn.ReLU()) for _ in range(20)))
    num_bytes = sum(p.nbytes for p in model.parameters())
    acc.shard(model, mesh, strategy=strategy, units=acc.min_params(256 * 256))
    optimizer = acc.wrap_optimizer(torch.optim.SGD(model.parameters()))
    for _ in range(2):  # the second step is counted
        with Wire() as wire:
            for i in range(micro_batches):
                with acc.no_sync(model) if i < micro_batches - 1 else contextlib.nullcontext():
                    model(torch.randn(2, 256)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return f"{sum(wire.num_bytes.values()) / num_bytes:.2f}"


def test_a_rank_sends_what_the_page_on_strategies_says() -> None:
    page = (DOCS / "strategies.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| [^|]+ \| `(\w+)`[^|]* \| ([\d.]+) \| ([\d.]+) \|$", page, re.MULTILINE)
    assert {name: numbers for name, *numbers in rows} == pool.run_fake(8, 0, sent_by_strategy)
