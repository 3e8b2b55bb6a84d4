"""Programs of two ranks: rank 0 raises with a collective in flight that rank 1, which sleeps, never joins.

`python -m tests.support.fails_alone DEVICE FOLDER WHERE/MODE...` forks the ranks of all programs from this process, and prints
a JSON object: program -> (exit code of rank 0, its errors, True if rank 1 still slept when it ended). A forked rank ends as a
Python script does.
"""

from __future__ import annotations

import datetime
import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import accordion as acc
from accordion import _torch

TIMEOUT_S = 900.0  # of the process group
EXIT_S = 400.0  # for all programs on a busy machine
WIDTH = 320  # a weight is a message of its own: gloo sends it from rank to rank


class Block(nn.Module):
    """A residual block of two layers. `lacks`: the forward leaves out the second layer, so that this has no gradient."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor, *, lacks: bool) -> Tensor:
        return x + (self.a(x) if lacks else self.b(torch.relu(self.a(x))))


class Model(nn.Module):
    """Four blocks. `fails`: "": the model works; "forward" or "backward": `fail` is called there at block `at`. With ", absent
    gradients" after that, blocks lack gradients."""

    fails, at = "", 1

    def __init__(self, width: int, fail: Callable[[], None]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(4))
        self.fail = fail

    def forward(self, x: Tensor) -> Tensor:
        where, _, absent = self.fails.partition(", ")
        for i, block in enumerate(self.blocks):
            x = block(x, lacks=bool(absent))
            if where == "forward" and i == self.at:
                self.fail()
            if where == "backward" and i == self.at:
                x = x.view_as(x)  # a node of its own, so that the block's hooks run later
                x.register_hook(lambda grad: self.fail())
        return x


def end(rank: int) -> None:
    if rank:
        time.sleep(TIMEOUT_S)
    raise ValueError("this rank fails alone")


def train(rank: int, where: str, mode: str, device: str, folder: str) -> None:
    backend = "gloo" if device == "cpu" else f"cpu:gloo,{device}:simccl"
    if device != "cpu":
        torch.get_device_module(device).set_device(rank)
    store = dist.FileStore(f"{folder}/store", 2)
    timeout = datetime.timedelta(seconds=TIMEOUT_S)
    dist.init_process_group(backend, store=store, rank=rank, world_size=2, timeout=timeout)
    torch.manual_seed(0)
    offload = {
        "host": acc.Offload(params="host", optimizer="host"),
        "disk": acc.Offload(params=f"disk:{folder}", optimizer=f"disk:{folder}"),
        "activations": acc.Offload(activations="host"),
    }.get(mode)
    model = acc.shard(
        Model(WIDTH, partial(end, rank)).to(device),
        dist.init_device_mesh(device, (2,)),
        units=[Block],
        offload=offload,
        checkpoint_activations="full" if mode == "activations" else "none",
    )
    optimizer = acc.wrap_optimizer(torch.optim.AdamW(model.parameters()))
    x = torch.ones(4, WIDTH, device=device)
    for _ in range(3):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if mode == "save":
        acc.save(f"{folder}/save", model, optimizer, background=True).wait()
    dist.barrier()
    # The other rank ends one block earlier.
    model.fails, model.at = where, 1 - rank if where == "forward" else 1 + rank
    model(x).square().mean().backward()


def ended(pid: int, deadline: float) -> int | None:
    """Wait for a process and return its exit code; None if it still runs at `deadline`."""
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            return None
        time.sleep(0.05)


def main(device: str, path: str, *names: str) -> Callable[[], None] | None:
    """Fork the ranks of all programs `names`, print outcomes, and return None. In a forked rank return the function to call."""
    torch.set_num_threads(1)
    for name in _torch.PRELOADED:  # else each rank imports it for itself
        importlib.import_module(name)
    pids: dict[str, list[int]] = {name: [] for name in names}
    for i, name in enumerate(names):
        where, mode = name.split("/")
        folder = Path(path, str(i))
        folder.mkdir()
        for rank in range(2):
            pid = os.fork()
            if pid == 0:
                os.dup2(os.open(folder / f"rank{rank}", os.O_WRONLY | os.O_CREAT), 2)
                return partial(train, rank, where, mode, device, str(folder))
            pids[name].append(pid)
    deadline, outcomes = time.monotonic() + EXIT_S, {}
    for i, (name, (first, second)) in enumerate(pids.items()):
        code, still_sleeps = ended(first, deadline), ended(second, 0.0) is None
        outcomes[name] = (code, Path(path, str(i), "rank0").read_text(), still_sleeps)
        for pid, runs in ((first, code is None), (second, still_sleeps)):
            if runs:
                os.kill(pid, signal.SIGKILL)
    print(json.dumps(outcomes))
    return None


if __name__ == "__main__":
    job = main(*sys.argv[1:])
    if job is not None:
        job()
