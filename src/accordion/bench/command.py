"""`accordion bench`: its subcommands, and what each of them measures and shows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from accordion.bench import host, pages
from accordion.bench.compare import compare
from accordion.bench.contenders import OURS, Setting, chosen
from accordion.bench.model import shape_of
from accordion.bench.options import CompareOptions, HostOptions, MemoryOptions, check, read
from accordion.bench.own_task import measured_task, start_task
from accordion.bench.trainer import Trainer, start
from accordion.devices import devices_here, devices_named, num_cores
from accordion.errors import UsageError
from accordion.options import check_subcommand
from accordion.pages.machine import describe
from accordion.pages.page import Page
from accordion.pages.show import show, write
from accordion.tasks.flags import split_task
from accordion.workers.ranks import WorkerTeam, World, interleaved

SUBCOMMANDS = {
    "host": "host time of a sharded unit, with collectives that cost nothing",
    "memory": "peak bytes of one of 8 simulated ranks, bf16 over fp32 parameters",
    "gpu": "all that one accelerator shows in ten minutes, in one file; needs torch, numpy and safetensors alone",
}


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
    return measure(options, job if name or options.task is None else partial(_compare_task, own=own))


def measure(options: Any, job: Callable[[Any], Page]) -> int:
    """Show the page of `job(options)`, and write it to the folder `options.dir`. Returns the exit code."""
    check(options)
    page = job(options)
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


def setting_of(model: str, batch: int, seq: int, *, bf16: bool) -> Setting:
    shape = shape_of(model)
    return Setting(model=model, batch=batch or shape.batch, seq=seq or shape.seq, bf16=bf16)


def names_of(against: str) -> tuple[list[str], dict[str, str]]:
    """Ours, those of `against` that are here, and why others are not."""
    return chosen([OURS], [name.strip() for name in against.split(",") if name.strip()])


def _compare(o: CompareOptions) -> Page:
    world, setting = (
        world_of(o.nproc, device_of(o.device)),
        setting_of(o.model, o.batch, o.seq, bf16=o.precision == "bf16"),
    )
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


def _memory(o: MemoryOptions) -> Page:
    names, _ = names_of(o.against)
    if "deepspeed" in names:
        raise UsageError("deepspeed does not run on simulated ranks; leave it out of against.")
    device, setting = device_of(o.device), setting_of(o.model, o.batch, o.seq, bf16=True)
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


JOBS: Mapping[str, tuple[type[Any], Callable[[Any], Page]]] = {
    "": (CompareOptions, _compare),
    "host": (HostOptions, _host),
    "memory": (MemoryOptions, _memory),
}
