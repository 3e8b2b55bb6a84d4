"""The ranks that save or load one checkpoint, and how they fail together instead of waiting for one another."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from accordion import _torch
from accordion.engine.communicator import device_type_of_job
from accordion.errors import AccordionError, CheckpointError, UsageError
from accordion.safety.liveness.hub import hubs_of_job

T = TypeVar("T")
BY_CALLER = "!"  # before what others hear of a `UsageError`
QUOTED = 300  # letters of what a backend says
MESSAGE_BYTES = 8192  # of each rank's error that the others see; its own it sees whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Team:
    """`ranks`: their global ranks; `index`: which of them this is; `groups`: together they join all, one axis each."""

    ranks: tuple[int, ...]
    index: int
    groups: tuple[dist.ProcessGroup, ...]
    device: torch.device

    @property
    def leads(self) -> bool:
        """Whether this rank writes what is written once."""
        return self.index == 0

    @property
    def timeout_s(self) -> float:
        """For how long the job's process group lets a rank wait."""
        return _torch.timeout_s_of_job() if dist.is_initialized() else math.inf

    @classmethod
    def of(cls, tensors: Iterable[Tensor]) -> Team:
        """The ranks of the mesh that `tensors` lie on; without a DTensor all ranks there are, or this process alone.

        Raises `CheckpointError` where tensors lie on different sets of ranks.
        """
        meshes = list(dict.fromkeys(tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor)))
        if not meshes:
            if not dist.is_initialized():
                return cls(ranks=(0,), index=0, groups=(), device=torch.device("cpu"))
            group = dist.group.WORLD
            assert group is not None
            everyone = tuple(range(dist.get_world_size()))
            return cls(
                ranks=everyone, index=dist.get_rank(), groups=(group,), device=torch.device(device_type_of_job())
            )
        over = [tuple(mesh.mesh.flatten().tolist()) for mesh in meshes]
        if any(set(ranks) != set(over[0]) for ranks in over):
            raise CheckpointError(
                f"the model's tensors lie on different ranks, {' and '.join(map(str, dict.fromkeys(over)))}; "
                "a checkpoint needs all of them on the same ranks."
            )
        index = over[0].index(dist.get_rank())
        return cls(
            ranks=over[0],
            index=index,
            groups=tuple(meshes[0].get_all_groups()),
            device=torch.device(meshes[0].device_type),
        )

    def agree(self, action: Callable[[], T]) -> T:
        """Do `action` on this rank and wait for the others; where one of them failed, all raise as `agreed` does."""
        return agreed(action, self.shared, self.index)

    def shared(self, text: str, most: int | None = MESSAGE_BYTES) -> list[str]:
        """What each rank says, `most` bytes of it, in their order. A collective."""
        words = text.encode(errors="backslashreplace")[:most]
        longest = max(self.gathered(len(words)))
        if not longest:
            return [""] * len(self.ranks)
        rows = self._rows(torch.frombuffer(bytearray(words.ljust(longest, b"\0")), dtype=torch.uint8)[None])
        return [row.tobytes().rstrip(b"\0").decode(errors="replace") for row in rows.numpy()]

    def gathered(self, number: int) -> list[int]:
        """The number, an int64, of each rank, in their order. A collective."""
        return [int(row[0]) for row in self._rows(torch.tensor([[number]], device="cpu")).tolist()]

    def _rows(self, rows: Tensor) -> Tensor:
        """The row (1, n) of each rank, (num_ranks, n). Raises `CheckpointError` where another rank has ended."""
        rows = rows.to(self.device)
        try:
            for group in reversed(self.groups):  # the last axis is the fastest in the order of ranks
                parts = [torch.zeros_like(rows) for _ in range(dist.get_world_size(group))]
                dist.all_gather(parts, rows, group=group)
                rows = torch.cat(parts)
            return rows.cpu()
        except RuntimeError as error:
            # A backend's own words tell of its sockets and pairs; the hub of a model on these ranks knows what became of them.
            words = [hub.others(self.ranks) for hub in hubs_of_job() if set(self.ranks) <= set(hub.ranks)][:1]
            words.append(str(error).splitlines()[0][:QUOTED])
            raise CheckpointError(
                "another rank has ended, cannot be reached, or did not come here in time, so that ranks cannot agree on a "
                f"checkpoint: {'; '.join(filter(None, words))}"
            ) from error


def agreed(action: Callable[[], T], shared: Callable[[str], list[str]], index: int) -> T:
    """Do `action`, and raise on all ranks where it failed on one: `CheckpointError`, or `UsageError` where all that failed
    did so with it. `shared`: the texts of all, of which `index` is this rank's.
    """
    failure: Exception | None = None
    try:
        result = action()
    except Exception as error:
        failure = error
    own = "" if failure is None else told(failure)
    marked = shared(BY_CALLER * isinstance(failure, UsageError) + own)
    if any(marked):
        kind = UsageError if all(text.startswith(BY_CALLER) for text in marked if text) else CheckpointError
        raise kind(joined([text.removeprefix(BY_CALLER) for text in marked], index, own)) from failure
    return result


def told(error: Exception) -> str:
    """What others hear of a failure: words that can be encoded, whatever names they quote."""
    return told_as((isinstance(error, AccordionError) and str(error)) or f"{type(error).__name__}: {error}")


def told_as(text: str) -> str:
    """`text` in words that can be sent and printed; a path or a name may hold what UTF-8 does not."""
    return text.encode(errors="backslashreplace").decode()


def joined(heard: list[str], index: int, own: str) -> str:
    """One message of what the ranks said: plain where all said the same, else each saying with its ranks."""
    said: dict[str, list[int]] = {}
    for rank, text in enumerate(heard):
        if text:
            said.setdefault(text, []).append(rank)
    full = {heard[index]: own}  # the own words uncut
    if len(said) == 1 and len(next(iter(said.values()))) == len(heard):
        return full.get(heard[0], heard[0])
    return "; ".join(f"rank {', '.join(map(str, ranks))}: {full.get(text, text)}" for text, ranks in said.items())
