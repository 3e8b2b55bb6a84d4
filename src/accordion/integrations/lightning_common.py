"""What strategies of Lightning's Trainer and of its Fabric share: how to shard, the mesh, and folders of sharded checkpoints."""

from __future__ import annotations

import inspect
import shutil
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from accordion.checkpoint import load, save
from accordion.checkpoint.collective import Team
from accordion.errors import CheckpointError, UsageError
from accordion.integrations.pairs import why_incomplete
from accordion.integrations.sharding import ShardArguments
from accordion.sharding import Sharding
from accordion.weights.initialise import initialise
from accordion.weights.meta_start import source_of

MIXED = {"bf16-mixed": "bf16", "16-mixed": "fp16"}  # Lightning's names, in those of `ShardArguments.applied`
META = "meta.pt"  # what is neither model nor optimizer; written last, so that it says that all of it is there
KINDS = ("full", "sharded")
NOT_WRAPPED = ("ddp_comm_state", "ddp_comm_hook", "ddp_comm_wrapper", "model_averaging_period")


class ShardedStrategy:
    """What both have: how to shard, the mesh of the job, and folders of sharded checkpoints."""

    accelerator: Any
    checkpoint_io: Any
    root_device: torch.device
    num_nodes: int
    is_global_zero: bool
    broadcast: Callable[[Any], Any]

    def __init__(
        self,
        *args: Any,
        sharding: Sharding | Mapping[str, Any] | None = None,
        state_dict_type: str = "full",
        **kwargs: Any,
    ) -> None:
        self.shard_arguments = ShardArguments.of(sharding)
        if state_dict_type not in KINDS:
            raise UsageError(f"state_dict_type={state_dict_type!r} is none of {', '.join(map(repr, KINDS))}.")
        self.state_dict_type = state_dict_type
        known = inspect.signature(super().__init__).parameters
        for name, given in kwargs.items():
            if name not in known or name in NOT_WRAPPED:
                raise UsageError(
                    f"{name}={given!r} is not taken: nothing is wrapped in DistributedDataParallel; what `accordion.shard` takes "
                    "goes into sharding=dict(...)."
                )
        super().__init__(*args, **kwargs)
        self._mesh: DeviceMesh | None = None

    def _sharded(self, module: nn.Module, precision: object) -> nn.Module:
        """`module`, sharded in place as told; what is on the meta device is read from its folder, or else initialised."""
        on_meta = any(param.is_meta for param in module.parameters()) and source_of(module) is None
        self._over_nodes().applied(module, MIXED.get(str(precision), "no"))
        if on_meta:
            _initialise(module)
        return module

    def _over_nodes(self) -> ShardArguments:
        """Return the arguments with their mesh: for a hybrid, replicas are nodes."""
        if self.shard_arguments.mesh is not None:
            return self.shard_arguments
        if self._mesh is None:
            ranks, device = dist.get_world_size(), self.root_device.type
            if self.shard_arguments.sharding.strategy.hybrid:
                shape = (self.num_nodes, ranks // self.num_nodes)
                self._mesh = init_device_mesh(device, shape, mesh_dim_names=("replicate", "shard"))
            else:
                self._mesh = init_device_mesh(device, (ranks,))
        return replace(self.shard_arguments, mesh=self._mesh)

    def _write_folder(self, folder: Path, models: Mapping[str, list[Any]], rest: Any) -> None:
        """`models`: under each name what `parts` gives. Not complete before the last file, `META`, is there."""
        team = Team.of(())

        def begin() -> None:
            if self.is_global_zero:
                if folder.is_file():
                    folder.unlink()
                folder.mkdir(parents=True, exist_ok=True)
                (folder / META).unlink(missing_ok=True)

        team.agree(begin)
        for prefix, found in models.items():
            for name, model, optimizer in found:
                save(folder / f"{prefix}{name}", model, optimizer)
        team.agree(lambda: self.checkpoint_io.save_checkpoint(rest, folder / META) if self.is_global_zero else None)

    def _read_folder(self, folder: Path, models: Mapping[str, list[Any]], **kwargs: Any) -> dict[str, Any]:
        """Fill what was saved so, and return the rest. Raises `CheckpointError` on all ranks where the folder is not whole."""
        names = [f"{prefix}{name}" for prefix, found in models.items() for name, _, _ in found]

        def rest() -> dict[str, Any]:
            if not (folder / META).is_file():
                raise CheckpointError(
                    f"{folder} has no {META}: it is no checkpoint of this strategy, or its save was cut short."
                )
            lost = [f"{name}: {why}" for name in names if (why := why_incomplete(folder / name))]
            if lost:
                raise CheckpointError(f"{folder} cannot be loaded: {'; '.join(lost)}.")
            return self.checkpoint_io.load_checkpoint(folder / META, **kwargs)  # type: ignore[no-any-return]

        found = Team.of(()).agree(rest)
        for prefix, wanted in models.items():
            for name, model, optimizer in wanted:
                load(folder / f"{prefix}{name}", model, optimizer)
        return found

    def _clear(self, path: str) -> None:
        """A folder of that name is in the way of a file."""
        if self.is_global_zero and (Path(path) / META).is_file():
            shutil.rmtree(path)


def over_ddp(name: str, mixin: type[ShardedStrategy], package: str, module: str) -> type[Any]:
    """Return a strategy class: `mixin` over the DDP strategy of a package of Lightning. `module`: the one that defines it."""
    base = import_module(f"{package}.strategies").DDPStrategy
    return type(name, (mixin, base), {"__doc__": mixin.__doc__, "__module__": module})


def _initialise(module: nn.Module) -> None:
    """The same numbers on all ranks: where their generators differ, from a seed that the first one draws."""
    seen = Team.of(()).shared(str(zlib.crc32(bytes(torch.get_rng_state().tolist()))))
    if len(set(seen)) == 1:
        initialise(module)
        return
    seed = int(Team.of(()).shared(str(torch.initial_seed()))[0])
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        initialise(module)
