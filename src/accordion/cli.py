"""The command line `accordion`: run the subcommand that is asked for, and turn errors into messages and exit codes."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from importlib import import_module

from accordion import __version__
from accordion.errors import AccordionError, UsageError, check_installed, nearest
from accordion.garbage import end_with_one_collection
from accordion.output import lasting_output, quiet_imports
from accordion.train.fit import PACKAGES as TRAINING


@dataclass(frozen=True, slots=True)
class Command:
    """A subcommand: calls `run(words)` of the module `accordion.<module>` with the words after its name, or `run(words,
    os.environ)` if `takes_environ`; this returns the exit code. `needs`: optional packages that it imports. `extra`: the extra
    with which pip installs these packages."""

    about: str
    module: str
    needs: tuple[str, ...] = ()
    extra: str = ""
    takes_environ: bool = False


COMMANDS = {
    "train": Command("train a model, sharded over ranks, on text or a task", "train.command", TRAINING, "train", True),
    "watch": Command("show runs as they go: loss, speed, memory, step times", "train.watch", TRAINING, "train"),
    "generate": Command(
        "generate text from a prompt, with a checkpoint, a run folder or a transformers folder",
        "generate.command",
        ("tokenizers", "transformers"),
        "train",
        True,
    ),
    "export": Command("write a model for transformers, safetensors or ONNX", "export.command"),
    "checkpoint": Command("inspect, verify and convert checkpoints", "checkpoint.command"),
    "plan": Command(
        "predict before launch what fits, how fast it runs, and which configuration to choose",
        "plan.cli.command",
        ("rich", "transformers"),
        "plan",
    ),
    "bench": Command(
        "measure the engine against FSDP2, FSDP1, DDP and DeepSpeed on this machine",
        "bench.command",
        ("rich",),
        "plan",
    ),
    "doctor": Command("check this machine, and ranks on it, for problems", "doctor.command", takes_environ=True),
    "run": Command("run an unedited program for torch's fully_shard on this engine", "compat.fsdp2.launching"),
}
BAD_INPUT = 2  # the exit code of argparse and of most of Unix
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None, run: Callable[[list[str]], int] | None = None) -> int:
    """Run the subcommand that the first word of `argv` (default: `sys.argv[1:]`) names, and return the exit code.

    Exit codes: 0 for success, 1 for an error of a rank or of this package, 2 for bad input, 3 if ranks diverged, 75 if a signal
    ended training after a save, 130 after Ctrl-C, 128 + n if signal n ended a rank, or the code with which a failed rank
    exited. Errors of this package are printed to stderr, those of bad input by rank 0; other errors are raised. From then on
    `sys.stdout` escapes characters that its encoding lacks. `run`: for tests, the function (words) -> exit code to call.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    with lasting_output() if words[:1] == ["train"] else nullcontext():
        end_with_one_collection()
        quiet_imports()
        try:
            return (run or _run)(words)
        except UsageError as error:
            if _reports(os.environ):
                print(f"accordion: {one_line(str(error))}", file=sys.stderr)
            return BAD_INPUT
        except AccordionError as error:
            print(getattr(error, "shown", ""), end="", file=sys.stderr)  # the traceback of a task's own code
            print(f"accordion: {one_line(str(error))}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print("accordion: interrupted", file=sys.stderr)
            return INTERRUPTED
        except BrokenPipeError:  # `accordion plan | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1


def _reports(environ: Mapping[str, str]) -> bool:
    """Return True if this process prints errors of bad input: as rank 0 of torchrun or Slurm, or if its rank is no number."""
    started = "RANK" in environ and "WORLD_SIZE" in environ
    rank = environ["RANK"] if started else environ.get("SLURM_PROCID", "0")
    return not (rank.isascii() and rank.isdecimal()) or not rank.strip("0")


def one_line(text: str) -> str:
    """Return `text` as one line: runs of blanks, line breaks and control characters become one blank; none at both ends."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print("usage: accordion <command> [options]\n")
        print("\n".join(f"  {name:<12}{command.about}" for name, command in COMMANDS.items()))
        print("\nFor the options of a command: accordion <command> --help. For the version: accordion --version.")
        return 0 if words else BAD_INPUT
    if words[0] == "--version":
        import torch  # takes seconds, which help does not need

        print(f"accordion {__version__}, torch {torch.__version__}")
        return 0
    if words[:2] == ["checkpoint", "export"]:
        words = words[1:]
    if words[0] not in COMMANDS:
        raise UsageError(f"command {words[0]!r} does not exist; {nearest(words[0], COMMANDS)}")
    command = COMMANDS[words[0]]
    check_installed(f"accordion {words[0]}", command.needs, command.extra)
    if words[0] == "plan" and {"-h", "--help"} & set(words):
        from accordion.options import read
        from accordion.plan.cli.options import ABOUT, Options

        read(Options, ["--help"], "accordion plan", ABOUT)
        return 0
    run = import_module(f"accordion.{command.module}").run  # imports the extras, which takes seconds
    code: int = run(words[1:], os.environ) if command.takes_environ else run(words[1:])
    return code
