"""The memory of the full parameters of a group (a unit's parameters that are gathered in one dtype), freed between uses."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from torch import Tensor

from accordion import _torch
from accordion.engine.layout import Cut


class FullMemory(Protocol):
    """Protocol for the memory of a group's full parameters, which `close` frees. `flat`: a tensor whose version counter counts
    writes into them. `storage_keys`: identify the storages that are freed. `num_bytes`: size of the memory while allocated."""

    flat: Tensor

    @property
    def storage_keys(self) -> Collection[int]: ...

    @property
    def num_bytes(self) -> int: ...

    def close(self) -> None: ...


class FullBuffer:
    """One storage for the full parameters of a group, each contiguous and, if cut on dim 0, padded to equal chunks. Call `open`
    before a gather, which writes into `rows`; modules then compute with `views`, until `close` frees the memory.

    `flat`: a 1-D tensor with the whole, allocated storage; parameter i, divided as `cuts[i]`, begins at element `offsets[i]`.
    `rank`: of this process on the mesh axis. `cut_dim_first`: store tensors with their cut dim first, as shards are. `poison`:
    fill unused memory with NaN instead of freeing it, to reveal reads without a wait; floating dtypes only.
    """

    # Gathers write through tensors whose version counter is not that of `views`: autograd may have saved a view whose storage
    # is freed and filled again before the backward reads it.

    def __init__(
        self,
        cuts: Sequence[Cut],
        offsets: Sequence[int],
        flat: Tensor,
        rank: int,
        *,
        poison: bool,
        cut_dim_first: bool = False,
    ) -> None:
        self.flat = flat
        self._poison = poison and flat.is_floating_point()
        self._storage = flat.untyped_storage()
        self.storage_keys, self.num_bytes = (_torch.storage_key(self._storage),), self._storage.nbytes()
        raw = flat.data
        self.views: list[Tensor] = []  # the full tensors in their shapes, with which the model computes
        # Destinations of gathers: padded rows as 1-D if dim 0 is cut; otherwise copies from the packed message go here.
        self.rows: list[Tensor] = []
        self.own_parts: list[Tensor] = []  # dim 0: this rank's part of the padded rows, 1-D; whole: all of it
        for c, at in zip(cuts, offsets, strict=True):
            self.views.append(flat[at : at + c.numel].view(c.shape))
            rows = raw[at : at + (c.padded_numel if c.dim == 0 else c.numel)]
            self.own_parts.append(rows[rank * c.shard_numel : (rank + 1) * c.shard_numel] if c.dim == 0 else rows)
            if c.dim:
                rows = rows.view(c.rows, *c.row_shape).movedim(0, c.dim) if cut_dim_first else rows.view(c.shape)
            self.rows.append(rows)

    def open(self) -> None:
        """Allocate the memory, with undefined contents, unless it is allocated. With `poison`, fill it with NaN."""
        if not self._storage.nbytes():  # resizing to the same size would allocate and copy
            self._storage.resize_(self.num_bytes)
        if self._poison:  # otherwise values of the last step would hide a missing wait
            self.flat.data.fill_(float("nan"))

    def stay(self, stays: bool) -> None:
        """If `stays`, allocate the memory and make later calls of `close` do nothing, since CUDA graphs record addresses. If
        False, undo this and free the memory; do nothing if there is nothing to undo."""
        if stays:
            self.open()
            self.close = lambda: None  # type: ignore[method-assign]
        elif vars(self).pop("close", None) is not None:
            self.close()

    def close(self) -> None:
        """Free the storage; with `poison` fill it with NaN instead, to reveal later reads."""
        if self._poison:
            self.flat.data.fill_(float("nan"))
        else:
            self._storage.resize_(0)
