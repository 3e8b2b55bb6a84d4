"""On what was measured: the machine, its versions, and the most arithmetic that it can do."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch

import accordion

# Dense bf16, without sparsity: NVIDIA's data sheets of each product. The first name found in the device's name counts.
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
    """Plain data for the head of a result."""
    on_gpu = {"cuda": torch.version.cuda or torch.version.hip, "gpus": torch.cuda.device_count()}
    return {
        "system": platform.platform(),
        "processor": _processor(),
        "cores": num_cores(),
        "memory_bytes": _memory_bytes(),
        "device": torch.cuda.get_device_name() if device_type == "cuda" else "cpu",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "accordion": accordion.__version__,
        **(on_gpu if device_type == "cuda" else {}),
    }


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def known_peak_flops(device_name: str, bf16: bool) -> float | None:
    """The data sheet's operations a second; None where no data sheet is known, and for float32."""
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


def _memory_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 0
