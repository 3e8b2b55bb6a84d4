"""Examine the versions of installed packages, and the accelerators and cores of this machine."""

from __future__ import annotations

import operator
import platform
import re
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch

from accordion import _torch
from accordion.devices import Devices, devices_here, name_of, num_cores
from accordion.doctor.findings import Finding
from accordion.version import VERSION

NAME = "accordion-fsdp"  # of this package for pip
CARDS = ("nvidia[0-9]*", "kfd", "accel/accel[0-9]*")  # below /dev, where a driver shows accelerators
HELD = 0.1  # fraction of a device's memory that other processes may use without a warning
GIB = 2**30
COMPARES = {
    ">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt, "==": operator.eq, "!=": operator.ne,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Requirement:
    """A required package and its supported versions. `bounds`: pairs like (">=", "2.11"), which all must be true."""

    package: str
    bounds: tuple[tuple[str, str], ...]

    def takes(self, version: str) -> bool:
        return all(COMPARES[op](_numbers(version), _numbers(bound)) for op, bound in self.bounds)

    @property
    def range(self) -> str:
        return ", ".join(f"{op} {bound}" for op, bound in sorted(self.bounds, reverse=True)) or "any"

    def __str__(self) -> str:
        return self.package + ",".join(op + bound for op, bound in self.bounds)


def requirement_of(text: str) -> Requirement:
    """Parse a requirement in a package's metadata, such as `torch<2.16,>=2.11`."""
    named = re.match(r"\s*([\w.-]+)(.*)", text)
    assert named is not None, f"no requirement: {text!r}"
    return Requirement(named[1], tuple(re.findall(r"(>=|<=|==|!=|<|>)\s*([\w.]+)", named[2])))


def _numbers(version: str) -> list[int]:
    """Return the release numbers of `version` without trailing zeros: `2.11.0+cpu` -> [2, 11]."""
    release = re.match(r"\d+(?:\.\d+)*", version)
    numbers = [int(n) for n in release[0].split(".")] if release else [0]
    while len(numbers) > 1 and not numbers[-1]:
        numbers.pop()
    return numbers


def versions() -> list[Finding]:
    """Return the findings that compare Python, torch and the other required packages with the supported versions."""
    python = Finding(
        check="software.python",
        severity="ok",
        found=f"python {platform.python_version()}",
        means="a supported version: pip does not install this package for others",
    )
    try:
        needed = [requirement_of(line) for line in metadata.requires(NAME) or [] if ";" not in line]  # no extras
    except metadata.PackageNotFoundError:
        uninstalled = Finding(
            check="software.package",
            severity="note",
            found=f"accordion {VERSION} runs from a folder and is not installed",
            means="the supported versions of other packages are not known",
            do=f"pip install {NAME}, or pip install -e . in its folder.",
        )
        return [python, uninstalled]
    return [python, *map(_core, needed)]


def _version_of(package: str) -> str | None:
    try:
        return torch.__version__ if package == "torch" else metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _core(need: Requirement) -> Finding:
    version = _version_of(need.package)
    fits = version is not None and need.takes(version)
    return Finding(
        check=f"software.{need.package}",
        severity="ok" if fits else "problem",
        found=f"{need.package} {version or 'is not installed'}, supported: {need.range}",
        means="a version that is tested"
        if fits
        else "this package uses features that other versions lack or change: it may fail, or train wrongly",
        do="" if fits else f"pip install '{need}'.",
        data={"version": version},
    )


def devices(chosen: Devices, num_ranks: int, dev: Path = Path("/dev")) -> list[Finding]:
    """Return the findings about accelerators, free memory of the ranks' devices `chosen`, and cores. `dev`: the folder /dev."""
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
    return [_accelerators(devices_here(), dev), *_memory(chosen), cores_finding]


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


def _memory(chosen: Devices) -> list[Finding]:
    findings = []
    for index in range(chosen.count):
        free, total = torch.accelerator.get_memory_info(chosen.at(index))
        is_used = free < (1 - HELD) * total
        findings.append(
            Finding(
                check=f"devices.memory-{index}",
                severity="warning" if is_used else "ok",
                found=f"device {index} has {free / GIB:.1f} of {total / GIB:.1f} GiB free",
                means="other processes use the rest; a model that is planned to fit may not fit"
                if is_used
                else "free for a rank",
                do="end those processes, or use other devices." if is_used else "",
                data={"free_bytes": free, "total_bytes": total},
            )
        )
    return findings
