"""Runs code that writes into parameters, such as init functions, on plain full tensors, with memory for one at a time.

While an init function runs, every parameter is registered as a plain full tensor whose storage has no memory. Before each
operator, the storages of its arguments get memory, filled from the shards if the operator reads them; full tensors of earlier
operators are written to the shards and freed. So init functions can do anything they do on one device: write through views
and `.data`, keep lists of parameters, call compound functions like `orthogonal_`, and write into child modules. (Two simpler
designs lose writes: in-place operators on the DTensors lose those through views; full tensors that are freed when another
parameter is accessed lose those through kept references.)
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
OVERWRITES = {  # operators that write their first argument without reading it, so that it need not be gathered
    aten.normal_.default, aten.uniform_.default, aten.zero_.default, aten.fill_.Scalar, aten.fill_.Tensor,
    aten.copy_.default, aten.bernoulli_.float, aten.exponential_.default, aten.random_.default,
    getattr(aten.random_, "from"), aten.log_normal_.default, aten.cauchy_.default, aten.eye.out, aten.eye.m_out,
}  # fmt: skip
# Operators that return a view of all elements: overwriting the view overwrites the parameter.
VIEWS = {aten.detach.default, aten.alias.default, aten.view.default, aten.t.default, aten.transpose.int}


class Full:
    """A full parameter, `tensor`, whose storage has memory only while an operator uses it. `writes_shard`: True if values that
    are written into `tensor` go to the shard, False if they are dropped. `filled`: True while the memory has values."""

    __slots__ = ("data", "filled", "num_bytes", "param", "storage", "tensor", "writes_shard")

    def __init__(self, param: Param, device: torch.device, writes_shard: bool) -> None:
        self.param, self.writes_shard, self.filled = param, writes_shard, False
        self.data = torch.empty(param.sharded.shape, dtype=param.dtype, device=device)
        self.storage = self.data.untyped_storage()
        self.num_bytes = self.storage.nbytes()
        self.tensor = nn.Parameter(self.data, requires_grad=param.sharded.requires_grad)
        self.storage.resize_(0)

    def take(self, value: Tensor) -> None:
        """Write this rank's rows of `value`, a full tensor, to the shard. Does nothing if `writes_shard` is False."""
        if self.writes_shard:
            _torch.local_of(self.param.sharded).copy_(own_part(value, self.param))


class Fulls(_torch.DispatchMode):
    """Dispatch mode of `init_mode` that gives memory to full tensors while an operator uses them. `replace` registers full
    tensors. Before an operator runs, those among its arguments get memory, filled from the shards if the operator reads them
    (collective). Those of earlier operators are written to the shards and freed."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self.all: list[Full] = []
        self._by_storage: dict[int, Full] = {}
        self._places: dict[int, list[tuple[nn.Module, str, Full]]] = {}
        self._open: list[Full] = []
        self.written: set[int] = set()  # ids of the storages that an operator wrote

    def replace(self, param: Param, places: Iterable[tuple[nn.Module, str]], writes_shard: bool) -> None:
        """Register a new `Full` in place of the shard of `param` at `places` (module, attribute). Values written into it go to
        the shard or, without `writes_shard`, are dropped."""
        full = Full(param, self._device, writes_shard)
        self.all.append(full)
        self._by_storage[id(full.storage)] = full
        for module, attr in places:
            self._places.setdefault(id(module), []).append((module, attr, full))
            module._parameters[attr] = full.tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        storages = [t.untyped_storage() for t in _plain_tensors((args, kwargs))]
        if _torch.mutates(func):
            self.written.update(id(t.untyped_storage()) for t in _plain_tensors((args[:1], kwargs)))
        used = [self._by_storage[id(s)] for s in storages if id(s) in self._by_storage]
        if used:
            self.close(used)
        for full in dict.fromkeys(used):
            if full not in self._open:
                full.storage.resize_(full.num_bytes)
                self._open.append(full)
            if full.filled or func in VIEWS:
                continue
            if func not in OVERWRITES or len(used) > 1 or storages[0] is not full.storage:
                gather_into(full.data, full.param)
            full.filled = True
        return func(*args, **(kwargs or {}))

    def close(self, but: Iterable[Full] = ()) -> None:
        """Write all full tensors with memory, except those in `but`, to the shards; free the memory unless numpy shares it."""
        for full in [full for full in self._open if full not in but]:
            if full.filled:
                full.take(full.data)
            if full.storage.resizable():
                full.storage.resize_(0)
                full.filled = False
                self._open.remove(full)

    def settle(self, module: nn.Module) -> None:
        """Write values that an init assigned in `module` (`weight.data = ...`, `weight = Parameter(...)`) to the shards; show
        the full tensor again. Raise `UsageError` if a parameter is gone, has another shape, or is tied and was replaced."""
        for _, attr, full in self._places.get(id(module), []):
            assigned = module._parameters.get(attr)
            storage = None if assigned is None else assigned.untyped_storage()
            if assigned is full.tensor and storage is full.storage:
                continue
            tied = sum(full is other for _, _, other in self.places()) > 1
            fits = assigned is not None and assigned.shape == full.data.shape and id(storage) not in self._by_storage
            if assigned is None or not fits or (assigned is not full.tensor and tied):
                raise UsageError(
                    f"init put {'nothing' if assigned is None else f'another parameter of shape {tuple(assigned.shape)}'} in "
                    f"place of {full.param.name!r} of shape {tuple(full.data.shape)}; fill it in place, and tie or drop before "
                    "shard()."
                )
            full.take(assigned.detach())
            self.written.add(id(full.storage))
            full.storage.resize_(full.num_bytes)
            full.tensor.data = full.data  # back to its own storage, without a value
            full.storage.resize_(0)
            full.filled = False
            module._parameters[attr] = full.tensor
            if full in self._open:
                self._open.remove(full)

    def places(self) -> list[tuple[nn.Module, str, Full]]:
        """Return (module, attribute, full tensor) for each registered full tensor, several times for a tied one."""
        return [place for places in self._places.values() for place in places]

    def restore(self) -> None:
        """Register the shards in the modules again, in place of the full tensors."""
        for module, attr, full in self.places():
            module._parameters[attr] = full.param.sharded

    def unwritten(self) -> list[Param]:
        """Return the parameters that nothing was written into, except those whose values are dropped."""
        candidates = [full for full in self.all if full.writes_shard]
        return [full.param for full in candidates if id(full.storage) not in self.written]


@contextmanager
def init_mode(
    model: nn.Module, *, only: Collection[int] | None = None, drafts: Iterable[tuple[nn.Module, str]] = ()
) -> Iterator[Fulls]:
    """Context manager that yields `Fulls`: inside, parameters are plain full tensors, and writes into them reach the shards.

    Collective; every rank must write the same values. `only`: ids of the sharded parameters that are written, None for all;
    values for others are dropped. `drafts`: places (module, attribute) of tied parameters that get a separate full tensor,
    whose values are dropped, as on one device if an init ties later. Raises `UsageError` inside `full_params` or another
    `init_mode`, and at the end if a parameter was removed or replaced by one of another shape, or a tied one was replaced.
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
            shared = [(m, a) for m, a in places if (id(m), a) not in drafted] or places
            fulls.replace(param, shared, only is None or id(param.sharded) in only)
            for place in places:
                if place not in shared:
                    fulls.replace(param, [place], writes_shard=False)
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
    """Fill the contiguous full tensor `full` from the shards of all ranks in place. Collective."""
    full.zero_()  # each element is zero on all ranks but its owner, so a sum of the bits as integers is the value
    own_part(full, param).copy_(_torch.local_of(param.sharded))
    over = [] if param.cut.dim is None else list(param.context.cut_communicators)
    over += [] if param.around is None else param.around.communicators
    if full.numel():
        reduced(full.view(-1).view(torch.int32 if full.nbytes % 4 == 0 else torch.uint8), over)


def _plain_tensors(tree: Any) -> Iterator[Tensor]:
    """Yield the strided tensors in `tree`, the arguments of an operator, except DTensors."""
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor) and not isinstance(leaf, DTensor) and leaf.layout is torch.strided:
            yield leaf
