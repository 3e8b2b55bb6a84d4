"""Which devices this machine has, asked of `torch.accelerator`: nothing here or above it names a kind of accelerator."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from accordion.errors import UsageError

CPU = "cpu"


@dataclass(frozen=True, slots=True)
class Devices:
    """Of one kind. `type`: "cpu", "cuda", "xpu", "npu", ...; `count`: of this machine, 0 for the CPU."""

    type: str
    count: int

    @property
    def is_cpu(self) -> bool:
        return self.type == CPU

    def at(self, index: int) -> torch.device:
        """That of a rank; ranks beyond the count begin anew. Of the CPU there is one."""
        return torch.device(CPU) if self.is_cpu else torch.device(self.type, index % self.count)

    def __str__(self) -> str:
        if self.is_cpu:
            return "no accelerator"
        return f"{self.count} device{'s' if self.count > 1 else ''} of type {self.type!r}"


def devices_here() -> Devices:
    """The accelerators of this machine, else its CPU."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return Devices(CPU, 0) if found is None else Devices(found.type, torch.accelerator.device_count())


def devices_named(asked: str, option: str, here: Devices) -> Devices:
    """What `option` asks for: "auto", "cpu", or the type of device that this machine has. Raises `UsageError` for another."""
    if asked == CPU:
        return Devices(CPU, 0)
    if asked not in ("auto", here.type):
        choices = "'auto' or 'cpu'" if here.is_cpu else f"'auto', 'cpu' or {here.type!r}"
        raise UsageError(f"{option} is {asked!r} and this machine has {here}; take {choices}.")
    return here


def backend_of(device_type: str) -> str:
    """What `init_process_group` takes for ranks on such devices: gloo for the host, and their own library."""
    if device_type == CPU:
        return "gloo"
    return f"cpu:gloo,{device_type}:{dist.get_default_backend_for_device(device_type)}"


def name_of(device_type: str) -> str:
    """What the maker calls the current device; its type where its module does not tell."""
    if device_type == CPU:
        return CPU
    ask = getattr(torch.get_device_module(device_type), "get_device_name", None)
    return device_type if ask is None else str(ask())


def num_cores() -> int:
    """Cores of the CPU that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class HostCopy:
    """Copies of small tensors on the host, made while the device goes on: ``is_ready`` polls, and ``read`` waits for them."""

    def __init__(self, tensors: list[Tensor]) -> None:
        """Begin to copy tensors, all on one device, after all that its current stream was given."""
        device = tensors[0].device
        self._event: torch.Event | None = None
        self._copies = tensors
        if device.type != CPU:
            self._copies = [torch.empty_like(tensor, device=CPU, pin_memory=True) for tensor in tensors]
            for copy, tensor in zip(self._copies, tensors, strict=True):
                copy.copy_(tensor, non_blocking=True)
            self._event = torch.Event(device)
            self._event.record()

    def is_ready(self) -> bool:
        return self._event is None or self._event.query()

    def read(self) -> list[Any]:
        """Return the numbers of each tensor. The host waits for them, and for nothing that the device was given since."""
        if self._event is not None and not self._event.query():
            self._event.synchronize()
        return [copy.tolist() for copy in self._copies]
