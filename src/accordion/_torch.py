"""Every private or version-dependent torch name that the package uses, with the reason. Read for torch 2.11 to 2.15.

"No public name" means that torch has no public name for what a function does.
"""

from __future__ import annotations

import copy
import ctypes
import logging
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import cache, partial, wraps
from itertools import compress
from operator import attrgetter
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

_c10d = torch._C._distributed_c10d

# The fast path in C++, if this version has one.
_new_dtensor: Any = getattr(torch.Tensor, "_dtensor__new__", DTensor.__new__)

StridedShard = _StridedShard
"""Placement of rows sharded by a later mesh axis first; used if an optimizer is sharded over replicas too (all versions)."""

current_graph_task: Callable[[], int] = torch._C._current_graph_task_id
"""Return the id of the backward that runs on this thread, `NO_BACKWARD` outside of one. No public name."""

NO_BACKWARD = -1
"""Result of `current_graph_task` outside of a backward."""


def is_in_backward() -> bool:
    """Return True if autograd runs a backward on this thread."""
    return current_graph_task() != NO_BACKWARD


will_execute: Callable[[Any], bool] = torch._C._will_engine_execute_node
"""Return True if the running backward will reach a node. torch's own multi-grad hooks use it; no public name."""


def walks_everything(leaf: Tensor) -> bool:
    """Return True if the running backward computes all gradients: it has no `inputs`, and is not `autograd.grad`.

    `leaf`: a leaf of the graph that no caller names in `inputs`, so the engine executes its node only in a full backward.
    """
    return will_execute(torch.autograd.graph.get_gradient_edge(leaf).node)


def saving_hook() -> Callable[[Tensor], Any] | None:
    """Return the innermost active pack hook of `saved_tensors_hooks`; None without one. No public name."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return None if hooks is None else hooks[0]


def on_gradient(tensor: Tensor, function: Callable[[Tensor], Tensor | None]) -> None:
    """Register a permanent hook on the gradient of `tensor`; without torch's handle it takes 3.5 us instead of 7.8."""
    if tensor.grad_fn is None or tensor._backward_hooks is not None:
        tensor.register_hook(function)
        return
    # An OrderedDict, as in torch: handles of hooks that are registered later refer to it weakly. Their ids are not negative.
    tensor._backward_hooks = OrderedDict({-1: function})
    tensor.grad_fn._register_hook_dict(tensor)


def node_of(tensor: Tensor) -> Any:
    """Return the autograd node that receives the gradient of `tensor`: its `grad_fn`, or the AccumulateGrad of a leaf."""
    return tensor.grad_fn or torch.autograd.graph.get_gradient_edge(tensor).node


def reserve_number() -> int:
    """Return an unused sequence number for an autograd node of this thread, for `set_number`. No public names.

    autograd runs the ready node with the highest number first. Creating a node increments the number.
    """
    number = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
    torch._C._functions.UndefinedGrad()
    return int(number)


def set_number(tensor: Tensor, number: int) -> None:
    """Set the sequence number of the node of `tensor`, which must not be waiting to run. No public name."""
    assert tensor.grad_fn is not None
    tensor.grad_fn._set_sequence_nr(number)  # type: ignore[attr-defined]


def queue_callback(function: Callable[[], None]) -> None:
    """Call `function` after the running backward has ended without an error. No public name."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def local_of(tensor: Tensor) -> Tensor:
    """Return the local tensor of a DTensor without the autograd function of `to_local` (0.05 instead of 96 us for nine)."""
    return tensor._local_tensor  # type: ignore[attr-defined, no-any-return]


_version, _local = attrgetter("_version"), attrgetter("_local_tensor")


plain_attributes = torch._C.DisableTorchFunctionSubclass
"""Context manager for fast reads of DTensor attributes: without it, each read looks for a `__torch_function__` that does
nothing, which takes 1.6 thousand instructions. Documented by torch, though it has no public name."""


def versions_of(tensors: Sequence[Tensor]) -> int:
    """Return the sum of the version counters of DTensors and of their local tensors, which autograd counts separately."""
    with plain_attributes():
        return int(sum(map(_version, tensors)) + sum(map(_version, map(_local, tensors))))


def own_versions_of(tensors: Sequence[Tensor]) -> int:
    """Return the sum of the version counters of DTensors, without writes to local tensors (as by offloaded steps)."""
    with plain_attributes():
        return int(sum(map(_version, tensors)))


def set_local(tensor: Tensor, local: Tensor) -> None:
    """Set the local tensor of a DTensor, which stays the same object for optimizers, as in torch's FSDP2. No public name."""
    tensor._local_tensor = local  # type: ignore[attr-defined]


def as_dtensor(local: Tensor, like: Tensor) -> DTensor:
    """Return a DTensor of `local` with the placement of `like`, without checks: 1.3 us; `DTensor.from_local` takes 55."""
    return _new_dtensor(DTensor, local, like._spec, requires_grad=False)  # type: ignore[attr-defined, no-any-return]


def as_dtensors(rows: Sequence[Tensor | None], like: Sequence[Tensor]) -> list[DTensor | None]:
    """Return `as_dtensor(row, like)` for each pair of a local tensor and a `like`; None for a row that is None."""
    new, kind = _new_dtensor, DTensor
    pairs = zip(rows, like, strict=True)
    return [None if x is None else new(kind, x, p._spec, requires_grad=False) for x, p in pairs]  # type: ignore[attr-defined]


# Documented by torch as a beta interface. One call, and on an accelerator one kernel, for many tensors.
foreach_add_, foreach_copy_, foreach_mul_ = torch._foreach_add_, torch._foreach_copy_, torch._foreach_mul_
foreach_norm = torch._foreach_norm


def chunk_cat(tensors: Sequence[Tensor], num_chunks: int, out: Tensor) -> None:
    """Write the r-th chunk along dim 0 of each tensor, padded and cast, one after the other into row r of `out`."""
    torch._chunk_cat(list(tensors), 0, num_chunks, out=out)  # out: (num_chunks, n)


def marks_of(param: Tensor) -> dict[str, Any]:
    """Return the attributes that users and libraries set on `param`; `_is_param` is torch's mark of a DTensor parameter."""
    return {name: value for name, value in vars(param).items() if name != "_is_param"}


def hand_over_hooks(old: Tensor, new: Tensor) -> None:
    """Have the hooks of leaf `old` run for `new`; both share the mappings, so that handles still remove hooks.

    `register_hook` and `register_post_accumulate_grad_hook` set these attributes too. No public names.
    """
    if old._backward_hooks is not None:
        new._backward_hooks = old._backward_hooks
    if old._post_accumulate_grad_hooks is not None:
        new._post_accumulate_grad_hooks = old._post_accumulate_grad_hooks


def has_hooks(leaf: Tensor) -> bool:
    """Return True if a leaf has hooks that `hand_over_hooks` would pass to another leaf."""
    return bool(leaf._backward_hooks or leaf._post_accumulate_grad_hooks)


_grad, _trains = attrgetter("grad"), attrgetter("requires_grad")


def grads_of(leaves: Sequence[Tensor]) -> tuple[list[Tensor | None], list[bool]]:
    """Return (gradient of each leaf, a flag for each leaf that has hooks or is frozen, so that autograd must accumulate)."""
    with plain_attributes():
        hooked = [bool(x._backward_hooks or x._post_accumulate_grad_hooks or not x.requires_grad) for x in leaves]
        return list(map(_grad, leaves)), hooked


def which_train(leaves: Sequence[Tensor]) -> tuple[int, ...]:
    """Return the indices of the leaves that require gradients."""
    with plain_attributes():
        return tuple(compress(range(len(leaves)), map(_trains, leaves)))


def storages_of(tensors: Sequence[Tensor]) -> list[torch.UntypedStorage]:
    """Return the storage of each DTensor itself, not of its local tensor; it has no memory. No Python call for each.

    `p.data = x` gives `p` the storage of `x` and does not change the local tensor of `p` (all versions). While there is a
    reference to a storage, torch returns the same Python object for it.
    """
    with plain_attributes():
        return list(map(Tensor.untyped_storage, tensors))


def transforms_active() -> bool:
    """Return True in a transform of torch.func or under `make_fx`, which `linearize` uses. No public names (all versions)."""
    proxies = torch._C._TorchDispatchModeKey.PROXY
    return torch._C._are_functorch_transforms_active() or torch._C._get_dispatch_mode(proxies) is not None


def is_batched(tensor: Tensor) -> bool:
    """Return True for a tensor of a transform of torch.func, or of a backward with `is_grads_batched`. No public names."""
    functorch = torch._C._functorch
    return functorch.is_legacy_batchedtensor(tensor) or functorch.is_functorch_wrapped_tensor(tensor)


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Call `function.apply(*args)` without support for transforms of torch.func, which may not be active: 12 instead of 21 us.

    Only the Python override of the method is public; the one in C takes the same arguments (all versions).
    """
    return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]


def run_at_once(function: type[torch.autograd.Function]) -> type[torch.autograd.Function]:
    """Decorator that has autograd call `function.backward` directly, without torch's lookups. No public name."""
    function._backward_cls.apply = function.backward  # type: ignore[attr-defined]
    return function


def unseen_by_dynamo(function: Callable[..., Any]) -> Callable[..., Any]:
    """Disable Dynamo for `function` as `torch.compiler.disable` does, without its eager cost of 10 us per unit and step."""
    from torch._C._dynamo.eval_frame import get_eval_frame_callback
    from torch._dynamo.eval_frame import skip_code

    disabled = torch.compiler.disable(function)

    def called(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if get_eval_frame_callback() is None else disabled(*args, **kwargs)

    skip_code(called.__code__)
    vars(called).update(vars(disabled))  # the marks with which Dynamo skips a function
    return called


def has_rule(operator: Any) -> bool:
    """Return True if DTensor has a sharding rule for `operator`. No public name."""
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    rules = (propagator.op_strategy_funcs, propagator.op_single_dim_strategy_funcs, propagator.op_to_rules)
    return any(operator in table for table in rules)


DDP_LEAVES_OUT = "_ddp_params_and_buffers_to_ignore"
"""Attribute of a module that DistributedDataParallel reads before anything else. No public name (2.11 to 2.15)."""


def answer_operator(operator: Any, answer: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> bool:
    """Register `answer(operator, args, kwargs)` as the handler of an operator on DTensors.

    Returns False, and changes nothing, if there is another handler. No public name.
    """
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    return handlers.setdefault(operator, answer) is answer


def unanswered(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call an operator on DTensors without its handler. No public name."""
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    handler = handlers.pop(operator, None)
    try:
        return operator(*args, **kwargs)
    finally:
        if handler is not None:
            handlers[operator] = handler


def base_of(tensor: Tensor) -> Tensor | None:
    """Return the tensor of which `tensor` is a view, according to autograd; None if it is no view."""
    return tensor._base


def settle_before_unscale() -> None:
    """Make `torch.amp.GradScaler.unscale_` correct for gradients offloaded to the host; further calls change nothing.

    torch copies the scale to pinned memory without waiting, and the CPU kernel reads it at once (2.11 to 2.15), so gradients
    are multiplied by a random value. The handler that this registers waits for the copy before the kernel.
    """
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    operator = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
    handler = handlers[operator]
    if getattr(handler, "func", None) is not _unscale_settled:
        handlers[operator] = partial(_unscale_settled, handler)


def _unscale_settled(unscale: Callable[..., Any], operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # `args`: gradients, overflow flag and scale; the last two are on the device of the gradients' local tensors. Only offloaded
    # gradients have local tensors on the host and a mesh of accelerators.
    grads: Sequence[DTensor] = args[0]
    if args[2].device.type == "cpu" and any(grad.device_mesh.device_type != "cpu" for grad in grads):
        torch.accelerator.current_stream().synchronize()
    return unscale(operator, args, kwargs)


def post_accumulate_hooks(param: Tensor) -> list[Callable[[Tensor], None]]:
    """Return the hooks of `register_post_accumulate_grad_hook`, to call them if autograd does not accumulate the gradient."""
    return list((param._post_accumulate_grad_hooks or {}).values())


def are_ours(grads: Sequence[Tensor | None]) -> list[bool]:
    """Return, for each gradient, True if nobody else has a reference to its memory. Call it first in a Function's backward.

    autograd may pass one tensor to several nodes (`x + w`) or keep it for a later node, and hooks may have stored it. The
    reference counts of the Python object, the tensor and the storage show that, as in autograd's own `AccumulateGrad`, which
    steals or clones. A count that is too high costs a copy.
    """
    return [_references(grads, i) in _alone() for i in range(len(grads))]


def _references(grads: Sequence[Tensor | None], i: int) -> tuple[int, ...]:
    grad = grads[i]
    if grad is None or grad.layout != torch.strided:
        return ()
    base = grad._base  # a view refers to its base: the gradient of nn.Linear is the transpose of a product
    of_base = () if base is None else (sys.getrefcount(base), base._use_count())  # type: ignore[attr-defined]
    storage = torch._C._storage_Use_Count(grad.untyped_storage()._cdata)
    return sys.getrefcount(grad), grad._use_count(), storage, *of_base  # type: ignore[attr-defined]


@cache
def _alone() -> list[tuple[int, ...]]:
    """Return the reference counts of unshared gradients, measured for a plain one and a view, since versions differ."""
    counts: list[tuple[int, ...]] = []

    @run_at_once  # as in the callers, since torch's code between autograd and `backward` has references too
    class Counts(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
            return tuple(x.detach() for x in inputs)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            counts.extend([_references(grads, i) for i in range(len(grads))])
            return grads

    with torch.enable_grad():
        both = [torch.ones(1, 1, requires_grad=True, device="cpu") for _ in range(2)]
        plain, viewed = Counts.apply(*both)  # type: ignore[no-untyped-call]
        (plain * 2 + viewed.t() * 2).backward()
    return counts


def holders_of_memory(tensor: Tensor) -> int:
    """Return the reference count of the tensor's storage, to be compared with a later count of it. No public name."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def default_store() -> Any:
    """Return the key-value store of this job's process group. No public name."""
    return torch.distributed.distributed_c10d._get_default_store()


def _options(kind: Any, async_op: bool) -> Any:
    # `asyncOp=False` keeps NCCL on the current stream instead of its internal one.
    options = kind()
    options.asyncOp = async_op
    return options


# Each returns new options of a collective, given `async_op`. Reductions sum.
gather_options: Callable[[bool], Any] = partial(_options, _c10d.AllgatherOptions)
exchange_options: Callable[[bool], Any] = partial(_options, _c10d.AllToAllOptions)
reduce_scatter_options: Callable[[bool], Any] = partial(_options, _c10d.ReduceScatterOptions)
all_reduce_options: Callable[[bool], Any] = partial(_options, _c10d.AllreduceOptions)


def checks_groups() -> bool:
    """Return True under TORCH_DISTRIBUTED_DEBUG=DETAIL, with which torch wraps backends to compare the ranks' calls."""
    return bool(_c10d.get_debug_level() == _c10d.DebugLevel.DETAIL)


BEFORE_2_13 = {
    "all_gather_single": "_allgather_base",
    "all_to_all_single": "alltoall_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
}
"""Methods of process groups, and their names in torch 2.11 and 2.12; groups written in Python may have either name."""


def collective(group: Any, name: str) -> Callable[..., Any]:
    """Return the method of a process group that is called `name` since torch 2.13."""
    return getattr(group, name, None) or getattr(group, BEFORE_2_13[name])  # type: ignore[no-any-return]


def options_of(group: Any, device: torch.device) -> tuple[timedelta | None, Any]:
    """Return (timeout, new options) of the backend of `group` for `device`; the options copy what a caller may set for NCCL.

    Each is None if the backend has none. No public names: only NCCL's and gloo's `options` are public (2.11 to 2.13).
    """
    try:
        backend = group._get_backend(device)
        options = getattr(backend, "wrapped_pg", backend).options
    except (AttributeError, RuntimeError):  # the latter from C++
        return None, None
    fresh, nccl = None, getattr(torch.distributed, "ProcessGroupNCCL", None)
    if nccl is not None and isinstance(options, nccl.Options):
        fresh = nccl.Options()  # a copy would name the communicator from which it was split
        for name in ("is_high_priority_stream", "config"):
            if hasattr(options, name):
                setattr(fresh, name, getattr(options, name))
        fresh._timeout = options._timeout
    return getattr(options, "_timeout", None), fresh


def named_group(
    name: str, ranks: list[int], device: torch.device | None, timeout: timedelta | None = None, options: Any = None
) -> Any:
    """Return a new process group of `ranks`; only these ranks call this, with equal names. No public way (2.11 to 2.15).

    `new_group(use_local_synchronization=True)` derives the name from the number of groups that a rank knows. If ranks know
    different numbers (after one `new_group([0])`), each waits forever for the others under its own name. The group is
    not split from the job's communicator either, as torch does if `init_process_group` was given a device: all ranks of the
    job would have to take part. A job that is bound to a device allows groups of that device alone.
    """
    c10d: Any = torch.distributed.distributed_c10d
    device = c10d._get_default_group().bound_device_id or device
    plain = c10d._process_group_name, c10d._get_split_source
    c10d._process_group_name = lambda ranks, use_hashed_name: name
    c10d._get_split_source = lambda *_: None  # (group), since 2.15 (group, backend)
    try:
        return torch.distributed.new_group(
            ranks, timeout, pg_options=options, use_local_synchronization=True, device_id=device
        )
    finally:
        c10d._process_group_name, c10d._get_split_source = plain


def is_plain(tensor: Tensor) -> bool:
    """Return True if a tensor, or a parameter's data, is a plain `Tensor` or a fake tensor, not another subclass."""
    return type(tensor.data) is Tensor or isinstance(tensor.data, _fake.FakeTensor)


def inner_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the plain tensors inside a tensor subclass that has `__tensor_flatten__`; yield a plain tensor itself."""
    if is_plain(tensor):
        yield tensor.detach()
    elif hasattr(tensor.data, "__tensor_flatten__"):
        for name in tensor.data.__tensor_flatten__()[0]:
            yield from inner_tensors(getattr(tensor.data, name))


def keep_with_job(name: str, thing: Any) -> None:
    """Keep a reference to `thing` until `destroy_process_group`.

    The reference is among torch's tags of groups (no public name, 2.11 to 2.15), since C++ groups take no attributes.
    """
    torch.distributed.distributed_c10d._world.tags_to_pg[name] = [thing]


def kept_with_job(name: str) -> list[Any]:
    """Return the things that `keep_with_job` keeps under names that begin with `name`."""
    tags = torch.distributed.distributed_c10d._world.tags_to_pg
    return [thing for tag, things in list(tags.items()) if tag.startswith(name) for thing in things]


def abandon_works(group: Any, works: list[Any]) -> None:
    """Keep references to unfinished gloo works that nobody will wait for, and to their group, which is never destroyed.

    Deleting a send or receive closes its connection, and the destructor of a group waits for its collectives up to the
    timeout, at exit too. No public switch; `abort` and `shutdown` of gloo's groups do not end them (2.11 to 2.15).
    """
    keep_with_job(f"accordion/abandoned/{id(works)}", works)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def backend_of(group: Any, device: torch.device) -> str:
    """Return the name of the backend of `group` for `device` ("nccl", "gloo", "fake", ...). No public name.

    A group written in Python may have no backends, such as the one with threads as ranks in torch's tests.
    """
    try:
        return str(group._get_backend(device).name()).lower()
    except RuntimeError:
        if type(group) is torch.distributed.ProcessGroup:
            raise
        return str(group.getBackendName()).lower()


def timeout_s_of_job() -> float:
    """Return the seconds after which a collective of the job's process group fails. No public name."""
    group: Any = torch.distributed.group.WORLD
    types = [] if group is None else group._device_types  # empty for a group written in Python
    options = getattr(group._get_backend(types[0]), "options", None) if types else None
    timeout = getattr(options, "_timeout", None) or torch.distributed.distributed_c10d.default_pg_timeout
    return float(timeout.total_seconds())


def ranks_of(mesh: Any) -> list[int]:
    """Return all ranks of `mesh` by their number in the job; works in a fake tensor mode too. No public name."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with unset_fake_temporarily():
        return [int(rank) for rank in mesh.mesh.flatten().tolist()]


def has_bf16(device: torch.device) -> bool:
    """Return True if the device multiplies bfloat16 without emulation, and for devices that cannot be asked."""
    is_supported = getattr(torch.get_device_module(device), "is_bf16_supported", None)
    if is_supported is None:
        return True
    return bool(is_supported(including_emulation=False) if device.type == "cuda" else is_supported())


def runtime_version(device_type: str) -> str | None:
    """Return the version of the runtime (CUDA, ROCm, XPU) that torch was built with; None if torch has none."""
    version = (torch.version.cuda or torch.version.hip) if device_type == "cuda" else None
    return version or getattr(torch.version, device_type, None)


def blocking_events(module: Any) -> Callable[[], Any]:
    """Return a factory of events on which a thread sleeps until they occur; its results are None if `module` has none."""
    try:
        module.Event(blocking=True)
    except TypeError:
        return lambda: None
    return partial(module.Event, blocking=True)


def sleep_on_device() -> None:
    """Keep the current stream of an NVIDIA or AMD device busy for about a millisecond; else do nothing. No public name."""
    if torch.cuda.is_available():
        torch.cuda._sleep(2_000_000)


ASSERT_BYTES = 250
"""CUDA's kernel gets the text by value and refuses 255 bytes (all versions)."""


def assert_on_device(condition: Tensor, text: str) -> None:
    """Stop the device if `condition` is false, with the first `ASSERT_BYTES` of `text`; the host continues. No public name."""
    torch._assert_async(condition, text.encode()[:ASSERT_BYTES].decode(errors="ignore"))


# -- for initialise.py

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

DispatchMode = TorchDispatchMode
"""Base class of modes that intercept every operator. No public name (all versions)."""


class EagerMode(TorchDispatchMode):
    """Base class of modes without torch's check for its compiler, which takes a tenth of their time; nothing is compiled under
    them. No public name (all versions)."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def mutates(func: Any) -> bool:
    """Return True if an operator of a dispatch mode writes into one of its arguments. No public name."""
    return bool(func._schema.is_mutable)


# -- for bench

PRELOADED = ["torch.distributed.tensor", "torch.distributed.fsdp", "torch._dynamo"]
"""Modules whose import takes seconds; none starts threads or looks for a device (all versions)."""


def storage_key(storage: torch.UntypedStorage) -> int:
    """Return a number that no other live storage has. No public name."""
    return int(storage._cdata)


def fake_store() -> Any:
    """Return a store for a process group in which only this rank exists; the import registers the backend "fake"."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def group_name(group: Any) -> str:
    """Return the name of a process group; C++ groups have it in an undocumented attribute (all versions)."""
    return str(group.group_name)


def name_of_group(group: Any) -> str:
    """Return the name under which torch registered a process group written in Python. No public name (all versions)."""
    return str(torch.distributed.distributed_c10d._world.pg_names[group])


# -- for compat/fsdp1


def is_wrap_policy(policy: object) -> bool:
    """Return True if `policy` is a policy object of torch.distributed.fsdp.wrap; their base class has no public name."""
    return callable(getattr(policy, "_run_policy", None))


def run_wrap_policy(policy: Any, root: Any, arguments: dict[str, Any]) -> dict[Any, dict[str, Any]]:
    """Return the modules that a policy object selects, each with the keyword arguments of its wrapper. No public name."""
    return dict(policy._run_policy(root, set(), arguments))


def classes_without_mixed_precision(mixed: Any) -> Sequence[type]:
    """Return the classes that FSDP's MixedPrecision leaves in float32, by default batch norms. No public name."""
    return tuple(getattr(mixed, "_module_classes_to_ignore", ()))


# -- for compat


def joined_mesh(*slices: Any) -> Any:
    """Return the mesh with the axes of all `slices`, as in torch's FSDP2; works in a fake tensor mode too. No public name."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with unset_fake_temporarily():
        return type(slices[0])._concatenate(list(slices))


def flattened_mesh(mesh: Any, name: str) -> Any:
    """Return `mesh` with its axes flattened into one, as torch's FSDP2 does; works in a fake tensor mode too. No public name."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with unset_fake_temporarily():
        return mesh._flatten(name)


def asked_grad_dtype(param: Tensor) -> tuple[bool, torch.dtype | None]:
    """Return (True if `grad_dtype` was set on a parameter, its value); the value None allows gradients of any dtype.

    Before torch 2.15, which records if it was set, the parameter's own dtype counts as not set.
    """
    dtype = param.grad_dtype
    was_set = getattr(param, "_has_grad_dtype_override", dtype != param.dtype)
    return bool(was_set), dtype


def keep_grad_dtype(old: Tensor, new: Tensor) -> None:
    """Copy `grad_dtype` from leaf `old` to leaf `new`, if it was set."""
    was_set, dtype = asked_grad_dtype(old)
    if was_set:
        new.grad_dtype = dtype


def like_in(like: Tensor, dtype: torch.dtype) -> DTensor:
    """Return a DTensor without memory, like `like` but of `dtype`, to pass to `as_dtensor` as its `like`. No public name."""
    spec = copy.copy(like._spec)  # type: ignore[attr-defined]
    spec.tensor_meta = spec.tensor_meta._replace(dtype=dtype)
    local = torch.empty(local_of(like).shape, dtype=dtype, device="meta")
    return _new_dtensor(DTensor, local, spec, requires_grad=False)  # type: ignore[no-any-return]


def pass_hooks_by(mode: Any) -> Any:
    """Set a mode of `create_selective_checkpoint_contexts` to hide its results from saved tensor hooks, and return it.

    This is the behaviour of all versions so far; torch 2.15 warns if it is not chosen under such hooks. No public name.
    """
    if hasattr(mode, "respect_saved_tensors_hooks"):
        mode.respect_saved_tensors_hooks = False
    return mode


def data_parallel_mesh_dims() -> Any:
    """Return `torch.distributed.fsdp.DataParallelMeshDims`, which torch 2.13 has; None in torch 2.11."""
    import torch.distributed.fsdp as fsdp

    return getattr(fsdp, "DataParallelMeshDims", None)


def fsdp_module_base() -> type:
    """Return FSDP2's class for modules if torch's pipelines use its public methods alone (2.15 on), else `object`.

    In 2.11 to 2.14 pipelines use private state of its instances, and treat other modules as ordinary ones.
    """
    from torch.distributed.fsdp import FSDPModule

    return FSDPModule if hasattr(FSDPModule, "finalize_backward") else object


def gradient_reduction_handle() -> type:
    """Return the class of the result of `FSDPModule.finalize_backward` (2.15 on), else `object`."""
    import torch.distributed.fsdp as fsdp

    return getattr(fsdp, "GradientReductionHandle", object)


def reduces_in_own_dtype() -> bool:
    """Return True if FSDP2 without `reduce_dtype` reduces in the parameter's dtype (2.15 on) instead of the compute dtype."""
    import torch.distributed.fsdp as fsdp

    return "param_dtype_override_fn" in getattr(fsdp.MixedPrecisionPolicy, "__dataclass_fields__", ())


def is_shard_placement_result(value: object) -> bool:
    """Return True if `value` is FSDP2's `ShardPlacementResult`, for a parameter with its own mesh. No public name (2.13 on)."""
    from torch.distributed.fsdp._fully_shard import _fsdp_common

    kind = getattr(_fsdp_common, "ShardPlacementResult", None)
    return kind is not None and isinstance(value, kind)


def composed_with(module: Any) -> set[str]:
    """Return the names of torch's composable functions that were applied to a module, such as "replicate"."""
    from torch.distributed._composable.contract import _get_registry

    return set(_get_registry(module) or ())


def mark_fully_sharded(module: Any) -> None:
    """Have torch's composable functions (`replicate`) skip a module's parameters, as after torch's own `fully_shard`."""
    from torch.distributed._composable.contract import REGISTRY_KEY, RegistryItem

    module.__dict__.setdefault(REGISTRY_KEY, {})["fully_shard"] = RegistryItem()


# -- for plan/

from torch._subclasses import fake_tensor as _fake  # noqa: E402


def asks_for_values(error: BaseException) -> bool:
    """Return True if the shape of an operator's result, or a Python number, depends on the values of a fake tensor."""
    kinds = _fake.DataDependentOutputException, _fake.DynamicOutputShapeException
    return isinstance(error, kinds) or ".numpy() is not supported" in str(error)


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Context manager for fake tensors, without torch's log of failed operators. No public name (all versions)."""
    log = logging.getLogger(_fake.__name__)
    before, log.disabled = log.disabled, True
    try:
        with _fake.FakeTensorMode(allow_non_fake_inputs=True):
            yield
    finally:
        log.disabled = before


def is_compiled(model: nn.Module) -> bool:
    """Return True if `Module.compile` was called on the model or a module inside. No public name (all versions)."""
    return any(getattr(m, "_compiled_call_impl", None) is not None for m in model.modules())


def without_compile(model: nn.Module) -> nn.Module:
    """Return the module that `torch.compile` wrapped, or `model` if it is no wrapper. No public name (all versions)."""
    inner = vars(model).get("_modules", {}).get("_orig_mod")
    return inner if isinstance(inner, nn.Module) else model


ASKS_DEVICE: Any = torch.ops.prim.device.default
"""The operator that reads the device of a fake tensor; two of three operators that a dispatch mode intercepts are this one."""


def fake_device(tensor: Any) -> Any:
    """Return the device of a fake tensor without a call of dispatch modes; None for other tensors. No public name."""
    return tensor.fake_device if isinstance(tensor, _fake.FakeTensor) else None


def fake_metadata(tensor: Any) -> Any:
    """Return (shape, strides, dtype, device) of a fake tensor; None for another kind, complex dtypes, and known values.

    No public name (all versions).
    """
    if type(tensor) is not _fake.FakeTensor or tensor.constant is not None or tensor.layout is not torch.strided:
        return None
    if tensor.dtype.is_complex:  # may be marked as conjugated
        return None
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.fake_device


def fake_like(tensor: Any) -> Callable[[Any], Any] | None:
    """Return a function that creates fake tensors like `tensor`, in a fifth of the time of the fake mode.

    Returns None if `tensor` does not fill its storage. No public name (all versions).
    """
    metadata = fake_metadata(tensor)
    if metadata is None or tensor.storage_offset():
        return None
    (shape, strides, dtype, device), mode = metadata, tensor.fake_mode
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) if tensor.numel() else -1
    if tensor.untyped_storage().nbytes() != (last + 1) * dtype.itemsize:
        return None

    def make(args: Any) -> Any:
        with _fake.in_kernel_invocation_manager(mode):
            empty = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
        return _fake.FakeTensor(mode, empty, device)

    return make


def fake_view(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return the result of a view operator on a fake tensor, in a tenth of the time of the fake mode; None for other tensors.

    As in the fake mode, the operator's kernel for the meta device computes it. No public name (all versions).
    """
    tensor: Any = args[0] if args else None
    if fake_metadata(tensor) is None:
        return None
    mode, device = tensor.fake_mode, tensor.fake_device
    with _fake.in_kernel_invocation_manager(mode):
        out = func(*args, **kwargs)
    if isinstance(out, Tensor):
        return _fake.FakeTensor(mode, out, device)
    return type(out)(_fake.FakeTensor(mode, each, device) for each in out)


def forget_references() -> None:
    """Have `are_ours` measure reference counts again; they differ between real and fake tensors."""
    _alone.cache_clear()


def argument_of(func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return the value of an operator's argument `name` in a dispatch mode; None if the operator has no such argument."""
    names = [argument.name for argument in func._schema.arguments]
    if name in kwargs or name not in names:
        return kwargs.get(name)
    at = names.index(name)
    return args[at] if at < len(args) else func._schema.arguments[at].default_value


WITHOUT_KERNEL = (
    *("aten.detach", "aten.empty", "aten.new_empty", "aten.as_strided", "aten.lift"),
    *("aten._unsafe_view", "aten.set_"),
)
"""Beginnings of the names of operators that run no kernel; one of them has no public name."""


def named_arguments(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return (name in the schema, value) of each argument of an operator in a dispatch mode."""
    positional = [(argument.name, value) for argument, value in zip(func._schema.arguments, args, strict=False)]
    return positional + list(kwargs.items())


def hooks_after_any_step() -> list[Any]:
    """Return the hooks that torch calls after the step of every optimizer. No public name."""
    from torch.optim import optimizer

    return list(optimizer._global_optimizer_post_hooks.values())


def mutated_arguments(func: Any) -> list[str]:
    """Return the names of the arguments into which an operator writes."""
    return [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]


@contextmanager
def around_propagation(inside: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """Context manager that enters `inside()` while DTensor runs an operator on fake tensors of the full shapes.

    These tensors are no part of a rank's step; torch's FSDPMemTracker counts them (2.13). No public name (2.11 to 2.13).
    """
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    owner, name = ShardingPropagator, "_propagate_tensor_meta_non_cached"
    plain = getattr(owner, name)

    def propagate(self: Any, *args: Any, **kwargs: Any) -> Any:
        with inside():
            return plain(self, *args, **kwargs)

    setattr(owner, name, propagate)
    try:
        yield
    finally:
        setattr(owner, name, plain)


@contextmanager
def in_place_on_cpu(functions: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Context manager that replaces aten operators on CPU tensors by `functions`, for all callers and threads.

    They are registered for autograd, which records the operators that they call. Only for composite operators, which have no
    kernel there. The method that removes the registration has no public name (2.11 to 2.13).
    """
    library = torch.library.Library("aten", "IMPL")
    try:
        for name, function in functions.items():
            library.impl(name, function, "AutogradCPU")
        yield
    finally:
        library._destroy()


def fake_collectives() -> None:
    """Register torch's collectives for fake tensors, by an import (all versions)."""
    import torch.distributed._tools.fake_collectives  # noqa: F401


class WholeVectors:
    """Mixin for `torch.optim.LBFGS` that computes with full vectors, equal on every rank.

    DTensor cannot flatten rows that do not divide by the ranks. The overridden methods have no public name (2.11 to 2.15).
    """

    _params: list[Tensor]

    def _gather_flat_grad(self) -> Tensor:
        return torch.cat([_whole(p, p.grad).flatten() for p in self._params])

    def _add_grad(self, step_size: Any, vector: Tensor) -> None:
        chunks = vector.split([p.numel() for p in self._params])
        for p, chunk in zip(self._params, chunks, strict=True):
            change = chunk.view(p.shape)
            if isinstance(p, DTensor):
                rows = distribute_tensor(change, p.device_mesh, p.placements, src_data_rank=None)
                assert local_of(rows).shape == local_of(p).shape, "each rank has the rows of distribute_tensor"
                change = as_dtensor(local_of(rows).to(local_of(p).device), p)
            p.add_(change, alpha=step_size)


def _whole(p: Tensor, grad: Tensor | None) -> Tensor:
    if grad is None:
        return torch.zeros(p.shape, dtype=p.dtype, device=p.device)
    if not isinstance(grad, DTensor):
        return grad
    # The rows may be on the host, where the mesh does not communicate.
    rows = local_of(grad).to(grad.device_mesh.device_type)
    return as_dtensor(rows, grad).full_tensor()


def has_counted_step(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if a scheduler has replaced `optimizer.step` on the instance, to count steps (all versions)."""
    return hasattr(vars(optimizer).get("step"), "_wrapped_by_lr_sched")


def count_steps(optimizer: torch.optim.Optimizer) -> None:
    """Replace `optimizer.step` on the instance as a scheduler does, for an optimizer whose class has changed since."""
    owner = ref(optimizer)

    @wraps(type(optimizer).step)
    def step(*args: Any, **kwargs: Any) -> Any:
        instance: Any = owner()
        instance._opt_called = True
        return type(instance).step(instance, *args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    vars(optimizer)["step"] = step


def homes_of_fully_shard() -> list[Any]:
    """Return the modules of torch from which programs import `fully_shard`; the second is an older, still used one."""
    import torch.distributed._composable.fsdp as older
    import torch.distributed.fsdp as public
    import torch.distributed.fsdp._fully_shard as inner

    return [public, older, inner]
