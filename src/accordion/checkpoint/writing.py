"""One rank's tensor file: which bytes lie where in it, a copy of them in host memory, and writing them with checksums."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from accordion.checkpoint.boxes import Box
from accordion.checkpoint.checksums import DIGITS, PIECE_BYTES, SUMMED_BYTES, Running, kind_here, pieces, running
from accordion.checkpoint.format import code_of, entry_name, header
from accordion.checkpoint.storage.folders import Folder, Writer
from accordion.offload.arena import Arena

SUMS = "sums"


@dataclass(frozen=True, slots=True)
class WritePart:
    """The box of a tensor that this rank writes; `data`: its elements, on any device.

    `read`: returns the elements when they are written, if `data` is on meta.
    """

    name: str
    box: Box
    data: Tensor
    read: Callable[[], Tensor] | None = None

    @property
    def num_bytes(self) -> int:
        return self.data.numel() * self.data.element_size()


@dataclass(frozen=True, slots=True)
class FileLayout:
    """What a file holds, in this order, from its first byte on: `head`, the bytes of each part, and `sums_bytes` of sums."""

    head: bytes
    parts: tuple[WritePart, ...]
    kind: str
    sums_bytes: int

    @property
    def num_bytes(self) -> int:
        """Of the parts alone."""
        return sum(part.num_bytes for part in self.parts)


def sums_name(rank: int) -> str:
    """The tensor in which a rank's file tells the checksums of its parts: JSON, {entry name: [sum of each piece, ...]}."""
    return f"rank/{rank:05d}/{SUMS}"


def layout(parts: Iterable[WritePart], rank: int) -> FileLayout:
    """Lay out a rank's file: large elements first, so that each part begins at a multiple of its own element's size."""
    parts = tuple(sorted(parts, key=lambda part: -part.data.element_size()))
    kind = kind_here()
    zero = "0" * DIGITS[kind]
    empty = {_entry_name(part): [zero for _ in pieces(0, part.num_bytes, PIECE_BYTES)] for part in parts}
    length = len(_as_json(empty))
    words = [(_entry_name(part), code_of(part.name, part.data.dtype), tuple(part.data.shape)) for part in parts]
    return FileLayout(header([*words, (entry_name(sums_name(rank), (0,)), "U8", (length,))]), parts, kind, length)


def _entry_name(part: WritePart) -> str:
    return entry_name(part.name, part.box.offset)


def _as_json(sums: dict[str, list[str]]) -> bytes:
    return json.dumps(sums, separators=(",", ":")).encode()


def write(folder: Folder, name: str, plan: FileLayout, host: memoryview | None = None) -> None:
    """Write the file that `plan` lays out, and wait until it is on the disk.

    `host`: the bytes of its parts, where they were copied. Without it they are copied from their devices one at a time:
    safetensors' own writer wants all tensors in host memory at once and refuses views of one storage, which shards are.
    """
    begin = running(plan.kind)
    sums: dict[str, list[str]] = {}
    with folder.create(name, len(plan.head) + plan.num_bytes + plan.sums_bytes) as file:
        file.write(memoryview(plan.head))
        for part, data in _parts_of(plan, host):
            cut = pieces(0, len(data), PIECE_BYTES)
            sums[_entry_name(part)] = [_write_summed(file, data[a:b], begin()) for a, b in cut]
        text = _as_json(sums)
        assert len(text) == plan.sums_bytes, "layout() knows how long checksums are"
        file.write(memoryview(text))


def _write_summed(file: Writer, piece: memoryview, total: Running) -> str:
    """So little at once that it is in the processor's cache still when it is written: that sums it in a quarter of the time."""
    for a, b in pieces(0, len(piece), SUMMED_BYTES):
        total.update(piece[a:b])
        file.write(piece[a:b])
    return total.hexdigest()


def _parts_of(plan: FileLayout, host: memoryview | None) -> Iterator[tuple[WritePart, memoryview]]:
    at = 0
    for part in plan.parts:
        if host is None:
            data = part.read() if part.read else part.data
            yield part, bytes_of(data.cpu().contiguous())
        else:
            yield part, host[at : at + part.num_bytes]
            at += part.num_bytes


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor of the host."""
    return tensor.detach().flatten().view(torch.uint8).numpy().data


class HostBuffer:
    """Owns host memory into which parts are copied: pinned where there is an accelerator, used again by the next copy.

    An arena, since torch's pinned allocator would take up to twice as much.
    """

    def __init__(self) -> None:
        self._held: Arena | None = None

    def copy(self, plan: FileLayout) -> memoryview:
        """A copy of the bytes of all parts; it stands when this returns."""
        device = next((part.data.device for part in plan.parts if part.data.device.type != "cpu"), None)
        if self._held is None or self._held.num_bytes < plan.num_bytes:
            self._held = None  # the old one goes first
            self._held = Arena(
                plan.num_bytes, device or torch.device("cpu"), "a save in the background", "save with background=False"
            )
        memory, at = self._held.memory, 0
        for part in plan.parts:
            into = memory[at : at + part.num_bytes].view(part.data.dtype).view(part.data.shape)
            into.copy_(part.data, non_blocking=device is not None)
            at += part.num_bytes
        if device is not None:
            torch.accelerator.synchronize(device)
        return bytes_of(memory[:at])
