"""Over which ranks and on which device a model is sharded: its mesh, communicators and side streams."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from accordion import _torch
from accordion.config import Place, Strategy
from accordion.engine.communicator import Communicator, alone, device_type_of_job, gathered_rows, own_communicator
from accordion.engine.gather import Axis
from accordion.engine.gloo import GlooCommunicator
from accordion.engine.group import ShardingContext
from accordion.engine.shards import on_device
from accordion.engine.streams import SideStream
from accordion.errors import UsageError
from accordion.safety.divergence import DivergenceMonitor
from accordion.safety.party_line import together
from accordion.shard.keep_freed_memory import keep_what_is_freed
from accordion.shard.same_mesh import same_mesh


def mesh_for(mesh: DeviceMesh | None, strategy: Strategy) -> DeviceMesh:
    """The mesh over which a strategy shards: the one that was given, checked, or one of all ranks."""
    if mesh is None:
        if strategy.hybrid:
            raise UsageError(
                f"{strategy.name} needs a mesh with two axes; pass init_device_mesh(device, (nodes, gpus), "
                "mesh_dim_names=('replicate', 'shard'))."
            )
        return default_mesh()
    names, wanted = mesh.mesh_dim_names, ("replicate", "shard")
    if strategy.hybrid and (mesh.ndim != 2 or names not in (None, wanted)):
        raise UsageError(
            f"the mesh has {mesh.ndim} axes, named {names}, but {strategy.name} needs two, {wanted}; pass "
            f"init_device_mesh(device, (nodes, gpus), mesh_dim_names={wanted})."
        )
    if not strategy.hybrid and mesh.ndim != 1:
        raise UsageError(
            f"the mesh has {mesh.ndim} axes, named {names}, but {strategy.name} shards over one; pass a 1-D mesh or a slice "
            "of this one, or strategy=HYBRID_SHARD."
        )
    return mesh


def default_mesh() -> DeviceMesh:
    """One axis over all ranks, of accelerators where the job has them."""
    if not dist.is_initialized():
        raise UsageError("torch.distributed is not initialised; start with torchrun, or call init_process_group first.")
    return init_device_mesh(device_type_of_job(), (dist.get_world_size(),))


def device_of(mesh: DeviceMesh) -> torch.device:
    """This rank's device of a mesh. Raises `UsageError` where the machine has none of that kind."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or accelerator.type != mesh.device_type:
        here = "no accelerator" if accelerator is None else f"accelerators of type {accelerator.type!r}"
        raise UsageError(
            f"the mesh is one of {mesh.device_type!r} devices, and this machine has {here}; make it with "
            f"init_device_mesh({(accelerator or torch.device('cpu')).type!r}, ...)."
        )
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())


CommunicatorMaker = Callable[[Any, torch.device], Communicator]
"""(process group, device) -> what speaks over it."""


def communicator_over(group: Any, device: torch.device) -> Communicator:
    """The communicator that suits a process group's backend."""
    return (GlooCommunicator if _torch.backend_of(group, device) == "gloo" else Communicator)(group, device)


@together("shards a model")
def wire(
    mesh: DeviceMesh, strategy: Strategy, scale: float, late: bool, make: CommunicatorMaker = communicator_over
) -> ShardingContext:
    """Streams, communicators and rules for a mesh of as many axes as the strategy asks for. Collective.

    Raises `DivergenceError` on every rank where ranks give meshes that do not fit each other.
    """
    device = device_of(mesh)
    same_mesh(mesh)
    if device.type == "cpu":
        keep_what_is_freed()
    communicators = [make(mesh.get_group(i), device) for i in range(mesh.ndim)]
    nobody = alone(device)
    if strategy.hybrid:
        replicate, sharding = communicators
    elif strategy.optim is Place.REPLICATE:
        replicate, sharding = communicators[0], nobody
    else:
        replicate, sharding = nobody, communicators[0]
    axes = [
        Axis(
            communicator,
            own_communicator(communicator, device),
            one_node=_one_node(communicator, device),
            algorithm=strategy.reduce,
        )
        for communicator in (sharding, replicate)
    ]
    monitor = DivergenceMonitor([axis.gather for axis in axes], _torch.ranks_of(mesh))
    return ShardingContext(
        shard=axes[0],
        replicate=axes[1],
        relay=strategy.optim_over_replicas,
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


def _one_node(communicator: Communicator, device: torch.device) -> bool:
    """Whether all ranks of a communicator run on one host, by name."""
    if communicator.num_ranks == 1 or communicator.is_fake:
        return True
    digest = int.from_bytes(hashlib.sha256(socket.gethostname().encode()).digest()[:7], "big")
    rows = gathered_rows(torch.tensor([digest], device=device), communicator)
    return bool((rows == digest).all())
