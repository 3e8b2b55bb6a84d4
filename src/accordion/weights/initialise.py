"""Initialises a sharded model with the same bits as on one device, for any number of ranks and any strategy."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from accordion import _torch
from accordion.engine.communicator import extremes, reduced
from accordion.engine.context import ShardingContext
from accordion.engine.engine import Engine
from accordion.engine.params import Param
from accordion.errors import DivergenceError, UsageError
from accordion.state import sharded_engine
from accordion.weights.adapters import (
    added_by,
    configs_of,
    follow_base,
    is_adapter,
    reset_adapters,
    reset_problem,
)
from accordion.weights.write_through import Fulls, init_mode


def initialise(model: nn.Module, init: Callable[[nn.Module], object] | None = None) -> None:
    """Initialise a model that `shard` returned, on the meta device or not, with the values that it would have on one device.

    On one device, the model would be built on meta, get memory by `to_empty`, and be initialised with the same seed and device
    type, in the order of `model.apply`, children first. Seed all ranks equally before the call, as with `torch.manual_seed(0)`.

    `init` is called with every module, whose parameters are plain full tensors meanwhile. If it is None, models of transformers
    are initialised by their `init_weights` and every other module by `reset_parameters`; modules of other packages inside a
    model of transformers are reset after it. Adapters of PEFT are reset by their own methods, such as `reset_lora_parameters`,
    and DoRA's magnitudes are then computed. A tied parameter is drawn once for each of its names and keeps the last draw; in
    models of transformers, which tie after their initialisation, it keeps the draw of its source. Parameters are drawn
    contiguous, in the dtype of their shards. Meta buffers are computed by `init` or by their modules. Memory beyond the shards
    is one full parameter and what `init` needs. Collective.

    Raises `UsageError` if, at the end, a buffer has no value, or, without `init`, if a parameter has none or an adapter cannot
    be reset. Raises `DivergenceError` on every rank if the ranks' random generators differ before or after the initialisation.
    """
    engine = sharded_engine(model, "initialise")
    if init is None:
        check_adapters(model)
    engine.synchronize()
    _agree_on_generators(engine, "before")
    with materialised_buffers(model, engine) as buffers:
        with init_mode(model, drafts=_retied(model) if init is None else ()) as fulls:

            def call(module: nn.Module) -> None:
                assert init is not None
                init(module)
                fulls.settle(module)

            if init is None:
                _reset(model, configs_of(model))
            else:
                model.apply(call)
        buffers.note(fulls)
        left = blank(fulls.unwritten(), engine.context) if init is None else []
        left += buffers.compute_left()
        if left:
            raise UsageError(
                f"initialise() left {len(left)} parameters and buffers without a value: {', '.join(left)}; compute them in the "
                "`reset_parameters` of their modules, or pass an `init` that does."
            )
    _agree_on_generators(engine, "after")


# -- buffers


@dataclass(frozen=True, slots=True, eq=False)
class Buffer:
    """A buffer that was on the meta device, `meta`, and the tensor `real`, with `storage`, that was registered in its place."""

    name: str
    module: nn.Module
    key: str
    meta: Tensor
    real: Tensor
    storage: torch.UntypedStorage

    @property
    def current(self) -> Tensor | None:
        return self.module._buffers.get(self.key)


class Buffers:
    """The meta buffers of `model`. The constructor, called by `materialised_buffers`, registers an uninitialised tensor in
    place of each; `note` records which have got a value, and `compute_left` initialises the others."""

    def __init__(self, model: nn.Module, engine: Engine) -> None:
        self._model, self._engine = model, engine
        self.all: list[Buffer] = []
        self._computed: set[int] = set()  # ids of the storages that have a value
        real: dict[int, Tensor] = {}
        for prefix, module in model.named_modules():
            for key, meta in module._buffers.items():
                if meta is not None and meta.is_meta:
                    buffer = real.setdefault(id(meta), torch.empty_like(meta, device=engine.context.device))
                    name = f"{prefix}.{key}".lstrip(".")
                    self.all.append(Buffer(name, module, key, meta, buffer, buffer.untyped_storage()))
                    module._buffers[key] = buffer

    def note(self, fulls: Fulls) -> None:
        """Record that the buffers that were written or replaced while `fulls` was active have a value."""
        for b in self.all:
            if id(b.storage) in fulls.written or b.current is not b.real:
                self._computed.add(id(b.storage))

    def left(self, ignore: Iterable[int] = ()) -> dict[str, nn.Module]:
        """Return name -> module of the buffers without a value. `ignore`: ids of buffers on the meta device to leave out."""
        return {b.name: b.module for b in self.all if id(b.storage) not in self._computed and id(b.meta) not in ignore}

    def compute_left(self, ignore: Iterable[int] = (), params: Collection[int] = (), seed: int = 0) -> list[str]:
        """Initialise buffers without a value, and the parameters with the ids `params`, by the code of their modules. Return
        the names of the buffers that still have no value, and of those parameters that nothing was written into. Changes no
        other parameter and no random generator. Collective. `ignore`: ids of meta buffers to skip. `seed`: the same on every
        rank."""
        owners = list(dict.fromkeys(self.left(ignore).values()))
        if not owners and not params:
            return []
        device, holders = self._engine.context.device, _holders(self._model, params)
        with (
            torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type),
            init_mode(self._model, only=params) as fulls,
        ):
            torch.manual_seed(seed)
            for full in fulls.all:  # transformers' init functions skip parameters with this attribute
                full.tensor._is_hf_initialized = not full.writes_shard  # type: ignore[attr-defined]
            for top in _outermost_of_transformers(self._model):
                inside = set(top.modules())
                if params or inside & set(owners):
                    _init_as_transformers(top)
                owners = [owner for owner in owners if owner not in inside]
            for owner in owners:
                _reset_own(owner)
            if params:
                _reset(self._model, configs_of(self._model), holders, families=False)
        self.note(fulls)
        return [*self.left(ignore), *(param.name for param in fulls.unwritten())]


@contextmanager
def materialised_buffers(model: nn.Module, engine: Engine) -> Iterator[Buffers]:
    """Context manager that registers real tensors in place of the meta buffers of `model`, and yields the `Buffers` to fill
    them. At the end casts floating-point ones to `Precision.buffers`, if set. After an error the meta buffers are put back."""
    with torch.inference_mode(False), torch.no_grad():
        buffers = Buffers(model, engine)
        try:
            yield buffers
        except BaseException:
            for b in buffers.all:
                b.module._buffers[b.key] = b.meta
            raise
        dtype = engine.precision.buffers
        for b in buffers.all if dtype is not None else ():
            if b.current is not None and b.current.is_floating_point():
                b.module._buffers[b.key] = b.current.to(dtype)


# -- methods that initialise modules


def is_of_transformers(module: nn.Module) -> bool:
    """Return True if `module` is a `transformers.PreTrainedModel`, without importing transformers."""
    library: Any = sys.modules.get("transformers.modeling_utils")
    return library is not None and isinstance(module, library.PreTrainedModel)


def _outermost_of_transformers(module: nn.Module) -> Iterator[Any]:
    if is_of_transformers(module):
        yield module
        return
    for child in module.children():
        yield from _outermost_of_transformers(child)


def _retied(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Return (module, attribute) of each name of a tied parameter in transformers' models, except the source's. Values drawn
    under such a name are dropped: transformers ties after its initialisation, so the parameter has the value of its source."""
    places = []
    for top in _outermost_of_transformers(model):
        for name, source in top.all_tied_weights_keys.items():
            path, _, attr = name.rpartition(".")
            module = top.get_submodule(path)
            if attr in module._parameters and module._parameters[attr] is top.get_parameter(source):
                places.append((module, attr))
    return places


def _init_as_transformers(top: Any) -> None:
    # As `init_weights`, without tying again. A model that was not on meta has modules marked as initialised.
    for module in top.modules():
        module.__dict__.pop("_is_hf_initialized", None)
    top.initialize_weights()


def _reset_own(module: nn.Module) -> None:
    """Call `module.reset_parameters()`, or else `module._reset_parameters()`; do nothing if the module defines neither."""
    for name in ("reset_parameters", "_reset_parameters"):  # the second is of torch's attention and transformer modules
        # A method that a wrapper's `__getattr__` returns belongs to the module inside.
        method = getattr(module, name, None) if name in vars(module) or hasattr(type(module), name) else None
        if callable(method):
            method()
            return


def _reset(
    module: nn.Module,
    configs: Mapping[str, Any],
    only: Collection[nn.Module] | None = None,
    *,
    families: bool = True,
    known: Collection[str] = (),
) -> None:
    """Reset a module and its submodules, children first; but a model of transformers initialises itself before its children.

    `configs`: adapter name -> config. `only`: modules to reset, None for all; any other is skipped with its submodules.
    `families`: initialise models of transformers too. `known`: packages whose modules are skipped, since an enclosing model of
    transformers has initialised them.
    """
    if only is not None and module not in only:
        return
    package = type(module).__module__.partition(".")[0]
    if is_of_transformers(module):
        if families and not known:  # the outermost initialises those inside
            _init_as_transformers(module)
        known = {*known, "torch", "transformers", package}
    inside = list(added_by(module)) if is_adapter(module) else ()
    for child in module.children():
        _reset(child, configs, only, families=families, known=() if child in inside else known)
    if is_adapter(module):
        reset_adapters(module, configs)
        follow_base(module)
    elif package not in known:
        _reset_own(module)


def follow_loaded(model: nn.Module, params: Collection[int]) -> None:
    """Compute the parameters with the ids `params` that adapters derive from loaded weights (DoRA's magnitudes). Collective."""
    holders = _holders(model, params)
    with init_mode(model, only=params):
        for module in model.modules():
            if module in holders and is_adapter(module):
                follow_base(module)


def _holders(model: nn.Module, params: Collection[int]) -> set[nn.Module]:
    """Return the modules that have a parameter with one of the ids `params`, directly or in a submodule."""
    return {m for m in model.modules() if any(id(p) in params for p in m.parameters())} if params else set()


def check_adapters(model: nn.Module, params: Collection[int] | None = None) -> None:
    """Raise `UsageError` if an adapter in `model` cannot be reset. `params`: check only adapters with a parameter of these ids;
    None: check all."""
    configs, holders = configs_of(model), None if params is None else _holders(model, params)
    refused = [
        f"{name or '(root)'}: {why}"
        for name, module in model.named_modules()
        if (holders is None or module in holders) and (why := reset_problem(module, configs)) is not None
    ]
    if refused:
        raise UsageError(
            f"{len(refused)} adapters cannot be initialised, the first is {refused[0]}; choose another init_lora_weights, or "
            "pass initialise() an `init` that gives them values."
        )


def _agree_on_generators(engine: Engine, when: str) -> None:
    """Raise `DivergenceError` on every rank if the ranks' random generators differ, since they would draw different parameters.
    `when`: "before" or "after" `initialise`, for the message. Collective."""
    device = engine.context.device
    states = [torch.get_rng_state()]
    if device.type != "cpu":
        states.append(torch.get_device_module(device).get_rng_state(device))
    digest = hashlib.sha256(b"".join(state.numpy().tobytes() for state in states)).digest()
    words = torch.frombuffer(bytearray(digest), dtype=torch.int64).to(device)
    low, high = extremes(words, [axis.gather for axis in (engine.context.shard, engine.context.replicate)])
    if not torch.equal(low, high):
        raise DivergenceError(
            f"the ranks' random generators differ {when} initialise(); call torch.manual_seed with the same number on every "
            "rank, and let `init` do the same on all of them."
        )


def blank(params: list[Param], context: ShardingContext) -> list[str]:
    """Return the names of `params` that are zero on every rank, as `shard` leaves those of the meta device. Collective."""
    params = [param for param in params if param.cut.numel]
    if not params:
        return []
    counts = torch.stack([_torch.local_of(param.sharded).count_nonzero() for param in params])
    counts = reduced(counts.to(context.device), [axis.gather for axis in (context.shard, context.replicate)])
    return [param.name for param, count in zip(params, counts.tolist(), strict=True) if not count]
