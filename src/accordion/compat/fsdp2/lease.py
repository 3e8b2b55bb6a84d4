"""The lease of an explicit `unshard`: full parameters in the registry, and what ends it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from accordion import _torch
from accordion.engine.engine import Engine
from accordion.engine.observer import Observer
from accordion.engine.unit import Unit, UnitPolicy


class LeasedPart(Protocol):
    """What of a call of `fully_shard` a lease needs."""

    unit: Unit | None
    unit_policy: UnitPolicy

    def alive(self) -> list[nn.Module]: ...
    def ensure(self) -> Unit: ...
    def engine(self) -> Engine: ...
    def is_outermost(self) -> bool: ...


class Lease:
    """Owns the full parameters that `unshard` shows, and the lease on them; ended by `reshard`, a forward or a backward."""

    def __init__(self, part: LeasedPart) -> None:
        self._part: weakref.ref[LeasedPart] = weakref.ref(part)
        self.shown: list[nn.Parameter] | None = None
        self._hooks: list[Any] = []

    def begin(self) -> Unit:
        """Start to gather; `take` waits."""
        part = self._part()
        assert part is not None, "a lease lives in its part"
        unit = part.ensure()
        engine = part.engine()
        if self.shown is None and engine.depth == 0 and not _torch.is_in_backward():
            engine.context.waiter.check()
            engine.recover()
            unit.drop_stale()
        with torch.inference_mode(False):
            engine.launch(unit)
        return unit

    def take(self) -> None:
        """Show full parameters as plain leaves of the registry, gathered where nobody has begun to."""
        part, unit = self._part(), self.begin()
        assert part is not None, "a lease lives in its part"
        if self.shown is not None:
            return
        with torch.inference_mode(False), torch.no_grad():
            part.engine().acquire(unit)
            self.shown = [
                nn.Parameter(full, requires_grad=p.sharded.requires_grad)
                for full, p in zip(
                    unit.module_params.around([view.data for view in unit.views]), unit.params, strict=True
                )
            ]
        for i, (leaf, param) in enumerate(zip(self.shown, unit.params, strict=True)):
            vars(leaf).update(_torch.marks_of(param.sharded))
            if leaf.requires_grad:
                leaf.register_post_accumulate_grad_hook(
                    partial(_collect, weakref.ref(part.engine()), weakref.ref(unit), i)
                )
        unit.module_params.show(self.shown)
        ended = torch.compiler.disable(partial(_forward_ended, weakref.ref(self)))
        self._hooks = [m.register_forward_hook(ended, always_call=True) for m in part.alive()]

    def end(self) -> None:
        part, shown = self._part(), self.shown
        if shown is None or part is None or part.unit is None:
            return
        self.shown = None
        for handle in self._hooks:
            handle.remove()
        for leaf in shown:  # a graph that saved one finds its memory gone: autograd says so by the version counter
            torch.autograd.graph.increment_version(leaf)
        part.unit.module_params.hide(shown)
        part.unit.release()

    def forward_ended(self) -> None:
        part = self._part()
        if part is None:
            return
        keep = part.unit_policy.keep
        if not (part.is_outermost() if keep is None else keep):
            self.end()

    def backward_ended(self) -> None:
        part = self._part()
        if part is not None and not part.unit_policy.keep_on:
            self.end()


def _collect(by: weakref.ref[Engine], of: weakref.ref[Unit], i: int, leaf: Tensor) -> None:
    """A gradient of a full parameter that was used outside of any forward: the end of the backward reduces it."""
    engine, unit, grad = by(), of(), leaf.grad
    leaf.grad = None
    if engine is not None and unit is not None and grad is not None:
        engine.add_outside(unit, i, _torch.local_of(grad) if isinstance(grad, DTensor) else grad)


def _forward_ended(of: weakref.ref[Lease], *_: Any) -> None:
    lease = of()
    if lease is not None:
        lease.forward_ended()


class UnshardLeases(Observer):
    """Ends the leases of one engine with its backwards."""

    def __init__(self, leases: Iterable[Lease]) -> None:
        self._leases = [weakref.ref(lease) for lease in leases]

    def backward_ended(self, reduced: bool) -> None:
        for reference in self._leases:
            lease = reference()
            if lease is not None:
                lease.backward_ended()
