"""Replace a model's parameters by sharded ones, and detect uses of the old ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from accordion import _torch
from accordion.errors import UsageError
from accordion.offload.step.optimizer_copy import exchange
from accordion.row_marks import params_of
from accordion.units import Owned


def replace(o: Owned, local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> nn.Parameter:
    """Replace parameter `o`, in all modules that read it, by a DTensor of this rank's rows `local`, and return the DTensor,
    which takes over Python attributes, gradient hooks and `grad_dtype`. The old parameters lose their data, and their class
    becomes `ReplacedParameter`; tensor subclasses keep both."""
    shape = o.original.shape
    stride = torch.empty(shape, device="meta").stride()
    # With a local tensor on the meta device, because others are moved to the mesh's device, and rows may be on the host.
    rows = DTensor.from_local(local.to("meta"), mesh, placements, run_check=False, shape=shape, stride=stride)
    sharded = nn.Parameter(_torch.as_dtensor(local, rows), requires_grad=o.original.requires_grad)
    for original in (*reversed(o.others), o.original):
        vars(sharded).update(_torch.marks_of(original))
    _torch.keep_grad_dtype(o.original, sharded)
    _torch.hand_over_hooks(o.original, sharded)
    for ref, attr in o.places:
        module = ref()
        assert module is not None
        module._parameters[attr] = sharded
    for original in (o.original, *o.others):
        if type(original.data) is torch.Tensor:
            original.data = original.data.new_empty(0)
            original.__class__ = ReplacedParameter
        vars(original)["moved_to"] = sharded
    return sharded


def replace_by_subclass(
    o: Owned, rows: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]
) -> nn.Parameter:
    """Replace parameter `o`, a tensor subclass, as `replace` does, and return the DTensor. `rows`: its local tensor, this
    rank's rows, of the same subclass."""
    sharded = replace(o, torch.empty(rows.shape, dtype=rows.dtype, device=rows.device), mesh, placements)
    _torch.set_local(sharded, rows)
    return sharded


class ReplacedParameter(nn.Parameter):
    """Class of the old parameters that `shard` has replaced. A read of `.grad` raises `UsageError`, so that an optimizer that
    still has such a parameter fails at its first step or zero_grad. `moved_to`: the sharded parameter."""

    moved_to: nn.Parameter

    @property
    def grad(self) -> NoReturn:  # type: ignore[override]
        raise UsageError(
            "this optimizer was made before shard(), so its parameters are not the model's any more; "
            "make the optimizer from model.parameters() after shard()."
        )


def follow_moved(optimizer: torch.optim.Optimizer) -> None:
    """Make an optimizer that was made before `shard` step the sharded parameters: replace the old ones by them, in place, in
    all attributes of the optimizer, and their states by this rank's rows. Tied parameters become one."""
    moved = {id(p): vars(p)["moved_to"] for p in params_of(optimizer) if "moved_to" in vars(p)}
    states = {p: state for p, state in optimizer.state.items() if id(p) in moved}
    for p, state in states.items():
        sharded = moved[id(p)]
        optimizer.state.pop(p)
        optimizer.state.setdefault(sharded, {key: _rows_of(value, sharded) for key, value in state.items()})
    for name, value in vars(optimizer).items():  # its groups, and other lists of parameters
        vars(optimizer)[name] = exchange(value, lambda tensor: moved.get(id(tensor), tensor))
    for group in optimizer.param_groups:
        group["params"][:] = {id(p): p for p in group["params"]}.values()  # tied parameters have become one


def _rows_of(value: Any, sharded: torch.Tensor) -> Any:
    """Return the optimizer state `value` of the parameter `sharded`. A tensor of the parameter's shape, whole on every rank, is
    returned as a DTensor with a copy of this rank's rows; any other value unchanged."""
    if not (isinstance(value, torch.Tensor) and value.dim() and value.shape == sharded.shape):
        return value
    assert isinstance(sharded, DTensor), "shard replaces parameters by DTensors"
    rows = distribute_tensor(value, sharded.device_mesh, sharded.placements, src_data_rank=None)
    local = torch.empty_like(_torch.local_of(sharded), dtype=value.dtype)
    return _torch.as_dtensor(local.copy_(_torch.local_of(rows)), sharded)
