"""Configuration of `accordion train`: its keys, each with its default, its limits and its help."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Literal, TypeVar

from accordion.errors import UsageError, nearest
from accordion.models.llama import TRAINED
from accordion.options import at_least, check_values, needing, unread
from accordion.sharding import Sharding
from accordion.tasks.classes import CLASS_PATH, PartConfig

Job = TypeVar("Job", bound="JobConfig")
# Default peak learning rates for pretrained weights, and for adapters on them.
TUNING_LR, ADAPTER_LR = 2e-5, 2e-4
MAX_SKIPS = 10  # steps in a row that `train.on_nonfinite skip` may skip


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model."""

    preset: str = "llama-10m"
    """size of a Llama model: `llama-tiny`, `llama-10m`, `llama-30m`, `llama-125m`, `llama-1b` or `llama-8b`"""
    path: str | None = None
    """transformers folder of a causal language model, with `config.json`, instead of a preset; its `tokenizer.json` is used if
    it has one"""
    init: Literal["scratch", "pretrained"] = "scratch"
    """`scratch` draws random weights from `train.seed`; `pretrained` reads the safetensors files in `model.path`"""
    attention: Literal["auto", "eager", "sdpa", "flex_attention", "flash_attention_2"] = "auto"
    """attention implementation of transformers; `auto`: transformers chooses, `sdpa` for most models"""
    quantize: Literal["none", "nf4", "fp4", "nf4-double", "fp4-double"] = "none"
    """short `--quantize nf4`: data type of four bits for the frozen weights of linear layers but the head, which are quantised
    while `model.path` is read; `-double` quantises their scales too. For `--adapter lora`; takes bitsandbytes"""
    mlp_tiles: int = at_least(1, 1)
    """parts of the tokens that each MLP computes one after another, and again in the backward, so that the activations of one
    part exist at a time; for sequences whose MLPs decide what fits"""
    loss: Literal["plain", "chunked", "head_rows"] = "plain"
    """`plain` computes the logits of all tokens; `chunked` computes head and loss together for some tokens at a time, with equal
    gradients up to rounding, for models whose logits are the output of a linear head; `head_rows` also gathers a few rows of the
    head at a time, if it is a unit of its own"""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The data: text, or examples with answers."""

    path: str | None = None
    """text, JSON, JSONL, CSV, parquet or Arrow file (may be compressed), a folder of such files, or a folder saved by
    `datasets`; default: the source files of Python's standard library on this machine"""
    format: Literal["text", "chat", "prompt"] = "text"
    """`text`: documents; `prompt`: fields `prompt` and `completion`; `chat`: field `messages`, each with `role` and `content`,
    rendered by the tokenizer's chat template. With `prompt` and `chat`, answers alone count in the loss"""
    text_field: str = "text"
    """field or column with the text of a row"""
    special_tokens: Literal["tokens", "text"] = needing("tokens", format=("text",))
    """for format `text`: `tokens` reads special tokens such as `<|im_end|>` in a document as these tokens, as transformers does;
    `text` reads them as ordinary characters"""
    seq_len: int = at_least(2, 128)
    """tokens in a training sequence. Documents are packed, with an end-of-text token between them; the end of an example that
    is longer is cut off"""
    packing: Literal["documents", "none"] = needing("documents", format=("chat", "prompt"))
    """for `chat` and `prompt`: `documents` packs several examples into a row, and none attends to another; `none` puts one
    example into a row"""
    tokenizer: str | None = None
    """tokenizer.json or transformers folder, instead of the tokenizer in `model.path`"""
    chat_template: str | None = needing(None, format=("chat",))
    """for `chat`: file with a Jinja template, instead of the tokenizer's"""


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """Adapters of PEFT on frozen weights."""

    kind: Literal["none", "lora"] = "none"
    """`lora`, short `--adapter lora`, freezes the pretrained weights and trains low-rank adapters; `none` trains all weights"""
    r: int = at_least(1, 16, kind=("lora",))
    """rank of the adapters"""
    alpha: float = needing(32.0, kind=("lora",))
    """the output of an adapter is scaled by alpha / r"""
    dropout: float = needing(0.0, kind=("lora",))
    """probability of dropping an input of an adapter in training"""
    targets: str = needing("auto", kind=("lora",))
    """layers with adapters: the last parts of their names, separated by commas; `auto`: all linear layers but the head"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardConfig(Sharding):
    """How the model is sharded over the ranks."""

    replicas: int = at_least(0, 0)
    """copies of the sharded model, for a hybrid strategy; 0: one for each node"""
    sequence: int = at_least(1, 1)
    """ranks that share each sequence of a language model, for sequences that do not fit on one (docs/long-context.md). Batches
    then count groups of so many ranks, and not ranks"""

    def num_groups(self, num_ranks: int) -> int:
        """Return the number of groups of `sequence` ranks. Raises `UsageError` if `sequence` does not divide `num_ranks`."""
        if num_ranks % self.sequence:
            raise UsageError(
                f"shard.sequence is {self.sequence}, which does not divide the {num_ranks} ranks; take a divisor of {num_ranks}."
            )
        return num_ranks // self.sequence


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Optimization: by default AdamW, linear warmup, and cosine decay to a tenth of the peak."""

    steps: int = at_least(1, 100)
    """number of optimizer steps"""
    micro_batch: int = at_least(1, 8)
    """sequences in one forward on one rank"""
    accumulate: int = at_least(1, 1)
    """micro-batches in a step, which reads ranks x micro_batch x accumulate sequences (ranks / `shard.sequence`, if given)"""
    global_batch: int = at_least(0, 0)
    """sequences in a step over all ranks, instead of `accumulate`: a run that is resumed on another number of ranks makes the
    same steps; 0: set by `accumulate`"""
    lr: float = at_least(0, 1e-3)
    """peak learning rate; with `--optimizer NAME`, give `optimizer.lr` instead. If not given: 2e-5 for pretrained weights, 2e-4
    for adapters on them"""
    warmup: int = at_least(0, 5)
    """steps of linear warmup"""
    schedule: Literal["auto", "cosine", "linear", "constant", "wsd"] = "auto"
    """learning rate after the warmup: `cosine` or `linear` decay to `final_lr`, `constant`, `wsd` (constant, then linear decay);
    `auto`: `cosine`, but with `--optimizer` or a task's optimizer no schedule and no warmup"""
    final_lr: float = at_least(0, 0.1, most=1, schedule=("auto", "cosine", "linear", "wsd"))
    """fraction of the peak at which `cosine`, `linear` and `wsd` end"""
    decay_steps: int = at_least(0, 0, schedule=("wsd",))
    """for `wsd`: steps of the decay at the end; 0: a fifth of all"""
    weight_decay: float = at_least(0, 0.1)
    """weight decay of matrices; vectors have none"""
    clip: float = at_least(0, 1.0)
    """largest gradient norm; 0: no clipping"""
    seed: int = at_least(0, 0)
    """seed of the initial weights and of the order of the data"""
    eval_every: int = at_least(0, 0)
    """steps between validations; 0: only at the end"""
    validation_rows: int = at_least(0, 0)
    """rows of text, or examples, that a validation reads: a random choice, the same each time; 0: all"""
    on_nonfinite: str = "stop"
    """if loss or gradients are NaN or inf: `stop` ends the run and names the unit that produced them; `skip` reports it and
    skips the step (weights, optimizer and schedule do not change), at most 10 steps in a row; `skip:N`: at most N. Steps that a
    gradient scaler skips to lower its scale do not count"""
    deepspeed: str | None = None
    """DeepSpeed configuration file, short `--deepspeed ds_config.json`: its settings replace the keys here and in `shard`; its
    optimizer treats all parameters alike; settings that it omits have DeepSpeed's defaults"""
    hours: float = at_least(0, 0.0)
    """hours after the start of this command by which the run saves a checkpoint and ends; 0: no limit"""
    ema: float = at_least(0, 0.0, most=1)
    """decay of an average of the weights, such as 0.999, which validations and samples use in place of the weights; export it
    with `accordion export --ema 0.999`. 0: no average"""
    patience: int = at_least(0, 0, eval_every=True)
    """end the run after so many validations in a row without a lower loss; 0: never"""
    min_delta: float = at_least(0, 0.0, patience=True)
    """for `patience`: by how much a validation loss must be below the lowest one to count as lower"""
    keep_best: bool = needing(False, eval_every=True)
    """keep the checkpoint with the lowest validation loss as `best` in `checkpoint.dir`, whatever `checkpoint.keep` is"""
    sample_every: int = at_least(0, 0)
    """steps between samples of generated text; 0: one at the end"""
    observe: int = at_least(0, 0)
    """short `--observe 100`: from this step on, record a few steps and draw them in `trace-100.html` in the run folder, with
    `trace-100.json` for programs; 0: none"""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints."""

    dir: str | None = None
    """folder of the checkpoints; default: `checkpoints` in the run folder"""
    every: int = at_least(0, 0)
    """steps between checkpoints; 0: only at the end"""
    keep: int = at_least(0, 0)
    """number of the newest complete checkpoints to keep; 0: all"""
    background: bool = True
    """train on while a checkpoint is written; the run waits for the last one"""
    resume: str = "auto"
    """`auto` resumes from the newest checkpoint in `checkpoint.dir`, if there is one; a path resumes from that one, if there is
    none in `checkpoint.dir`"""


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """Ranks and devices."""

    nproc: int = at_least(0, 0)
    """ranks to start on this machine, if torchrun or srun does not start them; 0: one for each GPU, or 2 without GPUs"""
    device: str = "auto"
    """`auto`: the accelerators of this machine, if it has any, else `cpu`; or a type of device (cuda, xpu, npu)"""
    timeout_s: int = at_least(5, 600)
    """seconds a rank waits for another rank, or for the job's store, before it exits"""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The run folder."""

    dir: str | None = None
    """folder for metrics and checkpoints; default: `runs/<model>-<data>`"""


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """Trackers of metrics."""

    tensorboard: bool = True
    """write TensorBoard files into the run folder"""
    wandb: str | None = None
    """log to this project of Weights & Biases. WANDB_MODE=offline writes into the run folder, for `wandb sync`"""
    mlflow: str | None = None
    """log to this experiment of MLflow. MLFLOW_TRACKING_URI is the address of the server"""


@dataclass(frozen=True, kw_only=True)
class JobConfig:
    """Keys of every run, on a task or on text. `parts`: "task" or "optimizer" -> class path and options, if the user gave
    one."""

    parts: Mapping[str, PartConfig] = unread(dict)
    shard: ShardConfig = field(default_factory=ShardConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    run: RunConfig = field(default_factory=RunConfig)
    log: LogConfig = field(default_factory=LogConfig)


@dataclass(frozen=True, kw_only=True)
class TextConfig:
    """The model, adapters and data of a run on text."""

    model: ModelConfig = field(default_factory=ModelConfig)
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    data: DataConfig = field(default_factory=DataConfig)


@dataclass(frozen=True, kw_only=True)
class Config(JobConfig, TextConfig):
    """Configuration of a run on text."""


def max_skips_of(word: str) -> int:
    """Return how many steps in a row may be skipped if `train.on_nonfinite` is `word`. Raises `UsageError` if that is wrong."""
    choices = {"stop": 0, "skip": MAX_SKIPS}
    if word in choices:
        return choices[word]
    name, _, count = word.partition(":")
    if name != "skip" or not count.isdecimal() or len(count) > 9 or not int(count):
        raise UsageError(f"train.on_nonfinite {word!r} is no choice; {nearest(word, [*choices, 'skip:3'])}")
    return int(count)


def groups_of(config: JobConfig) -> dict[str, dict[str, Any]]:
    """Return group -> key -> value of `config`. The task and the optimizer in `config.parts` are groups too, and come first.
    Values in the group `shard` are text, as on the command line."""
    parts = {name: {CLASS_PATH: part.class_path, **part.options} for name, part in config.parts.items()}
    groups = {f.name: getattr(config, f.name) for f in fields(config) if f.name != "parts"}
    return parts | {name: g.words() if isinstance(g, Sharding) else dict(vars(g)) for name, g in groups.items()}


def flat(config: JobConfig) -> dict[str, Any]:
    """Return `group.key` -> value of `config`, with the keys of the command line; values of the group `shard` are text."""
    return {f"{name}.{key}": value for name, group in groups_of(config).items() for key, value in group.items()}


def as_yaml(config: JobConfig) -> str:
    """Return the text of a run file with every key of `config`. Values are written as JSON, which is valid YAML."""
    text = ""
    for name, group in groups_of(config).items():
        text += f"{name}:\n" + "".join(f"  {key}: {json.dumps(value)}\n" for key, value in group.items())
    return text


def check(config: JobConfig) -> None:
    """Raise `UsageError` if a value of `config` is not allowed or contradicts another one. Reads no files and no devices."""
    for f in fields(config):
        if is_dataclass(group := getattr(config, f.name)):
            check_values(group, f.name)
    options, shard = config.train, config.shard
    if options.lr == 0:
        raise UsageError("train.lr is 0, which would train nothing; the default is 0.001.")
    if options.decay_steps and options.warmup + options.decay_steps > options.steps:
        raise UsageError(
            f"train.warmup {options.warmup} and train.decay_steps {options.decay_steps} are together more than train.steps "
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
    if shard.sequence > 1:
        raise UsageError(
            f"shard.sequence is {shard.sequence}, but this run trains a task, and only language models are split; leave it out, "
            "or call accordion.sequence_attention in a program of your own (docs/long-context.md)."
        )


def _check_text(config: Config) -> None:
    model, adapter, sequence = config.model, config.adapter, config.shard.sequence
    if config.data.seq_len % sequence:
        raise UsageError(
            f"data.seq_len is {config.data.seq_len}, which cannot be divided over the {sequence} ranks of a sequence "
            f"(shard.sequence); take a multiple of {sequence}."
        )
    if not 0 <= adapter.dropout < 1:
        raise UsageError(f"adapter.dropout is {adapter.dropout}; it must be at least 0 and below 1.")
    if adapter.alpha <= 0:
        raise UsageError(f"adapter.alpha is {adapter.alpha}; it must be above 0, or adapters add nothing.")
    if model.path is None and model.preset not in TRAINED:
        raise UsageError(f"model.preset {model.preset!r} does not exist; {nearest(model.preset, TRAINED)}")
    if model.path is None and model.init == "pretrained":
        raise UsageError("model.init is 'pretrained' but model.path names no folder to read the weights from.")
    if model.quantize != "none" and adapter.kind == "none":
        raise UsageError(
            f"model.quantize is {model.quantize!r}, and weights of four bits are not trained; train adapters: --adapter lora."
        )
    if adapter.kind != "none" and model.init != "pretrained":
        raise UsageError(
            f"adapter.kind is {adapter.kind!r}, which needs the weights of a model; give model.init pretrained."
        )


def fine_tuning(config: Job, named: Collection[str]) -> Job:
    """Return `config` with the default learning rate of fine-tuning if the run starts from pretrained weights. Otherwise, and
    if the user set a learning rate or an optimizer, return `config` itself. `named`: keys that the user set."""
    if not isinstance(config, Config) or config.model.init != "pretrained":
        return config
    if "train.lr" in named or "optimizer" in config.parts:
        return config
    lr = TUNING_LR if config.adapter.kind == "none" else ADAPTER_LR
    return replace(config, train=replace(config.train, lr=lr))


def spread(config: Job, named: Collection[str], num_ranks: int) -> Job:
    """Return `config` with `train.accumulate` computed from `train.global_batch` for `num_ranks` ranks; `config` itself if that
    is 0. `named`: keys that the user set. Raises `UsageError` if the global batch is no multiple of all ranks' micro-batches,
    if the user set `train.accumulate` or `train.deepspeed` too, or if `shard.sequence` does not divide the ranks."""
    options, sequence, num_groups = config.train, config.shard.sequence, config.shard.num_groups(num_ranks)
    if not options.global_batch:
        return config
    other = "train.deepspeed" if options.deepspeed is not None else "train.accumulate"
    if other in named:
        raise UsageError(f"train.global_batch is {options.global_batch}, and {other} is given too; give one of them.")
    accumulate, rest = divmod(options.global_batch, num_groups * options.micro_batch)
    if rest:
        who = f"{num_ranks} ranks" if sequence == 1 else f"{num_groups} groups of {sequence} ranks"
        raise UsageError(
            f"train.global_batch is {options.global_batch}, which is no multiple of {who} x train.micro_batch "
            f"{options.micro_batch}; take a multiple, or a smaller train.micro_batch."
        )
    return replace(config, train=replace(options, accumulate=accumulate))
