"""Part (d): device time of a unit's gather and reduce beside flat ones with copies."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from accordion import _torch
from accordion.bench.gpu.cases import BF16
from accordion.bench.gpu.findings import Findings
from accordion.bench.gpu.streams import wait
from accordion.engine.communicator import Communicator
from accordion.engine.reduce import sum_rows
from accordion.pages.page import Table, spread
from accordion.pages.stats import quartiles, ratio
from accordion.workers.ranks import Seat, WorkerTeam

AHEAD = 4  # milliseconds that the device sleeps while the host launches what is timed there, so that no launch is


TITLE = (
    "(d) a unit in bf16 on one rank, device time of copies and launches: one rank sends nothing, so no wire is in it"
)


class Wires:
    """One rank with the backend of its device: what gathers and reduces take there."""

    def __init__(self, seat: Seat) -> None:
        self._device = seat.device
        self._link = Communicator(dist.group.WORLD, seat.device)

    def unit(self, num_bytes: int, repeats: int) -> dict[str, list[float]]:
        """Device seconds of ours and of the flat way, for a unit of `num_bytes` in bf16: gather and reduce, interleaved.

        Flat, as FSDP2 does it: shards are copied into one buffer, gathered, and copied out to the parameters; gradients are
        copied into one buffer in float32, and reduce-scattered.
        """
        ways = _Unit(self._link, self._device, num_bytes).ways()
        found: dict[str, list[float]] = {name: [] for name in ways}
        for i in range(repeats + 2):
            for name, way in ways.items():
                seconds = self._timed(way)
                if i >= 2:
                    found[name].append(seconds)
        return found

    def _timed(self, way: Callable[[], None]) -> float:
        self._synchronise()
        if self._device.type == "cpu":
            start = time.perf_counter()
            way()
            return time.perf_counter() - start
        begin, end = (torch.Event(device=self._device, enable_timing=True) for _ in range(2))
        for _ in range(AHEAD):
            _torch.sleep_on_device()
        begin.record()
        way()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    def _synchronise(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize()


class _Unit:
    """The tensors of one unit on one rank: seven matrices in the proportions of a Llama block."""

    def __init__(self, link: Communicator, device: torch.device, num_bytes: int) -> None:
        self._link, num = link, link.num_ranks
        weights = (4, 4, 1, 1, 14, 14, 14)
        sizes = [num_bytes // 2 * w // sum(weights) // (256 * num) * 256 for w in weights]  # of one rank

        def of(n: int, dtype: torch.dtype) -> Tensor:
            return torch.ones(n, dtype=dtype, device=device)

        self._sizes, total = sizes, sum(sizes)
        self._shards = [of(n, BF16) for n in sizes]
        self._fulls = list(of(total * num, BF16).split([n * num for n in sizes]))
        self._received = [of(n * num, BF16) for n in sizes]
        self._sums = list(of(total, torch.float32).split(sizes))
        self._flat_shard, self._flat_full = of(total, BF16), of(total * num, BF16)
        self._flat_grad, self._flat_sum = of(total * num, torch.float32), of(total, torch.float32)

    def ways(self) -> dict[str, Callable[[], None]]:
        return {
            "gather": self._gather,
            "flat gather": self._flat_gather,
            "reduce": self._reduce,
            "flat reduce": self._flat_reduce,
        }

    def _gather(self) -> None:
        wait(self._link.gather(self._fulls, self._shards))

    def _flat_gather(self) -> None:
        _torch.foreach_copy_(list(self._flat_shard.split(self._sizes)), self._shards)
        dist.all_gather_into_tensor(self._flat_full, self._flat_shard)
        num = self._link.num_ranks
        outs = [full.view(num, -1) for full in self._fulls]
        torch.split_with_sizes_copy(self._flat_full.view(num, -1), self._sizes, dim=1, out=outs)

    def _reduce(self) -> None:
        equal: list[int] = []
        pairs = zip(self._received, self._fulls, strict=True)
        wait(self._link.exchange([(received, full, equal, equal) for received, full in pairs]))
        for received, out in zip(self._received, self._sums, strict=True):
            sum_rows(received.view(self._link.num_ranks, -1), out)

    def _flat_reduce(self) -> None:
        num = self._link.num_ranks
        grads = [g.view(num, -1) for g in self._fulls]
        _torch.chunk_cat(grads, num, out=self._flat_grad.view(num, -1))
        dist.reduce_scatter_tensor(self._flat_sum, self._flat_grad)


def wires(unit_bytes: Sequence[int], repeats: int, device: str, out: Findings) -> None:
    """(d) Device time of a unit's gather and reduce on one rank: copies and launches, for nothing goes over a wire."""
    columns = ["unit", "gather ms", "flat ms", "ratio", "exchange ms", "flat ms", "ratio"]
    rows: list[list[str]] = []
    with WorkerTeam("wires", out.world(device, threads=1), Wires) as team:
        for num_bytes in unit_bytes:
            times = out.data[str(num_bytes)] = team.ask("unit", num_bytes, repeats)[0]
            row = [f"{num_bytes / 1e6:g} MB"]
            for name in ("gather", "reduce"):
                mine, flat = times[name], times[f"flat {name}"]
                row += [spread(quartiles(one), 1e3, 3) for one in (mine, flat)]
                row.append(f"{ratio([mine], [flat]).median:.3f}")
            rows.append(row)
            out.keep(Table(title=TITLE, columns=columns, rows=list(rows)))
