"""Check the constructor arguments of one `FullyShardedDataParallel`, and translate them for `accordion.shard`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy

from accordion import config
from accordion.engine.communicator import device_type_of_job
from accordion.errors import UsageError

HYBRID_SHARD_GRAD_OP = replace(config.SHARD_GRAD_OP, name="hybrid_shard_grad_op", hybrid=True)
STRATEGIES: dict[str, config.Strategy] = {
    "FULL_SHARD": config.FULL_SHARD,
    "SHARD_GRAD_OP": config.SHARD_GRAD_OP,
    "NO_SHARD": config.NO_SHARD,
    "HYBRID_SHARD": config.HYBRID_SHARD,
    "_HYBRID_SHARD_ZERO2": HYBRID_SHARD_GRAD_OP,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """The checked constructor arguments of one `FullyShardedDataParallel`, without `module` and `auto_wrap_policy`. `ignored`:
    parameters not to shard. Raises `UsageError` for a wrong type or value, and for `process_group` with `device_mesh`."""

    process_group: Any = None
    sharding_strategy: ShardingStrategy | None = None
    cpu_offload: CPUOffload | None = None
    backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE
    mixed_precision: MixedPrecision | None = None
    param_init_fn: Callable[[nn.Module], None] | None = None
    device_id: int | torch.device | None = None
    sync_module_states: bool = False
    forward_prefetch: bool = False
    limit_all_gathers: bool = True
    use_orig_params: bool = False
    device_mesh: DeviceMesh | None = None
    ignored: Sequence[nn.Parameter] = ()

    def __post_init__(self) -> None:
        kinds: dict[str, Any] = {
            "sharding_strategy": ShardingStrategy,
            "cpu_offload": CPUOffload,
            "backward_prefetch": BackwardPrefetch,
            "mixed_precision": MixedPrecision,
            "device_id": (int, torch.device),
            "device_mesh": DeviceMesh,
        }
        for name, kind in kinds.items():
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                wanted = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
                raise UsageError(f"{name} is {value!r}, a {type(value).__name__}; it takes {wanted} or None.")
        if self.param_init_fn is not None and not callable(self.param_init_fn):
            raise UsageError(f"param_init_fn is {self.param_init_fn!r}; it takes a function of a module.")
        if self.mixed_precision is not None and self.mixed_precision.keep_low_precision_grads:
            raise UsageError(
                "MixedPrecision(keep_low_precision_grads=True) is not supported: gradients always have the dtype of the "
                "parameters that the optimizer steps; leave it out."
            )
        if self.process_group is not None and self.device_mesh is not None:
            raise UsageError("process_group and device_mesh are both passed; pass one of them.")

    @property
    def strategy(self) -> config.Strategy:
        return config.FULL_SHARD if self.sharding_strategy is None else STRATEGIES[self.sharding_strategy.name]

    def mesh(self) -> DeviceMesh | None:
        """Return the mesh for `shard`: `device_mesh`, or a mesh of `process_group`, which is (group that shards, group that
        replicates) for a hybrid strategy. If neither was passed, return None, which means all ranks; but for a hybrid strategy,
        create a mesh (a collective) that shards over the accelerators of a host, or over all ranks on CPUs, and replicates over
        hosts. Raises `UsageError` if the strategy cannot use `process_group`."""
        hybrid = self.strategy.hybrid
        if self.device_mesh is not None:
            return self.device_mesh
        group = self.process_group
        if group is None and not hybrid:
            return None
        kind = self.device_type()
        if group is None:
            num_ranks = dist.get_world_size()
            count = min(torch.accelerator.device_count(), num_ranks) if kind != "cpu" else num_ranks
            shape = (num_ranks // count, count)
            return init_device_mesh(kind, shape, mesh_dim_names=("replicate", "shard"))
        if not hybrid:
            if not isinstance(group, dist.ProcessGroup):
                raise UsageError(f"process_group is {group!r}; {self.strategy.name} takes one process group.")
            return DeviceMesh.from_group(group, kind)
        if not (isinstance(group, (tuple, list)) and len(group) == 2):
            raise UsageError(
                f"process_group is {group!r}; {self.strategy.name} takes two, (group that shards, group that replicates), or a "
                "device_mesh."
            )
        inner, outer = (dist.get_process_group_ranks(g) for g in group)
        this_rank = dist.get_rank()
        ranks = torch.tensor([[replica + member - this_rank for member in inner] for replica in outer])
        return DeviceMesh.from_group([group[1], group[0]], kind, ranks, mesh_dim_names=("replicate", "shard"))

    def device_type(self) -> str:
        if isinstance(self.device_id, torch.device):
            return self.device_id.type
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        return device_type_of_job() if accelerator is None or self.device_id is None else accelerator.type

    def use_device(self) -> None:
        index = self.device_id.index if isinstance(self.device_id, torch.device) else self.device_id
        if index is not None and self.device_type() != "cpu":
            torch.accelerator.set_device_index(index)

    def precision(self, master: torch.dtype, *, root: bool) -> config.Precision:
        """Return the `Precision` of this wrapper for `shard`. `master`: dtype of the parameters that the optimizer steps.
        `root`: True for the outermost wrapper, to which `cast_root_forward_inputs` applies."""
        mixed = self.mixed_precision
        if mixed is None:
            return config.Precision(master=master, cast_inputs=False)
        casts = mixed.cast_forward_inputs or (root and mixed.cast_root_forward_inputs)
        return config.Precision(
            params=mixed.param_dtype,
            reduce=mixed.reduce_dtype or mixed.param_dtype or torch.float32,
            master=master,
            buffers=mixed.buffer_dtype,
            cast_inputs=casts,
        )

    @property
    def offload(self) -> config.Offload:
        offloads = self.cpu_offload is not None and self.cpu_offload.offload_params
        return config.Offload(params=config.HOST, optimizer=config.HOST) if offloads else config.Offload()


def ignored_parameters(modules: Iterable[nn.Module] | None, states: Iterable[Any] | None) -> list[nn.Parameter]:
    """Return the parameters that are not to be sharded, each once. `modules`, `states`: the arguments `ignored_modules` and
    `ignored_states` (parameters and modules). Raises `UsageError` if both are passed, or for objects of other types."""
    if modules is not None and states is not None:
        raise UsageError("ignored_modules and ignored_states are both passed; pass everything in ignored_states.")
    params: list[nn.Parameter] = []
    for state in [*(modules or ()), *(states or ())]:
        if isinstance(state, nn.Module):
            params.extend(state.parameters())
        elif isinstance(state, nn.Parameter) and modules is None:
            params.append(state)
        elif modules is None:
            raise UsageError(f"ignored_states contains a {type(state).__name__}; it takes parameters and modules.")
        else:
            raise UsageError(f"ignored_modules contains a {type(state).__name__}; it takes modules.")
    return list(dict.fromkeys(params))
