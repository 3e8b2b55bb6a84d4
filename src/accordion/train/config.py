"""What a run is told: the typed keys of `accordion train`, their defaults and their limits."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from accordion.config import Offload, checkpointing_named, strategy_named
from accordion.errors import UsageError, nearest
from accordion.models.llama import TRAINED
from accordion.options import unread
from accordion.tasks.classes import CLASS_PATH, PartConfig
from accordion.units import units_named

Job = TypeVar("Job", bound="JobConfig")
# Peaks of the learning rate for weights that are pretrained, and for adapters next to them.
TUNING_LR, ADAPTER_LR = 2e-5, 2e-4


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model.

    Args:
        preset: a Llama shape: `llama-tiny`, `llama-10m`, `llama-30m`, `llama-125m`, `llama-1b` or `llama-8b`
        path: folder with `config.json` (any causal language model of transformers), in place of a preset;
            its `tokenizer.json` is used where there is one
        init: `scratch` draws the weights from `train.seed`, `pretrained` reads the safetensors in `model.path`
        attention: transformers' implementation of it; `auto`: its own choice, `sdpa` for most models
    """

    preset: str = "llama-10m"
    path: str | None = None
    init: Literal["scratch", "pretrained"] = "scratch"
    attention: Literal["auto", "eager", "sdpa", "flex_attention", "flash_attention_2"] = "auto"


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The text, or examples with answers to learn.

    Args:
        path: a text, JSON, JSONL, CSV, parquet or Arrow file, compressed ones too, a folder of such files, or a saved
            datasets folder; without it: the Python standard library's own source files on this machine
        format: `text`; `prompt`: fields `prompt` and `completion`; `chat`: field `messages`, each with `role` and `content`, in
            the tokenizer's chat template. Of the latter two the loss is on answers alone
        text_field: field or column that holds the text of a row
        special_tokens: of format text: `tokens` reads special tokens such as `<|im_end|>` in a document as these tokens, as
            transformers does; `text` reads them as letters
        seq_len: tokens in a training sequence; documents are packed, an end-of-text token between them; of examples that are
            longer the end is cut off
        packing: of chat and prompt: `documents`: several examples in a row, none of which sees another; `length`: an example in a
            row, beside others of about its length; `none`: beside any others
        tokenizer: tokenizer.json or folder of transformers, of chat and prompt, in place of the one in `model.path`
        chat_template: file with a Jinja template, in place of the tokenizer's
    """

    path: str | None = None
    format: Literal["text", "chat", "prompt"] = "text"
    text_field: str = "text"
    special_tokens: Literal["tokens", "text"] = "tokens"
    seq_len: int = 128
    packing: Literal["documents", "length", "none"] = "documents"
    tokenizer: str | None = None
    chat_template: str | None = None


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """Adapters of PEFT beside frozen weights.

    Args:
        kind: `lora`, also `--adapter lora`: low-rank adapters are trained, and nothing else; `none`: all weights are
        r: rank
        alpha: what an adapter adds is scaled by alpha / r
        dropout: share of an adapter's inputs that is left out in training
        targets: layers that have adapters, by the last parts of their names with commas between; `auto`: all linear layers but
            the head
    """

    kind: Literal["none", "lora"] = "none"
    r: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    targets: str = "auto"


@dataclass(frozen=True, kw_only=True)
class ShardConfig:
    """How the model lies over the ranks.

    Args:
        strategy: `full_shard`, `shard_grad_op`, `shard_optim`, `no_shard`, `hybrid_shard` or `hybrid_shard_optim`
        replicas: copies of the sharded model with a hybrid strategy; 0: one for each node
        secondary: ranks, those of a node say, that keep one copy of a unit from its forward to its backward; 0: none
        units: what is gathered together: `auto` (the repeated blocks, and embeddings and heads about as large), `blocks`
            (these alone), class names separated by commas, or `min_params:N`
        precision: dtype of the computation: `auto` (bf16 on accelerators that have it, fp32 on CPU), `fp32`, `bf16`
            or `fp16` (with gradient scaling); masters and optimizer state stay in fp32
        checkpoint_activations: recompute activations in backward: `none`, `full`, `selective` or `every:K`
        offload_optimizer: where the optimizer's states rest: `device`, `host` or `disk:/folder`; it steps on the host in the
            latter two, behind the next forward
        offload_params: where the parameters rest that are gathered: `device`, `host` or `disk:/folder`
        offload_grads: where gradients rest, the same; `auto`: where the step or the parameters ask for it
        offload_activations: where the inputs of recomputed units rest: `device`, `host` or `disk:/folder`
        offload_step: `host` or `device`, where the optimizer steps; `auto`: on the host with its states off the device
        offload_device_gib: of what is offloaded this much of a rank stays on the device all the same, parameters first
        offload_host_gib: of what is on disk this much of a rank rests on the host instead, parameters first
    """

    strategy: str = "full_shard"
    replicas: int = 0
    secondary: int = 0
    units: str = "auto"
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    checkpoint_activations: str = "none"
    offload_optimizer: str = "device"
    offload_params: str = "device"
    offload_grads: str = "auto"
    offload_activations: str = "device"
    offload_step: Literal["auto", "device", "host"] = "auto"
    offload_device_gib: float | None = None
    offload_host_gib: float | None = None

    def offload(self) -> Offload:
        """Raises `UsageError` for places that make no sense."""
        device, host = (
            None if gib is None else int(gib * 2**30) for gib in (self.offload_device_gib, self.offload_host_gib)
        )
        return Offload(
            params=self.offload_params,
            grads=None if self.offload_grads == "auto" else self.offload_grads,
            optimizer=self.offload_optimizer,
            activations=self.offload_activations,
            step=None if self.offload_step == "auto" else self.offload_step,
            device_bytes=device,
            host_bytes=host,
        )


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The optimization: AdamW, linear warmup, cosine decay to a tenth of the peak, unless other keys say otherwise.

    Args:
        steps: optimizer steps in all
        micro_batch: sequences in one forward of one rank
        accumulate: micro-batches in a step; a step sees ranks x micro_batch x accumulate sequences
        global_batch: sequences of a step over all ranks, in place of `accumulate`, so that a job that goes on with another
            number of ranks makes the same steps; 0: as `accumulate` says
        lr: learning rate at the peak; with `--optimizer NAME` that is `optimizer.lr`. Without it 2e-5 if `model.init` is
            `pretrained`, 2e-4 if adapters are trained then
        warmup: steps of linear warmup
        schedule: of the rate behind the warmup: `cosine` or `linear` down to `final_lr`, `constant`, `step` (drops), `wsd`
            (constant, then linear down at the end); `auto`: cosine, or with an optimizer of your own none at all, neither warmup
        final_lr: share of the peak at which `cosine`, `linear` and `wsd` end
        decay_every: of `step`: steps between drops; 0: a third of those behind the warmup
        decay_factor: of `step`: by what a drop multiplies the rate
        decay_steps: of `wsd`: steps at the end in which the rate goes down; 0: a fifth of all
        weight_decay: decay of matrices; vectors have none
        clip: largest gradient norm; 0: no clipping
        seed: of the initial weights and of the order of the data
        eval_every: steps between validations; 0: only at the end
        validation_rows: rows of text or examples that a validation reads, the same random ones each time; 0: all
        on_nonfinite: where loss or gradients are NaN or inf: `stop` ends the run, naming the unit they came up in, `skip` says
            so and leaves the step out: weights, optimizer and schedule stay
        max_skips: steps in a row that `skip` leaves out before it ends the run; what a gradient scaler leaves out to lower
            its scale does not count
        deepspeed: a DeepSpeed configuration, also `--deepspeed ds_config.json`: what it says stands in place of the keys
            here and in `shard`, its optimizer over all parameters alike; what it leaves out is as DeepSpeed has it
        hours: hours in which this start of the run ends with a checkpoint, preparation included; 0: no limit
        patience: validations in a row without a lower loss that end the run; 0: none do
        min_delta: by how much less a validation loss is lower, for `patience`
        keep_best: keep the checkpoint of the lowest validation loss as `best` in `checkpoint.dir`, beside what `checkpoint.keep`
            keeps
        sample_every: steps between samples of text; 0: one at the end
        plan: `auto`, also `--plan auto`, takes the fastest `shard.strategy`, `shard.checkpoint_activations` and offload that fit
            where they are not given, cuts micro-batches that do not fit into more of them, and prints at the end what was
            measured beside the plan
    """

    steps: int = 100
    micro_batch: int = 8
    accumulate: int = 1
    global_batch: int = 0
    lr: float = 1e-3
    warmup: int = 5
    schedule: Literal["auto", "cosine", "linear", "constant", "step", "wsd"] = "auto"
    final_lr: float = 0.1
    decay_every: int = 0
    decay_factor: float = 0.1
    decay_steps: int = 0
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 0
    eval_every: int = 0
    validation_rows: int = 0
    on_nonfinite: Literal["stop", "skip"] = "stop"
    max_skips: int = 10
    deepspeed: str | None = None
    hours: float = 0.0
    patience: int = 0
    min_delta: float = 0.0
    keep_best: bool = False
    sample_every: int = 0
    plan: Literal["none", "auto"] = "none"


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints.

    Args:
        dir: folder that holds them; without it: `checkpoints` in the run folder
        every: steps between checkpoints; 0: only at the end
        keep: how many of the newest good ones are kept; 0: all
        background: training goes on while a checkpoint is written; the last one is waited for
        on_error: where one cannot be written: `stop` ends the run, `continue` says so and trains on
        resume: `auto` goes on from the newest in `checkpoint.dir` where there is one, `none` refuses a folder that
            holds some, `best` goes on from what `train.keep_best` kept, a path goes on from that one; of the latter two the same
            command goes forward when it is started again, and checkpoints of later steps go into a folder `abandoned-1`
    """

    dir: str | None = None
    every: int = 0
    keep: int = 0
    background: bool = True
    on_error: Literal["stop", "continue"] = "stop"
    resume: str = "auto"


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """The ranks.

    Args:
        nproc: ranks on this machine where accordion starts them itself (not under torchrun or srun); 0: one for each GPU
            found, else 2
        device: `auto` takes the accelerators of this machine where there are some; `cpu`, or a type of device (cuda, xpu, npu)
        timeout_s: seconds after which a rank ends that waits for another one, or for the machine that keeps the job's store
    """

    nproc: int = 0
    device: str = "auto"
    timeout_s: int = 600


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The record.

    Args:
        dir: folder for metrics.jsonl, TensorBoard files and checkpoints; without it: `runs/<model>-<data>`
        report: write report.html at the end: loss, speed and memory, and what was planned beside what came
    """

    dir: str | None = None
    report: bool = True


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """Where else the figures go.

    Args:
        tensorboard: files of TensorBoard in the run folder
        wandb: project of Weights & Biases; without it: not there
        wandb_mode: `offline` writes into the run folder, for `wandb sync` later
        mlflow: experiment of MLflow; without it: not there
        mlflow_uri: where MLflow keeps it: a server, or what else MLflow takes; without it: where MLflow's own settings say
    """

    tensorboard: bool = True
    wandb: str | None = None
    wandb_mode: Literal["online", "offline"] = "online"
    mlflow: str | None = None
    mlflow_uri: str | None = None


@dataclass(frozen=True, kw_only=True)
class JobConfig:
    """How a run goes, and the parts of what it trains that class paths name; of a task, that is all.

    Args:
        shard: how the model lies over the ranks
        train: the optimization
        checkpoint: checkpoints
        launch: the ranks
        run: the record
        log: where else the figures go
    """

    parts: Mapping[str, PartConfig] = unread(dict)
    shard: ShardConfig = field(default_factory=ShardConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    run: RunConfig = field(default_factory=RunConfig)
    log: LogConfig = field(default_factory=LogConfig)


@dataclass(frozen=True, kw_only=True)
class TextConfig:
    """What a run on text trains.

    Args:
        model: the model
        adapter: adapters beside it
        data: the text
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    data: DataConfig = field(default_factory=DataConfig)


@dataclass(frozen=True, kw_only=True)
class Config(JobConfig, TextConfig):
    """One run on text: what it trains, and how it goes."""


def model_name(model: ModelConfig) -> str:
    """Return the preset, or the name of the model's folder."""
    return model.preset if model.path is None else Path(model.path).resolve().name


def groups_of(config: JobConfig) -> dict[str, dict[str, Any]]:
    """Group -> key -> value, what is trained before how."""
    parts = {name: {CLASS_PATH: part.class_path, **part.options} for name, part in config.parts.items()}
    groups = {f.name: getattr(config, f.name) for f in fields(config) if f.name != "parts"}
    return parts | {name: {f.name: getattr(group, f.name) for f in fields(group)} for name, group in groups.items()}


AT_LEAST = {
    "data.seq_len": 2,
    "adapter.r": 1,
    "shard.replicas": 0,
    "shard.secondary": 0,
    "train.steps": 1,
    "train.micro_batch": 1,
    "train.accumulate": 1,
    "train.global_batch": 0,
    "train.lr": 0,
    "train.warmup": 0,
    "train.final_lr": 0,
    "train.decay_every": 0,
    "train.decay_factor": 0,
    "train.decay_steps": 0,
    "train.weight_decay": 0,
    "train.clip": 0,
    "train.seed": 0,
    "train.eval_every": 0,
    "train.validation_rows": 0,
    "train.max_skips": 1,
    "train.hours": 0,
    "train.patience": 0,
    "train.min_delta": 0,
    "train.sample_every": 0,
    "checkpoint.every": 0,
    "checkpoint.keep": 0,
    "launch.nproc": 0,
    "launch.timeout_s": 5,
}
OF_SCHEDULES = {  # which schedules a key is of
    "train.final_lr": ("auto", "cosine", "linear", "wsd"),
    "train.decay_every": ("step",),
    "train.decay_factor": ("step",),
    "train.decay_steps": ("wsd",),
}
NUMBERS = (*AT_LEAST, "adapter.alpha", "adapter.dropout", "shard.offload_device_gib", "shard.offload_host_gib")
LARGEST = 2**31 - 1  # of every number: what torch's seeds, sizes and counters all hold


def flat(config: JobConfig) -> dict[str, Any]:
    """`group.key` -> value, as written on a command line."""
    return {f"{name}.{key}": value for name, group in groups_of(config).items() for key, value in group.items()}


def as_yaml(config: JobConfig) -> str:
    """A run file with every key; values are written as JSON, which is YAML too."""
    lines = [
        line
        for name, group in groups_of(config).items()
        for line in (f"{name}:", *(f"  {key}: {json.dumps(value)}" for key, value in group.items()))
    ]
    return "".join(f"{line}\n" for line in lines)


def check(config: JobConfig) -> None:
    """What can be said without looking at files or devices. Raises `UsageError` naming the key, the value and the limit."""
    own = {f"{name}.{key}" for name, part in config.parts.items() for key in (CLASS_PATH, *part.options)}
    values = {key: value for key, value in flat(config).items() if key not in own}
    defaults = flat(Config())
    unset = next((key for key, value in values.items() if value is None and defaults[key] is not None), None)
    if unset is not None:
        raise UsageError(f"{unset} is null; leave it out for its default, {defaults[unset]!r}.")
    for key in NUMBERS:
        if isinstance(values.get(key), float) and not math.isfinite(values[key]):
            raise UsageError(f"{key} is {values[key]}; it takes a number.")
    for key, least in AT_LEAST.items():
        value = values.get(key, least)
        if not least <= value <= LARGEST:
            raise UsageError(f"{key} is {value}; it must be between {least} and {LARGEST}.")
    if config.train.lr == 0:
        raise UsageError("train.lr is 0, which would train nothing; the default is 0.001.")
    _check_schedule(config.train, values, defaults)
    for key, value in values.items():
        if isinstance(value, str) and (not value.strip() or "\0" in value):
            raise UsageError(f"{key} is empty; leave it out for its default.")
    _check_ending(config)
    strategy = strategy_named(config.shard.strategy)
    checkpointing_named(config.shard.checkpoint_activations)
    config.shard.offload()
    units_named(config.shard.units, "shard.units")
    if config.shard.replicas and not strategy.hybrid:
        raise UsageError(
            f"shard.replicas is {config.shard.replicas} but strategy {strategy.name!r} has no replicas; "
            "take hybrid_shard or leave it out."
        )
    if isinstance(config, Config):
        _check_data(config.data)
        _check_adapter(config.adapter)
    if isinstance(config, Config) and config.model.path is None:
        if config.model.preset not in TRAINED:
            raise UsageError(
                f"model.preset {config.model.preset!r} does not exist; {nearest(config.model.preset, TRAINED)}"
            )
        if config.model.init == "pretrained":
            raise UsageError("model.init is 'pretrained' but model.path names no folder to read the weights from.")


def _check_adapter(adapter: AdapterConfig) -> None:
    for key, value in vars(adapter).items():
        if adapter.kind == "none" and value != getattr(AdapterConfig(), key):
            raise UsageError(f"adapter.{key} is {value}, and there is no adapter; give --adapter lora.")
    if not 0 <= adapter.dropout < 1:
        raise UsageError(f"adapter.dropout is {adapter.dropout}; it must be at least 0 and below 1.")
    if adapter.alpha <= 0:
        raise UsageError(f"adapter.alpha is {adapter.alpha}; it must be above 0, or adapters add nothing.")


def _check_data(data: DataConfig) -> None:
    own = {"packing": ("chat", "prompt"), "tokenizer": ("chat", "prompt"), "chat_template": ("chat",)}
    own["special_tokens"] = ("text",)
    for key, formats in own.items():
        value = getattr(data, key)
        if value != getattr(DataConfig(), key) and data.format not in formats:
            raise UsageError(
                f"data.{key} is {value!r}, and is of data.format {' and '.join(formats)}, not {data.format}."
            )


def _check_schedule(options: TrainConfig, values: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    for key, schedules in OF_SCHEDULES.items():
        if values[key] != defaults[key] and options.schedule not in schedules:
            takes = " or ".join(name for name in schedules if name != "auto")
            raise UsageError(
                f"{key} is {values[key]}, which train.schedule {options.schedule!r} has no use for; it is of {takes}."
            )
    for key in ("final_lr", "decay_factor"):
        if getattr(options, key) > 1:
            raise UsageError(
                f"train.{key} is {getattr(options, key)}; it must be between 0 and 1, a share of the rate."
            )
    if options.warmup + options.decay_steps > options.steps and options.decay_steps:
        raise UsageError(
            f"train.decay_steps is {options.decay_steps} behind train.warmup {options.warmup}, more than train.steps "
            f"{options.steps}; lower one of these."
        )


def _check_ending(config: JobConfig) -> None:
    """What ends a run, and what is shown of it meanwhile."""
    options, log = config.train, config.log
    for key in ("patience", "keep_best"):
        if getattr(options, key) and not options.eval_every:
            raise UsageError(
                f"train.{key} compares validations, and there is one at the end only; give train.eval_every too."
            )
    if options.min_delta and not options.patience:
        raise UsageError(f"train.min_delta is {options.min_delta}, which is for train.patience; give that too.")
    for key in ("sample_every", "validation_rows"):
        if getattr(options, key) and not isinstance(config, Config):
            raise UsageError(f"train.{key} is for text and examples, and this run trains a task; leave it out.")
    for key, value in (("wandb_mode", log.wandb_mode != "online"), ("mlflow_uri", log.mlflow_uri is not None)):
        if value and getattr(log, what := key.partition("_")[0]) is None:
            raise UsageError(f"log.{key} is given without log.{what}, which turns it on; give that too.")


def fine_tuning(config: Job, named: Collection[str]) -> Job:
    """Return `config` with the learning rate for pretrained weights if the keys in `named` give none."""
    if not isinstance(config, Config) or config.model.init != "pretrained":
        return config
    if "train.lr" in named or "optimizer" in config.parts:
        return config
    lr = TUNING_LR if config.adapter.kind == "none" else ADAPTER_LR
    return replace(config, train=replace(config.train, lr=lr))


def spread(config: Job, named: Collection[str], num_ranks: int) -> Job:
    """`config` whose `train.accumulate` makes up `train.global_batch` on `num_ranks`; `named`: the keys that were given.

    Raises `UsageError` where it cannot, or where something else says how much a step sees too.
    """
    options = config.train
    if not options.global_batch:
        return config
    other = "train.deepspeed" if options.deepspeed is not None else "train.accumulate"
    if other in named:
        raise UsageError(
            f"train.global_batch is {options.global_batch}, and {other} is given too; say it in one place."
        )
    accumulate, rest = divmod(options.global_batch, num_ranks * options.micro_batch)
    if rest:
        raise UsageError(
            f"train.global_batch is {options.global_batch}, which {num_ranks} ranks x train.micro_batch {options.micro_batch} "
            "do not divide; take a multiple, or a smaller train.micro_batch."
        )
    return replace(config, train=replace(options, accumulate=accumulate))
