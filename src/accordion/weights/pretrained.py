"""Fills sharded models, also from the meta device, from safetensors or checkpoints; each rank reads its own rows."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from accordion.checkpoint.collective import Team
from accordion.checkpoint.contents import WRAPPERS, local_data, named_tensors, without_wrappers
from accordion.checkpoint.format import holds
from accordion.checkpoint.load import load
from accordion.checkpoint.restore import listed
from accordion.checkpoint.untrusted_files import check_quantised
from accordion.engine.context import gathered
from accordion.engine.engine import Engine
from accordion.engine.params import Param, own_part
from accordion.errors import CheckpointError, UsageError
from accordion.state import settle, sharded_engine
from accordion.weights.adapters import added_by_adapters, copied_inside
from accordion.weights.four_bits import BLOCK, FourBitLinear
from accordion.weights.initialise import blank, check_adapters, follow_loaded, is_of_transformers, materialised_buffers
from accordion.weights.lazy_tensors import Rows, as_rows, rows_of_folder

PREFIXES = ("model.", "transformer.", "module.", "base_model.model.")  # nested models, DistributedDataParallel, PEFT
INSIDE = (*WRAPPERS, "base_layer.", "original_module.")  # the last two: weights of the model in PEFT's adapter layers
# Buffers that old versions of transformers saved and new ones compute.
MOVED_BUFFERS = (r"rotary_emb\.inv_freq", r"(^|\.)position_ids$")
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
SOURCE = "_accordion_weights"  # attribute of a module with the folder of its weights
COMPARE_BYTES = 16 * 2**20  # largest part of a tensor that is read at a time to compare two tensors


def load_pretrained(model: nn.Module, folder: str | os.PathLike[str], *, ignore: Iterable[str] = ()) -> None:
    """Fill a model that `shard` returned from a folder of safetensors; called by all ranks together.

    Each rank reads its own rows of each tensor into its shard, cast to the shard's dtype, and needs about 16 MiB more memory,
    or one whole tensor if a conversion computes it. Names may differ by the usual prefixes. For models of transformers, names
    and layouts of other versions are converted as transformers does. Tied tensors need to be stored only once. Buffers on the
    meta device that no file contains, and the few parameters that transformers never saves, are computed by the modules' own
    code. In PEFT models, files name a layer with adapters as they would without adapters; parameters that adapters add may be
    missing, as if they were in `ignore`; and copies of layers that PEFT trains (`modules_to_save`) begin with the weights of
    these layers. Weights of layers that `quantize` made are quantised in the dtype of the file, one layer at a time: each rank
    reads and quantises its own blocks.

    Args:
        folder: has `model.safetensors`, or `model.safetensors.index.json` and its files; or "owner/name", a model on the hub
        ignore: shell patterns of names that may be missing in the folder or in the model, and are not read. Such parameters
            keep their values; those from the meta device without one are initialised as by `initialise`, with the first rank's
            seed.

    Raises `CheckpointError` on every rank: before any weight changes, if tensors are missing, extra or misshapen, with all
    names; and if reading fails. Raises `UsageError` inside `full_params`, and if a meta tensor is in no file and no module
    computes it.
    """
    engine = sharded_engine(model, "load_pretrained")
    if engine.suspended:
        raise UsageError("load_pretrained does not work inside full_params; leave it first.")
    settle(engine, "loads pretrained weights")
    team = Team.of(model.parameters())
    with torch.inference_mode(False), torch.no_grad():
        source = team.agree(lambda: local_folder(folder))
        patterns = list(ignore)
        tensors, computed = team.agree(lambda: _fitting(model, engine, source, patterns))
        filled = {id(tensor) for name, tensor in names_of(model).items() if name in tensors}
        left_out = _unfilled(model, engine, patterns) - filled
        seed = int(team.shared(str(torch.initial_seed()))[0])
        with materialised_buffers(model, engine) as buffers:
            check_adapters(model, left_out)
            left = team.agree(lambda: buffers.compute_left(ignore=filled, params=computed | left_out, seed=seed))
            _refuse_left(left, "buffers and parameters" if left_out else "buffers", str(source))

            narrow = four_bit_layers(model)

            def read() -> None:
                wanted = names_of(model)
                for name, f in tensors.items():
                    if name in narrow:
                        continue
                    rows, into = _rows_of_rank(f.rows, wanted[name], engine), local_data(wanted[name])
                    assert rows.shape == into.shape, f"{name}: this rank has {into.shape} and reads {rows.shape}"
                    if into.numel():
                        rows.fill(into, (0,) * into.dim())

            team.agree(read)
            for name in (name for name in narrow if name in tensors):  # in the same order on every rank
                _read_four_bits(narrow[name], tensors[name].rows, engine, team)
            if left_out:
                follow_loaded(model, left_out)


def load_saved(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Fill a model that `shard` returned from the checkpoint at `path`, as `load` does; called by all ranks together.

    The model may be on the meta device: buffers that checkpoints do not contain are computed by the modules' own code. Raises
    `CheckpointError` if the checkpoint cannot be loaded, and `UsageError` if a buffer has no such code.
    """
    engine = sharded_engine(model, "load")
    with torch.no_grad():
        saved = {id(value) for value in model.state_dict(keep_vars=True).values() if isinstance(value, Tensor)}
    with materialised_buffers(model, engine) as buffers:
        left = Team.of(model.parameters()).agree(lambda: buffers.compute_left(ignore=saved))
        _refuse_left(left, "buffers", "checkpoints")
        load(path, model)


def _refuse_left(left: list[str], kinds: str, source: str) -> None:
    """Raise `UsageError` if `left`, names of tensors without a value, is not empty. For the message, `kinds`: plural noun for
    these tensors; `source`: where values were sought."""
    if left:
        raise UsageError(
            f"{len(left)} {kinds} of the meta device are not in {source}, and no module computes them: {', '.join(left)}; "
            "compute them in the `reset_parameters` of their modules, or build these modules off the meta device."
        )


def remember_source(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Store `folder`, which has the weights of `model`, in an attribute of `model`, for a later `fill_from_source`."""
    vars(model)[SOURCE] = os.fspath(folder)


def source_of(model: nn.Module) -> str | None:
    """Return the folder that `remember_source` stored in `model` or in a module inside it; None if there is none."""
    return next((vars(module)[SOURCE] for module in model.modules() if SOURCE in vars(module)), None)


def fill_from_source(model: nn.Module) -> None:
    """Load the weights of a sharded model from the folder `source_of(model)`, if any, and forget the folder. Collective."""
    folder = source_of(model)
    if folder is not None:
        load_pretrained(model, folder)
        for module in model.modules():
            vars(module).pop(SOURCE, None)


def _unfilled(model: nn.Module, engine: Engine, ignore: list[str]) -> set[int]:
    """Return the ids of meta-device parameters without a value that match `ignore` or belong to adapters. Collective."""
    added = added_by_adapters(model)
    ignored = {id(t) for name, t in names_of(model).items() if _matches(name, ignore) or id(t) in added}
    params = [param for param in engine.params if not param.is_filled]
    empty = set(blank(params, engine.context))
    return {id(p.sharded) for p in params if p.name in empty and id(p.sharded) in ignored}


def local_folder(folder: str | os.PathLike[str]) -> Path:
    """Return `folder` as a path if it exists. Otherwise download the model of that name, "owner/name", from the hub, and return
    the folder of the download. Raises `CheckpointError` if `folder` is no such name, or if the download fails."""
    path = Path(folder)
    if path.is_dir():
        return path
    if not HUB_NAME.fullmatch(str(folder)):
        raise CheckpointError(f"{str(folder)!r} is no folder, and no name of a model on the hub, as in 'owner/name'.")
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(str(folder), allow_patterns=["*.json", "*.safetensors"]))
    except Exception as error:  # the hub raises errors of many kinds, and its package may be missing
        text = " ".join(str(error).split())[:300]
        raise CheckpointError(f"{str(folder)!r} is no folder, and its download from the hub failed: {text}") from error


# -- matching of names


@dataclass(frozen=True, slots=True)
class StoredRows:
    """The values in a folder for one tensor of a model. `stored_as`: names of the stored tensors that they come from."""

    rows: Rows
    stored_as: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Matched:
    """The tensors of a folder matched with those of a model, as `match` returns them."""

    stored: dict[str, StoredRows]  # by the model's names
    first: dict[int, str]  # id of a model's tensor -> the first of its names in `stored`
    ties: list[tuple[str, str]]  # (first name, other name) of each tied tensor of the model that the folder has twice
    computed: set[int]  # ids of parameters that transformers never saves and the model's own code computes


def check_pretrained(model: nn.Module, folder: Path) -> None:
    """Raise `CheckpointError` if names, shapes or dtypes in `folder` do not fit an unsharded model, which may be on meta. Raise
    `UsageError` if `folder` has a quantised model."""
    stored = rows_of_folder(folder)
    check_quantised({}, str(folder), stored.keys() - names_of(model).keys())
    match(model, folder, stored, [])


def _fitting(
    model: nn.Module, engine: Engine, folder: Path, ignore: list[str]
) -> tuple[dict[str, StoredRows], set[int]]:
    """Match `folder` with `model`. Return (name in `model` -> tensor to read, tied ones once; ids of the parameters that the
    model's own code computes). Raises `CheckpointError` if names, shapes, dtypes or the values of tied tensors do not fit."""
    matched = match(model, folder, rows_of_folder(folder), ignore)
    wanted, unequal = names_of(model), []
    for first, second in matched.ties:
        a, b = (_rows_of_rank(matched.stored[name].rows, wanted[first], engine) for name in (first, second))
        if not equal_rows(a, b):
            unequal.append(f"{first} and {second}")
    if unequal:
        raise _misfit(model, folder, listed("tied in the model but not equal in the folder", unequal))
    return {name: matched.stored[name] for name in matched.first.values()}, matched.computed


def match(model: nn.Module, folder: Path, stored: Mapping[str, Rows], ignore: list[str]) -> Matched:
    """Match the tensors `stored` (name in `folder` -> lazy tensor) with those of `model`. Reads no values. Raises
    `CheckpointError` if a tensor is missing on either side or does not fit. `ignore`: shell patterns of names that may be
    missing; a tensor of `model` whose name matches a pattern is left out."""
    wanted = names_of(model)
    for name, layer in four_bit_layers(model).items():  # folders have one plain tensor for the weight and its scales
        for scales in ("absmax", "nested"):
            wanted.pop(name.removesuffix("weight") + scales, None)
        wanted[name] = torch.empty(layer.out_features, layer.in_features, dtype=layer.dtype, device="meta")
    named, extra, wrong = _named(model, stored, wanted)
    # A copied layer may be tied to a layer that is in the folder.
    by_tensor = {id(wanted[name]): f for name, f in named.items()}
    copies = {copy: by_tensor.get(id(wanted[original])) for copy, original in copies_of_layers(model).items()}
    named |= {copy: f for copy, f in copies.items() if f is not None and copy not in named}
    added = added_by_adapters(model)
    tensors = {name: f for name, f in named.items() if not _matches(name, ignore)}
    first: dict[int, str] = {}
    ties = [(one, name) for name in tensors if (one := first.setdefault(id(wanted[name]), name)) != name]
    absent = {name: t for name, t in wanted.items() if not (id(t) in first or id(t) in added or _matches(name, ignore))}
    unsaved = {name for name in absent if _searched(name, _class_patterns(model, "missing"))}
    missing = [f"{name} {tuple(t.shape)}" for name, t in absent.items() if name not in unsaved]
    known = [*_class_patterns(model, "unexpected"), *(MOVED_BUFFERS if is_of_transformers(model) else ())]
    surplus = [key for key in extra if not (_matches(key, ignore) or _searched(key, known))]
    unlike = [
        *listed("missing in the folder", missing),
        *listed("in the folder but not in the model", [f"{key} {tuple(stored[key].shape)}" for key in surplus]),
        *listed("that do not fit", [*wrong, *_misfits(tensors, wanted)]),
    ]
    if unlike:
        raise _misfit(model, folder, unlike)
    return Matched(tensors, first, ties, {id(absent[n]) for n in unsaved if isinstance(absent[n], nn.Parameter)})


def _misfit(model: nn.Module, folder: Path, unlike: list[str]) -> CheckpointError:
    return CheckpointError(f"{folder} does not fit {type(model).__name__}: {'; '.join(unlike)}.")


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def _searched(name: str, patterns: Iterable[str]) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)


def _class_patterns(model: nn.Module, kind: str) -> list[str]:
    """Return the regular expressions by which transformers' models in `model` name tensors that files may lack (`kind`
    "missing") or have in addition ("unexpected")."""
    attribute = f"_keys_to_ignore_on_load_{kind}"
    return [p for m in model.modules() if is_of_transformers(m) for p in getattr(m, attribute, None) or ()]


def names_of(model: nn.Module) -> dict[str, Tensor]:
    """Return name -> parameter or persistent buffer, with wrappers removed from names; a tied tensor has several entries."""
    return named_tensors(model, INSIDE)


def four_bit_layers(model: nn.Module) -> dict[str, FourBitLinear]:
    """Return {name of the weight, without those of wrappers: layer} for each layer of `model` that `quantize` made."""
    modules = {without_wrappers(f"{name}.weight", INSIDE): module for name, module in model.named_modules()}
    return {name: module for name, module in modules.items() if isinstance(module, FourBitLinear)}


def copies_of_layers(model: nn.Module) -> dict[str, str]:
    """Return {name of the copy: name of the original}, without wrappers' names, for tensors of PEFT's `modules_to_save`."""
    originals = {}
    for prefix, module in model.named_modules():
        for adapter, copy in copied_inside(module):
            for key in copy.state_dict(keep_vars=True):
                names = (f"{prefix}.modules_to_save.{adapter}.{key}", f"{prefix}.{key}")
                plain, original = (without_wrappers(name, INSIDE) for name in names)
                originals[plain] = original
    return originals


def _misfits(tensors: Mapping[str, StoredRows], wanted: Mapping[str, Tensor]) -> list[str]:
    result = []
    for name, f in tensors.items():
        tensor = wanted[name]
        stored, expected = (f"{str(t.dtype).removeprefix('torch.')} {tuple(t.shape)}" for t in (f.rows, tensor))
        if f.rows.shape != tensor.shape or not holds(tensor.dtype, f.rows.dtype):
            stored_as = "" if f.stored_as == (name,) else f" (from {', '.join(f.stored_as)})"
            result.append(f"{name} is {stored} in the folder{stored_as} and {expected} in the model")
    return result


def equal_rows(a: Rows, b: Rows) -> bool:
    """Return True if `a` equals `b`, of equal shape, cast to `a.dtype`. Reads at most 16 MiB of each at a time, or one row."""
    if not a.shape:
        return torch.equal(a.whole(), b.whole())
    step = max(1, COMPARE_BYTES // max(1, a.shape[1:].numel() * a.dtype.itemsize))
    for start in range(0, a.shape[0], step):
        one, other = (rows.narrow(0, start, min(step, a.shape[0] - start)).whole() for rows in (a, b))
        if not torch.equal(one, other.to(one.dtype)):
            return False
    return True


def _named(
    model: nn.Module, stored: Mapping[str, Rows], wanted: Mapping[str, Tensor]
) -> tuple[dict[str, StoredRows], list[str], list[str]]:
    """Return (name in `wanted` -> stored tensor, stored names without a tensor in `wanted`, error texts). The errors are
    conversions that failed, and two stored names for one tensor."""
    tensors, extra, wrong = _converted(model, stored, wanted) if is_of_transformers(model) else ({}, list(stored), [])
    prefixes: tuple[str, ...] = PREFIXES
    if is_of_transformers(model) and model.base_model_prefix:
        prefixes = (f"{model.base_model_prefix}.", *PREFIXES)
    left = []
    for key in extra:
        name = own_name(key, wanted, prefixes)
        if name is None:
            left.append(key)
        elif name in tensors:
            wrong.append(f"{key} and {', '.join(tensors[name].stored_as)} both stand for {name}")
        else:
            tensors[name] = StoredRows(stored[key], (key,))
    return tensors, left, wrong


def own_name(key: str, wanted: Mapping[str, object], prefixes: Iterable[str]) -> str | None:
    """Return the name in `wanted` that `key`, a name in a file, stands for, or None. Tries `key` itself, then `key` without
    wrappers, then removes one of `prefixes` after another. At last tries each of these names with one of `prefixes` added."""
    names = [key]
    key = without_wrappers(key, INSIDE)
    while True:
        names.append(key)
        prefix = next((p for p in prefixes if key.startswith(p)), None)
        if prefix is None:
            break
        key = key.removeprefix(prefix)
    names += [prefix + name for name in names for prefix in prefixes]
    return next((name for name in names if name in wanted), None)


def _converted(
    model: Any, stored: Mapping[str, Rows], wanted: Mapping[str, Tensor]
) -> tuple[dict[str, StoredRows], list[str], list[str]]:
    """Apply the rules with which transformers renames, merges and splits tensors of other versions. Return (name in `wanted` ->
    stored tensor, stored names that no rule leads to a free name in `wanted`, error texts)."""
    from transformers import conversion_mapping, core_model_loading

    rules = conversion_mapping.get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, core_model_loading.WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, core_model_loading.WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    tensors: dict[str, StoredRows] = {}
    extra, wrong = [], []
    makers: dict[str, tuple[Any, list[str]]] = {}
    for key in sorted(stored, key=core_model_loading.dot_natural_key):
        name, pattern = core_model_loading.rename_source_key(
            key, renamings, converters, model.base_model_prefix, wanted
        )
        if name not in wanted and key in wanted:
            name, pattern = key, None
        if name not in wanted or (pattern is None and name in tensors):
            extra.append(key)
        elif pattern is None:
            tensors[name] = StoredRows(stored[key], (key,))
        else:
            maker, keys = makers.setdefault(name, (deepcopy(by_pattern[pattern]), []))
            maker.add_tensor(name, key, pattern, stored[key])
            keys.append(key)
    for name, (maker, keys) in makers.items():
        try:
            for target, value in maker.convert(name, model=model, config=model.config).items():
                rows = as_rows(value[0] if isinstance(value, (list, tuple)) else value)
                if target in tensors:
                    wrong.append(
                        f"{', '.join(keys)} and {', '.join(tensors[target].stored_as)} both stand for {target}"
                    )
                elif target in wanted:
                    tensors[target] = StoredRows(rows, tuple(keys))
                else:
                    wrong.append(f"{', '.join(keys)} become {target}, which the model does not have")
        except Exception as error:  # operations of transformers raise errors of many kinds
            wrong.append(f"{name} cannot be made of {', '.join(keys)}: {error}")
    return tensors, extra, wrong


# -- reading


def _rows_of_rank(rows: Rows, tensor: Tensor, engine: Engine) -> Rows:
    """Return the part of `rows`, the values of the model's `tensor`, that this rank keeps: all if `tensor` is not sharded."""
    param = _param_of(tensor, engine)
    return rows if param is None else own_part(rows, param)  # type: ignore[arg-type, return-value]


def _param_of(tensor: Tensor | None, engine: Engine) -> Param | None:
    return next((p for unit in engine.units for p in unit.params if p.sharded is tensor), None)


def _read_four_bits(layer: FourBitLinear, rows: Rows, engine: Engine, team: Team) -> None:
    """Quantise this rank's rows of the plain weight `rows`, (out, in), into its shards of a four-bit `layer`. Collective."""
    device, weight = engine.context.device, _param_of(layer.weight, engine)
    assert weight is not None, "shard() shards parameters of any size"
    blocks: Any = own_part(rows.in_blocks(BLOCK), weight)  # type: ignore[arg-type]
    packed, absmax = team.agree(lambda: layer.packed(blocks.whole().to(device)))
    local_data(layer.weight).copy_(packed)
    # With double quantisation, the mean of all scales is subtracted from each.
    of_absmax = replace(weight.cut, shape=(weight.cut.rows, 1))
    for name, scales in layer.scales(gathered(absmax, of_absmax, weight.context)).items():
        param = _param_of(layer.get_parameter(name), engine)
        assert param is not None, "shard() shards parameters of any size"
        local_data(param.sharded).copy_(own_part(scales, param))
