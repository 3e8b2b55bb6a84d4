"""What a step works on: parameters with their gradients and states, and a copy of the optimizer that the caller made."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from accordion import _torch
from accordion.errors import UsageError

HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
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


Part: TypeAlias = tuple[int, Tensor, Tensor, dict[str, Any]]
"""(index of the param group, parameter, plain tensor of its elements with their `grad`, state)."""


class OptimizerCopy:
    """The optimizer as it was when the caller asked for a step, to step parts of its parameters at other times.

    `after`: the groups, the states that belong to no parameter and the attributes, as a whole step leaves them; None for
    optimizers of torch, which leave them as they are.
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
        # For a step on the host: hyperparameters on an accelerator are on their way, and waited for when they are needed.
        self._for_host: Sequence[dict[str, Any]] = self._values
        self._arrived: Any = None
        on_device = [
            v for each in self._values for v in each.values() if isinstance(v, Tensor) and v.device.type != "cpu"
        ]
        if on_device:
            self._for_host = [
                # torch pins what comes from a device
                {k: v.to("cpu", non_blocking=True) if isinstance(v, Tensor) else v for k, v in each.items()}
                for each in self._values
            ]
            self._arrived = torch.get_device_module(on_device[0].device).Event()
            self._arrived.record()  # on the stream of the copies, the caller's
        # In place of parameters that a step leaves out: without a gradient.
        self._absent = dict.fromkeys(params, torch.empty(0, device="cpu"))
        self._firsts = {i: group["params"][0] for i, group in enumerate(groups) if group["params"]}
        self.after: list[dict[str, Any]] | None = None
        if params:
            small: list[Part] = [(i, p, _small(p.dtype, torch.device("cpu")), {}) for i, p in self._firsts.items()]
            self.after = self._left_by(self._stepped(small), small)

    def step(self, todo: Sequence[Part]) -> dict[Tensor, dict[str, Any]]:
        """Step some parameters; returns their states as the step leaves them.

        Raises `UsageError` if the step leaves anything else but `after`, since then it depends on which parameters these are.
        """
        if not todo:
            return {}
        clone = self._stepped(todo)
        for left, after in zip(self._left_by(clone, todo), self.after, strict=True) if self.after is not None else ():
            for key, value in left.items():
                if not _same(value, after.get(key)):
                    raise UsageError(
                        f"{self.kind.__name__} sets {key!r} by the elements that it steps, and with Offload these are a part of "
                        "them; leave out elementwise=True and Offload, or take an optimizer that treats each by itself."
                    )
        return {key: state for key, state in clone.state.items() if isinstance(key, Tensor)}

    def _stepped(self, todo: Sequence[Part]) -> Any:
        """A copy that holds the parameters of `todo` alone, after its step."""
        values = self._values
        if todo[0][2].device.type == "cpu":
            values = self._for_host
            if self._arrived is not None:
                self._arrived.synchronize()
        memo = self._absent | {id(p): tensor for _, p, tensor, _ in todo}
        *groups, shared, attributes = copied(values, dict[int, Any](memo))
        clone: Any = object.__new__(self.kind)
        vars(clone).update(attributes)
        for hooks in HOOKS:  # the caller's own, run once by `defer`
            vars(clone)[hooks] = OrderedDict()
        clone.state = defaultdict(dict, {**shared, **{tensor: state for _, _, tensor, state in todo if state}})
        for i, group in enumerate(groups):
            mine = [tensor for at, _, tensor, _ in todo if at == i]
            group["params"][:] = mine or group["params"][:1]
        clone.param_groups = groups
        clone.step()
        return clone

    def _left_by(self, clone: Any, todo: Sequence[Part]) -> list[dict[str, Any]]:
        """Return what a stepped copy holds besides its parameters and their states, in the form of `after`."""
        left = [{key: value for key, value in group.items() if key != "params"} for group in clone.param_groups]
        left.append({key: value for key, value in clone.state.items() if not isinstance(key, Tensor)})
        own = {id(tensor) for _, _, tensor, _ in todo} | set(map(id, self._absent.values()))
        attributes = {k: v for k, v in vars(clone).items() if k not in ("state", "param_groups", *HOOKS)}
        return [*left, {k: v for k, v in attributes.items() if not _holds(v, own)}]

    def write_after(self, optimizer: Optimizer) -> None:
        """Give `optimizer` what a step changes besides parameters and their states."""
        targets: list[dict[Any, Any]] = [*optimizer.param_groups, optimizer.state, vars(optimizer)]
        for target, after in zip(targets, self.after, strict=True) if self.after is not None else ():
            for key, value in after.items():
                before = target.get(key)
                if isinstance(before, Tensor) and isinstance(value, Tensor) and before.shape == value.shape:
                    before.copy_(value)
                elif not _same(before, value):
                    target[key] = value

    def scalar(self, group: int, key: str, value: Any, own: Tensor) -> Any:
        """A state that has not the parameter's shape, for one chunk of it: a copy, where the kernel wants it."""
        if not isinstance(value, Tensor):
            return value
        options = self._values[group]
        counts = key == "step" and (options.get("fused") or options.get("capturable"))
        return value.to(own.device, copy=True) if counts else value.clone()

    def shaped_states(self, group: int, dtype: torch.dtype, device: torch.device) -> dict[str, torch.dtype]:
        """Names and dtypes of the states that have an element for each of a parameter's, found by stepping a small one.

        `device`: where the optimizer will step.
        """
        probe = _small(dtype, device)
        state = self.step([(group, self._firsts[group], probe, {})]).get(probe, {})
        return {k: v.dtype for k, v in state.items() if isinstance(v, Tensor) and v.shape == probe.shape}


def copied(tree: Any, memo: dict[int, Any]) -> Any:
    """Copy nested lists, tuples, sets and dicts with their tensors, as `copy.deepcopy(tree, memo)`; share other objects."""
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
    """Put `swap(tensor)` in place of each tensor in nested lists and dicts; returns what is in the place of `tree` then."""
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


def _holds(tree: Any, ids: set[int]) -> bool:
    items = [*tree, *tree.values()] if isinstance(tree, dict) else tree if type(tree) in (list, tuple, set) else ()
    return id(tree) in ids or any(_holds(item, ids) for item in items)


def has_elements(tree: Any, own: Tensor) -> bool:
    """Return True if a state has an element for each of `own`, directly or inside of lists and dicts."""
    if isinstance(tree, Tensor):
        return tree.dim() > 0 and tree.shape == own.shape
    items = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (list, tuple)) else ()
    return any(has_elements(item, own) for item in items)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and torch.equal(a.to(b.device), b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(value, b[key]) for key, value in a.items())
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    return a is b or bool(a == b)


def _small(dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor to step in order to see what a step does."""
    small = torch.zeros(PROBE_NUMEL, dtype=dtype, device=device)
    small.grad = torch.zeros_like(small)
    return small


def step_here(optimizer_copy: OptimizerCopy, entries: Sequence[Entry]) -> None:
    """Step parameters whose state is at hand, and leave what the step made of it in `state`, with DTensors in it."""
    for entry in entries:
        entry.own.grad = entry.grad
    try:
        states = optimizer_copy.step([(e.group, e.param, e.own, local_state(e.state)) for e in entries])
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
