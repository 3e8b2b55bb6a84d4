"""Read a `ds_config.json` into `Settings`: check its keys and values, and replace `"auto"` by values."""

from __future__ import annotations

import json
import logging
import math
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from accordion import config
from accordion.compat.deepspeed.rules import LossScaler, OptimizerChoice, Schedule, optimizer_of
from accordion.errors import UsageError
from accordion.files import read_text
from accordion.sharding import Sharding

log = logging.getLogger("accordion")
STAGES = (config.NO_SHARD, config.SHARD_OPTIM, config.SHARD_GRAD_OP, config.FULL_SHARD)
PLACES = {"none": config.DEVICE, "cpu": config.HOST}  # "nvme" becomes a folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One row of keys.toml: how a key of DeepSpeed's configuration is treated.

    Args:
        used, not_needed, refused: one of them has the text: how the key is used, or why it is not. The others are empty.
        takes: values of a used key: a tuple of words, `bool`, `float` (at least 0), or an int, the least whole number.
        off: values of a refused key that are accepted, because they ask for nothing.
        asked: the key of `accordion train` that replaces an "auto". Other callers must pass a value, unless `auto` is set.
        auto: the value of an `"auto"` if the caller passes none: the default of transformers' TrainingArguments.
        follows: the other keys that decide an `"auto"`, in words.
    """

    used: str = ""
    not_needed: str = ""
    refused: str = ""
    takes: Any = None
    off: tuple[Any, ...] = ()
    asked: str = ""
    auto: Any = None
    follows: str = ""

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Key:
        values: dict[str, Any] = {k: tuple(value) if isinstance(value, list) else value for k, value in row.items()}
        takes = values.pop("takes", None)
        return cls(takes={"bool": bool, "number": float}.get(takes, takes), **values)


# Title of a table in keys.toml -> dotted keys -> `Key`. Dotted keys that are treated alike are one entry, joined by spaces.
PARTS: dict[str, dict[str, Key]] = {}
for _title, _table in tomllib.loads(Path(__file__).with_name("keys.toml").read_text(encoding="utf-8")).items():
    _prefix = _table.pop("prefix", "")  # of each dotted key in the table
    PARTS[_title] = {
        " ".join(f"{_prefix}{name}" for name in names.split()): Key.of(row) for names, row in _table.items()
    }
_NAMED = [(name, key) for part in PARTS.values() for names, key in part.items() for name in names.split()]
KEYS: Mapping[str, Key] = {name.removesuffix(".*"): key for name, key in _NAMED}
SECTIONS = {name.removesuffix(".*") for name, _ in _NAMED if name.endswith(".*")}


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSizes:
    """Batch sizes in samples: `train_batch` = `micro_batch` x `accumulation` x number of ranks."""

    train_batch: int
    micro_batch: int
    accumulation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of a `ds_config.json`, as `read` returns them. Pass `sharding` and the result of `mesh` to `shard`, then
    call `optimizer` with parameters and `scheduler` with that optimizer. These two are None if the file has none.

    Args:
        clip: largest gradient norm; 0: no clipping.
        group_ranks: number of ranks that share one sharded copy of the model, for a hybrid strategy; else None.
        said: dotted key ("optimizer.params.lr") -> value in the file, for keys that are used, with `"auto"` resolved.
        autos, ignored: dotted keys whose value was `"auto"`, and dotted keys that are not needed here.
    """

    sharding: Sharding
    clip: float
    optimizer: OptimizerChoice | None
    scheduler: Schedule | None
    group_ranks: int | None
    said: dict[str, Any]
    autos: tuple[str, ...]
    ignored: tuple[str, ...]

    def mesh(self, device_type: str = "cpu") -> DeviceMesh | None:
        """Return the mesh to pass to `shard`. For a hybrid strategy, create a mesh with the axes ("replicate", "shard"), which
        is collective. Otherwise return None, with which `shard` uses all ranks."""
        if self.group_ranks is None:
            return None
        replicas = self.replicas(dist.get_world_size())
        return init_device_mesh(device_type, (replicas, self.group_ranks), mesh_dim_names=("replicate", "shard"))

    def replicas(self, num_ranks: int) -> int:
        """Return the number of sharded copies of the model, 1 unless the strategy is hybrid. Raises `UsageError` if
        `group_ranks` does not divide `num_ranks`."""
        if self.group_ranks is None:
            return 1
        if num_ranks % self.group_ranks:
            raise UsageError(
                f"zero_optimization asks for groups of {self.group_ranks} ranks, but there are {num_ranks} ranks; use a divisor "
                f"of {num_ranks}."
            )
        return num_ranks // self.group_ranks

    def scaler(self, device_type: str = "cpu") -> LossScaler:
        """Return a new gradient scaler; it does nothing unless the file enables fp16."""
        return LossScaler(_below(self.said, "fp16."), device_type)

    def batch(self, num_ranks: int) -> BatchSizes:
        """Return the three batch sizes on `num_ranks` ranks, derived from those in the file. Raises `UsageError` if the file
        has neither a train nor a micro-batch size, or if the sizes contradict each other."""
        keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
        train, micro, accumulation = (self.said.get(key) for key in keys)
        if train is None and micro is None:
            raise UsageError(f"the file has neither {keys[0]} nor {keys[1]}; add one of them.")
        if accumulation is None:
            accumulation = 1 if train is None or micro is None else train // micro // num_ranks
        if micro is None:
            assert train is not None
            micro = train // num_ranks // accumulation
        if train is None:
            train = micro * accumulation * num_ranks
        if micro < 1 or accumulation < 1 or train != micro * accumulation * num_ranks:
            raise UsageError(
                f"{keys[0]} is {train}, which is not {keys[1]} x {keys[2]} x ranks = {micro} x {accumulation} x {num_ranks}; "
                "leave one of them out, or change the number of ranks."
            )
        return BatchSizes(train_batch=train, micro_batch=micro, accumulation=accumulation)


def read(source: str | Path | Mapping[str, Any], *, auto: Mapping[str, Any] | None = None) -> Settings:
    """Read the `ds_config.json` at the path `source`, or a dict of its content, and return its `Settings`. Needs no DeepSpeed.
    `auto`: dotted key -> value for keys that are `"auto"`, which the Hugging Face Trainer would fill from its arguments;
    docs/compat_deepspeed.md lists what an "auto" without an entry becomes. Logs the keys that are not needed here. Raises
    `UsageError` if the file cannot be read, or if a key or value is wrong or not supported."""
    auto = auto or {}
    values = dict(_flat(_content(source)))
    keys = {name: _key(name, value) for name, value in {**dict.fromkeys(auto), **values}.items()}
    autos = tuple(name for name, value in values.items() if value == "auto")
    values = {name: _resolved(name, value, keys[name], auto) for name, value in values.items()}
    ignored = tuple(name for name in values if keys[name].not_needed)
    values = {n: _checked(n, v, keys[n]) for n, v in values.items() if v is not None and keys[n].used}
    strategy, group_ranks = _strategy(values)
    if ignored:
        log.info("DeepSpeed keys that are not needed here: %s", ", ".join(ignored))
    section = _below(values, "optimizer.")
    optimizer = optimizer_of(section.get("type"), _below(section, "params.")) if section else None
    if values.get("scheduler.params.warmup_max_lr") == "auto":
        if optimizer is None:
            raise UsageError("scheduler.params.warmup_max_lr is 'auto', but the file has no optimizer with an lr.")
        values["scheduler.params.warmup_max_lr"] = optimizer.lr
    schedule = _below(values, "scheduler.")
    return Settings(
        sharding=Sharding(
            strategy=strategy,
            precision=_precision(values),
            offload=_offload(values),
            reduce_op=values.get("gradient_allreduce_op", "mean"),
        ),
        clip=float(values.get("gradient_clipping", 0.0)),
        optimizer=optimizer,
        scheduler=Schedule(schedule.get("type", ""), _below(schedule, "params.")) if schedule else None,
        group_ranks=group_ranks,
        said=values,
        autos=autos,
        ignored=ignored,
    )


def _content(source: str | Path | Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(source, Mapping):
        return source
    if not isinstance(source, (str, Path)):
        raise UsageError(f"read() takes the path of a ds_config.json or a dict, not {type(source).__name__}.")
    try:
        content = json.loads(read_text(source))
    except OSError as error:
        raise UsageError(f"DeepSpeed configuration {str(source)!r} cannot be read: {error.strerror}.") from None
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise UsageError(f"DeepSpeed configuration {str(source)!r} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise UsageError(f"DeepSpeed configuration {str(source)!r} is not a JSON object; write {{...}} with keys.")
    return content


def _flat(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) for each key of `content` and of the sections in it. `prefix` is put before each key, and
    "bfloat16" becomes "bf16". A key is a section if `KEYS` has keys inside it. A section that is None is left out. Raises
    `UsageError` if the value of a section is no dict, except for "compile", whose value is then yielded."""
    for key, value in content.items():
        name = "bf16" if f"{prefix}{key}" == "bfloat16" else f"{prefix}{key}"
        has_keys = any(known.startswith(f"{name}.") for known in KEYS)
        if has_keys and isinstance(value, Mapping):
            yield from _flat(value, f"{name}.")
        elif has_keys and name != "compile":
            if value is not None:
                raise UsageError(f"{name} is {value!r}; it is a section and takes keys, {{...}}.")
        else:
            yield name, value


def _key(name: str, value: Any) -> Key:
    """Return the `Key` of the dotted key `name`. In a section that takes any keys, that is the `Key` of the section. Raises
    `UsageError` if there is no such key, or if it is not supported and `value` does not turn it off."""
    row = name
    while row and row not in KEYS:
        row = row.rpartition(".")[0]
    if not row or (row != name and row not in {*SECTIONS, "optimizer.params"}):
        by_leaf = {known.rpartition(".")[2]: known for known in reversed([*KEYS])}
        close = get_close_matches(name.rpartition(".")[2], by_leaf, n=1)
        hint = f"did you mean {by_leaf[close[0]]!r}?" if close else "docs/compat_deepspeed.md lists all."
        raise UsageError(f"DeepSpeed key {name!r} does not exist; {hint}")
    key = KEYS[row]
    if not key.refused or value in (False, None, "none", {}, *key.off):
        return key
    if isinstance(value, Mapping) and (value.get("enabled") is False or value.get("autotp_size") in (0, 1)):
        return key
    shown = "" if isinstance(value, (Mapping, list)) else f" ({json.dumps(value)})"
    raise UsageError(f"DeepSpeed key {row!r}{shown} is not supported: {key.refused}. Leave it out.")


def _resolved(name: str, value: Any, key: Key, auto: Mapping[str, Any]) -> Any:
    if value != "auto":
        return value
    if name in auto or key.auto is not None:
        return auto.get(name, key.auto)
    if name == "train_batch_size":
        return None
    if key.follows or key.not_needed:
        return value
    if key.asked:
        raise UsageError(
            f"DeepSpeed key {name!r} is 'auto', which the Hugging Face Trainer fills from its arguments. Write a value, or pass "
            f"read(..., auto={{{name!r}: ...}})."
        )
    raise UsageError(f"DeepSpeed key {name!r} does not take 'auto'; write a value.")


def _checked(name: str, value: Any, key: Key) -> Any:
    """Return `value` of key `name`, as an int if `key` takes one; "auto" unchecked. Raises `UsageError` if `value` is wrong."""
    takes = None if value == "auto" else key.takes  # some are resolved later, from other keys
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if takes is bool and not isinstance(value, bool):
        raise UsageError(f"{name} is {value!r}; it takes true or false.")
    if takes is float and (not number or value < 0):
        raise UsageError(f"{name} is {value!r}; it takes a number of at least 0.")
    if isinstance(takes, tuple) and value not in takes:
        raise UsageError(f"{name} is {value!r}; valid: {', '.join(takes)}.")
    if not isinstance(takes, int):
        return value
    if not number or value != int(value) or value < takes:
        raise UsageError(f"{name} is {value!r}; it takes a whole number of at least {takes}.")
    return int(value)


def _below(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return key -> value for the keys in `values` that begin with `prefix`, which is removed from the keys."""
    return {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}


def _strategy(values: Mapping[str, Any]) -> tuple[config.Strategy, int | None]:
    """Return (strategy, number of ranks that share one sharded copy). The number is None unless the strategy is hybrid: hpZ or
    MiCS. Raises `UsageError` for a stage above 3, for hpZ or MiCS in another stage than 3, and for both together."""
    stage = values.get("zero_optimization.stage", 0)
    if stage > 3:
        raise UsageError(f"zero_optimization.stage is {stage}; valid: 0, 1, 2, 3.")
    hpz = values.get("zero_optimization.zero_hpz_partition_size", 1)
    mics = values.get("zero_optimization.mics_shard_size", -1)
    if hpz > 1 and mics > 0:
        raise UsageError("zero_hpz_partition_size and mics_shard_size both set the ranks per copy; keep one of them.")
    if hpz <= 1 and mics <= 0:
        return STAGES[stage], None
    if stage != 3:
        name, size = ("zero_hpz_partition_size", hpz) if hpz > 1 else ("mics_shard_size", mics)
        raise UsageError(f"zero_optimization.{name} is {size}, which needs stage 3, but the stage is {stage}.")
    return (config.HYBRID_SHARD_OPTIM, hpz) if hpz > 1 else (config.HYBRID_SHARD, mics)


def _offload(values: Mapping[str, Any]) -> config.Offload:
    z = "zero_optimization."
    params = values.get(f"{z}offload_param.device", "none")
    optimizer = values.get(f"{z}offload_optimizer.device", "none")
    stage = values.get(f"{z}stage", 0)
    if (params != "none" and stage != 3) or (optimizer != "none" and stage == 0):
        raise UsageError(
            f"zero_optimization offloads parameters to {params!r} and the optimizer to {optimizer!r} in stage {stage}. "
            "Offloading parameters needs stage 3, offloading the optimizer stage 1 or higher."
        )
    return config.Offload(
        params=_place(values, "offload_param", params), optimizer=_place(values, "offload_optimizer", optimizer)
    )


def _place(values: Mapping[str, Any], section: str, device: str) -> str:
    if device != "nvme":
        return PLACES[device]
    folder = values.get(f"zero_optimization.{section}.nvme_path")
    if not isinstance(folder, str) or not folder:
        raise UsageError(f"zero_optimization.{section}.nvme_path is {folder!r}; device 'nvme' needs a folder.")
    return f"{config.DISK}{folder}"


def _precision(values: Mapping[str, Any]) -> config.Precision:
    bf16, fp16 = values.get("bf16.enabled", False), values.get("fp16.enabled", False)
    if bf16 and fp16:
        raise UsageError("bf16.enabled and fp16.enabled are both true; keep one.")
    masters = bf16 and values.get("bf16.bf16_master_weights_and_grads", False)
    states = bf16 and values.get("bf16.bf16_optimizer_states", False)
    if masters != states:
        raise UsageError(
            f"bf16_master_weights_and_grads is {masters} and bf16_optimizer_states is {states}. Optimizer states have the dtype "
            "of the masters, so give both the same value."
        )
    return config.Precision(
        params=torch.bfloat16 if bf16 else torch.float16 if fp16 else None,
        reduce=config.COMPUTE_DTYPES[values.get("communication_data_type", "fp32")] or torch.float32,
        master=torch.bfloat16 if masters else torch.float32,
        buffers=(config.COMPUTE_DTYPES[values["data_types.buffer_dtype"]] or torch.float32)
        if "data_types.buffer_dtype" in values
        else None,
    )
