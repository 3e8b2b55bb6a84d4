"""The ranks and devices over which a model is sharded: mesh, communicators and side streams."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from accordion import _torch
from accordion.config import FULL_SHARD, HYBRID_SHARD, Place, Strategy
from accordion.engine.communicator import Axis, Communicator, device_type_of_job, gathered_rows, own_communicator
from accordion.engine.context import ShardingContext
from accordion.engine.gloo import GlooCommunicator
from accordion.engine.shards import on_device
from accordion.engine.streams import SideStream
from accordion.errors import DivergenceError, UsageError
from accordion.safety.divergence import DivergenceMonitor
from accordion.safety.liveness.wording import is_echo
from accordion.shard.same_mesh import same_mesh


def mesh_for(mesh: DeviceMesh | None, strategy: Strategy) -> DeviceMesh:
    """Return `mesh`; for None, a 1-D mesh of all ranks. Raises `UsageError` if the axes of `mesh` are not those that the strategy
    needs. For None, raises `UsageError` if the strategy is hybrid, or if torch.distributed is not initialised."""
    if mesh is None and not strategy.hybrid:
        return default_mesh()
    wanted = ("replicate", "shard") if strategy.hybrid else ("shard",)
    names, ndim = (None, 0) if mesh is None else (mesh.mesh_dim_names, mesh.ndim)
    if mesh is None or ndim != len(wanted) or (strategy.hybrid and names not in (None, wanted)):
        raise UsageError(
            f"{strategy.name} needs a mesh with the axes {wanted}, and this has {ndim}, named {names}; pass another strategy, "
            "a slice of the mesh, or init_device_mesh(device, (nodes, gpus), mesh_dim_names=('replicate', 'shard'))."
        )
    return mesh


def default_mesh() -> DeviceMesh:
    """Return a 1-D mesh of all ranks, on accelerators if the job uses them. Raises `UsageError` without a process group."""
    if not dist.is_initialized():
        raise UsageError("torch.distributed is not initialised; call accordion.init() first.")
    return init_device_mesh(device_type_of_job(), (dist.get_world_size(),))


def device_of(mesh: DeviceMesh) -> torch.device:
    """Return this rank's device, of the type of `mesh`. Raises `UsageError` if the machine has no accelerator of that type."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or accelerator.type != mesh.device_type:
        available = "no accelerator" if accelerator is None else f"accelerators of type {accelerator.type!r}"
        raise UsageError(
            f"the mesh is one of {mesh.device_type!r} devices, and this machine has {available}; make it with "
            f"init_device_mesh({(accelerator or torch.device('cpu')).type!r}, ...)."
        )
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())


CommunicatorMaker = Callable[[Any, torch.device], Communicator]
"""(process group, device) -> the communicator of that group."""


def communicator_over(group: Any, device: torch.device) -> Communicator:
    """Return a new communicator of a process group: a `GlooCommunicator` for gloo, a `Communicator` for any other backend."""
    return (GlooCommunicator if _torch.backend_of(group, device) == "gloo" else Communicator)(group, device)


def wire(
    mesh: DeviceMesh, strategy: Strategy, scale: float, late: bool, make: CommunicatorMaker = communicator_over
) -> ShardingContext:
    """Return the sharding context of a model on `mesh`, with new communicators and side streams. A collective.

    `scale`: factor of summed gradients. `late`: True for debug="streams", which delays transfers. `make`: called for each axis
    of `mesh`, makes the communicator of its process group. Raises `UsageError` if the machine lacks the mesh's devices, and
    `DivergenceError` if ranks passed different meshes, or another rank is gone.
    """
    device = device_of(mesh)
    try:
        axes = _axes(mesh, strategy, device, make)
        monitor = DivergenceMonitor([axis.gather for axis in axes], _torch.ranks_of(mesh))
    except RuntimeError as error:
        if not is_echo(error):
            raise
        raise DivergenceError(
            "this rank shards a model, and another rank has ended, cannot be reached, or does something else (see its output); "
            "all ranks must do this together."
        ) from error
    return ShardingContext(
        shard=axes[0],
        replicate=axes[1],
        cut_twice=strategy.optim_over_replicas,
        keeps_full=strategy.params is Place.REPLICATE,
        keep_until_backward=strategy.keep_until_backward,
        scale=scale,
        gather_stream=SideStream(device, monitor, late),
        reduce_stream=(reduce_stream := SideStream(device, monitor, late)),
        replicate_stream=SideStream(device, monitor, late) if strategy.hybrid else reduce_stream,
        fetch_stream=SideStream(device, monitor, late).for_threads(),
        waiter=monitor,
        device=device,
        shard_buffers=on_device(device),
    )


def beside(
    context: ShardingContext,
    mesh: DeviceMesh,
    strategy: Strategy = FULL_SHARD,
    make: CommunicatorMaker = communicator_over,
) -> ShardingContext:
    """Return the sharding context of parameters that have a `mesh` of their own, of some of the model's ranks. A collective.
    Streams, scale and divergence monitor are those of `context`, the model's. If `mesh` has two axes, the first replicates and
    the second shards. A single axis shards, or replicates if `strategy`, the model's, shards nothing."""
    if mesh.ndim == 2:
        strategy = replace(HYBRID_SHARD, reduce=strategy.reduce)
    elif strategy.hybrid:
        strategy = replace(FULL_SHARD, reduce=strategy.reduce)
    shard, replicate = _axes(mesh, strategy, context.device, make)
    suffix = f" of ranks {_torch.ranks_of(mesh)}"
    return replace(context, shard=shard, replicate=replicate, cut_twice=False, where=suffix)


def _axes(mesh: DeviceMesh, strategy: Strategy, device: torch.device, make: CommunicatorMaker) -> list[Axis]:
    """Return [shard axis, replicate axis]; an axis that `mesh` lacks has one rank. A collective that compares meshes first."""
    same_mesh(mesh)
    communicators = [make(mesh.get_group(i), device) for i in range(mesh.ndim)]
    alone = Communicator(None, device)
    if strategy.hybrid:
        replicate, sharding = communicators
    elif strategy.optim is Place.REPLICATE:
        replicate, sharding = communicators[0], alone
    else:
        replicate, sharding = alone, communicators[0]
    return [
        Axis(
            communicator,
            own_communicator(communicator, device),
            one_node=_one_node(communicator, device),
            algorithm=strategy.reduce,
        )
        for communicator in (sharding, replicate)
    ]


def _one_node(communicator: Communicator, device: torch.device) -> bool:
    """Return True if all ranks of a communicator have the same host name, or are simulated. A collective."""
    if communicator.num_ranks == 1 or communicator.is_fake:
        return True
    digest = int.from_bytes(hashlib.sha256(socket.gethostname().encode()).digest()[:7], "big")
    rows = gathered_rows(torch.tensor([digest], device=device), communicator)
    return bool((rows == digest).all())
