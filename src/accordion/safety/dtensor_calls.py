"""Correct or refuse DTensor operators that are silently wrong on tensors of sharded models: on parameters, views of these, and
tensors on the mesh of a sharded model, such as gradients. DTensor has one table of operator handlers for the process; for every
other tensor, the handlers here call torch's own implementation."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from accordion import _torch
from accordion.engine.engine import Engine
from accordion.engine.params import Param
from accordion.errors import UsageError
from accordion.row_marks import refuse_rows_of_others

aten = torch.ops.aten

DRAWS_INTO = (aten.normal_.default, aten.uniform_.default, aten.bernoulli_.float)
DRAWS_LIKE = (aten.rand_like.default, aten.randn_like.default, aten.randint_like.default, aten.randint_like.low_dtype)
WRITES = (
    *(aten.zero_.default, aten.fill_.Scalar, aten.fill_.Tensor, aten.copy_.default),
    *(aten.add_.Tensor, aten.sub_.Tensor, aten.mul_.Tensor, aten.div_.Tensor, aten.lerp_.Scalar, aten.lerp_.Tensor),
    *(aten.clamp_.default, aten.clamp_.Tensor, aten.clamp_min_.default, aten.clamp_max_.default),
    *(aten.index_put_.default, aten.index_fill_.int_Scalar, aten.index_fill_.int_Tensor),
)
NUMBER, ANY_TRUE = aten._local_scalar_dense.default, aten._is_any_true.default
VIEW, TANGENT = aten.view.default, aten._has_same_storage_numel.default
# Attribute of a shard's storage that refers to the parameter; `p.data` and views of it have the same storage.
OWNER = "_accordion_owner"
INSTEAD = "write under full_params(model, write=True), where it is an ordinary tensor"

# Meshes of sharded models. The result of an operator may have an equal mesh that is another object; a set finds it too.
_meshes: weakref.WeakSet[DeviceMesh] = weakref.WeakSet()


def answer_for_shards(engine: Engine) -> None:
    """Register the operator handlers of this module in the process. From then on they act on `engine`'s parameters and on
    DTensors on their meshes. An operator for which other code has registered a handler keeps it."""
    for param in [param for unit in engine.units for param in unit.params]:
        vars(_torch.local_of(param.sharded).untyped_storage())[OWNER] = weakref.ref(param)
        if isinstance(param.sharded, DTensor):
            _meshes.add(param.sharded.device_mesh)
    answers = {NUMBER: _number, VIEW: _view}
    answers |= dict.fromkeys((*DRAWS_INTO, *DRAWS_LIKE), _draw) | dict.fromkeys(WRITES, _write)
    for operator, answer in ((ANY_TRUE, _any_true), (TANGENT, _refuse_tangent)):
        if not _torch.has_rule(operator):  # torch 2.11 to 2.13 have none
            answers[operator] = answer
    for operator, answer in answers.items():
        _torch.answer_operator(operator, answer)


def _is_on_our_mesh(tensor: Any) -> bool:
    return isinstance(tensor, DTensor) and tensor.device_mesh in _meshes


def _param_of(tensor: Any) -> Param | None:
    """Return the sharded parameter that `tensor` is, or is a view of; None for all other tensors."""
    for each in (tensor, _torch.base_of(tensor)):
        if isinstance(each, DTensor):
            owner = vars(_torch.local_of(each).untyped_storage()).get(OWNER)
            param: Param | None = None if owner is None else owner()
            if param is not None:
                return param
    return None


def _draw(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `operator`, which draws random numbers. Return the tensor `args[0]` itself if `operator` writes into it
    (`DRAWS_INTO`), otherwise a new DTensor like it.

    For a parameter on a CPU, torch would draw equal rows on all ranks. So the numbers of the whole tensor are drawn, which
    needs memory for them, and this rank's rows are kept. On accelerators, and for tensors that are no parameters, torch's
    implementation is called. Raises `UsageError` if this version of torch would divide the numbers in another way, or if
    `operator` writes into a view of a parameter that was gathered into new memory, such as `weight[0]`.
    """
    tensor = args[0]
    param = _param_of(tensor)
    if param is None:
        return _torch.unanswered(operator, args, kwargs)
    local, to = _torch.local_of(tensor), kwargs.get("device")
    if operator in DRAWS_INTO:
        _begin_write(tensor, param)
    is_on_cpu = type(local) is Tensor and local.device.type == "cpu" and to in (None, torch.device("cpu"))
    if not is_on_cpu or any(p.is_partial() for p in tensor.placements):
        return _torch.unanswered(operator, args, kwargs)
    whole = operator(torch.empty(tensor.shape, dtype=local.dtype, device=local.device), *args[1:], **kwargs)
    drawn = distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None)
    rows = _torch.local_of(drawn)
    if rows.shape != local.shape:
        raise UsageError(
            f"random numbers for a tensor of shape {tuple(tensor.shape)} at {tensor.placements} would have other rows than the "
            f"tensor on this version of torch; use accordion.initialise, or {INSTEAD}."
        )
    if operator not in DRAWS_INTO:
        return drawn
    local.copy_(rows)
    return tensor


def _write(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an in-place operator on `args[0]`, and return its result. A write into a view of a parameter counts as a write of the
    parameter. Raises `UsageError` for a view of a parameter that was gathered into new memory, such as `weight[0]`, and if the
    operator copies rows of other ranks into a parameter."""
    tensor, param = args[0], _param_of(args[0])
    if param is not None:
        _begin_write(tensor, param)
        if operator is aten.copy_.default:
            refuse_rows_of_others([(args[1], tensor)], "a tensor")
    return _torch.unanswered(operator, args, kwargs)


def _begin_write(tensor: Tensor, param: Param) -> None:
    """Prepare a write into `tensor`, which is `param` or a view of it: if it is another object than the parameter, such as
    `param.data`, increment the parameter's version counter. Raises `UsageError` for a view that was gathered into new memory."""
    base, storage = _torch.base_of(tensor), _torch.local_of(tensor).untyped_storage()
    if isinstance(base, DTensor) and _torch.local_of(base).untyped_storage() is not storage:
        raise UsageError(
            f"a part of a sharded tensor of shape {tuple(base.shape)} at {base.placements} was written, as in w[i].zero_(), and "
            f"the change would not reach the shards; {INSTEAD}."
        )
    # Full parameters that stay in memory are out of date from now on.
    if param.sharded is not tensor:
        torch.autograd.graph.increment_version(param.sharded)


def _refuse_tangent(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not any(map(_is_on_our_mesh, args)):
        return _torch.unanswered(operator, args, kwargs)
    raise UsageError(
        "a sharded tensor got a tangent (by torch.func.jvp or forward_ad.make_dual), which DTensor does not support; use "
        "tangents of the inputs only, or the unsharded model."
    )


def _view(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return a view of the tensor `args[0]` in another shape. If that fails because the rows of a tensor on the mesh of a sharded
    model do not divide by the ranks, as for `weight.flatten()`, raises `UsageError` in place of torch's error."""
    try:
        return _torch.unanswered(operator, args, kwargs)
    except RuntimeError as error:
        tensor: DTensor = args[0]
        axes = zip(tensor.placements, tensor.device_mesh.shape, strict=True)
        uneven = any(isinstance(p, (Shard, _torch.StridedShard)) and tensor.shape[p.dim] % n for p, n in axes)
        if not uneven or not _is_on_our_mesh(tensor):
            raise
        # Raises torch's own error if the shape does not fit.
        operator(torch.empty(tensor.shape, device="meta"), *args[1:], **kwargs)
        raise UsageError(
            f"a sharded tensor of shape {tuple(tensor.shape)} at {tensor.placements} was asked for shape {tuple(args[1])}, as "
            "flatten() and parameters_to_vector do, and its rows do not divide by the ranks; flatten its full_tensor(), or do "
            "this under full_params(model), with write=True for vector_to_parameters."
        ) from error


def _number(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Implement `item`, `float`, `int` and `bool` of a tensor of one element. On the mesh of a sharded model, the number is
    reduced over ranks (a collective) unless it is replicated. torch would return this rank's part, such as a partial sum."""
    tensor: DTensor = args[0]
    if not _is_on_our_mesh(tensor):
        return _torch.unanswered(operator, args, kwargs)
    local = _torch.local_of(tensor)
    if all(p.is_replicate() for p in tensor.placements):
        return operator(local, *args[1:], **kwargs)
    if tensor.numel() != 1:
        return operator(torch.empty(tensor.shape, device="meta"))  # raises torch's own error
    part = local.int() if local.dtype is torch.bool else local  # gloo sums no bool
    whole = DTensor.from_local(
        part, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
    return operator(whole.full_tensor().to(local.dtype), *args[1:], **kwargs)


def _any_true(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return a 0-d bool tensor: True if any element of `args[0]`, on the mesh of a sharded model, is true on this rank. Not a
    collective, since anomaly detection calls this for `isnan(gradient)` at points that other ranks may not reach."""
    return operator(_torch.local_of(args[0])) if _is_on_our_mesh(args[0]) else _torch.unanswered(operator, args, kwargs)
