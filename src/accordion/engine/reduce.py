"""Reduce a group of gradients over one mesh axis: from full gradients to this rank's rows of their sum."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import starmap
from math import prod

import torch
from torch import Tensor

from accordion import _torch
from accordion.engine.communicator import Axis, Pending
from accordion.engine.layout import KIB, PACK_LIMIT_BYTES, Cut, aligned, columns, message
from accordion.engine.shards import local_view
from accordion.engine.streams import Steps

PIECE_BYTES = 32 * 1024 * KIB  # least bytes of an exchange: about 100 us, several times the cost of a launch
# Cast at least so many bytes at once, and an eighth of the gradients: 5 ms at 50 GB/s, twice the start of a ring of 512 ranks.
CAST_BYTES, CAST_SHARE = 256 * 1024 * KIB, 8


class ReducePlan:
    """The layout and algorithm of a reduce over an axis, computed once: gradients of dtype `sent`, divided as `cuts`, are
    summed in `dtype`, together with `num_flags` extra elements.

    `taken`: on an axis of one rank, the indices of large gradients. Their results are not in the result buffer, but are the
    gradients themselves, or copies. `others`: all other indices. `places`: for each of `others`, the (shape, stride, offset) of
    this rank's rows in the result buffer.
    """

    def __init__(self, axis: Axis, cuts: Sequence[Cut], num_flags: int, sent: torch.dtype, dtype: torch.dtype) -> None:
        num = axis.num_ranks
        self.axis, self.dtype = axis, dtype
        self.exchange = num > 1 and axis.takes_exchange(cuts, sent.itemsize)
        self.wire = sent if self.exchange and sent.itemsize <= dtype.itemsize else dtype
        self.taken = [i for i, c in enumerate(cuts) if num == 1 and c.numel * self.wire.itemsize >= PACK_LIMIT_BYTES]
        self.others = [i for i in range(len(cuts)) if i not in self.taken]
        self.msg = msg = message(
            [cuts[i] for i in self.others],
            self.wire.itemsize,
            even_only=not self.exchange,
            num_flags=num_flags,
            pack_limit_bytes=axis.reduce.pack_limit_bytes,
        )
        self.places: list[tuple[tuple[int, ...], tuple[int, ...], int]] = []
        for c, at in zip(msg.cuts, msg.shard_offsets, strict=True):
            rows = local_view(torch.empty(c.shard_numel, device="meta"), c, axis.rank)
            self.places.append((tuple(rows.shape), rows.stride(), at))
        self.direct = [slice(at, at + prod(shape)) for shape, _, at in (self.places[i] for i in msg.direct)]
        self.whole = [slice(msg.shard_offsets[i], msg.shard_offsets[i] + msg.cuts[i].shard_numel) for i in msg.whole]
        self.sends = self.exchange and axis.reduce.sends and self.wire == dtype and msg.row_numel > 0
        self.pieces, self.received_at, self.received_numel = self._in_pieces()
        # Pieces of about `CAST_BYTES`, in which large gradients are cast and reduce-scattered one after the other. Each is a
        # list of (index, start, stop), columns of a gradient (num_ranks, n).
        self.casts: list[list[tuple[int, int, int]]] = []
        if num > 1 and not self.exchange and sent != dtype:
            numels = [part.stop - part.start for part in self.direct]
            most = max(CAST_BYTES // (num * dtype.itemsize), -(-sum(numels) // CAST_SHARE))
            self.casts = columns(numels, sum(numels) if axis.reduce.in_one_piece else aligned(most, dtype.itemsize))
        pieces = [[aligned(num * (stop - start), dtype.itemsize) for _, start, stop in piece] for piece in self.casts]
        self.cast_numel = max(map(sum, pieces), default=0)
        self.sums_in_place = num == 1 and self.wire == dtype
        self.plain = not self.taken and all(msg.cuts[i].dim == 0 for i in msg.packed)
        self.packed = [i for i in msg.packed if msg.cuts[i].shard_numel]

    def _in_pieces(self) -> tuple[list[slice], list[int], int]:
        """Return (pieces, offset of each large gradient in the receive buffer, numel of that buffer) for an all-to-all. A piece
        is a slice of the list of large gradients: these are sent together. Pieces are received one after the other into the
        same memory; small, packed gradients go with the last piece."""
        rows = self.axis.num_ranks - self.sends
        numels = [rows * aligned(part.stop - part.start, self.wire.itemsize) for part in self.direct]
        least = max([*numels, PIECE_BYTES // self.wire.itemsize])
        pieces, offsets, begun, offset = list[slice](), list[int](), 0, 0
        for i, numel in enumerate(numels):
            if offset + numel > least and not self.axis.reduce.in_one_piece:
                pieces.append(slice(begun, i))
                begun, offset = i, 0
            offsets.append(offset)
            offset += numel
        return [*pieces, slice(begun, None)], offsets, max(offset, least) if pieces else offset


class AxisReduce:
    """One reduce of a group over an axis. The constructor allocates buffers, `load` fills them, `steps` communicates.

    After `steps`, `results` has this rank's rows of each gradient's sum in the plan's `dtype`, and `flag_sums` (num_flags,) the
    sums of the flags that `load` got. `buffers` are the memory of both.
    """

    def __init__(self, plan: ReducePlan, device: torch.device) -> None:
        self._plan, self._axis, self._msg = plan, plan.axis, plan.msg
        num, wire, msg = plan.axis.num_ranks, plan.wire, plan.msg
        self.out = out = torch.empty(msg.shard_numel, dtype=plan.dtype, device=device)
        self.buffers = [out]
        with _torch.untracked_views():  # and `as_strided` costs half of a slice
            self._out_pack = out.as_strided((msg.row_numel,), (1,), msg.pack_start)
            self.results = list(starmap(out.as_strided, plan.places))
        for i in plan.taken:
            self.results.insert(i, out)  # replaced in `load`
        self._whole = [out[part] for part in plan.whole]
        self._direct_out = [out[part] for part in plan.direct]
        self._direct: list[Tensor] = []
        pack_shape = (num, msg.row_numel)
        self._pack = self._out_pack.view(pack_shape) if plan.sums_in_place else out.new_empty(pack_shape, dtype=wire)
        self._received: list[Tensor] = []
        if plan.exchange:
            rows, arrives = num - plan.sends, torch.empty(plan.received_numel, dtype=wire, device=device)
            for at, out_part in zip(plan.received_at, self._direct_out, strict=True):
                numel = out_part.numel()
                self._received.append(arrives[at : at + rows * numel].view(rows, numel))
            self._received.append(torch.empty_like(self._pack))
        elif plan.casts:
            self._received = [torch.empty(plan.cast_numel, dtype=plan.dtype, device=device)]

    def poison(self) -> None:
        """Fill buffers with NaN, so that a read without a wait does not get values of an earlier reduce. Call before `load`."""
        for buffer in (self.out, *self._received):
            buffer.fill_(float("nan"))

    @property
    def flag_sums(self) -> Tensor:
        start = self._msg.pack_start + self._msg.pack_numel
        return self.out[start : start + self._msg.num_flags]

    @property
    def tensors(self) -> list[Tensor]:
        return [*self.buffers, self._pack, *self._direct, *self._received]

    def free(self) -> None:
        """Drop all buffers except those of the results and flag sums. Call this after `steps`."""
        self._pack, self._direct, self._received = self._out_pack, [], []

    def load(self, grads: Sequence[Tensor], flags: Tensor, ours: Sequence[bool]) -> None:
        """Copy full gradients `grads`, and `flags` (num_ranks, num_flags), row r of which is for rank r, to the buffers to
        send. Large gradients may be sent as they are. `ours`: True for those to which nothing else refers: they may change."""
        plan, msg, wire = self._plan, self._msg, self._plan.wire
        for i in plan.taken:
            self.results[i] = dense(grads[i], self.out.dtype, copy=not ours[i])
            self.buffers.append(self.results[i])
        if plan.taken:
            grads = [grads[i] for i in plan.others]
        if msg.direct:
            self._direct = [grads[i] for i in msg.direct]
            if self._axis.num_ranks > 1:
                sent = self._direct if plan.casts else [g.to(wire) for g in self._direct]
                self._direct = [g.contiguous() for g in sent]
        if self._whole:
            _torch.foreach_copy_(self._whole, [grads[i].reshape(-1) for i in msg.whole])
        if self._pack.numel():
            if plan.plain:
                parts = [grads[i].contiguous() for i in plan.packed]
            else:
                parts = [by_rank(grads[i], msg.cuts[i]) for i in plan.packed]
            if flags.numel():
                parts.append(flags)
            _torch.chunk_cat(parts, self._axis.num_ranks, out=self._pack)

    def steps(self) -> Steps:
        """Generator: communicate what `load` has put into the buffers, and fill `results`; yields works to wait for."""
        communicator = self._axis.reduce
        if communicator.num_ranks == 1:
            if self._direct:
                _torch.foreach_copy_(self._direct_out, [g.reshape(-1) for g in self._direct])
            if not self._plan.sums_in_place:
                self._out_pack.copy_(self._pack[0])
        elif self._plan.exchange:
            sends, outs = self._sends(), [*self._direct_out, self._out_pack]
            for piece in self._plan.pieces:
                pending = communicator.exchange(sends[piece])
                yield joined(pending, communicator.sum(self._whole)) if piece.stop is None else pending
                for received, out in zip(self._received[piece], outs[piece], strict=True):
                    sum_rows(received, out)
        else:
            packs = self._pack.numel() > 0
            packed = [self._out_pack] * packs, [self._pack.view(-1)] * packs
            if not self._plan.casts:
                inputs = [g.view(-1) for g in self._direct]
                yield communicator.scatter_sum([*self._direct_out, *packed[0]], [*inputs, *packed[1]])
            for columns_of_some in self._plan.casts:
                outs, inputs = self._cast(columns_of_some)
                is_last = columns_of_some is self._plan.casts[-1]
                yield communicator.scatter_sum(outs + packed[0] * is_last, inputs + packed[1] * is_last)
            if self._whole:
                yield communicator.sum(self._whole)

    def _cast(self, piece: Sequence[tuple[int, int, int]]) -> tuple[list[Tensor], list[Tensor]]:
        """Cast `piece`, (index, start, stop) of columns of large gradients, into the buffer for casts; return (outs, inputs),
        the tensors to receive and to send in the reduce-scatter of these columns."""
        num, outs, inputs, at = self._axis.num_ranks, list[Tensor](), list[Tensor](), 0
        for i, start, stop in piece:
            inputs.append(self._received[0][at : at + num * (stop - start)])
            outs.append(self._direct_out[i][start:stop])
            at += aligned(inputs[-1].numel(), self.out.itemsize)
        columns_of = [self._direct[i].view(num, -1)[:, start:stop] for i, start, stop in piece]
        _torch.foreach_copy_([part.view(num, -1) for part in inputs], columns_of)
        return outs, inputs

    def _sends(self) -> list[tuple[Tensor, Tensor, list[int], list[int]]]:
        sends: list[tuple[Tensor, Tensor, list[int], list[int]]] = []
        for i, sent, received in zip(self._msg.direct, self._direct, self._received, strict=False):
            c = self._msg.cuts[i]
            if c.rows % c.num_ranks == 0:
                sends.append((received.view(-1), sent.view(-1), [], []))
            else:
                to = [c.rows_of(r) * c.row_numel for r in range(c.num_ranks)]
                sends.append((received.view(-1), sent.view(-1), [received.shape[1]] * c.num_ranks, to))
        if self._pack.numel():
            sends.append((self._received[-1].view(-1), self._pack.view(-1), [], []))
        return sends


def joined(first: Pending, second: Pending) -> Pending:
    return Pending(first.communicator, [*first.works, *second.works])


def sum_rows(rows: Tensor, out: Tensor) -> None:
    """Fill `out` (n,) with the sum of `rows` (num_ranks, n), added in the dtype of `out`."""
    if rows.shape[0] == 2 and rows.dtype == out.dtype:
        torch.add(rows[0], rows[1], out=out)
    elif out.numel():
        torch.sum(rows, 0, dtype=out.dtype, out=out)


def dense(grad: Tensor, dtype: torch.dtype, *, copy: bool) -> Tensor:
    """Return `grad` as a contiguous tensor of `dtype`; without `copy`, `grad` itself if it is one already."""
    grad = grad.to(dtype)
    return grad.clone(memory_format=torch.contiguous_format) if copy else grad.contiguous()


def by_rank(grad: Tensor, c: Cut) -> Tensor:
    """Return `grad`, contiguous, with the dim that `c` divides as dim 0, so that its r-th chunk of rows is for rank r."""
    return (grad.movedim(c.dim, 0) if c.dim else grad).contiguous()
