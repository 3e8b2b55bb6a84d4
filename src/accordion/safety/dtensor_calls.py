"""Operators of DTensor that go wrong in silence on sharded parameters: put right or refused, for these parameters alone.

DTensor has one table of operators for the process. The entries here pass every tensor on to torch that is no parameter of a
sharded model and no view of one.
"""

from __future__ import annotations

import logging
import threading
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from accordion import _torch
from accordion.engine.engine import Engine
from accordion.engine.observer import Observer
from accordion.engine.params import Param
from accordion.errors import UsageError
from accordion.row_marks import refuse_rows_of_others

log = logging.getLogger("accordion")
aten = torch.ops.aten

# How long a rank waits for the others in `.item()` before it says so.
WAIT_S = 10.0

DRAWS_INTO = (aten.normal_.default, aten.uniform_.default, aten.bernoulli_.float)
DRAWS_LIKE = (aten.rand_like.default, aten.randn_like.default, aten.randint_like.default, aten.randint_like.low_dtype)
WRITES = (
    *(aten.zero_.default, aten.fill_.Scalar, aten.copy_.default),
    *(aten.add_.Tensor, aten.sub_.Tensor, aten.mul_.Tensor, aten.div_.Tensor, aten.lerp_.Scalar, aten.lerp_.Tensor),
    *(aten.clamp_.default, aten.clamp_.Tensor, aten.clamp_min_.default, aten.clamp_max_.default),
    *(aten.index_put_.default, aten.index_fill_.int_Scalar, aten.index_fill_.int_Tensor),
)
# The attribute that leads from the storage of a shard to its parameter; `p.data` and views of it have the same storage.
OWNER = "_accordion_owner"
INSTEAD = "write under full_params(model, write=True), where it is an ordinary tensor"


def answer_for_shards(engine: Engine) -> None:
    """Have writes into the parameters of `engine` counted, and random numbers for them drawn as on one device."""
    for param in [param for unit in engine.units for param in unit.params]:
        vars(_torch.local_of(param.sharded).untyped_storage())[OWNER] = weakref.ref(param)
    for operator in (*DRAWS_INTO, *DRAWS_LIKE):
        _torch.answer_operator(operator, _draw)
    for operator in WRITES:
        _torch.answer_operator(operator, _write)


def _param_of(tensor: Any) -> Param | None:
    """Return the parameter of a sharded model that `tensor` is, or of which it is a view; None for all other tensors."""
    for each in (tensor, _torch.base_of(tensor)):
        if isinstance(each, DTensor):
            owner = vars(_torch.local_of(each).untyped_storage()).get(OWNER)
            param: Param | None = None if owner is None else owner()
            if param is not None:
                return param
    return None


# -- random numbers


def _draw(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Draw what one device would draw, and keep the rows of this rank; torch has every rank of a CPU draw the same numbers.

    Takes memory for the whole tensor meanwhile. On accelerators torch gives each rank numbers of its own.
    """
    tensor = args[0]
    param = _param_of(tensor)
    if param is None:
        return _torch.unanswered(operator, args, kwargs)
    local, to = _torch.local_of(tensor), kwargs.get("device")
    if operator in DRAWS_INTO:
        _begin_write(tensor, param)
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
    param = _param_of(args[0])
    if param is not None:
        _begin_write(args[0], param)
        if operator is aten.copy_.default:
            refuse_rows_of_others([(args[1], args[0])], "a tensor")
            # On some accelerators `weight[:, i] = 0` is a copy, which torch refuses in other words.
            if _torch.base_of(args[0]) is not None and not isinstance(args[1], DTensor):
                raise _part_written(args[0])
    return _torch.unanswered(operator, args, kwargs)


def _begin_write(tensor: Tensor, param: Param) -> None:
    """Refuse `weight[0].zero_()` if the view is a copy that was gathered from all ranks, and count writes through `.data`."""
    base, storage = _torch.base_of(tensor), _torch.local_of(tensor).untyped_storage()
    if isinstance(base, DTensor) and _torch.local_of(base).untyped_storage() is not storage:
        raise _part_written(base)
    # Full copies that are kept are stale from now on.
    if param.sharded is not tensor:
        torch.autograd.graph.increment_version(param.sharded)


def _part_written(tensor: DTensor) -> UsageError:
    return UsageError(
        f"a part of a sharded tensor of shape {tuple(tensor.shape)} at {tensor.placements} was written, as in w[i] = 0 or "
        f"w[i].zero_(), which would not reach the shards; {INSTEAD}."
    )


# -- anomaly detection


class AnomalyChecks(Observer):
    """Lets `torch.autograd.set_detect_anomaly` look for NaN in sharded gradients, while a backward of the model runs.

    After each node autograd asks `isnan(gradient)._is_any_true()`, for which DTensor has no rule (torch 2.11 to 2.13). It asks of
    the node of this rank, so this rank's rows answer: a reduction would be a collective of the ranks that came this far only.
    """

    OPERATOR = aten._is_any_true.default

    def __init__(self) -> None:
        self._answers = False

    def backward_begins(self) -> None:
        if torch.is_anomaly_check_nan_enabled() and not _torch.has_rule(self.OPERATOR):
            self._answers = _torch.answer_operator(self.OPERATOR, _of_these_rows)

    def backward_ended(self, reduced: bool) -> None:
        self.interrupted()

    def interrupted(self) -> None:
        if self._answers:
            _torch.drop_answer(self.OPERATOR)
            self._answers = False


def _of_these_rows(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    answer: Tensor = operator(_torch.local_of(args[0]))
    return answer


# -- `.item()`, float(), bool(), int()


def answer_numbers() -> None:
    """Have `.item()` of any DTensor of the process give the number of the whole tensor.

    torch gives that of this rank's part: `grad.norm().item()` is a sum still to come. Which tensors the number was computed from
    cannot be told, so this is for processes that our own commands started.
    """
    _torch.answer_operator(aten._local_scalar_dense.default, _number)


def _number(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor: DTensor = args[0]
    local = _torch.local_of(tensor)
    if all(p.is_replicate() for p in tensor.placements):
        return operator(local, *args[1:], **kwargs)
    if tensor.numel() != 1:
        return operator(torch.empty(tensor.shape, device="meta"))  # raises torch's own error
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
