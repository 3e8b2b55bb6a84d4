"""Describe the machine of a measurement: its hardware and its versions."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch

from accordion import _torch
from accordion.devices import name_of, num_cores
from accordion.version import VERSION


def describe(device_type: str) -> dict[str, Any]:
    """Return name -> value for JSON: hardware and versions of this machine. "device": product name of the current device, or
    "cpu". If `device_type` is not "cpu", also "devices": the number of devices; and, under the key `device_type` (such as
    "cuda"), the version of the runtime that torch was built with, if torch knows it."""
    driver = _torch.runtime_version(device_type)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        names = (line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "Model")))
        processor = next(names, platform.machine())
    except OSError:
        processor = platform.processor()
    return {
        "system": platform.platform(),
        "processor": processor,
        "cores": num_cores(),
        "memory_bytes": memory_bytes(),
        "device": name_of(device_type),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "accordion": VERSION,
        **({} if device_type == "cpu" else {"devices": torch.accelerator.device_count()}),
        **({} if driver is None else {device_type: driver}),
    }


def memory_bytes() -> int:
    """Return the bytes of host memory of this machine; 0 if the system does not report it."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 0
