"""`engine/README.md` names every function that one parameter passes in a step, in order: traced here and compared."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import accordion as acc
from accordion import _torch
from accordion.workers.ranks import STILL, register_still
from tests.inside import hooks_in, unit_in

ENGINE = Path(acc.__file__).parent / "engine"
STEP = ("hooks", "calls", "unit", "group", "full_buffer", "gather", "autograd", "pending_reduce", "reduce")
"""The files that tell one step; what they call in others (orders, streams, trees of tensors) is left out of the walk."""


@pytest.fixture
def two_ranks() -> Iterator[None]:
    """The first of two ranks, whose collectives do nothing."""
    register_still()
    dist.init_process_group(STILL, store=_torch.fake_store(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def step(model: nn.Module) -> None:
    model(torch.randn(2, 8)).sum().backward()


def change(model: nn.Module) -> None:
    """As an optimizer's step does, and `zero_grad`."""
    for param in model.parameters():
        param.grad = None
    torch.autograd.graph.increment_version([unit_in(block).params[0].sharded for block in model])  # type: ignore[union-attr]


def traced(model: nn.Module, module: nn.Module) -> list[str]:
    """The functions of `STEP` that are called for the unit of `module` in one step, by the first call of each."""
    hooks, unit = hooks_in(module), unit_in(module)
    owned = {id(hooks), id(unit), *map(id, unit.groups), *[id(group.full_buffer) for group in unit.groups]}

    def is_for_the_unit(frame: FrameType | None) -> bool:
        while frame is not None and frame.f_globals["__name__"] != __name__:
            for name in ("self", "call", "unit", "ctx"):
                value: Any = frame.f_locals.get(name)
                call = getattr(value, "call", None)
                if id(value) in owned or unit in (getattr(value, "unit", None), getattr(call, "unit", None)):
                    return True
            frame = frame.f_back
        return False

    found: list[str] = []

    def watch(frame: FrameType, event: str, _: object) -> None:
        path, name = Path(frame.f_code.co_filename), frame.f_code.co_qualname
        is_step = (
            event == "call" and path.parent == ENGINE and path.stem in STEP and "<" not in name
        )  # no comprehensions
        if is_step and name not in found and is_for_the_unit(frame):
            found.append(name)

    sys.setprofile(watch)
    try:
        step(model)
    finally:
        sys.setprofile(None)
    return found


def walked() -> list[str]:
    """What the page names as functions of the step's files, in its order."""
    text = (ENGINE / "README.md").read_text()
    walk = text[text.index("## A walk") : text.index("## What may import it")]
    return list(dict.fromkeys(re.findall(r"`([A-Z]\w+\.\w+|hand_over)`", walk)))


@pytest.mark.cpu("a walk is one device's")
def test_the_walk_on_the_engines_page_is_what_runs(two_ranks: None) -> None:
    blocks = [nn.Sequential(nn.Linear(8, 8, bias=False)) for _ in range(4)]
    model = acc.shard(nn.Sequential(*blocks), units=lambda name, _: name.isdigit())
    for _ in range(2):
        step(model)
        change(model)
    assert traced(model, model[1]) == walked()  # type: ignore[index]
