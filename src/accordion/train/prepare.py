"""Check everything before ranks start: settings, data, model folder and checkpoint, in this order."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from inspect import signature
from pathlib import Path
from typing import Any

from torch import nn

from accordion.errors import CheckpointError, UsageError
from accordion.models.llama import TRAINED
from accordion.models.stored import computing, end_of_turn, ends_of
from accordion.tasks.errors import of_the_task
from accordion.tasks.loaded import optimizer_of
from accordion.train import checkpoints
from accordion.train.auto_plan import Expected
from accordion.train.config import Config, Job, JobConfig, TrainConfig, model_name
from accordion.train.data import Share, check_enough
from accordion.train.examples import Encoder, chat_tokenizer, digest_of_tokenizer
from accordion.train.language_work import (
    Instructions,
    Text,
    check_enough_rows,
    generation_settings,
    trained_model,
    with_base,
)
from accordion.train.launch import RankPlace
from accordion.train.model import check_folder, configuration
from accordion.train.own_task import OwnTask, check_data, check_optimizer, check_own_keys, tried
from accordion.train.owner import check_free
from accordion.train.packing import ExampleRows, preview
from accordion.train.screen import Screen
from accordion.train.sources import Source, find, first_of
from accordion.train.token_tables import SPLITS, ExampleFiles, cached_examples, cached_tokens
from accordion.train.tokens import Say, Vocabulary, cached_vocabulary, check_fits, folder_vocabulary, keep_tokenizer
from accordion.train.trackers import check_trackers
from accordion.units import choose_units

Work = Text | Instructions | OwnTask
"""Interface of the training loop to the training of text, examples or a task. Pickled to each rank."""
Folders = dict[str, Path]
"""Setting -> folder that the run writes to and owns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """The checked inputs of a run, from which its ranks start. `config`: has the global batch of `resume`, the checkpoint to
    resume from. `expected`: prediction of the plan. `began_s`: `time.time` of this machine when the command started."""

    config: JobConfig
    work: Work
    folders: Folders
    resume: Path | None
    replicas: int = 1
    expected: Expected | None = None
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
    """Check all inputs of a run, write tokens to the cache and create the run's folders. Returns the checked inputs. Raises
    `UsageError`, or `TaskError` if the user's code fails.

    Args:
        place: rank of this process; rank 0 also checks that no other job uses the folders of the run.
        cache: folder for tokenizers and tokens, created if it does not exist.
        screen: shows notes and a preview of examples.
        named: keys that the user set.
        began_s: `time.time` of this machine when the command started.
        task: the task to train, if `config` names none by class path.
    """
    try:
        replicas, world = 1, place.world
        if config.shard.strategy.hybrid:
            replicas = config.shard.replicas or max(1, world // place.local_world)
        if world % replicas:
            raise UsageError(
                f"shard.replicas is {replicas}, which does not divide the {world} ranks; take a divisor of {world}."
            )
        config.shard.check_secondary(world // replicas, "shard.")
        for key, url in (("run.dir", config.run.dir), ("checkpoint.dir", config.checkpoint.dir)):
            if url and "://" in url:
                raise UsageError(
                    f"{key} is {url!r}, a URL; a run writes to file systems only, so give a path (acc.save takes URLs)."
                )
        check_trackers(config.log)
        if isinstance(config, Config):
            optimizer = optimizer_of(config.parts)
            check_own_keys(optimizer, None, config)
            with of_the_task("optimizer(params)"):
                check_optimizer(optimizer)
        if isinstance(config, Config):
            of_data = _of_text if config.data.format == "text" else _of_examples
            prepared = of_data(config, place, cache, screen, named)
        else:
            prepared = _of_task(config, OwnTask(parts=config.parts, task=task), place, screen, named)
    except OSError as error:
        raise UsageError(f"{error.filename or cache}: {error.strerror or error}.") from None
    return replace(prepared, replicas=replicas, began_s=began_s)


@contextmanager
def _cached(cache: Path) -> Iterator[None]:
    """Context manager that turns an `OSError` into a `UsageError` about the cache folder."""
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"the cache folder {str(cache)!r}, which keeps tokenizers and tokens, cannot be used: {error.strerror or error} "
            f"({error.filename or cache}); set XDG_CACHE_HOME to a folder that can be written and has room."
        ) from None


def _folders(
    config: Job, name: str, place: RankPlace, screen: Screen, named: Collection[str]
) -> tuple[Folders, Path | None, Job]:
    """Return (the run's folders, the checkpoint to resume from, `config` with that checkpoint's batch). Writes nothing."""
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
    return folders, resume, checkpoints.with_batch_of(resume, config, named, place.world)


def _make(folders: Folders) -> None:
    for path in reversed(folders.values()):
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"{str(path)!r} cannot be made: {error.strerror or error}.") from None


def _of_task(config: JobConfig, work: OwnTask, place: RankPlace, screen: Screen, named: Collection[str]) -> Prepared:
    """Prepare a task: build its model, read a batch, and compute its loss if the model is small and on the CPU."""
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
    share = Share(rank=0, world=place.world, micro_batch=options.micro_batch, accumulate=options.accumulate)
    work = replace(work, size=check_data(work, share, options))
    tried(work, model, share, options.seed)
    _make(folders)
    return Prepared(config=config, work=work, folders=folders, resume=resume)


def _of_text(config: Config, place: RankPlace, cache: Path, screen: Screen, named: Collection[str]) -> Prepared:
    model_vocab, source, say = _vocab_of_model(config), find(config.data), screen.note
    folders, resume, config = _folders(config, f"{model_name(config.model)}-{source.name}", place, screen, named)
    is_preset = config.model.path is None and config.adapter.kind == "none"
    if not is_preset or config.shard.units is not None or resume is not None:
        _check_model(config, resume, say)
    with _cached(cache):
        vocabulary = _vocabulary(config, source, model_vocab, cache, say)
    spec = json.loads(vocabulary.spec)
    if spec.get("truncation") or spec.get("padding"):
        say("tokenizer.json asks for truncation or padding, which is ignored while documents are read")
    vocabulary = replace(vocabulary, special_as_text=config.data.special_tokens == "text")
    check_fits(vocabulary.size, model_vocab, config.model.path or config.model.preset)
    if resume is not None:
        checkpoints.check_run(resume, config.train.steps, vocabulary.digest)
    with _cached(cache):
        tokens = cached_tokens(source, vocabulary, cache, say)
        keep_tokenizer(vocabulary, cache)
    batch = place.world * config.train.micro_batch * config.train.accumulate
    check_enough(tokens.num_train, tokens.num_validation, config.data.seq_len, batch, source.label)
    _make(folders)
    say(f"data: {source.label}, {tokens.num_documents:,} documents; vocabulary of {vocabulary.size:,}")
    say(f"data: {tokens.num_train:,} tokens to train on, {tokens.num_validation:,} to validate on")
    _report_unread(source, say)
    config = with_base(config, folders["run.dir"])
    generation = generation_settings(config, [vocabulary.end_id])
    work = Text(config=config, files=tokens, generation=generation, spec=vocabulary.spec)
    return Prepared(config=config, work=work, folders=folders, resume=resume)


def _of_examples(config: Config, place: RankPlace, cache: Path, screen: Screen, named: Collection[str]) -> Prepared:
    """Prepare examples. The tokenizer is saved in the run folder, where `accordion generate` reads it and its chat template."""
    model_vocab, source, say = _vocab_of_model(config), find(config.data), screen.note
    folders, resume, config = _folders(config, f"{model_name(config.model)}-{source.name}", place, screen, named)
    data, inner = config.data, computing(_check_model(config, resume, say))
    if data.packing == "documents" and "position_ids" not in signature(type(inner).forward).parameters:
        raise UsageError(
            f"data.packing is 'documents', but {type(inner).__name__} takes no position ids, so examples in a row would attend "
            "to each other; take --data.packing length."
        )
    with _cached(cache):
        tokenizer = chat_tokenizer(config, source, model_vocab, cache, say)
    size = 1 + max(tokenizer.get_vocab().values())  # ids may have gaps
    check_fits(size, model_vocab, data.tokenizer or config.model.path or config.model.preset)
    digest = digest_of_tokenizer(tokenizer, data.format)
    if resume is not None:
        checkpoints.check_run(resume, config.train.steps, digest)
    with _cached(cache):
        examples = cached_examples(source, Encoder(tokenizer, data.format), digest, size, cache, say)
    _check_examples(examples, config, source, tokenizer, place.world, screen)
    _make(folders)
    tokenizer.save_pretrained(folders["run.dir"])
    end = end_of_turn(tokenizer) if data.format == "chat" else tokenizer.eos_token_id
    if end is None:
        say("the chat template ends an answer with no special token; generation will run to the limit of tokens")
    config = with_base(config, folders["run.dir"])
    generation, spec = generation_settings(config, ends_of(end)), tokenizer.backend_tokenizer.to_str()
    work = Instructions(config=config, files=examples, generation=generation, spec=spec)
    return Prepared(config=config, work=work, folders=folders, resume=resume)


def _check_examples(
    examples: ExampleFiles, config: Config, source: Source, tokenizer: Any, world: int, screen: Screen
) -> None:
    """Show a preview and the sizes of the examples. Raises `UsageError` if there are too few."""
    data, say = config.data, screen.note
    _report_unread(source, say)
    if examples.unread:
        say(f"data: fields that are not used, or not by the chat template: {', '.join(examples.unread)}")
    rows = {split: ExampleRows(examples.read(split), data.seq_len, data.packing) for split in SPLITS}
    train = rows["train"]
    screen.examples(preview(train.examples, tokenizer, data.seq_len))  # before the check, which may refuse them
    batch = world * config.train.micro_batch * config.train.accumulate
    check_enough_rows(rows, config, batch, source.label)
    for split, split_rows in rows.items():
        cut = split_rows.fit.words(data.seq_len)
        if cut is not None:
            say(f"data, {split}: {cut}")
    say(
        f"data: {source.label}, {examples.num_train:,} examples to train on, {examples.num_validation:,} to validate on; "
        f"{train.fit.num_answers:,} of {int(train.examples.lengths.sum()):,} tokens to train on are answers"
    )
    if data.packing == "documents":
        filled = train.fit.lengths.sum() / (len(train) * data.seq_len)
        say(f"data: {len(train):,} rows of {data.seq_len} tokens to train on, {100 * filled:.1f} % full")


def _report_unread(source: Source, say: Say) -> None:
    if source.unread:
        read, left = [key for key, _ in source.files], [f"{key} ({why})" for key, why in source.unread.items()]
        say(
            f"data: {len(read):,} of {len(read) + len(left):,} files are read: {first_of(read)}; not read: {first_of(left)}"
        )


def _check_model(config: Config, resume: Path | None, say: Say) -> nn.Module:
    """Return the model on the meta device. Raises `UsageError` if units, pretrained weights or `resume` do not fit it."""
    from accordion.weights.pretrained import check_pretrained

    model = trained_model(config)
    choose_units(model, config.shard.units)
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
    if config.model.init == "pretrained" and "optimizer" not in config.parts:
        say(
            f"fine-tuning at a peak learning rate of {config.train.lr:g} (train.lr); "
            f"without pretrained weights it is {TrainConfig().lr:g} by default"
        )
    trained, total = (sum(p.numel() for p in model.parameters() if p.requires_grad or all_) for all_ in (False, True))
    if trained < total:
        say(f"adapters: {trained:,} of {total:,} parameters are trained")
    return model


def _vocab_of_model(config: Config) -> int:
    """Return the size of the vocabulary of the model."""
    if config.model.path is None:
        return TRAINED[config.model.preset].vocab
    described = check_folder(config.model.path)
    vocab = described.get("vocab_size")
    if not isinstance(vocab, int):
        vocab = getattr(configuration(config.model, config.data), "vocab_size", None)
    if not isinstance(vocab, int) or vocab < 1:
        raise UsageError(f"model.path {config.model.path!r} is no language model: its config.json has no vocab_size.")
    return vocab


def _vocabulary(config: Config, source: Source, model_vocab: int, cache: Path, say: Say) -> Vocabulary:
    if config.model.path is not None:
        folder = Path(config.model.path)
        vocabulary = folder_vocabulary(folder, check_folder(config.model.path).get("eos_token_id"))
        if vocabulary is not None:
            return vocabulary
        if config.model.init == "pretrained":
            raise UsageError(f"model.path {str(folder)!r} has no tokenizer.json, which its pretrained weights need.")
    return cached_vocabulary(source, source.pieces(), model_vocab, cache, say)
