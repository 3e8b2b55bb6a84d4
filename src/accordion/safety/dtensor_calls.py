"""What torch's DTensor gets wrong in silence on sharded parameters, or says obscurely: put right, or refused in a sentence.

From the first `shard` on torch asks here, for every DTensor of the process; where it was right, it still answers itself.
"""

from __future__ import annotations

import logging
import threading
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from accordion import _torch
from accordion.engine.engine import Engine
from accordion.errors import UsageError
from accordion.row_marks import refuse_rows_of_others

log = logging.getLogger("accordion")
aten = torch.ops.aten

WAIT_S = 10.0  # so long may ranks be apart before one says what it waits for

DRAWS_INTO = (aten.normal_.default, aten.uniform_.default, aten.bernoulli_.float)
DRAWS_LIKE = (aten.rand_like.default, aten.randn_like.default, aten.randint_like.default, aten.randint_like.low_dtype)
WRITES = (
    *(aten.zero_.default, aten.fill_.Scalar, aten.copy_.default),
    *(aten.add_.Tensor, aten.sub_.Tensor, aten.mul_.Tensor, aten.div_.Tensor, aten.lerp_.Scalar, aten.lerp_.Tensor),
    *(aten.clamp_.default, aten.clamp_.Tensor, aten.clamp_min_.default, aten.clamp_max_.default),
)
WRITES_AT = (aten.index_put_.default, aten.index_fill_.int_Scalar, aten.index_fill_.int_Tensor)
OWNER = "_accordion_owner"  # the attribute by which the storage of a shard leads to its parameter
INSTEAD = "write under full_params(model, write=True), where it is an ordinary tensor"


def answer_for_dtensors(engine: Engine) -> None:
    """Answer once a process, for every DTensor, and count writes through `.data` as writes to the parameters of `engine`."""
    for param in [param for unit in engine.units for param in unit.params]:
        vars(_torch.local_of(param.sharded).untyped_storage())[OWNER] = weakref.ref(param)
    _torch.answer_operator(aten._local_scalar_dense.default, _number)
    for operator in (*DRAWS_INTO, *DRAWS_LIKE):
        _torch.answer_operator(operator, _draw)
    for operator in WRITES:
        _torch.answer_operator(operator, _write)
    for operator in WRITES_AT:
        _torch.answer_operator(operator, _write_at)
    _torch.answer_operator(aten.view.default, _view)
    for operator, answer in ((aten.fill_.Tensor, _refuse_fill), (aten._has_same_storage_numel.default, _refuse_dual)):
        if not _torch.has_rule(operator):
            _torch.answer_operator(operator, answer)


# -- `.item()`, float(), bool(), int()


def _number(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The number of the whole tensor, where torch gives that of this rank's part: `grad.norm().item()` is a sum still to come."""
    tensor: DTensor = args[0]
    local = _torch.local_of(tensor)
    if all(p.is_replicate() for p in tensor.placements):
        return operator(local, *args[1:], **kwargs)
    if tensor.numel() != 1:
        return operator(torch.empty(tensor.shape, device="meta"))  # torch's own words
    part = local.int() if local.dtype is torch.bool else local  # gloo sums no bool
    whole = DTensor.from_local(
        part, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
    waits = threading.Timer(WAIT_S, _say_who_is_waited_for)
    waits.daemon = True
    waits.start()
    try:
        return operator(whole.full_tensor().to(local.dtype), *args[1:], **kwargs)
    finally:
        waits.cancel()


def _say_who_is_waited_for() -> None:
    log.warning(
        "this rank was asked for the number in a DTensor, by .item(), float() or bool(), and waits for the other ranks' parts: "
        "ask on every rank, or for this rank's part alone with .to_local()."
    )


# -- random numbers


def _draw(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The rows of this rank of what one device would draw; torch has every rank of a CPU draw the same for its own rows.

    Takes memory for the whole tensor meanwhile. On accelerators torch gives each rank numbers of its own.
    """
    tensor: DTensor = args[0]
    local, to = _torch.local_of(tensor), kwargs.get("device")
    if operator in DRAWS_INTO:
        _begin_write(tensor)
    is_here = type(local) is Tensor and local.device.type == "cpu" and to in (None, torch.device("cpu"))
    if not is_here or any(p.is_partial() for p in tensor.placements):
        return _torch.unanswered(operator, args, kwargs)
    whole = operator(torch.empty(tensor.shape, dtype=local.dtype, device=local.device), *args[1:], **kwargs)
    drawn = distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None)
    rows = _torch.local_of(drawn)
    if rows.shape != local.shape:
        raise UsageError(
            f"random numbers for a tensor of shape {tuple(tensor.shape)} at {tensor.placements} lie otherwise on this version of "
            f"torch than its rows do; use accordion.initialise, or {INSTEAD}."
        )
    if operator not in DRAWS_INTO:
        return drawn
    local.copy_(rows)
    return tensor


# -- writes


def _write(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    _begin_write(args[0])
    base = _torch.base_of(args[0])
    if operator is aten.copy_.default:
        refuse_rows_of_others([(args[1], args[0])], "a tensor")
    if base is not None and operator is aten.copy_.default and not isinstance(args[1], DTensor):
        raise _part_written(
            base
        )  # on some accelerators `weight[:, i] = 0` is a copy, which torch refuses in other words
    return _torch.unanswered(operator, args, kwargs)


def _begin_write(tensor: Tensor) -> None:
    """Refuse `weight[0].zero_()` if the view is a copy that was gathered from all ranks, and count writes through `.data`."""
    if not isinstance(tensor, DTensor):
        return
    base, storage = _torch.base_of(tensor), _torch.local_of(tensor).untyped_storage()
    if isinstance(base, DTensor) and _torch.local_of(base).untyped_storage() is not storage:
        raise _part_written(base)
    owner = vars(storage).get(OWNER)
    param = None if owner is None else owner()
    if param is not None and param.sharded is not tensor:  # full copies that are kept are stale from now on
        torch.autograd.graph.increment_version(param.sharded)


def _refuse_fill(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    base = _torch.base_of(args[0])
    raise _part_written(args[0] if base is None else base)


def _refuse_dual(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    raise UsageError(
        "a sharded tensor was given a tangent, by torch.func.jvp or forward_ad.make_dual, which DTensor does not support; "
        "take tangents by the inputs alone, or of the unsharded model."
    )


def _write_at(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`weight[rows] = 0`, with rows or a mask in a tensor."""
    _begin_write(args[0])
    try:
        return _torch.unanswered(operator, args, kwargs)
    except (RuntimeError, NotImplementedError) as error:
        raise _part_written(args[0]) from error


def _part_written(tensor: Any) -> UsageError:
    at = f" at {tensor.placements}" if isinstance(tensor, DTensor) else ""
    return UsageError(
        f"a part of a sharded tensor of shape {tuple(tensor.shape)}{at} was written, as in w[i] = 0 or w[i].zero_(), which "
        f"would not reach the shards; {INSTEAD}."
    )


# -- other shapes


def _view(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`weight.flatten()` or `weight.view(-1)`, which torch refuses if rows do not divide by the ranks."""
    try:
        return _torch.unanswered(operator, args, kwargs)
    except RuntimeError as error:
        tensor: DTensor = args[0]
        axes = zip(tensor.placements, tensor.device_mesh.shape, strict=True)
        if not any(isinstance(p, (Shard, _torch.StridedShard)) and tensor.shape[p.dim] % n for p, n in axes):
            raise
        operator(
            torch.empty(tensor.shape, device="meta"), *args[1:], **kwargs
        )  # torch's own words for a shape that is none
        raise UsageError(
            f"a sharded tensor of shape {tuple(tensor.shape)} at {tensor.placements} was asked for shape {tuple(args[1])}, as "
            "flatten() and parameters_to_vector do, and its rows do not divide by the ranks; flatten its full_tensor(), or do "
            "this under full_params(model), with write=True for vector_to_parameters."
        ) from error
