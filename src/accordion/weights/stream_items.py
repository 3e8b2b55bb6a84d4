"""The tensors of a stream of weights, under the names that `from_pretrained` expects; merges adapters of PEFT if asked to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from accordion import _torch
from accordion.checkpoint.contents import without_wrappers
from accordion.engine.context import ShardingContext
from accordion.engine.engine import Engine
from accordion.engine.layout import Cut
from accordion.engine.params import Param, TensorParallelView
from accordion.errors import UsageError
from accordion.state import refuse_own_gather, shown
from accordion.weights.adapters import added_by_adapters, is_adapter
from accordion.weights.export import is_peft
from accordion.weights.initialise import is_of_transformers
from accordion.weights.pretrained import INSIDE, copies_of_layers, names_of

Adapters = Literal["merged", "alone"]


@dataclass(frozen=True, slots=True)
class ItemPart:
    """A tensor that is sent for an `Item`, in `dtype`: a sharded parameter, or a tensor that each rank has whole (a buffer)."""

    value: Tensor
    dtype: torch.dtype
    cut: Cut
    context: ShardingContext
    around: TensorParallelView | None = None

    @classmethod
    def of_param(cls, param: Param, dtype: torch.dtype | None = None) -> ItemPart:
        """Return the part that sends `param` in `dtype` (None: the shard's). Raises `UsageError` if `param` is a tensor
        subclass with its own all-gather."""
        refuse_own_gather(param)
        return cls(param.sharded, dtype or param.dtype, param.cut, param.context, param.around)

    def local(self) -> Tensor:
        """Return what this rank has of the tensor, detached, in `dtype` on the device; a view of it if possible."""
        local: Tensor = _torch.local_or_same(self.value)
        return local.detach().to(device=self.context.device, dtype=self.dtype)


@dataclass(frozen=True, slots=True)
class Item:
    """A tensor of a stream, delivered in `dtype`. `merge`: computes it from the full tensors of `parts`; None if there is one
    part. `split`: turns {name: tensor} into the named tensors that transformers saves for it; None if it saves it whole."""

    name: str
    parts: tuple[ItemPart, ...]
    dtype: torch.dtype
    merge: Callable[[Sequence[Tensor]], Tensor] | None = None
    split: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None = None


def items_of(model: nn.Module, engine: Engine, dtype: torch.dtype | None, adapters: Adapters) -> list[Item]:
    """Return the items of a stream, equal on all ranks: parameters and persistent buffers, tied ones once, under the names that
    transformers or PEFT gives them in files (for other models, those in `state_dict()`).

    `dtype`: of floating-point parameters; None: that of their shards. `adapters`: of a PEFT model: "merged" into the weights of
    the layers that they wrap, or "alone": only what PEFT saves for the active adapter. Raises `UsageError` for tensors that
    cannot be streamed.
    """
    layers: dict[str, Any] = {}
    if adapters == "alone":
        if not is_peft(model):
            raise UsageError(f'adapters="alone" takes a PEFT model, and this {type(model).__name__} has no adapters.')
        from peft import get_peft_model_state_dict

        values = dict(model.state_dict(keep_vars=True))
        named = dict(get_peft_model_state_dict(model, state_dict=values, adapter_name=model.active_adapter))
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
            part = ItemPart(value, value.dtype, Cut(tuple(value.shape), None, 1), engine.context)
            if (param := params.get(id(value))) is not None:
                is_cast = dtype is not None and param.dtype.is_floating_point
                part = ItemPart.of_param(param, dtype if is_cast else None)
            items.append(Item(name, (part,), part.dtype))
    base: Any = model.get_base_model() if is_peft(model) else model  # type: ignore[operator]
    return items if adapters == "alone" or not is_of_transformers(base) else _as_saved(base, items)


def _as_saved(model: nn.Module, items: Sequence[Item]) -> list[Item]:
    """Return `items` under the names that transformers gives them in files. An item that transformers saves as several tensors,
    such as fused experts, gets a `split`. Raises `UsageError` for items that transformers joins into one tensor."""
    from transformers.core_model_loading import revert_weight_conversion

    split = partial(revert_weight_conversion, model)
    metas = {item.name: torch.empty(item.parts[0].value.shape, device="meta") for item in items}
    saved = split(dict(metas))
    names = {id(meta): name for name, meta in saved.items()}
    result = []
    for item in items:
        meta = metas[item.name]
        if id(meta) in names:
            result.append(replace(item, name=names[id(meta)]))
            continue
        if any(name not in saved or saved[name].shape != t.shape for name, t in split({item.name: meta}).items()):
            raise UsageError(
                f"transformers saves {item.name} together with other tensors; use accordion.save_pretrained."
            )
        result.append(replace(item, split=split))
    return result


# -- PEFT


def _base_tensors(model: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (name -> tensor of the model that PEFT wraps, name of a weight -> its layer with adapters that are not merged). Of
    a layer that PEFT trains in a copy, the tensors are the active copy's. Raises `UsageError` for adapters with prompts or
    biases."""
    for name, config in model.peft_config.items():
        if config.is_prompt_learning or getattr(config, "lora_bias", False):
            raise UsageError(
                f"adapter {name!r} has prompts or biases of its own, which no weight of the base model can take; stream it with "
                'adapters="alone".'
            )
    base = model.get_base_model()
    tensors, added = names_of(base), added_by_adapters(base)
    for copy, original in copies_of_layers(base).items():
        value = tensors.pop(copy)
        if any(f".modules_to_save.{adapter}." in f".{copy}" for adapter in model.active_adapters):
            tensors[original] = value
    unmerged = [(name, module) for name, module in base.named_modules() if is_adapter(module) and not module.merged]
    layers = {without_wrappers(f"{name}.weight", INSIDE): module for name, module in unmerged}
    return {name: value for name, value in tensors.items() if id(value) not in added}, layers


def _merged_item(engine: Engine, name: str, layer: Any, dtype: torch.dtype | None) -> Item:
    """Return the item of a PEFT layer's weight with adapters merged. All parameters of the layer are sent, the weight first."""
    weight, inside = layer.get_base_layer()._parameters["weight"], set(map(id, layer.parameters()))
    params = [param for param in engine.params if id(param.sharded) in inside]
    params.sort(key=lambda param: param.sharded is not weight)
    parts = tuple(map(ItemPart.of_param, params))
    return Item(name, parts, dtype or weight.dtype, partial(_merge, engine, layer, params))


def _merge(engine: Engine, layer: Any, params: Sequence[Param], fulls: Sequence[Tensor]) -> Tensor:
    """Return the weight of a PEFT layer with its active adapters merged, by PEFT's code. `fulls`: full tensors of `params`, the
    weight first; the result overwrites `fulls[0]`."""
    full_params = [nn.Parameter(full, requires_grad=False) for full in fulls]
    by_id = {id(param): full for param, full in zip(params, full_params, strict=True)}
    with torch.no_grad(), shown(engine, by_id):
        try:
            layer.merge(safe_merge=False)
        finally:
            layer.merged_adapters.clear()
    return full_params[0].data
