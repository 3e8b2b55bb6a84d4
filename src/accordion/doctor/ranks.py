"""What each rank measures together with the others: messages, clocks, and steps. Errors are answers, so that the rest goes on."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from accordion.devices import name_of
from accordion.doctor.steps import compare_steps
from accordion.engine.communicator import Communicator
from accordion.engine.gloo import GlooCommunicator
from accordion.shard.topology import communicator_over
from accordion.workers.ranks import Seat

REPEATS, PINGS = 5, 9
SMALL_NUMEL = 256  # of a message whose time is latency
PINNED_BYTES = 2**26
Answer = Mapping[str, Any]
"""Plain data, as JSON takes it; `error` where it came to nothing."""


def start(seat: Seat) -> RankExam:
    """For `WorkerTeam`."""
    return RankExam(seat.rank, seat.num_ranks, seat.device)


class RankExam:
    """One rank in a group of all. Every rank calls the same method at once; each gives an answer and raises nothing."""

    def __init__(self, rank: int, num_ranks: int, device: torch.device, clock: Callable[[], float] = time.time) -> None:
        """`clock`: seconds since 1970, as this machine has it."""
        self._rank, self._num_ranks, self._device, self._clock = rank, num_ranks, device, clock

    def about(self) -> Answer:
        """Who this is."""
        return self._answered(self._about)

    def messages(self, num_bytes: int) -> Answer:
        """Seconds of a gather, an exchange and a copy of `num_bytes`, and of a small gather: of the quickest of several turns,
        for others use this machine too."""
        return self._answered(lambda: self._messages(num_bytes))

    def clocks(self) -> Answer:
        """How far each rank's clock is ahead of the first one's, as the first rank finds it."""
        return self._answered(self._clocks)

    def steps(self) -> Answer:
        """Five steps sharded beside five unsharded."""
        return self._answered(lambda: asdict(compare_steps(self._rank, self._num_ranks, self._device)))

    def _answered(self, do: Callable[[], Answer]) -> Answer:
        try:
            return do()
        except Exception as error:
            return {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}

    def _about(self) -> Answer:
        found: dict[str, Any] = {"host": socket.gethostname(), "device": str(self._device), "torch": torch.__version__}
        found["open_files"] = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
        if self._device.type != "cpu":
            found["name"] = name_of(self._device.type)
            began = time.perf_counter()
            torch.empty(PINNED_BYTES, dtype=torch.uint8, device="cpu").pin_memory()
            found["pin_s"] = time.perf_counter() - began
        return found

    def _messages(self, num_bytes: int) -> Answer:
        link = communicator_over(dist.group.WORLD, self._device)
        numel = max(SMALL_NUMEL, num_bytes // 4 // self._num_ranks)  # of one rank's part, in float32
        part = torch.full((numel,), float(self._rank), dtype=torch.float32, device=self._device)
        full = torch.zeros(numel * self._num_ranks, dtype=torch.float32, device=self._device)
        received = torch.zeros_like(full)
        small, small_full = part[:SMALL_NUMEL], full[: SMALL_NUMEL * self._num_ranks]
        ways: dict[str, Callable[[], None]] = {
            "small": lambda: _wait(link.gather([small_full], [small]).works),
            "gather": lambda: _gather(link, full, part),
            "exchange": lambda: _exchange(link, received, full),
            "copy": lambda: _copy(received, full),
        }
        taken: dict[str, list[float]] = {name: [] for name in ways}
        for i in range(REPEATS + 2):
            for name, way in ways.items():
                self._together()
                began = time.perf_counter()
                way()
                self._finished()
                if i >= 2:
                    taken[name].append(time.perf_counter() - began)
        full.fill_(-1.0)
        _gather(link, full, part)
        self._finished()
        arrived = full.view(self._num_ranks, numel)[:, [0, -1]].mean(1).tolist()
        sent = full.element_size() * numel * (self._num_ranks - 1)
        right = arrived == [float(rank) for rank in range(self._num_ranks)]
        return {"seconds": {name: min(times) for name, times in taken.items()}, "bytes": sent, "right": right}

    def _together(self) -> None:
        self._finished()
        dist.barrier()
        self._finished()

    def _finished(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize()

    def _clocks(self) -> Answer:
        """The exchange of which the answer came soonest says most: the other clock was read in its middle."""
        found = []
        for other in range(1, self._num_ranks):
            best = (float("inf"), 0.0)
            for _ in range(PINGS):
                if self._rank == 0:
                    there = torch.zeros(1, dtype=torch.float64, device="cpu")
                    began = self._clock()
                    dist.send(there, other)
                    dist.recv(there, other)
                    ended = self._clock()
                    best = min(best, (ended - began, float(there) - (began + ended) / 2))
                elif self._rank == other:
                    own = torch.zeros(1, dtype=torch.float64, device="cpu")
                    dist.recv(own, 0)
                    own.fill_(self._clock())
                    dist.send(own, 0)
            found.append({"rank": other, "ahead_s": best[1], "within_s": best[0] / 2})
        return {"clocks": found if self._rank == 0 else []}


def _gather(link: Communicator, full: Tensor, part: Tensor) -> None:
    """As the engine does it: large parts of gloo's ranks are sent from each to each."""
    if not (isinstance(link, GlooCommunicator) and link.sends):
        _wait(link.gather([full], [part]).works)
        return
    rows = full.view(link.num_ranks, -1).unbind()
    works = link.send_each([(rows, [part] * link.num_ranks)])
    rows[link.rank].copy_(part)
    _wait(works)


def _exchange(link: Communicator, received: Tensor, sent: Tensor) -> None:
    if not (isinstance(link, GlooCommunicator) and link.sends):
        _wait(link.exchange([(received, sent, [], [])]).works)
        return
    rows, parts = (tensor.view(link.num_ranks, -1).unbind() for tensor in (received, sent))
    works = link.send_each([(rows, parts)])
    rows[link.rank].copy_(parts[link.rank])
    _wait(works)


def _copy(into: Tensor, given: Tensor) -> None:
    into.copy_(given)


def _wait(works: Iterable[Any]) -> None:
    for work in works:
        work.wait()
