"""Parameters that are tensor subclasses with their own all-gather, after the contract of torch's FSDP2.

`fsdp_pre_all_gather(mesh, outer_size, outer_stride, module, mp_policy) -> (tensors, metadata)` returns what this rank sends;
`fsdp_post_all_gather(gathered, metadata, param_dtype, *, out=None) -> (full, inner tensors)` makes what modules see.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from accordion import _torch
from accordion.config import Place, Precision, Strategy
from accordion.engine.communicator import carried
from accordion.engine.context import ShardingContext
from accordion.engine.group import Group, GroupPlan
from accordion.engine.layout import Cut, message
from accordion.engine.params import Param
from accordion.engine.shards import ShardBuffer
from accordion.engine.streams import Steps, Transfer
from accordion.errors import UsageError
from accordion.units import Owned

PRE, POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"


def is_extended(param: Tensor) -> bool:
    """Return True if a parameter, or its local tensor, defines its own all-gather, `fsdp_pre_all_gather`."""
    tensor = _torch.local_of(param) if isinstance(param, DTensor) else param
    return hasattr(tensor, PRE)


def check_tensor(name: str, tensor: Tensor, *, offloads: bool) -> None:
    """Raise `UsageError` for a tensor subclass that does not define both `fsdp_pre_all_gather` and `fsdp_post_all_gather`, or
    that would be offloaded (`offloads`). Plain tensors pass. `name`: the parameter's name, for errors."""
    kind = type(tensor.data)
    if hasattr(tensor, PRE) and hasattr(tensor, POST):
        if offloads:
            raise UsageError(
                f"parameter {name!r} is a {kind.__name__}, which defines its own all-gather, and such tensors are not offloaded; "
                "shard their modules without an offload policy."
            )
        return
    if hasattr(tensor, PRE) or hasattr(tensor, POST):
        raise UsageError(f"parameter {name!r} is a {kind.__name__} that has only one of {PRE} and {POST}; define both.")
    if not _torch.is_plain(tensor):
        raise UsageError(
            f"parameter {name!r} is a {kind.__name__}, a tensor subclass without {PRE} and {POST}, which gather its "
            "rows; define them, pass it in ignored_params, or make it an ordinary tensor."
        )


def check_extended(owned: Sequence[Owned], strategy: Strategy, *, offloads: bool, sync: bool) -> None:
    """Raise `UsageError` for a parameter that is a tensor subclass and cannot be sharded: without the methods of FSDP2, on the
    meta device, with `offloads` or `sync`, or with a strategy that keeps full copies or cuts rows twice."""
    for o in owned:
        if _torch.is_plain(o.original):
            continue
        name, kind = o.names[0], type(o.original.data).__name__
        check_tensor(name, o.original, offloads=offloads)
        if strategy.params is Place.REPLICATE or strategy.optim_over_replicas or strategy.optim is Place.REPLICATE:
            raise UsageError(
                f"parameter {name!r} is a {kind}, which defines its own all-gather, and {strategy.name} keeps full copies or "
                "cuts rows twice; use FULL_SHARD, SHARD_GRAD_OP or HYBRID_SHARD."
            )
        if sync or o.original.is_meta:
            on_meta = "it is on the meta device, where its rows have no values"
            problem = "sync=True sends plain tensors only" if sync else on_meta
            raise UsageError(f"parameter {name!r} is a {kind}, and {problem}; build it with its values on every rank.")


def extended_rows(tensor: Tensor, c: Cut, rank: int, device: torch.device) -> Tensor:
    """Return a copy on `device` of the rows of `rank` of `tensor`, a tensor subclass; `tensor.to(device)` if `c` shards no dim.
    Uses only operators that torch's FSDP2 also requires of a subclass: to, chunk, new_zeros, narrow, copy_."""
    tensor = tensor.to(device)
    if c.dim is None:
        return tensor
    chunks = torch.chunk(tensor, c.num_ranks, dim=c.dim)
    padded, num_rows = tensor.new_zeros(chunks[0].size()), c.rows_of(rank)
    if num_rows:
        padded.narrow(c.dim, 0, num_rows).copy_(chunks[rank])
    return padded.narrow(c.dim, 0, num_rows)


def rows_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh of the ranks that have different rows: the last axis of `mesh`."""
    if mesh.ndim == 1:
        return mesh
    names = mesh.mesh_dim_names
    return mesh[names[-1]] if names else DeviceMesh.from_group(mesh.get_group(mesh.ndim - 1), mesh.device_type)


def extended_groups(
    params_of_unit: Sequence[tuple[Owned, Cut]],
    precision: Precision,
    context: ShardingContext,
    place: tuple[int, str],
    mesh: DeviceMesh,
    policy: Any,
) -> list[Group]:
    """Return the groups, one per compute dtype, of a unit's parameters that are tensor subclasses, already sharded over `mesh`.
    `place`: index and name of the unit. `policy`: `mp_policy` of the all-gather methods; None: made from `precision`."""
    if policy is None and params_of_unit:
        policy = MixedPrecisionPolicy(precision.params, precision.reduce, precision.output, precision.cast_inputs)
    by_dtype: dict[torch.dtype, list[SubclassParam]] = {}
    for o, c in params_of_unit:
        local = _torch.local_of(o.original)
        was_set, asked = _torch.asked_grad_dtype(o.original)
        param = Param(o.names[0], o.places, c, local.dtype, o.original.requires_grad, asked if was_set else local.dtype)
        param.sharded = o.original
        dtype = precision.compute_dtype(local.dtype)
        subclass_param = SubclassParam(param, dtype, context, mesh, policy)
        param.extension = subclass_param.shown
        by_dtype.setdefault(dtype, []).append(subclass_param)
    return [_SubclassGroup(context, members, precision, dtype, place) for dtype, members in by_dtype.items()]


class SubclassParam:
    """One parameter that is a tensor subclass. For each gather, `_SubclassGroup` calls `begin`, gathers the returned tensors
    into `gathered`, and calls `end`, which makes `seen`, the tensor for modules. `shown` links `seen` to autograd's graph."""

    def __init__(
        self, param: Param, dtype: torch.dtype, context: ShardingContext, mesh: DeviceMesh, policy: Any
    ) -> None:
        self.param, self._dtype, self._context, self._mesh, self._policy = param, dtype, context, mesh, policy
        self._sizes: list[torch.Size] = []
        self.gathered: list[Tensor] = []
        self.inner: tuple[Tensor, ...] = ()
        self.seen: nn.Parameter | None = None
        # Represents the parameter in the graph: its shape and dtype, without memory.
        self.view = torch.zeros((), dtype=dtype, device=context.device).expand(param.cut.shape)

    @property
    def local(self) -> Any:
        return _torch.local_of(self.param.sharded)

    def begin(self) -> tuple[list[Tensor], Any]:
        """Allocate `gathered`, the receive buffers; return the 1-D tensors that this rank sends, and the metadata for `end`."""
        pre, c = self.local.fsdp_pre_all_gather, self.param.cut
        if len(inspect.signature(pre).parameters) == 1:  # the older of torch's two signatures
            tensors, metadata = pre(self._mesh)
        else:
            stride = torch.empty(c.shape, device="meta").stride()
            module = self.param.places[0][0]()
            tensors, metadata = pre(self._mesh, torch.Size(c.shape), stride, module, self._policy)
        tensors = [_sent(t, c) for t in tensors]
        self._sizes, num = [t.size() for t in tensors], self._context.shard.num_ranks
        if not self.gathered:
            self.gathered = [t.new_empty(t.numel() * num) for t in tensors]
        for full in (*self.gathered, *self.inner):
            storage, num_bytes = full.untyped_storage(), full.numel() * full.itemsize
            if storage.nbytes() != num_bytes:
                storage.resize_(num_bytes)
        return [t.reshape(-1) for t in tensors], metadata

    def end(self, metadata: Any) -> None:
        """Let the subclass make `seen`, the tensor that modules see, of `gathered`; later calls write into the same tensor."""
        outs = tuple(full.view(-1, *size[1:]) for full, size in zip(self.gathered, self._sizes, strict=True))
        if self.seen is not None:
            self.local.fsdp_post_all_gather(outs, metadata, self._dtype, out=self.seen)
            return
        shape = self.param.cut.shape
        full, self.inner = self.local.fsdp_post_all_gather(outs, metadata, self._dtype)
        full = full.as_strided(shape, torch.empty(shape, device="meta").stride(), 0)
        self.seen = nn.Parameter(full, requires_grad=False)

    def shown(self, view: Tensor) -> Tensor:
        """Return the tensor that modules see, connected to `view`, which represents the parameter in autograd's graph."""
        return _Shown.apply(view, self)  # type: ignore[no-untyped-call, no-any-return]


def _sent(tensor: Tensor, c: Cut) -> Tensor:
    """Return `tensor` as a plain tensor. If it has this rank's rows of the parameter, cut on dim 0, and other ranks have more
    rows, pad it with rows of zeros to equal size. Tensors of another shape are not padded."""
    if not _torch.is_plain(tensor):
        tensor = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
    short = 0 if c.dim is None or not tensor.dim() else c.chunk - tensor.shape[0]
    is_rows = c.dim == 0 and c.rows % c.num_ranks and short > 0 and tensor.shape[1:] == torch.Size(c.shape[1:])
    return torch.cat([tensor, tensor.new_zeros(short, *tensor.shape[1:])]) if is_rows else tensor


class _Shown(torch.autograd.Function):
    """Autograd function that returns the subclass's tensor in place of `view`, and passes the gradient on to `view`."""

    @staticmethod
    def forward(ctx: Any, view: Tensor, subclass_param: SubclassParam) -> Tensor:
        assert subclass_param.seen is not None, "the parameter has been gathered"
        return subclass_param.seen.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


class _SubclassGather(Transfer):
    """A gather whose `land` makes the compute stream wait for the end, and then calls `then()`, which its maker sets."""

    __slots__ = ("then",)
    then: Callable[[], None]

    def land(self) -> None:
        super().land()
        self.then()


class _SubclassBuffers:
    """The memory of a group's full subclass parameters: gathered tensors, and inner tensors made of them. `close` frees it."""

    def __init__(self, subclass_params: list[SubclassParam]) -> None:
        self._params, self.views = subclass_params, [e.view for e in subclass_params]
        self.flat = torch.empty(0, device="cpu")  # its version never changes: subclasses do not count writes

    @property
    def num_bytes(self) -> int:
        return sum(full.numel() * full.itemsize for e in self._params for full in e.gathered)

    @property
    def storage_keys(self) -> list[int]:
        return [_torch.storage_key(full.untyped_storage()) for e in self._params for full in (*e.gathered, *e.inner)]

    def close(self) -> None:
        for full in [full for e in self._params for full in (*e.gathered, *e.inner)]:
            full.untyped_storage().resize_(0)


class _SubclassGroup(Group):
    """A group of subclass parameters of one compute dtype. Their own methods gather them; the engine reduces gradients."""

    def __init__(
        self,
        context: ShardingContext,
        subclass_params: list[SubclassParam],
        precision: Precision,
        dtype: torch.dtype,
        place: tuple[int, str],
    ) -> None:
        planned = GroupPlan([e.param for e in subclass_params], dtype, precision.reduce_dtype(dtype))
        super().__init__(context, planned, place)
        self._params = subclass_params
        self.message = message([e.param.cut for e in subclass_params], dtype.itemsize, num_flags=1)
        self.shard_buffer = ShardBuffer()  # the rows are separate tensors
        self.shard_buffer.dtype = self.shard_buffer.pack_row = None
        self.shard_buffer.padded, self.shard_buffer.flats = [], []
        self.shard_buffer.locals = [e.local for e in subclass_params]
        self.shard_buffer.tag = torch.zeros(1, device="cpu")
        self.full_buffer = _SubclassBuffers(subclass_params)
        self.views = self.full_buffer.views

    def gather(self) -> Transfer | None:
        self.filled, axis = self.version(), self.context.shard
        with torch.no_grad():
            begun = [e.begin() for e in self._params]
        # `data` has its own version counter: a graph may have saved a subclass that shares the gathered memory.
        pairs = [
            (full.data, part)
            for e, (sent, _) in zip(self._params, begun, strict=True)
            for full, part in zip(e.gathered, sent, strict=True)
        ]

        def steps() -> Steps:
            if axis.num_ranks == 1:
                for full, sent in pairs:
                    full.copy_(sent)
            else:
                yield axis.gather.gather([carried(full) for full, _ in pairs], [carried(sent) for _, sent in pairs])

        def end() -> None:
            with torch.no_grad():
                for e, (_, metadata) in zip(self._params, begun, strict=True):
                    e.end(metadata)

        transfer = _SubclassGather(self.context.gather_stream, steps(), [pairs], f"gathers {self.place}")
        transfer.then = end
        transfer.begin()
        return transfer

    def landed(self) -> None:
        """Do nothing: subclasses may use the gathered memory until the unit is resharded."""
