"""Streams the full tensors of a sharded model to a consumer on each rank, such as an inference engine, while it is trained."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from accordion import _torch
from accordion.engine.communicator import reduced
from accordion.engine.engine import Engine
from accordion.engine.observer import Observer
from accordion.errors import UsageError
from accordion.safety.divergence import monitor_of
from accordion.state import settle, sharded_engine
from accordion.tensor_checksum import checksum
from accordion.weights.stream_buckets import Bucket, Ranks, in_buckets, item_bytes
from accordion.weights.stream_items import Adapters, Item, items_of

BUCKET_BYTES = 256 * 2**20


class WeightStream(Observer):
    """An iterable of (name, full tensor) that `stream_weights` returns; it is iterated once.

    The engine closes an open stream before this rank begins a forward, a backward or another collective. Closing takes part in
    the gathers that are left, so that all ranks make the same ones whatever each consumes. `digests`: name -> digest of this
    rank's shards, 0-d int64, if they are kept. `up_to_date`: the names whose values this rank's consumer has.
    """

    # The end of the loop closes the stream: `break` and exceptions end the generator of `__iter__`, which runs its `finally`.

    def __init__(self, engine: Engine, ranks: Ranks, bucket_bytes: int) -> None:
        self.engine, self.ranks, self.rank = engine, ranks, _own_rank()
        self.digests: dict[str, Tensor] = {}
        self.up_to_date: set[str] = set()
        self._bucket_bytes, self._thread = bucket_bytes, threading.get_ident()
        self._todo = deque[list[Item]]()
        self._ahead: Bucket | None = None  # in flight
        self._num_begun, self._is_open, self._is_new = 0, False, True
        self._is_exiting = sys.is_finalizing  # by then the module `sys` may be gone

    def open(self, items: Sequence[Item]) -> None:
        """Make buckets of `items`; from now on the stream takes part in their gathers before any other collective."""
        sizes = [item_bytes(item, self.ranks) for item in items]
        self._todo.extend(in_buckets(items, sizes, self._bucket_bytes))
        self._version, self._is_open = self._shard_version(), True
        self.engine.observers.attach(self, first=True)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        if not self._is_new:
            raise UsageError("a stream of weights is iterated once; call stream_weights again.")
        self._is_new = False
        try:
            while self._todo or self._ahead is not None:
                tensors, is_first = self._land(), True
                while tensors:
                    name, tensor = tensors.popleft()
                    yield name, tensor
                    del tensor
                    self._check()
                    self.up_to_date.add(name)
                    if is_first:  # not earlier, because the caller's loop has kept the last tensor of the last bucket
                        self._begin()
                        is_first = False
        finally:
            # The garbage collector may end a generator on any thread, or inside a backward. Then the stream stays open, and
            # the engine closes it.
            may_close = self._is_open and not self._is_exiting() and threading.get_ident() == self._thread
            if may_close and not _torch.is_in_backward():
                self.close()

    def close(self) -> None:
        """Take part in the gathers that are left, without their results; return at once if the stream has ended."""
        if not self._is_open:
            return
        self._is_open = False
        self.engine.observers.detach(self)
        while self._todo or self._ahead is not None:
            self._land()

    def unit_is_called(self) -> None:
        self.close()

    def backward_begins(self) -> None:
        self.close()

    def settles(self) -> None:
        self.close()

    def gradients_are_clipped(self, max_norm: float, norm_type: float) -> None:
        self.close()

    def _begin(self) -> None:
        """Begin to gather the next bucket, unless one is in flight or none is left."""
        if self._ahead is None and self._todo:
            self._num_begun += 1
            what = f"streams bucket {self._num_begun} of {self._num_begun + len(self._todo) - 1} of the weights"
            self._ahead = Bucket(self.engine, self._todo.popleft(), self.ranks, self.rank, what)

    def _land(self) -> deque[tuple[str, Tensor]]:
        """Return the tensors of the bucket in flight, or of the next one; none if this rank only sends."""
        try:
            self._begin()
            bucket, self._ahead = self._ahead, None
            assert bucket is not None, "called while buckets are left"
            return bucket.land()
        except BaseException:  # the ranks have diverged, and no collective is safe any more
            self._todo.clear()
            self._ahead = None
            raise

    def _check(self) -> None:
        """Raise `UsageError` if the stream was closed, or weights were written, since the caller got the last tensor."""
        if not self._is_open:
            raise UsageError(
                "the stream of weights was closed before its end, because this rank used the sharded model inside the loop; do "
                "that before stream_weights, or after its last tensor."
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

    Collective; all ranks iterate. They make the same gathers, also if a consumer breaks off or raises. The tensors are
    contiguous, on the device, and the consumer's own. The next bucket is gathered while the consumer has this one, so a rank
    needs at most two buckets of memory besides the shards. Raises `UsageError` for arguments that do not fit.

    Args:
        bucket_bytes: memory of one bucket, with all that its gather needs; a larger tensor is a bucket of its own.
        ranks: the global ranks that receive. The others only send: their loops have no iterations.
        dtype: of floating-point parameters, which are cast before they are sent; by default that of the shards.
        changed_since: an earlier stream of this model: only tensors whose bits, in `dtype`, have changed since are delivered.
            "start": deliver all, and keep the digests that a later stream compares.
        adapters: of a PEFT model: "merged" into the weights, with the names of the base model; or "alone", as PEFT saves them.
    """
    engine = sharded_engine(model, "stream_weights")
    of_model = list(monitor_of(engine.context).ranks) or [_own_rank()]
    chosen: Sequence[Any] = {"all": of_model, "first": of_model[:1]}.get(ranks, []) if isinstance(ranks, str) else ranks
    earlier = changed_since if isinstance(changed_since, WeightStream) else None
    for is_wrong, text in (
        (engine.suspended, "stream_weights does not work inside full_params; leave it first."),
        (bucket_bytes < 1, f"bucket_bytes={bucket_bytes} is not a positive number of bytes."),
        (
            not chosen or not set(chosen) <= set(of_model),
            f'ranks={ranks!r} is neither "all" nor "first" nor a list of ranks of the model, {of_model}.',
        ),
        (adapters not in ("merged", "alone"), f'adapters={adapters!r} is neither "merged" nor "alone".'),
        (
            changed_since not in (None, "start")
            and (earlier is None or earlier.engine is not engine or not earlier.digests),
            'changed_since is no earlier stream of this model that kept digests; begin with changed_since="start".',
        ),
    ):
        if is_wrong:
            raise UsageError(text)
    settle(
        engine,
        f"streams weights to ranks {sorted(chosen)}, {bucket_bytes} bytes at a time, as {dtype}, adapters {adapters}, changed "
        f"since {'the last stream' if earlier else changed_since}",
    )
    stream, items = WeightStream(engine, frozenset(chosen), bucket_bytes), items_of(model, engine, dtype, adapters)
    if changed_since is not None:
        stream.digests = {item.name: _digest(item, engine.context.device) for item in items}
    if earlier is not None:
        changed = _changed(stream, earlier)
        stream.up_to_date.update(stream.digests.keys() - changed)
        items = [item for item in items if item.name in changed]
    stream.open(items)
    return stream


def _own_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _digest(item: Item, device: torch.device) -> Tensor:
    """Return a digest, 0-d int64, of what this rank has of the tensors that are sent for `item`, in their dtypes."""
    return torch.stack([checksum(part.local(device)) * (2 * i + 1) for i, part in enumerate(item.parts)]).sum()


def _changed(stream: WeightStream, earlier: WeightStream) -> set[str]:
    """Return the names that differ on any rank from `earlier`, or whose values of then some receiving rank does not have."""
    context, names = stream.engine.context, list(stream.digests)
    is_known = [
        name in earlier.digests and (name in earlier.up_to_date or stream.rank not in earlier.ranks) for name in names
    ]
    differ = torch.stack([stream.digests[name] != earlier.digests.get(name, 0) for name in names])
    communicators = [context.shard.gather, context.replicate.gather]
    communicators += [c for p in stream.engine.params if p.around is not None for c in p.around.communicators]
    counts = differ.to(torch.int32) + ~torch.tensor(is_known, device=context.device)
    counts = reduced(counts, [*{id(each.group): each for each in communicators}.values()])
    return {name for name, count in zip(names, counts.tolist(), strict=True) if count}
