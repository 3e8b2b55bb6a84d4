"""`accordion plan`: its options, and the plan that they ask for."""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from jsonargparse import ArgumentError, ArgumentParser

from accordion.bench.report import show
from accordion.config import Precision, nearest
from accordion.errors import UsageError
from accordion.plan.api import plan
from accordion.plan.hardware import GPUS, NETWORK_GBPS, gpu_named
from accordion.plan.language import language_model
from accordion.plan.models import PRESETS, configuration, language_subject
from accordion.plan.result import Plan
from accordion.plan.search import smallest_change
from accordion.planner.pages import of_plan, of_table

DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
NOT_FOUND = 1  # exit code where nothing fits


@dataclass(frozen=True, kw_only=True)
class Options:
    """Say what a training step of a model takes on given GPUs, and which configuration is the fastest that fits.

    Args:
        model: a preset, a folder with a transformers config.json, or that file
        gpu: a card of the table (--gpus-table shows it), measured: what --measure found here, or a file that it wrote
        gpus: GPUs in all; 0: as many as --nodes have
        nodes: machines; 0: as many as --gpus fill, eight to each
        fewer: look at smaller numbers of GPUs too, halving
        seq: tokens of a sequence
        micro_batch: sequences of one rank at a time; 0: look for it
        accumulate: micro-batches of a step
        engine: accordion, or fsdp2: PyTorch's own in its place
        optimizer: adamw (fused), adamw_foreach or sgd (fused, with momentum)
        precision: what the model computes in, over float32 masters
        strategy: of accordion.shard; auto: look for it
        checkpoint_activations: none, every:K, selective or full; auto: look for it
        gpu_memory_gib: corrects or describes the card; 0: as in the table
        gpu_tflops: dense bf16, in units of 10^12 a second
        gpu_bandwidth_gbps: GB/s of its memory
        link_gbps: GB/s that one card sends to another in its node
        network_gbps: GB/s that one card sends to other nodes
        measured_step_s: seconds of one measured step on such cards, which calibrates all times; 0: none
        measured_at: its configuration: strategy,checkpointing,micro-batch,GPUs; empty: the one that the other options fix
        measure: measure this machine, store that, and end; all its GPUs, else two CPU ranks
        measured_file: where that is stored; empty: in the user's cache folder
        gpus_table: show the table of cards with their sources, and end
        explain: show the arithmetic by hand beside what was traced
        json: print JSON alone
        html: file for a page with the pictures
    """

    model: str = "llama3-8b"
    gpu: str = "h100"
    gpus: int = 0
    nodes: int = 0
    fewer: bool = False
    seq: int = 4096
    micro_batch: int = 0
    accumulate: int = 1
    engine: str = "accordion"
    optimizer: str = "adamw"
    precision: Literal["bf16", "fp16", "fp32"] = "bf16"
    strategy: str = "auto"
    checkpoint_activations: str = "auto"
    gpu_memory_gib: float = 0.0
    gpu_tflops: float = 0.0
    gpu_bandwidth_gbps: float = 0.0
    link_gbps: float = 0.0
    network_gbps: float = NETWORK_GBPS
    measured_step_s: float = 0.0
    measured_at: str = ""
    measure: bool = False
    measured_file: str = ""
    gpus_table: bool = False
    explain: bool = False
    json: bool = False
    html: str = ""


SWITCHES = ("fewer", "measure", "gpus_table", "explain", "json")


def run(words: list[str]) -> int:
    """The subcommand. Returns the exit code: 1 where nothing fits."""
    o = read(words)
    if o.gpus_table:
        show(of_table())
        return 0
    file = Path(o.measured_file) if o.measured_file else cache_folder() / "measured.json"
    if o.measure:
        return _measure(o, file)
    gpus, node = counts_of(o)
    card = gpu_named(
        str(file) if o.gpu == "measured" else o.gpu,
        o.gpu_memory_gib or None,
        o.gpu_tflops or None,
        o.gpu_bandwidth_gbps or None,
        o.link_gbps or None,
    )
    say = partial(print, file=sys.stderr)
    made = plan(
        o.model,
        gpu=card,
        gpus=gpus,
        node=node,
        network_gbps=o.network_gbps,
        strategy=None if o.strategy == "auto" else o.strategy,
        checkpoint_activations=None if o.checkpoint_activations == "auto" else o.checkpoint_activations,
        micro_batch=o.micro_batch or None,
        seq=o.seq,
        accumulate=o.accumulate,
        engine=o.engine,
        optimizer=o.optimizer,
        precision=Precision(params=DTYPES[o.precision]),
        measured_step_s=o.measured_step_s or None,
        measured_at=o.measured_at,
        say=say,
    )
    change = "" if made.fits else _change(o, made, say)
    if o.json:
        print(json.dumps({**made.as_dict(), **({"smallest_change": change} if change else {})}, indent=1))
    else:
        show(of_plan(made, explain=o.explain, change=change))
    if o.html:
        from accordion.planner.html import write

        write(made, Path(o.html))
        say(f"written: {o.html}")
    return 0 if made.fits else NOT_FOUND


def cache_folder() -> Path:
    """Where what was measured on this machine is kept for this user."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "accordion"


def _measure(o: Options, file: Path) -> int:
    from accordion.planner.measure import measured, of_measured, write

    found = measured(num_ranks=o.gpus)
    write(found, file)
    if o.json:
        print(json.dumps(found, indent=1))
    else:
        show(of_measured(found, file))
    return 0


def _change(o: Options, made: Plan, say: Any) -> str:
    config = configuration(o.model, o.seq)
    where = f"model {o.model!r}"
    num_params = sum(p.numel() for p in language_model(config, where).parameters())
    return smallest_change(
        lambda size: language_subject(config, where, size, o.seq), made.space, made.cluster, num_params, say
    )


def counts_of(o: Options) -> tuple[list[int], int]:
    """Numbers of GPUs to look at, and GPUs of a node. Raises `UsageError` where --gpus and --nodes contradict."""
    gpus = o.gpus or 8 * max(1, o.nodes)
    if gpus < 1 or o.nodes < 0:
        raise UsageError(f"gpus is {o.gpus} and nodes is {o.nodes}; they take 1 or more.")
    if o.nodes and gpus % o.nodes:
        raise UsageError(f"{gpus} GPUs do not divide over {o.nodes} nodes; take a multiple of {o.nodes} for --gpus.")
    node = gpus // o.nodes if o.nodes else min(gpus, 8)
    counts = [gpus]
    while o.fewer and counts[0] > 1 and counts[0] % 2 == 0:
        counts.insert(0, counts[0] // 2)
    return counts, node


def read(words: list[str]) -> Options:
    """`words` as options. Raises `UsageError`."""
    words = [re.sub(r"^--[\w-]+", lambda flag: "--" + flag.group()[2:].replace("-", "_"), word) for word in words]
    known = [f"--{field.name}" for field in fields(Options)]
    for i, word in enumerate(words):
        flag = word.partition("=")[0]
        if flag.startswith("--") and flag not in (*known, "--help"):
            shown = [name.replace("_", "-") for name in known]
            raise UsageError(
                f"option {flag.replace('_', '-')!r} does not exist; {nearest(flag.replace('_', '-'), shown)}"
            )
        if flag[2:] in SWITCHES and "=" not in word:
            words[i] = f"{word}=true"
    about = (Options.__doc__ or "").splitlines()[0] + f"\nPresets: {', '.join(PRESETS)}. Cards: {', '.join(GPUS)}."
    parser = ArgumentParser(prog="accordion plan", description=about, exit_on_error=False, allow_abbrev=False)
    parser.add_class_arguments(Options)
    try:
        return Options(**parser.parse_args(words).as_dict())
    except ArgumentError as error:
        raise UsageError(" ".join(str(error).split())) from None
