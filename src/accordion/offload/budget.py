"""Which units rest where, so that given numbers of bytes are kept: pure arithmetic on how shards lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch

from accordion.config import DEVICE, HOST, Offload, folder_of
from accordion.engine.layout import Message
from accordion.errors import UsageError
from accordion.offload.arena import ALIGN_BYTES
from accordion.offload.host_shards import allocated_bytes, paged_bytes, some_of

NUM_STATES = 2  # of each trained element, as Adam keeps
# Pieces of host memory through which shards on disk are gathered: one is copied from, the other filled.
NUM_STAGING_BUFFERS = 2


@dataclass(frozen=True)
class Shape:
    """The shards of one group: how they lie, their dtypes, which are trained, and the dtype in which they are gathered.

    The same on all ranks: rows are counted with their padding.
    """

    msg: Message
    dtypes: Sequence[torch.dtype]
    trained: Sequence[bool]
    gathered: torch.dtype

    @cached_property
    def trained_bytes(self) -> int:
        counted = zip(self.msg.cuts, self.dtypes, self.trained, strict=True)
        return sum(c.shard_numel * dtype.itemsize for c, dtype, trains in counted if trains)

    @cached_property
    def shard_bytes(self) -> int:
        return sum(c.shard_numel * dtype.itemsize for c, dtype in zip(self.msg.cuts, self.dtypes, strict=True))

    @cached_property
    def laid_out_bytes(self) -> int:
        """One state of each trained element where each parameter begins at pages of its own, as a step streams them."""
        itemsize = min([self.gathered.itemsize, *(dtype.itemsize for dtype in self.dtypes)])
        step, counted = ALIGN_BYTES // itemsize, zip(self.msg.cuts, self.dtypes, self.trained, strict=True)
        return sum(-(-c.shard_numel // step) * step * dtype.itemsize for c, dtype, trains in counted if trains)

    def state_bytes(self, streams: bool) -> int:
        """One state of each trained element. `streams`: see `Offload.streams`."""
        return self.laid_out_bytes if streams else self.trained_bytes

    @cached_property
    def shard_buffer_bytes(self) -> int:
        """Shards and the rows that travel in another dtype, in host memory."""
        wide = [i for i, dtype in enumerate(self.dtypes) if dtype != self.gathered]
        rows = allocated_bytes(self.msg, [self.gathered] * len(self.dtypes))
        return rows + (allocated_bytes(some_of(self.msg, wide), [self.dtypes[i] for i in wide]) if wide else 0)

    @cached_property
    def slots_bytes(self) -> int:
        """Gradients, in host memory."""
        return allocated_bytes(some_of(self.msg, range(len(self.msg.cuts))), self.dtypes)

    @cached_property
    def landing_bytes(self) -> int:
        """Gradients, each from a page on."""
        return paged_bytes(self.msg, self.dtypes)

    @cached_property
    def row_bytes(self) -> int:
        """The rows that travel, each from a page on."""
        return paged_bytes(self.msg, [self.gathered] * len(self.dtypes))

    @cached_property
    def paged_bytes(self) -> int:
        """The shards, each from a page on, and the rows that travel in another dtype."""
        wide = [i for i, dtype in enumerate(self.dtypes) if dtype != self.gathered]
        cuts = [self.msg.cuts[i] for i in wide]
        return self.row_bytes + paged_bytes(replace(self.msg, cuts=tuple(cuts)), [self.dtypes[i] for i in wide])


Shapes = Sequence[Sequence[Shape]]


@dataclass(frozen=True, slots=True)
class HostNeeds:
    """What the arena is for, bytes: shards and gradients that rest there, gradients that land, shards on their way from disk."""

    shard_buffers: int
    landing: int
    staging_buffers: tuple[int, ...]

    @property
    def total(self) -> int:
        return self.shard_buffers + self.landing + sum(self.staging_buffers)


def host_needs(offloads: Sequence[Offload], shapes: Shapes) -> HostNeeds:
    """What is allocated on the host before the first step."""
    chosen = [(i, o, s) for i, (o, mine) in enumerate(zip(offloads, shapes, strict=True)) if o.offloads for s in mine]
    shard_buffers = 0
    landing: dict[int, int] = {}
    staged: dict[int, int] = {}
    for i, offload, s in chosen:
        shard_buffers += ALIGN_BYTES if folder_of(offload.params) else s.shard_buffer_bytes  # a tag
        shard_buffers += s.slots_bytes if offload.rest_of_grads == HOST else 0
        landing[i] = landing.get(i, 0) + s.landing_bytes
        staged[i] = staged.get(i, 0) + (s.row_bytes if folder_of(offload.params) else 0)
    staging_buffers = [
        max((b for i, b in staged.items() if i % NUM_STAGING_BUFFERS == which), default=0)
        for which in range(NUM_STAGING_BUFFERS)
    ]
    return HostNeeds(
        shard_buffers, max(landing.values(), default=0), tuple(staging_buffers) if any(staging_buffers) else ()
    )


def on_disk(offloads: Sequence[Offload], shapes: Shapes) -> dict[Path, int]:
    """Bytes of shards and gradients in the file of each folder."""
    found: dict[Path, int] = {}
    for offload, mine in zip(offloads, shapes, strict=True):
        for s in mine if offload.offloads else ():
            for place, num_bytes in (
                (offload.params, s.paged_bytes),
                (offload.rest_of_grads, s.landing_bytes),
            ):
                folder = folder_of(place)
                if folder is not None:
                    found[folder] = found.get(folder, 0) + num_bytes
    return found


def device_bytes(offload: Offload, shapes: Sequence[Shape], num_states: int = NUM_STATES) -> int:
    """What a unit holds on the device between uses: shards or the rows kept of them, gradients, states."""
    held = 0
    if not offload.offloads:
        held = sum(s.shard_bytes + s.trained_bytes for s in shapes)
    elif offload.params == DEVICE:  # the rows that are gathered stay there
        held = sum(s.msg.shard_numel * s.gathered.itemsize for s in shapes)
    return held + (num_states * _states(offload, shapes) if offload.optimizer == DEVICE else 0)


def _states(offload: Offload, shapes: Sequence[Shape]) -> int:
    return sum(s.state_bytes(offload.streams) for s in shapes)


Nearer = Callable[[Offload], Offload]


def within(policy: Offload, offloads: Sequence[Offload], shapes: Shapes) -> list[Offload]:
    """The place of each unit, so that `policy.device_bytes` and `policy.host_bytes` are kept.

    The coldest go farthest: what is used twice a step, the parameters, comes nearer before what is used once, gradients and
    then states; each from the first unit on, since the next forward needs the first ones first, and what is off the
    device is stepped behind it. What the host has no room for stays on the device where no disk and no `device_bytes` are
    named. Units with an override keep theirs.
    Raises `UsageError` where the least that must be somewhere is more than is given.
    """
    result = list(offloads)
    mine = [i for i, offload in enumerate(offloads) if offload is policy]
    whole = Offload(
        step_in_backward=policy.step_in_backward, activations=policy.activations, checksums=policy.checksums
    )

    def on_device() -> int:
        return sum(map(device_bytes, result, shapes))

    def on_host() -> int:
        states = [_states(o, mine) for o, mine in zip(result, shapes, strict=True) if o.optimizer == HOST]
        return host_needs(result, shapes).total + NUM_STATES * sum(states)

    if policy.device_bytes is not None:
        if on_device() > policy.device_bytes:
            raise UsageError(
                f"device_bytes={policy.device_bytes} is less than the {on_device()} bytes that stay on the device "
                "of a rank between uses whatever is offloaded; raise it, pass params='host', or use more ranks."
            )
        _promote(result, mine, [partial_replace(params=DEVICE), lambda _: whole], on_device, policy.device_bytes)
    if policy.host_bytes is None:
        return result
    for i in mine if policy.device_bytes is None and not policy.uses_disk else ():
        if on_host() > policy.host_bytes:
            result[i] = whole
    if on_host() > policy.host_bytes:
        raise UsageError(
            f"host_bytes={policy.host_bytes} is less than the {on_host()} bytes of a rank that must be on the "
            "host; raise it, pass optimizer='disk:/path' or device_bytes, or use more ranks."
        )
    nearer = [partial_replace(**{kind: HOST}, only_from_disk=kind) for kind in ("params", "grads", "optimizer")]
    _promote(result, mine, nearer, on_host, policy.host_bytes)
    return result


def partial_replace(*, only_from_disk: str | None = None, **places: str) -> Nearer:
    """What an offload becomes with other places, and without budgets; the same one where `only_from_disk` is not on disk."""

    def nearer(offload: Offload) -> Offload:
        if only_from_disk is not None and folder_of(getattr(offload, only_from_disk) or HOST) is None:
            return offload
        return replace(offload, **places, device_bytes=None, host_bytes=None)  # type: ignore[arg-type]

    return nearer


def _promote(
    result: list[Offload], mine: Sequence[int], nearer: Sequence[Nearer], used: Callable[[], int], budget: int
) -> None:
    """Bring units nearer, one kind after the other, as long as they fit."""
    for step in nearer:
        for i in mine:
            before, result[i] = result[i], step(result[i])
            if used() > budget:
                result[i] = before


def check_activations(offloads: Sequence[Offload], checkpointing: str) -> None:
    """Raise `UsageError` where inputs of recomputed units are to rest elsewhere, and none is recomputed."""
    if checkpointing == "none" and any(offload.activations != DEVICE for offload in offloads):
        raise UsageError(
            "Offload(activations=...) takes the inputs of recomputed units off the device, and checkpoint_activations is 'none'; "
            "pass 'full', 'selective' or 'every:K' too."
        )
