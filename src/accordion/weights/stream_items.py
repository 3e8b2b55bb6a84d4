"""The tensors of a stream of weights, in the order and under the names in which `from_pretrained` expects them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from accordion import _torch
from accordion.checkpoint.contents import without_wrappers
from accordion.engine.engine import Engine
from accordion.engine.params import Param
from accordion.errors import UsageError
from accordion.state import refuse_own_gather
from accordion.weights.adapters import added_by_adapters, copied_inside, is_adapter
from accordion.weights.export import is_peft
from accordion.weights.pretrained import INSIDE

Adapters = Literal["merged", "alone"]
Places = list[tuple[nn.Module, str]]  # (module, attribute) of each module that reads a parameter


@dataclass(frozen=True, slots=True)
class ItemPart:
    """A tensor that is sent for an item, in `dtype`. `param`: None if each rank has the whole tensor."""

    value: Tensor
    param: Param | None
    dtype: torch.dtype

    def local(self, device: torch.device) -> Tensor:
        """Return what this rank has of the tensor, detached, in `dtype` on `device`; a view of it if possible."""
        local = self.value if self.param is None else _torch.local_of(self.value)
        return local.detach().to(device=device, dtype=self.dtype)


@dataclass(frozen=True, slots=True)
class Item:
    """A tensor of a stream, delivered in `dtype`. `merge`: makes it of the full tensors of all `parts`; None if there is one."""

    name: str
    parts: tuple[ItemPart, ...]
    dtype: torch.dtype
    merge: Callable[[Sequence[Tensor]], Tensor] | None = None


def items_of(model: nn.Module, engine: Engine, dtype: torch.dtype | None, adapters: Adapters) -> list[Item]:
    """Return the items of a stream, the same on every rank: parameters and persistent buffers, tied ones once.

    `dtype`: of floating-point parameters; None: that of their shards. `adapters`: merge those of a PEFT model into the layers
    that they wrap, or return them alone. Raises `UsageError` for tensors that cannot be streamed.
    """
    layers: dict[str, Any] = {}
    if adapters == "alone":
        named = _adapter_tensors(model)
    elif is_peft(model):
        named, layers = _base_tensors(model)
    else:
        named = {without_wrappers(name): value for name, value in model.state_dict(keep_vars=True).items()}
    params, items, seen = {id(param.sharded): param for param in engine.params}, list[Item](), set[int]()
    for name, value in named.items():
        if name in layers:
            items.append(_merged_item(engine, name, layers[name], dtype))
        elif isinstance(value, Tensor) and id(value) not in seen:  # no tensor: from a module's `get_extra_state`
            seen.add(id(value))
            param = params.get(id(value))
            is_cast = dtype is not None and param is not None and param.dtype.is_floating_point
            sent = dtype if is_cast and dtype is not None else value.dtype
            items.append(Item(name, (ItemPart(value, param, sent),), sent))
    for param in [part.param for item in items for part in item.parts if part.param is not None]:
        refuse_own_gather(param)
    return items


# -- PEFT


def _adapter_tensors(model: Any) -> dict[str, Any]:
    """Return name -> tensor of what PEFT saves of the active adapter. Raises `UsageError` if `model` is no PEFT model."""
    if not is_peft(model):
        raise UsageError(f'adapters="alone" takes a PEFT model, and this {type(model).__name__} has no adapters.')
    from peft import get_peft_model_state_dict

    values = dict(model.state_dict(keep_vars=True))
    return dict(get_peft_model_state_dict(model, state_dict=values, adapter_name=model.active_adapter))


def _base_tensors(model: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (name -> tensor of the model that PEFT wraps, name -> layer with adapters that are not merged in it).

    Tensors of which PEFT trains a copy (`modules_to_save`) are the active copy. Raises `UsageError` for adapters that belong
    to no weight.
    """
    for name, config in model.peft_config.items():
        if config.is_prompt_learning or getattr(config, "lora_bias", False):
            raise UsageError(
                f"adapter {name!r} has prompts or biases of its own, which no weight of the base model can take; stream it with "
                'adapters="alone".'
            )
    base = model.get_base_model()
    left_out, copies, layers = added_by_adapters(base), dict[str, Any](), dict[str, Any]()
    for prefix, module in base.named_modules():
        if is_adapter(module) and not module.merged:
            layers[without_wrappers(f"{prefix}.weight", INSIDE)] = module
        for adapter, copy in copied_inside(module):
            values = copy.state_dict(keep_vars=True)
            left_out |= set(map(id, values.values()))
            if adapter in module.active_adapters:
                copies |= {without_wrappers(f"{prefix}.{key}", INSIDE): value for key, value in values.items()}
    state = base.state_dict(keep_vars=True)
    tensors = {without_wrappers(name, INSIDE): value for name, value in state.items() if id(value) not in left_out}
    return tensors | copies, layers


def _merged_item(engine: Engine, name: str, layer: Any, dtype: torch.dtype | None) -> Item:
    """Return the item of a PEFT layer's weight, for which all parameters of the layer are sent, the base weight first."""
    inside, weight = set(map(id, layer.modules())), layer.get_base_layer()._parameters["weight"]
    params: list[tuple[Param, Places]] = []
    for param in engine.params:
        places = [
            (module, attr) for ref, attr in param.places if (module := ref()) is not None and id(module) in inside
        ]
        if places:
            params.insert(0 if param.sharded is weight else len(params), (param, places))
    parts = tuple(ItemPart(param.sharded, param, param.dtype) for param, _ in params)
    return Item(name, parts, dtype or weight.dtype, partial(_merge, engine, layer, params))


def _merge(engine: Engine, layer: Any, params: list[tuple[Param, Places]], fulls: Sequence[Tensor]) -> Tensor:
    """Return the weight of a PEFT layer with its active adapters merged, by PEFT's code, which overwrites `fulls[0]`."""
    shown = [nn.Parameter(full, requires_grad=False) for full in fulls]
    for (_, places), full in zip(params, shown, strict=True):
        for module, attr in places:
            module._parameters[attr] = full
    engine.suspended = True
    try:
        with torch.no_grad():
            layer.merge(safe_merge=False)
        return shown[0].data
    finally:
        layer.merged_adapters.clear()
        engine.suspended = False
        for param, places in params:
            for module, attr in places:
                module._parameters[attr] = param.sharded
