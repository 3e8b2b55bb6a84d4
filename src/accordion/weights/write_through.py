"""Full parameters that stand in for shards, one in memory at a time, while code runs that writes into parameters.

While an init function runs, every parameter stands in the registry as the plain full tensor that one device has, over a
storage without memory. Before each operator the storages that it touches get memory, filled from the shards where the
operator reads them; what the operators before left behind is cut into rows and let go. So nothing has to be known of init
functions: views, `.data`, lists of parameters, compound ones like `orthogonal_`, and parents that write into their
children all meet a plain tensor. (Running in-place operators on the DTensors themselves loses writes through views; full
tensors made when a parameter is read and cut when the next one is lose writes through a reference kept meanwhile.)
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from accordion import _torch
from accordion.engine.communicator import reduced
from accordion.engine.params import Param, own_part
from accordion.errors import UsageError
from accordion.state import sharded_engine

aten = torch.ops.aten
OVERWRITES = {  # the first argument is written and not read: no need to gather it; others are right too, only slower
    aten.normal_.default, aten.uniform_.default, aten.zero_.default, aten.fill_.Scalar, aten.fill_.Tensor,
    aten.copy_.default, aten.bernoulli_.float, aten.exponential_.default, aten.random_.default,
    getattr(aten.random_, "from"), aten.log_normal_.default, aten.cauchy_.default, aten.eye.out, aten.eye.m_out,
}  # fmt: skip
# Views of every element: what overwrites one overwrites the parameter.
VIEWS = {aten.detach.default, aten.alias.default, aten.view.default, aten.t.default, aten.transpose.int}


class Full:
    """A parameter as one device has it, over a storage that has memory only while an operator needs it.

    `kept`: what is written goes to the shards. `filled`: the memory holds the parameter's value.
    """

    __slots__ = ("data", "filled", "kept", "num_bytes", "param", "storage", "tensor")

    def __init__(self, param: Param, device: torch.device, kept: bool) -> None:
        self.param, self.kept, self.filled = param, kept, False
        self.data = torch.empty(param.sharded.shape, dtype=param.dtype, device=device)
        self.storage = self.data.untyped_storage()
        self.num_bytes = self.storage.nbytes()
        self.tensor = nn.Parameter(self.data, requires_grad=param.sharded.requires_grad)
        self.storage.resize_(0)

    def take(self, value: Tensor) -> None:
        """Write this rank's rows of `value` to the shard."""
        if self.kept:
            _torch.local_of(self.param.sharded).copy_(own_part(value, self.param))


class Fulls(_torch.DispatchMode):
    """Owns the full tensors that stand in the registry; gives memory to those that the running operator touches."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self.all: list[Full] = []
        self._by_storage: dict[int, Full] = {}
        self._places: dict[int, list[tuple[nn.Module, str, Full]]] = {}
        self._open: list[Full] = []
        self.written: set[int] = set()  # ids of the storages that an operator wrote

    def stand_in(self, param: Param, places: Iterable[tuple[nn.Module, str]], kept: bool) -> None:
        """Register a full tensor in place of the shard of `param` at these places."""
        full = Full(param, self._device, kept)
        self.all.append(full)
        self._by_storage[id(full.storage)] = full
        for module, attr in places:
            self._places.setdefault(id(module), []).append((module, attr, full))
            module._parameters[attr] = full.tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [t.untyped_storage() for t in _plain_tensors((args, kwargs))]
        if _torch.mutates(func):
            self.written.update(id(t.untyped_storage()) for t in _plain_tensors((args[:1], kwargs)))
        used = [self._by_storage[id(s)] for s in given if id(s) in self._by_storage]
        if used:
            self.close(used)
        for full in dict.fromkeys(used):
            if full not in self._open:
                full.storage.resize_(full.num_bytes)
                self._open.append(full)
            if full.filled or func in VIEWS:
                continue
            if func not in OVERWRITES or len(used) > 1 or given[0] is not full.storage:
                gather_into(full.data, full.param)
            full.filled = True
        return func(*args, **(kwargs or {}))

    def close(self, but: Iterable[Full] = ()) -> None:
        """Cut what stands open into rows and let its memory go, except where numpy shares it."""
        for full in [full for full in self._open if full not in but]:
            if full.filled:
                full.take(full.data)
            if full.storage.resizable():
                full.storage.resize_(0)
                full.filled = False
                self._open.remove(full)

    def settle(self, module: nn.Module) -> None:
        """Take over what an init assigned instead of writing in place: `weight.data = ...`, `module.weight = Parameter(...)`."""
        for _, attr, full in self._places.get(id(module), []):
            given = module._parameters.get(attr)
            storage = None if given is None else given.untyped_storage()
            if given is full.tensor and storage is full.storage:
                continue
            tied = sum(full is other for _, _, other in self.places()) > 1
            fits = given is not None and given.shape == full.data.shape and id(storage) not in self._by_storage
            if given is None or not fits or (given is not full.tensor and tied):
                raise UsageError(
                    f"init put {'nothing' if given is None else f'another parameter of shape {tuple(given.shape)}'} in place "
                    f"of {full.param.name!r} of shape {tuple(full.data.shape)}; fill it in place, and tie or drop before shard()."
                )
            full.take(given.detach())
            self.written.add(id(full.storage))
            full.storage.resize_(full.num_bytes)
            full.tensor.data = full.data  # over its storage again, without a value
            full.storage.resize_(0)
            full.filled = False
            module._parameters[attr] = full.tensor
            if full in self._open:
                self._open.remove(full)

    def places(self) -> list[tuple[nn.Module, str, Full]]:
        """Return where each full tensor is registered: module and attribute."""
        return [place for places in self._places.values() for place in places]

    def restore(self) -> None:
        """Register the shards again."""
        for module, attr, full in self.places():
            module._parameters[attr] = full.param.sharded

    def unwritten(self) -> list[Param]:
        """The parameters that no operator wrote."""
        kept = [full for full in self.all if full.kept]
        return [full.param for full in kept if id(full.storage) not in self.written]


@contextmanager
def init_mode(
    model: nn.Module, *, only: Collection[int] | None = None, drafts: Iterable[tuple[nn.Module, str]] = ()
) -> Iterator[Fulls]:
    """Inside, parameters are full and plain, and what is written into them goes to the shards; every rank must write alike.

    `only`: ids of sharded parameters; what is written into others goes nowhere. `drafts`: places (module, attribute) of
    tied parameters that get a full tensor of their own, and what is written there goes nowhere: so a tie made after an init
    works on one device.
    """
    engine = sharded_engine(model, "init_mode")
    if engine.suspended:
        raise UsageError("init_mode does not work inside full_params or another init_mode; leave that first.")
    engine.recover()
    drafted = {(id(module), attr) for module, attr in drafts}
    fulls = Fulls(engine.context.device)
    with torch.inference_mode(False), torch.no_grad():
        for param in (p for unit in engine.units for p in unit.params):
            places = [(module, attr) for ref, attr in param.places if (module := ref()) is not None]
            own = [(m, a) for m, a in places if (id(m), a) not in drafted] or places
            fulls.stand_in(param, own, only is None or id(param.sharded) in only)
            for place in places:
                if place not in own:
                    fulls.stand_in(param, [place], kept=False)
        engine.suspended = True
        try:
            with fulls:
                yield fulls
                for module, _, _ in fulls.places():
                    fulls.settle(module)
            fulls.close()
        finally:
            engine.suspended = False
            fulls.restore()


def gather_into(full: Tensor, param: Param) -> None:
    """Fill the contiguous `full` from the shards without memory beside it: each element is one rank's, so bits add up."""
    full.zero_()
    own_part(full, param).copy_(_torch.local_of(param.sharded))
    over = [] if param.cut.dim is None else list(param.context.cut_communicators)
    over += [] if param.around is None else param.around.communicators
    if full.numel():
        reduced(full.view(-1).view(torch.int32 if full.nbytes % 4 == 0 else torch.uint8), over)


def _plain_tensors(tree: Any) -> Iterator[Tensor]:
    """Tensors with a storage in the arguments of an operator."""
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor) and not isinstance(leaf, DTensor) and leaf.layout is torch.strided:
            yield leaf
