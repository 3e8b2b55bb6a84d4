"""The tensors of a stream of weights, in the order and under the names in which `from_pretrained` expects them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from accordion import _torch
from accordion.checkpoint.contents import WRAPPERS, without_wrappers
from accordion.engine.engine import Engine
from accordion.engine.params import Param
from accordion.errors import UsageError
from accordion.state import refuse_own_gather, register
from accordion.weights.adapters import added_by_adapters, copied_inside, is_adapter
from accordion.weights.export import is_peft
from accordion.weights.pretrained import INSIDE

Adapters = Literal["merged", "alone"]
Merge = Callable[[Sequence[Tensor]], Tensor]
"""Function from the full tensors of a layer with adapters to its merged weight, which may overwrite the first of them."""


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor of the model, and the dtype in which it is sent. `param`: None if this rank has the whole tensor."""

    value: Tensor
    param: Param | None
    dtype: torch.dtype

    def local(self, device: torch.device) -> Tensor:
        """Return what this rank has of the tensor, detached, in `dtype` on `device`; a view of it if possible."""
        local = self.value if self.param is None else _torch.local_of(self.value)
        return local.detach().to(device=device, dtype=self.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One tensor of a stream. `sources`: gathered for it, one if there is no `merge`. `dtype`: in which it is delivered."""

    name: str
    sources: tuple[Source, ...]
    dtype: torch.dtype
    merge: Merge | None = None


def items_of(model: nn.Module, engine: Engine, dtype: torch.dtype | None, adapters: Adapters) -> list[Item]:
    """Return the items of a stream, the same on every rank: parameters and persistent buffers, tied ones once.

    `dtype`: of floating-point parameters; None: that of their shards. `adapters`: merge those of a PEFT model into the layers
    they wrap, or return them alone. Raises `UsageError` for tensors that cannot be streamed.
    """
    params = {id(param.sharded): param for param in engine.params}
    for param in engine.params:
        refuse_own_gather(param)

    def plain(name: str, value: Tensor) -> Item:
        param = params.get(id(value))
        casts = dtype is not None and param is not None and param.dtype.is_floating_point
        sent = dtype if casts and dtype is not None else value.dtype
        return Item(name=name, sources=(Source(value, param, sent),), dtype=sent)

    if adapters == "alone":
        return [plain(name, value) for name, value in _adapter_tensors(model).items()]
    if not is_peft(model):
        return [plain(without_wrappers(name), value) for name, value in _once(model.state_dict(keep_vars=True))]
    base = _base_of(model)
    layers = {f"{name}.base_layer.weight": layer for name, layer in base.named_modules() if is_adapter(layer)}
    left_out, trained = added_by_adapters(base), _trained_copies(base)
    left_out |= {id(value) for copies in trained.values() for value in copies[1]}
    values = {name: value for name, value in base.state_dict(keep_vars=True).items() if id(value) not in left_out}
    named = {name: trained[name][0] if name in trained else value for name, value in values.items()}
    own = {name: value for name, value in named.items() if name not in layers}
    once, items = dict(_once(own)), []
    for name in named:
        if name in layers and not layers[name].merged:
            items.append(_merged(engine, without_wrappers(name, (*WRAPPERS, *INSIDE)), layers[name], dtype))
        elif name in layers or name in once:
            items.append(plain(without_wrappers(name, (*WRAPPERS, *INSIDE)), named[name]))
    return items


def _once(values: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) for each tensor in `values` the first time; skips what is no tensor (`get_extra_state`)."""
    seen = set[int]()
    for name, value in values.items():
        if isinstance(value, Tensor) and id(value) not in seen:
            seen.add(id(value))
            yield name, value


# -- PEFT


def _base_of(model: Any) -> nn.Module:
    """Return the model that PEFT wraps. Raises `UsageError` if its adapters are not merged into weights."""
    for name, config in model.peft_config.items():
        if config.is_prompt_learning or getattr(config, "lora_bias", False):
            raise UsageError(
                f"adapter {name!r} has prompts or biases of its own, which no weight of the base model can take; stream it with "
                'adapters="alone".'
            )
    return model.get_base_model()  # type: ignore[no-any-return]


def _adapter_tensors(model: Any) -> dict[str, Tensor]:
    """Return name -> tensor of what PEFT saves of the active adapter. Raises `UsageError` if `model` is no PEFT model."""
    if not is_peft(model):
        raise UsageError(f'adapters="alone" takes a PEFT model, and this {type(model).__name__} has no adapters.')
    from peft import get_peft_model_state_dict

    values = dict(model.state_dict(keep_vars=True))
    return dict(_once(get_peft_model_state_dict(model, state_dict=values, adapter_name=model.active_adapter)))


def _trained_copies(base: nn.Module) -> dict[str, tuple[Tensor, list[Tensor]]]:
    """Return, by the name of each tensor of which PEFT trains a copy (`modules_to_save`), (the active copy, all copies)."""
    result: dict[str, tuple[Tensor, list[Tensor]]] = {}
    for prefix, module in base.named_modules():
        for adapter, copy in copied_inside(module):
            for key, value in copy.state_dict(keep_vars=True).items():
                name = f"{prefix}.original_module.{key}"
                active, all_of_them = result.get(name, (value, []))
                is_active = adapter in module.active_adapters  # type: ignore[operator]
                result[name] = (value if is_active else active, [*all_of_them, value])
    return result


def _merged(engine: Engine, name: str, layer: Any, dtype: torch.dtype | None) -> Item:
    inside = {id(module) for module in layer.modules()}
    places = [
        (i, module, attr, param)
        for i, param in enumerate(engine.params)
        for ref, attr in param.places
        if (module := ref()) is not None and id(module) in inside
    ]
    params = {i: param for i, _, _, param in places}
    weight = layer.get_base_layer()._parameters["weight"]
    sent = dtype or weight.dtype
    # The base weight comes first, because the merge overwrites it.
    order = sorted(params, key=lambda i: params[i].sharded is not weight)
    at = {i: position for position, i in enumerate(order)}
    shown = [(module, attr, param, at[i]) for i, module, attr, param in places]
    sources = tuple(Source(params[i].sharded, params[i], params[i].dtype) for i in order)
    return Item(name=name, sources=sources, dtype=sent, merge=partial(_merge, engine, layer, shown))


def _merge(
    engine: Engine, layer: Any, shown: list[tuple[nn.Module, str, Param, int]], fulls: Sequence[Tensor]
) -> Tensor:
    """Return the weight of a PEFT layer with its active adapters merged, by PEFT's code on full parameters."""
    full = [nn.Parameter(tensor, requires_grad=False) for tensor in fulls]
    register([(module, attr, full[i]) for module, attr, _, i in shown])
    suspended, engine.suspended = engine.suspended, True
    try:
        with torch.no_grad():
            layer.merge(safe_merge=False)
        return full[0].data
    finally:
        layer.merged_adapters.clear()
        engine.suspended = suspended
        register([(module, attr, param.sharded) for module, attr, param, _ in shown])
