"""Saves in which a rank ends, is suspended, or never joins, without a launcher that would end the others."""

import datetime
import math
import os
import random
import re
import signal
import threading
import time
from contextlib import contextmanager, suppress
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import accordion as acc
from accordion.checkpoint import background, latest, load, save, writing
from accordion.checkpoint.reading import verify
from accordion.errors import AccordionError
from tests.pool import _begin, fork_context
from tests.support.ranked import on_world

TIMEOUT_S, SOON_S = 12.0, 8.0  # of the process group; for a peer whose connection is closed
SHORT_S = 5.0  # of a process group whose ranks wait for all of it


class Filled(nn.Module):
    """A model whose elements are all `value`, the number of a save, so that a mixture of two saves would show."""

    def __init__(self, mesh=None, value=0.0):
        super().__init__()
        rows = 6 if mesh is None else 6 // mesh.size()
        for name, width in (("a", 3), ("b", 2000), ("c", 7)):
            whole = torch.full((rows, width), float(value))
            if mesh is not None:
                whole = DTensor.from_local(whole, mesh, [Shard(0)], run_check=False)
            setattr(self, name, nn.Parameter(whole))


def one_rank(rank, dump, port, num_ranks, timeout_s, work, args, pipe):
    _begin(dump)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    limit = datetime.timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=limit)
    mesh = DeviceMesh("cpu", list(range(num_ranks)))
    dist.barrier()
    work(rank, mesh, pipe, *args)


@contextmanager
def ranks_that_may_end(folder, num_ranks, timeout_s, work, *args):
    """Start ranks that call `work(rank, mesh, pipe, *args)`; yield the processes and the pipes from them, and kill them."""
    store, context = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), fork_context()
    pipes = [context.Pipe(duplex=False) for _ in range(num_ranks)]
    ranks = []
    for r, (_, theirs) in enumerate(pipes):
        words = (r, str(folder / f"{r}.stack"), store.port, num_ranks, timeout_s, work, args, theirs)
        ranks.append(context.Process(target=one_rank, args=words, daemon=True))
        ranks[-1].start()
    try:
        yield ranks, [ours for ours, _ in pipes]
    finally:
        for rank, (_, theirs) in zip(ranks, pipes, strict=True):
            rank.kill()
            rank.join()
            theirs.close()


# -- one rank ends in the middle of a save, or is not there


def sharded(mesh):
    return acc.shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), mesh)


def end_in_write(rank, number):
    """Have rank 1 get the signal `number` in the middle of the file that it saves."""
    fsync = os.fsync
    if rank == 1:
        os.fsync = lambda handle: (os.kill(os.getpid(), number), fsync(handle))


def signalled_in_write(rank, mesh, path, number, build=Filled, background=False):
    model = build(mesh)
    end_in_write(rank, number)
    save(path, model, background=background).wait()


def killed_at_its_begin(rank, mesh, path):
    """Kill rank 1 before the other ranks send it anything."""
    if rank == 1:
        background.ThreadAgreement.during = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    save(path, Filled(mesh), background=True).wait()


def ends_first(rank, mesh, path):
    """End the program while another rank neither ends nor answers."""
    background.GRACE_S = 1.0
    end_in_write(rank, signal.SIGSTOP)
    model = Filled(mesh)
    save(path, model, background=True)
    background.saver_of(model).end()


def raises_before(rank, mesh, path, background):
    model = sharded(mesh)
    model(torch.ones(2, 4)).sum().backward()
    if rank == 1:
        raise ArithmeticError("before the save")
    save(path, model, background=background).wait()


def timed(rank, mesh, pipe, work, path):
    """Send how many seconds `work` took, and its error."""
    begun, text = time.monotonic(), ""
    try:
        work(rank, mesh, path)
    except AccordionError as error:
        text = str(error)
    pipe.send((time.monotonic() - begun, text))


KILLED = partial(signalled_in_write, number=signal.SIGKILL)
STOPPED = partial(signalled_in_write, number=signal.SIGSTOP)
NAMED = "^the checkpoint in the background was not written: rank 1 has ended without a report"
SHORT = (SHORT_S - 1, SHORT_S + 10)
ENDS = {  # number of ranks, what they do, the error of the others, and the limits of their wait in seconds
    "killed in the background": (2, partial(KILLED, background=True), NAMED, (0, SOON_S)),
    "killed at its begin": (3, killed_at_its_begin, NAMED, (0, SOON_S)),
    "killed": (2, KILLED, "^another rank has ended, cannot be reached, or did not save or load in time", (0, SOON_S)),
    "killed with an engine": (
        2,
        partial(KILLED, build=sharded),
        "cannot agree on a checkpoint: rank 1 has ended without a report",
        (0, math.inf),
    ),
    "suspended": (2, STOPPED, "did not save or load in time", SHORT),
    "suspended in the background": (2, partial(STOPPED, background=True), "other ranks did not finish", SHORT),
    "suspended as the program ends": (2, ends_first, "", (1, SOON_S)),
    "raises": (2, partial(raises_before, background=False), ".", (0, TIMEOUT_S + 10)),
    "raises, background": (2, partial(raises_before, background=True), ".", (0, TIMEOUT_S + 10)),
}
SLOW = "suspended in the background"


@pytest.mark.parametrize("end", [pytest.param(end, marks=pytest.mark.slow) if end == SLOW else end for end in ENDS])
def test_a_rank_that_ends_or_stops_is_waited_for_within_limits(tmp_path, end):
    """The others raise, within seconds if the rank is dead, and within the timeout of the process group if it is not."""
    num_ranks, work, error, (least_s, most_s) = ENDS[end]
    timeout_s = SHORT_S if most_s == SHORT[1] else TIMEOUT_S
    with ranks_that_may_end(tmp_path, num_ranks, timeout_s, timed, work, tmp_path / "c") as (_, pipes):
        others = [pipe for r, pipe in enumerate(pipes) if r != 1]
        assert all(pipe.poll(60) for pipe in others), "a rank still waits"
        for waited_s, text in [pipe.recv() for pipe in others]:
            assert re.search(error, text)
            assert least_s <= waited_s < most_s
        assert [name for name in os.listdir(tmp_path) if not name.endswith(".stack")] == []


# -- a rank is killed at any instant

SAVES, KILLABLE = 4, ("pwrite", "fsync", "rename", "mkdir", "rmdir", "unlink")


def saves_until_killed(rank, mesh, pipe, folder, name, background, dies):
    """Save again and again; kill the rank that `dies` names at its n-th call of a function that changes the disk."""
    left = [dies[1] if dies[0] == rank else -1]

    def mortal(call):
        def wrapped(*args, **kwargs):
            left[0] -= 1
            if left[0] == 0:
                if call is real["pwrite"]:
                    call(args[0], args[1][: len(args[1]) // 2], args[2])  # inside of a file
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return wrapped

    real = {what: getattr(os, what) for what in KILLABLE}
    for what, call in real.items():
        setattr(os, what, mortal(call))
    writing.SUMMED_BYTES = 4096  # so that a file is written in many parts
    model = Filled(mesh)
    for k in range(1, SAVES + 1):
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(k)
        save(folder / (name or f"step-{k}"), model, extra=k, background=background, keep=0 if name else 2).wait()
        pipe.send(k)


def killed(folder, seed):
    """Run until a kill at a random instant; return what the run had reported, and what it left on the disk."""
    rng = random.Random(seed)
    name, background = rng.choice(["", "last"]), rng.random() < 0.5
    dies = rng.randrange(2), rng.randint(1, 45)
    (folder / "run").mkdir()
    work = (saves_until_killed, folder / "run", name, background, dies)
    with ranks_that_may_end(folder, 2, 300.0, *work) as (ranks, pipes):
        ranks[dies[0]].join(60)
    done = 0
    for pipe in pipes:
        with suppress(EOFError):
            while True:
                done = max(done, pipe.recv())
    return name, done


def assert_whole(folder, name, done, what):
    """Check that the newest checkpoint is whole, and not older than the last one that was reported."""
    newest = latest(folder / "run")
    if newest is None:
        assert done == 0, what
        save(folder / "run" / (name or "step-1"), Filled(), extra=1)  # the lock died with its owner
        return
    assert verify(newest) == [], what
    model = Filled()
    k = load(folder / "run" / name if name else newest, model)
    assert k >= done, what
    assert all((param == k).all() for param in model.parameters()), what
    with_manifest = [p for p in (folder / "run").iterdir() if p.name[0] != "." and (p / "manifest.json").exists()]
    assert all(verify(path) == [] for path in with_manifest), what
    save(folder / "run" / (name or f"step-{k + 1}"), Filled(), extra=k + 1)  # the lock died with its owner
    assert load(latest(folder / "run"), model) == k + 1, what


@pytest.mark.parametrize("count", [4, pytest.param(200, marks=pytest.mark.slow)])
def test_killed_save_is_complete_or_absent(tmp_path, count):
    outcomes = set()
    for seed in range(100, 100 + count):
        folder = tmp_path / str(seed)
        folder.mkdir()
        name, done = killed(folder, seed)
        assert_whole(folder, name, done, f"seed {seed}")
        outcomes.add(done)
    assert count < 200 or outcomes >= {0, 1, 2, 3}


@on_world(3)
def test_background_saves_leave_no_thread_and_no_descriptor(mesh, tmp_path):
    model = Filled(mesh)
    save(tmp_path / "c", model, background=True).wait()
    num_open = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        save(tmp_path / "c", model, background=True).wait()
    assert len(os.listdir("/proc/self/fd")) == num_open
    assert [t.name for t in threading.enumerate() if t.name == "accordion-save"] == []
