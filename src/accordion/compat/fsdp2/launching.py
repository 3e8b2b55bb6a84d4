"""`accordion run`: start an unedited program that uses torch's `fully_shard`, as torchrun would."""

from __future__ import annotations

from argparse import SUPPRESS, Namespace
from typing import NoReturn

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import get_args_parser
from torch.distributed.run import run as launch

from accordion.errors import UsageError

USAGE = """usage: accordion run [--nproc N] [options of torchrun] [-m] program [arguments of the program]

Runs a program that uses torch.distributed.fsdp.fully_shard, directly or through accelerate (fsdp_version: 2),
transformers or TRL, on Accordion's engine: torchrun, with accordion.compat.fsdp2.install() called first on each rank."""


def run(words: list[str]) -> int:
    """Run the command line `words` as torchrun would. Return the exit code: 0, or 1 if a rank failed. Without words (exit code
    2), or for "-h" or "--help" (0), only print the usage. Raises `UsageError` for a wrong option, or if no program is named."""
    if not words or words[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if words else 2
    try:
        launch(arguments(words))
    except ChildFailedError:
        return 1
    return 0


def arguments(words: list[str]) -> Namespace:
    """Return torchrun's arguments, parsed from `words` (options, program), to run the program by `accordion.compat.fsdp2`."""
    parser = get_args_parser()
    parser.error = _refuse  # type: ignore[method-assign]
    parser.add_argument("--nproc", dest="nproc_per_node", default=SUPPRESS)
    args = parser.parse_args(words)
    program = [args.training_script, *args.training_script_args]
    args.training_script_args = ["-m", *program] if args.module else program
    args.module, args.training_script = True, "accordion.compat.fsdp2"
    return args


def _refuse(message: str) -> NoReturn:
    if "required: training_script" in message:
        message = "no program is named; write it after the options"
    raise UsageError(f"accordion run: {message}; see accordion run --help.")
