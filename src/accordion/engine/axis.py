"""Gather and reduce of a group of tensors over one mesh axis: shards to full tensors, full gradients to shards of the sum."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor

from accordion import _torch
from accordion.engine.collectives import Link, Pending
from accordion.engine.home import Home, local_view
from accordion.engine.layout import KIB, PACK_LIMIT_BYTES, Cut, Message, message
from accordion.engine.streams import Steps

EXCHANGE_BYTES_PER_PEER = 256 * KIB  # below it latency rules and one reduce-scatter is a single launch


class Axis:
    """The ranks of one mesh axis: a link to gather, another to reduce, and how to reduce."""

    def __init__(
        self, gather: Link, reduce: Link, *, one_node: bool, algorithm: Literal["auto", "exchange", "reduce_scatter"]
    ) -> None:
        self.gather, self.reduce = gather, reduce
        self.num_ranks, self.rank = gather.num_ranks, gather.rank
        self.one_node, self._algorithm = one_node, algorithm

    def takes_exchange(self, cuts: Sequence[Cut], itemsize: int) -> bool:
        """Exchange sums in float32 at the gradients' own wire dtype, but every rank talks to every other: design 3.4."""
        if self._algorithm != "auto":
            return self._algorithm == "exchange"
        if self.reduce.is_gloo:
            return True
        per_peer = sum(c.shard_numel for c in cuts) * itemsize
        return self.one_node and per_peer >= EXCHANGE_BYTES_PER_PEER


class Room:
    """Owns the storage in which full tensors of one dtype stand, each parameter-major and padded to chunk * num_ranks rows.

    Writes of a gather go through `raw`, whose version counter is not the views': autograd may have saved a view,
    and its storage is let go and filled again before the backward reads it. In a `relay` tensors lie as shards do, the
    cut dim first.
    """

    def __init__(
        self,
        cuts: Sequence[Cut],
        offsets: Sequence[int],
        flat: Tensor,
        rank: int,
        *,
        poison: bool = False,
        relay: bool = False,
    ) -> None:
        self.flat = flat
        self._poison = poison and flat.is_floating_point()
        self._storage = flat.untyped_storage()
        self._key, self.num_bytes = _torch.storage_key(self._storage), self._storage.nbytes()
        self._is_open = True
        raw = flat.data
        self.views: list[Tensor] = []  # each in the tensor's shape: what the model computes with
        self.rows: list[Tensor] = []  # dim 0: padded rows as 1-D, where gathers arrive; else where they are copied
        self.own: list[Tensor] = []  # dim 0 or whole: this rank's padded part of them
        for c, at in zip(cuts, offsets, strict=True):
            self.views.append(flat[at : at + c.numel].view(c.shape))
            rows = raw[at : at + (c.padded_numel if c.dim == 0 else c.numel)]
            self.own.append(rows[rank * c.shard_numel : (rank + 1) * c.shard_numel] if c.dim == 0 else rows)
            if c.dim:
                rows = rows.view(c.rows, *c.row_shape).movedim(0, c.dim) if relay else rows.view(c.shape)
            self.rows.append(rows)

    def open(self) -> None:
        if not self._is_open:  # resizing to the same size would allocate anew, and copy
            self._storage.resize_(self.num_bytes)
            self._is_open = True
        if self._poison:  # a full copy that stood until now: without a wait the last step's numbers would pass
            self.flat.data.fill_(float("nan"))

    def holds(self, storage: torch.UntypedStorage) -> bool:
        return self._key == _torch.storage_key(storage)

    def close(self) -> None:
        """Let the storage go. To show reads that come too late, `poison` fills it instead with what nobody can miss."""
        if self._poison:
            self.flat.data.fill_(float("nan"))
        else:
            self._storage.resize_(0)
            self._is_open = False


class Gathering:
    """How a group is gathered: shards of `home` to the tensors of `room`. Made once; `steps` runs each time.

    Owns the packed message, one row a rank: it has memory from `open` to `close`, and views that are cut once.
    """

    def __init__(self, axis: Axis, msg: Message, home: Home, room: Room) -> None:
        num = axis.num_ranks
        self._axis, self._msg, self._room = axis, msg, room
        cast = home.dtype != room.flat.dtype or num == 1 or home.away
        self.away = home.away
        # Alone on its axis everything is copied; a relay asks for it.
        copied = range(len(msg.cuts)) if num == 1 else [*msg.whole, *(msg.direct if cast else ())]
        self._to, self._source = [room.own[i] for i in copied], [home.padded[i] for i in copied]
        self._fulls = [room.rows[i] for i in msg.direct]
        self._shards = [(room.own if cast else home.padded)[i] for i in msg.direct]
        self._own = [] if cast else [room.own[i] for i in msg.direct]
        self._arrive, self._travel = list(self._fulls), list(self._shards)
        self._storage: torch.UntypedStorage | None = None
        packs = num > 1 and msg.row_numel > 0
        if packs:
            self._pack(room.flat.new_empty(msg.row_numel * num), home, cast)
        # The packed message stays a collective, which a rank can wait for in turns.
        self._sends = axis.gather.sends and packs and bool(self._fulls)
        # Made at the first run: torch cuts no storage of no bytes.
        self._sent: list[tuple[Sequence[Tensor], list[Tensor]]] = []

    def _pack(self, packed: Tensor, home: Home, cast: bool) -> None:
        """Cut what travels packed into the rows of ranks and the parts of tensors."""
        msg, num = self._msg, self._axis.num_ranks
        sizes = [msg.cuts[i].shard_numel for i in msg.packed]
        rows = packed.view(num, -1)
        row = rows[self._axis.rank] if cast or home.pack_row is None else home.pack_row
        if row is not home.pack_row:
            if home.away and home.pack_row is not None:  # from elsewhere in one copy
                self._to, self._source = [*self._to, row], [*self._source, home.pack_row]
            else:
                self._to += row.split([*sizes, msg.num_flags])
                self._source += [*(home.padded[i] for i in msg.packed), home.tag]
        self._arrive.append(packed)
        self._travel.append(row)
        self._tags, self._numbers, self._sizes = rows[:, msg.pack_numel :], rows[:, : msg.pack_numel], sizes
        self._parts = list(self._numbers.split(sizes, dim=1))
        plain = all(msg.cuts[i].dim == 0 for i in msg.packed)
        self._outs = [self._room.rows[i].view(num, -1) for i in msg.packed] if plain else None
        self._one_kernel = packed.device.type != "cpu"
        self._storage, self._num_bytes = packed.untyped_storage(), packed.nbytes
        self._storage.resize_(0)

    def open(self) -> None:
        """Before `load`: take memory for the packed message."""
        if self._storage is not None:
            self._storage.resize_(self._num_bytes)

    def close(self) -> None:
        """Once everything is where it stands, and the compute stream waits for that."""
        if self._storage is not None:
            self._storage.resize_(0)

    def load(self) -> None:
        """Copy what does not travel from where it lies."""
        if self._to:
            _torch.foreach_copy_(self._to, self._source, non_blocking=self.away)

    def steps(self, check: Callable[[Tensor], None]) -> Steps:
        """After `load` where the home is away.

        `check`: called with the tags of all ranks (num_ranks, num_flags) once they are there.
        """
        if self._to and not self.away:
            self.load()
        if self._axis.num_ranks == 1:
            return
        if self._sends:
            sends = self._send(self._axis.num_ranks)
            yield self._axis.gather.gather(self._arrive[-1:], self._travel[-1:])._replace(sends=sends)
        else:
            yield self._axis.gather.gather(self._arrive, self._travel)
        if self._storage is None:
            return
        if self._msg.num_flags:
            check(self._tags)
        if self._msg.pack_numel:
            self._unpack()

    def _send(self, num: int) -> list[Any]:
        if not self._sent:
            pairs = zip(self._fulls, self._shards, strict=True)
            self._sent = [(full.view(num, -1).unbind(), [shard] * num) for full, shard in pairs]
        works = self._axis.gather.send_each(self._sent)
        if self._own:
            _torch.foreach_copy_(self._own, self._shards)
        return works

    def _unpack(self) -> None:
        """Copy the packed message to where each small parameter stands."""
        if self._outs is not None and self._one_kernel:
            torch.split_with_sizes_copy(self._numbers, self._sizes, dim=1, out=self._outs)
        elif (
            self._outs is not None
        ):  # where that is a loop over slices, those that are cut already take half of its time
            _torch.foreach_copy_(self._outs, self._parts)
        else:
            for i, part in zip(self._msg.packed, self._parts, strict=True):
                self._unpack_one(self._msg.cuts[i], self._room.rows[i], part)

    def _unpack_one(self, c: Cut, to: Tensor, part: Tensor) -> None:
        if c.dim == 0:
            to.view(c.num_ranks, -1).copy_(part)
            return
        assert c.dim is not None
        by_row = part.reshape(c.num_ranks * c.chunk, *c.row_shape)[: c.rows]
        to.copy_(by_row.movedim(0, c.dim))


class Plan:
    """How the gradients of some tensors are reduced over an axis: what is the same in every step.

    `sent`: the dtype of the gradients; `dtype`: of their sum. `taken`: large ones that, alone on the axis, are their own
    results; `others`: the rest, in the order of `msg`. `places`: (shape, stride, offset) of each of these's local rows.
    """

    def __init__(self, axis: Axis, cuts: Sequence[Cut], num_flags: int, sent: torch.dtype, dtype: torch.dtype) -> None:
        num = axis.num_ranks
        self.axis, self.dtype = axis, dtype
        self.exchange = num > 1 and axis.takes_exchange(cuts, sent.itemsize)
        self.wire = sent if self.exchange and sent.itemsize <= dtype.itemsize else dtype
        self.taken = [i for i, c in enumerate(cuts) if num == 1 and c.numel * self.wire.itemsize >= PACK_LIMIT_BYTES]
        self.others = [i for i in range(len(cuts)) if i not in self.taken]
        self.msg = msg = message(
            [cuts[i] for i in self.others], self.wire.itemsize, even_only=not self.exchange, num_flags=num_flags
        )
        self.places: list[tuple[tuple[int, ...], tuple[int, ...], int]] = []
        for c, at in zip(msg.cuts, msg.shard_offsets, strict=True):
            rows = local_view(torch.empty(c.shard_numel, device="meta"), c, axis.rank)
            self.places.append((tuple(rows.shape), rows.stride(), at))
        self.direct = [slice(at, at + prod(shape)) for shape, _, at in (self.places[i] for i in msg.direct)]
        self.whole = [slice(msg.shard_offsets[i], msg.shard_offsets[i] + msg.cuts[i].shard_numel) for i in msg.whole]
        self.pack = slice(msg.pack_start, msg.pack_start + msg.row_numel)
        self.sends = (
            self.exchange and axis.reduce.sends and self.wire == dtype and bool(self.pack.stop - self.pack.start)
        )
        self.sums_in_place = num == 1 and self.wire == dtype
        self.plain = not self.taken and all(msg.cuts[i].dim == 0 for i in msg.packed)
        self.packed = [i for i in msg.packed if msg.cuts[i].shard_numel]


class Reduction:
    """One reduce of a group over an axis: full gradients to this rank's rows of their sum, as `plan` says.

    All buffers are allocated when it is made; `load` fills them, `steps` communicates. Then `results` has the local rows of
    each tensor, `flag_sums` (num_flags,) the sums of the flags, and `out` is the one buffer behind all of them.
    """

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self._plan, self._axis, self._msg = plan, plan.axis, plan.msg
        num, wire, msg = plan.axis.num_ranks, plan.wire, plan.msg
        self.out = out = torch.empty(msg.shard_numel, dtype=plan.dtype, device=device)
        self._out_pack = out[plan.pack]
        self.flag_sums = self._out_pack[msg.pack_numel :]
        self.results = [out] * (len(plan.taken) + len(plan.others))
        for i, place in zip(plan.others, plan.places, strict=True):
            self.results[i] = out.as_strided(*place)
        self._whole = [out[part] for part in plan.whole]
        self._direct_out = [out[part] for part in plan.direct]
        self._direct: list[Tensor] = []
        pack_shape = (num, msg.row_numel)
        self._pack = (
            self._out_pack.view(pack_shape)
            if plan.sums_in_place
            else torch.empty(pack_shape, dtype=wire, device=device)
        )
        self._received: list[Tensor] = []
        if plan.exchange:
            rows = num - plan.sends
            self._received = [torch.empty(rows, r.numel(), dtype=wire, device=device) for r in self._direct_out]
            self._received.append(torch.empty_like(self._pack))

    def poison(self) -> None:
        """Before `load`: without a wait the memory may still have a gradient of an earlier step, its tag included."""
        for buffer in (self.out, *self._received):
            buffer.fill_(float("nan"))

    @property
    def held(self) -> list[Tensor]:
        return [*self.buffers, self._pack, *self._direct, *self._received]

    @property
    def buffers(self) -> list[Tensor]:
        """What lies behind `results` and `flag_sums`."""
        return [self.out, *(self.results[i] for i in self._plan.taken)]

    def load(self, grads: Sequence[Tensor], flags: Tensor, ours: Sequence[bool]) -> None:
        """`grads`: one per cut, in its full shape. `flags` (num_ranks, num_flags): row r is what this rank says to rank r.

        `ours`: which of them may be written into, because nobody else has them.
        """
        msg, wire = self._msg, self._plan.wire
        for i in self._plan.taken:
            self.results[i] = dense(grads[i], self.out.dtype, copy=not ours[i])
        if self._plan.taken:
            grads = [grads[i] for i in self._plan.others]
        alone = self._axis.num_ranks == 1
        self._direct = [grads[i] if alone else grads[i].to(wire).contiguous() for i in msg.direct]
        if self._whole:
            _torch.foreach_copy_(self._whole, [grads[i].reshape(-1) for i in msg.whole])
        if self._pack.numel():
            if self._plan.plain:
                parts = [grads[i].contiguous() for i in self._plan.packed]
            else:
                parts = [by_rank(grads[i], msg.cuts[i]) for i in self._plan.packed]
            if flags.numel():
                parts.append(flags)
            _torch.chunk_cat(parts, self._axis.num_ranks, out=self._pack)

    def steps(self) -> Steps:
        link = self._axis.reduce
        if link.num_ranks == 1:
            if self._direct:
                _torch.foreach_copy_(self._direct_out, [g.reshape(-1) for g in self._direct])
            if not self._plan.sums_in_place:
                self._out_pack.copy_(self._pack[0])
        elif self._plan.sends:
            parts = self._parts()
            sends = link.send_each(parts)
            yield joined(link.exchange(self._sends()[-1:]), link.sum(self._whole))._replace(sends=sends)
            for (row_of_each, _), out in zip(parts, self._direct_out, strict=True):
                add_rows(row_of_each, out)
            sum_rows(self._received[-1], self._out_pack)
        elif self._plan.exchange:
            yield joined(link.exchange(self._sends()), link.sum(self._whole))
            for received, out in zip(self._received, [*self._direct_out, self._out_pack], strict=True):
                sum_rows(received, out)
        else:
            outs, inputs = list(self._direct_out), [g.view(-1) for g in self._direct]
            if self._pack.numel():
                outs.append(self._out_pack)
                inputs.append(self._pack.view(-1))
            scattered = link.scatter_sum(outs, inputs)
            yield joined(scattered, link.sum(self._whole)) if self._whole else scattered

    def _parts(self) -> list[tuple[list[Tensor], list[Tensor]]]:
        """For each direct gradient, by rank: where its part of this rank's rows comes to lie, and what goes to it."""
        parts, rank = [], self._axis.rank
        for i, grad, received in zip(self._msg.direct, self._direct, self._received, strict=False):
            c = self._msg.cuts[i]
            to = list(grad.view(-1).split([c.rows_of(r) * c.row_numel for r in range(c.num_ranks)]))
            parts.append(([*received[:rank], to[rank], *received[rank:]], to))
        return parts

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
    """Both, of one link."""
    return Pending(first.link, [*first.works, *second.works])


def add_rows(rows: Sequence[Tensor], out: Tensor) -> None:
    """`out` (n,) becomes the sum of all of `rows` (n,), in their order and dtype."""
    torch.add(rows[0], rows[1], out=out)
    for row in rows[2:]:
        out.add_(row)


def sum_rows(rows: Tensor, out: Tensor) -> None:
    """`out` (n,) becomes the sum of `rows` (num_ranks, n), added in the dtype of `out`."""
    if rows.shape[0] == 2 and rows.dtype == out.dtype:
        torch.add(rows[0], rows[1], out=out)
    elif out.numel():
        torch.sum(rows, 0, dtype=out.dtype, out=out)


def dense(grad: Tensor, dtype: torch.dtype, *, copy: bool) -> Tensor:
    """`grad` in row-major order; the same tensor where it is so already and no copy is asked for."""
    grad = grad.to(dtype)
    return grad.clone(memory_format=torch.contiguous_format) if copy else grad.contiguous()


def by_rank(grad: Tensor, c: Cut) -> Tensor:
    """`grad` with the dim that is cut first: what goes to rank r is the r-th chunk of it."""
    assert c.dim is not None
    return (grad.movedim(c.dim, 0) if c.dim else grad).contiguous()
