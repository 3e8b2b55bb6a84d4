"""Choose the modules whose parameters are gathered together (units), and the unit to which each parameter belongs."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any, TypeVar

import torch
from torch import nn

from accordion.config import Offload, Precision, UnitRule
from accordion.engine.unit import is_layer
from accordion.errors import UsageError, nearest


@dataclass(frozen=True, slots=True)
class MinParams:
    """A choice of units, made from the leaves up: a module with a forward, and not inside a MultiheadAttention, becomes a unit
    if it has at least `num_params` parameter elements that are in no unit chosen inside it."""

    num_params: int

    def __str__(self) -> str:
        return f"min_params:{self.num_params}"


def min_params(num_params: int) -> MinParams:
    """Return a value for `shard(units=)` that makes units of at least `num_params` parameter elements, from the leaves up.
    Raises `UsageError` unless `num_params` is a positive integer."""
    if isinstance(num_params, bool) or not isinstance(num_params, int) or num_params < 1:
        raise UsageError(f"min_params({num_params!r}) makes no sense; pass a positive whole number of parameters.")
    return MinParams(num_params)


@dataclass(frozen=True, slots=True)
class Blocks:
    """A choice of units: each repeated block is one, and all other parameters are in the unit of the model itself, the root."""

    def __str__(self) -> str:
        return "blocks"


def only_blocks() -> Blocks:
    """Return a value for `shard(units=)`: only repeated blocks are units; all other layers stay gathered for the whole step."""
    return Blocks()


Policy = TypeVar("Policy", Precision, Offload)
UnitChoice = Iterable[type[nn.Module] | str] | type[nn.Module] | MinParams | Blocks | UnitRule | None

AUTO = "auto"  # the name of the default
LARGE_SHARE = 0.5  # a layer outside the blocks with this share of the largest block's parameters is a unit


@dataclass(slots=True)
class Owned:
    """A parameter of the model before sharding. `names`: all of its names (tied weights). `others`: other parameter objects that
    share its memory. `places`: (module, attribute name) of each module that has it. `owner`: index of its unit."""

    names: list[str]
    original: nn.Parameter
    others: list[nn.Parameter]
    places: list[tuple[weakref.ref[nn.Module], str]]
    owner: int


def units_named(text: str) -> UnitChoice:
    """Return the value for `shard(units=)` that a text means: None for "auto", `Blocks` for "blocks", `MinParams` for
    "min_params:N", a list of names for class names separated by commas. Raises `UsageError` for any other text."""
    head, colon, count = text.partition(":")
    names = [part.strip() for part in text.split(",")]
    if text == AUTO:
        return None
    if text == "blocks":
        return only_blocks()
    if head == "min_params" and count.isdecimal() and len(count) < 19:
        return min_params(int(count))
    if colon or not all(part.isidentifier() for part in names):
        known = [AUTO, "blocks", "min_params:1000000", "ClassName,Other"]
        raise UsageError(f"units {text!r} is not understood; {nearest(text, known)}")
    return names


def choose_units(model: nn.Module, choice: UnitChoice) -> list[tuple[str, nn.Module]]:
    """Return (name, module) of each unit by `choice`, the argument `units` of `shard`: the model first, with the name "", then
    chosen modules inside it that have parameters. Raises `UsageError` for a class that no module has."""
    if choice is None:
        blocks = _repeated_blocks(model)
        chosen = blocks | _large_layers(model, blocks)
    elif isinstance(choice, Blocks):
        chosen = _repeated_blocks(model)
    elif isinstance(choice, MinParams):
        chosen = _by_size(model, choice.num_params)
    elif callable(choice) and not isinstance(choice, (type, nn.Module)):
        chosen = {id(m) for name, m in model.named_modules() if choice(name, m)}
    else:
        chosen = _by_class(model, choice)
    inner = [(n, m) for n, m in model.named_modules() if m is not model and id(m) in chosen and has_params(m)]
    return [("", model), *inner]


def by_unit(chosen: Sequence[tuple[str, nn.Module]], policy: Policy, kind: str) -> list[Policy]:
    """Return for each unit in `chosen` (name, module) the last of `policy.overrides` whose key, a class or a shell pattern of
    names, matches it; `policy` if none does. Raises `UsageError` if a key matches no unit. `kind`: "Offload" or "Precision"."""
    result: list[Policy] = []
    used = set()
    for name, module in chosen:
        chosen_policy = policy
        for key, override in policy.overrides.items():
            if fnmatch(name, key) if isinstance(key, str) else isinstance(module, key):
                chosen_policy = override
                used.add(key)
        result.append(chosen_policy)
    unused = [str(key) for key in policy.overrides if key not in used]
    if unused:
        names = ", ".join(sorted({f"{n or '(root)'}: {type(m).__name__}" for n, m in chosen})[:8])
        raise UsageError(
            f"{kind}.overrides names {', '.join(unused)}, which is no unit; the units are {names}; add it to `units`."
        )
    return result


def has_params(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _repeated_blocks(model: nn.Module) -> set[int]:
    """Return ids of the modules whose class is named in `model._no_split_modules` (transformers). If there are none, return ids
    of repeated modules: those with children whose `ModuleList`, `Sequential` or `ModuleDict`, lists inside it included, has
    another module of their class. Modules inside a repeated one are left out."""
    named = getattr(model, "_no_split_modules", None)
    if named:
        chosen = {id(m) for m in model.modules() if type(m).__name__ in named and m is not model}
        if chosen:
            return chosen
    blocks: set[int] = set()

    def search(module: nn.Module) -> None:
        children = [c for c in module.children() if has_params(c)]
        if isinstance(module, (nn.ModuleList, nn.Sequential, nn.ModuleDict)):
            listed = list(_called_below(module))
            counts = Counter(type(c) for c in listed)
            blocks.update(id(c) for c in listed if counts[type(c)] > 1 and any(True for _ in c.children()))
        for child in children:
            if id(child) not in blocks:
                search(child)

    search(model)
    return blocks


def _large_layers(model: nn.Module, blocks: set[int]) -> set[int]:
    """Return ids of linear and embedding layers outside of `blocks` with at least `LARGE_SHARE` of the largest block's
    parameters. Layers that are tied, or occur twice in the model, are left out. Without blocks no layer is large."""
    # In the root's unit they would stay in memory for the whole step, and a head's gradient would wait for the embedding's. Not
    # layers that occur twice: two calls of a unit are two reduces, whose sum has another order.
    layers: set[int] = set()
    num_users: Counter[object] = Counter()
    num_paths: Counter[int] = Counter(id(m) for _, m in model.named_modules(remove_duplicate=False))
    for module in model.modules():
        num_users.update(storage_key(p) for p in module._parameters.values() if p is not None)
    sizes = [sum(p.numel() for p in m.parameters()) for m in model.modules() if id(m) in blocks]
    least = LARGE_SHARE * max(sizes, default=float("inf"))

    def search(module: nn.Module) -> None:
        for child in module.children():
            params = list(child.parameters(recurse=False))
            if id(child) in blocks:
                continue
            if not is_layer(child):
                search(child)
            elif (
                num_paths[id(child)] == 1
                and all(num_users[storage_key(p)] == 1 for p in params)
                and sum(p.numel() for p in params) >= least
            ):
                layers.add(id(child))

    search(model)
    return layers


def _called_below(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the children of `module` with parameters; a child without a forward is replaced by its children, to any depth."""
    for child in module.children():
        if has_params(child):
            yield from [child] if is_called(child) else _called_below(child)


def _by_size(model: nn.Module, num_params: int) -> set[int]:
    """Return ids of the modules chosen from the leaves up: each that has a forward, and at least `num_params` parameter elements
    that are in no chosen module inside it. Modules inside a MultiheadAttention are not chosen."""
    chosen: set[int] = set()

    def search(module: nn.Module, taken: set[int]) -> None:
        for child in () if isinstance(module, nn.MultiheadAttention) else module.children():
            search(child, taken)
        free_params = [p for p in module.parameters() if id(p) not in taken]
        if sum(p.numel() for p in free_params) >= num_params and is_called(module):
            chosen.add(id(module))
            taken.update(id(p) for p in free_params)

    search(model, set())
    return chosen


def is_called(module: nn.Module) -> bool:
    """Return True if the class of `module` defines a forward; `nn.Sequential` does, `nn.ModuleList` does not."""
    return type(module).forward is not nn.Module.forward


def _by_class(model: nn.Module, choice: Any) -> set[int]:
    """Return ids of the modules that are instances of a class in `choice`: one class or several, as types or by name. Raises
    `UsageError` if `choice` has something else, or a class of which the model has no module."""
    wanted = list(choice) if isinstance(choice, Iterable) and not isinstance(choice, (str, nn.Module)) else [choice]
    chosen: set[int] = set()
    classes = sorted({type(m).__name__ for m in model.modules()})
    for cls in wanted:
        if not isinstance(cls, (str, type)):
            raise UsageError(
                f"units has an object of type {type(cls).__name__}; pass classes, min_params(n) or f(name, module) -> bool."
            )
        if isinstance(cls, str):
            matching = {id(m) for m in model.modules() if cls in (c.__name__ for c in type(m).__mro__)}
        else:
            matching = {id(m) for m in model.modules() if isinstance(m, cls)}
        if not matching:
            name = cls if isinstance(cls, str) else cls.__name__
            raise UsageError(
                f"units names {name}, but the model has no such module; {nearest(name, classes)} Or take auto, blocks or "
                "min_params:N; in Python, None, only_blocks() or min_params(N)."
            )
        chosen |= matching
    return chosen


def owned_parameters(model: nn.Module, index: Mapping[int, int]) -> list[Owned]:
    """Return one `Owned` per parameter; tied parameters are one. Its owner is the innermost unit that contains all modules that
    have the parameter, or unit 0 if there is none. `index`: id of a unit's module -> index of the unit."""
    entries: dict[object, Owned] = {}
    above: dict[object, list[int]] = {}
    seen: set[int] = set()

    def walk(module: nn.Module, prefix: str, chain: list[int]) -> None:
        again = id(module) in seen  # under another parent: more names and other enclosing units, but the same places
        seen.add(id(module))
        if id(module) in index:
            chain = [*chain, index[id(module)]]
        for attr, param in module._parameters.items():
            if param is None:
                continue
            key = storage_key(param)
            if key not in entries:
                entries[key], above[key] = Owned([], param, [], [], 0), chain
            entry = entries[key]
            entry.names.append(prefix + attr)
            if not again:
                entry.places.append((weakref.ref(module), attr))
            if all(param is not known for known in (entry.original, *entry.others)):
                entry.others.append(param)
            above[key] = [i for i in above[key] if i in chain]
        for name, child in module._modules.items():
            if child is not None:
                walk(child, f"{prefix}{name}.", chain)

    walk(model, "", [])
    for key, entry in entries.items():
        entry.owner = above[key][-1] if above[key] else 0
    return list(entries.values())


STATISTICS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def gathered_dtype(o: Owned, precision: Precision) -> torch.dtype:
    """Return the dtype in which a parameter is gathered: `precision.params`, or its own dtype if that is None or the own dtype is
    not floating. Parameters of batch norms with running statistics keep their own dtype unless `precision.buffers` is set."""
    # torch's kernels require a batch norm's parameters and statistics in equal dtypes (2.13), and statistics in two bytes
    # hardly change. Its inputs and outputs have the compute dtype.
    modules = [ref() for ref, _ in o.places]
    if precision.buffers is None and all(isinstance(m, STATISTICS) and m.running_mean is not None for m in modules):
        return o.original.dtype
    return precision.compute_dtype(o.original.dtype)


def other_units_read(units: Sequence[Sequence[nn.Module]], owned: Iterable[Owned]) -> list[list[int]]:
    """Return, for each unit, the indices of the other units whose parameters its modules read: units inside it, and owners of
    tied weights. `units`: the modules of each unit. `owned`: all parameters of the model."""
    owners: dict[int, set[int]] = {}
    for entry in owned:
        for ref, _ in entry.places:
            owners.setdefault(id(ref()), set()).add(entry.owner)
    none: set[int] = set()
    return [
        sorted({owner for top in tops for m in top.modules() for owner in owners.get(id(m), none)} - {i})
        for i, tops in enumerate(units)
    ]


def storage_key(param: nn.Parameter) -> object:
    """Return a key that is equal for parameters that share their memory: one object, or two with equal address, shape, strides
    and dtype. Meta tensors, tensor subclasses and empty tensors share a key with no other object."""
    if param.device.type == "meta" or param.numel() == 0 or type(param.data) is not torch.Tensor:
        return id(param)
    return param.data_ptr(), param.shape, param.stride(), param.dtype
