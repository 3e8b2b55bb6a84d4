"""Refuse uses of a sharded model that cannot work: conversions, copies, pickles, parameters added after `shard`, reads of shards
in a forward, and calls from a forked process or a second thread."""

from __future__ import annotations

import inspect
import os
import traceback
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from threading import get_ident
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_module_registration_hook as on_module
from torch.nn.modules.module import register_module_parameter_registration_hook as on_parameter

from accordion import _torch
from accordion.engine.engine import Engine
from accordion.engine.hooks import Hooks
from accordion.engine.observer import Observer
from accordion.engine.unit import Unit
from accordion.errors import MIXED, AssertedUsageError, UsageError

TAKES_WHOLE = {
    "save_pretrained": "save_pretrained writes whole parameters, and this model is sharded; call "
    "accordion.save_pretrained(model, folder) on every rank.",
    **dict.fromkeys(
        ("merge_and_unload", "unload"),
        "this removes the adapters, which are sharded, from the model; merge in place, `with "
        "accordion.full_params(model, write=True): model.merge_adapter()`, or write the adapters with "
        "accordion.save_pretrained(model, folder) and merge the model that from_pretrained loads from that folder.",
    ),
}
"""Methods of transformers, diffusers and PEFT that do not work on a sharded model, with the text of the error of each."""

NO_COPY = (
    "a sharded model cannot be copied (FSDP does not support deepcopy): its parameters are rows on many ranks; copy it before it "
    "is sharded, or build and shard it again and load_state_dict(model.state_dict()). For averages as AveragedModel's use "
    "acc.EMA(model)."
)
# Attribute of a guarded model: (the guarded forward, the forward that its instance had before or None).
OWN_FORWARD = "_accordion_own_forward"


class NotForDDP:
    """Stand-in for the list of parameters that DistributedDataParallel ignores; iterating over it raises `UsageError`."""

    def __iter__(self) -> NoReturn:
        raise UsageError(
            "this model is sharded, and DistributedDataParallel cannot wrap it, since it needs whole parameters; remove the "
            "wrapper: gradients are reduced already. For Trainer, Accelerator and Lightning see accordion.integrations."
        )


def guard(hooks: Hooks) -> None:
    """Replace methods of a unit's modules, so that they refuse copies, pickles, changes of dtype or device, and DDP. For the root
    unit, also wrap the model's forward, and have the methods in `TAKES_WHOLE` of all modules in the model raise. Call this after
    attaching the hooks."""
    for module in hooks.attached_modules():
        for name, method in (("__deepcopy__", _refuse_copy), ("__reduce_ex__", _refuse_pickle)):
            module.__dict__[name] = method  # otherwise the hooks fail, with an obscure error
        module.__dict__[_torch.DDP_LEAVES_OUT] = NotForDDP()
        if hooks.unit.index == 0:
            _guard_forward(module, hooks.engine)
            for inner in module.modules():
                for name, why in TAKES_WHOLE.items():
                    theirs: Any = getattr(type(inner), name, None)
                    if callable(theirs):
                        inner.__dict__[name] = _refusing(weakref.ref(inner), theirs, why, weakref.ref(hooks.engine))
    for module in hooks.unit.module_params.modules():
        _guard_conversion(module, hooks)


def unguard(hooks: Hooks, modules: Iterable[nn.Module]) -> None:
    """Undo `guard` for one unit. `modules`: those to which `hooks` were attached; the hooks may have been detached by now."""
    for module in modules:
        for name in ("__deepcopy__", "__reduce_ex__", _torch.DDP_LEAVES_OUT):
            module.__dict__.pop(name, None)
        for inner in module.modules():
            for name in TAKES_WHOLE:
                inner.__dict__.pop(name, None)
        forward, original = module.__dict__.pop(OWN_FORWARD, (None, None))
        if forward is not None and module.__dict__.get("forward") is forward:
            del module.__dict__["forward"]
            if original is not None:
                module.__dict__["forward"] = original
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
    """Return `method`, a function of the class of the module `of`, bound to `of` and wrapped so that it raises
    `UsageError(why)` while the engine `by` exists. In three cases `save_pretrained` runs nevertheless: it is given a
    `state_dict` of full tensors, it is called inside `full_params`, or transformers itself has sharded the model."""

    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        engine, state, model = by(), kwargs.get("state_dict"), of()
        if engine is not None:
            is_whole = state is not None and not any(isinstance(value, DTensor) for value in state.values())
            # transformers' save_pretrained gathers a model that it sharded itself with `fully_shard` (`DistributedConfig`).
            config = getattr(getattr(model, "config", None), "distributed_config", None)
            may_save = is_whole or engine.suspended or getattr(config, "dp_size", 1) > 1
            if method.__name__ != "save_pretrained" or not may_save:
                raise UsageError(why)
        return method(model, *args, **kwargs)

    return call


def _guard_forward(module: nn.Module, engine: Engine) -> None:
    """Replace the forward of the model `module` by one that handles errors which hooks do not see. torch runs no hooks after a
    KeyboardInterrupt, so the new forward resets `engine`. If a forward reads a weight outside of its unit, which is a shard
    there, the new forward raises a `UsageError` that names the unit, in place of torch's error about mixed tensors."""
    original, function, reference = module.__dict__.get("forward"), type(module).forward, weakref.ref(module)

    @wraps(function)
    def forward(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs) if original is not None else function(reference(), *args, **kwargs)
        except Exception as error:
            if MIXED in str(error):
                raise _read_outside(error, engine.units) from error
            raise
        except BaseException:
            engine.reset()
            raise

    forward.__signature__ = inspect.signature(original or module.forward)  # type: ignore[attr-defined]
    module.__dict__["forward"] = forward
    module.__dict__[OWN_FORWARD] = (forward, original)


def _read_outside(error: BaseException, units: Sequence[Unit]) -> UsageError:
    """Return the error to raise in place of torch's `error` about mixed tensors in a forward. Its text names the sharded
    parameters of the innermost module in the traceback that has any."""
    shards = {id(p.sharded): (p.name, unit.name) for unit in units for p in unit.params}
    read = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = next((frame.f_locals.get(name) for name in frame.f_code.co_varnames[:1]), None)
        params = module._parameters.values() if isinstance(module, nn.Module) else ()
        named = [shards[id(param)] for param in params if id(param) in shards]
        if named:
            read = f" ({', '.join(name for name, _ in named)} of unit {named[0][1]!r})"
    names = ", ".join(unit.name or "(root)" for unit in units)
    return UsageError(
        f"the forward read a parameter of a unit{read} outside of that unit's own forward, and it is a shard there; choose "
        f"`units` so that one unit holds all modules that read it, or pass the method to entry_point. The units are: {names}."
    )


def _guard_conversion(guarded: nn.Module, of_unit: Hooks) -> None:
    """Replace `_apply` of the module `guarded`, which `to`, `half` and `to_empty` call. Between forwards, the new method raises
    `UsageError` if dtype or device of a shard would change. In a forward of the unit it converts the full parameters of the call.
    Inside `full_params` it converts as torch does. If the unit has an `on_convert`, which removes the engine, a conversion
    between forwards calls it, and then also converts as torch does."""
    of, by = weakref.ref(guarded), weakref.ref(of_unit)

    def apply(function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        module, hooks = of(), by()
        assert module is not None, "a module's method runs while the module lives"
        if hooks is not None and hooks.engine.depth == 0 and (on_convert := hooks.unit.unit_policy.on_convert):
            on_convert()
            hooks = None  # the module is no longer guarded
        if hooks is None or hooks.engine.suspended:
            type(module)._apply(module, function, recurse)
            return module
        hooks.unit.module_params.convert(module, function)
        parameters, module._parameters = module._parameters, {}
        try:
            type(module)._apply(module, function, recurse)
        finally:
            module._parameters = parameters
        return module

    guarded.__dict__["_apply"] = apply


def refuse_additions(model: nn.Module, engine: Engine) -> None:
    """Register a hook on `model` with which a forward raises `UsageError` if the model has a trainable parameter that is not
    sharded, because it was added after `shard`.

    A forward checks the model only if a module or parameter was registered anywhere in the process since the last check. For
    this, torch's global registration hooks are used until the model is deleted.
    """
    is_changed = False

    def register(*_: Any) -> None:
        nonlocal is_changed
        is_changed = True

    def check(module: nn.Module, _: Any) -> None:
        nonlocal is_changed
        if not is_changed or engine.suspended or engine.depth:  # full parameters may be registered there
            return
        for name, param in module.named_parameters():
            if param.requires_grad and not isinstance(param, DTensor):
                raise UsageError(
                    f"parameter {name!r} was added to the model after shard(), so each rank would train its own copy; add it "
                    "before shard(), or freeze it with requires_grad_(False)."
                )
        is_changed = False

    for handle in (on_module(register), on_parameter(register)):
        weakref.finalize(model, handle.remove)
    model.register_forward_pre_hook(_torch.unseen_by_dynamo(check), prepend=True)


class OneCaller(Observer):
    """Observer that raises `UsageError` if the model is called in a forked process, unless there are no other ranks (`alone`).
    It also raises `UsageError` if a second thread calls the model, other than in a backward, while a forward runs."""

    def __init__(self, *, alone: bool) -> None:
        self._alone = alone
        self._pid = os.getpid()
        self._thread: int | None = None

    def unit_is_called(self) -> None:
        thread = self._thread
        if thread is None:  # the outermost call
            if not self._alone and os.getpid() != self._pid:
                raise UsageError(
                    f"a sharded model was called in process {os.getpid()}, a fork of process {self._pid} that sharded it, and "
                    "the call would wait for other ranks forever; call the model in the process that sharded it, and not in "
                    "workers of a DataLoader."
                )
        elif thread != get_ident() and not _torch.is_in_backward():
            raise UsageError(
                "a sharded model was called from two threads at once, and all ranks must call its units in the same order; call "
                "it from one thread, or hold a lock around each forward and backward."
            )

    def forward_begins(self, differentiable: bool, reduces: bool) -> None:
        self._thread = get_ident()

    def forward_ends(self, error: BaseException | None) -> None:
        self._thread = None

    def interrupted(self) -> None:
        self._thread = None
