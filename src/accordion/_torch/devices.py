"""Functions around private or device-dependent names of torch's accelerator modules."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch


def has_bf16(device: torch.device) -> bool:
    """Return True if the device computes in bfloat16 without emulation, or if torch cannot tell."""
    is_supported = getattr(torch.get_device_module(device), "is_bf16_supported", None)
    if is_supported is None:
        return True
    return bool(is_supported(including_emulation=False) if device.type == "cuda" else is_supported())


def runtime_version(device_type: str) -> str | None:
    """Return the version of the runtime of `device_type` (CUDA, ROCm, XPU) that torch was built with; None if there is none."""
    version = (torch.version.cuda or torch.version.hip) if device_type == "cuda" else None
    return version or getattr(torch.version, device_type, None)


def blocking_events(module: Any) -> Callable[[], Any]:
    """Return a constructor of events of `module` (such as `torch.cuda`) on which waiting threads sleep. If the module has no
    such events, return a function that returns None."""
    try:
        module.Event(blocking=True)
    except TypeError:
        return lambda: None
    return partial(module.Event, blocking=True)


def sleep_on_device() -> None:
    """Keep the current stream of a CUDA or ROCm device busy for about a millisecond; do nothing on others. No public name."""
    if torch.cuda.is_available():
        torch.cuda._sleep(2_000_000)
