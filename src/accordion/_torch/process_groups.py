"""Functions around private names of process groups, their backends and stores, and device meshes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

_c10d = torch._C._distributed_c10d


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


BEFORE_2_13 = {
    "all_gather_single": "_allgather_base",
    "all_to_all_single": "alltoall_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
}
"""Name of a method of process groups -> its name in torch 2.11 and 2.12."""


def collective(group: Any, name: str) -> Callable[..., Any]:
    """Return the method of `group` that is called `name` since torch 2.13, also if this version has another name for it."""
    return getattr(group, name, None) or getattr(group, BEFORE_2_13[name])  # type: ignore[no-any-return]


def timeout_of(group: Any, device: torch.device) -> timedelta | None:
    """Return the timeout of the backend of `group` for `device`; None if it is unknown. No public name (2.11 to 2.15)."""
    try:
        backend = group._get_backend(device)
        timeout: timedelta = getattr(backend, "wrapped_pg", backend).options._timeout
    except (AttributeError, RuntimeError):  # the latter from C++
        return None
    return timeout


def named_group(name: str, ranks: list[int], device: torch.device | None, timeout: timedelta | None = None) -> Any:
    """Return a new process group of `ranks`. A collective of these alone, which all pass the same unused `name`. `device`:
    the device that the group is bound to, unless the job is bound to one. Replaces private functions of torch meanwhile."""
    # `new_group(use_local_synchronization=True)` derives the name from the number of groups that a rank knows. If ranks know
    # different numbers (after one `new_group([0])`), each waits forever for the others under its own name. The group is
    # not split from the job's communicator either, as torch does if `init_process_group` was given a device: all ranks of the
    # job would have to take part. A job that is bound to a device allows groups of that device alone.
    c10d: Any = torch.distributed.distributed_c10d
    device = c10d._get_default_group().bound_device_id or device
    plain = c10d._process_group_name, c10d._get_split_source
    c10d._process_group_name = lambda ranks, use_hashed_name: name
    c10d._get_split_source = lambda *_: None  # (group), since 2.15 (group, backend)
    try:
        return torch.distributed.new_group(ranks, timeout, use_local_synchronization=True, device_id=device)
    finally:
        c10d._process_group_name, c10d._get_split_source = plain


def keep_with_job(name: str, thing: Any) -> None:
    """Keep a reference to `thing` under `name` until `destroy_process_group`, replacing an earlier one."""
    # Among torch's tags of groups (no public name, 2.11 to 2.15), since C++ groups take no attributes.
    torch.distributed.distributed_c10d._world.tags_to_pg[name] = [thing]


def kept_with_job(name: str) -> list[Any]:
    """Return the objects that `keep_with_job` has stored under names that begin with `name`."""
    tags = torch.distributed.distributed_c10d._world.tags_to_pg
    return [thing for tag, things in list(tags.items()) if tag.startswith(name) for thing in things]


def abandon_works(group: Any, works: list[Any]) -> None:
    """Keep unfinished gloo `works`, for which nobody will wait, alive until `destroy_process_group`, and keep `group` for ever.
    Deleting a send or receive would close its connection; deleting a group would wait for its collectives, at exit too."""
    # No public switch; `abort` and `shutdown` of gloo's groups do not end them (2.11 to 2.15).
    keep_with_job(f"accordion/abandoned/{id(works)}", works)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def backend_of(group: Any, device: torch.device) -> str:
    """Return the name of the backend of `group` for `device`: "nccl", "gloo", "fake", ... A group written in Python has one
    name for all devices. Any other raises `RuntimeError` if it has no backend for `device`. Uses a private method."""
    try:
        return str(group._get_backend(device).name()).lower()
    except RuntimeError:
        if type(group) is torch.distributed.ProcessGroup:
            raise
        return str(group.getBackendName()).lower()


def timeout_s_of_job() -> float:
    """Return the timeout of the job's default process group in seconds; torch's default if it is unknown. No public name."""
    group: Any = torch.distributed.group.WORLD
    types = [] if group is None else group._device_types  # empty for a group written in Python
    options = getattr(group._get_backend(types[0]), "options", None) if types else None
    timeout = getattr(options, "_timeout", None) or torch.distributed.distributed_c10d.default_pg_timeout
    return float(timeout.total_seconds())


def ranks_of(mesh: Any) -> list[int]:
    """Return the global ranks in `mesh` as a flat list; works in a fake tensor mode too. No public name."""
    with unset_fake_temporarily():
        return [int(rank) for rank in mesh.mesh.flatten().tolist()]


def fake_store() -> Any:
    """Register torch's backend "fake", which does not communicate, and return a store for `init_process_group("fake", ...)`."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def name_of_group(group: Any) -> str:
    """Return the string that identifies `group` in torch's private registry, also for a group written in Python."""
    return str(torch.distributed.distributed_c10d._world.pg_names[group])


def joined_mesh(*slices: Any) -> Any:
    """Return one mesh with the dims of all `slices` of the same mesh; works in a fake tensor mode too. No public name."""
    with unset_fake_temporarily():
        return type(slices[0])._concatenate(list(slices))


def flattened_mesh(mesh: Any, name: str) -> Any:
    """Return `mesh` with all dims flattened into one called `name`, by a private method; works in a fake tensor mode too."""
    with unset_fake_temporarily():
        return mesh._flatten(name)


def debug_frontend() -> Any:
    """Return torch's module with `DebugHandler`, the base of handlers for `start_debug_server`; None before torch 2.13, whose
    server takes no handlers, and without jinja2, which the module imports. No public name (2.13 to 2.15)."""
    try:
        from torch.distributed.debug import _frontend
    except ImportError:
        return None
    return _frontend if hasattr(_frontend.DebugHandler, "fetch_timeout") else None


def answer_debug_server(name: str, answer: Callable[[], str]) -> None:
    """Have the debug server's worker in this process respond to requests for `name` with `answer()`, JSON text, on a thread.
    Raises `ValueError` if `name` is taken. Uses a private function (2.13 to 2.15)."""

    def respond(request: Any, response: Any) -> None:
        response.set_content(answer(), "application/json")
        response.set_status(200)

    _c10d._register_handler(name, respond)
