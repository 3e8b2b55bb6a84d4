"""Versions, devices and backends: what is installed here, and whether it belongs together."""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch
import torch.distributed as dist

from accordion import _torch
from accordion.devices import Devices, backend_of, devices_here, name_of, num_cores
from accordion.doctor.findings import Finding
from accordion.version import VERSION

NAME = "accordion-fsdp"  # of the distribution
PYTHON = (3, 11)
OF_DEVELOPERS = ("dev", "all")  # extras that no user misses
# What each extra is for, in the words of the command line.
FOR: Mapping[str, str] = {
    "train": "accordion train and generate",
    "plan": "accordion plan and bench",
    "integrations": "Trainer, TRL, Accelerate, Lightning and adapters",
    "export": "accordion export --format onnx",
    "checkpoint": "fast checksums of checkpoints",
    "remote": "checkpoints in object stores",
}
CARDS = ("nvidia[0-9]*", "kfd", "accel/accel[0-9]*")  # below /dev, where a driver shows accelerators
HELD = 0.1  # of a device's memory: what other processes may have without a word
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Requirement:
    """`bounds`: pairs like (">=", "2.11"). `extra`: "" for what the package always needs."""

    package: str
    bounds: tuple[tuple[str, str], ...]
    extra: str

    def takes(self, version: str) -> bool:
        own = _numbers(version)
        return all(_holds(own, op, _numbers(bound)) for op, bound in self.bounds)

    def __str__(self) -> str:
        return self.package + ",".join(op + bound for op, bound in self.bounds)


def requirement_of(text: str) -> Requirement:
    """A line of a package's metadata, such as `transformers>=5; extra == "train"`."""
    what, _, marker = text.partition(";")
    named = re.match(r"\s*([\w.-]+)\s*(?:\[[^\]]*\])?\s*\(?([^)]*)", what)
    assert named is not None, f"no requirement: {text!r}"
    bounds = re.findall(r"(>=|<=|==|!=|<|>)\s*([\w.]+)", named[2])
    extra = re.search(r"extra\s*==\s*['\"]([\w-]+)['\"]", marker)
    return Requirement(named[1], tuple(bounds), extra[1] if extra else "")


def _numbers(version: str) -> tuple[int, ...]:
    """`2.11.0+cpu` -> (2, 11)."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    numbers = [int(n) for n in found[0].split(".")] if found else [0]
    while len(numbers) > 1 and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)


def _holds(own: tuple[int, ...], op: str, bound: tuple[int, ...]) -> bool:
    return {
        ">=": own >= bound,
        "<=": own <= bound,
        ">": own > bound,
        "<": own < bound,
        "==": own == bound,
        "!=": own != bound,
    }[op]


def versions() -> list[Finding]:
    """Python, torch and the packages of each extra, held against what this version was made for."""
    least = ".".join(map(str, PYTHON))
    old = sys.version_info[:2] < PYTHON
    found = [
        Finding(
            check="software.python",
            severity="problem" if old else "ok",
            found=f"python {platform.python_version()}, supported from {least}",
            means="this version was written for newer ones and fails somewhere"
            if old
            else "what this version was written for",
            do=f"make an environment with Python {least} or newer." if old else "",
        )
    ]
    try:
        needed = [requirement_of(line) for line in metadata.requires(NAME) or []]
    except metadata.PackageNotFoundError:
        return [
            *found,
            Finding(
                check="software.package",
                severity="note",
                found=f"accordion {VERSION} runs from a folder and is not installed",
                means="which versions of other packages it takes is not known here",
                do=f"pip install {NAME}, or pip install -e . in its folder.",
            ),
        ]
    found += [_core(need) for need in needed if not need.extra]
    extras = dict.fromkeys(need.extra for need in needed if need.extra and need.extra not in OF_DEVELOPERS)
    return [*found, *(_extra(extra, [need for need in needed if need.extra == extra]) for extra in extras)]


def _version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _core(need: Requirement) -> Finding:
    version = torch.__version__ if need.package == "torch" else _version_of(need.package)
    fits = version is not None and need.takes(version)
    return Finding(
        check=f"software.{need.package}",
        severity="ok" if fits else "problem",
        found=f"{need.package} {version or 'is not installed'}, supported: {_bounds(need)}",
        means="what this version is tested with"
        if fits
        else "this version uses what other ones do not have or do otherwise: it may fail, or train wrongly",
        do="" if fits else f"pip install '{need}'.",
        data={"version": version},
    )


def _bounds(need: Requirement) -> str:
    return ", ".join(f"{op} {bound}" for op, bound in sorted(need.bounds, reverse=True)) or "any"


def _extra(extra: str, needs: Iterable[Requirement]) -> Finding:
    known = {need: _version_of(need.package) for need in needs}
    missing = [need.package for need, version in known.items() if version is None]
    wrong = [
        f"{need.package} {v} ({_bounds(need)})" for need, v in known.items() if v is not None and not need.takes(v)
    ]
    what = FOR.get(extra, f"the extra {extra!r}")
    install = f"pip install '{NAME}[{extra}]'."
    data = {need.package: version for need, version in known.items()}
    check = f"software.extra-{extra}"
    if wrong:
        return Finding(
            check=check,
            severity="warning",
            found=f"extra {extra}: out of the supported range: {', '.join(wrong)}",
            means=f"{what} may fail or do otherwise than documented",
            do=install,
            data=data,
        )
    if missing:
        return Finding(
            check=check,
            severity="note",
            found=f"extra {extra}: not installed: {', '.join(missing)}",
            means=f"{what} will be refused, in whole or in part",
            do=f"{install[:-1]}, if you want that.",
            data=data,
        )
    return Finding(check=check, severity="ok", found=f"extra {extra} is complete", means=f"{what} can run", data=data)


# -- devices and what they talk through


def devices(chosen: Devices, num_ranks: int, dev: Path = Path("/dev")) -> list[Finding]:
    """Accelerators and cores. `chosen`: what ranks will use; `dev`: where a driver shows its cards."""
    here, cores = devices_here(), num_cores()
    shown = sorted(str(path) for pattern in CARDS for path in dev.glob(pattern))
    if here.is_cpu and shown:
        found = [
            Finding(
                check="devices.accelerators",
                severity="problem",
                found=f"the driver shows {', '.join(shown[:4])}, and torch {torch.__version__} finds no accelerator",
                means="training runs on the CPU alone, which is far slower",
                do="install the build of torch for this accelerator and driver (https://pytorch.org); see that no variable hides "
                "devices and that this user may open those files.",
            )
        ]
    elif here.is_cpu:
        found = [
            Finding(
                check="devices.accelerators",
                severity="note",
                found="no accelerator",
                means="ranks compute on the CPU: good for tests and small models",
                do="nothing, if that is meant.",
            )
        ]
    else:
        runtime = _torch.runtime_version(here.type)
        found = [
            Finding(
                check="devices.accelerators",
                severity="ok",
                found=f"{here}: {name_of(here.type)}" + (f", built for {here.type} {runtime}" if runtime else ""),
                means="a rank for each",
                data={"type": here.type, "count": here.count, "runtime": runtime},
            ),
            *_memory(chosen),
        ]
    crowded = chosen.is_cpu and num_ranks > cores
    found.append(
        Finding(
            check="devices.cores",
            severity="warning" if crowded else "ok",
            found=f"{cores} cores for {num_ranks} rank{'s' if num_ranks > 1 else ''}",
            means="ranks wait for each other's turns on the cores; times say little"
            if crowded
            else "enough for the ranks",
            do="lower --nproc, or let this process use more cores (taskset, --cpus of containers)." if crowded else "",
            data={"cores": cores},
        )
    )
    return found


def _memory(chosen: Devices) -> list[Finding]:
    """Of each accelerator that ranks will use: what others hold of it."""
    found = []
    for index in range(chosen.count):
        free, total = torch.accelerator.get_memory_info(chosen.at(index))
        held = free < (1 - HELD) * total
        found.append(
            Finding(
                check=f"devices.memory-{index}",
                severity="warning" if held else "ok",
                found=f"device {index} has {free / GIB:.1f} of {total / GIB:.1f} GiB free",
                means="other processes hold the rest; a model that is planned to fit may not"
                if held
                else "free for a rank",
                do="end those processes, or take other devices." if held else "",
                data={"free_bytes": free, "total_bytes": total},
            )
        )
    return found


def backends(chosen: Devices) -> list[Finding]:
    """Whether torch was built with what the ranks will talk through."""
    wanted = dict(pair.split(":") for pair in backend_of(chosen.type).split(",") if ":" in pair) or {"cpu": "gloo"}
    found = []
    for kind, backend in wanted.items():
        has = dist.is_available() and dist.is_backend_available(backend)
        version = _torch.collectives_version(kind)
        found.append(
            Finding(
                check=f"devices.{backend}",
                severity="ok" if has else "problem",
                found=f"{backend} for {kind}" + (f", version {version}" if version else "")
                if has
                else f"torch {torch.__version__} was built without {backend}, for {kind}",
                means="ranks can talk" if has else "ranks cannot form a group: nothing can be trained on more than one",
                do="" if has else "install a build of torch that has it (https://pytorch.org).",
                data={"version": version},
            )
        )
    return found


def memory(num_ranks: int, free_bytes: int) -> Finding:
    """Of the host, which the ranks of this machine share."""
    share = free_bytes / max(1, num_ranks)
    little = share < 2 * GIB
    return Finding(
        check="devices.host-memory",
        severity="warning" if little else "ok",
        found=f"{free_bytes / GIB:.1f} GiB of host memory free, {share / GIB:.1f} for each rank",
        means="each rank takes about one GiB before it has a model; the system may end ranks for memory"
        if little
        else "enough to start ranks",
        do="free memory, raise the container's limit, or lower --nproc." if little else "",
        data={"free_bytes": free_bytes},
    )


def threads(environ: Mapping[str, str], num_ranks: int) -> list[Finding]:
    """Compare OMP_NUM_THREADS, if somebody set it, with the cores: each rank has so many threads."""
    text = environ.get("OMP_NUM_THREADS", "")
    if not (text.isascii() and text.isdecimal() and int(text) > 1 and num_cores() < int(text) * num_ranks):
        return []
    return [
        Finding(
            check="devices.threads",
            severity="warning",
            found=f"OMP_NUM_THREADS is {text}, times {num_ranks} ranks, on {num_cores()} cores",
            means="threads of ranks take turns on the cores, which is slower than fewer threads",
            do="unset OMP_NUM_THREADS: ranks then share the cores out.",
        )
    ]
