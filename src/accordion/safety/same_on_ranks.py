"""Check that ranks call `shard` with equal arguments, models and values, and save equal replicas; checksums stand for values."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from accordion import _torch
from accordion.config import STRATEGIES, Offload, Precision, Strategy
from accordion.engine.communicator import Communicator, broadcast, extremes, reduced
from accordion.engine.context import ShardingContext
from accordion.engine.engine import Engine
from accordion.errors import DivergenceError, OffloadError, UsageError, some_of
from accordion.safety.agreement import agreement_of
from accordion.safety.divergence import DivergenceMonitor, monitor_of
from accordion.safety.liveness.wording import step_differences
from accordion.sharding import Sharding
from accordion.tensor_checksum import checksum, checksums
from accordion.units import Owned

Result = TypeVar("Result")
Facts = dict[str, str]
"""Values that must be equal on all ranks, as text, by their names in messages. Messages list differences in this order."""

SHOWN_FACTS, SHOWN_RANKS = 3, 4  # in a message


def differences(facts: Facts, monitor: DivergenceMonitor, what: str) -> str:
    """Return a text, equal on all ranks, that names the ranks whose `facts` differ from the first rank's, and these facts; "" if
    all are equal. A collective: ranks compare a digest of 8 bytes, and send more only if digests differ. `what`: a verb phrase
    for messages about this rank, such as "compares its values"."""
    digest = hashlib.sha256(json.dumps(list(facts.items())).encode()).hexdigest()[:16]
    digests = monitor.meet({"what": what, "digest": digest})
    if digests is None:
        return ""
    rank, first = dist.get_rank(), min(digests)
    # Reports with different ranks are never equal, so a meeting returns them.
    reports = monitor.meet({"what": what, "rank": rank, "facts": facts if rank == first else None}) or {}
    expected = reports[first]["facts"]
    differing = [
        f"{name} {facts.get(name, 'not at all')} (rank {first}: {expected.get(name, 'not at all')})"
        for name in dict.fromkeys([*expected, *facts])
        if facts.get(name) != expected.get(name)
    ]
    answers = monitor.meet({"what": what, "rank": rank, "unlike": some_of(differing, SHOWN_FACTS, "; ")}) or {}
    each = [f"rank {r} has {answer['unlike']}" for r, answer in answers.items() if answer["unlike"]]
    return some_of(each, SHOWN_RANKS, " / ") + " ranks" * (len(each) > SHOWN_RANKS)


# -- arguments of `shard`


def same_structure(
    owned: list[Owned],
    chosen: list[tuple[str, nn.Module]],
    strategy: Strategy,
    context: ShardingContext,
    arguments: Mapping[str, str] | None = None,
    refused: UsageError | None = None,
) -> None:
    """Raise `DivergenceError` on every rank, with the differences, if arguments, units or parameters differ between ranks. A
    collective. A rank that has refused its arguments passes the error as `refused`, and raises that after the comparison.

    `owned`: the parameters. `chosen`: (name, module) of each unit, in the order of `Owned.owner`, the root first. `arguments`:
    name -> text of other arguments of `shard`; None: neither they nor buffers are compared. If the text of "sync" is "True",
    tensors may be on the meta device on some ranks only, and non-persistent buffers are compared too.
    """
    # The other ranks would wait for one that raised `refused` at once.
    sync = (arguments or {}).get("sync") == "True"
    known = STRATEGIES.get(strategy.name) == strategy
    facts = {"strategy": strategy.name if known else str(strategy), **(arguments or {})}
    facts |= {f"unit {name!r}": type(module).__name__ for name, module in chosen}
    for o in owned:
        also = f", also named {', '.join(o.names[1:])}" if o.names[1:] else ""
        trained, unit = "trained" if o.original.requires_grad else "frozen", chosen[o.owner][0]
        facts[f"parameter {o.names[0]!r}"] = f"{form_of(o.original, sync)}, {trained}, in unit {unit!r}{also}"
    if arguments is not None:
        facts |= {f"buffer {name!r}": form_of(b, sync) for name, b in buffers_of(chosen[0][1], all_of_them=sync)}
    facts = {"a refusal:": "none" if refused is None else str(refused), **facts}
    differing = differences(facts, monitor_of(context), "compares its model and settings")
    if refused is not None:
        raise refused
    if differing:
        raise DivergenceError(
            f"ranks hold different models or settings: {differing}; build the same model with the same arguments on every rank."
        )


def form_of(tensor: object, sync: bool = False) -> str:
    """Return text such as "float32 (4, 8) as (Shard(dim=0),) on meta" for a tensor, or "of type int" for another object. With
    `sync`, "on meta" is left out."""
    if not isinstance(tensor, Tensor):
        return f"of type {type(tensor).__name__}"
    device = " on meta" if tensor.is_meta and not sync else ""
    placements = f" as {tensor.placements}" if isinstance(tensor, DTensor) else ""
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}{placements}{device}"


def arguments_of(mesh: DeviceMesh, sharding: Sharding, sync: bool, debug: Collection[str]) -> Facts:
    """Return the arguments of `shard` that hold for the whole model and must be equal on all ranks, as text by name."""
    # These are compared by unit or parameter, or in another form.
    apart = ("strategy", "precision", "offload", "units", "meshes", "prefetch")
    return {
        "mesh": f"{tuple(mesh.shape)} of {mesh.device_type}, ranks {_torch.ranks_of(mesh)}",
        "sync": str(sync),
        "debug": str(sorted(debug)),
        **{f.name: repr(getattr(sharding, f.name)) for f in fields(Sharding) if f.name not in apart},
        "prefetch.budget_bytes": str(sharding.prefetch.budget_bytes),
    }


def settings_of(names: Sequence[str], precisions: Sequence[Precision], offloads: Sequence[Offload]) -> Facts:
    """Return precision and offload of the units, as text by name: all settings of the root, and those settings of each other
    unit that differ from the root's. `names`, `precisions`, `offloads`: one entry per unit; the root is first and named ""."""
    kinds = [f.name for f in fields(Precision) if f.name != "overrides"]
    facts: Facts = {}
    root: Facts = {}
    for name, precision, offload in zip(names, precisions, offloads, strict=True):
        # Folders of tiers and byte budgets may differ between ranks.
        places = {key: getattr(offload, key) for key in ("params", "optimizer", "activations")}
        places |= {"grads": offload.rest_of_grads, "step": offload.stepped_on}
        settings = {
            **{f"precision.{key}": str(getattr(precision, key)).removeprefix("torch.") for key in kinds},
            **{f"offload.{key}": repr(place.partition(":")[0]) for key, place in places.items()},
            "offload with a budget": str((offload.device_bytes, offload.host_bytes) != (None, None)),
        }
        facts |= {f"{key} of unit {name!r}" if name else key: v for key, v in settings.items() if v != root.get(key)}
        root = root or settings
    return facts


def on_every_rank(make: Callable[[], Result], context: ShardingContext) -> Result:
    """Return `make()`. A collective. If `make` raises `UsageError` or `OffloadError` on some ranks, every rank raises a
    `UsageError`, which on the other ranks quotes that error."""
    error: UsageError | None = None
    try:
        result = make()
    except UsageError as refusal:
        error = refusal
    except OffloadError as failure:
        error = UsageError(str(failure))
        error.__cause__ = failure
    refused = differences({"a refusal:": str(error or "none")}, monitor_of(context), "compares its resources")
    if error is not None:
        raise error
    if refused:
        raise UsageError(f"other ranks refused their arguments or lack a resource: {refused}")
    return result


# -- values


def same_given(
    values: Mapping[str, Any], monitor: DivergenceMonitor, what: str, also: Mapping[str, str] | None = None
) -> str:
    """Compare `values` and the texts `also`, by name, over ranks. Return a text that names the differences; "" if there are
    none, or no other ranks. A collective. Tensors are compared by dtype, shape and checksum, DTensors by dtype, shape and
    placements, and other objects by type. `what`: the function that got the values, for messages."""
    if not monitor.listens:
        return ""
    sums = checksums({key: t for key, t in values.items() if isinstance(t, Tensor) and not isinstance(t, DTensor)})
    facts = {key: f"{form_of(value)} {sums.get(key, '')}".rstrip() for key, value in values.items()}
    return differences({**facts, **(also or {})}, monitor, f"compares what {what} is given")


def same_values(
    model: nn.Module, owned: list[Owned], context: ShardingContext, sync: bool, contexts: Mapping[int, ShardingContext]
) -> Callable[[Owned], Tensor | None]:
    """Compare values over ranks, and return a function that maps a parameter, as `Owned`, to the tensor to shard. A collective.
    Raises `DivergenceError` on every rank if parameters or persistent buffers differ.

    The function returns None for a parameter on the meta device. With `sync` values are not compared, and the function returns
    the first rank's; None if the first rank has the parameter on meta, and then it must be there on all ranks. All ranks must
    call it for every parameter in the same order, since with `sync` each call is a collective. `contexts`: id of the `Owned` ->
    context of its own mesh, for the parameters whose values are equal only within such a mesh.
    """
    communicators = _communicators(context)
    if sync and communicators:
        # One at a time, so that only one full parameter is in memory.
        real = _real_on_first({f"parameter {o.names[0]!r}": o.original for o in owned}, context)
        return lambda o: first_ranks(o.original, context) if id(o.original) in real else None
    if communicators:
        _same_on_their_ranks([o for o in owned if id(o) in contexts], contexts, context)
        facts: dict[str, Tensor] = {f"parameter {o.names[0]!r}": o.original for o in owned if id(o) not in contexts}
        facts |= {f"buffer {name!r}": buffer for name, buffer in buffers_of(model)}
        differing = differences(checksums(facts), monitor_of(context), "compares its values")
        if differing:
            raise DivergenceError(
                f"values differ between ranks: {differing}; use the same seed on every rank before building the model, load the "
                "same weights, or pass sync=True to take the first rank's values. If each rank needs its own value of a buffer, "
                "register it with persistent=False; of other buffers the first rank's value is saved for all."
            )
    return lambda o: None if o.original.is_meta else _torch.local_or_same(o.original).detach()


def _same_on_their_ranks(
    owned: Sequence[Owned], contexts: Mapping[int, ShardingContext], context: ShardingContext
) -> None:
    """Raise `DivergenceError` on every rank of `context`, the model's, if the values of a parameter in `owned` differ between the
    ranks of its own mesh. `contexts`: those of the parameters' own meshes, by id of the `Owned`. A collective."""
    if not owned:
        return
    differs = torch.zeros(len(owned), device=context.device)
    for i, o in enumerate(owned):
        local = _torch.local_or_same(o.original)
        if not local.is_meta:
            low, high = extremes(checksum(local).to(context.device), _communicators(contexts[id(o)]))
            differs[i] = (low != high).item()
    reduced(differs, _communicators(context), dist.ReduceOp.MAX)
    wrong = [repr(o.names[0]) for o, is_wrong in zip(owned, differs.tolist(), strict=True) if is_wrong]
    if wrong:
        raise DivergenceError(
            f"values differ between ranks of a parameter's own mesh: {some_of(wrong, SHOWN_FACTS)}; use the same seed on these "
            "ranks before building the model, or load the same weights on them."
        )


def first_ranks(tensor: Tensor, context: ShardingContext) -> Tensor:
    """Return the first rank's value of `tensor`, on the context's device. If `tensor` is on that device, it is overwritten with
    the value and shares memory with the result. A collective."""
    data = torch.empty_like(tensor, device=context.device) if tensor.is_meta else tensor.detach().to(context.device)
    broadcast([data], _communicators(context))
    return data


def _real_on_first(named: Mapping[str, Tensor], context: ShardingContext) -> set[int]:
    """Return the ids, on this rank, of the tensors in `named` that the first rank does not have on the meta device. Raises
    `DivergenceError` on every rank if a tensor is on meta on the first rank and real on another. A collective."""
    if not named:
        return set()
    is_meta = torch.tensor([tensor.is_meta for tensor in named.values()], dtype=torch.uint8, device=context.device)
    first = is_meta.clone()
    broadcast([first], _communicators(context))
    missing = first > extremes(is_meta, _communicators(context))[0]
    if missing.any():
        names = [name for name, is_missing in zip(named, missing.tolist(), strict=True) if is_missing]
        raise DivergenceError(
            f"sync=True takes the first rank's values, but {len(names)} tensors are on the meta device there and real on another "
            f"rank, the first is {names[0]}; load the weights on the first rank, the others may be on meta."
        )
    return {id(tensor) for tensor, is_on_meta in zip(named.values(), first.tolist(), strict=True) if not is_on_meta}


def buffers_of(model: nn.Module, *, all_of_them: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, buffer) of the persistent buffers, or with `all_of_them` of all buffers, each once."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is None or id(buffer) in seen:
                continue
            if all_of_them or key not in module._non_persistent_buffers_set:
                seen.add(id(buffer))
                yield f"{prefix}.{key}".lstrip("."), buffer


def place_buffers(model: nn.Module, precisions: Mapping[int, Precision], context: ShardingContext, sync: bool) -> None:
    """Move the buffers of `model` to the device, and cast floating-point ones to `Precision.buffers` of their unit. With `sync`
    (a collective) they get the first rank's values. Buffers on the meta device stay there, unless `sync` is set and the first
    rank has values for them. `precisions`: those of the units, by id of the unit's module; `model` must be among them."""
    synced: dict[int, Tensor] = {}
    if sync and _communicators(context):
        named = {f"buffer {name!r}": buffer for name, buffer in buffers_of(model, all_of_them=True)}
        real = _real_on_first(named, context)
        synced = {id(buffer): first_ranks(buffer, context) for buffer in named.values() if id(buffer) in real}

    def place(module: nn.Module, precision: Precision) -> None:
        precision = precisions.get(id(module), precision)
        for key, buffer in module._buffers.items():
            buffer = buffer if buffer is None else synced.get(id(buffer), buffer)
            if buffer is not None and not buffer.is_meta:
                dtype = precision.buffers if buffer.is_floating_point() else None
                module._buffers[key] = buffer.to(device=context.device, dtype=dtype)
        for child in module.children():
            place(child, precision)

    place(model, precisions[id(model)])


def _communicators(context: ShardingContext) -> list[Communicator]:
    """Return the communicators of `context` with more than one rank, except those of torch's "fake" backend."""
    communicators = [axis.gather for axis in (context.shard, context.replicate)]
    return [communicator for communicator in communicators if communicator.num_ranks > 1 and not communicator.is_fake]


# -- replicas


def compare_replicas(engine: Engine) -> None:
    """Raise `DivergenceError` on every rank if replicas of a shard differ. A collective; does nothing without replicas. The
    host waits for optimizer steps in progress. Parameters with a mesh of their own, and tensor subclasses, are not compared."""
    context, monitor = engine.context, monitor_of(engine.context)
    if context.replicate.num_ranks < 2 or context.cut_twice or context.replicate.gather.is_fake:
        return  # no other rank has the same shards
    engine.synchronize()
    params = [param for unit in engine.units for param in unit.params if param.context is context]
    shards = {param.name: _torch.local_of(param.sharded).detach() for param in params}
    digests = checksums({name: shard for name, shard in shards.items() if type(shard) is Tensor})
    agreement_of(engine).must("compares its replicas")  # a rank that is late may still wait in a collective
    report = {"what": "compares its replicas", "shard": context.shard.rank}
    reports = monitor.meet({**report, "digest": zlib.crc32(repr(digests).encode())}) or {}
    first: dict[int, Any] = {}
    if all(first.setdefault(each["shard"], each["digest"]) == each["digest"] for each in reports.values()):
        return
    details = monitor.meet({**report, "digests": digests, **monitor.history()}) or {}
    raise DivergenceError(
        step_differences(details)
        or f"replicas differ: {different(details)}; a rank has modified its own copy of weights; modify weights in the same way "
        "on all ranks, or load the newest checkpoint on all of them."
    )


def different(details: Mapping[int, Mapping[str, Any]]) -> str:
    """Return text that names each rank whose values differ from those of the first rank with the same shard, and the parameters;
    "" if none do. `details`: by rank, a dict with `shard`, the index of its shard, and `digests`, name of a parameter -> text."""
    first: dict[int, tuple[int, Mapping[str, str]]] = {}
    each = []
    for rank, report in sorted(details.items()):
        other, theirs = first.setdefault(report["shard"], (rank, report["digests"]))
        names = [name for name, digest in report["digests"].items() if theirs.get(name) != digest]
        if names:
            each.append(f"rank {rank} has other values than rank {other} in {some_of(names, SHOWN_FACTS)}")
    return " / ".join(each)
