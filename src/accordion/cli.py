"""The command line: the one place that reads arguments and the environment, and that turns errors into exit codes."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from importlib.util import find_spec

from accordion import __version__
from accordion.errors import AccordionError, UsageError, nearest
from accordion.garbage import end_with_one_collection
from accordion.output import lasting_output

COMMANDS = {
    "train": "train a model, sharded over ranks, on text",
    "generate": "write on from a prompt, with a checkpoint, a run or a folder of transformers",
    "export": "write a model for transformers, safetensors, ONNX or llama.cpp",
    "runs": "list runs with their state, step, loss and checkpoints",
    "checkpoint": "inspect, verify, compare, convert and prune checkpoints",
    "plan": "say before launch what fits, how fast it runs, and which configuration to take",
    "bench": "measure the engine beside FSDP2, FSDP1, DDP and DeepSpeed, on this machine",
    "doctor": "look for what is wrong with this machine, and with ranks on it",
    "run": "torchrun of a program for torch's fully_shard, unedited, on this engine",
}
NEEDED = {
    "checkpoint": (),
    "export": (),
    "train": ("yaml", "rich", "tokenizers", "torchdata", "transformers", "pyarrow", "datasets"),
    "runs": ("rich", "tokenizers", "tensorboard"),
    "generate": ("yaml", "tokenizers", "transformers"),
    "plan": ("rich", "plotly", "transformers"),
    "bench": ("rich", "plotly"),
    "doctor": (),
    "run": (),
}
EXTRA = {
    "train": "train",
    "generate": "train",
    "runs": "train",
    "plan": "plan",
    "bench": "plan",
}  # which extra installs what a command needs
BAD_INPUT = 2  # the exit code of argparse and of most of Unix
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return the exit code: 0, 1 where a rank failed, 2 for bad input, 3 where ranks parted, 75 where a
    signal ended training once it was saved, 130 when interrupted, 128 + n where signal n ended a rank."""
    words = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    with lasting_output() if words[:1] == ["train"] else nullcontext():
        return _code_of(words)


def _code_of(words: list[str]) -> int:
    end_with_one_collection()
    try:
        return _run(words)
    except UsageError as error:
        if _speaks(os.environ):
            print(f"accordion: {one_line(str(error))}", file=sys.stderr)
        return BAD_INPUT
    except AccordionError as error:
        print(getattr(error, "shown", ""), end="", file=sys.stderr)  # what a task's own code raised
        print(f"accordion: {one_line(str(error))}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("accordion: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # `accordion runs | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _speaks(environ: Mapping[str, str]) -> bool:
    """Whether this process tells of bad input: ranks of a launcher all read the same words, and the first one speaks."""
    started = "RANK" in environ and "WORLD_SIZE" in environ
    rank = environ["RANK"] if started else environ.get("SLURM_PROCID", "0")
    return not (rank.isascii() and rank.isdecimal()) or not rank.strip("0")


def one_line(text: str) -> str:
    """`text` without line breaks, control characters or runs of blanks."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print("usage: accordion <command> [options]\n")
        print("\n".join(f"  {name:<12}{what}" for name, what in COMMANDS.items()))
        print("\naccordion <command> --help tells more; accordion --version tells which one this is.")
        return 0 if words else BAD_INPUT
    if words[0] == "--version":
        import torch  # seconds, for which help need not wait

        print(f"accordion {__version__}, torch {torch.__version__}")
        return 0
    command = words[0]
    if words[:2] == ["bench", "gpu"]:  # runs where torch, numpy and safetensors alone are installed
        from accordion.bench.gpu import command as gpu

        return gpu.run(words[2:])
    if command not in COMMANDS:
        raise UsageError(f"command {command!r} does not exist; {nearest(command, COMMANDS)}")
    missing = [name for name in NEEDED[command] if find_spec(name) is None]
    if missing:
        raise UsageError(
            f"accordion {command} needs {', '.join(missing)}, not installed here; pip install 'accordion[{EXTRA[command]}]'."
        )
    if command == "export" or words[:2] == ["checkpoint", "export"]:
        from accordion.export import command as export

        return export.run(words[1 + (command == "checkpoint") :], os.environ)
    if command == "checkpoint":
        from accordion.checkpoint import command as checkpoint

        return checkpoint.run(words[1:])
    if command == "generate":
        from accordion.generate import command as generate

        return generate.run(words[1:], os.environ)
    if command == "runs":
        from accordion.train import runs

        return runs.run(words[1:])
    if command == "plan":
        if {"-h", "--help"} & set(words):
            from accordion.options import read
            from accordion.plan.cli.options import ABOUT, Options

            read(Options, ["--help"], "accordion plan", ABOUT)
            return 0
        from accordion.plan.cli import command as planner

        return planner.run(words[1:])
    if command == "bench":
        from accordion.bench import command as bench

        return bench.run(words[1:])
    if command == "doctor":
        from accordion.doctor import command as doctor

        return doctor.run(words[1:], os.environ)
    if command == "run":
        from accordion.compat.fsdp2 import launching

        return launching.run(words[1:])
    from accordion.train import command as train  # imports the extras, seconds of them

    return train.run(words[1:], os.environ)
