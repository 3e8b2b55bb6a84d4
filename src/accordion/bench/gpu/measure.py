"""What the machine it runs on reaches: products, attention, memory and collectives, as a card that later plans take."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from accordion.devices import devices_here, devices_named, num_cores
from accordion.errors import UsageError
from accordion.pages.machine import describe
from accordion.plan.hardware import GB, GIB, REACHED
from accordion.workers.ranks import Seat, WorkerTeam, World


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureSizes:
    """`products`: sizes of square matrices. `seq`: of attention. `seconds`: how long each is repeated at least."""

    products: tuple[int, ...]
    seq: int
    copy_bytes: int
    message_bytes: int
    seconds: float


GPU_SIZES = MeasureSizes(products=(2048, 4096, 8192), seq=8192, copy_bytes=2 << 30, message_bytes=1 << 30, seconds=1.0)
CPU_SIZES = MeasureSizes(products=(256, 512, 1024), seq=1024, copy_bytes=256 << 20, message_bytes=64 << 20, seconds=0.5)
IN_TRAINING = 0.8  # of what a kernel alone reaches: on an H100 0.75, on an A100 0.85 of the best product; copies less
SMALL_MESSAGE = 1024  # bytes: its time is latency


class Meter:
    """On one rank: each method gives the median seconds of what it names, all ranks at work at once."""

    def __init__(self, seat: Seat, sizes: MeasureSizes) -> None:
        self._seat, self._sizes = seat, sizes
        self._device = seat.device

    def product(self, size: int, dtype: torch.dtype) -> float:
        a, b = (torch.randn(size, size, device=self._device, dtype=dtype) for _ in range(2))
        return self._timed(lambda: torch.mm(a, b))

    def attention(self) -> float:
        q = torch.randn(1, 16, self._sizes.seq, 128, device=self._device, dtype=torch.bfloat16)
        return self._timed(lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True))

    def copy(self) -> float:
        given = torch.zeros(self._sizes.copy_bytes, dtype=torch.uint8, device=self._device)
        taken = torch.zeros_like(given)
        return self._timed(lambda: taken.copy_(given))

    def gather(self, num_bytes: int) -> float:
        """A full message of so many bytes."""
        own = torch.zeros(max(1, num_bytes // self._seat.num_ranks), dtype=torch.uint8, device=self._device)
        full = torch.zeros(own.numel() * self._seat.num_ranks, dtype=torch.uint8, device=self._device)
        return self._timed(lambda: dist.all_gather_into_tensor(full, own), repeats=10)

    def memory_gib(self) -> float:
        if self._device.type != "cpu":
            return float(torch.accelerator.get_memory_info()[1] / GIB)
        return float(describe("cpu")["memory_bytes"] / GIB / self._seat.num_ranks)

    def _timed(self, work: Callable[[], object], repeats: int = 0) -> float:
        """`repeats`: how often, the same on all ranks; 0: until its time is up."""
        found: list[float] = []
        for _ in range(2):
            work()
        self._ready()
        until = time.perf_counter() + self._sizes.seconds
        while len(found) < (repeats or 3) or (not repeats and time.perf_counter() < until):
            start = time.perf_counter()
            work()
            self._ready()
            found.append(time.perf_counter() - start)
        return median(found)

    def _ready(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize()


def measured(device: str = "", num_ranks: int = 0, sizes: MeasureSizes | None = None) -> dict[str, Any]:
    """The machine as a card, plain data for `hardware.Gpu`. `device`, `num_ranks`: by default all GPUs, else two CPU ranks.

    The card's figures are such that the high end of the assumed rates is what was measured.
    """
    devices = devices_named(device or "auto", "device", devices_here())
    device, most = devices.type, devices.count or max(2, num_cores())
    num_ranks = num_ranks or devices.count or 2
    if not 1 <= num_ranks <= most:
        raise UsageError(f"{num_ranks} ranks are asked for; this machine is measured with 1 to {most} ranks.")
    sizes = sizes or (CPU_SIZES if devices.is_cpu else GPU_SIZES)
    threads = max(1, num_cores() // num_ranks) if device == "cpu" else 1
    with WorkerTeam("measure", World(num_ranks=num_ranks, device_type=device, threads=threads), Meter, [sizes]) as team:

        def slowest(method: str, *args: Any) -> float:
            return float(max(team.ask(method, *args)))

        rates = {
            str(dtype).removeprefix("torch."): {
                n: 2 * n**3 / slowest("product", n, dtype) / 1e12 for n in sizes.products
            }
            for dtype in (torch.bfloat16, torch.float32)
        }
        attention = 2 * 16 * 128 * sizes.seq**2 / slowest("attention") / 1e12  # two products, half of them masked
        copies = 2 * sizes.copy_bytes / slowest("copy") / GB
        latency_s = slowest("gather", SMALL_MESSAGE) if num_ranks > 1 else 0.0
        sent = sizes.message_bytes * (num_ranks - 1) / num_ranks
        gathers = sent / slowest("gather", sizes.message_bytes) / GB if num_ranks > 1 else 0.0
        memory_gib = min(team.ask("memory_gib"))
    high, best = REACHED["high"], max(rates["bfloat16"].values())
    about = describe(device)
    card = {
        "name": f"measured {about['device']}",
        "memory_gib": memory_gib,
        "tflops": best,
        "fp32_tflops": max(rates["float32"].values()),
        "bandwidth_gbps": copies,
        "link": f"{num_ranks} ranks, measured",
        "link_gbps": gathers / high.link if num_ranks > 1 else 1.0,
        "latency_s": latency_s,
        "products": IN_TRAINING,
        "elementwise": IN_TRAINING,
        "attention": attention / best * IN_TRAINING,
        "slow": IN_TRAINING,
        "fast": 1 / IN_TRAINING,
        "source": f"measured, {num_ranks} ranks at once, {time.strftime('%Y-%m-%d')}, torch {torch.__version__}",
    }
    found = {"products_tflops": rates, "attention_tflops": attention, "copies_gbps": copies, "gathers_gbps": gathers}
    return {"card": card, "measured": found, "machine": about}
