"""`accordion bench`: its subcommands, and what each of them measures and shows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from accordion.bench import checkpoint, host, offload, pages, scale
from accordion.bench.checkpoint import KINDS as KINDS_OF_SAVES
from accordion.bench.checkpoint import CheckpointLoop
from accordion.bench.compare import compare
from accordion.bench.contenders import ENVIRON, OURS, Setting, chosen
from accordion.bench.model import shape_of
from accordion.bench.optimizer import KINDS, OptimizerLoop
from accordion.bench.options import (
    CheckpointOptions,
    CompareOptions,
    HostOptions,
    MemoryOptions,
    OffloadOptions,
    OptimizerOptions,
    ScaleOptions,
    check,
    read,
    writable,
)
from accordion.bench.own_task import measured_task, start_task
from accordion.bench.scale import Network
from accordion.bench.trainer import Trainer, start
from accordion.devices import devices_here, devices_named, num_cores
from accordion.errors import UsageError
from accordion.options import check_subcommand
from accordion.pages.machine import describe
from accordion.pages.page import Page
from accordion.pages.show import show, write
from accordion.tasks.flags import split_task
from accordion.workers.ranks import BenchError, WorkerTeam, World, interleaved

SUBCOMMANDS = {
    "host": "host time of a sharded unit, with collectives that cost nothing",
    "scale": "growth of host time, memory and simulated wire time over 8 to 4096 ranks",
    "optimizer": "clip and step on shards, beside the same optimizer on plain tensors",
    "checkpoint": "save, background save and load beside torch DCP, torch.save and the disk's own speed",
    "offload": "states on the host and on disk: time, memory, traffic, and how much of the step is hidden",
    "memory": "peak bytes of one of 8 simulated ranks, bf16 over fp32 parameters",
    "gpu": "all that one accelerator shows in ten minutes, in one file; needs torch, numpy and safetensors alone",
}
SAME_NORM = 1e-4


def run(words: list[str]) -> int:
    """The subcommand in `words`, or the comparison of contenders where there is none. Returns the exit code."""
    name = words[0] if words and not words[0].startswith("-") else ""
    if name:
        check_subcommand(name, SUBCOMMANDS, "accordion bench")
    kind, job = JOBS[name]
    own, words = ([], words[1:]) if name else split_task(words)
    options = read(kind, name, words, SUBCOMMANDS)
    if options is None:
        return 0
    if own and options.task is None:
        raise UsageError(f"{own[0]} is an option of a task, and none is named; give --task.")
    check(options)
    page = job(options) if name or options.task is None else _compare_task(options, own)
    show(page)
    for path in write(page, Path(options.dir)):
        print(f"written: {path}")
    return 0


def device_of(asked: str) -> str:
    """The type of device to measure on. Raises `UsageError` for one that is not there."""
    return devices_named(asked, "device", devices_here()).type


def world_of(nproc: int, device: str) -> World:
    """Ranks on this machine; on CPU they share its cores. Raises `UsageError` for more ranks than accelerators."""
    devices = devices_named(device, "device", devices_here())
    num_ranks = nproc or devices.count or 2
    if num_ranks < 1 or (devices.count and num_ranks > devices.count):
        raise UsageError(
            f"nproc is {nproc} and this machine has {devices}; take 1 or more, at most one for each device."
        )
    return World(num_ranks=num_ranks, device_type=device, threads=max(1, num_cores() // num_ranks))


def setting_of(o: CompareOptions | MemoryOptions | OffloadOptions, bf16: bool) -> Setting:
    shape = shape_of(o.model)
    return Setting(model=o.model, batch=o.batch or shape.batch, seq=o.seq or shape.seq, bf16=bf16)


def names_of(against: str) -> tuple[list[str], dict[str, str]]:
    """Ours, those of `against` that are here, and why others are not."""
    return chosen([OURS], [name.strip() for name in against.split(",") if name.strip()])


def _compare(o: CompareOptions) -> Page:
    world, setting = world_of(o.nproc, device_of(o.device)), setting_of(o, o.precision == "bf16")
    return _compared(o, world, setting, start, None)


def _compare_task(o: CompareOptions, own: list[str]) -> Page:
    """Of a task with the options in `own`, which each rank loads for itself."""
    assert o.task is not None
    for key in ("model", "seq"):
        if getattr(o, key) != getattr(CompareOptions, key):
            raise UsageError(f"--{key} says something of a language model, and --task names another; leave one out.")
    names_of(o.against)
    world = world_of(o.nproc, device_of(o.device))
    setting, flops = measured_task(o.task, own, o.batch, bf16=o.precision == "bf16")
    return _compared(o, world, setting, start_task, flops)


def _compared(
    o: CompareOptions, world: World, setting: Setting, make: Callable[..., Trainer], flops: float | None
) -> Page:
    names, left_out = names_of(o.against)
    found = compare(names, setting, world, o.rounds, o.steps, print, make, flops)
    hosted = [name for name in found.contenders if name in host.MEASURED or name.partition(":")[0] == OURS]
    print("measuring host time")
    times = host.measure(hosted, 8, o.rounds, o.steps, ["still"])["still"]
    return pages.of_comparison(found, times, left_out | found.left_out)


def _host(o: HostOptions) -> Page:
    names, _ = names_of(o.against)
    host.check(names)
    times = host.measure(names, o.ranks, o.rounds, o.steps, ["still", "fake"])
    return pages.of_host(times, o.ranks, describe("cpu"))


def _scale(o: ScaleOptions) -> Page:
    names, _ = names_of(o.against)
    host.check(names)
    try:
        sizes = [int(size) for size in o.sizes.split(",")]
    except ValueError:
        raise UsageError(f"sizes {o.sizes!r} are no numbers of ranks; write them as 8,64,512.") from None
    if min(sizes) < 1 or len(set(sizes)) < len(sizes):
        raise UsageError(f"sizes are {o.sizes}; each is a number of ranks, 1 or more, and stands there once.")
    if not (o.gbps > 0 and o.latency_us >= 0):
        raise UsageError(
            f"the wire has {o.gbps:g} Gbit/s and {o.latency_us:g} us; it takes more than 0, and 0 or more."
        )
    network = Network(gbps=o.gbps, latency_us=o.latency_us)
    return pages.of_scale(scale.grow(names, sizes, o.rounds, o.steps, network), network, describe("cpu"))


def _optimizer(o: OptimizerOptions) -> Page:
    world, shape = world_of(o.nproc, "cpu"), shape_of(o.model)
    setting = Setting(model=o.model, batch=shape.batch, seq=shape.seq)
    with ExitStack() as stack:
        teams = [stack.enter_context(WorkerTeam(kind, world, OptimizerLoop, (kind, setting))) for kind in KINDS]
        asked = interleaved(teams, o.rounds, "turn", 2, o.steps)
        norms = {team.name: team.ask("norm")[0] for team in teams}
    apart = max(norms.values()) - min(norms.values())
    if not apart <= SAME_NORM * max(norms.values()):
        raise BenchError(f"the norms of the gradients differ, so nothing is compared: {norms}.")
    wall, cpu = (
        {
            kind: [[max(rank[i] for rank in step) for step in zip(*turn, strict=True)] for turn in asked[kind]]
            for kind in KINDS
        }
        for i in range(2)
    )
    what = (
        f"{o.model}, fused AdamW, gradients clipped to 1, {world.num_ranks} ranks on CPU; the slowest rank of each step"
    )
    return pages.of_optimizer(wall, cpu, what, describe("cpu"))


def _memory(o: MemoryOptions) -> Page:
    names, _ = names_of(o.against)
    if "deepspeed" in names:
        raise UsageError("deepspeed does not run on simulated ranks; leave it out of against.")
    device, setting = device_of(o.device), setting_of(o, bf16=True)
    world = World(num_ranks=o.ranks, device_type=device, group="fake")
    with ExitStack() as stack:
        teams = [stack.enter_context(WorkerTeam(name, world, start, (name, setting))) for name in names]
        for team in teams:
            team.ask("losses", 3)
        asked = interleaved(teams, o.rounds, "memory")
    found = {name: [answers[0] for answers in rounds] for name, rounds in asked.items()}
    what = (
        f"{o.model}, batch {setting.batch} x {setting.seq}, bf16 over fp32 parameters, fused AdamW, as one of {o.ranks} "
        "simulated ranks (torch's fake group)"
    )
    return pages.of_memory(found, what, describe(device))


def _checkpoint(o: CheckpointOptions) -> Page:
    world = world_of(o.nproc, device_of(o.device))
    with ExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory(prefix="bench-", dir=writable(o.to, "to")))
        teams = [
            stack.enter_context(WorkerTeam(kind, world, CheckpointLoop, (kind, o.mib * 2**20, folder)))
            for kind in KINDS_OF_SAVES
        ]
        asked = interleaved(teams, o.rounds + 1, "turn")
    what = f"{o.mib:,} MiB of float32 in shards of {world.num_ranks} ranks on {world.device_type}, to {Path(o.to).resolve()}"
    return checkpoint.page_of(asked, what, describe(world.device_type))


def _offload(o: OffloadOptions) -> Page:
    world, setting, folder = world_of(o.nproc, "cpu"), setting_of(o, o.precision == "bf16"), offload.folder_of(o.swap)
    world = replace(world, threads=o.threads or world.threads)
    kinds, left_out = offload.kinds_of(o.against)
    with ExitStack() as stack:
        teams = []
        for kind in kinds:
            environ = ENVIRON.get(kind.partition(" ")[0])
            args = (kind, setting, folder)
            teams.append(stack.enter_context(WorkerTeam(kind, world, offload.OffloadLoop, args, environ)))
        asked = interleaved(teams, o.rounds, "turns", 1, o.steps)
        held = {team.name: team.ask("bytes")[0] for team in teams}
    found = {name: offload.measured(asked[name], held[name]) for name in held}
    offload.check(found)
    what = (
        f"{o.model}, batch {setting.batch} x {setting.seq}, {'bf16 over fp32' if setting.bf16 else 'fp32'}, fused AdamW, "
        f"{world.num_ranks} ranks on CPU with {world.threads} threads each; {o.rounds} interleaved rounds"
    )
    what = "; ".join([what, *(f"{kind} is left out: {reason}" for kind, reason in left_out.items())])
    return pages.of_offload(found, what, describe("cpu"))


JOBS: Mapping[str, tuple[type[Any], Callable[[Any], Page]]] = {
    "": (CompareOptions, _compare),
    "host": (HostOptions, _host),
    "scale": (ScaleOptions, _scale),
    "optimizer": (OptimizerOptions, _optimizer),
    "offload": (OffloadOptions, _offload),
    "memory": (MemoryOptions, _memory),
    "checkpoint": (CheckpointOptions, _checkpoint),
}
