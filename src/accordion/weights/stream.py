"""Streams the full tensors of a sharded model to a consumer on each rank, such as an inference engine, while it is trained."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Literal

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

    While it is open it is attached to the engine, which closes it before this rank begins a forward, a backward or another
    collective. Closing takes part in the gathers that are left, so that all ranks make the same ones whatever each consumes.
    `digests`: name -> digest of this rank's shards, 0-d int64; empty if none are kept. `up_to_date`: the names whose values the
    consumer of this rank has.
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
    contiguous, on the device, and the consumer's own. The next bucket is gathered while the consumer has this one, so a rank needs at most
    two buckets of memory besides the shards. Raises `UsageError` for arguments that do not fit, before anything is gathered.

    Args:
        bucket_bytes: memory of one bucket, with all that its gather needs; a larger tensor is a bucket of its own.
        ranks: the global ranks that receive. The others only send: their loops have no iterations.
        dtype: of floating-point parameters, which are cast before they are sent; by default that of the shards.
        changed_since: an earlier stream of this model with the same dtype: only tensors whose bits have changed since are
            delivered. "start": deliver all, and keep the digests that a later stream compares.
        adapters: of a PEFT model: "merged" into the weights, with the names of the base model; or "alone", as PEFT saves them.
    """
    engine = sharded_engine(model, "stream_weights")
    of_model = _ranks_of(engine)
    receiving = {"all": of_model, "first": of_model[:1]}.get(ranks, ranks) if isinstance(ranks, str) else list(ranks)
    _check_arguments(engine, bucket_bytes, receiving, of_model, changed_since, adapters)
    stream = WeightStream(engine, frozenset(map(int, receiving)), bucket_bytes)
    since = "the last stream" if isinstance(changed_since, WeightStream) else changed_since
    settle(
        engine,
        f"streams weights to ranks {sorted(stream.ranks)}, {bucket_bytes} bytes at a time, as {dtype}, with adapters {adapters}, "
        f"changed since {since}",
    )
    items = items_of(model, engine, dtype, adapters)
    if changed_since is not None:
        stream.digests = _digests(items, engine.context.device)
    if isinstance(changed_since, WeightStream):
        changed = _changed(stream, changed_since)
        stream.up_to_date.update(item.name for item in items if item.name not in changed)
        items = [item for item in items if item.name in changed]
    stream.open(items)
    return stream


def _own_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _ranks_of(engine: Engine) -> list[int]:
    """Return the global ranks that have the model, in order."""
    return list(monitor_of(engine.context).ranks) or [_own_rank()]


def _check_arguments(
    engine: Engine,
    bucket_bytes: int,
    receiving: Sequence[int] | str,
    of_model: list[int],
    changed_since: WeightStream | str | None,
    adapters: str,
) -> None:
    """Raise `UsageError` for arguments of `stream_weights` that do not fit the model."""
    if engine.suspended:
        raise UsageError("stream_weights does not work inside full_params; leave it first.")
    if bucket_bytes < 1:
        raise UsageError(f"bucket_bytes={bucket_bytes} is not a positive number of bytes.")
    if isinstance(receiving, str) or not receiving or not set(receiving) <= set(of_model):
        raise UsageError(
            f'ranks={receiving!r} is neither "all" nor "first" nor a list of ranks of the model, {of_model}.'
        )
    if adapters not in ("merged", "alone"):
        raise UsageError(f'adapters={adapters!r} is neither "merged" nor "alone".')
    is_stream = isinstance(changed_since, WeightStream)
    if not (is_stream or changed_since in (None, "start")):
        raise UsageError(
            f'changed_since={changed_since!r} is no earlier stream; pass that, or "start" for the first one.'
        )
    if isinstance(changed_since, WeightStream) and (changed_since.engine is not engine or not changed_since.digests):
        raise UsageError(
            'changed_since is a stream of another model, or one that kept no digests; begin with changed_since="start".'
        )


def _digests(items: Sequence[Item], device: torch.device) -> dict[str, Tensor]:
    """Return, for each name, a digest of what this rank has of the tensors that are sent for it, in their dtypes."""
    digests = {}
    for item in items:
        parts = [checksum(source.local(device)) * (2 * i + 1) for i, source in enumerate(item.sources)]
        digests[item.name] = torch.stack(parts).sum()
    return digests


def _changed(stream: WeightStream, earlier: WeightStream) -> set[str]:
    """Return the names that differ on any rank from `earlier`, or whose values of then some receiving rank does not have."""
    device, context = stream.engine.context.device, stream.engine.context
    names = list(stream.digests)
    new = torch.stack([stream.digests[name] for name in names])
    old = torch.stack([earlier.digests.get(name, torch.zeros((), dtype=new.dtype, device=device)) for name in names])
    has = [
        name in earlier.digests and (name in earlier.up_to_date or stream.rank not in earlier.ranks) for name in names
    ]
    changed = (new != old).cpu() | ~torch.tensor(has, device="cpu")
    communicators = [context.shard.gather, context.replicate.gather]
    communicators += [c for p in stream.engine.params if p.around is not None for c in p.around.communicators]
    over = {id(each.group): each for each in communicators}
    counts = reduced(changed.to(device, torch.int32), [*over.values()])
    return {name for name, count in zip(names, counts.tolist(), strict=True) if count}
