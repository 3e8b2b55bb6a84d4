"""Everything that can go wrong before ranks start: settings, data, model folder and checkpoint, checked in this order."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from accordion.config import check_secondary, strategy_named
from accordion.errors import CheckpointError, UsageError
from accordion.models.language import language_model
from accordion.models.llama import TRAINED
from accordion.train import checkpoints
from accordion.train.auto_plan import Expected
from accordion.train.config import Config
from accordion.train.data import check_enough
from accordion.train.model import check_folder, configuration
from accordion.train.sources import Source, find
from accordion.train.tokens import (
    Say,
    TokenFiles,
    Vocabulary,
    cached_tokens,
    cached_vocabulary,
    check_fits,
    folder_vocabulary,
)
from accordion.units import UnitChoice, choose_units, units_named

Folders = dict[str, Path]
"""Those that one job writes to at a time, under the settings that name them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What ranks start from. `resume`: the checkpoint to go on from. `expected`: what a plan says of the run."""

    run_dir: str
    checkpoint_dir: str
    tokens: TokenFiles
    replicas: int
    resume: str | None
    expected: Expected | None = None

    @property
    def folders(self) -> Folders:
        return {"run.dir": Path(self.run_dir), "checkpoint.dir": Path(self.checkpoint_dir)}


def prepare(
    config: Config,
    world: int,
    local_world: int,
    cache: Path,
    say: Say,
    ask: Callable[[Folders], None] = lambda folders: None,
) -> Prepared:
    """Check all input and make the token files. Raises `UsageError`, and then nothing was written.

    `world`, `local_world`: ranks in all and on one machine. `cache`: folder for tokenizers and tokens, made if need be.
    `ask`: called with the run's folders before they are looked into; may raise.
    """
    try:
        return _prepare(config, world, local_world, cache, say, ask)
    except OSError as error:
        raise UsageError(f"{error.filename or cache}: {error.strerror or error}.") from None


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


def _prepare(
    config: Config, world: int, local_world: int, cache: Path, say: Say, ask: Callable[[Folders], None]
) -> Prepared:
    replicas, shard = _replicas(config, world, local_world), config.shard
    if shard.secondary:
        check_secondary(shard.secondary, strategy_named(shard.strategy), world // replicas, "shard.secondary")
    for key, url in (("run.dir", config.run.dir), ("checkpoint.dir", config.checkpoint.dir)):
        if url and "://" in url:
            raise UsageError(
                f"{key} is {url!r}, a URL; a run writes to file systems alone, so give a path (acc.save takes URLs)."
            )
    model_vocab, model_name = _model(config)
    source = find(config.data)
    run_dir = Path(config.run.dir or Path("runs", f"{model_name}-{source.name}"))
    folder = Path(config.checkpoint.dir or run_dir / "checkpoints")
    for place in (run_dir, folder):
        _check_writable(place)
    ask({"run.dir": run_dir, "checkpoint.dir": folder})
    resume = checkpoints.choose(folder, config.checkpoint.resume, say)
    units = units_named(config.shard.units, "shard.units")
    if config.model.path is not None or units is not None or resume is not None:
        _check_model(config, units, resume)
    vocabulary, keep_vocabulary = _vocabulary(config, source, model_vocab, cache, say)
    check_fits(vocabulary, model_vocab, config.model.path or config.model.preset)
    if resume is not None:
        checkpoints.check_run(resume, config.train.steps, vocabulary.digest)
    batch = world * config.train.micro_batch * config.train.accumulate

    def accept(num_train: int, num_validation: int) -> None:
        """The last check; what makes the folders is the first to write, and where it fails nothing was written."""
        check_enough(num_train, num_validation, config.data.seq_len, batch, source.label)
        for place in (folder, run_dir):
            try:
                place.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UsageError(f"{str(place)!r} cannot be made: {error.strerror or error}.") from None

    with _cached(cache):
        tokens = cached_tokens(source, vocabulary, cache, accept, say)
        keep_vocabulary()
    say(f"data: {source.label}, {tokens.num_documents:,} documents; vocabulary of {vocabulary.size:,}")
    say(f"data: {tokens.num_train:,} tokens to train on, {tokens.num_validation:,} to validate on")
    return Prepared(
        run_dir=str(run_dir),
        checkpoint_dir=str(folder),
        tokens=tokens,
        replicas=replicas,
        resume=None if resume is None else str(resume),
    )


def _replicas(config: Config, world: int, local_world: int) -> int:
    if not strategy_named(config.shard.strategy).hybrid:
        return 1
    replicas = config.shard.replicas or max(1, world // local_world)
    if world % replicas:
        raise UsageError(
            f"shard.replicas is {replicas}, which does not divide the {world} ranks; take a divisor of {world}."
        )
    return replicas


def _model(config: Config) -> tuple[int, str]:
    """The vocabulary that the model has rows for, and a name for the run's folder."""
    if config.model.path is None:
        return TRAINED[config.model.preset].vocab, config.model.preset
    described = check_folder(config.model.path)
    vocab = described.get("vocab_size")
    if not isinstance(vocab, int):
        vocab = getattr(configuration(config.model, config.data), "vocab_size", None)
    if not isinstance(vocab, int) or vocab < 1:
        raise UsageError(f"model.path {config.model.path!r} is no language model: its config.json has no vocab_size.")
    return vocab, Path(config.model.path).resolve().name


def _vocabulary(
    config: Config, source: Source, model_vocab: int, cache: Path, say: Say
) -> tuple[Vocabulary, Callable[[], None]]:
    if config.model.path is not None:
        folder = Path(config.model.path)
        held = folder_vocabulary(folder, check_folder(config.model.path).get("eos_token_id"))
        if held is not None:
            return held, lambda: None
        if config.model.init == "pretrained":
            raise UsageError(
                f"model.path {str(folder)!r} has no tokenizer.json, without which its weights mean nothing."
            )
    return cached_vocabulary(source, model_vocab, cache, say)


def _check_writable(folder: Path) -> None:
    """The folder, or the nearest one above it that exists, is a folder that takes files. Makes nothing."""
    for place in (folder, *folder.absolute().parents):
        if place.exists():
            if not place.is_dir():
                raise UsageError(f"{str(folder)!r} cannot be made: {str(place)!r} is a file.")
            if not os.access(place, os.W_OK | os.X_OK):
                raise UsageError(f"{str(folder)!r} cannot be written: no permission in {str(place)!r}.")
            return


def _check_model(config: Config, units: UnitChoice, resume: Path | None) -> None:
    """Build the model without storage and hold it against the units asked for and the checkpoint."""
    from accordion.weights.pretrained import check_pretrained

    model = language_model(configuration(config.model, config.data), config.model.path or config.model.preset)
    choose_units(model, units)
    if config.model.path is not None and config.model.init == "pretrained":
        try:
            check_pretrained(model, Path(config.model.path))
        except CheckpointError as error:
            raise UsageError(f"model.path: {error}") from None
    if resume is not None:
        checkpoints.check_model(resume, {name: tuple(value.shape) for name, value in model.state_dict().items()})
