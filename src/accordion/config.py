"""The frozen policies that `shard` takes: strategy, precision, prefetch, offload and activation checkpointing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from accordion.errors import UsageError, nearest


class Place(Enum):
    """Placement of parameters, gradients or optimizer state: each rank keeps a shard, or all keep everything."""

    SHARD = "shard"
    REPLICATE = "replicate"


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """Placement of parameters, gradients and optimizer state over ranks.

    `params`, `grads`, `optim`: placement over the ranks of the shard axis. Sharded parameters are full in memory during the
    forward and the backward of their unit (a module whose parameters are gathered together); `keep_until_backward` keeps them
    full between the two. `hybrid`: the mesh has two dims, ("replicate", "shard"). `optim_over_replicas`: the optimizer's states
    are sharded over both dims. `reduce`: how gradients are reduced: by a reduce-scatter, or by an "exchange", an all-to-all and
    a local sum. "auto" exchanges on gloo, and on other backends if messages are large and the axis is inside one node.

    Raises `UsageError` if the optimizer state is replicated while parameters or gradients are sharded, and for
    `optim_over_replicas` without `hybrid`.
    """

    name: str
    params: Place
    grads: Place
    optim: Place
    keep_until_backward: bool = False
    hybrid: bool = False
    optim_over_replicas: bool = False
    reduce: Literal["auto", "exchange", "reduce_scatter"] = "auto"

    def __post_init__(self) -> None:
        if self.optim is Place.REPLICATE and (self.params, self.grads) != (Place.REPLICATE, Place.REPLICATE):
            raise UsageError(
                f"strategy {self.name!r} shards parameters or gradients but replicates the optimizer, which would step "
                "rows it has no gradient for; shard the optimizer too."
            )
        if self.optim_over_replicas and not self.hybrid:
            raise UsageError(f"strategy {self.name!r} has optim_over_replicas without hybrid; set hybrid=True.")


SHARD, REPLICATE = Place.SHARD, Place.REPLICATE
FULL_SHARD = Strategy(name="full_shard", params=SHARD, grads=SHARD, optim=SHARD)
SHARD_GRAD_OP = Strategy(name="shard_grad_op", params=SHARD, grads=SHARD, optim=SHARD, keep_until_backward=True)
SHARD_OPTIM = Strategy(name="shard_optim", params=REPLICATE, grads=REPLICATE, optim=SHARD)
NO_SHARD = Strategy(name="no_shard", params=REPLICATE, grads=REPLICATE, optim=REPLICATE)
HYBRID_SHARD = Strategy(name="hybrid_shard", params=SHARD, grads=SHARD, optim=SHARD, hybrid=True)
HYBRID_SHARD_OPTIM = Strategy(
    name="hybrid_shard_optim", params=SHARD, grads=SHARD, optim=SHARD, hybrid=True, optim_over_replicas=True
)
STRATEGIES: Mapping[str, Strategy] = {
    s.name: s for s in (FULL_SHARD, SHARD_GRAD_OP, SHARD_OPTIM, NO_SHARD, HYBRID_SHARD, HYBRID_SHARD_OPTIM)
}


def strategy_named(name: str | Strategy) -> Strategy:
    """Return the strategy called `name`, or `name` itself if it is no str. Raises `UsageError` for an unknown name."""
    if not isinstance(name, str):
        return name
    if name not in STRATEGIES:
        raise UsageError(f"strategy {name!r} does not exist; {nearest(name, STRATEGIES)}")
    return STRATEGIES[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """The dtypes of computation, reduction, outputs, shards and buffers. Raises `UsageError` for dtypes that are not floating.

    Args:
        params: dtype in which floating parameters are gathered and used; None: their own. Batch norms with running statistics
            keep their own unless `buffers` is set
        reduce: dtype in which gradients are summed over ranks, except float64 ones; None: that of the gathered parameters
        output: dtype of floating outputs of the model, or of a unit in `overrides`; None: unchanged
        master: dtype of the sharded parameters; wider and frozen ones keep their own. None: all keep their own
        buffers: dtype of floating buffers, running statistics too; None: unchanged
        cast_inputs: cast floating inputs of each unit to `params`
        overrides: class, or shell pattern of names, of units -> their own `Precision`
    """

    params: torch.dtype | None = None
    reduce: torch.dtype | None = torch.float32
    output: torch.dtype | None = None
    master: torch.dtype | None = torch.float32
    buffers: torch.dtype | None = None
    cast_inputs: bool = True
    overrides: Mapping[type[nn.Module] | str, Precision] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for key in ("params", "reduce", "output", "master", "buffers"):
            dtype = getattr(self, key)
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise UsageError(
                    f"Precision({key}={dtype!r}) is not a floating dtype; pass torch.bfloat16, for example."
                )

    def compute_dtype(self, own: torch.dtype) -> torch.dtype:
        """Return `params`, the dtype in which a parameter of dtype `own` is gathered; return `own` if `params` is None or `own`
        is not floating."""
        return self.params if self.params is not None and own.is_floating_point else own

    def master_dtype(self, own: torch.dtype, requires_grad: bool) -> torch.dtype:
        """Return the dtype of the shard of a parameter of dtype `own`: `master`, or `own` if that is wider. Return `own` if the
        parameter is frozen or not floating, or if `master` is None."""
        if self.master is None or not requires_grad or not own.is_floating_point:
            return own
        return own if own.itemsize > self.master.itemsize else self.master

    def reduce_dtype(self, compute: torch.dtype) -> torch.dtype:
        """Return the dtype in which gradients of a parameter that is gathered in `compute` are summed over ranks: `reduce`.
        Return `compute` if `reduce` is None, or if `compute` is float64 or not floating."""
        if self.reduce is None or not compute.is_floating_point or compute == torch.float64:
            return compute
        return self.reduce


COMPUTE_DTYPES: Mapping[str, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Name of a precision on the command line -> the dtype for `Precision(params=)`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefetch:
    """Limit on the units (modules whose parameters are gathered together) that are gathered ahead of use: as many as fit into
    `budget_bytes`; if that is None, one unit of any size."""

    budget_bytes: int | None = None


DEVICE, HOST, DISK = "device", "host", "disk:"


@dataclass(frozen=True, slots=True, kw_only=True)
class Offload:
    """The places in which training state is stored between uses, and in which the optimizer steps.

    A place is "device" (on which the model computes), "host" (memory of this machine) or "disk:/path" (an unnamed file in that
    folder, gone with the process). State on disk needs `wrap_optimizer`, and so does `step="device"`. Raises `UsageError` for an
    unknown place, for places that contradict each other, and for a byte limit that is negative or has nothing to limit.

    Args:
        params: place of each rank's shards in the dtype in which they are gathered; copied to the device for each use
        grads: place of gradients from their reduce to the step, and of the sharded parameters that are stepped, which are
            on disk if `params` is. None: "host" if the step is on the host or `params` is off the device, else "device"
        optimizer: place of the optimizer's states
        activations: place, until the recomputation, of the inputs of units that `checkpoint_activations` recomputes
        step: "host" steps on the CPU, during the next forward; "device" copies the states to the device, chunk by
            chunk. None: "host" if `optimizer` is off the device
        device_bytes: bytes of this rank up to which offloaded state stays on the device: parameters first, then gradients,
            then states, each from the first unit on
        host_bytes: the same for state that stays on the host instead of the disk. With nothing on disk and without
            `device_bytes`: units that do not fit on the host stay on the device
        overrides: class, or shell pattern of names, of units -> their own `Offload`
    """

    params: str = DEVICE
    grads: str | None = None
    optimizer: str = DEVICE
    activations: str = DEVICE
    step: str | None = None
    device_bytes: int | None = None
    host_bytes: int | None = None
    overrides: Mapping[type[nn.Module] | str, Offload] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for key in ("params", "grads", "optimizer", "activations"):
            place = getattr(self, key)
            if not (key == "grads" and place is None):
                check_place(f"Offload({key}", place)
        if self.step not in (None, DEVICE, HOST):
            raise UsageError(f"Offload(step={self.step!r}) is no place to step; {nearest(self.step, [DEVICE, HOST])}")
        for key in ("device_bytes", "host_bytes"):
            num = getattr(self, key)
            if num is not None and (num < 0 or not self.is_any):
                raise UsageError(
                    f"Offload({key}={num!r}) limits how much offloaded state stays nearer; it takes 0 bytes or more, and needs "
                    "params, grads or optimizer on 'host' or 'disk:/path' (activations do not count)."
                )
        if self.step == HOST and self.optimizer == DEVICE:
            raise UsageError(
                "Offload(step='host', optimizer='device') would step on the host with states on the device; pass "
                "optimizer='host' too, or step='device'."
            )
        if self.grads == DEVICE and (self.stepped_on == HOST or self.params != DEVICE):
            raise UsageError(
                f"Offload(grads='device', params={self.params!r}, step={self.stepped_on!r}): gradients are stored with the "
                "parameters that are stepped, here on the host; leave out grads, or pass params='device' and step='device'."
            )

    @property
    def is_any(self) -> bool:
        """True if parameters, gradients or optimizer states are stored on host or disk; activations do not count."""
        return (self.params, self.rest_of_grads, self.optimizer) != (DEVICE, DEVICE, DEVICE)

    @property
    def asks(self) -> bool:
        """True if anything is stored on host or disk, activations included."""
        return self.is_any or self.activations != DEVICE

    @property
    def stepped_on(self) -> str:
        """Place in which the optimizer steps, "device" or "host": `step`, or its default if that is None."""
        return self.step or (DEVICE if self.optimizer == DEVICE else HOST)

    @property
    def rest_of_grads(self) -> str:
        """Place of gradients after their reduce, and of the parameters that are stepped: `grads`, or its default if None."""
        return self.grads or (DEVICE if self.stepped_on == DEVICE and self.params == DEVICE else HOST)

    @property
    def offloads(self) -> bool:
        """True if gradients, and with them the sharded parameters that are stepped, are stored on host or disk."""
        return self.rest_of_grads != DEVICE

    @property
    def streams(self) -> bool:
        """True if an optimizer step copies its state chunk by chunk: from the disk, or from the host to the device."""
        return self.uses_disk or (self.is_any and self.stepped_on == DEVICE)

    @property
    def uses_disk(self) -> bool:
        return any(folder_of(place) for place in (self.params, self.rest_of_grads, self.optimizer))


def check_place(key: str, place: object) -> None:
    """Raise `UsageError` unless `place` is "device", "host" or "disk:/path". `key`: begins the message: "Offload(params"."""
    is_folder = isinstance(place, str) and place.startswith(DISK) and len(place) > len(DISK)
    if place not in (DEVICE, HOST) and not is_folder:
        raise UsageError(f"{key}={place!r}) is no place; {nearest(str(place), [DEVICE, HOST, f'{DISK}/path'])}")


def folder_of(place: str) -> Path | None:
    """Return the folder in a place "disk:/path"; None for any other place."""
    return Path(place.removeprefix(DISK)) if place.startswith(DISK) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationCheckpointing:
    """The choice of units that recompute their activations in the backward. `every`: 1 for all units with more than one layer
    except the model itself, 2 for every second of these, and so on; 0 for none. `selective`: the chosen units keep the results
    of attention without dropout and of every second matrix product."""

    every: int = 0
    selective: bool = False


def checkpointing_named(text: str) -> ActivationCheckpointing:
    """Return the `ActivationCheckpointing` for "none", "full", "selective" or "every:K". Raises `UsageError` for other values."""
    if not isinstance(text, str):
        raise UsageError(
            f"checkpoint_activations is {text!r}, of type {type(text).__name__}; pass 'none', 'full', 'selective' or 'every:2'."
        )
    fixed = {
        "none": ActivationCheckpointing(),
        "full": ActivationCheckpointing(every=1),
        "selective": ActivationCheckpointing(every=1, selective=True),
    }
    if text in fixed:
        return fixed[text]
    head, _, count = text.partition(":")
    if head == "every" and count.isdecimal() and int(count) > 0:
        return ActivationCheckpointing(every=int(count))
    raise UsageError(f"checkpoint_activations {text!r} is not understood; {nearest(text, [*fixed, 'every:2'])}")


DEBUG_MODES = ("streams", "order", "finite")


def debug_modes(asked: str | Iterable[str]) -> frozenset[str]:
    """Return as a set the debug modes `asked`: one of `DEBUG_MODES`, or several. Raises `UsageError` for an unknown name."""
    modes = tuple(asked) if isinstance(asked, Iterable) and not isinstance(asked, str) else (asked,)
    for mode in modes:
        if mode not in DEBUG_MODES:
            raise UsageError(f"debug={mode!r} is not known; {nearest(str(mode), list(DEBUG_MODES))}")
    return frozenset(modes)


UnitRule = Callable[[str, nn.Module], bool]
"""Function (qualified name, module) -> True if the module becomes a unit, whose parameters are gathered together."""
