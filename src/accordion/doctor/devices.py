"""Examine the accelerators and cores of this machine, and the version of torch."""

from __future__ import annotations

from pathlib import Path

import torch

from accordion import _torch
from accordion.devices import Devices, devices_here, name_of, num_cores
from accordion.doctor.findings import Finding

CARDS = ("nvidia[0-9]*", "kfd", "accel/accel[0-9]*")  # below /dev, where a driver shows accelerators
HELD = 0.1  # fraction of a device's memory that other processes may use without a warning
GIB = 2**30
TORCH = ("2.11", "2.16")  # the first supported version, and the first that is not, as in pyproject.toml


def devices(chosen: Devices, num_ranks: int, dev: Path = Path("/dev")) -> list[Finding]:
    """Return one finding about the accelerators of this machine, one about the free memory of each device in `chosen`, those of
    the ranks, and one about cores. `num_ranks`: ranks on this machine. `dev`: the folder with device files."""
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
            do="end those processes, or use other devices." if is_used else "",
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
        do="start fewer ranks, or let this process use more cores (taskset, --cpus of containers)." if crowded else "",
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
        do="" if is_supported else f"pip install 'torch>={TORCH[0]},<{TORCH[1]}'.",
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
