"""`accordion generate`: reads the options, checks all input, and runs this rank or starts all ranks."""

from __future__ import annotations

from collections.abc import Mapping

from torch.distributed.distributed_c10d import Store

from accordion import options as flags
from accordion.devices import devices_here, devices_named
from accordion.errors import CheckpointError, UsageError
from accordion.generate.options import GenerateOptions
from accordion.generate.prompts import Prompt, read_prompts
from accordion.generate.ranks import generate
from accordion.models.stored import (
    StoredModel,
    check_weights,
    computing,
    configuration_of,
    find_model,
    meta_model,
    tokenizer_of,
)
from accordion.train import launch

PROG = "accordion generate"
ABOUT = (GenerateOptions.__doc__ or "").splitlines()[0]


def run(words: list[str], environ: Mapping[str, str]) -> int:
    """Run `accordion generate` with the arguments `words`, and return the exit code. Starts all ranks and waits for them. But in
    a process that torchrun or srun started, runs as that one rank, and if the rank fails, the process ends at once, without a
    return. Raises `UsageError` for wrong arguments or input."""
    options = flags.read(GenerateOptions, words, PROG, ABOUT)
    if options is None:
        return 0
    options.check()
    place = launch.place_of(environ)
    if place is not None:
        launch.guarded(_started_rank, options)
        return 0
    devices = devices_named(options.device, "--device", devices_here())
    world = options.nproc or devices.count or 1
    if not devices.is_cpu and world > devices.count:
        raise UsageError(f"--nproc is {world} and this machine has {devices}; lower it, or take --device cpu.")
    stored, prompts = _prepared(options)
    return launch.start(generate, (options, stored, prompts, devices.type), world)


def _started_rank(place: launch.RankPlace, store: Store, options: GenerateOptions) -> None:
    if options.nproc not in (0, place.local_world):
        raise UsageError(
            f"--nproc is {options.nproc} but {place.starter} started {place.local_world} ranks; leave it out."
        )
    kind = devices_named(options.device, "--device", devices_here()).type
    stored, prompts = _prepared(options)
    generate(place, store, options, stored, prompts, kind)


def _prepared(options: GenerateOptions) -> tuple[StoredModel, list[Prompt]]:
    """Return (description of the model at `options.source`, tokenized prompts). Reads no weights. Raises `UsageError` if there is
    no such model, if its weights do not fit its configuration, or if a prompt cannot be used."""
    stored = find_model(options.source)
    prompts = read_prompts(options, tokenizer_of(stored), configuration_of(stored))
    try:
        check_weights(computing(meta_model(stored)), stored)
    except CheckpointError as error:
        raise UsageError(f"SOURCE: {error}") from None
    return stored, prompts
