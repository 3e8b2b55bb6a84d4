"""`accordion doctor`: examine this machine, then new ranks on it, or the ranks that torchrun or srun started."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from accordion import options as flags
from accordion.devices import Devices, backend_of, devices_here, devices_named, num_cores
from accordion.doctor.devices import devices as devices_findings
from accordion.doctor.devices import torch_version
from accordion.doctor.disk import disk
from accordion.doctor.failed_run import examined
from accordion.doctor.findings import Finding, report
from accordion.doctor.ranks import RankExam, judged, no_group, start
from accordion.errors import UsageError
from accordion.train import launch
from accordion.train.launch import RankPlace
from accordion.workers.ranks import BenchError, WorkerTeam, World

RANKS = 2  # number of ranks on a CPU: the fewest that communicate
TIMEOUT_S = 120  # for ranks that do not answer


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """Look for faults of this machine and of ranks on it, or of a run. Each finding is printed with its meaning and a remedy.

    Args:
        run: folder of a run that failed, to find the rank that the others waited for; nothing else is examined
        device: `auto` uses the accelerators of this machine, one rank each; `cpu` uses two ranks
        dir: folder for runs and checkpoints, whose disk is measured; the written file is removed
        json: print one JSON object
    """

    run: str | None = flags.place(None)
    device: str = "auto"
    dir: str = "."
    json: bool = False


def run(words: list[str], environ: Mapping[str, str]) -> int:
    """Run `accordion doctor` with the arguments `words`: examine this machine and new ranks on it, and print findings. Returns
    the exit code: 1 if a finding is a problem, otherwise 0. With `--run`, examines only the folder of a run.

    If `environ` shows that torchrun or srun started this process, examines the ranks of that job instead, all of which call
    this function. Rank 0 prints the findings, and raises `SystemExit(1)` if one is a problem; otherwise each rank returns 0. A
    rank that fails ends its process. Raises `UsageError` for wrong arguments, and on a rank for which there is no device.
    """
    options = flags.read(DoctorOptions, words, "accordion doctor", (DoctorOptions.__doc__ or "").splitlines()[0])
    if options is None:
        return 0
    if options.run is not None:
        return report(examined(Path(options.run)), about=f"run {options.run}", as_json=options.json)
    if not options.dir.strip() or "\0" in options.dir or not Path(options.dir).is_dir():
        raise UsageError(f"--dir {options.dir!r} is not a folder; name an existing one on the disk that runs will use.")
    devices = devices_named(options.device, "--device", devices_here())
    place = launch.place_of(environ)
    if place is not None:
        if not devices.is_cpu and place.local_rank >= devices.count:
            raise UsageError(f"{place.local_world} ranks were started and this machine has {devices}; start fewer.")
        launch.guarded(_rank, devices, options)
        return 0
    num_ranks = devices.count or RANKS
    findings = _machine(devices, num_ranks, options)
    threads = max(1, num_cores() // num_ranks) if devices.is_cpu else 1
    world = World(num_ranks=num_ranks, device_type=devices.type, threads=threads, timeout_s=TIMEOUT_S)
    try:
        with WorkerTeam("doctor", world, start) as team:
            findings += judged(team.ask("gathers"), devices.type)
    except BenchError as error:
        findings.append(no_group(str(error).removeprefix("contender 'doctor' ")))
    return report(findings, about=f"{num_ranks} ranks on {devices.type}", as_json=options.json)


def _machine(devices: Devices, num_local: int, options: DoctorOptions) -> list[Finding]:
    """Return the findings about torch's version, `devices`, and the disk of `options.dir`. `num_local`: ranks on this machine."""
    return [torch_version(), *devices_findings(devices, num_local), *disk(Path(options.dir))]


def _rank(place: RankPlace, store: Store, devices: Devices, options: DoctorOptions) -> None:
    """Examine the ranks of a job of torchrun or srun, as its rank `place`. `store`: the job's store. Collective: creates a
    process group and destroys it. The first rank of each machine also examines the machine. Rank 0 prints the findings of all
    ranks, and raises `SystemExit(1)` if one is a problem."""
    answers = PrefixStore("accordion/doctor", store)
    findings = _machine(devices, place.local_world, options) if place.local_rank == 0 else []
    entries = [asdict(replace(finding, where=socket.gethostname())) for finding in findings]
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
    answer = RankExam(place.rank, place.world, device, place.local_world).gathers()
    answers.set(f"rank/{place.rank}", json.dumps({"machine": entries, "gathers": answer}))
    code = 0
    if place.rank == 0:
        reports = [json.loads(answers.get(f"rank/{rank}")) for rank in range(place.world)]
        findings = [Finding(**entry) for one in reports for entry in one["machine"]]
        findings += judged([one["gathers"] for one in reports], devices.type)
        about = f"{place.world} ranks on {devices.type}, of {place.starter}"
        code = report(findings, about=about, as_json=options.json)
    dist.barrier()
    dist.destroy_process_group()
    if code:
        raise SystemExit(code)
