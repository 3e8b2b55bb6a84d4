"""The devices of this machine, from `torch.accelerator`, for any type of accelerator."""

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
    """The devices of one type ("cpu", "cuda", "xpu", "npu", ...) on this machine. `count`: 0 for the CPU."""

    type: str
    count: int

    @property
    def is_cpu(self) -> bool:
        return self.type == CPU

    def at(self, index: int) -> torch.device:
        """Return the device for local rank `index`: the CPU, or device `index` modulo `count`, which ranks may share."""
        return torch.device(CPU) if self.is_cpu else torch.device(self.type, index % self.count)

    def __str__(self) -> str:
        if self.is_cpu:
            return "no accelerator"
        return f"{self.count} device{'s' if self.count > 1 else ''} of type {self.type!r}"


def devices_here() -> Devices:
    """Return the accelerators of this machine, or its CPU if there are none."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return Devices(CPU, 0) if accelerator is None else Devices(accelerator.type, torch.accelerator.device_count())


def devices_named(asked: str, option: str, available: Devices) -> Devices:
    """Return the `Devices` for `asked`: the CPU for "cpu", `available` for "auto" or for its type. Raises `UsageError` for any
    other text. `option`: name of the command line option, for the message."""
    if asked == CPU:
        return Devices(CPU, 0)
    if asked not in ("auto", available.type):
        choices = "'auto' or 'cpu'" if available.is_cpu else f"'auto', 'cpu' or {available.type!r}"
        raise UsageError(f"{option} is {asked!r} and this machine has {available}; take {choices}.")
    return available


def backend_of(device_type: str) -> str:
    """Return the `backend` for `init_process_group`: "gloo" for the CPU; "cpu:gloo,cuda:nccl", for example, for others."""
    if device_type == CPU:
        return "gloo"
    return f"cpu:gloo,{device_type}:{dist.get_default_backend_for_device(device_type)}"


def name_of(device_type: str) -> str:
    """Return the product name of the current device, or `device_type` if torch knows none."""
    if device_type == CPU:
        return CPU
    ask = getattr(torch.get_device_module(device_type), "get_device_name", None)
    return device_type if ask is None else str(ask())


def num_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class HostCopy:
    """Copies of small tensors to the host that run while the device computes: the constructor begins them, `read` returns the
    values. `is_ready()`: True if `read` would not wait."""

    def __init__(self, tensors: list[Tensor]) -> None:
        """Begin to copy `tensors`, all on one device, after the work on its current stream so far. On the CPU, copy nothing."""
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
        """Wait for the copies, but not for later work of the device; return `tolist()` of each tensor."""
        if self._event is not None and not self._event.query():
            self._event.synchronize()
        return [copy.tolist() for copy in self._copies]
