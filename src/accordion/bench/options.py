"""The options of `accordion bench` and its subcommands: what they are, how they are read, what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Literal, TypeVar

from accordion import options
from accordion.bench.contenders import PEERS
from accordion.errors import UsageError
from accordion.options import listed

T = TypeVar("T")

LEAST = {
    "rounds": 1,
    "steps": 1,
    "ranks": 1,
    "mib": 16,
    "batch": 0,
    "seq": 0,
    "threads": 0,
}  # of an option that is there


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """Train the same model under each contender, and compare losses, times, bytes and what is sent.

    Args:
        against: contenders beside `accordion`, separated by commas: fsdp2, fsdp1, ddp, deepspeed, plain (no
            communication), or this engine under another strategy, such as accordion:shard_grad_op
        task: a task of your own in place of `model`: file.py, file.py:Name or package.module:Name, with options as
            --task.width 64; each contender trains it with fused AdamW
        model: gpt-30m, gpt-tiny, one of train's presets (llama-10m), or a folder with a transformers config.json
        batch: sequences, or samples of a task, of one rank in a step; 0: what suits the model
        seq: tokens in a sequence; 0: what suits the model
        precision: fp32, or bf16 over fp32 parameters
        nproc: ranks on this machine; 0: one for each GPU found, else 2
        device: auto takes the accelerators of this machine where there are some; cpu, or the type of a device
        rounds: turns of each contender, interleaved
        steps: counted steps of a turn
        dir: folder for the JSON and HTML files
    """

    against: str = ",".join(PEERS)
    task: str | None = None
    model: str = "gpt-30m"
    batch: int = 0
    seq: int = 0
    precision: Literal["fp32", "bf16"] = "fp32"
    nproc: int = 0
    device: str = "auto"
    rounds: int = 5
    steps: int = 5
    dir: str = "runs/bench"


@dataclass(frozen=True, kw_only=True)
class HostOptions:
    """Measure the host time of a unit of 9 parameters under each contender, over plain, as one of many simulated ranks.

    Args:
        against: contenders beside `accordion`, separated by commas: fsdp2, fsdp1, or accordion:shard_grad_op and its kin
        ranks: simulated ranks
        rounds: turns of each contender, interleaved
        steps: counted steps of a turn
        dir: folder for the JSON and HTML files
    """

    against: str = "fsdp2"
    ranks: int = 8
    rounds: int = 9
    steps: int = 9
    dir: str = "runs/bench"


@dataclass(frozen=True, kw_only=True)
class MemoryOptions:
    """Measure the peak bytes of one of many simulated ranks in a step, in bf16 over fp32 parameters.

    Args:
        against: contenders beside `accordion`, as of accordion bench, without deepspeed
        model: as of accordion bench
        batch: sequences of one rank in a step; 0: what suits the model
        seq: tokens in a sequence; 0: what suits the model
        ranks: simulated ranks
        device: auto takes an accelerator where there is one; cpu, or the type of a device
        rounds: steps of each that are measured, interleaved
        dir: folder for the JSON and HTML files
    """

    against: str = "fsdp2"
    model: str = "gpt-30m"
    batch: int = 0
    seq: int = 0
    ranks: int = 8
    device: str = "auto"
    rounds: int = 3
    dir: str = "runs/bench"


def read(kind: type[T], name: str, words: list[str], subcommands: Mapping[str, str]) -> T | None:
    """`words` as the options `kind` of `accordion bench <name>`; None if they ask for help. Raises `UsageError`."""
    about = (kind.__doc__ or "").splitlines()[0]
    if not name:
        about += "\n" + listed(subcommands, "accordion bench")
    return options.read(kind, words, f"accordion bench {name}".strip(), about)


def check(chosen: Any) -> None:
    """Raises `UsageError` before anything is measured."""
    for key, least in LEAST.items():
        if getattr(chosen, key, least) < least:
            raise UsageError(f"{key} is {getattr(chosen, key)}; it takes {least} or more.")
    writable(chosen.dir, "dir")


def writable(folder: str, key: str) -> str:
    """`folder`, made where it is missing. Raises `UsageError` where nothing can be written there."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise UsageError(
            f"{key} is {folder!r}, where nothing can be written: {error.strerror}; take another folder."
        ) from None
