"""Describe the machine of a measurement: its hardware, its versions, and the peak FLOP/s of its device."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch

from accordion import _torch
from accordion.devices import name_of, num_cores
from accordion.version import VERSION

# Dense bf16 FLOP/s from NVIDIA's data sheets. The first key that is part of the device's name applies.
PEAK_BF16_FLOPS = {
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
}


def describe(device_type: str) -> dict[str, Any]:
    """Return hardware, versions and the number of devices of this machine as JSON data, for `Page.data`."""
    driver = _torch.runtime_version(device_type)
    return {
        "system": platform.platform(),
        "processor": _processor(),
        "cores": num_cores(),
        "memory_bytes": memory_bytes(),
        "device": name_of(device_type),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "accordion": VERSION,
        **({} if device_type == "cpu" else {"devices": torch.accelerator.device_count()}),
        **({} if driver is None else {device_type: driver}),
    }


def known_peak_flops(device_name: str, bf16: bool) -> float | None:
    """Return the dense bf16 FLOP/s in a device's data sheet; None if `bf16` is False or the device is not in the table."""
    if not bf16:
        return None
    return next((peak for name, peak in PEAK_BF16_FLOPS.items() if name in device_name), None)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "Model")))
    return next(named, platform.machine())


def memory_bytes() -> int:
    """Return the host memory of this machine; 0 if the system does not report it."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 0
