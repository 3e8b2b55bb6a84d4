"""What torch says where a sharded parameter meets a plain tensor, "got mixed torch.Tensor and DTensor", and what to do about it.

Since torch 2.12 operators on DTensors are dispatched in C++, and the one thing that it asks before it raises is whether somebody
answers for the operator. So operators in which people meet this are answered: by torch itself, and its error gets a note. An
operator on DTensors alone takes longer by that much; none is in the steps of a sharded model, which computes on plain tensors.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from accordion import _torch
from accordion.engine.engine import Engine

PLACE = "_accordion_place"  # the attribute by which a sharded parameter tells its name and its unit's
MIXED = "got mixed torch.Tensor and DTensor"
PLACED_ANEW = (
    "in-place operations that require placement changes"  # as torch's Adafactor meets it; transformers' is `MIXED`
)
NO_ADAFACTOR = (
    "Adafactor keeps means over the rows and columns of whole matrices, and a rank holds some rows of each sharded parameter "
    "only; take AdamW, whose states are sharded too."
)
MOST_NODES = 1000  # of autograd's graph, that are looked at to find the parameter from which a tensor was computed

# By what they are for: layers, products, arithmetic, losses, putting together and taking out. In inference mode torch asks for
# what a function calls first (conv1d), and else for what that is made of (convolution).
NAMES = """
conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d layer_norm rms_norm batch_norm group_norm bilinear
instance_norm lstm.input gru.input rnn_tanh.input scaled_dot_product_attention einsum broadcast_tensors cosine_similarity prelu
linear embedding _embedding_bag _embedding_bag_forward_only native_layer_norm _fused_rms_norm native_group_norm
convolution _convolution native_batch_norm _native_batch_norm_legit _native_batch_norm_legit.no_stats
_batch_norm_with_update _batch_norm_no_update cudnn_batch_norm _prelu_kernel mkldnn_rnn_layer
mm bmm addmm addbmm baddbmm addmv mv dot matmul
add.Tensor sub.Tensor rsub.Tensor mul.Tensor div.Tensor pow.Tensor_Tensor maximum minimum addcmul addcdiv
lerp.Scalar lerp.Tensor addcmul_ addcdiv_ pow_.Scalar
mse_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits nll_loss_forward
eq.Tensor ne.Tensor lt.Tensor gt.Tensor le.Tensor ge.Tensor
cat stack where.self index.Tensor index_select gather masked_fill.Tensor index_put
_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_efficient_attention _scaled_dot_product_flash_attention
"""


def explain_mixing(engine: Engine) -> None:
    """Let the parameters of `engine` tell who they are, and torch's error name them. Once a process; more calls add nothing.

    With tensor parallelism operators on DTensors are in every step, and nothing is answered for.
    """
    for unit in engine.units:
        for param in unit.params:
            vars(param.sharded)[PLACE] = param.name, unit.name
    if any(param.around is not None for unit in engine.units for param in unit.params):
        return
    for operator in _operators():
        _torch.answer_around(operator, answer)


def answer(known: Callable[..., Any] | None, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What torch itself does, or who is asked for this operator; where it raises that tensors are mixed, with a note of ours."""
    try:
        return (known or _torch.unanswered)(operator, args, kwargs)
    except RuntimeError as error:
        text = str(error)
        if (MIXED in text or PLACED_ANEW in text) and _in_a_step_of_adafactor(sys._getframe(1)):
            error.add_note(NO_ADAFACTOR)
        elif MIXED in text:
            met = list(_dtensors_of((*args, *kwargs.values())))
            place = next(filter(None, map(_place_of, met)), None)
            words = _words_of(*place) if place else _words_by_memory_or_shape(met, sys._getframe(1))
            if words:
                error.add_note(_note(words))
        raise


def _in_a_step_of_adafactor(frame: FrameType | None) -> bool:
    """Of torch's or of transformers', which cannot be asked for without an import."""
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, torch.optim.Optimizer) and "Adafactor" in {kind.__name__ for kind in type(owner).__mro__}:
            return True
        frame = frame.f_back
    return False


def _words_of(name: str, unit: str) -> str:
    return f"{name!r} of unit {unit or 'root'!r}"


def _note(parameter: str) -> str:
    return (
        f"parameter {parameter} is sharded, and was used outside of a call of that unit, where it is a "
        "DTensor of which each rank holds rows. Ways out: compute this inside the model's forward; or make the method that does "
        "an entry point, accordion.entry_point(module, 'name of the method'); or gather it on all ranks, param.full_tensor(), "
        "or `with accordion.full_params(model):` for more than one."
    )


def _operators() -> Iterator[Any]:
    for name in NAMES.split():
        packet, _, overload = name.partition(".")
        found = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
        if found is not None:  # this version of torch has it
            yield found


def _dtensors_of(values: Iterable[Any]) -> Iterator[DTensor]:
    for value in values:
        if isinstance(value, DTensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _dtensors_of(value)


def _words_by_memory_or_shape(tensors: list[DTensor], frame: FrameType | None) -> str:
    """Which parameter a tensor without a graph is of, among the models that the callers hold: the one whose rows it lies in, as
    what `detach` and views in inference mode give does; else, as a guess, the only one of its shape. "" for none."""
    params = list(_parameters_at_work(frame))
    for tensor in tensors:
        start, given = _torch.local_of(tensor).data_ptr(), _torch.local_of(tensor)
        for param in params:
            rows = _torch.local_of(param)
            inside = rows.data_ptr() <= start < rows.data_ptr() + rows.nbytes
            if given.device == rows.device and given.numel() and inside:
                return _words_of(*vars(param)[PLACE])
    for tensor in tensors:
        alike = [p for p in params if p.shape == tensor.shape and p.device_mesh == tensor.device_mesh]
        if len(alike) == 1:
            return f"{_words_of(*vars(alike[0])[PLACE])}, or what has its shape and was computed from it,"
    return ""


def _parameters_at_work(frame: FrameType | None) -> Iterator[DTensor]:
    """Sharded parameters of modules among the variables of `frame` and its callers, and in what the `self` of methods holds."""
    seen: set[int] = set()
    while frame is not None:
        values = list(frame.f_locals.values())
        owner = frame.f_locals.get("self")
        values += [] if isinstance(owner, nn.Module) else list(getattr(owner, "__dict__", {}).values())
        for module in (value for value in values if isinstance(value, nn.Module)):
            for param in module.parameters():
                if id(param) not in seen and isinstance(param, DTensor) and PLACE in vars(param):
                    seen.add(id(param))
                    yield param
        frame = frame.f_back


def _place_of(tensor: Tensor) -> tuple[str, str] | None:
    """The name and the unit of a sharded parameter, or of the first one from which `tensor` was computed."""
    base = _torch.base_of(tensor)
    for one in (tensor, base):
        if one is not None and PLACE in vars(one):
            return vars(one)[PLACE]  # type: ignore[no-any-return]
    nodes, seen = [tensor.grad_fn], 0
    while nodes and seen < MOST_NODES:
        node: Any = nodes.pop()
        seen += 1
        leaf = getattr(node, "variable", None)
        if leaf is not None and PLACE in vars(leaf):
            return vars(leaf)[PLACE]  # type: ignore[no-any-return]
        nodes += [following for following, _ in getattr(node, "next_functions", ()) if following is not None]
    return None
