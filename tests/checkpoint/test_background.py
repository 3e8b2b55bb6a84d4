"""Background saves on several ranks, states of each rank, and saves after an exception."""

import errno
import os
import threading
from unittest import mock

import pytest
import torch
from torch import nn

import accordion as acc
from accordion.checkpoint import RandomState, latest
from accordion.checkpoint.background import ThreadAgreement
from accordion.engine.hooks import engine_of
from accordion.errors import CheckpointError
from tests.checkpoint.failing import failing
from tests.devices import device
from tests.support.checkpoints import equal_step, sharded
from tests.support.checks import assert_equal, everyone, full
from tests.support.ranked import on_world


@on_world(3)
def test_background_save_has_the_values_of_its_step(mesh, tmp_path):
    """The files are written after the model has taken more steps."""
    model, optimizer = sharded(mesh)
    equal_step(model, optimizer)
    gate, fsync = threading.Event(), os.fsync
    with mock.patch.object(os, "fsync", lambda handle: gate.wait(60) and fsync(handle)):
        saving = acc.save(tmp_path / "step-1", model, optimizer, state={"random": RandomState()}, background=True)
        drawn = torch.rand(3, device=device())
        losses = [equal_step(model, optimizer) for _ in range(3)]
        assert not saving.is_done
        assert latest(tmp_path) is None
        gate.set()
        acc.save(tmp_path / "step-4", model, optimizer, background=True)  # waits for the first
        assert saving.is_done
        again, other = sharded(mesh, "shard_grad_op", seed=1)
        acc.load(tmp_path / "step-1", again, other, state={"random": RandomState()})
        assert torch.equal(torch.rand(3, device=device()), drawn)
        assert [equal_step(again, other) for _ in range(3)] == pytest.approx(losses)
    acc.load(tmp_path / "step-4", again, other)
    assert equal_step(again, other) == pytest.approx(equal_step(model, optimizer))


def losses_and_draws(mesh, path, saves):
    """Save at the current step, or load; return the next losses and random numbers."""
    model, optimizer = sharded(mesh, seed=int(not saves))
    if saves:
        torch.manual_seed(mesh.get_rank() + 10)
        equal_step(model, optimizer)
    (acc.save if saves else acc.load)(path, model, optimizer, state={"random": RandomState()})
    drawn = torch.rand(3, device=device())
    return [equal_step(model, optimizer) for _ in range(3)], drawn.tolist()


def test_each_rank_gets_its_random_state_back(world, tmp_path):
    saved = world.run(3, losses_and_draws, tmp_path / "c", True)
    assert len({tuple(drawn) for _, drawn in saved}) == 3
    assert world.run(3, losses_and_draws, tmp_path / "c", False) == saved
    # The state of another number of ranks is rank 0's, for it alone.
    two = world.run(2, losses_and_draws, tmp_path / "c", False)
    assert two[0][1] == saved[0][1]
    assert two[1][1] not in [drawn for _, drawn in saved]
    assert two[0][0] == pytest.approx(saved[0][0], rel=1e-5)


@on_world(3)
def test_failed_background_save_raises_after_the_next_step_and_in_the_next_save(mesh, tmp_path):
    model, optimizer = sharded(mesh)
    acc.save(tmp_path / "step-1", model, optimizer)
    before = full(model)
    with failing(os, "fsync", errno.ENOSPC, lambda handle: mesh.get_rank() == 1):
        acc.save(tmp_path / "step-2", model, optimizer, background=True)._thread.join()
        with pytest.raises(CheckpointError) as caught:
            equal_step(model, optimizer)
        acc.save(tmp_path / "step-2", model, optimizer, background=True)._thread.join()
        with pytest.raises(CheckpointError, match="No space left"):
            acc.save(tmp_path / "step-3", model, optimizer)
    assert not torch.equal(before["embed.weight"], full(model)["embed.weight"])  # the step is done
    optimizer.zero_grad()
    equal_step(model, optimizer)  # an error is raised once, and ranks are still together
    acc.save(tmp_path / "step-3", model, optimizer, background=True).wait()
    error = str(caught.value)
    assert everyone(mesh, error) == [error] * 3
    assert "background was not written: rank 1: OSError: [Errno 28] No space left on device" in error
    assert sorted(os.listdir(tmp_path)) == ["step-1", "step-3"]


@on_world(2)
def test_all_ranks_raise_the_same_error_if_one_cannot_connect(mesh, tmp_path):
    def refuses(agreement):
        if mesh.get_rank() == 1:
            raise RuntimeError("can't start new thread")

    with (
        mock.patch.object(ThreadAgreement, "meet", refuses),
        pytest.raises(CheckpointError, match=r"^rank 1: RuntimeError: can't start"),
    ):
        acc.save(tmp_path / "c", sharded(mesh)[0], background=True)
    assert os.listdir(tmp_path) == []


@on_world(2)
def test_save_and_load_work_after_a_backward_that_raised(mesh, tmp_path):
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))

    def fails(grad):
        raise ArithmeticError("in the middle of a backward")

    inner[0].register_forward_hook(lambda module, inputs, output: output.register_hook(fails) and None)
    model = acc.shard(inner, mesh, units={nn.Linear})
    before = full(model)
    with pytest.raises(ArithmeticError, match="middle"):
        model(torch.ones(2, 4, device=device())).sum().backward()
    acc.save(tmp_path / "c", model)
    assert not any(unit.leases for unit in engine_of(model).units)
    with pytest.raises(ArithmeticError, match="middle"):
        model(torch.ones(2, 4, device=device())).sum().backward()
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    acc.load(tmp_path / "c", model)
    assert_equal(full(model), before)
