"""The debug mode of lifetimes: planted faults do not pass for results. The whole contract holds under it: test_grid.py.

On CPU the mode starts a communication when it is waited for, and fills what is let go with NaN instead of freeing it. So a
read after the release, or before the wait, finds NaN. Without the mode both find what malloc has: often the very numbers
that stood there before, which is why such faults live long. Plants are undone at once: ranks serve all tests.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from unittest import mock

import pytest
import torch

import accordion as acc
from accordion import _torch
from accordion.engine.autograd import Call
from accordion.engine.streams import Transfer
from accordion.engine.unit import Unit
from tests.inside import units_of
from tests.support import models
from tests.support.checks import go_on, one_loss
from tests.support.ranked import on_strategy, on_world
from tests.support.reference import local_of

# -- planted faults

FAULTY = "blocks.1"
Plant = Callable[[], contextlib.AbstractContextManager[object]]


def released_too_early() -> contextlib.AbstractContextManager[object]:
    """The lease ends when it begins: module and backward read what was let go."""
    plain = Unit.acquire

    def acquire(unit: Unit) -> int:
        version = plain(unit)
        if unit.name == FAULTY:
            unit.release()
            unit.leases += 1
        return version

    return mock.patch.object(Unit, "acquire", acquire)


def backward_without_a_lease() -> contextlib.AbstractContextManager[object]:
    """The backward counts a lease and gathers nothing."""
    plain = Call.begin

    def count(unit: Unit) -> int:
        unit.leases += 1
        return unit.version()

    def begin(call: Call, *args: object) -> None:
        with mock.patch.object(Unit, "acquire", count) if call.unit.name == FAULTY else contextlib.nullcontext():
            plain(call, *args)

    return mock.patch.object(Call, "begin", begin)


def without_wait(doing: str) -> Plant:
    """Nobody waits for communications that are `doing` so: they never land, their buffers are dropped where they should."""
    plain = Transfer.land

    def land(transfer: Transfer) -> None:
        if not transfer._what.startswith(doing):
            plain(transfer)

    return lambda: mock.patch.object(Transfer, "land", land)


SHARDED = ("full_shard", "shard_grad_op", "hybrid_shard_optim")
FAULTS: dict[str, tuple[Plant, tuple[str, ...]]] = {  # the fault, strategies under which it is one
    "released_too_early": (released_too_early, SHARDED),
    "backward_without_a_lease": (backward_without_a_lease, ("full_shard", "hybrid_shard_optim")),
    "gather_without_wait": (without_wait("gathers"), (*SHARDED, "shard_optim")),
    "reduce_without_wait": (without_wait("reduces"), ()),  # raises, and has a test of its own
}


def step(mesh, strategy: str, fault: str) -> tuple[bool, bool]:
    """Run a step with `fault` after one without; return True for a finite loss, and True if all its gradients are finite."""
    model = acc.shard(models.plain(), mesh=mesh, strategy=strategy, debug="streams")
    optimizer = acc.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    go_on(model, optimizer, [0])
    with FAULTS[fault][0]():
        loss = one_loss(model)
        loss.backward()
    return bool(loss.isfinite()), all(bool(local_of(p.grad).isfinite().all()) for p in model.parameters())


BY_CHANCE = pytest.mark.cpu(
    "in streams it comes in time by chance, and a device that has asserted runs nothing any more"
)


@pytest.mark.parametrize(
    ("fault", "strategy"),
    [
        pytest.param(fault, name, marks=() if fault == "released_too_early" else BY_CHANCE)
        for fault, (_, names) in FAULTS.items()
        for name in names
    ],
)
@on_strategy
def test_a_planted_fault_gives_nan_and_not_plausible_numbers(mesh, fault: str, strategy: str) -> None:
    loss_is_finite, grads_are_finite = step(mesh, strategy, fault)
    assert not grads_are_finite
    # before the backward the loss is that of full parameters in memory
    assert loss_is_finite == (fault == "backward_without_a_lease")


@pytest.mark.cpu("a device that has asserted runs nothing any more")
@pytest.mark.parametrize("strategy", ["full_shard", "no_shard", "hybrid_shard"])
@on_strategy
def test_a_reduce_that_nobody_waits_for_does_not_pass(mesh, strategy: str) -> None:
    """The sums over ranks never arrive. Their tags are among them, and the first to be read is wrong."""
    with contextlib.suppress(acc.DivergenceError):
        assert not all(step(mesh, strategy, "reduce_without_wait"))


# -- the mode itself


@pytest.mark.parametrize("strategy", ["full_shard", "hybrid_shard"])
@pytest.mark.parametrize("when", ["forward", "backward"])
@on_strategy
def test_a_lease_that_ends_twice_is_an_error_that_names_the_unit(mesh, strategy: str, when: str) -> None:
    """In the forward (the release of `after`), or in the backward."""
    model = acc.shard(models.plain(), mesh=mesh, strategy=strategy, debug="streams")
    plain = Unit.release

    def release(unit: Unit) -> None:
        plain(unit)
        if unit.name == FAULTY and (_torch.current_graph_task() == -1) == (when == "forward"):
            plain(unit)

    with mock.patch.object(Unit, "release", release), pytest.raises(AssertionError, match=f"{FAULTY}.*released more"):
        one_loss(model).backward()


@pytest.mark.cpu("it reads what a stream is writing")
@on_world(2)
def test_nothing_arrives_before_it_is_waited_for_and_nothing_stays_after(mesh) -> None:
    """For each unit gathered ahead: whether its numbers were there before and after somebody waited for it."""
    model = acc.shard(models.plain(), mesh=mesh, debug="streams")
    for _ in range(2):  # what comes next is known from the first on
        one_loss(model).backward()
    plain, found = Unit._land, []

    def land(unit: Unit) -> None:
        waits, early = unit.is_unsharded and not unit.is_full, all(bool(view.isfinite().all()) for view in unit.views)
        plain(unit)
        if waits:
            found.append((early, all(bool(view.isfinite().all()) for view in unit.views)))

    with mock.patch.object(Unit, "_land", land):
        one_loss(model)
    for unit in units_of(model):
        standing = unit.leases > 0
        assert all(bool(view.isnan().any()) != standing for view in unit.views), f"{unit.name} after a forward"
    assert found
    assert all(moment == (False, True) for moment in found)
