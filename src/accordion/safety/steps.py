"""Check that all ranks step their optimizers in the same way: a digest of what they did is sent with the gradients.

Each backward has a record of the optimizer steps before it, and of what happened to gradients, weights and settings since.
Each reduce carries a tag, by which ranks check that they reduce the same unit. For one unit the tag includes a digest of all
records so far, so no byte more is sent. If the host does not compare tags (on a device, with offload, or if the reduce dtype
has two bytes), the digest is sent to the first rank now and then. If digests differ, ranks exchange their records.
"""

from __future__ import annotations

import weakref
import zlib
from collections import deque
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from accordion import _torch
from accordion.engine.engine import Engine
from accordion.engine.observer import Observer
from accordion.engine.unit import Unit
from accordion.errors import some_of
from accordion.offload.tiers import Tiers
from accordion.optimizers.whole_matrices import WholeStep
from accordion.optimizers.wrap import LocalStep, step_hooks
from accordion.safety.divergence import DivergenceMonitor
from accordion.safety.liveness.wording import STEPS

KEPT_RECORDS = 64  # backwards; a difference that began earlier is not named with its step
NO_OPTIONS = ("params", "param_names")
Record = dict[str, str]
"""The facts of one backward that ranks compare; keys are their names in messages."""


class StepWatch(Observer):
    """Observer that records the optimizer steps before each backward, and sends the digest that ranks compare. Attach it. Its
    constructor also registers it with `step_hooks`, so that `stepped` is called after each step of any torch optimizer in the
    process, and sets `monitor.history`. Writes to offloaded parameters are recorded only if made through the DTensors, because
    other threads step the local tensors. `model`: the module whose mode, training or eval, is recorded."""

    def __init__(self, engine: Engine, monitor: DivergenceMonitor, model: weakref.ref[nn.Module]) -> None:
        self._engine, self._monitor, self._model = engine, monitor, model
        self._params = [param.sharded for unit in engine.units for param in unit.params]
        self._is_offloaded = isinstance(engine.context.shard_buffers, Tiers)
        self._ours: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        marked = first_trained(engine)
        compares = engine.context.device.type == "cpu" and not self._is_offloaded  # the host compares tags
        self._marks = compares and marked is not None and all(g.reduce_dtype.itemsize >= 4 for g in marked.groups)
        # A rank without rows of a parameter counts no writes to it, so counts would differ between ranks.
        cuts, num = [param.cut for unit in engine.units for param in unit.params], engine.context.shard.num_ranks
        has_rows = all(any(cut.rows_of(rank) for cut in cuts) for rank in range(num))
        self._sees_writes = not engine.context.cut_twice and has_rows
        self._count_writes = _torch.own_versions_of if self._is_offloaded else _torch.versions_of
        self._record: Record = {}
        self._num_steps = 0  # since the last backward
        self._versions: int | None = None  # of all shards, as the last step left them
        self._chain, self._num = 0, 0
        self._records: deque[tuple[int, int, Record]] = deque(maxlen=KEPT_RECORDS)  # (backward, step, record)
        monitor.history = self.history
        step_hooks().add(self)

    def stepped(self, optimizer: Optimizer) -> None:
        """Record a step that `optimizer` has made, if it has parameters of this model."""
        if optimizer not in self._ours:
            # A wrapped optimizer steps local tensors, which `park` may replace; with offload, copies of it step them.
            locals_of = [] if self._is_offloaded else [_torch.local_of(p) for p in self._params]
            ids = {id(tensor) for tensor in (*self._params, *locals_of)}
            if not any(id(p) in ids for group in optimizer.param_groups for p in group["params"]):
                return
            self._ours.add(optimizer)
        self._monitor.num_steps += 1
        self._monitor.position.doing = None  # it no longer clips
        self._num_steps += 1
        self._record["optimizer"] = type(optimizer).__name__
        for i, group in enumerate(optimizer.param_groups):
            of = f" of group {i}" if i else ""
            self._record.update({f"{key}{of}": text_of(value) for key, value in group.items() if key not in NO_OPTIONS})
            self._record[f"number of parameters{of}"] = str(len(group["params"]))
        first = first_trained(self._engine)
        if not self._is_offloaded and first is not None and first.trained.params[0].grad is None:
            self._record["gradients at its step"] = "cleared"
        if isinstance(optimizer, WholeStep):  # its ranks wait for one another's rows, also for those without a gradient
            self._record["parameters without a gradient"] = some_of(optimizer.without_gradient(), 3) or "none"
        if self._sees_writes:
            # A wrapped step counts one more write of each parameter when it ends.
            counts = isinstance(optimizer, LocalStep) and not self._is_offloaded
            later = sum(len(group["params"]) for group in optimizer.param_groups) if counts else 0
            self._versions = self._count_writes(self._params) + later

    def gradients_are_clipped(self, max_norm: float, norm_type: float) -> None:
        self._monitor.position.doing = "clips gradients"
        self._record["clip_grad_norm_"] = f"to {max_norm:g} by norm {norm_type:g}"

    def forward_begins(self, differentiable: bool, reduces: bool) -> None:
        if differentiable:
            kind = self._engine.context.device.type
            if torch.is_autocast_enabled(kind):
                self._record["autocast"] = str(torch.get_autocast_dtype(kind))
            model = self._model()
            if model is not None and not model.training:
                self._record["model"] = "in eval mode"
        if self._versions is not None and self._count_writes(self._params) != self._versions:
            self._record["weights"] = "written after the optimizer's step"
            self._versions = None

    def backward_begins(self) -> None:
        """Add the record since the last backward to the digest, and send the digest: in the tags of the first unit with
        trainable parameters, or now and then to the first rank. Does nothing if all parameters are frozen. Raises
        `DivergenceError` if digests that were sent to the first rank before have differed."""
        first = first_trained(self._engine)
        if first is None:
            return
        record = {STEPS: str(self._num_steps), **self._record}
        # Under no_sync, `.grad` is set only on ranks whose backward reached the parameter.
        is_summed = first.trained.indices[0] in first.local_sums.pending
        if not self._is_offloaded and not is_summed and first.trained.params[0].grad is not None:
            record["gradients"] = "not cleared before it (zero_grad)"
        self._chain = zlib.crc32(repr(record).encode(), self._chain)
        self._num += 1
        self._records.append((self._num, self._monitor.num_steps + (0 if self._num_steps else 1), record))
        self._record, self._num_steps = {}, 0
        if self._marks:
            for group in first.groups:
                group.remark(self._chain)
        else:
            self._monitor.send_steps(self._num, self._chain)

    def history(self) -> dict[str, Any]:
        """Return {"records": [(number of the backward, step, record), ...]}: one entry for each of the last `KEPT_RECORDS`
        backwards, and one for the next backward with what is recorded so far."""
        current = (self._num + 1, self._monitor.num_steps, {STEPS: str(self._num_steps), **self._record})
        return {"records": [*self._records, current]}


def first_trained(engine: Engine) -> Unit | None:
    """Return the first unit with trainable parameters; None if all parameters are frozen."""
    return next((unit for unit in engine.units if unit.trained.indices), None)


def text_of(value: Any) -> str:
    """Return the value of an optimizer option as text, which is equal on all ranks if the values are. A tensor of one element on
    the CPU becomes its number. Other tensors and objects become "a <type>", since the host does not wait for a device."""
    if isinstance(value, float):
        return f"{value:g}"
    if value is None or isinstance(value, (str, int)):
        return str(value)
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(text_of, value))})"
    if isinstance(value, Tensor) and value.device.type == "cpu" and value.numel() == 1:
        return text_of(value.item())
    return f"a {type(value).__name__}"
