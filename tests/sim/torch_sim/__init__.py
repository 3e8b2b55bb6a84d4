"""Device "sim" for PyTorch: an accelerator of the host's memory, with asynchronous streams and memory that turns to NaN.

torch loads it by itself (entry point `torch.backends`) in every process that has this package's folder on its path, and
builds it then if that was not done before. README.md says what it does as CUDA does, and what it does not.
"""

from __future__ import annotations

import atexit
import sys
from importlib import util
from typing import Any

from torch_sim.extension import NotBuiltError, build, built, why_not

__all__ = ["NotBuiltError", "autoload", "build", "built", "why_not"]


def autoload() -> None:
    """Register the device with torch; does nothing the second time. Raises `NotBuiltError` where it cannot be built."""
    import torch
    import torch.distributed as dist

    if hasattr(torch, "sim"):
        return
    path = build()
    torch.utils.rename_privateuse1_backend("sim")
    spec = util.spec_from_file_location("sim_C", path)
    assert spec is not None
    assert spec.loader is not None
    extension: Any = util.module_from_spec(spec)
    sys.modules["sim_C"] = extension
    spec.loader.exec_module(extension)
    extension.begin()
    from torch_sim import device

    torch._register_device_module("sim", device.module(extension))
    sys.modules["torch.sim"] = torch.sim
    torch.utils.generate_methods_for_privateuse1_backend()
    for name in ("simccl", "simnccl"):  # one whose name has "nccl" in it, as libraries look for
        dist.Backend.register_backend(name, device.process_group(extension), devices=["sim"])
    atexit.register(extension.end)
