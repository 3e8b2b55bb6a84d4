"""`accordion doctor`: examine a failed run, or this machine and ranks on it: new ones, or those of torchrun or srun."""

from __future__ import annotations

import json
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from accordion import options as flags
from accordion.devices import Devices, backend_of, devices_here, devices_named, num_cores
from accordion.doctor.findings import Finding, report
from accordion.doctor.machine import devices_findings, disk, torch_version
from accordion.doctor.ranks import RankExam, judged, no_group, start
from accordion.errors import UsageError
from accordion.safety.liveness import wording
from accordion.train import launch
from accordion.train.failures import FILES, Failure, failure_in
from accordion.train.launch import RankPlace
from accordion.train.run_files import config_of_run
from accordion.workers.ranks import BenchError, WorkerTeam, World

RANKS = 2  # number of ranks on a CPU: the fewest that communicate
TIMEOUT_S = 120  # for ranks that do not answer
SHOWN = 8  # ranks, or places of ranks
NO_ANSWER = "gave no answer: its process was stopped, hung or killed, or its machine is gone"
ENDED_OTHERWISE = "the run goes on or ended well; or it was ended from outside: by a signal, Ctrl-C or NCCL's watchdog"


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """Look for faults of this machine and of ranks on it, or of a run. Each finding is printed with its meaning and a remedy.

    Args:
        run: folder of a run that failed, to find the rank that the others waited for; nothing else is examined
        device: `auto` uses the accelerators of this machine, one rank each, or else the CPU; `cpu` uses two ranks
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
    rank that fails ends its process. Raises `UsageError` for wrong arguments, and on a machine with more ranks than devices.
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
        if not devices.is_cpu and place.local_world > devices.count:
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
    """Return the findings on torch, `devices` and the disk of `options.dir`. `num_local`: number of ranks on this machine."""
    return [torch_version(), *devices_findings(devices, num_local), *disk(Path(options.dir))]


def _rank(place: RankPlace, store: Store, devices: Devices, options: DoctorOptions) -> None:
    """Examine the ranks of a job of torchrun or srun, as its rank `place`; on the first rank of each machine also the machine.
    Creates and destroys a process group. Collective; results go through the job's `store`. Rank 0 prints the findings of all
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


# -- a failed run


def examined(run_dir: Path) -> list[Finding]:
    """Return one finding about the run in `run_dir`, in a list: "ok" if no rank has written a failure; else a problem, with the
    ranks for which others waited, or what each did. Raises `UsageError` if `run_dir` is no run folder or cannot be read."""
    config_of_run(run_dir)
    failures = sorted(map(failure_in, run_dir.glob(FILES)), key=lambda failure: failure.rank)
    if not failures:
        return [Finding(check="run.ranks", severity="ok", found="no rank has written a failure", means=ENDED_OTHERWISE)]
    places = {rank: text for failure in failures for rank, text in failure.others.items()}
    places |= {failure.rank: failure.doing for failure in failures}
    absent = _absent(failures, places)
    others = [failure for failure in failures if failure.rank not in absent]
    waiting = wording.each_of({failure.rank: failure.doing for failure in others[:SHOWN]})
    texts = [f"rank {rank} {places.get(rank, NO_ANSWER)}" for rank in absent[:SHOWN]]
    return [
        Finding(
            check="run.ranks",
            severity="problem",
            found="; ".join(texts) + f"; the others waited for it: {waiting}" * bool(waiting) if texts else waiting,
            means="a collective ends when all of its ranks have joined it"
            + "; these wait in different ones" * (not texts),
            do="look at that place for an error, code that only some ranks run, a loop without end or a slow disk; raise "
            "launch.timeout_s if it was only slow. The same command resumes from the newest checkpoint.",
            data={"waited_for": absent, "errors": {failure.rank: failure.error for failure in failures}},
        )
    ]


def _absent(failures: Sequence[Failure], places: Mapping[int, str]) -> list[int]:
    """Return the ranks for which the others waited: the one rank that most `failures` name as their cause. If no failure names
    a cause, return the ranks that wrote no failure, except those in the same place as one that did: they waited too, and were
    ended before they could write a failure. `places`: rank -> text on what the rank did."""
    causes = Counter(failure.caused_by for failure in failures if failure.caused_by is not None)
    if causes:
        return [causes.most_common(1)[0][0]]
    silent = set(range(failures[0].num_ranks)) - {failure.rank for failure in failures}
    waits = tuple(failure.doing for failure in failures)
    return [rank for rank in sorted(silent) if not places.get(rank, "").startswith(waits)]
