"""`accordion.init`: the process group and the device of a program's own training loop."""

from __future__ import annotations

import atexit
import os

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from accordion.devices import CPU, devices_here, devices_named
from accordion.engine.communicator import device_type_of_job
from accordion.errors import UsageError
from accordion.safety.liveness.hub import last_error


def init(device: str = "auto", *, timeout_s: float = 600.0) -> torch.device:
    """Create the default process group, make this rank's device the current one, and return that device. Collective.

    Under torchrun or srun the group has all ranks that were started. Otherwise, as in a notebook or under plain `python`, this
    process is the only rank. The group is destroyed when the program exits. If there is a process group already, changes
    nothing and returns the device on which that group communicates.

    Args:
        device: "auto" for the accelerators of this machine, or its CPU if there are none; "cpu"; or a type such as "cuda".
        timeout_s: seconds that a collective waits for another rank.

    Raises:
        UsageError: if the machine has no such devices or fewer than ranks, or if the launcher's variables are incomplete.
        AccordionError: if the store of the job, at MASTER_ADDR and MASTER_PORT, cannot be opened or reached.
    """
    if dist.is_initialized():
        kind = device_type_of_job()
        return torch.device(kind) if kind == CPU else torch.device(kind, torch.accelerator.current_device_index())
    from accordion.train import launch  # imports torchrun's library

    half = {"RANK", "WORLD_SIZE"} & os.environ.keys()
    if len(half) == 1:
        raise UsageError(
            f"a launcher sets RANK and WORLD_SIZE, and only {half.pop()} is set; start with torchrun, or unset it."
        )
    alone = launch.RankPlace(rank=0, world=1, local_rank=0, local_world=1, starter="init")
    place = launch.place_of(os.environ) or alone
    devices = devices_named(device, "the device of init", devices_here())
    if not devices.is_cpu and place.local_world > devices.count:
        raise UsageError(
            f"{place.local_world} ranks run on this machine, which has {devices}; start fewer ranks, let each of them see all "
            'devices, or call init("cpu").'
        )
    store = HashStore() if place is alone else launch.joined(place)
    result = launch.join_group(place, store, devices.type, timeout_s)
    atexit.register(_destroy, dist.group.WORLD)
    return result


def _destroy(group: object) -> None:
    # After an error NCCL would wait for collectives that other ranks do not join.
    if last_error() is None and dist.is_initialized() and dist.group.WORLD is group:
        dist.destroy_process_group()
