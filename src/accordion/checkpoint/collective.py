"""The ranks that save or load one checkpoint: a failure of one raises on all, so that none waits for another."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

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
MESSAGE_BYTES = 8192  # of a rank's error that are sent to the others; its own error it raises whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Team:
    """The global `ranks` that save or load together; `index`: this rank's position in them; `groups`: one for each mesh axis."""

    ranks: tuple[int, ...]
    index: int
    groups: tuple[dist.ProcessGroup, ...]
    device: torch.device

    @property
    def leads(self) -> bool:
        """True on the first rank, which writes the manifest and all else that is written once."""
        return self.index == 0

    @classmethod
    def of(cls, tensors: Iterable[Tensor]) -> Team:
        """Return the team of the ranks on the mesh of `tensors`: all ranks of the job if there is no DTensor.

        Raises `CheckpointError` if the tensors are on different sets of ranks.
        """
        meshes = list(dict.fromkeys(tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor)))
        if not meshes:
            if not dist.is_initialized():
                return cls.alone()
            group = dist.group.WORLD
            assert group is not None
            return cls._of(range(dist.get_world_size()), [group], device_type_of_job())
        ranks_of = [tuple(mesh.mesh.flatten().tolist()) for mesh in meshes]
        if any(set(ranks) != set(ranks_of[0]) for ranks in ranks_of):
            raise CheckpointError(
                f"the model's tensors are on different ranks, {' and '.join(map(str, dict.fromkeys(ranks_of)))}; "
                "a checkpoint needs all of them on the same ranks."
            )
        return cls._of(ranks_of[0], meshes[0].get_all_groups(), meshes[0].device_type)

    @classmethod
    def alone(cls) -> Team:
        """Return the team of this process alone, which communicates with no other."""
        return cls(ranks=(0,), index=0, groups=(), device=torch.device("cpu"))

    @classmethod
    def _of(cls, ranks: Iterable[int], groups: Iterable[dist.ProcessGroup], device_type: str) -> Team:
        ranks = tuple(ranks)
        index = ranks.index(dist.get_rank())
        return cls(ranks=ranks, index=index, groups=tuple(groups), device=torch.device(device_type))

    def agree(self, action: Callable[[], T]) -> T:
        """Return `action()` once all ranks have called theirs; if one failed, all raise as `agreed` does. Collective."""
        return agreed(action, self.shared, self.index)

    def shared(self, text: str, most: int | None = MESSAGE_BYTES) -> list[str]:
        """Return the `text` of each rank, in the order of `ranks`, cut to `most` bytes each. Collective."""
        data = text.encode(errors="backslashreplace")[:most]
        longest = max(self.gathered(len(data)))
        if not longest:
            return [""] * len(self.ranks)
        rows = self._rows(torch.frombuffer(bytearray(data.ljust(longest, b"\0")), dtype=torch.uint8)[None])
        return [row.tobytes().rstrip(b"\0").decode(errors="replace") for row in rows.numpy()]

    def gathered(self, number: int) -> list[int]:
        """Return the int64 `number` of each rank, in the order of `ranks`. Collective."""
        return [int(row[0]) for row in self._rows(torch.tensor([[number]], device="cpu")).tolist()]

    def _rows(self, rows: Tensor) -> Tensor:
        """All-gather `rows`, (1, n) on each rank, to (num_ranks, n). Raises `CheckpointError` if another rank has ended."""
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


def agreed(action: Callable[[], T], shared: Callable[[str], list[str]], index: int) -> T:
    """Return `action()`, or raise on all ranks if it failed on one: `UsageError` if all errors are that, else `CheckpointError`.

    `shared`: collective that returns the text of each rank; that of this rank is at `index`.
    """
    failure: Exception | None = None
    try:
        result = action()
    except Exception as error:
        failure = error
    message = "" if failure is None else message_of(failure)
    marked = shared(BY_CALLER * isinstance(failure, UsageError) + message)
    if any(marked):
        kind = UsageError if all(text.startswith(BY_CALLER) for text in marked if text) else CheckpointError
        raise kind(joined([text.removeprefix(BY_CALLER) for text in marked], index, message)) from failure
    return result


def message_of(error: Exception) -> str:
    """Return the message of `error` in text that UTF-8 can encode, with its class if it is not one of ours."""
    return encodable((isinstance(error, AccordionError) and str(error)) or f"{type(error).__name__}: {error}")


def encodable(text: str) -> str:
    """Return `text` with escapes for characters that UTF-8 cannot encode, which some paths and names have."""
    return text.encode(errors="backslashreplace").decode()


def joined(texts: list[str], index: int, whole: str) -> str:
    """Join `texts`, one of each rank, to one message: the text if all are equal, else each text with the ranks that sent it.

    `whole`: the text of this rank, the one at `index`, which may be cut off in `texts`.
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        if text:
            ranks_of.setdefault(text, []).append(rank)
    uncut = {texts[index]: whole}
    if len(ranks_of) == 1 and len(next(iter(ranks_of.values()))) == len(texts):
        return uncut.get(texts[0], texts[0])
    return "; ".join(f"rank {', '.join(map(str, ranks))}: {uncut.get(text, text)}" for text, ranks in ranks_of.items())
