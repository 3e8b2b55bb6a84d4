"""Cards and links: what their makers state, and what is assumed to be reached of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path

from accordion.errors import UsageError
from accordion.files import read_text

GIB, GB = 2**30, 10**9
OUTSIDE_BYTES = 2 * GIB  # of the card: context, NCCL's buffers, kernels; what torch does not count
MARGIN = 1.05  # on what is reserved
LATENCY_S = {"node": 20e-6, "network": 40e-6}  # of one collective, start to end, beside its bytes
PCIE_4, PCIE_5 = 31.5, 63.0  # GB/s of 16 lanes each way, after line coding: PCI-SIG
HOST_MEMORY_GBPS = (
    150.0  # GB/s of a machine that its ranks' optimizers reach together: a guess, a third of two sockets of DDR4
)
HOST_GIB_PER_GPU = 64.0  # of a machine's memory, where nobody says; what clouds rent out has 128 or more
DISK_GBPS = 3.0  # GB/s of a machine's NVMe, reading and writing at once: a guess
LAUNCH_S = 4e-6  # the host's least time for one operator: below it the device waits

HOST_LINKS: Mapping[str, float] = {  # as the same data sheets have it: "PCIe Gen4: 64 GB/s", "Gen5: 128 GB/s" both ways together
    "a100-40": PCIE_4, "a100-80": PCIE_4, "h100": PCIE_5, "h100-96": PCIE_5, "h200": PCIE_5, "b200": PCIE_5,
    "mi300x": PCIE_5, "l40s": PCIE_4, "rtx4090": PCIE_4, "rtx5090": PCIE_5,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One card. Rates are peaks: `tflops` dense bf16, `bandwidth_gbps` GB/s of its memory, `link_gbps` GB/s that one card sends
    to others in its node, `host_gbps` GB/s to the host and from it at the same time. `fp32_tflops`: products of float32 as
    torch does them by default, without TF32. `products`: share of the peak that the best product of matrices reaches;
    `attention`: that of FlashAttention-2's forward on long sequences. `latency_s`: of one collective in a node, beside its bytes.
    """

    name: str
    memory_gib: float
    tflops: float
    fp32_tflops: float
    bandwidth_gbps: float
    link: str
    link_gbps: float
    source: str
    products: float = 0.80
    attention: float = 0.35
    latency_s: float = LATENCY_S["node"]
    host_gbps: float = PCIE_4


def _gpu(
    name: str,
    memory: float,
    tflops: float,
    fp32: float,
    bandwidth: float,
    link: str,
    link_gbps: float,
    source: str,
    products: float = 0.80,
    attention: float = 0.35,
) -> Gpu:
    return Gpu(
        products=products,
        attention=attention,
        name=name,
        memory_gib=memory,
        tflops=tflops,
        fp32_tflops=fp32,
        bandwidth_gbps=bandwidth,
        link=link,
        link_gbps=link_gbps,
        source=source,
        host_gbps=HOST_LINKS[name],
    )


def _at_power(share: float, watts: float, of_watts: float) -> float:
    """A share of the peak at less power than the data sheet's: power grows with the cube of the clock (voltage follows it)."""
    return share * float((watts / of_watts) ** (1 / 3))


# Memory in GiB as the driver shows it, where known, else the data sheet's. `products`: the table of maximum achievable matmul
# rates in S. Bekman's "Machine Learning Engineering" (bf16: A100 271.2 of 312, H100 794.5 of 989, B200 1745 of 2250, MI300X
# 668.4 of 1300). `attention`: FlashAttention-2's paper for A100 (50 to 73 %), FlashAttention-3's for H100 (35 %). The rest:
# guessed.
GPUS: Mapping[str, Gpu] = {
    g.name: g
    for g in (
        _gpu("a100-40", 39.4, 312, 19.5, 1555, "NVLink 3", 300, "NVIDIA A100 data sheet, SXM4 40 GB", 0.869, 0.61),
        _gpu("a100-80", 79.1, 312, 19.5, 2039, "NVLink 3", 300, "NVIDIA A100 data sheet, SXM4 80 GB", 0.869, 0.61),
        _gpu("h100", 79.1, 989, 67, 3350, "NVLink 4", 450, "NVIDIA H100 data sheet, SXM5 80 GB", 0.803, 0.35),
        _gpu(
            "h100-96",
            94.5,
            989,
            67,
            2400,
            "NVLink 4",
            450,
            "96 GB HBM2e at 2.4 TB/s, 500 W: torchtitan's published runs",
            _at_power(0.803, 500, 700),
            _at_power(0.35, 500, 700),
        ),
        _gpu("h200", 139.8, 989, 67, 4800, "NVLink 4", 450, "NVIDIA H200 data sheet, SXM 141 GB", 0.803, 0.35),
        _gpu("b200", 178.3, 2250, 80, 7700, "NVLink 5", 900, "NVIDIA B200 data sheet, 180 GB", 0.776, 0.20),
        _gpu(
            "mi300x",
            191.5,
            1307,
            163,
            5300,
            "Infinity Fabric",
            448,
            "AMD Instinct MI300X data sheet, 192 GB",
            0.514,
            0.30,
        ),
        _gpu("l40s", 44.5, 362, 91.6, 864, "PCIe 4 x16", 32, "NVIDIA L40S data sheet, 48 GB"),
        _gpu("rtx4090", 23.6, 165, 82.6, 1008, "PCIe 4 x16", 32, "NVIDIA Ada whitepaper: fp32 accumulation, 24 GB"),
        _gpu(
            "rtx5090",
            31.4,
            209,
            104.8,
            1792,
            "PCIe 5 x16",
            64,
            "NVIDIA Blackwell RTX whitepaper: fp32 accumulation, 32 GB",
        ),
    )
}
ALIASES: Mapping[str, str] = {"h100-80": "h100", "a100": "a100-80", "4090": "rtx4090", "5090": "rtx5090"}
NETWORK_GBPS = 50.0  # GB/s a card between nodes: InfiniBand NDR, 400 Gbit/s a card


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What is reached: `products` and `attention` as a share of the card's best ones, memory and link of their peaks.

    Assumptions, to be replaced by a measured step. `attention_backward`: of the forward's best. `host`: of the guessed rates of
    a machine's memory and disk. `caller_s`: of Python and torch on the host for one kernel; the device waits for it where it has
    nothing else left to do.
    """

    products: float
    attention: float
    attention_backward: float
    memory: float
    link: float
    host: float
    caller_s: float = 0.0


# Products: 1 is the best shape; cuBLAS on 8192 x 8192 x 8192 on an H100 reaches 0.90 of that (716 TFLOP/s, P. Shankhdhar's
# "Outperforming cuBLAS on H100"); the low end is a guess. Attention: FlashAttention-2's paper has backwards at 44 to 63 % of an
# A100 where forwards are at 50 to 73, so 0.87. Memory: large copies reach 0.90 to 0.92. Links: NCCL's tests in nodes of 8.
# Caller: transformers' Llama of 8 layers, tensors of a few numbers, on one CPU core of 2.5 GHz: 20 to 40 us of a step for each of
# its operators that runs a kernel, 24 in the middle. A faster host is not waited for, so the middle and high ends leave it out.
REACHED: Mapping[str, Rates] = {
    "low": Rates(
        products=0.75, attention=0.85, attention_backward=0.74, memory=0.75, link=0.55, host=0.67, caller_s=25e-6
    ),
    "middle": Rates(products=0.90, attention=1.00, attention_backward=0.87, memory=0.85, link=0.73, host=1.00),
    "high": Rates(products=1.00, attention=1.15, attention_backward=1.00, memory=0.92, link=0.89, host=1.33),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Equal nodes of equal cards. `network_gbps`: GB/s that one card sends to other nodes. `host_memory_gib`: of one machine;
    None: nobody said. `disk_gbps`: of one machine. `scales`: by assumed rates, what one measured step made of their times; empty
    where none was measured.
    """

    gpu: Gpu
    node: int = 8
    network_gbps: float = NETWORK_GBPS
    host_memory_gib: float | None = None
    disk_gbps: float = DISK_GBPS
    scales: Mapping[str, float] = field(default_factory=dict)

    @property
    def tellable(self) -> float:
        """Two times that differ by less are not told apart."""
        return 0.05 if self.scales else 0.10

    @property
    def host_bytes(self) -> int:
        """Memory of one machine."""
        return int((self.host_memory_gib or HOST_GIB_PER_GPU * self.node) * GIB)

    @property
    def card_bytes(self) -> int:
        return int(self.gpu.memory_gib * GIB)


def gpu_from(path: Path) -> Gpu:
    """The card in a file of `accordion plan --measure`. Raises `UsageError`."""
    try:
        card = json.loads(read_text(path))["card"]
        made = Gpu(**card)
    except FileNotFoundError:
        raise UsageError(f"no measured card at {path}; `accordion plan --measure` writes one.") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} holds no measured card ({error}); `accordion plan --measure` writes one.") from None
    numbers = [made.memory_gib, made.tflops, made.fp32_tflops, made.bandwidth_gbps, made.link_gbps, made.attention]
    if not all(isinstance(n, (int, float)) and n > 0 for n in numbers):
        raise UsageError(f"{path} holds a card whose rates are not all positive; measure it again.")
    return made


def gpu_named(
    name: str | Path,
    memory_gib: float | None = None,
    tflops: float | None = None,
    bandwidth_gbps: float | None = None,
    link_gbps: float | None = None,
) -> Gpu:
    """The card of that name, or in that .json file, corrected by what is given; all four describe one that is in neither.

    Raises `UsageError`.
    """
    given = {"memory_gib": memory_gib, "tflops": tflops, "bandwidth_gbps": bandwidth_gbps, "link_gbps": link_gbps}
    told = {key: value for key, value in given.items() if value is not None}
    for key, value in told.items():
        check_rate(key, value)
    if isinstance(name, Path) or name.endswith(".json"):
        return replace(gpu_from(Path(name)), **told)  # type: ignore[arg-type]
    key = name.lower().replace("_", "-").replace(" ", "").removesuffix("gb")
    key = ALIASES.get(key.replace("rtx-", "rtx"), key.replace("rtx-", "rtx"))
    if key in GPUS:
        return replace(GPUS[key], **told)  # type: ignore[arg-type]
    if len(told) == len(given):
        return Gpu(name=name, fp32_tflops=told["tflops"] / 16, link="as given", source="as given", **told)
    near = get_close_matches(key, GPUS, n=3, cutoff=0.3) or list(GPUS)
    raise UsageError(
        f"GPU {name!r} is not in the table; the nearest are {', '.join(near)} (all: {', '.join(GPUS)}). Or describe it with "
        "--gpu-memory-gib, --gpu-tflops, --gpu-bandwidth-gbps and --link-gbps."
    )


def check_rate(name: str, value: float) -> None:
    """Raises `UsageError`."""
    if not 0 < value < 1e6:
        raise UsageError(f"{name} is {value:g}; it takes a positive number.")
