"""Compare the meshes that ranks pass to `shard`, through the job's store, before any group of a mesh is used."""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from accordion import _torch
from accordion.errors import DivergenceError
from accordion.safety.liveness.arrivals import Arrivals
from accordion.safety.liveness.polling import once_after, poll

log = logging.getLogger("accordion")
WARNING_DELAY_S = 10.0  # longer waits are logged
MARGIN_S = 1.0  # added to the timeout of the job's process group
PREFIX = "accordion/meshes"


def same_mesh(mesh: DeviceMesh) -> None:
    """Barrier in the job's store: wait until all ranks of `mesh` have passed it to `shard` as often as this rank has.

    Raises `DivergenceError` if ranks are missing after the job's timeout; the error, and a warning before it, name them and the
    meshes that they have passed. Does nothing in a job of one rank or of simulated ranks.
    """
    if not dist.is_initialized() or dist.get_world_size() < 2:
        return
    if _torch.backend_of(mesh.get_group(0), torch.device(mesh.device_type)) == "fake":  # the other ranks are simulated
        return
    store, rank, ranks, lost_s = (
        _torch.default_store(),
        dist.get_rank(),
        _torch.ranks_of(mesh),
        _torch.timeout_s_of_job(),
    )
    shown = f"{tuple(mesh.shape)} of ranks {ranks}"
    arrivals = Arrivals(store, f"{PREFIX}/{shown}", ranks)
    arrivals.come(rank)
    store.set(f"{PREFIX}/of/{rank}", shown)

    def last_of(other: int) -> str:
        key = f"{PREFIX}/of/{other}"
        return f"{store.get(key).decode()} last" if store.check([key]) else "none yet"

    def absent() -> str:
        each = ", ".join(f"rank {other} (gave {last_of(other)})" for other in arrivals.missing())
        return f"this rank gave a mesh of {shown} and waits for {each}; pass the same mesh on every rank that is in it"

    warn = once_after(WARNING_DELAY_S, lambda: log.warning("%s.", absent()))
    if not poll(arrivals.all_came, lost_s + MARGIN_S, warn):
        text = absent()
        if arrivals.withdraw(rank):
            raise DivergenceError(f"{text}. None of them came in {lost_s + MARGIN_S:.0f} s.")
