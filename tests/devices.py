"""The device of the tests: `--device` chooses it, the pool passes it to each rank, and programs call `device()`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch

SIM = Path(__file__).parent / "sim"
_type = "cpu"  # of this process


def device() -> torch.device:
    """That on which the program which asks computes: of a rank the one that its mesh has, else the CPU."""
    if _type == "cpu":
        return torch.device("cpu")
    return torch.device(_type, torch.accelerator.current_device_index())


def here(module: Any) -> Any:
    """`module` moved to `device()`; of the meta device, left there."""
    return module if any(p.is_meta for p in module.parameters()) else module.to(device())


def compute_on(device_type: str) -> None:
    """What `device()` says in this process from now on; for the pool, which tells its ranks."""
    global _type
    _type = device_type


def load_sim() -> str | None:
    """The simulated accelerator in this process and all that it starts; returns why not, in a sentence, where it cannot be.

    Simulates as many devices as the pool has ranks, if the environment does not say how many.
    """
    sys.path.insert(0, str(SIM))
    import torch_sim

    if reason := torch_sim.why_not():
        sys.path.remove(str(SIM))
        return reason
    os.environ.setdefault("SIM_DEVICES", "4")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(SIM), os.environ.get("PYTHONPATH")]))
    torch_sim.autoload()
    return None
