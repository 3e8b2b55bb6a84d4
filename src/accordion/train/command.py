"""`accordion train`: reads the configuration, prepares, and runs this rank or starts all of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from tempfile import gettempdir

from jsonargparse import ArgumentParser
from torch.distributed.distributed_c10d import Store

from accordion.devices import devices_here
from accordion.errors import UsageError
from accordion.train import launch, loop
from accordion.train.auto_plan import planned
from accordion.train.config import NUMBERS, Config, check, flat, spread
from accordion.train.deepspeed import translated
from accordion.train.options import given, parse
from accordion.train.owner import check_free
from accordion.train.prepare import Folders, prepare
from accordion.train.screen import Screen
from accordion.train.store_watchdog import watch_store


def make_parser() -> ArgumentParser:
    """The parser of the keys in `Config`, for flags and for run files."""
    parser = ArgumentParser(
        prog="accordion train",
        description="Train a causal language model, sharded over ranks, on text. Without arguments: a Llama of 10 M "
        "parameters on the Python standard library's source, on every GPU found or on two CPU ranks.",
        exit_on_error=False,
        allow_abbrev=False,
    )
    parser.add_argument("--config", action="config", metavar="RUN.yaml", help="run file with the keys below; flags win")
    parser.add_class_arguments(Config)
    return parser


def read(words: list[str]) -> Config:
    """The configuration in `words` and in the run files they name. Raises `UsageError`."""
    parsed = parse(make_parser(), _long(words), list(flat(Config())), NUMBERS)
    empty = Config()
    groups = {group.name: replace(getattr(empty, group.name), **parsed[group.name]) for group in fields(empty)}
    config = Config(**groups)
    check(config)
    return config


def _long(words: list[str]) -> list[str]:
    """`--deepspeed` is short for `--train.deepspeed`, and `--plan` for `--train.plan`."""
    return [re.sub(r"^--(deepspeed|plan)(?==|$)", r"--train.\1", word) for word in words]


def run(words: list[str], environ: Mapping[str, str]) -> int:
    """The subcommand: start the ranks, or be one where torchrun or srun started this process. Returns the exit code."""
    config = read(words)
    named = given(_long(words), list(flat(config)))
    place = launch.place_of(environ)
    cache = Path(environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME") or gettempdir(), ".cache"), "accordion")
    if place is not None:
        launch.guarded(_started_rank, config, named, cache)
        return 0
    device, world = launch.choose(config.launch, None, devices_here())
    config = translated(spread(config, named, world), named, world)
    config, expected = planned(config, named, world, device, Screen().note)
    prepared = prepare(config, world, world, cache, Screen().note, partial(check_free, job=None))
    prepared = replace(prepared, expected=expected)
    return launch.start(loop.train, (config, prepared, device), world)


def _started_rank(place: launch.Place, store: Store, config: Config, named: frozenset[str], cache: Path) -> None:
    """One rank that another launcher started: the first on each host prepares for the others."""
    watch_store(store, place.rank, config.launch.timeout_s)
    device, world = launch.choose(config.launch, place, devices_here())
    config = translated(spread(config, named, world), named, world)
    if config.train.plan != "none":
        raise UsageError(
            "train.plan works where accordion train starts the ranks itself; under another launcher, ask `accordion plan` and "
            "pass its choice."
        )
    say = Screen(speaks=place.rank == 0).note

    def ask(folders: Folders) -> None:
        if place.rank == 0:  # elsewhere it may have them already when others look
            check_free(folders, place.job)

    prepared = launch.once_per_host(place, store, lambda: prepare(config, world, place.local_world, cache, say, ask))
    loop.train(place, store, config, prepared, device)
