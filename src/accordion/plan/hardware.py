"""GPUs, links and machines: peak speeds from data sheets, and the shares of them that training is assumed to reach."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from accordion.errors import UsageError, nearest

GIB, GB = 2**30, 10**9
OUTSIDE_BYTES = 2 * GIB  # GPU memory that torch does not count: context, NCCL's buffers, kernels
MARGIN = 1.05  # factor on reserved bytes
TIGHT_BYTES = 2 * GIB  # with less left, published runs lost 15 to 35 % of their speed to the allocator
LATENCY_S = {"node": 20e-6, "network": 40e-6}  # of one collective, on top of the time for its bytes
PCIE_4, PCIE_5 = 31.5, 63.0  # GB/s of 16 lanes each way, after line coding: PCI-SIG
# GB/s of memory bandwidth that the optimizers of a machine's ranks reach together: a guess, a third of two sockets of DDR4.
HOST_MEMORY_GBPS = 150.0
HOST_GIB = 64.0  # host memory per GPU of workstations, and of GPUs that are not in the table
DISK_GBPS = 3.0  # GB/s of a machine's NVMe, reading and writing at once: a guess
TELLABLE = 0.10  # relative difference between two times below which they count as equal
LAUNCH_S = 4e-6  # the host's shortest time for one operator: the device waits for it if a kernel is shorter
LARGEST = 10**9  # largest number that an option takes
LARGEST_GPUS = 1 << 16  # a trace has a number for each rank of its world


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """The shares of a GPU's peak speeds that training reaches."""

    products: float  # matrix products: share of peak flops
    elementwise: float  # kernels with little arithmetic: share of peak memory bandwidth
    attention: Mapping[str, float]  # forward of attention by kernel: share of peak flops
    # Nine in ten steps of models that were not in the fit have a speed between `slow` and `fast` times the predicted one.
    slow: float
    fast: float
    rows: int = 0  # number of published steps that were fitted; 0: a guess
    cards: Sequence[str] = ()  # the cards that ran them


EFFICIENCIES = Path(__file__).with_name("efficiency.json")  # fitted
ATTENTION = "fa2"  # the attention kernel that torch uses by default
_FITTED: Mapping[str, Any] = json.loads(EFFICIENCIES.read_text(encoding="utf-8"))
BY_KIND: Mapping[str, Efficiency] = {kind: Efficiency(**figures) for kind, figures in _FITTED["kinds"].items()}
GUESSED = BY_KIND["guessed"]


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU model: the peaks of its data sheet, and the shares of them that training reaches.

    Args:
        tflops: peak TFLOP/s of dense products in the dtype `half`.
        fp32_tflops: peak TFLOP/s of float32 without TF32, which is torch's default.
        bandwidth_gbps: peak GB/s of its memory.
        link, link_gbps: name of the link between the GPUs of a node, and the peak GB/s that one GPU sends over it.
        source: where the peaks are from.
        host_gbps: peak GB/s to the host, and at the same time as much from the host.
        products, attention: share of the peak of their dtype that matrix products and the forward of attention reach.
        elementwise: share of `bandwidth_gbps` that element-wise kernels reach.
        slow, fast: the speed of nine in ten steps is between these multiples of the predicted speed.
        rows: number of published steps to which the shares were fitted; 0: the shares are guessed.
        kind: kind of GPU whose shares are used, a key of `BY_KIND`; "": guessed.
        latency_s: seconds of one collective in a node, on top of the time for its bytes.
        half: 16-bit dtype that it computes with: bf16 or fp16.
        host_gib: host memory of a usual machine, per GPU.
    """

    name: str
    memory_gib: float
    tflops: float
    fp32_tflops: float
    bandwidth_gbps: float
    link: str
    link_gbps: float
    source: str
    _: KW_ONLY
    products: float = GUESSED.products
    elementwise: float = GUESSED.elementwise
    attention: float = GUESSED.attention["fa2"]
    slow: float = GUESSED.slow
    fast: float = GUESSED.fast
    rows: int = 0
    kind: str = ""
    latency_s: float = LATENCY_S["node"]
    host_gbps: float = PCIE_4
    half: str = "bf16"
    host_gib: float = HOST_GIB

    @property
    def efficiency_is(self) -> str:
        """Text on the source of the shares of the peaks: published steps, or a guess."""
        if self.rows:
            return f"of {self.rows} published steps on such GPUs ({_FITTED['made']})"
        return "guessed: no published step on such a GPU was fitted"


def _gpu(name: str, *peaks: Any, like: str = "", **more: Any) -> Gpu:
    """Return a row of the table of GPUs.

    Args:
        peaks: values of the fields of `Gpu` from `memory_gib` to `source`, in this order.
        like: kind of GPU whose shares of the peaks are used, a key of `BY_KIND`; "": they are guessed. Its `slow`, `fast` and
            `rows` are used only if steps of `name` were fitted, and otherwise guessed.
        more: other fields of `Gpu`, which replace those of the kind.
    """
    kind = BY_KIND.get(like, GUESSED)
    ranges = kind if name in kind.cards else GUESSED
    shares = {"products": kind.products, "elementwise": kind.elementwise, "attention": kind.attention[ATTENTION]}
    shares |= {"slow": ranges.slow, "fast": ranges.fast, "rows": ranges.rows}
    return Gpu(name, *peaks, kind=like, **{**shares, **more})


def with_attention(gpu: Gpu, kernel: str) -> Gpu:
    """Return a copy of `gpu` whose share `attention` is scaled to that of `kernel`, a key of `Efficiency.attention`."""
    known = BY_KIND.get(gpu.kind, GUESSED).attention
    return replace(gpu, attention=gpu.attention * known[kernel] / known[ATTENTION])


AT_500_W = (500 / 700) ** (1 / 3)  # clock at 500 of 700 W: power grows with its cube
_H100 = BY_KIND["h100"]

# Memory is in GiB as the driver shows it if that is known, otherwise the data sheet's. `host_gib` is that of the nodes of eight
# that clouds rent out: AWS's p3, p3dn, p4d, p4de, p5, p5e, p6, g4dn (of four), g5 and g6e, Azure's ND MI300X.
GPUS: Mapping[str, Gpu] = {
    g.name: g
    for g in (
        _gpu("a100-40", 39.4, 312, 19.5, 1555, "NVLink 3", 300, "NVIDIA A100 data sheet, SXM4 40 GB", like="a100",
             host_gib=144),
        _gpu("a100-80", 79.1, 312, 19.5, 2039, "NVLink 3", 300, "NVIDIA A100 data sheet, SXM4 80 GB", like="a100",
             host_gib=144),
        _gpu("h100", 79.1, 989, 67, 3350, "NVLink 4", 450, "NVIDIA H100 data sheet, SXM5 80 GB", like="h100", host_gbps=PCIE_5,
             host_gib=256),
        # An H100's chip, whose element-wise kernels move as many bytes a second, at a lower clock.
        _gpu("h100-96", 94.5, 989, 67, 2400, "NVLink 4", 450,
             "96 GB HBM2e at 2.4 TB/s, 500 W: torchtitan's published runs", like="h100", host_gbps=PCIE_5,
             host_gib=256, products=_H100.products * AT_500_W, attention=_H100.attention[ATTENTION] * AT_500_W,
             elementwise=_H100.elementwise * 3350 / 2400),
        _gpu("h200", 139.8, 989, 67, 4800, "NVLink 4", 450, "NVIDIA H200 data sheet, SXM 141 GB", like="h100",
             host_gbps=PCIE_5, host_gib=256),
        _gpu("gh200", 94.5, 989, 67, 4000, "NVLink 4", 450, "NVIDIA GH200 data sheet, 96 GB HBM3, 700 W of 1,000 for the GPU",
             like="h100", host_gbps=450, host_gib=447),
        _gpu("b200", 178.3, 2250, 80, 7700, "NVLink 5", 900, "NVIDIA B200 data sheet, 180 GB", like="b200",
             host_gbps=PCIE_5, host_gib=256),
        _gpu("mi300x", 191.5, 1307, 163, 5300, "Infinity Fabric", 448, "AMD Instinct MI300X data sheet, 192 GB", like="mi300x",
             host_gbps=PCIE_5, host_gib=231),
        _gpu("l40s", 44.5, 362, 91.6, 864, "PCIe 4 x16", 32, "NVIDIA L40S data sheet, 48 GB",
             host_gib=192),
        _gpu("a10g", 22.1, 70, 35, 600, "PCIe 4 x16", 32, "AWS's A10G, 24 GB: 70 TFLOP/s dense of its tensor cores",
             host_gib=96),
        _gpu("v100-16", 15.8, 125, 15.7, 900, "NVLink 2", 150, "NVIDIA V100 data sheet, SXM2 16 GB; 16 bits are fp16 alone",
             half="fp16", host_gbps=15.75, host_gib=61),
        _gpu("v100-32", 31.7, 125, 15.7, 900, "NVLink 2", 150, "NVIDIA V100 data sheet, SXM2 32 GB; 16 bits are fp16 alone",
             half="fp16", host_gbps=15.75, host_gib=96),
        _gpu("t4", 14.6, 65, 8.1, 320, "PCIe 3 x16", 16, "NVIDIA T4 data sheet, 16 GB; 16 bits are fp16 alone",
             half="fp16", host_gbps=15.75, host_gib=48),
        _gpu("rtx3090", 23.6, 71, 35.6, 936, "PCIe 4 x16", 32, "NVIDIA Ampere GA102 whitepaper: fp32 accumulation, 24 GB"),
        _gpu("rtx4090", 23.6, 165, 82.6, 1008, "PCIe 4 x16", 32, "NVIDIA Ada whitepaper: fp32 accumulation, 24 GB"),
        _gpu("rtx5090", 31.4, 209, 104.8, 1792, "PCIe 5 x16", 64, "NVIDIA Blackwell RTX whitepaper: fp32 accumulation, 32 GB",
             host_gbps=PCIE_5),
    )
}  # fmt: skip
ALIASES: Mapping[str, str] = {
    "h100-80": "h100", "a100": "a100-80", "v100": "v100-16", "3090": "rtx3090", "4090": "rtx4090", "5090": "rtx5090",
    "gh200-96": "gh200",
}  # fmt: skip
NODE = 8  # GPUs per machine, unless stated
NETWORK_GBPS = 50.0  # GB/s per GPU between nodes: InfiniBand NDR, 400 Gbit/s per GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """A low, middle or high assumption of the speed that training reaches.

    Args:
        end: speed of kernels: -1 for the GPU's `slow`, 1 for its `fast`, 0 for the middle.
        link: share that collectives reach of the peak of the link in a node.
        network: share that collectives reach of a node's network peak, which is one link for each of its ranks of the mesh
            axis.
        host: factor on the rates of a machine's memory and disk, which are guesses.
        caller_s: seconds that Python and torch take on the host for each kernel. The device waits if its queue is empty.
    """

    end: int
    link: float
    network: float
    host: float
    caller_s: float = 0.0


# Links: NCCL's tests in nodes of 8. Network: the range that published steps allow; at best, a ring over nodes enters and leaves
# each node by all of its links.
# Caller: a step of transformers' Llama (8 layers, tensors of a few numbers, one CPU core of 2.5 GHz) takes 20 to 40 us for each
# operator that runs a kernel, 24 in the middle. The device does not wait for a faster host, so middle and high leave it out.
REACHED: Mapping[str, Rates] = {
    "low": Rates(end=-1, link=0.55, network=0.35, host=0.67, caller_s=25e-6),
    "middle": Rates(end=0, link=0.73, network=0.60, host=1.00),
    "high": Rates(end=1, link=0.89, network=1.00, host=1.33),
}
# Multiple of the forward's share: FlashAttention-2's paper has 44 to 63 % of an A100's peak in backwards, 50 to 73 % in forwards.
ATTENTION_BACKWARD = 0.87
MANY_RANKS, DRAG = 128, 0.03  # beyond so many ranks each doubling costs this share of a step, in published steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Equal machines with equal GPUs. Raises `UsageError` for an unknown GPU, or a number that is out of range.

    Args:
        gpu: a `Gpu`, or the name of one in the table.
        gpus: total number of GPUs, or several numbers: the plan is for the largest, and tries the others too.
        node: GPUs per machine.
        network_gbps: GB/s that one GPU sends to other machines.
        host_memory_gib: memory of one machine. None: that of a usual machine with such GPUs.
        disk_gbps: GB/s of the disk of one machine.
        price: dollars per hour of one GPU.
    """

    gpu: Gpu = field(default_factory=lambda: GPUS["h100"])
    gpus: Sequence[int] = (8,)
    node: int = NODE
    network_gbps: float = NETWORK_GBPS
    host_memory_gib: float | None = None
    disk_gbps: float = DISK_GBPS
    price: float | None = None

    def __post_init__(self) -> None:
        gpu: Any = self.gpu
        if not isinstance(gpu, Gpu):
            object.__setattr__(self, "gpu", gpu_named(gpu))
        counts = [self.gpus] if isinstance(self.gpus, int) else sorted(self.gpus)
        object.__setattr__(self, "gpus", tuple(counts))
        if not counts:
            raise UsageError("gpus is empty; name at least one number of GPUs.")
        for name, value in [*(("gpus", n) for n in counts), ("node", self.node)]:
            if not 1 <= value <= LARGEST_GPUS:
                raise UsageError(f"{name} is {value:,}; it takes 1 to {LARGEST_GPUS:,}.")
        rates = {"network_gbps": 1e6, "host_memory_gib": 1e6, "disk_gbps": 1e6, "price": 1e18}
        for name, most in rates.items():
            check_rate(name, getattr(self, name), most)

    @property
    def num_gpus(self) -> int:
        """Total number of GPUs to plan for: the largest of `gpus`."""
        return max(self.gpus)

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory of one machine."""
        return int((self.host_memory_gib or self.gpu.host_gib * self.node) * GIB)

    @property
    def host_is(self) -> str:
        """Text on the host memory of one machine, and whether it was given or is the usual one."""
        gib = self.host_bytes / GIB
        size = f"{gib / 1024:.3g} TiB" if gib >= 1024 else f"{gib:,.0f} GiB"
        source = "as given" if self.host_memory_gib else "the usual one; host_memory_gib changes it"
        return f"host memory: {size} a node of {self.node}, {source}"

    @property
    def card_bytes(self) -> int:
        return int(self.gpu.memory_gib * GIB)


def gpu_named(name: str, **rates: float) -> Gpu:
    """Return the GPU that the table has under `name` ("h100" or "H100-80GB"), with `rates` in place of its figures. `rates`:
    any of memory_gib, tflops, bandwidth_gbps and link_gbps. With all four, `name` may be any text; if the table lacks it,
    `fp32_tflops` is a 16th of `tflops`. Raises `UsageError` for any other unknown name, or a rate out of range."""
    for key, value in rates.items():
        check_rate(key, value)
    key = name.lower().replace("_", "-").replace(" ", "").removesuffix("gb").replace("rtx-", "rtx")
    key = ALIASES.get(key, key)
    if key in GPUS:
        card = GPUS[key]
    elif len(rates) == 4:
        card = Gpu(name=name, fp32_tflops=rates["tflops"] / 16, link="as given", source="as given", **rates)  # type: ignore[arg-type]
    else:
        near = get_close_matches(key, GPUS, n=3, cutoff=0.3) or list(GPUS)
        raise UsageError(
            f"GPU {name!r} is not in the table; the nearest are {', '.join(near)} (all: {', '.join(GPUS)}). Or describe it: "
            "--gpu mine,memory_gib=80,tflops=900,bandwidth_gbps=3000,link_gbps=400."
        )
    return replace(card, **rates)  # type: ignore[arg-type]


CARD_WORDS = ("memory_gib", "tflops", "bandwidth_gbps", "link_gbps")
CLUSTER_WORDS = ("network_gbps", "host_memory_gib", "disk_gbps", "price")


def cluster_of(text: str, **more: Any) -> Cluster:
    """Return the cluster that `text` describes: a GPU's name, then figures of the GPU or fields of `Cluster`, such as
    "h100,memory_gib=94,price=2.5". `more`: other fields of `Cluster`. Raises `UsageError` if `text` cannot be parsed, names an
    unknown GPU, or has a value out of range."""
    name, *words = (word.strip() for word in text.split(","))
    values: dict[str, float] = {}
    for word in words:
        key, _, number = word.partition("=")
        if key not in (*CARD_WORDS, *CLUSTER_WORDS):
            raise UsageError(f"--gpu has no {key!r}; {nearest(key, [*CARD_WORDS, *CLUSTER_WORDS])}")
        try:
            values[key] = float(number)
        except ValueError:
            raise UsageError(f"--gpu has {word!r}, which is no number; write it as {key}=80.") from None
    gpu = gpu_named(name, **{key: values.pop(key) for key in list(values) if key in CARD_WORDS})
    return Cluster(gpu=gpu, **values, **more)  # type: ignore[arg-type]


def check_rate(name: str, value: float | None, most: float = 1e6) -> None:
    """Raise `UsageError` unless `value` is None, or above 0 and below `most`. `name`: name of the value in the message."""
    if value is not None and not 0 < value < most:
        raise UsageError(f"{name} is {value:g}; it takes a positive number.")
