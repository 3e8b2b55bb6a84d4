"""Every private or version-dependent torch name that the package uses, with the reason. Read for torch 2.11 to 2.15."""

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

# The fast path in C++, where there is one.
_new_dtensor: Any = getattr(torch.Tensor, "_dtensor__new__", DTensor.__new__)

StridedShard = _StridedShard
"""Rows cut first by a later mesh axis; what a parameter is under an optimizer sharded over replicas too (all versions)."""

current_graph_task: Callable[[], int] = torch._C._current_graph_task_id
"""Id of the backward that runs on this thread, `NO_BACKWARD` outside of one. No public name."""

NO_BACKWARD = -1
"""What `current_graph_task` gives outside of a backward."""


def is_in_backward() -> bool:
    """Whether autograd runs a backward on this thread."""
    return current_graph_task() != NO_BACKWARD


will_execute: Callable[[Any], bool] = torch._C._will_engine_execute_node
"""Whether the running backward will reach a node. torch's own multi-grad hooks use it; no public name."""


def walks_everything(leaf: Tensor) -> bool:
    """Whether the running backward was asked for no gradients in particular, by `inputs` or `autograd.grad`.

    `leaf`: one of its graph for which nobody asks: where some are asked for, the engine will not execute its node.
    """
    return will_execute(torch.autograd.graph.get_gradient_edge(leaf).node)


def saving_hook() -> Callable[[Tensor], Any] | None:
    """The hook of `saved_tensors_hooks` that packs what autograd saves now, the innermost one; no public name."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return None if hooks is None else hooks[0]


def on_gradient(tensor: Tensor, function: Callable[[Tensor], Tensor | None]) -> None:
    """`tensor.register_hook` of what nobody takes away again: without a handle, 3.5 us in place of 7.8 with a view of its own."""
    if tensor.grad_fn is None or tensor._backward_hooks is not None:
        tensor.register_hook(function)
        return
    # An ordered one, as torch makes it: handles of the hooks that others set later hold it weakly. Their ids are not negative.
    tensor._backward_hooks = OrderedDict({-1: function})
    tensor.grad_fn._register_hook_dict(tensor)


def node_of(tensor: Tensor) -> Any:
    """The node that is given the gradient of a tensor: its own, or for a leaf the one that accumulates."""
    return tensor.grad_fn or torch.autograd.graph.get_gradient_edge(tensor).node


def reserve_number() -> int:
    """A number in the order of this thread's autograd nodes, newer than all before and older than all to come.

    autograd runs the newest node that is ready. A node takes a number when it is made; this one is dropped. No public names.
    """
    number = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
    torch._C._functions.UndefinedGrad()
    return int(number)


def set_number(tensor: Tensor, number: int) -> None:
    """Give the node of a tensor another place in that order; not while the node waits to run. No public name."""
    assert tensor.grad_fn is not None
    tensor.grad_fn._set_sequence_nr(number)  # type: ignore[attr-defined]


def queue_callback(function: Callable[[], None]) -> None:
    """Run `function` when the backward that runs now has ended without raising. No public name."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def local_of(tensor: Tensor) -> Tensor:
    """The local tensor of a DTensor without the autograd function that `to_local` makes (96 against 0.05 us for nine)."""
    return tensor._local_tensor  # type: ignore[attr-defined, no-any-return]


_version, _local = attrgetter("_version"), attrgetter("_local_tensor")


plain_attributes = torch._C.DisableTorchFunctionSubclass
"""A context in which attributes of DTensors are those of any tensor. Else torch looks in their class, at each read, for a
`__torch_function__` that does nothing: 1.6 thousand instructions. Documented by torch, though it has no public name."""


def versions_of(tensors: Sequence[Tensor]) -> int:
    """The sum of what autograd counts of writes to DTensors, and of writes to their local tensors, which it counts apart."""
    with plain_attributes():
        return int(sum(map(_version, tensors)) + sum(map(_version, map(_local, tensors))))


def own_versions_of(tensors: Sequence[Tensor]) -> int:
    """The same without what is written to local tensors, as steps off the device do."""
    with plain_attributes():
        return int(sum(map(_version, tensors)))


def set_local(tensor: Tensor, local: Tensor) -> None:
    """Give a DTensor other memory, for the same object: optimizers hold it. torch's FSDP2 does the same; no public name."""
    tensor._local_tensor = local  # type: ignore[attr-defined]


def as_dtensor(local: Tensor, like: Tensor) -> DTensor:
    """A DTensor with the placement of `like` around `local`, without checks: `DTensor.from_local` costs 55 us, this 1.3."""
    return _new_dtensor(DTensor, local, like._spec, requires_grad=False)  # type: ignore[attr-defined, no-any-return]


def as_dtensors(rows: Sequence[Tensor | None], like: Sequence[Tensor]) -> list[DTensor | None]:
    """`as_dtensor` of each; None where there is none."""
    new, kind = _new_dtensor, DTensor
    pairs = zip(rows, like, strict=True)
    return [None if x is None else new(kind, x, p._spec, requires_grad=False) for x, p in pairs]  # type: ignore[attr-defined]


# Documented by torch as a beta interface: one call and on an accelerator one kernel for many tensors.
foreach_add_, foreach_copy_, foreach_mul_ = torch._foreach_add_, torch._foreach_copy_, torch._foreach_mul_
foreach_norm = torch._foreach_norm
find_non_finite_: Callable[[list[Tensor], Tensor, Tensor], None] = torch._amp_foreach_non_finite_check_and_unscale_
"""`GradScaler`'s own: (tensors, found, scale) writes 1 into `found` where an element is inf or NaN, scales by `scale`."""


def chunk_cat(tensors: Sequence[Tensor], num_chunks: int, out: Tensor) -> None:
    """Row r of `out` (num_chunks, n) becomes the r-th chunk of dim 0 of every tensor, padded, one after the other; casts."""
    torch._chunk_cat(list(tensors), 0, num_chunks, out=out)


def marks_of(param: Tensor) -> dict[str, Any]:
    """What users and libraries set on a parameter as attributes; `_is_param` is how torch marks a DTensor as one."""
    return {name: value for name, value in vars(param).items() if name != "_is_param"}


def hand_over_hooks(old: Tensor, new: Tensor) -> None:
    """Let the hooks of a leaf run for another: the very mappings, so that the handles that callers hold still remove them.

    `register_hook` and `register_post_accumulate_grad_hook` set these attributes too. No public names.
    """
    if old._backward_hooks is not None:
        new._backward_hooks = old._backward_hooks
    if old._post_accumulate_grad_hooks is not None:
        new._post_accumulate_grad_hooks = old._post_accumulate_grad_hooks


def has_hooks(leaf: Tensor) -> bool:
    """Whether a leaf has hooks that `hand_over_hooks` would hand over."""
    return bool(leaf._backward_hooks or leaf._post_accumulate_grad_hooks)


_grad, _trains = attrgetter("grad"), attrgetter("requires_grad")


def grads_of(leaves: Sequence[Tensor]) -> tuple[list[Tensor | None], list[bool]]:
    """Return each leaf's gradient, and whether a new one is autograd's to take: to run hooks, or to drop it for a frozen leaf."""
    with plain_attributes():
        hooked = [bool(x._backward_hooks or x._post_accumulate_grad_hooks or not x.requires_grad) for x in leaves]
        return list(map(_grad, leaves)), hooked


def which_train(leaves: Sequence[Tensor]) -> tuple[int, ...]:
    """The indices of those that require gradients."""
    with plain_attributes():
        return tuple(compress(range(len(leaves)), map(_trains, leaves)))


def storages_of(tensors: Sequence[Tensor]) -> list[torch.UntypedStorage]:
    """Return the storage of each DTensor, which has no memory, without a call of Python for each.

    `p.data = x` gives `p` the storage of `x`, and leaves the local tensor in which DTensor keeps its numbers as it was (all
    versions). While somebody holds a storage, torch returns the same object for it again.
    """
    with plain_attributes():
        return list(map(Tensor.untyped_storage, tensors))


def transforms_active() -> bool:
    """Return True inside a transform of torch.func, or of `make_fx`, which `linearize` uses. No public names (all versions)."""
    proxies = torch._C._TorchDispatchModeKey.PROXY
    return torch._C._are_functorch_transforms_active() or torch._C._get_dispatch_mode(proxies) is not None


def is_batched(tensor: Tensor) -> bool:
    """Return True for a tensor of a transform of torch.func, or of a backward with `is_grads_batched`. No public names."""
    functorch = torch._C._functorch
    return functorch.is_legacy_batchedtensor(tensor) or functorch.is_functorch_wrapped_tensor(tensor)


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """`function.apply(*args)` without what torch does around it for transforms of torch.func, 9 us of 21: none may be active.

    The method is public only as overridden; the one in C takes the same arguments (all versions).
    """
    return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]


def run_at_once(function: type[torch.autograd.Function]) -> type[torch.autograd.Function]:
    """Decorator: autograd calls a node's backward itself, without what torch looks up on the way to it. No public name."""
    function._backward_cls.apply = function.backward  # type: ignore[attr-defined]
    return function


def unseen_by_dynamo(function: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.compiler.disable(function)`, which takes 10 us a unit and step, for that only where Dynamo looks."""
    from torch._C._dynamo.eval_frame import get_eval_frame_callback
    from torch._dynamo.eval_frame import skip_code

    careful = torch.compiler.disable(function)

    def called(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if get_eval_frame_callback() is None else careful(*args, **kwargs)

    skip_code(called.__code__)
    vars(called).update(vars(careful))  # by which Dynamo knows what it must not trace
    return called


def has_rule(operator: Any) -> bool:
    """Whether DTensor knows an operator. No public name."""
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    rules = (propagator.op_strategy_funcs, propagator.op_single_dim_strategy_funcs, propagator.op_to_rules)
    return any(operator in known for known in rules)


DDP_LEAVES_OUT = "_ddp_params_and_buffers_to_ignore"
"""What of a module DistributedDataParallel asks for before all else. No public name (2.11 to 2.15)."""


def answer_operator(operator: Any, answer: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> bool:
    """Have `answer(operator, args, kwargs)` be asked for an operator on DTensors; False if something is asked already.

    No public name.
    """
    answers: Any = DTensor._op_dispatcher._custom_op_handlers
    return answers.setdefault(operator, answer) is answer


def drop_answer(operator: Any) -> None:
    """Leave an operator on DTensors to torch again. No public name."""
    answers: Any = DTensor._op_dispatcher._custom_op_handlers
    answers.pop(operator, None)


def unanswered(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What DTensor itself does for an operator that has an answer. No public name."""
    answers: Any = DTensor._op_dispatcher._custom_op_handlers
    answer = answers.pop(operator, None)
    try:
        return operator(*args, **kwargs)
    finally:
        if answer is not None:
            answers[operator] = answer


def base_of(tensor: Tensor) -> Tensor | None:
    """The tensor of which another is a view, as autograd has it."""
    return tensor._base


def settle_before_unscale() -> None:
    """Let `torch.amp.GradScaler.unscale_` be right where sharded gradients lie on the host of an accelerator; set once.

    It copies its scale to the host without waiting, into pinned memory, and the kernel of the host reads that at once (2.11 to
    2.15): gradients times anything. So the host waits for the copy here, after it and before the kernel.
    """
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    operator = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
    known = handlers[operator]
    if getattr(known, "func", None) is not _unscale_settled:
        handlers[operator] = partial(_unscale_settled, known)


def _unscale_settled(unscale: Callable[..., Any], operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`args`: gradients, the flag of an overflow and the scale; the last two are on the device of the gradients' own rows.

    Only offloaded gradients have rows on the host and a mesh of accelerators.
    """
    grads: Sequence[DTensor] = args[0]
    if args[2].device.type == "cpu" and any(grad.device_mesh.device_type != "cpu" for grad in grads):
        torch.accelerator.current_stream().synchronize()
    return unscale(operator, args, kwargs)


def post_accumulate_hooks(param: Tensor) -> list[Callable[[Tensor], None]]:
    """Hooks of `register_post_accumulate_grad_hook`, for gradients that do not come through autograd's accumulation."""
    return list((param._post_accumulate_grad_hooks or {}).values())


def are_ours(grads: Sequence[Tensor | None]) -> list[bool]:
    """For each gradient that a `torch.autograd.Function` was given, first thing: whether nobody else can read its memory.

    autograd hands one tensor to several nodes (`x + w`), keeps it for a node still to come, and hooks may have stored it.
    Counts of references tell: of the Python object, of the tensor, of the storage. Autograd's own accumulation asks the
    same in C++ (`AccumulateGrad` steals or clones); a count that is too high costs a copy.
    """
    return [_references(grads, i) in _alone() for i in range(len(grads))]


def _references(grads: Sequence[Tensor | None], i: int) -> tuple[int, ...]:
    grad = grads[i]
    if grad is None or grad.layout != torch.strided:
        return ()
    base = grad._base  # a view keeps the tensor of which it is one: a product's transpose is the gradient of nn.Linear
    of_base = () if base is None else (sys.getrefcount(base), base._use_count())  # type: ignore[attr-defined]
    storage = torch._C._storage_Use_Count(grad.untyped_storage()._cdata)
    return sys.getrefcount(grad), grad._use_count(), storage, *of_base  # type: ignore[attr-defined]


@cache
def _alone() -> list[tuple[int, ...]]:
    """What the counts are where nobody else has a gradient: asked of two, a view among them, since versions differ."""
    found: list[tuple[int, ...]] = []

    @run_at_once  # as those who ask: what lies between holds references too
    class Asks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
            return tuple(x.detach() for x in inputs)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            found.extend([_references(grads, i) for i in range(len(grads))])
            return grads

    with torch.enable_grad():
        both = [torch.ones(1, 1, requires_grad=True, device="cpu") for _ in range(2)]
        plain, viewed = Asks.apply(*both)  # type: ignore[no-untyped-call]
        (plain * 2 + viewed.t() * 2).backward()
    return found


def holders_of_memory(tensor: Tensor) -> int:
    """How many tensors and the like hold a tensor's memory; only comparable with another answer for the same. No public name."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def default_store() -> Any:
    """The key-value store through which the ranks of this job met. No public name."""
    return torch.distributed.distributed_c10d._get_default_store()


def _options(kind: Any, async_op: bool) -> Any:
    """Options of a collective. `asyncOp=False` keeps NCCL on the current stream instead of a hidden one of its own."""
    options = kind()
    options.asyncOp = async_op
    return options


# Each is called with `async_op`. What reduces, sums.
gather_options: Callable[[bool], Any] = partial(_options, _c10d.AllgatherOptions)
exchange_options: Callable[[bool], Any] = partial(_options, _c10d.AllToAllOptions)
reduce_scatter_options: Callable[[bool], Any] = partial(_options, _c10d.ReduceScatterOptions)
all_reduce_options: Callable[[bool], Any] = partial(_options, _c10d.AllreduceOptions)


def checks_groups() -> bool:
    """Whether torch puts a wrapper that compares what ranks ask around each backend: TORCH_DISTRIBUTED_DEBUG=DETAIL."""
    return bool(_c10d.get_debug_level() == _c10d.DebugLevel.DETAIL)


BEFORE_2_13 = {
    "all_gather_single": "_allgather_base",
    "all_to_all_single": "alltoall_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
}
"""Methods of process groups, and their names in torch 2.11 and 2.12; groups that are written in Python have one of the two."""


def collective(group: Any, name: str) -> Callable[..., Any]:
    """Return the method of a process group that has this name since torch 2.13."""
    return getattr(group, name, None) or getattr(group, BEFORE_2_13[name])  # type: ignore[no-any-return]


def options_of(group: Any, device: torch.device) -> tuple[timedelta | None, Any]:
    """Of the backend that serves `device` in a group: its time-out, and new options with all else that a caller may set.

    None where it has no such thing. No public names: `options` of a backend is one for NCCL's and gloo's alone (2.11 to 2.13).
    """
    try:
        backend = group._get_backend(device)
        options = getattr(backend, "wrapped_pg", backend).options
    except (AttributeError, RuntimeError):  # the latter from C++
        return None, None
    fresh, nccl = None, getattr(torch.distributed, "ProcessGroupNCCL", None)
    if nccl is not None and isinstance(options, nccl.Options):
        fresh = nccl.Options()  # not a copy: it would say of which communicator it was split off
        for name in ("is_high_priority_stream", "config"):
            if hasattr(options, name):
                setattr(fresh, name, getattr(options, name))
        fresh._timeout = options._timeout
    return getattr(options, "_timeout", None), fresh


def named_group(
    name: str, ranks: list[int], device: torch.device | None, timeout: timedelta | None = None, options: Any = None
) -> Any:
    """A process group that its own ranks make, under a name on which they have agreed. No public way (2.11 to 2.15).

    `new_group(use_local_synchronization=True)` names it after the number of groups that a rank knows. Where ranks know
    different ones, `new_group([0])` suffices, each waits for the others under a name of its own, for good.
    Nor is it split off the job's communicator, as torch does where `init_process_group` was given a device: all ranks of
    the job would have to take part. A job that is bound to a device takes groups of that device alone.
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
    """Whether a tensor, or a parameter's data, is of torch's own class, or stands for such a one in a fake mode."""
    return type(tensor.data) is Tensor or isinstance(tensor.data, _fake.FakeTensor)


def inner_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """The plain tensors of which a subclass is made, if it tells them (`__tensor_flatten__`); a plain one itself."""
    if is_plain(tensor):
        yield tensor.detach()
    elif hasattr(tensor.data, "__tensor_flatten__"):
        for name in tensor.data.__tensor_flatten__()[0]:
            yield from inner_tensors(getattr(tensor.data, name))


def keep_with_job(name: str, thing: Any) -> None:
    """Keep a thing as long as the job has process groups: `destroy_process_group` forgets it.

    Kept among torch's own tags of groups, which no public name reaches (2.11 to 2.15): a group of C++ takes no attributes.
    """
    torch.distributed.distributed_c10d._world.tags_to_pg[name] = [thing]


def kept_with_job(name: str) -> list[Any]:
    """What `keep_with_job` was given under names that begin so, since the job's groups were made."""
    tags = torch.distributed.distributed_c10d._world.tags_to_pg
    return [thing for tag, things in list(tags.items()) if tag.startswith(name) for thing in things]


def abandon_works(group: Any, works: list[Any]) -> None:
    """Keep works of gloo in flight that nobody will wait for, and never destroy their group.

    Dropping a send or a receive closes its connection, and the destructor of a group waits for its collectives, at exit too,
    up to the time-out. No public switch; `abort` and `shutdown` of gloo's groups do not end them (2.11 to 2.15).
    """
    keep_with_job(f"accordion/abandoned/{id(works)}", works)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def backend_of(group: Any, device: torch.device) -> str:
    """Name of the backend that serves `device` in a group ("nccl", "gloo", "fake", ...); no public name.

    A group that is written in Python may be all there is: torch's own of threads in place of ranks, which its tests use.
    """
    try:
        return str(group._get_backend(device).name()).lower()
    except RuntimeError:
        if type(group) is torch.distributed.ProcessGroup:
            raise
        return str(group.getBackendName()).lower()


def timeout_s_of_job() -> float:
    """Seconds after which a collective of this job's process group fails. No public name."""
    group: Any = torch.distributed.group.WORLD
    types = [] if group is None else group._device_types  # none of a group that is written in Python
    options = getattr(group._get_backend(types[0]), "options", None) if types else None
    found = getattr(options, "_timeout", None) or torch.distributed.distributed_c10d.default_pg_timeout
    return float(found.total_seconds())


def ranks_of(mesh: Any) -> list[int]:
    """All ranks of a mesh by their number in the job; also where tensors made now are fake. No public name."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with unset_fake_temporarily():
        return [int(rank) for rank in mesh.mesh.flatten().tolist()]


def has_bf16(device: torch.device) -> bool:
    """Whether a device multiplies bfloat16 by itself; of a kind that does not say, yes."""
    ask = getattr(torch.get_device_module(device), "is_bf16_supported", None)
    if ask is None:
        return True
    return bool(ask(including_emulation=False) if device.type == "cuda" else ask())


def runtime_version(device_type: str) -> str | None:
    """Of the library that torch was built with for such devices (CUDA's, ROCm's, XPU's); None where torch does not say."""
    known = (torch.version.cuda or torch.version.hip) if device_type == "cuda" else None
    return known or getattr(torch.version, device_type, None)


def blocking_events(module: Any) -> Callable[[], Any]:
    """What makes events of a device module for which a thread waits without spinning; None where it has no such kind."""
    try:
        module.Event(blocking=True)
    except TypeError:
        return lambda: None
    return partial(module.Event, blocking=True)


def sleep_on_device() -> None:
    """Keep the current stream of an NVIDIA or AMD device busy for about a millisecond; elsewhere nothing. No public name."""
    if torch.cuda.is_available():
        torch.cuda._sleep(2_000_000)


ASSERT_BYTES = 250
"""CUDA's kernel is given the text by value and refuses 255 bytes (all versions)."""


def assert_on_device(condition: Tensor, text: str) -> None:
    """Stop the device where `condition` is false, with the first `ASSERT_BYTES` of `text`; the host goes on. No public name."""
    torch._assert_async(condition, text.encode()[:ASSERT_BYTES].decode(errors="ignore"))


# -- for initialise.py

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

DispatchMode = TorchDispatchMode
"""Base of modes that see every operator and may act before it. No public name (all versions)."""


class EagerMode(TorchDispatchMode):
    """Base of modes under which nothing is compiled: torch's switch that keeps its compiler out costs a tenth of their time.

    No public name (all versions).
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def mutates(func: Any) -> bool:
    """Whether an operator, as a dispatch mode sees it, writes into one of its arguments. No public name."""
    return bool(func._schema.is_mutable)


# -- for bench

PRELOADED = ["torch.distributed.tensor", "torch.distributed.fsdp", "torch._dynamo"]
"""What a rank would import for seconds; none of it starts threads or looks for a device (all versions)."""


def storage_key(storage: torch.UntypedStorage) -> int:
    """What tells a storage from every other one that is alive. No public name."""
    return int(storage._cdata)


def fake_store() -> Any:
    """A store for a process group of which only this rank exists; importing its module makes the backend "fake" known."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def group_name(group: Any) -> str:
    """Under which name torch knows a process group; of C++ ones an attribute that is not documented (all versions)."""
    return str(group.group_name)


def name_of_group(group: Any) -> str:
    """Under which name torch knows a process group written in Python, which has none of its own. No public name."""
    return str(torch.distributed.distributed_c10d._world.pg_names[group])


# -- for compat/fsdp1


def is_wrap_policy(policy: object) -> bool:
    """Whether `policy` is one of the policy objects of torch.distributed.fsdp.wrap; their base has no public name."""
    return callable(getattr(policy, "_run_policy", None))


def run_wrap_policy(policy: Any, root: Any, arguments: dict[str, Any]) -> dict[Any, dict[str, Any]]:
    """The modules that a policy object names, with keyword arguments for the wrapper of each. No public name."""
    return dict(policy._run_policy(root, set(), arguments))


def classes_without_mixed_precision(mixed: Any) -> Sequence[type]:
    """The classes that FSDP's MixedPrecision leaves in float32, batch norms by default. No public name."""
    return tuple(getattr(mixed, "_module_classes_to_ignore", ()))


# -- for compat


def joined_mesh(*slices: Any) -> Any:
    """The mesh of which these are slices, with their axes in this order; also where tensors made now are fake. No public name;
    torch's FSDP2 does the same.
    """
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with unset_fake_temporarily():
        return type(slices[0])._concatenate(list(slices))


def flattened_mesh(mesh: Any, name: str) -> Any:
    """The axes of a mesh as one; also where tensors made now are fake. No public name; torch's FSDP2 does the same."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with unset_fake_temporarily():
        return mesh._flatten(name)


def asked_grad_dtype(param: Tensor) -> tuple[bool, torch.dtype | None]:
    """Whether `grad_dtype` was set on a parameter, and to what: None takes gradients of any dtype.

    Before torch 2.15, which keeps whether it was set, the parameter's own dtype counts as unset.
    """
    asked = param.grad_dtype
    was_set = getattr(param, "_has_grad_dtype_override", asked != param.dtype)
    return bool(was_set), asked


def keep_grad_dtype(old: Tensor, new: Tensor) -> None:
    """Let a leaf take gradients of the dtype that was set for another, if one was."""
    was_set, asked = asked_grad_dtype(old)
    if was_set:
        new.grad_dtype = asked


def like_in(like: Tensor, dtype: torch.dtype) -> DTensor:
    """A stand-in without memory for `as_dtensor(s)`: a DTensor placed as `like`, in another dtype. No public name."""
    spec = copy.copy(like._spec)  # type: ignore[attr-defined]
    spec.tensor_meta = spec.tensor_meta._replace(dtype=dtype)
    local = torch.empty(local_of(like).shape, dtype=dtype, device="meta")
    return _new_dtensor(DTensor, local, spec, requires_grad=False)  # type: ignore[no-any-return]


def pass_hooks_by(mode: Any) -> Any:
    """A mode of `create_selective_checkpoint_contexts` whose results no hook on saved tensors sees, as of ever; returns it.

    torch 2.15 warns of a choice to come where such hooks are around, and takes it from `checkpoint` alone. No public name.
    """
    if hasattr(mode, "respect_saved_tensors_hooks"):
        mode.respect_saved_tensors_hooks = False
    return mode


def data_parallel_mesh_dims() -> Any:
    """`torch.distributed.fsdp.DataParallelMeshDims`, which torch 2.13 has and 2.11 has not: None there."""
    import torch.distributed.fsdp as fsdp

    return getattr(fsdp, "DataParallelMeshDims", None)


def fsdp_module_base() -> type:
    """The class that FSDP2 mixes into modules, if torch's pipelines use its public methods alone (2.15 on), else `object`.

    Where they reach into what is behind it (2.11 to 2.14), a module that is no instance of it is an ordinary one to them.
    """
    from torch.distributed.fsdp import FSDPModule

    return FSDPModule if hasattr(FSDPModule, "finalize_backward") else object


def gradient_reduction_handle() -> type:
    """What `FSDPModule.finalize_backward` returns an instance of (2.15 on), else `object`."""
    import torch.distributed.fsdp as fsdp

    return getattr(fsdp, "GradientReductionHandle", object)


def reduces_in_own_dtype() -> bool:
    """Whether FSDP2 without a `reduce_dtype` reduces in the parameter's dtype (2.15 on), and not in that of the computation."""
    import torch.distributed.fsdp as fsdp

    return "param_dtype_override_fn" in getattr(fsdp.MixedPrecisionPolicy, "__dataclass_fields__", ())


def is_shard_placement_result(value: object) -> bool:
    """Whether it is FSDP2's word for a parameter with a mesh of its own, which has no public name (2.13 on: 2.11 lacks it)."""
    from torch.distributed.fsdp._fully_shard import _fsdp_common

    kind = getattr(_fsdp_common, "ShardPlacementResult", None)
    return kind is not None and isinstance(value, kind)


def composed_with(module: Any) -> set[str]:
    """Names of torch's composable functions that were applied to a module, "replicate" and "fully_shard" among them."""
    from torch.distributed._composable.contract import _get_registry

    return set(_get_registry(module) or ())


def mark_fully_sharded(module: Any) -> None:
    """Have torch's composable functions (`replicate`) leave a module's parameters alone, as those of its own `fully_shard`."""
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
    """A mode in which tensors have shapes and no memory. Of an operator that fails it says nothing beside the error, which torch
    writes to the log with a traceback. No public name (all versions).
    """
    log = logging.getLogger(_fake.__name__)
    before, log.disabled = log.disabled, True
    try:
        with _fake.FakeTensorMode(allow_non_fake_inputs=True):
            yield
    finally:
        log.disabled = before


def is_compiled(model: nn.Module) -> bool:
    """Whether `Module.compile` was called, of it or of a module inside. No public name (all versions)."""
    return any(getattr(m, "_compiled_call_impl", None) is not None for m in model.modules())


def without_compile(model: nn.Module) -> nn.Module:
    """What `torch.compile` was given; other modules as they are. No public name (all versions)."""
    inner = vars(model).get("_modules", {}).get("_orig_mod")
    return inner if isinstance(inner, nn.Module) else model


ASKS_DEVICE: Any = torch.ops.prim.device.default
"""How a dispatch mode is asked for the device of a fake tensor: two of three calls."""


def told_device(tensor: Any) -> Any:
    """The answer without the modes below; None where the tensor is no fake one. No public name (all versions)."""
    return tensor.fake_device if isinstance(tensor, _fake.FakeTensor) else None


def fake_metadata(tensor: Any) -> Any:
    """Shape, strides, dtype and device of a fake tensor, with its mode; None if its values are known too, or it is another kind
    of tensor. No public name (all versions).
    """
    if type(tensor) is not _fake.FakeTensor or tensor.constant is not None or tensor.layout is not torch.strided:
        return None
    if tensor.dtype.is_complex:  # may be marked as conjugated
        return None
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.fake_device


def fake_like(tensor: Any) -> Callable[[Any], Any] | None:
    """Return a function that makes fake tensors like `tensor` in memory of their own, in a fifth of the time of the mode.

    None if `tensor` does not fill its memory. No public name (all versions).
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
    """Return the result of an operator that views a fake tensor, in a tenth of the time of the mode; None for other tensors.

    As in the mode, the operator's kernel for the meta device makes it. No public name (all versions).
    """
    tensor: Any = args[0] if args else None
    if fake_metadata(tensor) is None:
        return None
    mode, device = tensor.fake_mode, tensor.fake_device
    with _fake.in_kernel_invocation_manager(mode):
        out = func(*args, **kwargs)
    if isinstance(out, Tensor):
        return _fake.FakeTensor(mode, out, device)
    return type(out)(_fake.FakeTensor(mode, part, device) for part in out)


def forget_references() -> None:
    """Let `are_ours` find out anew what the counts of references are, which differ between real and fake tensors."""
    _alone.cache_clear()


def argument_of(func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What an operator, as a dispatch mode sees it, was given for an argument; None where it has none of that name."""
    names = [argument.name for argument in func._schema.arguments]
    if name in kwargs or name not in names:
        return kwargs.get(name)
    at = names.index(name)
    return args[at] if at < len(args) else func._schema.arguments[at].default_value


WITHOUT_KERNEL = (
    *("aten.detach", "aten.empty", "aten.new_empty", "aten.as_strided", "aten.lift"),
    *("aten._unsafe_view", "aten.set_"),
)
"""How the names of operators begin that move no numbers; one of them has no public name."""


def named_arguments(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
    """What an operator, as a dispatch mode sees it, was given, each with the name in its schema."""
    given = [(argument.name, value) for argument, value in zip(func._schema.arguments, args, strict=False)]
    return given + list(kwargs.items())


def hooks_after_any_step() -> list[Any]:
    """Return the hooks that torch calls after the step of every optimizer; they are listed under no public name."""
    from torch.optim import optimizer

    return list(optimizer._global_optimizer_post_hooks.values())


def mutated_arguments(func: Any) -> list[str]:
    """Names of the arguments into which an operator writes."""
    return [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]


@contextmanager
def around_propagation(inside: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """Enter `inside` wherever DTensor works out shapes by running an operator on tensors of the full shapes.

    Those are no part of a rank's step; torch's own FSDPMemTracker counts them (2.13). No public name (2.11 to 2.13).
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
    """Let functions stand in the place of operators of aten on CPU tensors, for every caller and on every thread.

    Registered where autograd begins, so that it records what a function calls. Only for operators that are made of others, of
    which nothing is registered there. What takes a library's functions away again has no public name (2.11 to 2.13).
    """
    library = torch.library.Library("aten", "IMPL")
    try:
        for name, function in functions.items():
            library.impl(name, function, "AutogradCPU")
        yield
    finally:
        library._destroy()


def fake_collectives() -> None:
    """Let torch's own collectives run on fake tensors; importing this module is what registers them (all versions)."""
    import torch.distributed._tools.fake_collectives  # noqa: F401


class WholeVectors:
    """Mixed into `torch.optim.LBFGS`: it computes with vectors of all elements, in the same order on every rank.

    DTensor does not flatten rows that do not divide by the ranks. The methods that read gradients and write parameters have no
    public name (2.11 to 2.15).
    """

    _params: list[Tensor]

    def _gather_flat_grad(self) -> Tensor:
        return torch.cat([_whole(p, p.grad).flatten() for p in self._params])

    def _add_grad(self, step_size: Any, vector: Tensor) -> None:
        parts = vector.split([p.numel() for p in self._params])
        for p, part in zip(self._params, parts, strict=True):
            change = part.view(p.shape)
            if isinstance(p, DTensor):
                rows = distribute_tensor(change, p.device_mesh, p.placements, src_data_rank=None)
                assert local_of(rows).shape == local_of(p).shape, "rows are where distribute_tensor puts them"
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
    """Whether the `step` in its instance is what torch's schedulers put there, to know of each step (all versions)."""
    return hasattr(vars(optimizer).get("step"), "_wrapped_by_lr_sched")


def count_steps(optimizer: torch.optim.Optimizer) -> None:
    """Put such a step there as a scheduler would now, in place of that of the class which the optimizer had before."""
    owner = ref(optimizer)

    @wraps(type(optimizer).step)
    def step(*args: Any, **kwargs: Any) -> Any:
        held: Any = owner()
        held._opt_called = True
        return type(held).step(held, *args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    vars(optimizer)["step"] = step


def homes_of_fully_shard() -> list[Any]:
    """The modules of torch from which programs import it; the second is older than the first and still in use (all versions)."""
    import torch.distributed._composable.fsdp as older
    import torch.distributed.fsdp as public
    import torch.distributed.fsdp._fully_shard as inner

    return [public, older, inner]
