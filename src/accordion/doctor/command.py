"""`accordion doctor`: looks at this machine, then at ranks on it, or at the ranks that torchrun or srun started."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from accordion import options as flags
from accordion.devices import Devices, backend_of, devices_here, devices_named, num_cores
from accordion.doctor import disk, judged, limits, network, software
from accordion.doctor.findings import Finding, as_data, on_host
from accordion.doctor.options import DoctorOptions
from accordion.doctor.ranks import Answer, RankExam, start
from accordion.doctor.report import DoctorReport
from accordion.errors import UsageError
from accordion.generate.memory import free_bytes
from accordion.train import launch
from accordion.train.launch import RankPlace
from accordion.workers.ranks import BenchError, WorkerTeam, World

PROG = "accordion doctor"
ABOUT = (DoctorOptions.__doc__ or "").splitlines()[0]
RANKS = 2  # without accelerators and without --nproc: the least that talk
MIB = 2**20
START = start  # what makes a rank's exam, by name for other processes
Ask = Callable[..., list[Answer]]
"""Calls a method of `RankExam` on every rank; what they answer, in rank order."""


def run(words: list[str], environ: Mapping[str, str]) -> int:
    """The subcommand. Returns the exit code: 1 where there is a problem."""
    options = flags.read(DoctorOptions, words, PROG, ABOUT)
    if options is None:
        return 0
    options.check()
    place = launch.place_of(environ)
    if place is not None:
        return _started(place, options, environ)
    chosen, world = _ranks(options)
    report = DoctorReport(as_json=options.json, head=f"{world} rank{'s' if world > 1 else ''} on {chosen.type}")
    for findings in _machine(chosen, world, world, options, environ, started=False):
        report.add(findings)
    found: list[Finding] = []
    try:
        threads = max(1, num_cores() // world) if chosen.is_cpu else 1
        team_of = World(num_ranks=world, device_type=chosen.type, threads=threads, patience_s=options.timeout_s)
        with WorkerTeam("doctor", team_of, START) as team:
            for one in _between(team.ask, chosen, options):
                report.add(one)
                found += one
    except BenchError as error:
        report.add([judged.group(str(error).removeprefix("contender 'doctor' "))])
    return report.end()


def _ranks(options: DoctorOptions) -> tuple[Devices, int]:
    """The devices and the number of ranks. Raises `UsageError` for more ranks than devices."""
    devices = devices_named(options.device, "--device", devices_here())
    world = options.nproc or devices.count or RANKS
    if not devices.is_cpu and world > devices.count:
        raise UsageError(f"--nproc is {world} and this machine has {devices}; lower it, or take --device cpu.")
    return devices, world


def _machine(
    chosen: Devices,
    num_local: int,
    num_ranks: int,
    options: DoctorOptions,
    environ: Mapping[str, str],
    *,
    started: bool,
) -> Iterable[list[Finding]]:
    """What one process can find, area by area. `num_local`: ranks on this machine."""
    yield software.versions()
    crowd = software.threads(environ, num_local)
    yield [
        *software.devices(chosen, num_local),
        *([] if crowd is None else [crowd]),
        *software.backends(chosen),
        software.memory(num_local, free_bytes(torch.device("cpu"), 1)),
    ]
    yield network.network(options.master, environ, started=started)
    yield [
        limits.open_files(num_ranks),
        limits.locked_memory(pins=not chosen.is_cpu, has_rdma=bool(limits.rdma_cards())),
        limits.shared_memory(),
    ]
    yield disk.disk(Path(options.dir), options.disk_mib)


def _between(ask: Ask, chosen: Devices, options: DoctorOptions) -> Iterable[list[Finding]]:
    """What ranks find together; each area is asked for when the one before has been shown."""
    about = ask("about")
    yield judged.about(about)
    hosts = {answer["host"] for answer in about if "error" not in answer}
    yield judged.messages(
        ask("messages", options.message_mib * MIB),
        device_type=chosen.type,
        device_name=about[0].get("name", ""),
        num_hosts=len(hosts),
    )
    yield judged.clocks(ask("clocks"))
    yield judged.steps(ask("steps"))


# -- where a launcher started the ranks


def _started(place: RankPlace, options: DoctorOptions, environ: Mapping[str, str]) -> int:
    """This process is one of them. What would keep it from the others is told before it tries."""
    if options.nproc not in (0, place.local_world):
        raise UsageError(
            f"--nproc is {options.nproc} but {place.starter} started {place.local_world} ranks; leave it out."
        )
    chosen = devices_named(options.device, "--device", devices_here())
    if not chosen.is_cpu and place.local_rank >= chosen.count:
        raise UsageError(
            f"{place.local_world} ranks are more than this machine has, {chosen}; start fewer, or take --device cpu."
        )
    unmet = [f for f in network.meeting(options.master, environ, started=True) if f.severity == "problem"]
    if unmet:
        report = DoctorReport(
            as_json=options.json, head=f"rank {place.rank} of {place.world} on {socket.gethostname()}"
        )
        report.add(unmet)
        return report.end()
    launch.guarded(_rank, chosen, options, dict(environ))
    return 0


def _rank(place: RankPlace, store: Store, chosen: Devices, options: DoctorOptions, environ: Mapping[str, str]) -> None:
    """The first rank of each machine looks at it; the first of all shows everything, and ends with the exit code."""
    speaks, own = place.rank == 0, "accordion/doctor"
    here: list[list[Finding]] = []
    if place.local_rank == 0:
        here = list(_machine(chosen, place.local_world, place.world, options, environ, started=True))
    flat = [finding for findings in here for finding in findings]
    store.set(f"{own}/machine/{place.rank}", _told(flat, socket.gethostname()))
    head = f"{place.world} ranks on {chosen.type}, started by {place.starter}"
    report = DoctorReport(as_json=options.json, head=head) if speaks else None
    if report is not None:
        for rank in range(place.world):
            found = [Finding(**said) for said in json.loads(store.get(f"{own}/machine/{rank}"))]
            if found:
                report.add(found)
    device = chosen.at(place.local_rank)
    if device.type != "cpu":
        torch.accelerator.set_device_index(place.local_rank)
    dist.init_process_group(
        backend_of(device.type),
        store=PrefixStore("accordion/group", store),
        rank=place.rank,
        world_size=place.world,
        timeout=timedelta(seconds=options.timeout_s),
    )
    exam = RankExam(place.rank, place.world, device)

    def ask(method: str, *args: object) -> list[Answer]:
        store.set(f"{own}/{method}/{place.rank}", json.dumps(getattr(exam, method)(*args)))
        return [json.loads(store.get(f"{own}/{method}/{rank}")) for rank in range(place.world)]

    for findings in _between(ask, chosen, options):
        if report is not None:
            report.add(findings)
    code = 0 if report is None else report.end()
    dist.barrier()
    dist.destroy_process_group()
    if code:
        raise SystemExit(code)


def _told(findings: list[Finding], host: str) -> str:
    return json.dumps(as_data(on_host(findings, host)))
