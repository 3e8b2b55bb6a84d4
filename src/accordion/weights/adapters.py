"""Adapters that PEFT lays around layers (LoRA and the like) and how each resets what it adds; PEFT is not imported."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

RESET = re.compile(r"reset_(\w+_)?parameters")
FROM_NUMBERS = (True, False, "gaussian")  # what LoRA begins with that needs no weights of the layer below


def is_adapter(module: nn.Module) -> bool:
    """Whether it lies around a layer of the model, `base_layer`, and has weights of its own beside it."""
    return isinstance(getattr(type(module), "adapter_layer_names", None), tuple) and "base_layer" in module._modules


def added_by(module: nn.Module) -> Iterator[nn.Module]:
    """What an adapter has beside the layer that it lies around."""
    return (child for key, child in module._modules.items() if key != "base_layer" and child is not None)


def added_by_adapters(model: nn.Module) -> set[int]:
    """Ids of the parameters that adapters and prompts of PEFT have beside the model's own."""
    found: set[int] = set()
    for module in model.modules():
        if is_adapter(module):
            found |= {id(param) for child in added_by(module) for param in child.parameters()}
            found |= {id(param) for param in module._parameters.values() if param is not None}
        prompts = module._modules.get("prompt_encoder") if "peft_config" in vars(module) else None
        if prompts is not None:
            found |= {id(param) for param in prompts.parameters()}
    return found


def copied_inside(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The copies of a layer that PEFT trains in its place, with their adapters' names; none of another module."""
    copies: Any = module._modules.get("modules_to_save")
    if "original_module" in module._modules and copies is not None:
        yield from copies.items()


@dataclass(frozen=True, slots=True)
class Resets:
    """How the adapters of one model begin. `configs`: by an adapter's name; without one LoRA's defaults hold."""

    configs: Mapping[str, Any]

    @classmethod
    def of(cls, model: nn.Module) -> Resets:
        found = (vars(module).get("peft_config") for module in model.modules())
        return cls(next((configs for configs in found if isinstance(configs, Mapping)), {}))

    def problem(self, module: nn.Module) -> str | None:
        """Why an adapter cannot be reset, to end a sentence; None where it can, and of every other module."""
        if not is_adapter(module):
            return None
        method = _method_of(module)
        if method is None:
            return f"{type(module).__name__} has no method of its own that resets what it adds"
        for adapter in _adapters_of(module):
            missing, given = self._arguments(module, method, adapter)
            if missing:
                return f"{type(module).__name__}.{method.__name__} asks for {', '.join(missing)}, which no config has"
            begin = given.get("init_lora_weights", True)
            if begin not in FROM_NUMBERS:
                return f"init_lora_weights={begin!r} of adapter {adapter!r} is made from the weights of the layer below"
        return None

    def reset(self, module: nn.Module) -> None:
        """Call an adapter's own method for each of its adapters."""
        method = _method_of(module)
        assert method is not None, "problem() was asked before"
        for adapter in _adapters_of(module):
            method(adapter, **self._arguments(module, method, adapter)[1])

    def follow(self, module: nn.Module) -> None:
        """What an adapter computes from the weights below and its own: the magnitudes of DoRA."""
        magnitudes: Any = module._modules.get("lora_magnitude_vector")
        for adapter, magnitude in magnitudes.items() if magnitudes is not None else ():
            layer: Any = module
            below, above = (
                (layer.lora_A[adapter].weight, layer.lora_B[adapter].weight)
                if adapter in layer.lora_A
                else (layer.lora_embedding_A[adapter], layer.lora_embedding_B[adapter])
            )
            magnitude.update_layer(
                base_layer=layer.get_base_layer(), lora_A=below, lora_B=above, scaling=layer.scaling[adapter]
            )

    def _arguments(
        self, module: nn.Module, method: Callable[..., Any], adapter: str
    ) -> tuple[list[str], dict[str, Any]]:
        """Those that nobody gives, and those that the config gives, or the layer by adapter, as with the rank `r`."""
        missing, given = [], {}
        config = self.configs.get(adapter)
        for name, parameter in list(inspect.signature(method).parameters.items())[1:]:
            own = getattr(module, name, None)
            if hasattr(config, name):
                given[name] = getattr(config, name)
            elif isinstance(own, (Mapping, nn.ModuleDict, nn.ParameterDict)) and adapter in own:
                given[name] = own[adapter]
            elif name == "init_lora_weights":
                given[name] = True
            elif parameter.default is inspect.Parameter.empty:
                missing.append(name)
        return missing, given


def _adapters_of(module: nn.Module) -> list[str]:
    held: list[Any] = [getattr(module, name, None) for name in module.adapter_layer_names]  # type: ignore[union-attr]
    return list(dict.fromkeys(key for by_adapter in held if hasattr(by_adapter, "keys") for key in by_adapter.keys()))  # noqa: SIM118


def _method_of(module: nn.Module) -> Callable[..., Any] | None:
    """`reset_lora_parameters` and the like, which takes an adapter's name; of several that which is named after the method."""
    kind = type(module)
    found = {
        name: getattr(module, name)
        for name in dir(kind)
        if RESET.fullmatch(name)
        and next(iter(inspect.signature(getattr(module, name)).parameters), "") == "adapter_name"
    }
    own = f"reset_{kind.__module__.split('.')[-2] if '.' in kind.__module__ else ''}_parameters"
    return found.get(own) or (next(iter(found.values())) if len(found) == 1 else None)
