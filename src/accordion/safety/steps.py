"""Whether all ranks step alike: what optimizers are given and do goes into a digest that travels with gradients.

Each backward has a record: how many steps came before it, with which options and of how many parameters, whether gradients were
cleared and weights left alone since, at which norm gradients were clipped, and whether the forward was one of training, and in
which autocast. A chain of the records' digests is the mark that the reduce of one unit
sends in place of its plain tag: no byte more. Where no host compares tags (on a device, with what rests off it, where two bytes
are reduced), the chain goes to the first rank over the hub now and then. Where chains differ, ranks lay their records
side by side.
"""

from __future__ import annotations

import weakref
import zlib
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from accordion import _torch
from accordion.engine.engine import Engine
from accordion.engine.observer import Observer
from accordion.engine.unit import Unit
from accordion.offload.tiers import Tiers
from accordion.optim import LocalStep, step_hooks
from accordion.safety.divergence import DivergenceMonitor

KEPT_RECORDS = 64  # backwards, in which what differs must have begun to be named with its step
STEPS = "steps before it"
NO_OPTIONS = ("params", "param_names")
OF_FORWARD = frozenset({"autocast", "model"})  # what of a record its own forward says
SHOWN = 3  # differences of a rank in a message
Record = dict[str, str]
"""What is compared of one backward, by the name that messages show."""


class StepWatch(Observer):
    """Owns the records of a model's last backwards, and what has come for the next one.

    Steps of offloaded parameters run on threads, and write to local tensors: there only writes to the DTensors are counted.
    """

    def __init__(self, engine: Engine, monitor: DivergenceMonitor, model: weakref.ref[nn.Module]) -> None:
        self._engine, self._monitor, self._model = engine, monitor, model
        self._params = [param.sharded for unit in engine.units for param in unit.params]
        self._is_offloaded = isinstance(engine.context.shard_buffers, Tiers)
        self._ids = {id(p) for p in self._params}
        if not self._is_offloaded:  # a wrapped optimizer steps on local tensors; of what is offloaded copies of it do
            self._ids |= {id(_torch.local_of(p)) for p in self._params}
        self._ours: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        marked = first_trained(engine)
        self._marks = (
            engine.context.device.type == "cpu"
            and not self._is_offloaded
            and marked is not None
            and all(group.reduce_dtype.itemsize >= 4 for group in marked.groups)
        )
        # A parameter of which a rank has no row is written by nobody there.
        cuts, num = [param.cut for unit in engine.units for param in unit.params], engine.context.shard.num_ranks
        has_rows = all(any(cut.rows_of(rank) for cut in cuts) for rank in range(num))
        self._sees_writes = not engine.context.cut_twice and has_rows
        self._count_writes = _torch.own_versions_of if self._is_offloaded else _torch.versions_of
        self._record: Record = {}
        self._num_steps = 0  # since the last backward
        self._versions: int | None = None  # of all shards, as the last step left them
        self._chain, self._num = 0, 0
        self._records: deque[tuple[int, int, Record]] = deque(maxlen=KEPT_RECORDS)  # number, step, what
        monitor.history, monitor.compare = self.history, self.compare
        step_hooks().add(self)

    # -- what is seen

    def steps_of(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer steps parameters of this model."""
        return any(id(p) in self._ids for group in optimizer.param_groups for p in group["params"])

    def stepped(self, optimizer: Optimizer) -> None:
        """An optimizer has stepped, of this model or another."""
        if optimizer not in self._ours:
            if not self.steps_of(optimizer):
                return
            self._ours.add(optimizer)
        self._monitor.num_steps += 1
        self._num_steps += 1
        self._record["optimizer"] = type(optimizer).__name__
        for i, group in enumerate(optimizer.param_groups):
            of = f" of group {i}" if i else ""
            self._record.update({f"{key}{of}": told(value) for key, value in group.items() if key not in NO_OPTIONS})
            self._record[f"number of parameters{of}"] = str(len(group["params"]))
        first = first_trained(self._engine)
        if not self._is_offloaded and first is not None and first.trained.params[0].grad is None:
            self._record["gradients at its step"] = "cleared"
        if self._sees_writes:
            # A wrapped step counts one more write of each parameter when it is over.
            counts = isinstance(optimizer, LocalStep) and not self._is_offloaded
            later = sum(len(group["params"]) for group in optimizer.param_groups) if counts else 0
            self._versions = self._count_writes(self._params) + later

    def gradients_are_clipped(self, max_norm: float, norm_type: float) -> None:
        self._monitor.busy("clips gradients")
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
        """What came since the last one becomes a record, and the mark of this one's reduces."""
        first = first_trained(self._engine)
        if first is None:
            return
        now = {STEPS: str(self._num_steps), **self._record}
        if not self._is_offloaded and first.trained.params[0].grad is not None:
            now["gradients"] = "not cleared before it (zero_grad)"
        self._chain = zlib.crc32(repr(now).encode(), self._chain)
        self._num += 1
        self._records.append((self._num, self._monitor.num_steps + (0 if self._num_steps else 1), now))
        self._record, self._num_steps = {}, 0
        if self._marks:
            for group in first.groups:
                group.remark(self._chain)
        else:
            self._monitor.say_steps(self._num, self._chain)

    # -- what differs

    def history(self) -> dict[str, Any]:
        """What this rank tells of its last backwards, and of what has come since."""
        now = (self._num + 1, self._monitor.num_steps, {STEPS: str(self._num_steps), **self._record})
        return {"records": [*self._records, now]}

    def compare(self, said: Mapping[int, Mapping[str, Any]]) -> str:
        """Which ranks step otherwise than the first, since when, and in what; empty where none does."""
        ranks = [rank for rank in sorted(said) if said[rank].get("records")]
        if len(ranks) < 2:
            return ""
        first = {num: (step, record) for num, step, record in said[ranks[0]]["records"]}
        begun, unlike = 0, []
        for rank in ranks[1:]:
            for num, step, record in said[rank]["records"]:
                if num not in first or first[num][1] == record:
                    continue
                theirs = first[num][1]
                keys = [key for key in {**theirs, **record} if theirs.get(key) != record.get(key)]
                keys = [
                    key for key in keys if (key in theirs) == (key in record)
                ] or keys  # options of no step say nothing
                each = [
                    f"{key} {record.get(key, NONE)} (rank {ranks[0]}: {theirs.get(key, NONE)})" for key in keys[:SHOWN]
                ]
                if record[STEPS] != "0" and OF_FORWARD.issuperset(keys):
                    step += 1  # that of the backward; the rest of its record is of the optimizer's step before it
                unlike.append(f"rank {rank} has {'; '.join(each)}")
                begun = min(begun or step, step)
                break
        if not unlike:
            return ""
        return (
            f"ranks step differently since step {begun}: {' / '.join(unlike)}; give every rank the same optimizer, options and "
            "number of steps, and let all write weights alike."
        )


NONE = "none"


def first_trained(engine: Engine) -> Unit | None:
    """The unit whose reduces bear the mark."""
    return next((unit for unit in engine.units if unit.trained.indices), None)


def told(value: Any) -> str:
    """An option of an optimizer as messages show it; no device is read. Of objects, whose text may name a place in memory of
    this process, the kind alone.
    """
    if isinstance(value, float):
        return f"{value:g}"
    if value is None or isinstance(value, (str, int)):
        return str(value)
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(told, value))})"
    if isinstance(value, Tensor) and value.device.type == "cpu" and value.numel() == 1:
        return told(value.item())
    return f"a {type(value).__name__}"
