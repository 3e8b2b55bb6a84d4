"""Experts over some of the ranks, in a trace: each rank has some of them, tokens go there by an all-to-all, and come back."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from accordion.plan.events import ALL_TO_ALL, EXPERTS
from accordion.plan.experts import experts_in
from accordion.plan.trace.tracker import Tracker
from accordion.sharding import MeshChoice

EXPERT_DATA_AXIS, EXPERTS_AXIS = "edp", "ep"  # of the mesh, the second of neighbours
ALL_AXES = "dp"  # both as one

Exchange = Callable[[Tensor], Tensor]
"""An all-to-all over the ranks that share experts: rows, as many to each, and as many come."""


def spread_experts(model: nn.Module, mesh: DeviceMesh, exchange: Exchange) -> MeshChoice:
    """Leave each rank its experts, as the guide has it, and have tokens sent to them. `mesh`: of both axes.

    Gives what `shard` takes as `meshes`.
    """
    found, axis = experts_in(model), mesh[EXPERTS_AXIS]
    for module in found.values():
        for name, p in list(module.named_parameters(recurse=False)):
            own = p.detach().chunk(axis.size())[axis.get_local_rank()].clone()
            whole = DTensor.from_local(own, axis, [Shard(0)], run_check=False, shape=p.shape, stride=p.stride())
            setattr(module, name, nn.Parameter(whole, requires_grad=p.requires_grad))
        module.forward = partial(_forward, module, axis.size(), exchange)
    return dict.fromkeys(found, mesh[EXPERT_DATA_AXIS])


def silent_exchange(tracker: Tracker) -> Exchange:
    """One that says nothing, and writes down what it would have said."""

    def exchange(rows: Tensor) -> Tensor:
        tracker.collective(ALL_TO_ALL, rows.nbytes, EXPERTS)
        return torch.empty_like(rows)

    return exchange


def _forward(module: Any, ranks: int, exchange: Exchange, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """`hidden`: (n, width); `chosen`, `weights`: (n, k). As many tokens come as go, and they are dealt out to the experts."""
    num, k = module.num_experts // ranks, chosen.shape[-1]
    by_expert = torch.argsort(chosen.flatten())
    rows, each = hidden[by_expert // k], weights.flatten()[by_expert].unsqueeze(-1)  # (n * k, width), (n * k, 1)
    exchange(torch.empty(module.num_experts, dtype=torch.int64, device=rows.device))  # how many come to each
    come, each = _moved(rows, exchange), _moved(each, exchange)
    out = type(module).forward(_own(module, num), come, (by_expert % num).unsqueeze(-1), each)
    back = _moved(out, exchange)
    order = torch.empty_like(by_expert)
    order[by_expert] = torch.arange(by_expert.numel(), device=order.device)
    summed: Tensor = back[order].view(*chosen.shape, -1).sum(-2)
    return summed.to(hidden.dtype)


def _own(module: nn.Module, num_experts: int) -> nn.Module:
    """The module as a rank computes with it: with its own experts, plain tensors where the engine puts full parameters."""
    twin: Any = object.__new__(type(module))  # a module of a unit refuses `copy.copy`
    own = {name: getattr(module, name).to_local() for name, p in module._parameters.items() if p is not None}
    vars(twin).update({**vars(module), **own, "num_experts": num_experts})
    return twin  # type: ignore[no-any-return]


def _moved(rows: Tensor, exchange: Exchange) -> Tensor:
    """Return rows of other ranks in place of `rows`; their gradients go back the same way."""
    moved: Tensor = _Moved.apply(rows, exchange)  # type: ignore[no-untyped-call]
    return moved


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange(rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.exchange(grads[0]), None
