"""`accordion run`: torchrun of a program of torch's `fully_shard` that nobody edited."""

from __future__ import annotations

from typing import NoReturn

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import get_args_parser
from torch.distributed.run import run as launch

from accordion.errors import UsageError

USAGE = """usage: accordion run [--nproc N] [options of torchrun] [-m] program [arguments of the program]

Runs a program that uses torch.distributed.fsdp.fully_shard, by itself or through accelerate (fsdp_version: 2),
transformers or TRL, on Accordion's engine: torchrun, with accordion.compat.fsdp2.install() called first on each rank."""
ALONE = ("--standalone", "--virtual-local-rank", "--virtual_local_rank")  # options of torchrun that take no value


def run(words: list[str]) -> int:
    """The exit code: 1 where a rank failed. Raises `UsageError` for options that torchrun does not take."""
    if not words or words[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if words else 2
    options, program = split(words)
    parser = get_args_parser()
    parser.error = _refuse  # type: ignore[method-assign]
    args = parser.parse_args([*options, "program"])
    args.module, args.training_script, args.training_script_args = True, "accordion.compat.fsdp2", program
    try:
        launch(args)
    except ChildFailedError:
        return 1
    return 0


def split(words: list[str]) -> tuple[list[str], list[str]]:
    """Options for torchrun, and the program with its arguments, behind `-m` where it is a module."""
    options: list[str] = []
    i = 0
    while i < len(words) and words[i].startswith("-"):
        word = words[i]
        if word in ("-m", "--module"):
            return options, _program(["-m", *words[i + 1 :]], words)
        name, equals, value = word.partition("=")
        options.append(("--nproc-per-node" if name == "--nproc" else name) + equals + value)
        if not equals and name not in ALONE:
            options += words[i + 1 : i + 2]
            i += 1
        i += 1
    return options, _program(words[i:], words)


def _program(found: list[str], words: list[str]) -> list[str]:
    if not found or found == ["-m"]:
        raise UsageError(f"accordion run {' '.join(words)} names no program; write it behind the options.")
    return found


def _refuse(message: str) -> NoReturn:
    raise UsageError(f"accordion run: {message}; accordion run --help tells more.")
