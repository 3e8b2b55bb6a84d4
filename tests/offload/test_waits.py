"""Calls that wait for a step under way: all that return, save, change or clip parameters, gradients or states."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import accordion as acc
from tests.support import models
from tests.support.checks import one_loss
from tests.support.offloads import HOST, disk, disk_of_all, fresh
from tests.support.reference import local_of, params_of

Ask = Callable[[nn.Module, Optimizer, Path], list[Any]]


def rows(state: dict[str, Any]) -> list[Tensor]:
    return [local_of(value).clone() for value in state.values()]


def states_of(optimizer: Optimizer) -> list[Tensor]:
    return [local_of(v).clone() for entry in optimizer.state_dict()["state"].values() for v in entry.values()]


def loaded_into_a_part(model: nn.Module, optimizer: Optimizer, path: Path) -> list[Any]:
    acc.synchronize(model)
    kept = {name: value.clone() for name, value in model.blocks[1].up.state_dict().items()}
    optimizer.step()
    model.blocks[1].up.load_state_dict(kept)
    return []


def in_the_registry(model: nn.Module, optimizer: Optimizer, path: Path) -> list[Any]:
    with acc.full_params(model):
        return [p.detach().clone() for p in model.parameters()]


def saved(model: nn.Module, optimizer: Optimizer, path: Path) -> list[Any]:
    acc.save(path, model, optimizer)
    other, its = fresh(next(model.parameters()).device_mesh, seed=5)
    acc.load(path, other, its)
    return [*params_of(other).values(), *states_of(its)]


def restored(model: nn.Module, optimizer: Optimizer, path: Path) -> list[Any]:
    acc.save(path, model, optimizer)
    optimizer.step()
    acc.load(path, model, optimizer)
    return states_of(optimizer)


def stepped_again(model: nn.Module, optimizer: Optimizer, path: Path) -> list[Any]:
    optimizer.step()
    acc.synchronize(model)
    return states_of(optimizer)


FOR_ALL: dict[str, Ask] = {
    "state dict": lambda model, optimizer, path: rows(model.state_dict()),
    "loaded": lambda model, optimizer, path: model.load_state_dict(models.seeded(9).state_dict()) and [],
    "states": lambda model, optimizer, path: states_of(optimizer),
    "states loaded": lambda model, optimizer, path: optimizer.load_state_dict(optimizer.state_dict()) or [],
    "full state dict": lambda model, optimizer, path: list(acc.full_state_dict(model, rank0_only=False).values()),
    "full parameters": in_the_registry,
    "saved": saved,
    "restored": restored,
    # The gradients that the step reads are scaled after it.
    "clipped": lambda model, optimizer, path: [acc.clip_grad_norm_(model, 1e-3)],
    "cleared": lambda model, optimizer, path: optimizer.zero_grad(set_to_none=False) or [],
    "asked": lambda model, optimizer, path: acc.synchronize(model) or [],
    "stepped again": stepped_again,
}
FOR_A_PART: dict[str, Ask] = {
    "a unit's": lambda model, optimizer, path: rows(model.blocks[1].state_dict()),
    "of a part of a unit": lambda model, optimizer, path: rows(model.blocks[1].up.state_dict()),
    "loaded into a part": loaded_into_a_part,
}
PART = "blocks.1.up."


def waits(mesh, path: Path) -> None:
    """With debug="streams" shards are NaN until a call waits; after each call none is, and results are as without offload.

    Each call is tested in one tier, in turn.
    """
    places = HOST, disk(path), disk_of_all(path)
    for which, (name, way) in enumerate({**FOR_ALL, **FOR_A_PART}.items()):
        found = []
        for i, offload in enumerate((None, places[which % len(places)])):
            model, optimizer = fresh(mesh, offload=offload, debug=() if offload is None else ("streams",))
            one_loss(model).backward()
            optimizer.step()
            if offload is not None:
                assert all(local_of(p).isnan().all() for p in model.parameters()), "a step is under way"
            said = way(model, optimizer, path / f"{name} {i}")
            missed = [n for n, p in model.named_parameters() if local_of(p).isnan().any()]
            assert not [n for n in missed if name in FOR_ALL or n.startswith(PART)], (name, offload)
            acc.synchronize(model)
            found.append([*said, *params_of(model).values()])
        assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(*found, strict=True)), name


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_calls_that_need_a_step_wait_for_it(world, num_ranks, tmp_path):
    world.run(num_ranks, waits, tmp_path, timeout_s=300)
