"""Everything that can go wrong before ranks start: settings, data, model folder and checkpoint, checked in this order."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from inspect import signature
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.distributed_c10d import Store

from accordion.errors import CheckpointError, UsageError
from accordion.models.llama import TRAINED
from accordion.models.stored import computing, end_of_turn, ends_of
from accordion.tasks.errors import of_the_task
from accordion.tasks.loaded import optimizer_of
from accordion.train import checkpoints
from accordion.train.auto_plan import Expected
from accordion.train.chat_tokenizer import chat_tokenizer
from accordion.train.config import Config, Job, JobConfig, TrainConfig, model_name
from accordion.train.data import Share, check_enough
from accordion.train.examples import Encoder, digest_of_tokenizer
from accordion.train.instructions import Instructions, check_enough_rows
from accordion.train.language_work import generation_settings, kept_of, trained_model, with_base
from accordion.train.launch import RankPlace, once_per_host
from accordion.train.model import check_folder, configuration
from accordion.train.own_task import OwnTask, check_data, check_optimizer, check_own_keys, tried
from accordion.train.owner import check_free
from accordion.train.packing import ExampleRows
from accordion.train.preview import Part, preview
from accordion.train.sources import Source, find, first_of
from accordion.train.text import Text
from accordion.train.token_tables import SPLITS, ExampleFiles, cached_examples, cached_tokens
from accordion.train.tokens import Say, Vocabulary, cached_vocabulary, check_fits, folder_vocabulary, keep_tokenizer
from accordion.train.trackers import check_trackers
from accordion.train.work import Work
from accordion.units import UnitChoice, choose_units

Folders = dict[str, Path]
"""Those that one job writes to at a time, under the settings that name them."""
Show = Callable[[list[list[Part]]], None]
"""Takes examples, each in parts that are learnt or not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What ranks start from. `config`: with the batch of the run that it goes on with. `resume`: the checkpoint to go on from.
    `expected`: what a plan says of the run. `began_s`: when this start of the run began, by `time.time` of this machine."""

    config: JobConfig
    run_dir: str
    checkpoint_dir: str
    work: Work
    replicas: int
    resume: str | None
    expected: Expected | None = None
    began_s: float

    @property
    def folders(self) -> Folders:
        return {"run.dir": Path(self.run_dir), "checkpoint.dir": Path(self.checkpoint_dir)}


def prepare(
    config: JobConfig,
    world: int,
    local_world: int,
    cache: Path,
    say: Say,
    ask: Callable[[Folders], None] = lambda folders: None,
    show: Show = lambda examples: None,
    task: object | None = None,
    *,
    named: Collection[str] = (),
    began_s: float,
) -> Prepared:
    """Check all input and make the token files. Raises `UsageError`, or `TaskError` for the user's code, with nothing written.

    `world`, `local_world`: ranks in all and on one machine. `cache`: folder for tokenizers and tokens, made if need be.
    `ask`: called with the run's folders before they are looked into; may raise. `show`: called with examples that will be
    learnt. `task`: what is trained where `config` names no class of it. `named`: the keys that flags and run files gave.
    `began_s`: when this start of the run began.
    """
    try:
        replicas = _replicas(config, world, local_world)
        place = _Place(world=world, replicas=replicas, named=named, began_s=began_s, say=say, ask=ask, show=show)
        _check_shards(config, place)
        check_trackers(config.log)
        if isinstance(config, Config):
            optimizer = optimizer_of(config.parts)
            check_own_keys(optimizer, None, config)
            with of_the_task("optimizer(params)"):
                check_optimizer(optimizer)
            return (_of_text if config.data.format == "text" else _of_examples)(config, place, cache)
        return _of_task(config, place, OwnTask(parts=config.parts, task=task))
    except OSError as error:
        raise UsageError(f"{error.filename or cache}: {error.strerror or error}.") from None


def prepare_on_host(
    place: RankPlace, store: Store, config: JobConfig, world: int, cache: Path, say: Say, **options: Any
) -> Prepared:
    """`prepare` on the first rank of this host, then on its other ranks. The first rank of all asks for the folders."""

    def ask(folders: Folders) -> None:
        if place.rank == 0:  # elsewhere it may have them already when others look
            check_free(folders, place.job)

    return once_per_host(place, store, lambda: prepare(config, world, place.local_world, cache, say, ask, **options))


@contextmanager
def _cached(cache: Path) -> Iterator[None]:
    """What fails in here is the cache's: the data's own errors are told by name where it is read."""
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"the cache folder {str(cache)!r}, which keeps tokenizers and tokens, cannot be used: {error.strerror or error} "
            f"({error.filename or cache}); set XDG_CACHE_HOME to a folder that can be written and has room."
        ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where a run will be and since when, and whom to ask and tell."""

    world: int
    replicas: int
    named: Collection[str]
    began_s: float
    say: Say
    ask: Callable[[Folders], None]
    show: Show


def _check_shards(config: JobConfig, place: _Place) -> None:
    config.shard.check_secondary(place.world // place.replicas, "shard.")
    for key, url in (("run.dir", config.run.dir), ("checkpoint.dir", config.checkpoint.dir)):
        if url and "://" in url:
            raise UsageError(
                f"{key} is {url!r}, a URL; a run writes to file systems alone, so give a path (acc.save takes URLs)."
            )


def _folders(config: Job, name: str, place: _Place) -> tuple[Folders, Path | None, Job]:
    """Those of the run, the checkpoint to go on from, and `config` with the batch of that. Nothing is written."""
    run_dir = Path(config.run.dir or Path("runs", name))
    folder = Path(config.checkpoint.dir or run_dir / "checkpoints")
    for path in (run_dir, folder):
        _check_writable(path)
    folders = {"run.dir": run_dir, "checkpoint.dir": folder}
    place.ask(folders)
    resume = checkpoints.choose(folder, config, place.say)
    return folders, resume, checkpoints.with_batch_of(resume, config, place.named, place.world)


def _make(folders: Folders) -> None:
    for path in reversed(folders.values()):
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"{str(path)!r} cannot be made: {error.strerror or error}.") from None


def _prepared(config: JobConfig, folders: Folders, work: Work, place: _Place, resume: Path | None) -> Prepared:
    return Prepared(
        config=config,
        run_dir=str(folders["run.dir"]),
        checkpoint_dir=str(folders["checkpoint.dir"]),
        work=work,
        replicas=place.replicas,
        resume=None if resume is None else str(resume),
        began_s=place.began_s,
    )


def _of_task(config: JobConfig, place: _Place, work: OwnTask) -> Prepared:
    """Build the model and read a batch, and take the loss of it where that is quickly done here."""
    task = work.loaded
    check_own_keys(task.optimizer, task.scheduler, config)
    folders, resume, config = _folders(config, task.name, place)
    options = config.train
    with of_the_task("model()"):
        model = work.model(options.seed)
    choose_units(model, work.units() if config.shard.units is None else config.shard.units)
    if resume is not None:
        checkpoints.check_run(resume, options.steps)
        checkpoints.check_task(resume)
        checkpoints.check_model(resume, {name: tuple(value.shape) for name, value in model.state_dict().items()})
    share = Share(rank=0, world=place.world, micro_batch=options.micro_batch, accumulate=options.accumulate)
    work = replace(work, size=check_data(work, share, options))
    tried(work, model, share, options.seed)
    _make(folders)
    return _prepared(config, folders, work, place, resume)


def _of_text(config: Config, place: _Place, cache: Path) -> Prepared:
    model_vocab = _vocab_of_model(config)
    source, say = find(config.data), place.say
    folders, resume, config = _folders(config, f"{model_name(config.model)}-{source.name}", place)
    units = config.shard.units
    if config.model.path is not None or units is not None or resume is not None or config.adapter.kind != "none":
        _describe_model(_check_model(config, units, resume), config, say)
    with _cached(cache):
        vocabulary = _vocabulary(config, source, model_vocab, cache, say)
    if vocabulary.cuts:
        say("tokenizer.json asks for truncation or padding, which is off while documents are read")
    vocabulary = replace(vocabulary, special_as_text=config.data.special_tokens == "text")
    check_fits(vocabulary.size, model_vocab, config.model.path or config.model.preset)
    if resume is not None:
        checkpoints.check_run(resume, config.train.steps)
        checkpoints.check_tokenizer(resume, vocabulary.digest)
    with _cached(cache):
        tokens = cached_tokens(source, vocabulary, cache, say)
        keep_tokenizer(vocabulary, cache)
    batch = place.world * config.train.micro_batch * config.train.accumulate
    check_enough(tokens.num_train, tokens.num_validation, config.data.seq_len, batch, source.label)
    _make(folders)
    say(f"data: {source.label}, {tokens.num_documents:,} documents; vocabulary of {vocabulary.size:,}")
    say(f"data: {tokens.num_train:,} tokens to train on, {tokens.num_validation:,} to validate on")
    _tell_of_unread(source, say)
    config = with_base(config, folders["run.dir"])
    generation = generation_settings(config, [vocabulary.end_id])
    work = Text(config=config, files=tokens, generation=generation, spec=vocabulary.spec)
    return _prepared(config, folders, work, place, resume)


def _of_examples(config: Config, place: _Place, cache: Path) -> Prepared:
    """As `_of_text`; the tokenizer goes into the run's folder, where `accordion generate` finds it with its chat template."""
    data, say = config.data, place.say
    model_vocab = _vocab_of_model(config)
    source = find(data)
    folders, resume, config = _folders(config, f"{model_name(config.model)}-{source.name}", place)
    model = _check_model(config, config.shard.units, resume)
    inner = computing(model)
    _describe_model(model, config, say)
    if data.packing == "documents" and "position_ids" not in signature(type(inner).forward).parameters:
        raise UsageError(
            f"data.packing is 'documents', and {type(inner).__name__} takes no position ids, so that the examples in a row would "
            "see each other; take --data.packing length."
        )
    with _cached(cache):
        tokenizer = chat_tokenizer(config, source, model_vocab, cache, say)
    size = 1 + max(tokenizer.get_vocab().values())  # ids may have gaps
    check_fits(size, model_vocab, data.tokenizer or config.model.path or config.model.preset)
    digest = digest_of_tokenizer(tokenizer, data.format)
    if resume is not None:
        checkpoints.check_run(resume, config.train.steps)
        checkpoints.check_tokenizer(resume, digest)
    with _cached(cache):
        examples = cached_examples(source, Encoder(tokenizer, data.format), digest, size, cache, say)
    _check_examples(examples, config, source, tokenizer, place)
    _make(folders)
    tokenizer.save_pretrained(folders["run.dir"])
    end = end_of_turn(tokenizer) if data.format == "chat" else tokenizer.eos_token_id
    if end is None:
        say("the chat template ends an answer with no special token; what is generated goes on to the limit of tokens")
    generation = generation_settings(config, ends_of(end))
    config = with_base(config, folders["run.dir"])
    spec = tokenizer.backend_tokenizer.to_str()
    work = Instructions(config=config, files=examples, generation=generation, spec=spec)
    return _prepared(config, folders, work, place, resume)


def _check_examples(examples: ExampleFiles, config: Config, source: Source, tokenizer: Any, place: _Place) -> None:
    """Show and describe the examples. Raises `UsageError` if there are too few."""
    data, say = config.data, place.say
    _tell_of_unread(source, say)
    if examples.unread:
        say(f"data: fields that are not read, or not by the chat template: {', '.join(examples.unread)}")
    rows = {split: ExampleRows(examples.read(split), data.seq_len, data.packing) for split in SPLITS}
    train = rows["train"]
    place.show(preview(train.examples, tokenizer, data.seq_len))  # also of what is refused next
    batch = place.world * config.train.micro_batch * config.train.accumulate
    check_enough_rows(rows, config, batch, source.label)
    for split, held in rows.items():
        cut = held.fit.words(data.seq_len)
        if cut is not None:
            say(f"data, {split}: {cut}")
    say(
        f"data: {source.label}, {examples.num_train:,} examples to train on, {examples.num_validation:,} to validate on; "
        f"{train.fit.num_answers:,} of {int(train.examples.lengths.sum()):,} tokens to train on are answers"
    )
    if data.packing == "documents":
        filled = train.fit.lengths.sum() / (len(train) * data.seq_len)
        say(f"data: {len(train):,} rows of {data.seq_len} tokens to train on, {100 * filled:.1f} % full")


def _tell_of_unread(source: Source, say: Say) -> None:
    if source.unread:
        read, left = [key for key, _ in source.files], [f"{key} ({why})" for key, why in source.unread.items()]
        say(
            f"data: {len(read):,} of {len(read) + len(left):,} files are read: {first_of(read)}; not read: {first_of(left)}"
        )


def _describe_model(model: nn.Module, config: Config, say: Say) -> None:
    if config.model.init == "pretrained" and "optimizer" not in config.parts:
        say(
            f"fine-tuning at a peak learning rate of {config.train.lr:g} (train.lr); "
            f"without pretrained weights it is {TrainConfig().lr:g} by default"
        )
    trained, total = (sum(p.numel() for p in model.parameters() if p.requires_grad or all_) for all_ in (False, True))
    if trained < total:
        say(f"adapters: {trained:,} of {total:,} parameters are trained")


def _replicas(config: JobConfig, world: int, local_world: int) -> int:
    if not config.shard.strategy.hybrid:
        return 1
    replicas = config.shard.replicas or max(1, world // local_world)
    if world % replicas:
        raise UsageError(
            f"shard.replicas is {replicas}, which does not divide the {world} ranks; take a divisor of {world}."
        )
    return replicas


def _vocab_of_model(config: Config) -> int:
    """The size of the vocabulary that the model has rows for."""
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
        held = folder_vocabulary(folder, check_folder(config.model.path).get("eos_token_id"))
        if held is not None:
            return held
        if config.model.init == "pretrained":
            raise UsageError(
                f"model.path {str(folder)!r} has no tokenizer.json, without which its weights mean nothing."
            )
    return cached_vocabulary(source, source.pieces(), model_vocab, cache, say)


def _check_writable(folder: Path) -> None:
    """The folder, or the nearest one above it that exists, is a folder that takes files. Makes nothing."""
    for place in (folder, *folder.absolute().parents):
        if place.exists():
            if not place.is_dir():
                raise UsageError(f"{str(folder)!r} cannot be made: {str(place)!r} is a file.")
            if not os.access(place, os.W_OK | os.X_OK):
                raise UsageError(f"{str(folder)!r} cannot be written: no permission in {str(place)!r}.")
            return


def _check_model(config: Config, units: UnitChoice, resume: Path | None) -> nn.Module:
    """The model without storage, held against the units asked for and the checkpoint."""
    from accordion.weights.pretrained import check_pretrained

    model = trained_model(config)
    choose_units(model, units)
    if config.model.path is not None and config.model.init == "pretrained":
        try:
            check_pretrained(model, Path(config.model.path))
        except CheckpointError as error:
            raise UsageError(f"model.path: {error}") from None
    if resume is not None:
        held = model.state_dict(keep_vars=True).items()
        all_of_it = kept_of(config) is None
        shapes = {name: tuple(value.shape) for name, value in held if all_of_it or value.requires_grad}
        checkpoints.check_model(resume, shapes)
    return model
