"""Saves in which a rank ends, is suspended, or never joins, without a launcher that would end the others."""

import datetime
import os
import signal
import threading
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import accordion as acc
from accordion.checkpoint import background, save
from accordion.errors import AccordionError
from tests.pool import _begin, fork_context

TIMEOUT_S, SOON_S = 12.0, 8.0  # of the process group; for a peer whose connection is closed
SHORT_S = 5.0  # of a process group whose ranks wait for all of it


def plain(mesh):
    """Return a model of DTensors without an engine."""
    model = nn.Module()
    model.a = nn.Parameter(DTensor.from_local(torch.ones(4, 3), mesh, [Shard(0)], run_check=False))
    return model


def end_in_write(signal_number):
    """Kill this process in the middle of the file that it saves."""
    fsync = os.fsync

    def ends(handle):
        os.kill(os.getpid(), signal_number)
        fsync(handle)

    os.fsync = ends


def killed(rank, mesh, path, background):
    if rank == 1:
        end_in_write(signal.SIGKILL)
    model = plain(mesh)
    save(path, model, background=background).wait()


def killed_with_an_engine(rank, mesh, path):
    model = acc.shard(nn.Linear(4, 4), mesh)
    if rank == 1:
        end_in_write(signal.SIGKILL)
    save(path, model)


def killed_at_its_begin(rank, mesh, path):
    """Kill this process before the other ranks send it anything."""
    if rank == 1:
        background.ThreadAgreement.during = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    save(path, plain(mesh), background=True).wait()


def stopped(rank, mesh, path, background):
    """Suspend this process, which then neither ends nor answers."""
    if rank == 1:
        end_in_write(signal.SIGSTOP)
    save(path, plain(mesh), background=background).wait()


def ends_first(rank, mesh, path):
    """End the program while another rank neither ends nor answers."""
    if rank == 1:
        end_in_write(signal.SIGSTOP)
    background.GRACE_S = 1.0
    model = plain(mesh)
    save(path, model, background=True)
    background.saver_of(model).end()


def raises_before(rank, mesh, path, background):
    model = acc.shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), mesh)
    model(torch.ones(2, 4)).sum().backward()
    if rank == 1:
        raise ArithmeticError("before the save")
    save(path, model, background=background).wait()


def one_rank(rank, dump, port, num_ranks, timeout_s, work, args, told):
    _begin(dump)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    limit = datetime.timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=limit)
    mesh = DeviceMesh("cpu", list(range(num_ranks)))
    dist.barrier()
    begun = time.monotonic()
    try:
        work(rank, mesh, *args)
        text = ""
    except AccordionError as error:
        text = str(error)
    told.send((time.monotonic() - begun, text))


def ended(tmp_path, num_ranks, work, *args, timeout_s=TIMEOUT_S):
    """Return (seconds, error) of rank 0 and of each rank but the first two."""
    store, context = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), fork_context()
    pipes = [context.Pipe(duplex=False) for _ in range(num_ranks)]
    ranks = [
        context.Process(
            target=one_rank,
            args=(r, str(tmp_path / f"{r}.stack"), store.port, num_ranks, timeout_s, work, args, pipes[r][1]),
            daemon=True,
        )
        for r in range(num_ranks)
    ]
    for rank in ranks:
        rank.start()
    try:
        assert all(pipes[r][0].poll(60) for r in range(num_ranks) if r != 1), "a rank still waits"
        return [pipes[r][0].recv() for r in range(num_ranks) if r != 1]
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()


@pytest.mark.parametrize(("num_ranks", "work"), [(2, partial(killed, background=True)), (3, killed_at_its_begin)])
def test_rank_killed_in_a_background_save_is_named_at_once(tmp_path, num_ranks, work):
    for waited_s, text in ended(tmp_path, num_ranks, work, tmp_path / "c"):
        assert text.startswith("the checkpoint in the background was not written: rank 1 has ended without a report")
        assert waited_s < SOON_S
    assert not (tmp_path / "c").exists()


def test_rank_killed_in_a_save_gives_a_checkpoint_error(tmp_path):
    ((waited_s, text),) = ended(tmp_path, 2, killed, tmp_path / "c", False)
    assert text.startswith("another rank has ended, cannot be reached, or did not save or load in time")
    assert waited_s < SOON_S
    assert [name for name in os.listdir(tmp_path) if not name.endswith(".stack")] == []


def test_rank_killed_in_a_save_of_a_sharded_model_is_named(tmp_path):
    ((_, text),) = ended(tmp_path, 2, killed_with_an_engine, tmp_path / "c")
    assert "cannot agree on a checkpoint: rank 1 has ended without a report" in text


@pytest.mark.parametrize("background", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_suspended_rank_is_waited_for_until_the_process_group_times_out(tmp_path, background):
    ((waited_s, text),) = ended(tmp_path, 2, stopped, tmp_path / "c", background, timeout_s=SHORT_S)
    assert "other ranks did not finish" in text if background else "did not save or load in time" in text
    assert SHORT_S - 1 < waited_s < SHORT_S + 10


def test_ending_program_waits_for_other_ranks_until_the_grace_period_ends(tmp_path):
    ((waited_s, _),) = ended(tmp_path, 2, ends_first, tmp_path / "c")
    assert 1 <= waited_s < SOON_S
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("background", [False, True])
def test_wait_for_a_rank_that_raised_before_a_save_is_bounded(tmp_path, background):
    ((waited_s, text),) = ended(tmp_path, 2, raises_before, tmp_path / "c", background)
    assert text
    assert waited_s < TIMEOUT_S + 10
    assert not (tmp_path / "c").exists()


def background_saves(mesh, path):
    """Check that a background save leaves no thread and no descriptor, whether it succeeds or fails."""
    model = plain(mesh)
    save(path, model, background=True).wait()
    held = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        save(path, model, background=True).wait()
    return len(os.listdir("/proc/self/fd")) - held, [
        t.name for t in threading.enumerate() if t.name == "accordion-save"
    ]


def test_connections_of_background_saves_are_closed(world, tmp_path):
    assert world.run(3, background_saves, tmp_path / "c") == [(0, [])] * 3
