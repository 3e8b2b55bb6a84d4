"""`accordion train --deepspeed ds_config.json`: translate the settings of the file into keys of the run."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

from accordion.compat import deepspeed
from accordion.compat.deepspeed import Settings
from accordion.errors import UsageError
from accordion.optimizers.wrap import ELEMENTWISE
from accordion.sharding import offload_words, precision_words
from accordion.train.config import Job, JobConfig, check, flat, spread

MICRO, ACCUMULATION, TRAIN = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size"


def settings_of(config: JobConfig, precision: str) -> Settings | None:
    """Read the file that the key `train.deepspeed` names, and return its settings; None if the key is not set. A value "auto"
    in the file becomes the value of the run's key. `precision`: "bf16", "fp16", "fp32" or "auto", for the dtypes that are
    "auto" in the file. Raises `UsageError` if the file cannot be read, or has a wrong or unsupported setting."""
    if config.train.deepspeed is None:
        return None
    run = config.train
    auto = {
        MICRO: run.micro_batch,
        ACCUMULATION: run.accumulate,
        "gradient_clipping": run.clip,
        "optimizer.params.lr": run.lr,
        "optimizer.params.weight_decay": run.weight_decay,
        "scheduler.params.total_num_steps": run.steps,
        "scheduler.params.warmup_num_steps": max(1, run.warmup),
        "bf16.enabled": precision == "bf16",
        "fp16.enabled": precision == "fp16",
    }
    return deepspeed.read(config.train.deepspeed, auto=auto)


def translated(config: Job, named: Collection[str], num_ranks: int) -> Job:
    """Return `config` for `num_ranks` ranks, with `train.accumulate` from `train.global_batch`, and with the values of a
    DeepSpeed file, or DeepSpeed's defaults for keys neither in it nor in `named`, the keys that the user set. Raises
    `UsageError` if file or global batch are unusable, the optimizer's step is not elementwise, or file and user disagree."""
    config = spread(config, named, num_ranks)
    settings = settings_of(config, str(precision_words(config.shard.precision)))
    if settings is None:
        return config
    if settings.optimizer is not None and not issubclass(settings.optimizer.cls, ELEMENTWISE):
        raise UsageError(
            f"optimizer.type is {settings.optimizer.cls.__name__}, whose step is not elementwise; accordion train takes "
            f"{', '.join(cls.__name__ for cls in ELEMENTWISE)}."
        )
    if settings.scheduler is not None and config.train.schedule != "auto":
        raise UsageError(
            f"train.schedule is {config.train.schedule!r}, and scheduler.type in {config.train.deepspeed!r} sets one too; give "
            "one of them."
        )
    values, changed = flat(config), dict[str, dict[str, Any]]()
    for key, value, names in _meanings(config, settings, num_ranks):
        says = [name for name in names if name in settings.said]
        asks = any(name in settings.autos for name in names)
        if key in named and values[key] != value and not asks:
            if says:
                raise UsageError(
                    f"{key} is {values[key]}, and {' and '.join(says)} in {config.train.deepspeed!r} "
                    f"mean{'s' if len(says) == 1 else ''} {value}; give one of them."
                )
            continue
        group, _, name = key.partition(".")
        changed.setdefault(group, {})[name] = value
    result = replace(config, **{group: replace(getattr(config, group), **new) for group, new in changed.items()})
    check(result)
    return result


def _meanings(config: JobConfig, settings: Settings, num_ranks: int) -> Iterator[tuple[str, Any, tuple[str, ...]]]:
    """Yield (key of the run, its value by the file or by DeepSpeed's defaults, keys of the file that can set it)."""
    zero = "zero_optimization."
    groups = (f"{zero}zero_hpz_partition_size", f"{zero}mics_shard_size")
    yield "shard.strategy", settings.sharding.strategy.name, (f"{zero}stage", *groups)
    if settings.group_ranks is not None:
        yield "shard.replicas", settings.replicas(num_ranks), groups
    dtypes = ("bf16", "fp16")
    is_auto = any(f"{dtype}.enabled" in settings.autos for dtype in dtypes)
    dtype_key = str(precision_words(config.shard.precision)) if is_auto else "fp32"
    precision = next((dtype for dtype in dtypes if settings.said.get(f"{dtype}.enabled")), dtype_key)
    yield "shard.precision", precision, ("bf16.enabled", "fp16.enabled")
    places = ("offload_optimizer.device", "offload_param.device")
    yield "shard.offload", offload_words(settings.sharding.offload), tuple(zero + name for name in places)
    keys = settings.said if {TRAIN, MICRO} & set(settings.said) else {**settings.said, MICRO: config.train.micro_batch}
    batch = replace(settings, said=keys).batch(config.shard.num_groups(num_ranks))
    yield "train.micro_batch", batch.micro_batch, (MICRO, TRAIN)
    yield "train.accumulate", batch.accumulation, (ACCUMULATION, TRAIN)
    yield "train.clip", settings.clip, ("gradient_clipping",)
    if settings.optimizer is not None:
        yield "train.lr", settings.optimizer.lr, ("optimizer.params.lr", "optimizer.type")
        decay = ("optimizer.params.weight_decay", "optimizer.type")
        yield "train.weight_decay", settings.optimizer.weight_decay, decay
    if settings.scheduler is not None:
        names = ("scheduler.params.warmup_num_steps", "scheduler.type")
        yield "train.warmup", settings.scheduler.warmup, names
