"""Where shards rest between uses: the flat buffers that back the local tensors of parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from accordion.engine.layout import Cut, Message, message


class Home:
    """Owns the shards of one group of parameters on one device, each in its own dtype.

    Shards of one dtype lie in one buffer in the order of `message`, so that packed shards are already the row that travels.
    `tag` stands behind the packed shards and travels with them: every rank of a gather must show the same one.
    A tier elsewhere keeps the same names: `padded`, `locals`, `pack_row`, `tag`, `dtype`.
    """

    def __init__(self, msg: Message, rank: int, dtypes: Sequence[torch.dtype], device: torch.device) -> None:
        self.dtype = dtypes[0] if len(set(dtypes)) == 1 else None
        self.padded: list[Tensor] = [torch.empty(0)] * len(dtypes)  # each (chunk, ...) as 1-D, padding included
        self.locals: list[Tensor] = list(self.padded)  # each rank's real rows, in the parameter's shape
        self.pack_row: Tensor | None = None  # the packed shards and the tag as one 1-D tensor
        self.tag = torch.zeros(msg.num_flags, dtype=dtypes[0], device=device)
        self._flats: list[Tensor] = []
        for dtype in dict.fromkeys(dtypes):
            chosen = [i for i, d in enumerate(dtypes) if d == dtype]
            part = msg if self.dtype is not None else message([msg.cuts[i] for i in chosen], dtype.itemsize)
            flat = torch.zeros(part.shard_numel, dtype=dtype, device=device)
            self._flats.append(flat)
            if self.dtype is not None:
                self.pack_row = flat[msg.pack_start : msg.pack_start + msg.row_numel]
                self.tag = self.pack_row[msg.pack_numel :]
            for i, at in zip(chosen, part.shard_offsets, strict=True):
                self.padded[i] = flat[at : at + msg.cuts[i].shard_numel]
                self.locals[i] = own_storage(local_view(self.padded[i], msg.cuts[i], rank))

    def num_bytes(self) -> int:
        return sum(flat.untyped_storage().nbytes() for flat in self._flats)


def local_view(padded: Tensor, c: Cut, rank: int) -> Tensor:
    """The real rows of rank's padded 1-D shard, in the tensor's own number of dims.

    A shard lies with its cut dim first, so that real rows are a dense prefix whatever the dim: fused optimizers walk memory.
    """
    if c.dim is None:
        return padded.view(c.shape)
    rows = padded[: c.rows_of(rank) * c.row_numel]
    return rows.view(c.rows_of(rank), *c.row_shape).movedim(0, c.dim)


def own_storage(view: Tensor) -> Tensor:
    """The same memory behind a storage that begins with the view.

    A DTensor around a view with an offset reports that offset as its address, and `copy.deepcopy` and `torch.save` of a state
    dict take it for memory, or drag the whole buffer along.
    """
    if view.untyped_storage().device.type == "meta":  # a fake tensor has no address to be wrong about
        return view
    start = view.storage_offset() * view.itemsize
    part = view.untyped_storage()[start : start + view.numel() * view.itemsize]
    return view.new_empty(0).set_(part, 0, view.shape, view.stride())
