"""Check everything before ranks start: settings, data, model folder and checkpoint, in this order."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from inspect import signature
from pathlib import Path

from accordion.errors import CheckpointError, UsageError, check_installed, some_of
from accordion.models.stored import computing, end_of_turn, ends_of
from accordion.tasks.errors import of_the_task
from accordion.tasks.loaded import optimizer_of
from accordion.train import checkpoints
from accordion.train.config import Config, Job, JobConfig, TrainConfig
from accordion.train.data import Sequences, Share
from accordion.train.deepspeed import translated
from accordion.train.examples import Encoder, digest_of_tokenizer, run_tokenizer, vocabulary_of
from accordion.train.language_work import LanguageWork, check_enough, generation_settings, rows_in, trained_model
from accordion.train.launch import RankPlace
from accordion.train.model import configuration
from accordion.train.own_task import OwnTask, check_data, check_optimizer, check_own_keys, tried
from accordion.train.owner import check_free
from accordion.train.packing import ExampleRows, preview
from accordion.train.screen import Screen
from accordion.train.sources import SHOWN, Source, Split, find
from accordion.train.token_tables import SPLITS, TokenFiles, cached_examples, cached_tokens
from accordion.train.tokens import Say
from accordion.units import choose_units
from accordion.weights.four_bits import num_weights
from accordion.weights.pretrained import check_pretrained

Work = LanguageWork | OwnTask
"""Model, data, losses and validation of a run on a language model or on a task. Pickled to each rank."""
Folders = dict[str, Path]
"""Configuration key, "run.dir" or "checkpoint.dir" -> folder that the run writes to and owns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """The checked inputs of a run, from which its ranks start. `resume`: checkpoint to resume from; None for a fresh start.
    `config`: with the batch size of the run that saved `resume`, unless the user set another. `replicas`: copies of the sharded
    model. `began_s`: `time.time` of this machine when the command started."""

    config: JobConfig
    work: Work
    folders: Folders
    resume: Path | None
    replicas: int = 1
    began_s: float = 0.0

    @property
    def run_dir(self) -> Path:
        return self.folders["run.dir"]

    @property
    def checkpoint_dir(self) -> Path:
        return self.folders["checkpoint.dir"]


def prepare(
    config: JobConfig,
    place: RankPlace,
    cache: Path,
    screen: Screen,
    *,
    named: Collection[str] = (),
    began_s: float,
    task: object | None = None,
) -> Prepared:
    """Check all inputs of a run, write tokens into the folder `cache`, and create the run's folders. Returns the checked
    inputs; their `config` has the values that a DeepSpeed file and `train.global_batch` set. Raises `UsageError` for inputs
    that cannot be used, and on rank 0 (`place`) if another job uses the folders; raises `TaskError` if the user's code fails.
    `screen`: shows notes and a preview of examples. `named`: keys that the user set. `began_s`: `time.time` of this machine
    when the command started. `task`: the task to train, if `config` names none by class path."""
    replicas, world = 1, place.world
    config = translated(config, named, world)
    try:
        if config.shard.strategy.hybrid:
            replicas = config.shard.replicas or max(1, world // place.local_world)
        if world % replicas:
            raise UsageError(
                f"shard.replicas is {replicas}, which does not divide the {world} ranks; take a divisor of {world}."
            )
        config.shard.check_secondary(world // replicas, "shard.")
        config.shard.num_groups(world)
        for key, url in (("run.dir", config.run.dir), ("checkpoint.dir", config.checkpoint.dir)):
            if url and "://" in url:
                raise UsageError(
                    f"{key} is {url!r}, a URL; a run writes to file systems only, so give a path (acc.save takes URLs)."
                )
        for name in ("wandb", "mlflow"):  # a missing TensorBoard is only reported
            if getattr(config.log, name) is not None:
                check_installed(f"log.{name}", [name], "log")
        if isinstance(config, Config):
            optimizer = optimizer_of(config.parts)
            check_own_keys(optimizer, None, config)
            with of_the_task("optimizer(params)"):
                check_optimizer(optimizer)
            prepared = _of_language(config, place, cache, screen, named)
        else:
            prepared = _of_task(config, OwnTask(parts=config.parts, task=task), place, screen, named)
        for path in reversed(prepared.folders.values()):
            path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{error.filename or cache}: {error.strerror or error}.") from None
    return replace(prepared, replicas=replicas, began_s=began_s)


def share_of(config: JobConfig, place: RankPlace) -> Share:
    """Return the share of samples that the rank `place` reads; ranks that share each sequence have equal shares."""
    shard, options = config.shard, config.train
    return Share(
        rank=place.rank // shard.sequence,
        world=shard.num_groups(place.world),
        micro_batch=options.micro_batch,
        accumulate=options.accumulate,
    )


def _folders(
    config: Job, name: str, place: RankPlace, screen: Screen, named: Collection[str]
) -> tuple[Folders, Path | None, Job]:
    """Return (the run's folders, the checkpoint to resume from or None, `config` with the batch size of that checkpoint's run).
    Creates no folders. `name`: of the run folder in `runs`, if `run.dir` is not set. `named`: keys that the user set. Raises
    `UsageError` if the folders or their checkpoints cannot be used, and on rank 0 if another job uses the folders."""
    run_dir = Path(config.run.dir or Path("runs", name))
    folder = Path(config.checkpoint.dir or run_dir / "checkpoints")
    for path in (run_dir, folder):
        above = next(p for p in (path, *path.absolute().parents) if p.exists())
        if not above.is_dir():
            raise UsageError(f"{str(path)!r} cannot be made: {str(above)!r} is a file.")
        if not os.access(above, os.W_OK | os.X_OK):
            raise UsageError(f"{str(path)!r} cannot be written: no permission in {str(above)!r}.")
    folders = {"run.dir": run_dir, "checkpoint.dir": folder}
    if place.rank == 0:  # it may have claimed them before other hosts check
        check_free(folders, place.job)
    resume = checkpoints.choose(folder, config, screen.note)
    return folders, resume, checkpoints.with_batch_of(resume, config, named, config.shard.num_groups(place.world))


def _of_task(config: JobConfig, work: OwnTask, place: RankPlace, screen: Screen, named: Collection[str]) -> Prepared:
    """Check the task `work` and return the inputs of its run. Builds the model, reads a batch, and if the model is small and on
    the CPU, computes the loss of the batch. Raises `UsageError` for wrong inputs, and `TaskError` if the user's code fails.
    `screen`: shows notes. `named`: keys that the user set."""
    task = work.loaded
    check_own_keys(task.optimizer, task.scheduler, config)
    folders, resume, config = _folders(config, task.name, place, screen, named)
    options = config.train
    with of_the_task("model()"):
        model = work.model(options.seed)
    choose_units(model, work.units() if config.shard.units is None else config.shard.units)
    if resume is not None:
        checkpoints.check_run(resume, options.steps, None)
        checkpoints.check_model(resume, {name: tuple(value.shape) for name, value in model.state_dict().items()})
    share = replace(share_of(config, place), rank=0)
    work = replace(work, size=check_data(work, share, options))
    tried(work, model, share, options.seed)
    return Prepared(config=config, work=work, folders=folders, resume=resume)


def _of_language(config: Config, place: RankPlace, cache: Path, screen: Screen, named: Collection[str]) -> Prepared:
    """Check model and data, and return the inputs of a run on text or examples. Writes the tokens to `cache` if it does not have
    them. Rank 0 saves the tokenizer next to the checkpoints, for `accordion generate`. Raises `UsageError` for wrong inputs.
    `screen`: shows notes and a preview of examples. `named`: keys that the user set."""
    source, say, data, folder = find(config.data), screen.note, config.data, config.model.path
    model = config.model.preset if folder is None else Path(folder).resolve().name
    folders, resume, config = _folders(config, f"{model}-{source.name}", place, screen, named)
    model_vocab = getattr(configuration(config.model, data), "vocab_size", None)
    if not isinstance(model_vocab, int) or model_vocab < 1:
        raise UsageError(f"model.path {folder!r} is no language model: its config.json has no vocab_size.")
    _check_model(config, resume, say)
    tokenizer = run_tokenizer(config, source, model_vocab, cache, say)
    vocabulary = vocabulary_of(tokenizer, config, model_vocab)
    digest = vocabulary.digest if data.format == "text" else digest_of_tokenizer(tokenizer, data.format)
    if resume is not None:
        checkpoints.check_run(resume, config.train.steps, digest)
    if data.format == "text":
        files = cached_tokens(source, vocabulary, cache, say)
    else:
        files = cached_examples(source, Encoder(tokenizer, data.format), digest, vocabulary.size, cache, say)
    rows = {split: rows_in(files, split, data) for split in SPLITS}
    if isinstance(train := rows["train"], ExampleRows):  # before the check, which may refuse them
        screen.examples(preview(train.examples, tokenizer, data.seq_len))
    check_enough(rows, data, share_of(config, place).global_batch, source.label)
    _report_data(rows, files, source, say)
    if place.rank == 0:
        tokenizer.save_pretrained(folders["checkpoint.dir"])
    end = end_of_turn(tokenizer) if data.format == "chat" else vocabulary.end_id
    if end is None:
        say("the chat template ends an answer with no special token; generation will run to the limit of tokens")
    generation = generation_settings(config, ends_of(end))
    work = LanguageWork(config=config, files=files, generation=generation, spec=vocabulary.spec)
    return Prepared(config=config, work=work, folders=folders, resume=resume)


def _report_data(rows: Mapping[Split, Sequences | ExampleRows], files: TokenFiles, source: Source, say: Say) -> None:
    """Show with `say` the sizes of the data, the files that are not read, and how many examples are cut or left out."""
    if source.unread:
        read, left = [key for key, _ in source.files], [f"{key} ({why})" for key, why in source.unread.items()]
        say(
            f"data: {len(read):,} of {len(read) + len(left):,} files are read: {some_of(read, SHOWN)}; not read: "
            f"{some_of(left, SHOWN)}"
        )
    what, train = "tokens", rows["train"]
    for split, split_rows in rows.items():
        if isinstance(split_rows, ExampleRows):
            what, cut = "examples", split_rows.note()
            if cut is not None:
                say(f"data, {split}: {cut}")
    say(f"data: {source.label}, {files.num_documents:,} documents")
    say(f"data: {files.num_train:,} {what} to train on, {files.num_validation:,} to validate on")
    if isinstance(train, ExampleRows):
        tokens = int(train.examples.lengths.sum())
        full = 100 * train.lengths.sum() / (len(train) * train.seq_len)
        say(f"data: {train.examples.num_answers:,} of {tokens:,} tokens to train on are answers")
        say(f"data: {len(train):,} rows to train on, {full:.1f} % full")


def _check_model(config: Config, resume: Path | None, say: Say) -> None:
    """Raise `UsageError` if packing, units, `shard.sequence`, pretrained weights or the checkpoint `resume` do not fit the
    model. Shows with `say` the learning rate of fine-tuning, and with adapters the number of trained parameters."""
    model = trained_model(config)
    choose_units(model, config.shard.units)
    if config.shard.sequence > 1:
        from accordion.sequence.registry import checked  # imports transformers

        checked(computing(model), config.shard.sequence)
    if config.data.format != "text" and config.data.packing == "documents":
        inner = type(computing(model))
        if "position_ids" not in signature(inner.forward).parameters:
            raise UsageError(
                f"data.packing is 'documents', but {inner.__name__} takes no position ids, so examples in a row would attend to "
                "each other; take --data.packing none."
            )
    if config.model.path is not None and config.model.init == "pretrained":
        try:
            check_pretrained(model, Path(config.model.path))
        except CheckpointError as error:
            raise UsageError(f"model.path: {error}") from None
    if resume is not None:
        state = model.state_dict(keep_vars=True).items()
        all_of_it = config.adapter.kind == "none"
        shapes = {name: tuple(value.shape) for name, value in state if all_of_it or value.requires_grad}
        checkpoints.check_model(resume, shapes)
        if not all_of_it:
            checkpoints.check_base(resume, config.model.quantize)
    if config.model.init == "pretrained" and "optimizer" not in config.parts:
        say(
            f"fine-tuning at a peak learning rate of {config.train.lr:g} (train.lr); "
            f"without pretrained weights it is {TrainConfig().lr:g} by default"
        )
    trained, total = sum(p.numel() for p in model.parameters() if p.requires_grad), num_weights(model)
    if trained < total:
        say(f"adapters: {trained:,} of {total:,} parameters are trained")
