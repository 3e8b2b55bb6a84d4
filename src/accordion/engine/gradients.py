"""Gradients between a backward and their `.grad`: their reduces, copies off the device, and `.grad`s that become None if no
rank had a gradient. Also full gradients that are summed on one rank under no_sync, until a later backward reduces them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from accordion import _torch
from accordion.engine.params import Param
from accordion.engine.pending_reduce import PendingReduce
from accordion.engine.streams import SideStream, Transfer


class GradientsUnderWay:
    """Gradients of one model that are on their way to `.grad`: their reduces, copies off the device, and delayed writes.

    `reduces`: the reduces under way, one list per call of a unit. `delayed_writes`: callbacks, called without arguments, that
    write gradients whose reduce over the replicate axis of a hybrid strategy still runs, the oldest first. `copies`: copies to
    host or disk under way. `to_add`: (gradient, term) pairs; `land` adds the term after these copies. `undecided`: id ->
    (parameter, its `.grad`, list of (sums, k)) of each parameter for which this rank, and perhaps every rank, had no gradient;
    `sums[k]`, on the device, is 0 if no rank had one in one reduce. `leaf`: a dummy leaf of the model's graphs.
    """

    # The counts are read once, at the end of the backward, because each read makes the host wait for the device.

    def __init__(self, side_stream: SideStream, leaf: Tensor) -> None:
        self._side_stream, self._leaf = side_stream, leaf
        self.reduces: list[list[PendingReduce]] = []
        self._failed: list[PendingReduce] = []  # of backwards that raised; the host must wait for them
        self.delayed_writes: list[Callable[[], object]] = []
        self.copies: list[Transfer] = []
        self.to_add: list[tuple[Tensor, Tensor]] = []
        self.undecided: dict[int, tuple[Tensor, Tensor, list[tuple[Tensor, int]]]] = {}
        self._written_on: set[Any] = set()  # compute streams
        self._may_write: tuple[int, bool] | None = None  # (id of a backward, result of `may_write` in it)

    def may_write(self) -> bool:
        """Return True if the engine may write `.grad` in this backward. Return False in `autograd.grad`, in a backward with
        `inputs`, and in anomaly mode. If True, also let the compute stream wait for other streams that wrote gradients."""
        task = _torch.current_graph_task()
        if self._may_write is None or self._may_write[0] != task:  # computed once per backward
            self._may_write = task, not torch.is_anomaly_enabled() and _torch.walks_everything(self._leaf)
        if self._may_write[1]:
            self.write_here()
        return self._may_write[1]

    def write_here(self) -> None:
        """Record that this compute stream writes gradients, and let it wait for the other streams that wrote some."""
        self._written_on.add(self._side_stream.compute())
        if len(self._written_on) > 1:
            self._side_stream.join(self._written_on)

    def write_delayed(self, num_left: int = 0) -> None:
        """Run the callbacks in `delayed_writes`, the oldest first, until `num_left` of them are left."""
        while len(self.delayed_writes) > num_left:
            self.delayed_writes.pop(0)()

    def land(self) -> None:
        """Let the host wait for copies of gradients to host or disk, then do the additions in `to_add`."""
        if not self.copies:
            return
        for transfer in self.copies:
            transfer.synchronize()
        self.copies.clear()
        for total, term in self.to_add:
            total.add_(term)
        self.to_add.clear()

    def note_undecided(
        self,
        params: Sequence[Tensor],
        earlier: Sequence[Tensor | None],
        grads: Sequence[Tensor | None],
        counted: Sequence[tuple[Tensor, int] | None],
    ) -> None:
        """Record in `undecided` the parameters for which perhaps no rank had a gradient. Changes no gradient. Arguments have an
        entry per parameter. `earlier`: `.grad` before a reduce. `grads`: its result, to become `.grad` or be added; None: skip.
        `counted`: (sums, k), where `sums[k]`, on the device, is 0 if no rank had a gradient; None if some rank had one: delete
        the record. With (sums, k), a parameter with None in `earlier` gets a record, and a recorded one this counter too."""
        for param, previous, grad, count in zip(params, earlier, grads, counted, strict=True):
            if grad is None:
                continue
            entry = self.undecided.get(id(param))
            if count is None:
                self.undecided.pop(id(param), None)
            elif previous is None:
                self.undecided[id(param)] = param, grad, [count]
            elif entry is not None and previous is entry[1]:
                entry[2].append(count)

    def settle_undecided(self) -> None:
        """Set `.grad` to None for parameters in `undecided` for which no rank had a gradient, unless the user has replaced
        `.grad` meanwhile. Forget all records. The host waits for the device if there is a record."""
        if not self.undecided:
            return
        entries, self.undecided = self.undecided, {}
        tensors = {id(sums): sums for _, _, counted in entries.values() for sums, _ in counted}
        numbers = iter(torch.cat(list(tensors.values())).tolist())
        counts = {key: list(islice(numbers, sums.numel())) for key, sums in tensors.items()}
        for param, grad, counted in entries.values():
            if param.grad is grad and not any(counts[id(sums)][k] for sums, k in counted):
                param.grad = None

    def join_writers(self) -> None:
        """Let the compute stream wait for all streams that wrote gradients, as autograd does after its own accumulation."""
        self._side_stream.join(self._written_on)
        self._written_on.clear()

    def drop(self) -> None:
        """Drop the reduces, delayed writes and records of a backward that raised. The host does not wait for collectives,
        because other ranks may not have begun them; `finish_failed` does."""
        for part in [part for parts in self.reduces for part in parts]:
            if part.lets_host_wait:
                self._failed.append(part)
            else:
                part.finish(decide=False)
        self.reduces.clear()
        self.delayed_writes.clear()
        self.to_add.clear()
        self.undecided.clear()

    def finish_failed(self) -> None:
        """Let the host wait for the reduces of backwards that raised, whose gradients `drop` has dropped."""
        while self._failed:
            self._failed.pop(0).finish(decide=False)

    def abandon(self) -> None:
        """Drop all gradients of a deleted model, so that their memory is freed. The host waits for no collective."""
        for part in [*self._failed, *[part for parts in self.reduces for part in parts]]:
            part.abandon()
        self._failed.clear()
        self.reduces.clear()
        self.drop()


def weighted(grads: Sequence[Tensor | None], weight: float, *, zeros: bool = False) -> Sequence[Tensor | None]:
    """Return this rank's gradients times `weight`; None stays None. If `weight` is 0, return None for each, as on a rank that
    has no gradient; with `zeros`, return tensors of zeros instead."""
    if weight == 1.0:
        return grads
    if weight:
        return [None if grad is None else grad * weight for grad in grads]
    return [torch.zeros_like(grad) if zeros and grad is not None else None for grad in grads]


@dataclass(slots=True)
class _Sum:
    """The sum `total` of one parameter's full gradients since the user last cleared `.grad`.

    `grad`, `version`: `.grad` at the first term and its version when last checked, to detect when the user clears it.
    `is_ours`: True if `grad` is zeros that `LocalSums.add` put in place of None.
    """

    total: Tensor
    grad: Tensor
    version: int
    is_ours: bool


class LocalSums:
    """Full gradients of one unit, summed on this rank under no_sync, each in its reduce dtype (`dtypes`, by parameter).
    `pending`: indices of parameters for which `add` was called since the last `take`, also with None; the same on all ranks."""

    def __init__(self, params: Sequence[Param], dtypes: Sequence[torch.dtype]) -> None:
        self._params, self._dtypes = params, dtypes
        self._sums: dict[int, _Sum] = {}  # by index of the parameter
        self.pending: set[int] = set()

    def add(self, indices: Sequence[int], grads: Sequence[Tensor | None]) -> None:
        """Add this rank's full gradients `grads` to the sums of the parameters `indices`; None adds nothing. A sum begins with
        the first gradient, and anew after the user has cleared `.grad`. If a sum begins and `.grad` of the sharded parameter is
        None, set it to sharded zeros."""
        self.pending.update(indices)
        for i, grad in zip(indices, grads, strict=True):
            if grad is None:
                continue
            earlier = self._sum_of(i)
            if earlier is not None:
                # Not in place, because autograd may share the first gradient.
                earlier.total = earlier.total + grad
                continue
            self._forget(i)
            param = self._params[i].sharded
            shown, is_ours = param.grad, param.grad is None
            if shown is None:
                like = self._params[i].grad_like
                zeros = torch.zeros_like(_torch.local_of(param), dtype=like.dtype)
                shown = param.grad = _torch.as_dtensor(zeros, like)
            self._sums[i] = _Sum(grad.to(self._dtypes[i]), shown, shown._version, is_ours)

    def take(self, indices: Sequence[int], grads: Sequence[Tensor | None] | None) -> list[Tensor | None]:
        """Return for each parameter in `indices` its sum plus its gradient in `grads`, None if it has neither. Forget these
        sums, and set `.grad` that `add` filled with zeros to None again. `grads`: None to take the sums alone. With gradients,
        a parameter that was frozen since the forward keeps its sum, and only its gradient is returned."""
        result: list[Tensor | None] = []
        for i, grad in zip(indices, [None] * len(indices) if grads is None else grads, strict=True):
            local_sum = None
            if grads is None or self._params[i].sharded.requires_grad:
                local_sum = self._sum_of(i)
                self._forget(i)
                self.pending.discard(i)
            if local_sum is not None:
                result.append(local_sum.total if grad is None else local_sum.total + grad)
            else:
                result.append(None if grad is None else grad.to(self._dtypes[i]))
        return result

    def any_held(self) -> bool:
        """Return True if there is a sum that was neither taken nor cleared by the user through `.grad`."""
        return any(self._sum_of(i) is not None for i in self._sums)

    def drop(self) -> None:
        """Forget all sums, and set each `.grad` that `add` filled with zeros to None again."""
        for i in list(self._sums):
            self._forget(i)
        self.pending.clear()

    def _forget(self, i: int) -> None:
        entry = self._sums.pop(i, None)
        if entry is not None and entry.is_ours and self._params[i].sharded.grad is entry.grad:
            self._params[i].sharded.grad = None

    def _sum_of(self, i: int) -> _Sum | None:
        """Return the sum of parameter `i`; None if there is none, or if the user has set `.grad` to None or filled it with
        zeros since. Any write into zeros that `add` put into `.grad` counts as that too. The host may wait for the device."""
        entry = self._sums.get(i)
        grad = None if entry is None else self._params[i].sharded.grad
        if entry is None or grad is None:
            return None
        if grad is entry.grad and grad._version != entry.version:
            local = _torch.local_or_same(grad)
            if entry.is_ours or not local.count_nonzero():
                return None
            entry.version = grad._version
        return entry
