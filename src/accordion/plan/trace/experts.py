"""Expert parallelism: find the experts of a model, and trace all-to-alls that send tokens to their ranks and results back."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from accordion.errors import UsageError
from accordion.sharding import MeshChoice

EXPERT_DATA_AXIS, EXPERTS_AXIS = "edp", "ep"  # axes: ranks with the same experts, neighbours that share all experts
ALL_AXES = "dp"  # the two axes flattened into one

Exchange = Callable[[Tensor], Tensor]
"""An all-to-all over the ranks that share experts: sends an equal number of rows to each rank and returns the received rows."""

ROUTED = 3  # least number of arguments of a forward of experts: tokens, (n, width); chosen experts and weights, (n, k)
EVENLY = (
    "experts over {} ranks: every expert is assumed to get equally many tokens, none dropped and none padded; the rank with the "
    "most tokens sets the pace of all, and its time and memory grow with its tokens"
)


def experts_in(model: nn.Module) -> Mapping[str, nn.Module]:
    """Return name -> module for the modules of `model` that hold experts. Such a module has an int `num_experts` of 2 or more,
    no parameters in submodules, and a forward with `ROUTED` arguments or more. Each of its parameters has size `num_experts` in
    dim 0, and at least one parameter has 3 dims or more."""
    return {name: module for name, module in model.named_modules() if _holds_experts(module)}


def _holds_experts(module: nn.Module) -> bool:
    count, parameters = getattr(module, "num_experts", None), list(module.parameters(recurse=False))
    if not isinstance(count, int) or count < 2 or not any(p.dim() > 2 for p in parameters):
        return False
    if any(p.shape[:1] != (count,) for p in parameters) or len(parameters) != len(list(module.parameters())):
        return False
    return len(inspect.signature(module.forward).parameters) >= ROUTED


def check_experts(model: nn.Module, name: str, ranks: int) -> None:
    """Raise `UsageError` if `model` has no experts, or if `ranks` does not divide the number of experts of one of its modules.
    `name`: name of the model in the message."""
    modules = experts_in(model)
    if not modules:
        raise UsageError(
            f"expert_parallel is {ranks}, and {name} has no experts that can be spread over ranks (modules with num_experts "
            "and one matrix for each expert in each parameter); leave expert_parallel out."
        )
    for path, module in modules.items():
        if module.num_experts % ranks:  # type: ignore[operator]
            raise UsageError(
                f"expert_parallel is {ranks}, which does not divide the {module.num_experts} experts of {path or name!r}; take "
                "a divisor."
            )


def spread_experts(model: nn.Module, mesh: DeviceMesh, exchange: Exchange) -> MeshChoice:
    """Shard the experts of `model` over the axis `EXPERTS_AXIS` of the 2-D `mesh`, and return the argument `meshes` of
    `accordion.shard`: name of each module with experts -> mesh of the ranks that have the same experts. Changes these modules:
    their parameters become DTensors, and their forward sends tokens to the ranks of the chosen experts with `exchange`."""
    modules, axis = experts_in(model), mesh[EXPERTS_AXIS]
    for module in modules.values():
        for name, p in list(module.named_parameters(recurse=False)):
            share = p.detach().chunk(axis.size())[axis.get_local_rank()].clone()
            whole = DTensor.from_local(share, axis, [Shard(0)], run_check=False, shape=p.shape, stride=p.stride())
            setattr(module, name, nn.Parameter(whole, requires_grad=p.requires_grad))
        module.forward = partial(_forward, module, axis.size(), exchange)
    return dict.fromkeys(modules, mesh[EXPERT_DATA_AXIS])


def _forward(module: Any, ranks: int, exchange: Exchange, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Forward of a `module` whose experts are sharded over `ranks` ranks. Send the tokens `hidden`, (n, width), to the ranks of
    their experts, run the module's own forward there, send the results back, and return their weighted sums, (n, width). Shapes
    are right, values are not. `chosen`, `weights`: indices of each token's k experts and their weights, (n, k)."""
    num, k = module.num_experts // ranks, chosen.shape[-1]
    by_expert = torch.argsort(chosen.flatten())
    rows, each = hidden[by_expert // k], weights.flatten()[by_expert].unsqueeze(-1)  # (n * k, width), (n * k, 1)
    exchange(torch.empty(module.num_experts, dtype=torch.int64, device=rows.device))  # number of rows for each expert
    received, each = _moved(rows, exchange), _moved(each, exchange)
    out = type(module).forward(_local_module(module, num), received, (by_expert % num).unsqueeze(-1), each)
    back = _moved(out, exchange)
    order = torch.empty_like(by_expert)
    order[by_expert] = torch.arange(by_expert.numel(), device=order.device)
    summed: Tensor = back[order].view(*chosen.shape, -1).sum(-2)
    return summed.to(hidden.dtype)


def _local_module(module: nn.Module, num_experts: int) -> nn.Module:
    """Return a shallow copy of `module` that has only the `num_experts` experts of this rank. In the copy, the local tensors of
    the module's parameters, which are DTensors, take the place of the parameters."""
    twin: Any = object.__new__(type(module))  # a module of a unit refuses `copy.copy`
    tensors = {name: getattr(module, name).to_local() for name, p in module._parameters.items() if p is not None}
    vars(twin).update({**vars(module), **tensors, "num_experts": num_experts})
    return twin  # type: ignore[no-any-return]


class _Moved(torch.autograd.Function):
    """Autograd function that returns `exchange(rows)`; the backward sends the gradient through `exchange` too."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange(rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.exchange(grads[0]), None


_moved: Callable[[Tensor, Exchange], Tensor] = _Moved.apply
