"""Collectives of the ranks that save or load one checkpoint. An error on one rank is raised on all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from accordion.engine.communicator import device_type_of_job
from accordion.errors import AccordionError, CheckpointError, UsageError
from accordion.safety.liveness.hub import hubs_of_job

T = TypeVar("T")
BY_CALLER = "!"  # marks the message of a `UsageError` when it is sent
QUOTED = 300  # letters of a backend's error that a message quotes
MESSAGE_BYTES = 32768  # longer error messages are cut, as each rank receives those of all ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Team:
    """The ranks that save or load one checkpoint, with collectives; made by `of` or `alone`. `ranks`: global ones; `index`:
    position of this rank in `ranks`; `groups`: this rank's process group for each mesh axis; `device`: of tensors to send."""

    ranks: tuple[int, ...]
    index: int
    groups: tuple[dist.ProcessGroup, ...]
    device: torch.device

    @property
    def leads(self) -> bool:
        """True on the first of `ranks`, which alone writes the manifest."""
        return self.index == 0

    @classmethod
    def of(cls, tensors: Iterable[Tensor]) -> Team:
        """Return the team of all ranks on the mesh of the DTensors in `tensors`; without DTensors, of all ranks of the job;
        without a process group, of this process. Raises `CheckpointError` if the DTensors are on different sets of ranks."""
        meshes = list(dict.fromkeys(tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor)))
        if not meshes and not dist.is_initialized():
            return cls.alone()
        ranks_of = [tuple(mesh.mesh.flatten().tolist()) for mesh in meshes] or [tuple(range(dist.get_world_size()))]
        if any(set(ranks) != set(ranks_of[0]) for ranks in ranks_of):
            raise CheckpointError(
                f"the model's tensors are on different ranks, {' and '.join(map(str, dict.fromkeys(ranks_of)))}; "
                "a checkpoint needs all of them on the same ranks."
            )
        groups: list[Any] = meshes[0].get_all_groups() if meshes else [dist.group.WORLD]
        device = torch.device(meshes[0].device_type if meshes else device_type_of_job())
        return cls(ranks=ranks_of[0], index=ranks_of[0].index(dist.get_rank()), groups=tuple(groups), device=device)

    @classmethod
    def alone(cls) -> Team:
        return cls(ranks=(0,), index=0, groups=(), device=torch.device("cpu"))

    def agree(self, action: Callable[[], T]) -> T:
        """Call `action` and return its result once it has succeeded on all ranks. Collective. If it fails on any rank, all raise:
        `UsageError` if all the errors are of that class, else `CheckpointError`."""
        return agreed(action, self.shared, self.ranks)

    def shared(self, text: str, most: int | None = MESSAGE_BYTES) -> list[str]:
        """All-gather `text`: return the texts of all `ranks`, in order, each cut to its first `most` bytes (None: whole).
        Collective. Raises `CheckpointError` if a rank cannot be reached."""
        data = text.encode(errors="backslashreplace")[:most]
        longest = max(self.gathered(len(data)))
        if not longest:
            return [""] * len(self.ranks)
        rows = self._rows(torch.frombuffer(bytearray(data.ljust(longest, b"\0")), dtype=torch.uint8)[None])
        return [row.tobytes().rstrip(b"\0").decode(errors="replace") for row in rows.numpy()]

    def gathered(self, number: int) -> list[int]:
        """All-gather `number`, an int64: return the numbers of all ranks, in the order of `ranks`. Collective."""
        return [int(row[0]) for row in self._rows(torch.tensor([[number]], device="cpu")).tolist()]

    def _rows(self, rows: Tensor) -> Tensor:
        """All-gather `rows`, (1, n) on each rank, to (num_ranks, n) on the CPU. Raises `CheckpointError` if that fails."""
        rows = rows.to(self.device)
        try:
            for group in reversed(self.groups):  # the last axis is the fastest in the order of ranks
                parts = [torch.zeros_like(rows) for _ in range(dist.get_world_size(group))]
                dist.all_gather(parts, rows, group=group)
                rows = torch.cat(parts)
            return rows.cpu()
        except RuntimeError as error:
            # The backend's error describes sockets; the hub of a model on these ranks knows how the other ranks ended.
            reasons = [hub.others(self.ranks) for hub in hubs_of_job() if set(self.ranks) <= set(hub.ranks)][:1]
            reasons.append(str(error).splitlines()[0][:QUOTED])
            raise CheckpointError(
                "another rank has ended, cannot be reached, or did not save or load in time, so that ranks cannot agree on a "
                f"checkpoint: {'; '.join(filter(None, reasons))}"
            ) from error


def agreed(action: Callable[[], T], shared: Callable[[str], list[str]], ranks: Sequence[int]) -> T:
    """Call `action`, exchange the ranks' errors by `shared`, which all-gathers a text over `ranks`, and return its result.
    Collective. If `action` fails on any rank, all ranks raise an error with the messages of those that failed: `UsageError` if
    all their errors are of that class, else `CheckpointError`."""
    failure: Exception | None = None
    message = ""
    try:
        result = action()
    except Exception as error:
        failure, message = error, message_of(error)
    marked = shared(BY_CALLER * isinstance(failure, UsageError) + message)
    if any(marked):
        kind = UsageError if all(text.startswith(BY_CALLER) for text in marked if text) else CheckpointError
        raise kind(joined([text.removeprefix(BY_CALLER) for text in marked], ranks)) from failure
    return result


def message_of(error: Exception) -> str:
    """Return "CLASS: MESSAGE" of `error`, or the message alone if it is an `AccordionError` with one; in valid Unicode."""
    text = (isinstance(error, AccordionError) and str(error)) or f"{type(error).__name__}: {error}"
    return text.encode(errors="backslashreplace").decode()  # paths and names may have any bytes


def joined(texts: Sequence[str], ranks: Sequence[int]) -> str:
    """Return one message from the `texts` of `ranks`, in their order: the text itself if all are equal, else each different
    text after its ranks, as in "rank 0, 2: disk full; rank 1: timeout". Empty texts are left out."""
    ranks_of: dict[str, list[int]] = {}
    for rank, text in zip(ranks, texts, strict=True):
        if text:
            ranks_of.setdefault(text, []).append(rank)
    if list(map(len, ranks_of.values())) == [len(texts)]:
        return texts[0]
    return "; ".join(f"rank {', '.join(map(str, those))}: {text}" for text, those in ranks_of.items())
