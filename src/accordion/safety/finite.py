"""NaN and inf on some ranks: report where the first one appeared, and let all ranks see an overflow in fp16."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from accordion import _torch
from accordion.engine.communicator import reduced as all_reduced
from accordion.engine.engine import Engine
from accordion.engine.observer import CallInForward, Observer
from accordion.engine.tree import tensors_of
from accordion.engine.unit import Unit
from accordion.errors import NonFiniteError


class FiniteCheck(Observer):
    """Observer that checks parameters, outputs and gradients for NaN and inf (`debug="finite"`), and raises `NonFiniteError` at
    the end of a forward or backward. For each unit and kind of tensor, a 0-d flag on the device becomes 1 if a value is not
    finite, so the host waits only once. Ranks visit units in one order; the error names the first with a flag on any rank."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._flags: dict[tuple[int, str], Tensor] = {}  # by unit and place in it

    def unit_is_full(self, call: CallInForward, fulls: Sequence[Tensor]) -> None:
        self._check(call.unit.index, "in its parameters", call.unit.views)

    def unit_leaves(self, call: CallInForward, out: Any, error: BaseException | None) -> Any:
        if error is None:
            self._check(call.unit.index, "in what its forward returned", tensors_of(out))
        return out

    def full_gradients(self, unit: Unit, grads: Sequence[Tensor | None]) -> None:
        self._check(unit.index, "in the gradients of its parameters, before they were reduced", grads)

    def forward_ends(self, error: BaseException | None) -> None:
        if error is None:
            self.report()
        else:
            self.interrupted()

    def backward_ended(self, reduced: bool) -> None:
        self.report()

    def _check(self, unit: int, place: str, tensors: Iterable[Tensor | None]) -> None:
        flag = self._flags.get((unit, place), torch.zeros((), device=self._engine.context.device))
        for tensor in tensors:
            if tensor is not None and (tensor.is_floating_point() or tensor.is_complex()):
                flag = torch.maximum(flag, (~torch.isfinite(tensor.detach())).any().to(flag.dtype))
        self._flags[unit, place] = flag

    def interrupted(self) -> None:
        self._flags.clear()

    def report(self) -> None:
        """Raise `NonFiniteError` on every rank if a check since the last report found NaN or inf on any rank. A collective, in
        which the host waits for the device; does nothing if nothing was checked."""
        flags, self._flags = self._flags, {}
        if not flags:
            return
        context = self._engine.context
        rank = dist.get_rank() if context.num_ranks > 1 else 0
        # The lowest rank has the largest number.
        mark = torch.stack(list(flags.values())) * float(2**20 - rank)
        marks = all_reduced(mark, [context.shard.gather, context.replicate.gather], dist.ReduceOp.MAX).tolist()
        for (unit, place), value in zip(flags, marks, strict=True):
            if value:
                raise NonFiniteError(
                    f"NaN or inf appeared first in unit {unit} ({self._engine.units[unit].name or 'root'}), {place}, on rank "
                    f"{2**20 - int(value)}; inspect the inputs of that unit on that rank."
                )


class OverflowSpread(Observer):
    """Observer that adds inf to the gradients that are not sharded, if the gradient shards of any rank have inf or NaN. It acts
    on units in fp16, by a collective at the end of each backward that reduces. `torch.amp.GradScaler` reduces its flag over
    ranks only if the first gradient is sharded; otherwise one rank might skip a step that others take."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def backward_ended(self, reduced: bool) -> None:
        units, context = self._engine.units, self._engine.context
        params = [p for u in units if any(g.dtype == torch.float16 for g in u.groups) for p in u.params]
        grads = [(p.cut.dim is None, _torch.local_of(p.sharded.grad)) for p in params if p.sharded.grad is not None]
        whole = [grad for is_whole, grad in grads if is_whole]
        if not reduced or not whole or not context.cut_communicators:
            return
        # On their device, without a wait. Gradients of offloaded units may be on the host.
        overflows = [(~grad.isfinite()).any().to(context.device) for is_whole, grad in grads if not is_whole]
        overflow = torch.stack(overflows).any().float() if overflows else torch.zeros((), device=context.device)
        addend = torch.where(all_reduced(overflow, context.cut_communicators) > 0, float("inf"), 0.0)
        for grad in whole:
            grad.add_(addend.to(grad.device))
