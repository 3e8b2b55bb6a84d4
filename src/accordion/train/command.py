"""`accordion train`: reads the configuration, prepares, and runs this rank or starts all of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import gettempdir
from typing import Any

from torch.distributed.distributed_c10d import Store

from accordion.devices import devices_here
from accordion.errors import UsageError
from accordion.options import made, options_of, values_of
from accordion.train import launch, loop
from accordion.train.auto_plan import planned
from accordion.train.config import Config, as_yaml, check, spread
from accordion.train.deepspeed import translated
from accordion.train.owner import check_free
from accordion.train.prepare import Folders, prepare
from accordion.train.run_files import split, values_of_file
from accordion.train.screen import Screen
from accordion.train.store_watchdog import watch_store

ABOUT = (
    "Train a causal language model, sharded over ranks, on text. Without arguments: a Llama of 10 M parameters on the Python "
    "standard library's source, on every GPU found or on two CPU ranks."
)
PRINTS = ("--print_config", "--print-config")
FLAGS = {
    "--config": ("RUN.yaml", "run file with the keys below; flags win"),
    "--print_config": ("", "print the whole configuration as a run file, and end"),
}
SHORT = re.compile(r"^--(deepspeed|plan)(?==|$)")  # for `--train.deepspeed` and `--train.plan`


def read(words: list[str]) -> Config:
    """The configuration in `words` and in the run files they name; flags win over files, wherever they stand.

    Raises `UsageError`, and `SystemExit` if they ask for help or for the configuration, which is printed then.
    """
    return _configured(_values(words))


def given(words: list[str]) -> frozenset[str]:
    """The keys that flags and run files in `words` give a value, whichever it is. Raises as `read` does."""
    return frozenset(_values(words))


def _configured(values: Mapping[str, Any]) -> Config:
    config = made(Config, values)
    check(config)
    return config


def _values(words: list[str]) -> dict[str, Any]:
    """`group.key` -> value, of those that are given."""
    files, flags = split([SHORT.sub(r"--train.\1", word) for word in words])
    prints = any(word in PRINTS for word in flags)
    found = values_of(Config, [word for word in flags if word not in PRINTS], "accordion train", ABOUT, FLAGS)
    if found is None:
        raise SystemExit(0)
    values: dict[str, Any] = {}
    for file in files:
        values |= values_of_file(file, options_of(Config))
    values |= found
    if prints:
        print(as_yaml(made(Config, values)), end="")
        raise SystemExit(0)
    return values


def run(words: list[str], environ: Mapping[str, str]) -> int:
    """The subcommand: start the ranks, or be one where torchrun or srun started this process. Returns the exit code."""
    values = _values(words)
    config, named = _configured(values), frozenset(values)
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


def _started_rank(place: launch.RankPlace, store: Store, config: Config, named: frozenset[str], cache: Path) -> None:
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
