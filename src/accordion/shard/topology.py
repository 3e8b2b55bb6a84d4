"""Over which ranks and on which device a model is sharded: its mesh, communicators and side streams."""

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
from accordion.engine.communicator import (
    Communicator,
    device_type_of_job,
    gathered_rows,
    group_of_job,
    own_communicator,
)
from accordion.engine.context import ShardingContext
from accordion.engine.gather import Axis
from accordion.engine.gloo import GlooCommunicator
from accordion.engine.shards import on_device
from accordion.engine.streams import SideStream
from accordion.errors import UsageError
from accordion.safety.divergence import DivergenceMonitor
from accordion.safety.liveness.hub import together
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
    axes = _axes(mesh, strategy, device, make)
    monitor = DivergenceMonitor([axis.gather for axis in axes], _torch.ranks_of(mesh))
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
    """The context of parameters with a mesh of their own, of ranks of the model's, whose streams, scale and monitor it uses.

    Collective. `strategy`: the model's. On two axes the first one has replicas, on one this is cut, unless the strategy cuts
    nothing.
    """
    if mesh.ndim == 2:
        strategy = replace(HYBRID_SHARD, reduce=strategy.reduce)
    elif strategy.hybrid:
        strategy = replace(FULL_SHARD, reduce=strategy.reduce)
    shard, replicate = _axes(mesh, strategy, context.device, make)
    return replace(
        context,
        shard=shard,
        replicate=replicate,
        cut_twice=False,
        where=f" of ranks {_torch.ranks_of(mesh)}",
    )


def _axes(mesh: DeviceMesh, strategy: Strategy, device: torch.device, make: CommunicatorMaker) -> list[Axis]:
    """The ranks that shard, and those that hold replicas; a collective, after all have given the same mesh."""
    same_mesh(mesh)
    communicators = [make(mesh.get_group(i), device) for i in range(mesh.ndim)]
    nobody = Communicator(None, device)
    if strategy.hybrid:
        replicate, sharding = communicators
    elif strategy.optim is Place.REPLICATE:
        replicate, sharding = communicators[0], nobody
    else:
        replicate, sharding = nobody, communicators[0]
    return [
        Axis(
            communicator,
            own_communicator(communicator, device),
            one_node=_one_node(communicator, device),
            algorithm=strategy.reduce,
        )
        for communicator in (sharding, replicate)
    ]


def secondary_communicator(
    context: ShardingContext, num_ranks: int, make: CommunicatorMaker = communicator_over
) -> Communicator | None:
    """This rank's and its neighbours' of the axis that shards, `num_ranks` of them; None where these are all, or no part.

    Collective. All models over one group share it, as they share `own_communicator`.
    """
    whole = context.shard.gather
    if num_ranks >= whole.num_ranks or whole.num_ranks % num_ranks:
        return None
    first = whole.rank - whole.rank % num_ranks
    return make(group_of_job(whole, whole.ranks[first : first + num_ranks], context.device), context.device)


def _one_node(communicator: Communicator, device: torch.device) -> bool:
    """Whether all ranks of a communicator run on one host, by name."""
    if communicator.num_ranks == 1 or communicator.is_fake:
        return True
    digest = int.from_bytes(hashlib.sha256(socket.gethostname().encode()).digest()[:7], "big")
    rows = gathered_rows(torch.tensor([digest], device=device), communicator)
    return bool((rows == digest).all())
