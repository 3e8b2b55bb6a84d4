"""Streams the full tensors of a sharded model to a consumer on each rank, such as an inference engine, while it is trained."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from accordion import _torch
from accordion.engine.communicator import Communicator, carried, reduced
from accordion.engine.engine import Engine
from accordion.engine.observer import Observer
from accordion.engine.streams import SideStream, Steps, Transfer
from accordion.errors import UsageError
from accordion.safety.divergence import monitor_of
from accordion.state import settle, sharded_engine
from accordion.tensor_checksum import checksum
from accordion.weights.stream_items import Adapters, Item, ItemPart, items_of

BUCKET_BYTES = 256 * 2**20


class Receivers(NamedTuple):
    """The global `ranks` that receive full tensors. `has_this_rank`: True if this rank is one of them."""

    ranks: frozenset[int]
    has_this_rank: bool


class WeightStream(Observer):
    """An iterable of (name, full tensor) that `stream_weights` returns, for one iteration; a second one raises `UsageError`.

    The engine closes an open stream before this rank begins a forward, a backward or another collective. Closing takes part in
    the gathers that are left, so that all ranks make the same ones whatever each consumes. `digests`: name of an item -> 0-d
    int64 digest of this rank's values in the dtype that is sent; {} if the stream keeps none. `missing`: names of the items
    that the consumer on this rank has not received yet.
    """

    # The end of the loop closes the stream: `break` and exceptions end the generator of `__iter__`, which runs its `finally`.

    def __init__(
        self, engine: Engine, items: Sequence[Item], to: Receivers, bucket_bytes: int, digests: dict[str, Tensor]
    ) -> None:
        self.engine, self.to, self.digests = engine, to, digests
        self.missing = {item.name for item in items} if to.has_this_rank else set()
        stream, parts = engine.context.gather_stream, in_buckets(items, len(to.ranks), bucket_bytes)
        what = f"of {len(parts)} of the weights"
        self._buckets = deque(
            Bucket(part, to, stream, f"streams bucket {i + 1} {what}") for i, part in enumerate(parts)
        )
        self._version, self._is_open, self._thread = self._shard_version(), True, threading.get_ident()
        self._is_exiting = sys.is_finalizing  # by then the module `sys` may be gone
        engine.observers.attach(self, first=True)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        self._check()
        try:
            while self._buckets:
                self._buckets[0].begin()  # before it is removed: after an error here, `close` begins it again
                items = self._buckets.popleft().land()
                while items:
                    name, tensors = items.popleft()
                    while tensors:
                        yield tensors.popleft()
                        self._check()
                        # Not earlier, because the caller's loop has kept the last tensor of the last bucket.
                        if self._buckets:
                            self._buckets[0].begin()
                    self.missing.discard(name)
        finally:
            # The garbage collector may end a generator on any thread, or inside a backward. Then the stream stays open, and
            # the engine closes it.
            is_own = not self._is_exiting() and threading.get_ident() == self._thread
            if is_own and not _torch.is_in_backward():
                self.close()

    def close(self) -> None:
        """Take part in the gathers that are left, unless ranks have diverged, and drop the results. May be called again."""
        if not self._is_open:
            return
        self._is_open = False
        self.engine.observers.detach(self)
        while self._buckets and self.engine.context.waiter.broken is None:
            self._buckets[0].begin()
            self._buckets.popleft().land()

    unit_is_called = backward_begins = settles = close

    def gradients_are_clipped(self, max_norm: float, norm_type: float) -> None:
        self.close()

    def _check(self) -> None:
        """Raise `UsageError` if the stream is closed, or if weights were written since it was created."""
        if not self._is_open:
            raise UsageError(
                "this stream of weights is closed: it was iterated before, or this rank used the sharded model before its end; "
                "call stream_weights again, and use the model before it or after its last tensor."
            )
        if self._shard_version() != self._version:
            raise UsageError(
                "the weights were written while they were streamed, so that ranks may have old and new ones; step and load "
                "before stream_weights, or after its last tensor."
            )

    def _shard_version(self) -> int:
        return sum(unit.version() for unit in self.engine.units)


def stream_weights(
    model: nn.Module,
    bucket_bytes: int = BUCKET_BYTES,
    ranks: Literal["all", "first"] | Sequence[int] = "all",
    dtype: torch.dtype | None = None,
    changed_since: WeightStream | Literal["start"] | None = None,
    adapters: Adapters = "merged",
) -> WeightStream:
    """Return an iterable of (name, full tensor) of a sharded model: its parameters and persistent buffers, tied ones once.
    Names are those of the state dict; for a model of transformers, names and tensors are those that `save_pretrained` writes.

    Collective; all ranks iterate. They make the same gathers, also if a consumer breaks off or raises. The tensors are
    contiguous, on the device, and the consumer's own. The next bucket is gathered while the consumer has this one, so a rank
    needs at most two buckets of memory besides the shards. Raises `UsageError` inside `full_params`, and for arguments that do
    not fit. If this rank uses the model or writes its weights during the iteration, the next tensor raises `UsageError`.

    Args:
        bucket_bytes: memory of one bucket, with all that its gather needs; a larger tensor is a bucket of its own.
        ranks: "all", "first" (the model's first rank) or the global ranks that receive. The loops of others have no iterations.
        dtype: of floating-point parameters, cast before they are sent (merged weights: after); by default that of the shards.
        changed_since: "start": deliver all, and keep the digests that a later stream compares. An earlier stream of this model
            to the same ranks that kept digests: deliver only tensors whose bits, in `dtype`, have changed since, or that a
            consumer did not receive then, and keep digests. None: deliver all, keep none.
        adapters: of a PEFT model: "merged" into the weights, with the names of the base model; or "alone": only what PEFT saves
            for the active adapter.
    """
    engine = sharded_engine(model, "stream_weights")
    rank = dist.get_rank() if dist.is_initialized() else 0
    of_model = monitor_of(engine.context).ranks or [rank]
    by_word = {"all": of_model, "first": of_model[:1]}
    chosen = frozenset(by_word.get(ranks, ()) if isinstance(ranks, str) else ranks)
    earlier = changed_since if isinstance(changed_since, WeightStream) else None
    fits = earlier is not None and earlier.engine is engine and earlier.to.ranks == chosen and bool(earlier.digests)
    for is_wrong, text in (
        (engine.suspended, "stream_weights does not work inside full_params; leave it first."),
        (bucket_bytes < 1, f"bucket_bytes={bucket_bytes} is not a positive number of bytes."),
        (
            not chosen or not chosen <= set(of_model),
            f'ranks={ranks!r} is neither "all" nor "first" nor a list of ranks of the model, {of_model}.',
        ),
        (adapters not in ("merged", "alone"), f'adapters={adapters!r} is neither "merged" nor "alone".'),
        (
            changed_since not in (None, "start") and not fits,
            "changed_since is no earlier stream of this model to the same ranks that kept digests; begin with "
            'changed_since="start".',
        ),
    ):
        if is_wrong:
            raise UsageError(text)
    settle(
        engine,
        f"streams weights to ranks {sorted(chosen)}, {bucket_bytes} bytes at a time, as {dtype}, adapters {adapters}, changed "
        f"since {'the last stream' if earlier else changed_since}",
    )
    items = items_of(model, engine, dtype, adapters)
    digests = {} if changed_since is None else {item.name: _digest(item) for item in items}
    if earlier is not None:
        changed = _changed(digests, earlier)
        items = [item for item in items if item.name in changed]
    return WeightStream(engine, items, Receivers(chosen, rank in chosen), bucket_bytes, digests)


def _digest(item: Item) -> Tensor:
    """Return a digest, 0-d int64, of this rank's values of the tensors that are sent for `item`, in their dtypes."""
    return torch.stack([checksum(part.local()) * (2 * i + 1) for i, part in enumerate(item.parts)]).sum()


def _changed(digests: dict[str, Tensor], earlier: WeightStream) -> set[str]:
    """Return the names whose digests differ from those of `earlier` on any rank, or whose tensors some consumer did not receive
    from `earlier`. Collective."""
    context = earlier.engine.context
    known = {name: digest for name, digest in earlier.digests.items() if name not in earlier.missing}
    counts = torch.stack([digest != known.get(name, ~digest) for name, digest in digests.items()]).int()
    communicators = [context.shard.gather, context.replicate.gather]
    communicators += [c for p in earlier.engine.params if p.around is not None for c in p.around.communicators]
    reduced(counts, [*{id(each.group): each for each in communicators}.values()])
    return {name for name, count in zip(digests, counts.tolist(), strict=True) if count}


# -- the gather of one bucket: full tensors on the ranks that receive, from the shards of all ranks


class RowGather:
    """The gather of one tensor over up to two mesh axes. The caller runs the collective of `message` for each of `levels`, then
    `full` returns the tensor. The sharded dim is sent first, so that received rows need not be reordered."""

    def __init__(self, part: ItemPart, to: Receivers) -> None:
        self._part, self._to = part, to
        # The ranks of tensor parallelism make the larger tensor together, so each of them receives.
        self.receives = to.has_this_rank or part.around is not None
        levels = [(axis.gather, level) for axis, level in reversed(part.context.levels(part.cut))]
        self.levels = [(each, level.chunk) for each, level in levels if level.dim is not None and each.num_ranks > 1]
        local = part.local()
        rows = local if part.cut.dim is None else local.movedim(part.cut.dim, 0)
        # Rows that a rank lacks are sent as padding with any contents, since the receivers drop them.
        if self.levels and (rows.shape[0] < self.levels[0][1] or not rows.is_contiguous()):
            padded = local.new_empty(self.levels[0][1], *part.cut.row_shape)
            padded[: rows.shape[0]].copy_(rows)
            rows = padded
        self._rows = [rows]  # sent at each level, and received at the last one: (rows, *row_shape) each
        for depth, (communicator, chunk) in enumerate(self.levels):
            following = [next_chunk for _, next_chunk in self.levels[depth + 1 :]]
            num_received = communicator.num_ranks * chunk if following or self.receives else 0
            self._rows.append(local.new_empty(max(num_received, *following, 0), *part.cut.row_shape))

    def message(self, depth: int) -> tuple[Tensor, Tensor, list[int], list[int]]:
        """Return (output, input, output split sizes, input split sizes) of the collective at level `depth`. Tensors are 1-D; the
        sizes, in elements by rank, are [] if all ranks receive."""
        communicator, chunk = self.levels[depth]
        sent = carried(self._rows[depth][:chunk].view(-1))
        out = carried(self._rows[depth + 1][: chunk * communicator.num_ranks].view(-1))
        to_all = depth + 1 < len(self.levels) or self._part.around is not None
        to = [to_all or rank in self._to.ranks for rank in communicator.ranks]
        if all(to):
            return out, sent, [], []
        received = [sent.numel() if self.receives else 0] * len(to)
        return out, sent.repeat(sum(to)) if sum(to) > 1 else sent, received, [sent.numel() * each for each in to]

    def full(self) -> Tensor:
        """Return the full tensor, contiguous, in memory of its own. Call this after all collectives, if `receives` is True.
        Collective with tensor parallelism."""
        cut, around, rows = self._part.cut, self._part.around, self._rows[-1]
        full = rows if cut.dim is None else rows[: cut.rows].movedim(0, cut.dim)
        full = full.contiguous() if self.levels else full.clone(memory_format=torch.contiguous_format)
        return full if around is None else around.whole(full)


def _part_bytes(part: ItemPart, num_receivers: int) -> int:
    """Return the most bytes of device memory that any rank needs to gather `part`."""
    cut, context = part.cut, part.context
    if cut.dim is None:
        return 2 * cut.numel * part.dtype.itemsize
    num_replicas = context.replicate.num_ranks if context.cut_twice else 0
    own_rows = -(-cut.chunk // max(num_replicas, 1))
    num_sent = num_receivers if num_receivers < context.num_ranks else 0
    rows = own_rows * (1 + num_replicas) + cut.chunk * (context.shard.num_ranks + num_sent)
    numel = rows * cut.row_numel + (cut.numel if cut.dim else 0)
    for communicator in () if part.around is None else part.around.communicators:
        numel += cut.numel * communicator.num_ranks
    return numel * part.dtype.itemsize


def in_buckets(items: Sequence[Item], num_receivers: int, most_bytes: int) -> list[list[Item]]:
    """Divide `items`, in order, into lists that are gathered together. To gather and deliver a list, no rank needs more than
    `most_bytes` of device memory; an item that needs more is alone. `num_receivers`: number of ranks that receive."""
    buckets, left = list[list[Item]](), -1
    for item in items:
        sizes = [_part_bytes(part, num_receivers) for part in item.parts]
        size = sum(sizes) + (2 * sizes[0] if item.merge or item.split else 0)
        if size > left:
            buckets.append([])
            left = most_bytes
        buckets[-1].append(item)
        left -= size
    return buckets


class Bucket:
    """Gathers `items` together: `begin` starts it, `land` returns the tensors. `what`: what this rank does, for messages."""

    def __init__(self, items: Sequence[Item], to: Receivers, stream: SideStream, what: str) -> None:
        self._items, self._to, self._stream, self._what = items, to, stream, what
        self._gathers = deque[RowGather]()
        self._transfer: Transfer | None = None

    def begin(self) -> Transfer:
        """Begin the gather on the side stream, unless it has begun; return its transfer."""
        if self._transfer is None:
            self._gathers.extend(RowGather(part, self._to) for item in self._items for part in item.parts)
            self._transfer = self._stream.start(_steps(list(self._gathers)), [], self._what)
        return self._transfer

    def land(self) -> deque[tuple[str, deque[tuple[str, Tensor]]]]:
        """Begin the gather if needed, and let the compute stream wait for it. Return for each item (its name, (name, full
        tensor) of each of its tensors); an empty deque if this rank only sends."""
        self.begin().land()
        result = deque[tuple[str, deque[tuple[str, Tensor]]]]()
        for item in self._items:
            gathers = [self._gathers.popleft() for _ in item.parts]
            fulls = [gather.full() for gather in gathers if gather.receives]
            if self._to.has_this_rank:
                full = (fulls[0] if item.merge is None else item.merge(fulls)).to(item.dtype)
                tensors = {item.name: full} if item.split is None else item.split({item.name: full})
                result.append((item.name, deque((name, tensor.contiguous()) for name, tensor in tensors.items())))
        return result


def _steps(gathers: list[RowGather]) -> Steps:
    """Yield the collectives of `gathers`, inner levels first, one per communicator and kind of message. Clears `gathers`."""
    for depth in range(max((len(gather.levels) for gather in gathers), default=0)):
        by_communicator: dict[int, tuple[Communicator, list[RowGather]]] = {}
        for gather in [gather for gather in gathers if depth < len(gather.levels)]:
            communicator = gather.levels[depth][0]
            by_communicator.setdefault(id(communicator), (communicator, []))[1].append(gather)
        for communicator, members in by_communicator.values():
            messages = [gather.message(depth) for gather in members]
            whole = [(out, sent) for out, sent, sizes, _ in messages if not sizes and sent.numel()]
            if whole:
                yield communicator.gather([out for out, _ in whole], [sent for _, sent in whole])
            if to_some := [message for message in messages if sum(message[3])]:
                yield communicator.exchange(to_some)
    gathers.clear()
