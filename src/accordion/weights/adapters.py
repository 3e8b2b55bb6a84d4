"""Finds the adapters of PEFT in a model (LoRA and others) and resets the parameters they add; does not import PEFT."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

RESET = re.compile(r"reset_(\w+_)?parameters")
FROM_NUMBERS = (True, False, "gaussian")  # values of init_lora_weights that do not need the weights of the base layer


def is_adapter(module: nn.Module) -> bool:
    """Return True if `module` is an adapter layer of PEFT: it wraps a layer, its child `base_layer`, and adds weights."""
    return isinstance(getattr(type(module), "adapter_layer_names", None), tuple) and "base_layer" in module._modules


def added_by(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the child modules of the adapter layer `module`, except `base_layer`, the layer that it wraps."""
    return (child for key, child in module._modules.items() if key != "base_layer" and child is not None)


def added_by_adapters(model: nn.Module) -> set[int]:
    """Return the ids of all parameters that adapters and prompts of PEFT add to `model`, without those in `modules_to_save`."""
    ids: set[int] = set()
    for module in model.modules():
        if is_adapter(module):
            ids |= {id(param) for child in added_by(module) for param in child.parameters()}
            ids |= {id(param) for param in module._parameters.values() if param is not None}
        prompts = module._modules.get("prompt_encoder") if "peft_config" in vars(module) else None
        if prompts is not None:
            ids |= {id(param) for param in prompts.parameters()}
    return ids


def copied_inside(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield (adapter name, copy) for each copy of a layer that PEFT trains in the layer's place. `module`: PEFT's wrapper of the
    layer and its copies (`modules_to_save`); any other module yields nothing."""
    copies: Any = module._modules.get("modules_to_save")
    if "original_module" in module._modules and copies is not None:
        yield from copies.items()


def configs_of(model: nn.Module) -> Mapping[str, Any]:
    """Return adapter name -> config, the `peft_config` of the first module in `model` that has one; {} if none has."""
    candidates = (vars(module).get("peft_config") for module in model.modules())
    return next((configs for configs in candidates if isinstance(configs, Mapping)), {})


def reset_problem(module: nn.Module, configs: Mapping[str, Any]) -> str | None:
    """Return text on why the adapter layer `module` cannot be reset; None if it can, or if it is no adapter layer. `configs`:
    adapter name -> config."""
    if not is_adapter(module):
        return None
    method = _method_of(module)
    if method is None:
        return f"{type(module).__name__} has no method of its own that resets what it adds"
    for adapter in _adapters_of(module):
        missing, arguments = _arguments(module, method, adapter, configs)
        if missing:
            return f"{type(module).__name__}.{method.__name__} needs {', '.join(missing)}, which no config has"
        begin = arguments.get("init_lora_weights", True)
        if begin not in FROM_NUMBERS:
            return f"init_lora_weights={begin!r} of adapter {adapter!r} needs the weights of the base layer"
    return None


def reset_adapters(module: nn.Module, configs: Mapping[str, Any]) -> None:
    """Initialise the parameters of each adapter in the adapter layer `module`, by the layer's own reset method. Its arguments
    come from `configs` (adapter name -> config) or the layer. `reset_problem` must have returned None."""
    method = _method_of(module)
    assert method is not None, "reset_problem() was called before"
    for adapter in _adapters_of(module):
        method(adapter, **_arguments(module, method, adapter, configs)[1])


def follow_base(module: nn.Module) -> None:
    """Write DoRA's magnitudes in an adapter layer, computed from its base layer and LoRA weights. Do nothing without DoRA."""
    magnitudes: Any = module._modules.get("lora_magnitude_vector")
    for adapter, magnitude in magnitudes.items() if magnitudes is not None else ():
        layer: Any = module
        if adapter in layer.lora_A:
            below, above = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight
        else:
            below, above = layer.lora_embedding_A[adapter], layer.lora_embedding_B[adapter]
        base, scaling = layer.get_base_layer(), layer.scaling[adapter]
        magnitude.update_layer(base_layer=base, lora_A=below, lora_B=above, scaling=scaling)


def _arguments(
    module: nn.Module, method: Callable[..., Any], adapter: str, configs: Mapping[str, Any]
) -> tuple[list[str], dict[str, Any]]:
    """Find the arguments for a call `method(adapter, **arguments)` of a reset method, in the adapter's config or else in the
    layer `module`. Return (names of required arguments that were not found, name -> value of the others). An
    `init_lora_weights` that was not found is True; other optional ones are left out."""
    missing, arguments = [], {}
    config = configs.get(adapter)
    for name, parameter in list(inspect.signature(method).parameters.items())[1:]:
        by_adapter = getattr(module, name, None)
        if hasattr(config, name):
            arguments[name] = getattr(config, name)
        elif isinstance(by_adapter, (Mapping, nn.ModuleDict, nn.ParameterDict)) and adapter in by_adapter:
            arguments[name] = by_adapter[adapter]
        elif name == "init_lora_weights":
            arguments[name] = True
        elif parameter.default is inspect.Parameter.empty:
            missing.append(name)
    return missing, arguments


def _adapters_of(module: nn.Module) -> list[str]:
    layers: list[Any] = [getattr(module, name, None) for name in module.adapter_layer_names]  # type: ignore[union-attr]
    return list(dict.fromkeys(key for by_adapter in layers if hasattr(by_adapter, "keys") for key in by_adapter.keys()))  # noqa: SIM118


def _method_of(module: nn.Module) -> Callable[..., Any] | None:
    """Return the method of `module` that resets one adapter, such as `reset_lora_parameters`. Of several, return the one named
    after the package of the class (`lora`). Return None if there is none, or if none of several is so named."""
    kind = type(module)
    methods = {
        name: getattr(module, name)
        for name in dir(kind)
        if RESET.fullmatch(name)
        and next(iter(inspect.signature(getattr(module, name)).parameters), "") == "adapter_name"
    }
    preferred = f"reset_{kind.__module__.split('.')[-2] if '.' in kind.__module__ else ''}_parameters"
    return methods.get(preferred) or (next(iter(methods.values())) if len(methods) == 1 else None)
