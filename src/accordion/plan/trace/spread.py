"""Experts over some of the ranks, in a trace: each rank has some of them, tokens go there by an all-to-all, and come back."""

from __future__ import annotations

import copy
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

EXPERT_DATA_AXIS, EXPERTS_AXIS = "edp", "ep"  # of the mesh, the second of neighbours
ALL_AXES = "dp"  # both as one
COUNT_BYTES = 8  # of an expert, how many tokens come to it

Tell = Callable[[int], None]  # bytes of a message that every rank cuts among all


def spread_experts(model: nn.Module, mesh: DeviceMesh, tracker: Tracker) -> dict[str, DeviceMesh]:
    """Leave each rank its experts, as the guide has it, and have tokens sent to them. `mesh`: of both axes.

    Gives what `shard` takes as `meshes`.
    """
    found = experts_in(model)
    axis = mesh[EXPERTS_AXIS]
    for module in found.values():
        for name, p in list(module.named_parameters(recurse=False)):
            own = p.detach()[: p.shape[0] // axis.size()]
            whole = DTensor.from_local(own, axis, [Shard(0)], run_check=False, shape=p.shape, stride=p.stride())
            setattr(module, name, nn.Parameter(whole, requires_grad=p.requires_grad))
        module.forward = partial(_forward, module, axis.size(), partial(_tell, tracker))
    return {name: mesh[EXPERT_DATA_AXIS] for name in found}


def _tell(tracker: Tracker, num_bytes: int) -> None:
    tracker.collective(ALL_TO_ALL, num_bytes, EXPERTS)


def _forward(module: Any, ranks: int, tell: Tell, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """`hidden`: (n, width); `chosen`, `weights`: (n, k). As many tokens come as go: experts are chosen evenly."""
    k = chosen.shape[-1]
    by_expert = torch.argsort(chosen.flatten())
    rows, each = hidden[by_expert // k], weights.flatten()[by_expert].unsqueeze(-1)  # (n * k, width), (n * k, 1)
    tell(COUNT_BYTES * module.num_experts)
    come, each = _AllToAll.apply(rows, tell), _AllToAll.apply(each, tell)  # type: ignore[no-untyped-call]
    out = type(module).forward(_own(module, ranks), come, by_expert.unsqueeze(-1), each)
    back = _AllToAll.apply(out, tell)  # type: ignore[no-untyped-call]
    order = torch.empty_like(by_expert)
    order[by_expert] = torch.arange(by_expert.numel(), device=order.device)
    return back[order].view(*chosen.shape, -1).sum(-2).to(hidden.dtype)


def _own(module: nn.Module, ranks: int) -> nn.Module:
    """The module as a rank computes with it: with its own experts, plain tensors where the engine puts full parameters."""
    twin: Any = copy.copy(module)
    vars(twin).update({name: getattr(module, name).to_local() for name in module._parameters})
    twin.num_experts = module.num_experts // ranks
    return twin  # type: ignore[no-any-return]


class _AllToAll(torch.autograd.Function):
    """Rows to the ranks of their experts; gradients go the way back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, tell: Tell) -> Tensor:
        ctx.tell = tell
        tell(rows.nbytes)
        return torch.empty_like(rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.tell(grads[0].nbytes)
        return torch.empty_like(grads[0]), None
