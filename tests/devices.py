"""The device of the tests: pytest's option `--device` sets its type, the pool passes that to ranks, and tests call `device()`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch

SIM = Path(__file__).parent / "sim"
_type = "cpu"  # of this process


def device() -> torch.device:
    """Return the device on which this process computes: in ranks of the pool the current device of their type, else the CPU."""
    if _type == "cpu":
        return torch.device("cpu")
    return torch.device(_type, torch.accelerator.current_device_index())


def here(module: Any) -> Any:
    """Move `module` to `device()`, unless it has parameters on the meta device; return it."""
    return module if any(p.is_meta for p in module.parameters()) else module.to(device())


def compute_on(device_type: str) -> None:
    """Set the type of `device()` in this process from now on. The pool calls this in each rank."""
    global _type
    _type = device_type


def load_sim() -> str | None:
    """Load the simulated accelerator into this process, and through `PYTHONPATH` into all Python processes that it starts. Return
    None, or the reason, a sentence, why it cannot be loaded. Simulates 4 devices, unless `SIM_DEVICES` is set."""
    sys.path.insert(0, str(SIM))
    import torch_sim

    if reason := torch_sim.why_not():
        sys.path.remove(str(SIM))
        return reason
    os.environ.setdefault("SIM_DEVICES", "4")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(SIM), os.environ.get("PYTHONPATH")]))
    torch_sim.autoload()
    return None
