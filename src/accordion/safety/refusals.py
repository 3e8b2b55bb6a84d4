"""Refusals of a sharded model: conversions, copies, pickles, parameters that come after `shard`, and errors of its forward."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_module_registration_hook as on_module
from torch.nn.modules.module import register_module_parameter_registration_hook as on_parameter

from accordion import _torch
from accordion.engine.engine import Engine
from accordion.engine.hooks import Hooks
from accordion.errors import AssertedUsageError, UsageError
from accordion.safety.mixed_tensors import MIXED, read_outside

TAKES_WHOLE = {
    "save_pretrained": "save_pretrained writes whole parameters, and this model is sharded; call "
    "accordion.save_pretrained(model, folder) on every rank.",
    **dict.fromkeys(
        ("merge_and_unload", "unload"),
        "this takes the adapters out of the model, and with them parts of a sharded one; merge in place, `with "
        "accordion.full_params(model, write=True): model.merge_adapter()`, or write the adapters with "
        "accordion.save_pretrained(model, folder) and merge what from_pretrained gives of that folder.",
    ),
}
"""Methods of transformers, diffusers and PEFT, and what is said of each on a sharded model."""

NO_COPY = (
    "a sharded model cannot be copied (FSDP does not support deepcopy): its parameters are rows on many ranks; copy it before it "
    "is sharded, or build and shard it again and load_state_dict(model.state_dict()). For averages as AveragedModel's, clone "
    "model.parameters() and let torch.optim.swa_utils.get_ema_multi_avg_fn(decay) update the clones."
)
RESIZES = "resize_token_embeddings"  # of transformers' models
OWN_FORWARD = "_accordion_own_forward"  # where a guarded model keeps the forward of its own that its instance had


class NotForDDP:
    """Names of parameters to leave out, for DistributedDataParallel: asked for them, it refuses the module."""

    def __iter__(self) -> NoReturn:
        raise UsageError(
            "this model is sharded, and DistributedDataParallel, which something puts around it, keeps and sums whole ones; "
            "leave it out, gradients are summed already. For Trainer, Accelerator and Lightning see accordion.integrations."
        )


def guard(hooks: Hooks) -> None:
    """Put our sentences before what torch does to the modules of a unit; call it once they are attached."""
    for module in hooks.attached_modules():
        for name, method in (("__deepcopy__", _refuse_copy), ("__reduce_ex__", _refuse_pickle)):
            module.__dict__[name] = method  # the hooks would fail first, obscurely
        module.__dict__[_torch.DDP_LEAVES_OUT] = NotForDDP()
        if hooks.unit.index == 0:
            _guard_forward(module, hooks.engine)
            for inner in module.modules():
                for name, why in TAKES_WHOLE.items():
                    theirs: Any = getattr(type(inner), name, None)
                    if callable(theirs):
                        inner.__dict__[name] = _refusing(weakref.ref(inner), theirs, why, weakref.ref(hooks.engine))
    for module in hooks.unit.module_params.modules():
        _guard_conversion(weakref.ref(module), weakref.ref(hooks))


def unguard(hooks: Hooks, modules: Iterable[nn.Module]) -> None:
    """Take back what `guard` did to `modules`, all of the unit's, and to those that hold its parameters."""
    for module in modules:
        for name in ("__deepcopy__", "__reduce_ex__", _torch.DDP_LEAVES_OUT):
            module.__dict__.pop(name, None)
        for inner in module.modules():
            for name in TAKES_WHOLE:
                inner.__dict__.pop(name, None)
        forward, own = module.__dict__.pop(OWN_FORWARD, (None, None))
        if forward is not None and module.__dict__.get("forward") is forward:
            del module.__dict__["forward"]
            if own is not None:
                module.__dict__["forward"] = own
    for module in hooks.unit.module_params.modules():
        module.__dict__.pop("_apply", None)


def _refuse_copy(memo: object) -> NoReturn:
    raise AssertedUsageError(NO_COPY)


def _refuse_pickle(protocol: object) -> NoReturn:
    raise UsageError(
        "a sharded model cannot be pickled; use accordion.save for a checkpoint of shards, or full_state_dict(model) "
        "for full tensors."
    )


def _refusing(of: weakref.ref[nn.Module], method: Any, why: str, by: weakref.ref[Engine]) -> Callable[..., Any]:
    """Return a method of a library that reads or moves whole parameters, with a refusal before it."""

    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        engine, state, model = by(), kwargs.get("state_dict"), of()
        if engine is not None:
            is_whole = state is not None and not any(isinstance(value, DTensor) for value in state.values())
            # transformers' save_pretrained gathers what it sharded itself, through `fully_shard` (`DistributedConfig`).
            config = getattr(getattr(model, "config", None), "distributed_config", None)
            may_save = is_whole or engine.suspended or getattr(config, "dp_size", 1) > 1
            if method.__name__ != "save_pretrained" or not may_save:
                raise UsageError(why)
        return method(model, *args, **kwargs)

    return call


def _guard_forward(module: nn.Module, engine: Engine) -> None:
    """Put the errors of the model's forward right that hooks do not see.

    torch runs no hooks after a KeyboardInterrupt, and what was under way would seem so for ever. And a forward that reads the
    weight of a unit from outside of it gets a shard, of which torch's error says nothing.
    """
    own, function, reference = module.__dict__.get("forward"), type(module).forward, weakref.ref(module)

    @wraps(function)
    def forward(*args: Any, **kwargs: Any) -> Any:
        try:
            return own(*args, **kwargs) if own is not None else function(reference(), *args, **kwargs)
        except Exception as error:
            if MIXED in str(error):
                raise read_outside(error, engine.units) from error
            raise
        except BaseException:
            engine.reset()
            raise

    forward.__signature__ = inspect.signature(own or module.forward)  # type: ignore[attr-defined]
    module.__dict__["forward"] = forward
    module.__dict__[OWN_FORWARD] = (forward, own)


def _guard_conversion(of: weakref.ref[nn.Module], by: weakref.ref[Hooks]) -> None:
    """Put `ModuleParams.convert` before what torch does to the parameters of a module in `to`, `half` and `to_empty`."""

    def apply(function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        module, hooks = of(), by()
        assert module is not None, "a module's method runs while the module lives"
        on_convert = None if hooks is None else hooks.unit.unit_policy.on_convert
        if on_convert is not None and hooks is not None and hooks.engine.depth == 0:
            on_convert()
            changed: nn.Module = module._apply(function, recurse)
            return changed
        if hooks is None or hooks.engine.suspended:
            converted: nn.Module = type(module)._apply(module, function, recurse)
            return converted
        hooks.unit.module_params.convert(module, function)
        kept, module._parameters = module._parameters, {}
        try:
            type(module)._apply(module, function, recurse)
        finally:
            module._parameters = kept
        return module

    module = of()
    if module is not None:
        module.__dict__["_apply"] = apply


# -- parameters that come after `shard`


def refuse_additions(model: nn.Module, engine: Engine) -> None:
    """Refuse parameters that come into a model after `shard`, or get another shape: each rank would train its own in silence.

    The model is looked through in its next forward after anything was registered anywhere, for as long as it lives; that forward
    raises `UsageError`. Another forward pays for one flag.
    """
    came = False

    def register(*_: Any) -> None:
        nonlocal came
        came = True

    def look(module: nn.Module, _: Any) -> None:
        nonlocal came
        if not came or engine.suspended or engine.depth:  # there full parameters may be registered
            return
        for name, param in module.named_parameters():
            if param.requires_grad and not isinstance(param, DTensor):
                raise UsageError(
                    f"parameter {name!r} came into the model after shard(), so each rank would train one of its own; "
                    "put it in before shard(), or freeze it with requires_grad_(False)."
                )
        came = False

    def resize(*_: Any, **__: Any) -> NoReturn:
        raise UsageError(
            f"{RESIZES} was called after shard(), and an embedding's rows lie on all ranks then; resize the model before shard()."
        )

    for handle in (on_module(register), on_parameter(register)):
        weakref.finalize(model, handle.remove)
    model.register_forward_pre_hook(_torch.unseen_by_dynamo(look), prepend=True)
    for module in model.modules():
        if callable(getattr(type(module), RESIZES, None)):
            module.__dict__[RESIZES] = resize
