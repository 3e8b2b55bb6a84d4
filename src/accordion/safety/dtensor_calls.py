"""What torch's DTensor gets wrong in silence on sharded parameters, or says obscurely: put right, or refused in a sentence.

From the first `shard` on torch asks here, for every DTensor of the process; where it was right, it still answers itself.
"""

from __future__ import annotations

import logging
import threading
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from accordion import _torch
from accordion.errors import UsageError
from accordion.safety import mixed_tensors

log = logging.getLogger("accordion")
aten = torch.ops.aten

WAIT_S = 10.0  # so long may ranks be apart before one says what it waits for

DRAWS_INTO = (aten.normal_.default, aten.uniform_.default, aten.bernoulli_.float)
DRAWS_LIKE = (aten.rand_like.default, aten.randn_like.default, aten.randint_like.default, aten.randint_like.low_dtype)
WRITES = (
    *(aten.zero_.default, aten.fill_.Scalar, aten.copy_.default),
    *(aten.add_.Tensor, aten.sub_.Tensor, aten.mul_.Tensor, aten.div_.Tensor),
)
WRITES_AT = (aten.index_put_.default, aten.index_fill_.int_Scalar, aten.index_fill_.int_Tensor)
INSTEAD = "write under full_params(model, write=True), where it is an ordinary tensor"


def answer_for_dtensors() -> None:
    """Once a process; a second call changes nothing."""
    _torch.answer_operator(aten._local_scalar_dense.default, _number)
    for operator in (*DRAWS_INTO, *DRAWS_LIKE):
        _torch.answer_operator(operator, _draw)
    for operator in WRITES:
        _torch.answer_operator(operator, _write)
    for operator in WRITES_AT:
        _torch.answer_operator(operator, _write_at)
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
        _refuse_lost_write(tensor)
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


# -- writes into a part of a tensor


def _write(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    _refuse_lost_write(args[0])
    base = _torch.base_of(args[0])
    if base is not None and operator is aten.copy_.default and not isinstance(args[1], DTensor):
        raise _part_written(
            base
        )  # on some accelerators `weight[:, i] = 0` is a copy, which torch refuses in other words
    return mixed_tensors.answer(None, operator, args, kwargs)


def _refuse_lost_write(tensor: Tensor) -> None:
    """`weight[0].zero_()`: what torch takes for a view is a copy where it was gathered from all ranks for it."""
    base = _torch.base_of(tensor)
    if isinstance(base, DTensor) and isinstance(tensor, DTensor):
        here, there = (_torch.storage_key(_torch.local_of(t).untyped_storage()) for t in (tensor, base))
        if here != there:
            raise _part_written(base)


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
