"""`accordion train`: read the configuration, prepare, and run this rank or start all ranks."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import field, make_dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

from torch.distributed.distributed_c10d import Store

from accordion.devices import devices_here
from accordion.models.stored import cache_folder
from accordion.options import made, options_of, values_of
from accordion.tasks.classes import CLASS_PATH, TAKEN, options_kind, part_of
from accordion.train import launch, loop
from accordion.train.config import Config, JobConfig, as_yaml, check, fine_tuning
from accordion.train.ending import PREEMPTED, Signals
from accordion.train.prepare import prepare
from accordion.train.run_files import content_of, flattened, split, values_of_file
from accordion.train.screen import Screen

ABOUT = (
    "Train a causal language model, sharded over ranks, on text. Without arguments: a Llama of 10 M parameters on the Python "
    "standard library's source, on every GPU found or on two CPU ranks."
)
PET = {"PET_NNODES", "PET_NPROC_PER_NODE"}  # torchrun's options as variables, which Kubeflow Trainer sets
PRINTS = ("--print_config", "--print-config")
FLAGS = {
    "--task": ("my_task.py", "train your own task: file.py, file.py:Name or package.module:Name (docs/tasks.md)"),
    "--config": ("RUN.yaml", "run file with the keys below; flags override it"),
    "--print_config": ("", "print the whole configuration as a run file, and exit"),
}
SHORT = {  # a flag's short form -> what it stands for
    "--deepspeed": "--train.deepspeed",
    **{f"--{name}": f"--{name}.{CLASS_PATH}" for name in TAKEN},
    "--adapter": "--adapter.kind",
    "--quantize": "--model.quantize",
    "--observe": "--train.observe",
}


def read(words: list[str]) -> tuple[JobConfig, frozenset[str]]:
    """Return (configuration, keys that the user set) from the command line `words` and the run files that it names; flags
    override files, in any order. Without a task, the configuration is a `Config`. Raises `UsageError` for wrong keys or values,
    or for an unknown task or optimizer, and `SystemExit` after printing help or the configuration if `words` ask for it."""
    pairs = (word.partition("=") for word in words)
    files, flags = split([SHORT.get(name, name) + equals + value for name, equals, value in pairs])
    paths = class_paths(files, flags)
    base = JobConfig if "task" in paths else Config
    kinds = {name: options_kind(name, path) for name, path in paths.items()}
    kinds |= {name: hint for name, hint in get_type_hints(base).items() if name != "parts" and name not in paths}
    # The groups of keys depend on the class paths.
    kind = make_dataclass("Keys", [(name, group, field(default_factory=group)) for name, group in kinds.items()])
    from_flags = values_of(kind, [word for word in flags if word not in PRINTS], "accordion train", ABOUT, FLAGS)
    if from_flags is None:
        raise SystemExit(0)
    values: dict[str, Any] = {}
    for file in files:
        values |= values_of_file(file, options_of(kind))
    values |= from_flags
    own = {name: {k.partition(".")[2]: v for k, v in values.items() if k.startswith(f"{name}.")} for name in paths}
    parts = {name: part_of(name, options) for name, options in own.items()}
    config = fine_tuning(replace(made(base, values), parts=parts), values)
    if any(word in PRINTS for word in flags):
        print(as_yaml(config), end="")
        raise SystemExit(0)
    check(config)
    return config, frozenset(values)


def class_paths(files: Sequence[str], flags: Sequence[str]) -> dict[str, str]:
    """Return "task" or "optimizer" -> class path, such as "net.py:Task", for those of the two that the run files `files` or the
    words `flags` (in long form) name. Flags override files. Read before all other keys, as options of a class are keys too."""
    paths: dict[str, str] = {}
    for file in files:
        content = flattened(content_of(file))
        paths |= {name: str(content[key]) for name in TAKEN if content.get(key := f"{name}.{CLASS_PATH}") is not None}
    for i, word in enumerate(flags):
        name, equals, value = word.partition("=")
        part = name.removeprefix("--").removesuffix(f".{CLASS_PATH}")
        if name == f"--{part}.{CLASS_PATH}" and part in TAKEN:
            value = value if equals else next(iter(flags[i + 1 : i + 2]), "")
            if value and not value.startswith("--"):  # else the parser reports the missing value
                paths[part] = value
    return {name: paths[name] for name in TAKEN if name in paths}


def run(words: list[str], environ: Mapping[str, str]) -> int:
    """Run `accordion train` with the arguments `words`, and return the exit code: prepare the run, start all ranks, wait for
    them. In a process that torchrun or srun started, runs as that one rank; if its code is not 0, ends the process without a
    return. If `environ` has torchrun's variables for the number of ranks but no rank, this process becomes a torchrun with the
    same command. Raises `UsageError` or `TaskError` for wrong input, and `SystemExit` after printing help or configuration."""
    began_s = time.time()
    (config, named), cache = read(words), cache_folder(environ)
    if launch.place_of(environ) is not None:
        launch.guarded(_started_rank, config, named, cache, began_s)
        return 0
    if not PET.isdisjoint(environ):
        torchrun = [sys.executable, "-m", "torch.distributed.run", "-m", "accordion", "train"]
        os.execv(sys.executable, [*torchrun, *words])
    try:
        with launch.Forwarding() as signals:
            device, world = launch.choose(config.launch, None, devices_here())
            place = launch.RankPlace(rank=0, world=world, local_rank=0, local_world=world, starter="accordion train")
            prepared = prepare(config, place, cache, Screen(), named=named, began_s=began_s)
            return launch.start(loop.train, (prepared, device), world, signals)
    except launch.NothingStartedError:
        print("accordion: ended by a signal while no rank was running; there is nothing to save.", file=sys.stderr)
        return PREEMPTED


def _started_rank(
    place: launch.RankPlace, store: Store, config: JobConfig, named: frozenset[str], cache: Path, began_s: float
) -> int:
    """Train as the rank `place` that torchrun or srun started, and return the exit code. The first rank of each host prepares
    the run, then the host's other ranks do, from the cache that it wrote. A signal meanwhile ends the run after its first step.
    `named`: keys that the user set. `began_s`: `time.time` at the start of the command."""
    launch.give_up_store(store, config.launch.timeout_s)
    signals = Signals()
    device, _ = launch.choose(config.launch, place, devices_here())
    screen = Screen(speaks=place.rank == 0)
    prepared = launch.once_per_host(
        place, store, lambda: prepare(config, place, cache, screen, named=named, began_s=began_s)
    )
    return loop.train(place, store, prepared, device, signals)
