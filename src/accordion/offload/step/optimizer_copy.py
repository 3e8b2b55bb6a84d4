"""What a step works on: parameters with their gradients and states, and a copy of the optimizer that the caller made."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from accordion import _torch

SCALER_ATTRIBUTES = ("grad_scale", "found_inf")  # set by `torch.amp.GradScaler` for the time of a fused step
PROBE_NUMEL = 3  # no state is of this shape unless it follows the parameter's


@dataclass(frozen=True, slots=True)
class Entry:
    """A parameter with a gradient: `own` is its local tensor, `grad` what it is stepped with, `state` the optimizer's of it."""

    group: int  # index among the optimizer's param_groups
    param: Tensor
    own: Tensor
    grad: Tensor
    state: dict[str, Any]


class OptimizerCopy:
    """What a step does to any parameters, as it was when the caller asked for it: hyperparameters change afterwards."""

    def __init__(self, optimizer: Optimizer, kind: type[Optimizer]) -> None:
        self.kind = kind
        self._options = [
            {key: _frozen(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups
        ]
        self._attributes = {
            key: _frozen(value) if key in SCALER_ATTRIBUTES else value
            for key, value in vars(optimizer).items()
            if key not in ("step", "state", "param_groups")
        }
        self._for_host = OnHost([*self._options, self._attributes])

    def step(self, todo: Sequence[tuple[int, Tensor, dict[str, Any]]]) -> dict[Tensor, dict[str, Any]]:
        """Step (index of the param group, plain tensor with its `grad`, state) each; gives the states as they are then."""
        clone: Any = object.__new__(self.kind)
        is_on_host = bool(todo) and todo[0][1].device.type == "cpu"
        *all_options, attributes = self._for_host.values() if is_on_host else [*self._options, self._attributes]
        vars(clone).update(attributes)
        for hooks in (
            "_optimizer_step_pre_hooks",
            "_optimizer_step_post_hooks",
        ):  # the caller's own, run once by `defer`
            vars(clone)[hooks] = OrderedDict()
        clone.state = defaultdict(dict, {tensor: state for _, tensor, state in todo if state})
        clone.param_groups = []
        for i, options in enumerate(all_options):
            mine = [tensor for at, tensor, _ in todo if at == i]
            if mine:
                clone.param_groups.append({**options, "params": mine})
        if clone.param_groups:
            clone.step()
        return dict(clone.state)

    def scalar(self, group: int, key: str, value: Any, own: Tensor) -> Any:
        """A state that has not the parameter's shape, for one chunk of it: a copy, where the kernel wants it."""
        if not isinstance(value, Tensor):
            return value
        options = self._options[group]
        counts = key == "step" and (options.get("fused") or options.get("capturable"))
        return value.to(own.device, copy=True) if counts else value.clone()

    def shaped_states(self, group: int, dtype: torch.dtype, device: torch.device) -> dict[str, torch.dtype]:
        """Names and dtypes of the states that have an element for each of a parameter's, found by stepping a small one.

        `device`: where the optimizer will step.
        """
        probe = torch.zeros(PROBE_NUMEL, dtype=dtype, device=device)
        probe.grad = torch.zeros_like(probe)
        made = self.step([(group, probe, {})]).get(probe, {})
        return {k: v.dtype for k, v in made.items() if isinstance(v, Tensor) and v.shape == probe.shape}


class OnHost:
    """Hyperparameters for a step on the host: those on an accelerator are on their way, and waited for when they are needed."""

    def __init__(self, given: Sequence[dict[str, Any]]) -> None:
        on_device = [v for one in given for v in one.values() if isinstance(v, Tensor) and v.device.type != "cpu"]
        self._values: Sequence[dict[str, Any]] = given
        self._arrived: Any = None
        if on_device:
            self._values = [{key: _on_host(value) for key, value in one.items()} for one in given]
            self._arrived = torch.get_device_module(on_device[0].device).Event()
            self._arrived.record()  # on the stream of the copies, the caller's

    def values(self) -> Sequence[dict[str, Any]]:
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._values


def _on_host(value: Any) -> Any:
    return value.to("cpu", non_blocking=True) if isinstance(value, Tensor) else value  # pinned by torch, from a device


def _frozen(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def step_here(optimizer_copy: OptimizerCopy, entries: Sequence[Entry]) -> None:
    """Step parameters whose state is at hand, and leave what the step made of it in `state`, with DTensors in it."""
    for entry in entries:
        entry.own.grad = entry.grad
    try:
        states = optimizer_copy.step([(e.group, e.own, local_state(e.state)) for e in entries])
    finally:
        for entry in entries:
            entry.own.grad = None
    for entry in entries:
        write_back(entry.state, states.get(entry.own, {}), entry.param, entry.own)


def local_state(entry: dict[str, Any]) -> dict[str, Any]:
    return {k: _torch.local_of(v) if isinstance(v, DTensor) else v for k, v in entry.items()}


def write_back(outer: dict[str, Any], inner: dict[str, Any], p: Tensor, own: Tensor) -> None:
    """Take over what the step made or replaced; a tensor of the shard's shape becomes a DTensor beside its parameter."""
    for key, value in inner.items():
        held = outer.get(key)
        if held is value or (isinstance(held, DTensor) and _torch.local_of(held) is value):
            continue
        is_shard = isinstance(value, Tensor) and isinstance(p, DTensor) and own.dim() > 0 and value.shape == own.shape
        outer[key] = _torch.as_dtensor(value, p) if is_shard and isinstance(p, DTensor) else value


def local_of(tensor: Tensor) -> Tensor:
    return _torch.local_of(tensor) if isinstance(tensor, DTensor) else tensor


def flat_of(tensor: Tensor, like: Tensor) -> Tensor:
    """(numel,): the elements in the order in which those of `like` lie in memory, which has no gaps; shared where possible."""
    if tensor.stride() != like.stride():
        tensor = torch.empty_strided(like.shape, like.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,))
