"""The inputs of a deferred step: parameters with gradients and states, and a copy of the caller's optimizer."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from accordion import _torch
from accordion.errors import UsageError

HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
PROBE_NUMEL = 3  # rows of a probe; a state of this shape must have taken it from the parameter


@dataclass(frozen=True, slots=True)
class Entry:
    """A parameter to step, with its gradient and its entry of `optimizer.state`."""

    group: int  # index among the optimizer's param_groups
    param: Tensor  # as the optimizer has it, a DTensor if it is sharded
    local: Tensor  # its shard on this rank
    grad: Tensor  # of the shape and dtype of `local`
    state: dict[str, Any]


Part: TypeAlias = tuple[int, Tensor, Tensor, dict[str, Any]]
"""(index of the param group, parameter, plain tensor of its elements with their `grad`, state)."""


class OptimizerCopy:
    """A copy of `optimizer` with its hyperparameters at the time of the copy, whose `step` steps some of its parameters later.

    `kind`: the optimizer's class before wrapping. `after`: the values, except parameters and their states, that the optimizer
    has after a step: one dict per param group, one of states without a parameter, one of attributes. `after` is None for
    optimizers of torch, whose steps change no such values; for others, the constructor steps small tensors to learn it.
    """

    def __init__(self, optimizer: Optimizer, kind: type[Optimizer]) -> None:
        self.kind = kind
        is_torchs = kind.__module__.startswith("torch.optim")
        groups = optimizer.param_groups
        params = {} if is_torchs else {id(p): p for group in groups for p in group["params"]}
        shared = {key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)}
        attributes = {k: v for k, v in vars(optimizer).items() if k not in ("step", "state", "param_groups", *HOOKS)}
        memo = dict[int, Any](params) | {id(group["params"]): [] for group in groups if is_torchs}
        self._values = copied([*groups, shared, attributes], memo)
        # For a step on the host, hyperparameters on an accelerator are copied now; `_host_ready` is waited for at their use.
        self._for_host: Sequence[dict[str, Any]] = self._values
        self._host_ready: Any = None
        tensors = [v for each in self._values for v in each.values() if isinstance(v, Tensor)]
        on_device = [v for v in tensors if v.device.type != "cpu"]
        if on_device:
            self._for_host = [
                # a non-blocking copy from a device goes to pinned memory
                {k: v.to("cpu", non_blocking=True) if isinstance(v, Tensor) else v for k, v in each.items()}
                for each in self._values
            ]
            self._host_ready = torch.get_device_module(on_device[0].device).Event()
            self._host_ready.record()  # on the caller's stream, which makes the copies
        # Parameters that a step leaves out are replaced by an empty tensor without a gradient.
        self._absent = dict.fromkeys(params, torch.empty(0, device="cpu"))
        self._firsts = {i: group["params"][0] for i, group in enumerate(groups) if group["params"]}
        self.after: list[dict[str, Any]] | None = None
        if params:
            cpu = torch.device("cpu")
            small: list[Part] = [(i, p, _small(p.dtype, cpu, p.dim()), {}) for i, p in self._firsts.items()]
            self.after = self._extras(self._stepped(small), small)

    def step(self, todo: Sequence[Part]) -> dict[Tensor, dict[str, Any]]:
        """Step the tensors of `todo` in place. Return tensor -> its new state. Raises `UsageError` if the step leaves a value,
        such as a hyperparameter, that differs from `after`: such a value depends on which elements are stepped."""
        if not todo:
            return {}
        clone = self._stepped(todo)
        for values, after in zip(self._extras(clone, todo), self.after, strict=True) if self.after is not None else ():
            for key, value in values.items():
                if not _same(value, after.get(key)):
                    raise UsageError(
                        f"{self.kind.__name__} sets {key!r} by the elements that it steps, and with Offload these are a part of "
                        "them; leave out elementwise=True and Offload, or take an optimizer that treats each by itself."
                    )
        return {key: state for key, state in clone.state.items() if isinstance(key, Tensor)}

    def _stepped(self, todo: Sequence[Part]) -> Any:
        """Return a new optimizer that has stepped only the tensors of `todo`, in place; its `state` has their new states."""
        values = self._values
        if todo[0][2].device.type == "cpu":
            values = self._for_host
            if self._host_ready is not None:
                self._host_ready.synchronize()
        memo = self._absent | {id(p): tensor for _, p, tensor, _ in todo}
        *groups, shared, attributes = copied(values, dict[int, Any](memo))
        clone: Any = object.__new__(self.kind)
        vars(clone).update(attributes)
        for hooks in HOOKS:  # `defer` runs the caller's hooks, once
            vars(clone)[hooks] = OrderedDict()
        clone.state = defaultdict(dict, {**shared, **{tensor: state for _, _, tensor, state in todo if state}})
        for i, group in enumerate(groups):
            members = [tensor for at, _, tensor, _ in todo if at == i]
            group["params"][:] = members or group["params"][:1]
        clone.param_groups = groups
        clone.step()
        return clone

    def _extras(self, clone: Any, todo: Sequence[Part]) -> list[dict[str, Any]]:
        """Return the values of `clone`, a stepped copy, except parameters and their states: dicts in the order of `after`."""
        values = [{key: value for key, value in group.items() if key != "params"} for group in clone.param_groups]
        values.append({key: value for key, value in clone.state.items() if not isinstance(key, Tensor)})
        param_ids = {id(tensor) for _, _, tensor, _ in todo} | set(map(id, self._absent.values()))
        attributes = {k: v for k, v in vars(clone).items() if k not in ("state", "param_groups", *HOOKS)}
        return [*values, {k: v for k, v in attributes.items() if param_ids.isdisjoint(map(id, leaves(v)))}]

    def write_after(self, optimizer: Optimizer) -> None:
        """Write the values of `after` into `optimizer`, as a step of its own would. Do nothing if `after` is None."""
        targets: list[dict[Any, Any]] = [*optimizer.param_groups, optimizer.state, vars(optimizer)]
        for target, after in zip(targets, self.after, strict=True) if self.after is not None else ():
            for key, value in after.items():
                before = target.get(key)
                if isinstance(before, Tensor) and isinstance(value, Tensor) and before.shape == value.shape:
                    before.copy_(value)
                elif not _same(before, value):
                    target[key] = value

    def scalar(self, group: int, key: str, value: Any, local: Tensor) -> Any:
        """Return a copy of `value`, the state named `key` of a parameter, if it is a tensor, such as the step count; else
        `value`. A "step" is copied to the device of `local` if the param group with index `group` is fused or capturable."""
        if not isinstance(value, Tensor):
            return value
        options = self._values[group]
        counts = key == "step" and (options.get("fused") or options.get("capturable"))
        return value.to(local.device, copy=True) if counts else value.clone()

    def shaped_states(self, group: int, dtype: torch.dtype, device: torch.device) -> dict[str, torch.dtype]:
        """Return name -> dtype of the states that have the parameter's shape. To find them, step a small tensor of `dtype` on
        `device` with the options of the param group with index `group`."""
        probe = _small(dtype, device)
        state = self.step([(group, self._firsts[group], probe, {})]).get(probe, {})
        return {k: v.dtype for k, v in state.items() if isinstance(v, Tensor) and v.shape == probe.shape}


def copied(tree: Any, memo: dict[int, Any]) -> Any:
    """Return a copy of `tree`, nested lists, tuples, sets and dicts, and of the tensors in it. All other objects are shared.
    `memo`: id of an object -> its replacement in the copy; the ids of copied objects are added to it, as by `copy.deepcopy`."""
    if id(tree) in memo:
        return memo[id(tree)]
    result = tree
    if isinstance(tree, Tensor):
        result = tree.detach().clone()
    elif isinstance(tree, dict):
        result = copy.copy(tree)
        result.clear()
        memo[id(tree)] = result
        result.update({copied(key, memo): copied(value, memo) for key, value in tree.items()})
    elif type(tree) in (list, tuple, set):
        result = type(tree)(copied(item, memo) for item in tree)
    if result is not tree:
        memo[id(tree)] = result
    return result


def exchange(tree: Any, swap: Callable[[Tensor], Tensor]) -> Any:
    """Replace each tensor in `tree`, nested lists, dicts, tuples and sets, by `swap(tensor)`. Lists and dicts are changed in
    place. Return `tree`, or its replacement if it is a tensor, tuple or set."""
    if isinstance(tree, Tensor):
        return swap(tree)
    if isinstance(tree, list):
        tree[:] = [exchange(item, swap) for item in tree]
    elif isinstance(tree, dict):
        items = [(exchange(key, swap), exchange(value, swap)) for key, value in tree.items()]
        if any(a is not c or b is not d for (a, b), (c, d) in zip(tree.items(), items, strict=True)):
            tree.clear()
            tree.update(items)
    return type(tree)(exchange(item, swap) for item in tree) if type(tree) in (tuple, set) else tree


def leaves(tree: Any) -> Iterator[Any]:
    """Yield the items inside nested lists, tuples, sets and dicts (keys and values); `tree` itself if it is none of these."""
    if not isinstance(tree, (list, tuple, set, dict)):
        yield tree
        return
    for item in [*tree, *tree.values()] if isinstance(tree, dict) else tree:
        yield from leaves(item)


def has_elements(tree: Any, local: Tensor) -> bool:
    """Return True if the state `tree` is, or contains, a tensor of the shape of `local` that is not a scalar."""
    return any(isinstance(v, Tensor) and v.dim() > 0 and v.shape == local.shape for v in leaves(tree))


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and torch.equal(a.to(b.device), b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(value, b[key]) for key, value in a.items())
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    return a is b or bool(a == b)


def _small(dtype: torch.dtype, device: torch.device, num_dims: int = 1) -> Tensor:
    # A tensor of zeros with a gradient, to observe the effects of a step.
    small = torch.zeros([PROBE_NUMEL] * num_dims, dtype=dtype, device=device)
    small.grad = torch.zeros_like(small)
    return small


def step_entries(optimizer_copy: OptimizerCopy, entries: Sequence[Entry]) -> None:
    """Step the parameters of `entries` in place, and write their new states into `entry.state` by `write_back`."""
    for entry in entries:
        entry.local.grad = entry.grad
    try:
        states = optimizer_copy.step([(e.group, e.param, e.local, local_state(e.state)) for e in entries])
    finally:
        for entry in entries:
            entry.local.grad = None
    for entry in entries:
        write_back(entry.state, states.get(entry.local, {}), entry.param)


def local_state(state: dict[str, Any]) -> dict[str, Any]:
    """Return the states of one parameter, with the local tensor in place of each DTensor."""
    return {k: _torch.local_or_same(v) for k, v in state.items()}


def write_back(outer: dict[str, Any], inner: dict[str, Any], p: Tensor) -> None:
    """Write the states `inner` into `outer`, the states of `p`: as DTensors if `p` is one and they have its shard's shape, but
    0-d tensors always as they are."""
    for key, value in inner.items():
        current = outer.get(key)
        if current is value or (isinstance(current, DTensor) and _torch.local_of(current) is value):
            continue
        if isinstance(value, Tensor) and isinstance(p, DTensor) and value.dim() > 0:
            outer[key] = _torch.as_dtensor(value, p) if value.shape == _torch.local_of(p).shape else value
        else:
            outer[key] = value


def flat_of(tensor: Tensor, like: Tensor) -> Tensor:
    """Return the elements of `tensor`, (numel,), in the order of the dense `like`: a view if strides are equal, else a copy."""
    if tensor.stride() != like.stride():
        tensor = torch.empty_strided(like.shape, like.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,))
