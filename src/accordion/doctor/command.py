"""`accordion doctor`: examines this machine, then ranks on it, or the ranks that torchrun or srun started."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from accordion import options as flags
from accordion.devices import Devices, backend_of, devices_here, devices_named, num_cores
from accordion.doctor import disk, software
from accordion.doctor.findings import Finding, as_data, on_host
from accordion.doctor.ranks import RankExam, judged, no_group, start
from accordion.doctor.report import DoctorReport
from accordion.errors import UsageError
from accordion.generate.memory import free_bytes
from accordion.train import launch
from accordion.train.launch import RankPlace
from accordion.workers.ranks import BenchError, WorkerTeam, World

PROG = "accordion doctor"
RANKS = 2  # without accelerators and without --nproc: the fewest that send
START = start  # makes a rank's exam, by name for other processes
TIMEOUT_S = 120  # for ranks that do not answer
LARGEST_NPROC = 2**16


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """Look for faults of this machine and of ranks on it: each finding with what it means and what to do.

    Args:
        nproc: ranks on this machine; 0: one for each accelerator, else 2
        device: `auto` takes the accelerators of this machine if there are some; `cpu`, or a type of device
        dir: folder whose disk is measured, where runs and checkpoints will be; nothing written there stays
        json: print one JSON object
    """

    nproc: int = 0
    device: str = "auto"
    dir: str = "."
    json: bool = False

    def check(self) -> None:
        """Raise `UsageError` if a flag cannot be right."""
        if not 0 <= self.nproc <= LARGEST_NPROC:
            raise UsageError(f"--nproc is {self.nproc}; it must be between 0 and {LARGEST_NPROC}.")
        if not self.dir.strip() or "\0" in self.dir or not Path(self.dir).is_dir():
            raise UsageError(f"--dir {self.dir!r} is no folder; name one that exists, on the disk that runs will use.")


def run(words: list[str], environ: Mapping[str, str]) -> int:
    """Run the subcommand. Returns the exit code: 1 if there is a problem."""
    options = flags.read(DoctorOptions, words, PROG, (DoctorOptions.__doc__ or "").splitlines()[0])
    if options is None:
        return 0
    options.check()
    devices = devices_named(options.device, "--device", devices_here())
    place = launch.place_of(environ)
    if place is not None:
        _check_place(place, options, devices)
        launch.guarded(_rank, devices, options, dict(environ))
        return 0
    num_ranks = options.nproc or devices.count or RANKS
    if not devices.is_cpu and num_ranks > devices.count:
        raise UsageError(f"--nproc is {num_ranks} and this machine has {devices}; lower it, or take --device cpu.")
    report = DoctorReport(as_json=options.json, head=f"ranks: {num_ranks}, on {devices.type}")
    for findings in _machine(devices, num_ranks, options, environ):
        report.add(findings)
    try:
        threads = max(1, num_cores() // num_ranks) if devices.is_cpu else 1
        world = World(num_ranks=num_ranks, device_type=devices.type, threads=threads, patience_s=TIMEOUT_S)
        with WorkerTeam("doctor", world, START) as team:
            report.add(judged(team.ask("gathers"), devices.type))
    except BenchError as error:
        report.add([no_group(str(error).removeprefix("contender 'doctor' "))])
    return report.end()


def _machine(
    devices: Devices, num_local: int, options: DoctorOptions, environ: Mapping[str, str]
) -> Iterator[list[Finding]]:
    """Yield the findings that need one process only, by area. `num_local`: ranks on this machine."""
    yield software.versions()
    yield [
        *software.devices(devices, num_local),
        *software.threads(environ, num_local),
        *software.backends(devices),
        software.memory(num_local, free_bytes(torch.device("cpu"), 1)),
    ]
    yield disk.disk(Path(options.dir))


def _check_place(place: RankPlace, options: DoctorOptions, devices: Devices) -> None:
    """Raise `UsageError` if the ranks that a launcher started do not fit the flags or this machine."""
    if options.nproc not in (0, place.local_world):
        raise UsageError(
            f"--nproc is {options.nproc} but {place.starter} started {place.local_world} ranks; leave it out."
        )
    if not devices.is_cpu and place.local_rank >= devices.count:
        raise UsageError(
            f"{place.local_world} ranks are more than this machine has, {devices}; start fewer, or take --device cpu."
        )


def _rank(place: RankPlace, store: Store, devices: Devices, options: DoctorOptions, environ: Mapping[str, str]) -> None:
    """Examine as one rank of a launcher: the first rank of each machine looks at it, the first of all reports."""
    own = PrefixStore("accordion/doctor", store)
    findings: list[Finding] = []
    if place.local_rank == 0:
        findings = [finding for area in _machine(devices, place.local_world, options, environ) for finding in area]
    own.set(f"machine/{place.rank}", json.dumps(as_data(on_host(findings, socket.gethostname()))))
    device = devices.at(place.local_rank)
    if device.type != "cpu":
        torch.accelerator.set_device_index(place.local_rank)
    dist.init_process_group(
        backend_of(device.type),
        store=PrefixStore("accordion/group", store),
        rank=place.rank,
        world_size=place.world,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    own.set(f"gathers/{place.rank}", json.dumps(RankExam(place.rank, place.world, device).gathers()))
    code = 0
    if place.rank == 0:
        report = DoctorReport(as_json=options.json, head=f"{place.world} ranks on {devices.type}, of {place.starter}")
        for rank in range(place.world):
            report.add([Finding(**data) for data in json.loads(own.get(f"machine/{rank}"))])
        report.add(judged([json.loads(own.get(f"gathers/{rank}")) for rank in range(place.world)], devices.type))
        code = report.end()
    dist.barrier()
    dist.destroy_process_group()
    if code:
        raise SystemExit(code)
