"""Configuration of `accordion train`: its keys, each with its default, its limits and its help."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from accordion.errors import UsageError, nearest
from accordion.models.llama import TRAINED
from accordion.options import at_least, check_values, needing, unread
from accordion.sharding import Sharding
from accordion.tasks.classes import CLASS_PATH, PartConfig

Job = TypeVar("Job", bound="JobConfig")
# Peaks of the learning rate for weights that are pretrained, and for adapters next to them.
TUNING_LR, ADAPTER_LR = 2e-5, 2e-4
MAX_SKIPS = 10  # steps in a row that `train.on_nonfinite skip` leaves out


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model."""

    preset: str = "llama-10m"
    """a Llama shape: `llama-tiny`, `llama-10m`, `llama-30m`, `llama-125m`, `llama-1b` or `llama-8b`"""
    path: str | None = None
    """folder with `config.json` (any causal language model of transformers), in place of a preset; its `tokenizer.json` is used
    where there is one"""
    init: Literal["scratch", "pretrained"] = "scratch"
    """`scratch` draws the weights from `train.seed`, `pretrained` reads the safetensors in `model.path`"""
    attention: Literal["auto", "eager", "sdpa", "flex_attention", "flash_attention_2"] = "auto"
    """transformers' implementation of it; `auto`: its own choice, `sdpa` for most models"""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The text, or examples with answers to learn."""

    path: str | None = None
    """a text, JSON, JSONL, CSV, parquet or Arrow file, compressed ones too, a folder of such files, or a saved datasets folder;
    without it: the Python standard library's own source files on this machine"""
    format: Literal["text", "chat", "prompt"] = "text"
    """`text`; `prompt`: fields `prompt` and `completion`; `chat`: field `messages`, each with `role` and `content`, in the
    tokenizer's chat template. Of the latter two the loss is on answers alone"""
    text_field: str = "text"
    """field or column that holds the text of a row"""
    special_tokens: Literal["tokens", "text"] = needing("tokens", format=("text",))
    """of format text: `tokens` reads special tokens such as `<|im_end|>` in a document as these tokens, as transformers does;
    `text` reads them as letters"""
    seq_len: int = at_least(2, 128)
    """tokens in a training sequence; documents are packed, an end-of-text token between them; of examples that are longer the
    end is cut off"""
    packing: Literal["documents", "length", "none"] = needing("documents", format=("chat", "prompt"))
    """of chat and prompt: `documents`: several examples in a row, none of which sees another; `length`: an example in a row,
    beside others of about its length; `none`: beside any others"""
    tokenizer: str | None = needing(None, format=("chat", "prompt"))
    """tokenizer.json or folder of transformers, of chat and prompt, in place of the one in `model.path`"""
    chat_template: str | None = needing(None, format=("chat",))
    """file with a Jinja template, in place of the tokenizer's"""


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """Adapters of PEFT beside frozen weights."""

    kind: Literal["none", "lora"] = "none"
    """`lora`, also `--adapter lora`: low-rank adapters are trained, and nothing else; `none`: all weights are"""
    r: int = at_least(1, 16, kind=("lora",))
    """rank"""
    alpha: float = needing(32.0, kind=("lora",))
    """what an adapter adds is scaled by alpha / r"""
    dropout: float = needing(0.0, kind=("lora",))
    """share of an adapter's inputs that is left out in training"""
    targets: str = needing("auto", kind=("lora",))
    """layers that have adapters, by the last parts of their names with commas between; `auto`: all linear layers but the
    head"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardConfig(Sharding):
    """How the model is sharded over the ranks.

    Its keys are the fields of `accordion.Sharding` that have words, and the number of replicas.
    """

    replicas: int = at_least(0, 0)
    """copies of the sharded model with a hybrid strategy; 0: one for each node"""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The optimization: AdamW, linear warmup, cosine decay to a tenth of the peak, unless other keys say otherwise."""

    steps: int = at_least(1, 100)
    """optimizer steps in all"""
    micro_batch: int = at_least(1, 8)
    """sequences in one forward of one rank"""
    accumulate: int = at_least(1, 1)
    """micro-batches in a step; a step sees ranks x micro_batch x accumulate sequences"""
    global_batch: int = at_least(0, 0)
    """sequences of a step over all ranks, in place of `accumulate`, so that a job that goes on with another number of ranks
    makes the same steps; 0: as `accumulate` says"""
    lr: float = at_least(0, 1e-3)
    """learning rate at the peak; with `--optimizer NAME` that is `optimizer.lr`. Without it 2e-5 if `model.init` is
    `pretrained`, 2e-4 if adapters are trained then"""
    warmup: int = at_least(0, 5)
    """steps of linear warmup"""
    schedule: Literal["auto", "cosine", "linear", "constant", "step", "wsd"] = "auto"
    """of the rate behind the warmup: `cosine` or `linear` down to `final_lr`, `constant`, `step` (drops), `wsd` (constant, then
    linear down at the end); `auto`: cosine, or with an optimizer of your own none at all, neither warmup"""
    final_lr: float = at_least(0, 0.1, most=1, schedule=("auto", "cosine", "linear", "wsd"))
    """share of the peak at which `cosine`, `linear` and `wsd` end"""
    decay_factor: float = at_least(0, 0.1, most=1, schedule=("step",))
    """of `step`: by what a drop multiplies the rate"""
    decay_steps: int = at_least(0, 0, schedule=("step", "wsd"))
    """of `step`: steps between drops, 0: a third of those after the warmup; of `wsd`: steps at the end in which the rate goes
    down, 0: a fifth of all"""
    weight_decay: float = at_least(0, 0.1)
    """decay of matrices; vectors have none"""
    clip: float = at_least(0, 1.0)
    """largest gradient norm; 0: no clipping"""
    seed: int = at_least(0, 0)
    """of the initial weights and of the order of the data"""
    eval_every: int = at_least(0, 0)
    """steps between validations; 0: only at the end"""
    validation_rows: int = at_least(0, 0)
    """rows of text or examples that a validation reads, the same random ones each time; 0: all"""
    on_nonfinite: str = "stop"
    """if loss or gradients are NaN or inf: `stop` ends the run, naming the unit they came up in; `skip` says so and leaves the
    step out (weights, optimizer and schedule stay), up to 10 steps in a row; `skip:N`: up to N. Steps that a gradient scaler
    leaves out to lower its scale do not count"""
    deepspeed: str | None = None
    """a DeepSpeed configuration, also `--deepspeed ds_config.json`: what it says stands in place of the keys here and in
    `shard`, its optimizer over all parameters alike; what it leaves out is as DeepSpeed has it"""
    hours: float = at_least(0, 0.0)
    """hours in which this start of the run ends with a checkpoint, preparation included; 0: no limit"""
    patience: int = at_least(0, 0, eval_every=True)
    """validations in a row without a lower loss that end the run; 0: none do"""
    min_delta: float = at_least(0, 0.0, patience=True)
    """by how much less a validation loss is lower, for `patience`"""
    keep_best: bool = needing(False, eval_every=True)
    """keep the checkpoint of the lowest validation loss as `best` in `checkpoint.dir`, beside what `checkpoint.keep` keeps"""
    sample_every: int = at_least(0, 0)
    """steps between samples of text; 0: one at the end"""
    plan: Literal["none", "auto"] = "none"
    """`auto`, also `--plan auto`, takes the fastest `shard.strategy`, `shard.checkpoint_activations` and `shard.offload` that fit
    where they are not given, cuts micro-batches that do not fit into more of them, and prints at the end what was measured
    beside the plan"""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints."""

    dir: str | None = None
    """folder that holds them; without it: `checkpoints` in the run folder"""
    every: int = at_least(0, 0)
    """steps between checkpoints; 0: only at the end"""
    keep: int = at_least(0, 0)
    """how many of the newest good ones are kept; 0: all"""
    background: bool = True
    """training goes on while a checkpoint is written; the last one is waited for"""
    on_error: Literal["stop", "continue"] = "stop"
    """where one cannot be written: `stop` ends the run, `continue` says so and trains on"""
    resume: str = "auto"
    """`auto` goes on from the newest in `checkpoint.dir` where there is one, `none` refuses a folder that holds some, `best` goes
    on from what `train.keep_best` kept, a path goes on from that one; of the latter two the same command goes forward when it is
    started again, and checkpoints of later steps go into a folder `abandoned-1`"""


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """The ranks."""

    nproc: int = at_least(0, 0)
    """ranks on this machine where accordion starts them itself (not under torchrun or srun); 0: one for each GPU found, else 2"""
    device: str = "auto"
    """`auto` takes the accelerators of this machine where there are some; `cpu`, or a type of device (cuda, xpu, npu)"""
    timeout_s: int = at_least(5, 600)
    """seconds a rank waits for another one, or for the machine that keeps the job's store, before it ends"""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The record."""

    dir: str | None = None
    """folder for the record and checkpoints; without it: `runs/<model>-<data>`"""


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """Other places that figures are written to."""

    tensorboard: bool = True
    """files of TensorBoard in the run folder"""
    wandb: str | None = None
    """project of Weights & Biases; without it: not there. WANDB_MODE=offline writes into the run folder, for `wandb sync`"""
    mlflow: str | None = None
    """experiment of MLflow; without it: not there. MLFLOW_TRACKING_URI says at which server"""


@dataclass(frozen=True, kw_only=True)
class JobConfig:
    """How a run goes, and the parts of what it trains that class paths name; of a task, that is all."""

    parts: Mapping[str, PartConfig] = unread(dict)
    shard: ShardConfig = field(default_factory=ShardConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    run: RunConfig = field(default_factory=RunConfig)
    log: LogConfig = field(default_factory=LogConfig)


@dataclass(frozen=True, kw_only=True)
class TextConfig:
    """The parts of a run on text."""

    model: ModelConfig = field(default_factory=ModelConfig)
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    data: DataConfig = field(default_factory=DataConfig)


@dataclass(frozen=True, kw_only=True)
class Config(JobConfig, TextConfig):
    """One run on text: what it trains, and how it goes."""


def max_skips_of(word: str) -> int:
    """Return how many steps in a row `train.on_nonfinite` leaves out: 0 for `stop`. Raises `UsageError` for another word."""
    choices = {"stop": 0, "skip": MAX_SKIPS}
    if word in choices:
        return choices[word]
    name, _, count = word.partition(":")
    if name != "skip" or not count.isdecimal() or len(count) > 9 or not int(count):
        raise UsageError(f"train.on_nonfinite {word!r} is no choice; {nearest(word, [*choices, 'skip:3'])}")
    return int(count)


def model_name(model: ModelConfig) -> str:
    """Return the preset, or the name of the model's folder."""
    return model.preset if model.path is None else Path(model.path).resolve().name


def groups_of(config: JobConfig) -> dict[str, dict[str, Any]]:
    """Return group -> key -> value or its words, what is trained before how."""
    parts = {name: {CLASS_PATH: part.class_path, **part.options} for name, part in config.parts.items()}
    groups = {f.name: getattr(config, f.name) for f in fields(config) if f.name != "parts"}
    return parts | {name: g.words() if isinstance(g, Sharding) else dict(vars(g)) for name, g in groups.items()}


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
    """Raise `UsageError` naming the key, the value and the limit; files and devices are not looked at."""
    for f in fields(config):
        if is_dataclass(group := getattr(config, f.name)):
            check_values(group, f.name)
    options, shard = config.train, config.shard
    if options.lr == 0:
        raise UsageError("train.lr is 0, which would train nothing; the default is 0.001.")
    if options.schedule == "wsd" and options.warmup + options.decay_steps > options.steps and options.decay_steps:
        raise UsageError(
            f"train.decay_steps is {options.decay_steps} behind train.warmup {options.warmup}, more than train.steps "
            f"{options.steps}; lower one of these."
        )
    max_skips_of(options.on_nonfinite)
    if shard.replicas and not shard.strategy.hybrid:
        raise UsageError(
            f"shard.replicas is {shard.replicas} but strategy {shard.strategy.name!r} has no replicas; "
            "take hybrid_shard or leave it out."
        )
    if isinstance(config, Config):
        _check_text(config)
        return
    for key in ("sample_every", "validation_rows"):
        if getattr(options, key):
            raise UsageError(f"train.{key} is for text and examples, and this run trains a task; leave it out.")


def _check_text(config: Config) -> None:
    model, adapter = config.model, config.adapter
    if not 0 <= adapter.dropout < 1:
        raise UsageError(f"adapter.dropout is {adapter.dropout}; it must be at least 0 and below 1.")
    if adapter.alpha <= 0:
        raise UsageError(f"adapter.alpha is {adapter.alpha}; it must be above 0, or adapters add nothing.")
    if model.path is None and model.preset not in TRAINED:
        raise UsageError(f"model.preset {model.preset!r} does not exist; {nearest(model.preset, TRAINED)}")
    if model.path is None and model.init == "pretrained":
        raise UsageError("model.init is 'pretrained' but model.path names no folder to read the weights from.")


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
