"""Examine this machine: its accelerators, cores and disk, and the version of torch."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import torch

from accordion import _torch
from accordion.devices import Devices, devices_here, name_of, num_cores
from accordion.doctor.findings import Finding

CARDS = ("nvidia[0-9]*", "kfd", "accel/accel[0-9]*")  # below /dev, where a driver shows accelerators
HELD = 0.1  # fraction of a device's memory that other processes may use without a warning
GIB = 2**30
TORCH = ("2.11", "2.16")  # the first supported version, and the first that is not, as in pyproject.toml
BLOCK_BYTES, NUM_BLOCKS = 4 * 2**20, 16
SLOW = 100e6  # bytes a second; one spinning disk or a gigabit network is faster
USUAL = "a network disk gives 200 to 1,000 MB/s, one NVMe 1,000 and more"
OF_A_BILLION = 12e9  # bytes in a checkpoint of 10^9 parameters with AdamW's states, in float32
LITTLE_BYTES, LEAST_BYTES = 20 * GIB, GIB


def devices_findings(chosen: Devices, num_ranks: int, dev: Path = Path("/dev")) -> list[Finding]:
    """Return a finding about the accelerators of this machine, one about the free memory of each device in `chosen`, and one
    about cores. `chosen`: devices of the ranks. `num_ranks`: ranks on this machine. `dev`: the folder with device files."""
    findings = [_accelerators(devices_here(), dev)]
    for index in range(chosen.count):
        free, total = torch.accelerator.get_memory_info(chosen.at(index))
        is_used = free < (1 - HELD) * total
        memory = Finding(
            check=f"devices.memory-{index}",
            severity="warning" if is_used else "ok",
            found=f"device {index} has {free / GIB:.1f} of {total / GIB:.1f} GiB free",
            means="other processes use the rest; a model that is planned to fit may not fit"
            if is_used
            else "free for a rank",
            do="end those processes, or use other devices.",
            data={"free_bytes": free, "total_bytes": total},
        )
        findings.append(memory)
    cores = num_cores()
    crowded = chosen.is_cpu and num_ranks > cores
    cores_finding = Finding(
        check="devices.cores",
        severity="warning" if crowded else "ok",
        found=f"{cores} cores for {num_ranks} rank{'s' if num_ranks > 1 else ''}",
        means="ranks share cores and wait for each other; times mean little" if crowded else "enough for the ranks",
        do="start fewer ranks, or let this process use more cores (taskset, --cpus of containers).",
        data={"cores": cores},
    )
    return [*findings, cores_finding]


def torch_version() -> Finding:
    """Return a finding: "ok" if this version of torch is supported, otherwise a problem."""
    is_supported = TORCH[0] <= torch.__version__ < TORCH[1]  # compares releases, not texts
    return Finding(
        check="software.torch",
        severity="ok" if is_supported else "problem",
        found=f"torch {torch.__version__}; supported: {TORCH[0]} to below {TORCH[1]}",
        means="a version that is tested"
        if is_supported
        else "this package uses features that other versions lack or change: it may fail, or train wrongly",
        do=f"pip install 'torch>={TORCH[0]},<{TORCH[1]}'.",
        data={"version": torch.__version__},
    )


def _accelerators(present: Devices, dev: Path) -> Finding:
    check = "devices.accelerators"
    if not present.is_cpu:
        runtime = _torch.runtime_version(present.type)
        return Finding(
            check=check,
            severity="ok",
            found=f"{present}: {name_of(present.type)}" + (f", built for {present.type} {runtime}" if runtime else ""),
            means="a rank for each",
            data={"type": present.type, "count": present.count, "runtime": runtime},
        )
    shown = sorted(str(path) for pattern in CARDS for path in dev.glob(pattern))
    if shown:
        return Finding(
            check=check,
            severity="problem",
            found=f"the driver shows {', '.join(shown[:4])}, and torch {torch.__version__} finds no accelerator",
            means="training runs on the CPU alone, which is far slower",
            do="install the build of torch for this accelerator and driver (https://pytorch.org); check that no environment "
            "variable hides devices and that this user may open those files.",
        )
    return Finding(
        check=check,
        severity="note",
        found="no accelerator",
        means="ranks compute on the CPU: good for tests and small models",
        do="nothing, if that is intended.",
    )


def disk(folder: Path) -> list[Finding]:
    """Return two findings about the existing `folder`: the free space on its disk, and the speed of a write. To measure the
    speed, writes a temporary file; if that fails, the second finding is a problem."""
    stats = os.statvfs(folder)
    free, total = stats.f_bavail * stats.f_frsize, stats.f_blocks * stats.f_frsize
    little = free < LITTLE_BYTES
    space = Finding(
        check="disk.space",
        severity="problem" if free < LEAST_BYTES else "warning" if little else "ok",
        found=f"{folder.resolve()} has {free / GIB:,.1f} of {total / GIB:,.1f} GiB free",
        means="a checkpoint with AdamW takes 12 bytes a parameter; one that does not fit ends the run",
        do="free space, or use another folder; checkpoint.keep removes old checkpoints after a save.",
        data={"free_bytes": free, "total_bytes": total},
    )
    try:
        rate = write_rate(folder)
    except OSError as error:
        failed = Finding(
            check="disk.write",
            severity="problem",
            found=f"nothing can be written to {folder}: {error.strerror}",
            means="a run cannot begin: it writes its metrics and checkpoints there",
            do="free space, use another folder, or give this user write permission.",
        )
        return [space, failed]
    slow = rate < SLOW
    speed = Finding(
        check="disk.write",
        severity="warning" if slow else "ok",
        found=f"write: {rate / 1e6:,.0f} MB/s" + (f"; {USUAL}" if slow else ""),
        means=f"a checkpoint of a billion parameters with AdamW takes {OF_A_BILLION / rate / 60:,.1f} minutes",
        do="use a faster disk for --run.dir, save less often (--checkpoint.every), and check if others use the disk now.",
        data={"bytes_per_s": rate},
    )
    return [space, speed]


def write_rate(folder: Path) -> float:
    """Write a file of 64 MiB in `folder`, flush it, remove it, and return the rate in bytes/s. Raises `OSError` if that fails."""
    block = os.urandom(BLOCK_BYTES)  # random, since some disks compress zeros
    began = time.perf_counter()
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        for _ in range(NUM_BLOCKS):
            file.write(block)
        os.fsync(file.fileno())
        return NUM_BLOCKS * BLOCK_BYTES / (time.perf_counter() - began)
