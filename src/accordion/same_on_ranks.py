"""Whether all ranks hold the same: what `shard` is given, the model's structure, and values by checksum."""

from __future__ import annotations

import hashlib
import json
import logging
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
from accordion.errors import AccordionError, DivergenceError, OffloadError, UsageError
from accordion.safety.divergence import DivergenceMonitor, monitor_of
from accordion.sharding import Sharding
from accordion.tensor_checksum import checksum, checksums
from accordion.units import Owned

log = logging.getLogger("accordion")
Made = TypeVar("Made")
Facts = dict[str, str]
"""What a rank holds, by a name that messages show; differences are told in this order."""

SHOWN_FACTS, SHOWN_RANKS = 3, 4  # in a message


# -- any facts


def differences(facts: Facts, watch: DivergenceMonitor, what: str) -> str:
    """Empty where all ranks hold the same facts; else which ranks differ from the first, and in what. A collective.

    The answer is the same on all ranks. They compare a digest of 8 bytes, and only where these differ anything more is said.
    `what` a rank does here, for the messages of those that wait for it.
    """
    digest = hashlib.sha256(json.dumps(list(facts.items())).encode()).hexdigest()[:16]
    found = watch.meet({"what": what, "digest": digest})
    if found is None:
        return ""
    rank, first = dist.get_rank(), min(found)
    heard = watch.meet({"what": what, "rank": rank, "facts": facts if rank == first else None})
    assert heard is not None, "each rank says its own number"
    theirs = heard[first]["facts"]
    unlike = [
        f"{name} {facts.get(name, 'not at all')} (rank {first}: {theirs.get(name, 'not at all')})"
        for name in dict.fromkeys([*theirs, *facts])
        if facts.get(name) != theirs.get(name)
    ]
    told = watch.meet({"what": what, "rank": rank, "unlike": unlike[:SHOWN_FACTS], "num": len(unlike)})
    assert told is not None, "each rank says its own number"
    each = [
        f"rank {r} has {'; '.join(said['unlike'])}{_more(said['num'] - SHOWN_FACTS, 'more')}"
        for r, said in told.items()
        if said["num"]
    ]
    return " / ".join(each[:SHOWN_RANKS]) + _more(len(each) - SHOWN_RANKS, "more ranks")


def _more(count: int, what: str) -> str:
    return f" and {count} {what}" if count > 0 else ""


# -- what `shard` is given


def same_structure(
    owned: list[Owned],
    chosen: list[tuple[str, nn.Module]],
    strategy: Strategy,
    context: ShardingContext,
    arguments: Mapping[str, str] | None = None,
    refused: UsageError | None = None,
) -> None:
    """Raise `DivergenceError` on every rank where ranks hold other arguments, units or parameters, naming what differs.

    `refused`: why this rank goes on no further, which it raises when the others have heard of it.
    """
    sync = (arguments or {}).get("sync") == "True"
    known = STRATEGIES.get(strategy.name) == strategy
    facts = {"strategy": strategy.name if known else str(strategy), **(arguments or {})}
    facts |= {f"unit {name!r}": type(module).__name__ for name, module in chosen}
    for o in owned:
        also = f", also named {', '.join(o.names[1:])}" if o.names[1:] else ""
        trained = "trained" if o.original.requires_grad else "frozen"
        facts[f"parameter {o.names[0]!r}"] = (
            f"{form_of(o.original, sync)}, {trained}, in unit {chosen[o.owner][0]!r}{also}"
        )
    if arguments is not None:
        facts |= {f"buffer {name!r}": form_of(b, sync) for name, b in buffers_of(chosen[0][1], all_of_them=sync)}
    facts = {"a refusal:": "none" if refused is None else str(refused), **facts}
    unlike = differences(facts, monitor_of(context), "compares its model and settings")
    if refused is not None:
        raise refused
    if unlike:
        raise DivergenceError(
            f"ranks hold different models or settings: {unlike}; build the same model with the same arguments on every rank."
        )


def form_of(tensor: object, sync: bool = False) -> str:
    """Dtype and shape. With `sync` a rank may have on the meta device what the first one has."""
    if not isinstance(tensor, Tensor):
        return f"of type {type(tensor).__name__}"
    place = " on meta" if tensor.is_meta and not sync else ""
    lies = f" as {tensor.placements}" if isinstance(tensor, DTensor) else ""
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}{lies}{place}"


COMPARED_APART = ("strategy", "precision", "offload", "units", "meshes", "prefetch")
"""Fields of a sharding that are compared by unit or parameter, or in words of their own."""


def arguments_of(mesh: DeviceMesh, sharding: Sharding, sync: bool, debug: Collection[str]) -> Facts:
    """Return the arguments of `shard` that hold for the whole model, on which ranks must agree."""
    changed, recomputed = sharding.as_config(), sharding.checkpointing
    asked = "none" if not recomputed.every else "full" if recomputed.every == 1 else f"every:{recomputed.every}"
    return {
        "mesh": f"{tuple(mesh.shape)} of {mesh.device_type}, ranks {_torch.ranks_of(mesh)}",
        "sync": str(sync),
        "debug": str(sorted(debug)),
        **{f.name: repr(changed.get(f.name, f.default)) for f in fields(Sharding) if f.name not in COMPARED_APART},
        "prefetch.budget_bytes": str(sharding.prefetch.budget_bytes),
        "checkpoint_activations": repr("selective" if recomputed.selective else asked),  # `full` is `every:1`
    }


def settings_of(names: Sequence[str], precisions: Sequence[Precision], offloads: Sequence[Offload]) -> Facts:
    """What ranks must agree on of each unit's settings, the root's first; of another unit only what is not the root's."""
    facts: Facts = {}
    root: Facts = {}
    for name, precision, offload in zip(names, precisions, offloads, strict=True):
        own = _settings(precision, offload)
        facts |= {f"{key} of unit {name!r}" if name else key: v for key, v in own.items() if v != root.get(key)}
        root = root or own
    return facts


def _settings(precision: Precision, offload: Offload) -> Facts:
    """Of one unit. Folders of a tier and bytes of budgets may be each rank's own."""
    kinds = ("params", "reduce", "output", "master", "buffers", "cast_inputs")
    places = {
        "params": offload.params,
        "grads": offload.rest_of_grads,
        "optimizer": offload.optimizer,
        "activations": offload.activations,
        "step": offload.stepped_on,
    }
    return {
        **{f"precision.{key}": str(getattr(precision, key)).removeprefix("torch.") for key in kinds},
        **{f"offload.{key}": repr(place.partition(":")[0]) for key, place in places.items()},
        "offload with a budget": str((offload.device_bytes, offload.host_bytes) != (None, None)),
        "offload.step_in_backward": str(offload.step_in_backward),
    }


def on_every_rank(make: Callable[[], Made], context: ShardingContext) -> Made:
    """What `make` gives. Where it raises one of our errors on some rank it is raised on all: none goes on and waits for it."""
    made: Made | None = None
    error: AccordionError | None = None
    try:
        made = make()
    except (UsageError, OffloadError) as caught:
        error = caught
    failed, communicators = torch.tensor([float(error is not None)], device=context.device), _communicators(context)
    if communicators:
        reduced(failed, communicators)
    if error is not None:
        raise error
    if communicators and failed.item():
        raise UsageError(
            f"{int(failed.item())} other ranks refused what they were given, or could not get what it takes; they say why."
        )
    assert made is not None, "what is made is an object"
    return made


# -- values


def same_given(
    given: Mapping[str, Any], watch: DivergenceMonitor, what: str, also: Mapping[str, str] | None = None
) -> str:
    """Empty where all ranks were given tensors of the same forms and values, and `also` the same; else what differs.

    A collective. `given`: by a name that messages show; of what is no tensor its type is compared. `what` it is given to.
    """
    if not watch.listens:
        return ""
    sums = checksums({key: t for key, t in given.items() if isinstance(t, Tensor) and not isinstance(t, DTensor)})
    facts = {key: f"{form_of(value)} {sums.get(key, '')}".rstrip() for key, value in given.items()}
    return differences({**facts, **(also or {})}, watch, f"compares what {what} is given")


ValueOf = Callable[[Owned], Tensor | None]


def same_values(
    model: nn.Module,
    owned: list[Owned],
    context: ShardingContext,
    sync: bool,
    own_contexts: Mapping[int, ShardingContext] | None = None,
) -> ValueOf:
    """What gives the value from which each parameter is cut, None for one on meta; with `sync` the first rank's, for all.

    Where ranks hold other values, of parameters or of buffers in the state dict, raises `DivergenceError` on every rank, naming
    them. Other buffers are each rank's own: those that differ are told in a warning. `own_contexts`: by id, of parameters that
    are the same on some of the ranks alone. With `sync` what is given must be called for every parameter, on all ranks in the
    same order: it communicates, and one full parameter is in memory at a time.
    """
    communicators = _communicators(context)
    if sync and communicators:
        named = {f"parameter {o.names[0]!r}": o.original for o in owned}
        made = _made_on_first(named, context)
        taken = {id(o) for o, is_made in zip(owned, made, strict=True) if is_made}
        return lambda o: first_ranks(o.original, context) if id(o) in taken else None
    if communicators:
        kept = dict(buffers_of(model))
        others = {name: b for name, b in buffers_of(model, all_of_them=True) if name not in kept}
        alone = own_contexts or {}
        _same_on_their_ranks([o for o in owned if id(o) in alone], alone, context)
        facts: dict[str, Tensor] = {f"parameter {o.names[0]!r}": o.original for o in owned if id(o) not in alone}
        facts |= {f"buffer {name!r}": buffer for name, buffer in kept.items()}
        unlike = differences(checksums(facts), monitor_of(context), "compares its values")
        if unlike:
            raise DivergenceError(
                f"values differ between ranks: {unlike}; seed every rank alike before building the model, load the same weights, "
                "or pass sync=True to take the first rank's. A buffer that is meant to be each rank's own is one with "
                "persistent=False: of others the first rank's is saved for all."
            )
        forms = {f"buffer {name!r}": form_of(b, sync=False) for name, b in others.items()}
        sums = checksums({f"buffer {name!r}": b for name, b in others.items()})
        held = {name: f"{form} {sums.get(name, '')}".rstrip() for name, form in forms.items()}
        apart = differences(held, monitor_of(context), "compares its buffers")
        if apart and all(communicator.rank == 0 for communicator in communicators):
            log.warning(
                "buffers outside of the state dict differ between ranks: %s; each rank keeps its own, and sync=True takes the "
                "first rank's.",
                apart,
            )
    return lambda o: None if o.original.is_meta else _part_of(o).detach()


def _part_of(o: Owned) -> Tensor:
    """What this rank holds of a parameter before it is sharded."""
    return _torch.local_of(o.original) if isinstance(o.original, DTensor) else o.original


def _same_on_their_ranks(
    owned: Sequence[Owned], contexts: Mapping[int, ShardingContext], context: ShardingContext
) -> None:
    """Raise `DivergenceError` on every rank of the model where ranks of a parameter's own mesh hold other values of it."""
    if not owned:
        return
    unlike = torch.zeros(len(owned), device=context.device)
    for i, o in enumerate(owned):
        if not _part_of(o).is_meta:
            low, high = extremes(checksum(_part_of(o)).to(context.device), _communicators(contexts[id(o)]))
            unlike[i] = (low != high).item()
    reduced(unlike, _communicators(context), dist.ReduceOp.MAX)
    wrong = [o.names[0] for o, is_unlike in zip(owned, unlike.tolist(), strict=True) if is_unlike]
    if wrong:
        listed = ", ".join(map(repr, wrong[:SHOWN_FACTS])) + _more(len(wrong) - SHOWN_FACTS, "more")
        raise DivergenceError(
            f"values differ between ranks of a parameter's own mesh: {listed}; seed these ranks alike before "
            "building the model, or load the same weights on them."
        )


def first_ranks(tensor: Tensor, context: ShardingContext) -> Tensor:
    """The first rank's value of a tensor, on the device; where this rank's is real it is overwritten. A collective."""
    data = torch.empty_like(tensor, device=context.device) if tensor.is_meta else tensor.detach().to(context.device)
    broadcast([data], _communicators(context))
    return data


def _made_on_first(named: Mapping[str, Tensor], context: ShardingContext) -> list[bool]:
    """Which of them the first rank holds off the meta device, the same on all ranks. Raises `DivergenceError` on every rank
    where another rank holds more than the first, whose values all shall take."""
    if not named:
        return []
    own = torch.tensor([tensor.is_meta for tensor in named.values()], dtype=torch.uint8, device=context.device)
    first = own.clone()
    broadcast([first], _communicators(context))
    missing = first > extremes(own, _communicators(context))[0]
    if missing.any():
        names = [name for name, is_missing in zip(named, missing.tolist(), strict=True) if is_missing]
        raise DivergenceError(
            f"sync=True takes the first rank's values, and {len(names)} tensors are on the meta device there and real on another "
            f"rank, the first is {names[0]}; load the weights on the first rank, the others may be on meta."
        )
    return [not is_meta for is_meta in first.tolist()]


def buffers_of(model: nn.Module, *, all_of_them: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Each buffer once, by name; without `all_of_them` those that a state dict holds."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is None or id(buffer) in seen:
                continue
            if all_of_them or key not in module._non_persistent_buffers_set:
                seen.add(id(buffer))
                yield f"{prefix}.{key}".lstrip("."), buffer


def place_buffers(model: nn.Module, precisions: Mapping[int, Precision], context: ShardingContext, sync: bool) -> None:
    """Move buffers to the device and cast them as their units ask; with `sync` all take the first rank's.

    `precisions`: by id of a unit's module, the root's among them.
    """
    synced: dict[int, Tensor] = {}
    if sync and _communicators(context):
        named = {f"buffer {name!r}": buffer for name, buffer in buffers_of(model, all_of_them=True)}
        for buffer, is_made in zip(named.values(), _made_on_first(named, context), strict=True):
            if is_made:
                synced[id(buffer)] = first_ranks(buffer, context)

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
    """Those on which somebody answers."""
    communicators = [axis.gather for axis in (context.shard, context.replicate)]
    return [communicator for communicator in communicators if communicator.num_ranks > 1 and not communicator.is_fake]
