"""Which units rest where, so that given numbers of bytes are kept: pure arithmetic on how shards lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from accordion.config import DEVICE, HOST, Offload
from accordion.engine.layout import Message
from accordion.errors import UsageError
from accordion.memory.host import home_bytes, landing_bytes

NUM_STATES = 2  # of each trained element, as Adam keeps


@dataclass(frozen=True, slots=True)
class Shape:
    """The shards of one group: how they lie, their dtypes, which are trained, and the dtype in which they are gathered.

    The same on all ranks: rows are counted with their padding.
    """

    msg: Message
    dtypes: Sequence[torch.dtype]
    trained: Sequence[bool]
    gathered: torch.dtype

    @property
    def trained_bytes(self) -> int:
        return self._bytes(only_trained=True)

    @property
    def device_bytes(self) -> int:
        """Shards, gradients and states of a group that rests on the device."""
        return self._bytes(only_trained=False) + (1 + NUM_STATES) * self.trained_bytes

    @property
    def kept_bytes(self) -> int:
        """The rows of an offloaded group that stay on the device where its parameters do."""
        return self.msg.shard_numel * self.gathered.itemsize

    def _bytes(self, only_trained: bool) -> int:
        counted = zip(self.msg.cuts, self.dtypes, self.trained, strict=True)
        return sum(c.shard_numel * dtype.itemsize for c, dtype, trains in counted if trains or not only_trained)


def arena_bytes(offloads: Sequence[Offload], shapes: Sequence[Sequence[Shape]]) -> tuple[int, int]:
    """Host memory for the homes of all offloaded units, and for gradients that land there to be added."""
    chosen = [mine for offload, mine in zip(offloads, shapes, strict=True) if offload.offloads]
    homes = sum(home_bytes(s.msg, s.dtypes, s.gathered) for mine in chosen for s in mine)
    landing = max((sum(landing_bytes(s.msg, s.dtypes) for s in mine) for mine in chosen), default=0)
    return homes, landing


def within(policy: Offload, offloads: Sequence[Offload], shapes: Sequence[Sequence[Shape]]) -> list[Offload]:
    """The place of each unit, so that `policy.device_bytes` and `policy.host_bytes` are kept.

    Units stay on the device, and then states on the host, from the first one on, as long as they fit: the next forward needs
    the first ones first, and what is off the device is stepped behind it. Units with an override keep theirs.
    Raises `UsageError` where the least that must be somewhere is more than is given.
    """
    result = list(offloads)
    mine = [i for i, offload in enumerate(offloads) if offload is policy]
    if policy.device_bytes is not None:
        kept = policy.params == DEVICE
        left = policy.device_bytes - sum(_on_device(offloads[i], shapes[i]) for i in range(len(offloads)))
        if left < 0:
            raise UsageError(
                f"device_bytes={policy.device_bytes} is less than the {policy.device_bytes - left} bytes that stay on the device "
                "of a rank between uses whatever is offloaded; raise it, pass params='host', or use more ranks."
            )
        for i in mine:
            more = sum(s.device_bytes - (s.kept_bytes if kept else 0) for s in shapes[i])
            if more <= left:
                result[i], left = Offload(), left - more
    if policy.host_bytes is None:
        return result
    arena = sum(arena_bytes(result, shapes))
    states = {i: NUM_STATES * sum(s.trained_bytes for s in shapes[i]) for i in range(len(result))}
    on_host = [i for i, offload in enumerate(result) if offload.offloads and offload.folder is None]
    left = policy.host_bytes - arena - sum(states[i] for i in on_host)
    if left < 0:
        raise UsageError(
            f"host_bytes={policy.host_bytes} is less than the {policy.host_bytes - left} bytes of a rank that must be on the "
            "host; raise it, pass optimizer='disk:/path' or device_bytes, or use more ranks."
        )
    for i in mine:
        if result[i].folder is not None and states[i] <= left:
            result[i], left = replace(policy, optimizer=HOST, device_bytes=None, host_bytes=None), left - states[i]
    return result


def _on_device(offload: Offload, shapes: Sequence[Shape]) -> int:
    """What a unit holds on the device between uses."""
    if not offload.offloads:
        return sum(s.device_bytes for s in shapes)
    return sum(s.kept_bytes for s in shapes) if offload.params == DEVICE else 0
