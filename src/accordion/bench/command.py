"""`accordion bench`: its subcommands and their options."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, Literal

from accordion import options
from accordion.bench import host, pages
from accordion.bench.compare import compare
from accordion.bench.contenders import PEERS, Setting, chosen, is_ours
from accordion.bench.model import shape_of
from accordion.bench.trainer import start
from accordion.devices import devices_here, devices_named, num_cores
from accordion.errors import UsageError
from accordion.options import at_least, check_limits, check_subcommand, listed
from accordion.pages.machine import describe
from accordion.pages.page import FOLDER, Page, as_markdown, check_folder, write
from accordion.pages.show import show
from accordion.workers.ranks import WorkerTeam, World

SUBCOMMANDS = {
    "host": "host time of a sharded unit, with collectives that do nothing",
    "memory": "peak memory of one of 8 simulated ranks, bf16 over fp32 parameters",
}
SIMULATED = 8  # ranks of `host` and `memory`


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """Train the same model under each contender, and compare losses, times, memory and bytes sent.

    Args:
        against: contenders next to `accordion`, separated by commas: fsdp2, fsdp1, ddp, deepspeed, plain (no
            communication), floor (plain, with an optimizer for one rank's share), or this engine under another
            strategy, such as accordion:shard_grad_op
        model: gpt-30m, gpt-98m, gpt-tiny, one of train's presets (llama-10m), or a folder with a transformers config.json
        batch: sequences per rank and step; 0: the model's default
        seq: tokens per sequence; 0: the model's default
        precision: fp32, or bf16 over fp32 parameters
        nproc: ranks on this machine; 0: one per GPU, or 2 without GPUs
        device: auto (the accelerators of this machine, or CPU if there are none), cpu, or another device type
        rounds: how often each contender is measured; in a round, all are measured one after the other
        report: Markdown file to write, with all tables, the machine, its load, the command and the date
    """

    against: str = ",".join(PEERS)
    model: str = "gpt-30m"
    batch: int = at_least(0, 0)
    seq: int = at_least(0, 0)
    precision: Literal["fp32", "bf16"] = "fp32"
    nproc: int = at_least(0, 0)
    device: str = "auto"
    rounds: int = at_least(1, 5)
    report: str | None = None


@dataclass(frozen=True, kw_only=True)
class HostOptions:
    """Measure the host time that each contender adds to a unit of 9 parameters, as one of 8 simulated ranks.

    Args:
        against: contenders next to `accordion`, separated by commas: fsdp2, fsdp1, or a strategy: accordion:shard_grad_op
        rounds: how often each contender is measured; in a round, all are measured one after the other
    """

    against: str = "fsdp2"
    rounds: int = at_least(1, 5)


@dataclass(frozen=True, kw_only=True)
class MemoryOptions:
    """Measure the peak memory of one of 8 simulated ranks in a step, in bf16 over fp32 parameters.

    Args:
        against: contenders next to `accordion`, as for accordion bench, but not deepspeed
        model: as for accordion bench
        batch: sequences per rank and step; 0: the model's default
        seq: tokens per sequence; 0: the model's default
        device: auto (an accelerator, or CPU if there is none), cpu, or another device type
    """

    against: str = "fsdp2"
    model: str = "gpt-30m"
    batch: int = at_least(0, 0)
    seq: int = at_least(0, 0)
    device: str = "auto"


def run(words: list[str]) -> int:
    """Run `accordion bench` with the arguments `words`: the subcommand that they begin with, or else the comparison. Prints and
    writes the result as `measure` does, and returns the exit code, 0; `--help` only prints. Raises `UsageError` for wrong
    arguments, and `BenchError` if a contender fails."""
    name = words[0] if words and not words[0].startswith("-") else ""
    if name:
        check_subcommand(name, SUBCOMMANDS, "accordion bench")
    kind, job = JOBS[name]
    about = (kind.__doc__ or "").splitlines()[0] + ("" if name else "\n" + listed(SUBCOMMANDS, "accordion bench"))
    chosen_options = options.read(kind, words[bool(name) :], f"accordion bench {name}".strip(), about)
    return 0 if chosen_options is None else measure(chosen_options, job, " ".join(["accordion bench", *words]))


def measure(chosen_options: Any, job: Callable[[Any], Page], command: str = "") -> int:
    """Run `job(chosen_options)`, print the page that `job` returns, and write it as JSON into `FOLDER`; if the option `report`
    is set, also as Markdown, with the text `command`, into that file. Creates both folders. Returns 0. Raises `UsageError`
    before the run if an option is out of its limits, or a folder cannot be written to."""
    check_limits(chosen_options)
    report = getattr(chosen_options, "report", None)
    for folder in (FOLDER, *([] if report is None else [Path(report).parent])):
        check_folder(folder)
    about = f"`{command}`, {date.today()}, at a load of {os.getloadavg()[0]:.1f} before the start."
    page = job(chosen_options)
    show(page)
    print(f"written: {write(page, FOLDER)}")
    if report is not None:
        Path(report).write_text(as_markdown(page, about), encoding="utf-8")
        print(f"written: {report}")
    return 0


def world_of(nproc: int, device: str) -> World:
    """Return the settings of `nproc` ranks (0: one per accelerator, or 2 on the CPU) on devices of type `device` ("auto": this
    machine's accelerators, else CPU); ranks share the cores. Raises `UsageError` without such a device, or with too few."""
    devices = devices_named(device, "device", devices_here())
    num_ranks = nproc or devices.count or 2
    if devices.count and num_ranks > devices.count:
        raise UsageError(f"--nproc is {nproc} and this machine has {devices}; take at most one rank for each device.")
    return World(num_ranks=num_ranks, device_type=devices.type, threads=max(1, num_cores() // num_ranks))


def setting_of(model: str, batch: int, seq: int, *, bf16: bool) -> Setting:
    shape = shape_of(model)
    return Setting(model=model, batch=batch or shape.batch, seq=seq or shape.seq, bf16=bf16)


def _compare(o: CompareOptions) -> Page:
    names, left_out = chosen(o.against)
    setting = setting_of(o.model, o.batch, o.seq, bf16=o.precision == "bf16")
    comparison = compare(names, setting, world_of(o.nproc, o.device), o.rounds, start)
    sharding = [name for name in comparison.contenders if name in host.PEERS or is_ours(name)]
    print("measuring host time")
    times = host.measure(sharding, SIMULATED, o.rounds)
    return pages.of_comparison(comparison, times, left_out | comparison.left_out)


def _all_of(against: str) -> list[str]:
    """Return "accordion" and the names in `against` ("fsdp2,ddp"). Raises `UsageError` if one is unknown or not installed."""
    names, left_out = chosen(against)
    if left_out:
        raise UsageError(f"{'; '.join(left_out.values())}. Install it, or leave it out of --against.")
    return names


def _host(o: HostOptions) -> Page:
    names = _all_of(o.against)
    host.check(names)
    return pages.of_host(host.measure(names, SIMULATED, o.rounds), describe("cpu"))


def _memory(o: MemoryOptions) -> Page:
    names = _all_of(o.against)
    if "deepspeed" in names:
        raise UsageError("deepspeed does not run on simulated ranks; leave it out of --against.")
    device = devices_named(o.device, "device", devices_here()).type
    setting = setting_of(o.model, o.batch, o.seq, bf16=True)
    world = World(num_ranks=SIMULATED, device_type=device, group="fake")
    memory = {}
    with ExitStack() as stack:
        for team in [stack.enter_context(WorkerTeam(name, world, start, (name, setting))) for name in names]:
            team.ask("losses", 3)
            memory[team.name] = team.ask("memory")[0]
    about = (
        f"{o.model}, batch {setting.batch} x {setting.seq}, bf16 over fp32 parameters, fused AdamW, as one of {SIMULATED} "
        "simulated ranks (torch's fake group)"
    )
    return pages.of_memory(memory, about, describe(device))


JOBS: Mapping[str, tuple[type[Any], Callable[[Any], Page]]] = {
    "": (CompareOptions, _compare),
    "host": (HostOptions, _host),
    "memory": (MemoryOptions, _memory),
}
