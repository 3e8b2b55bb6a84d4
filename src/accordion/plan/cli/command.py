"""`accordion plan`: its options, and the plan that they ask for."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from accordion.config import COMPUTE_DTYPES, Precision
from accordion.errors import UsageError
from accordion.files import read_text
from accordion.garbage import without_collections
from accordion.models.llama import PUBLISHED
from accordion.options import made as made_of
from accordion.options import values_of
from accordion.pages.page import Page
from accordion.plan.api import plan
from accordion.plan.cli.pages import of_plan, of_table
from accordion.plan.hardware import DISK_GBPS, GPUS, NETWORK_GBPS, at_watts, gpu_named
from accordion.plan.own_model import names_code
from accordion.plan.result import Plan
from accordion.plan.search.space import LARGEST_GPUS
from accordion.plan.search.suggest import NODE, smallest_change
from accordion.plan.trained_models import Kernels, configuration, language_subject, trained_model
from accordion.tasks.errors import of_the_task
from accordion.tasks.flags import read_task, split_task
from accordion.tasks.loaded import example_of, mean_loss, model_of
from accordion.units import units_named

PURE = "bf16-pure"
TASK_BATCH = 8
NOT_FOUND = 1  # exit code where nothing fits
ABOUT = (
    "Say what a training step of a model takes on given GPUs, and which configuration is the fastest that fits. What a flag "
    f"fixes is not looked for. Presets: {', '.join(PUBLISHED)}. Cards: {', '.join(GPUS)}."
)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Say what a training step of a model takes on given GPUs, and which configuration is the fastest that fits.

    Args:
        model: a preset, a folder with a transformers config.json, or that file; or file.py:build or package.module:build, a
            function without arguments that gives a language model
        task: a task of your own in its place, file.py, file.py:Name or package.module:Name, with options as --task.width 64 and
            batches of --micro-batch samples (8)
        gpu: a card of the table (--gpus-table shows it), measured: what --measure found here, or a file that it wrote
        gpus: GPUs in all; without it eight on each of --nodes
        nodes: machines; without it as many as --gpus fill, eight to each
        fewer: look at smaller numbers of GPUs too, halving
        seq: tokens of a sequence
        micro_batch: sequences of one rank at a time; without it: look for it
        accumulate: micro-batches of a step
        no_sync: micro-batches of a step but the last reduce nothing, and full gradients stay on each rank
        engine: accordion, or fsdp2: PyTorch's own in its place
        global_batch: sequences of a step over all GPUs; accumulation follows from it
        optimizer: adamw (fused), adamw_foreach, sgd (fused, with momentum), or adamw_bf16, adamw_8bit, adamw_4bit: AdamW with
            moments in so many bits
        precision: what the model computes in, over float32 masters; bf16-pure: without them
        reduce: in which gradients are summed over ranks
        loss: plain (a float32 copy of the logits), fused (one kernel over them) or chunked (head and loss by rows, no logits)
        lora_rank: of adapters beside frozen weights; 0: all is trained
        lora_targets: all (linear layers but the head), or the last parts of names of layers, such as q_proj,v_proj
        quantize: nf4 keeps the frozen weights in four bits (QLoRA)
        attention: auto (FlashAttention-2 where it can be), eager (products and a softmax), fa1, fa2, fa3, cudnn or flex
        strategy: of accordion.shard, such as full_shard; without it: look for it
        units: what is gathered together: auto, blocks, min_params:N or names of classes; without it: look for it
        replicas: copies of the model with a hybrid strategy; without it: look for it
        secondary: ranks that keep one copy of a unit from its forward to its backward, 0: none; without it and without a
            strategy: look for it
        offload: none, optimizer (with masters and gradients on the host), all (parameters too) or disk (states there); without
            it: the first of them that fits
        offload_activations: device, host or disk: where inputs of recomputed units wait; without it: elsewhere than on the
            device only where nothing fits
        checkpoint_activations: none, every:K, selective or full; without it: look for it
        expert_parallel: neighbouring ranks that share the experts of a mixture; tokens are assumed to choose them evenly
        lengths: tokens of a sample as mean,longest: all are padded to the longest, and the mean counts as trained
        packed: with --lengths: samples of the mean length fill rows of the longest, and each looks at itself alone
        tokens: of a whole run, whose hours and GPU-hours are shown
        price: dollars for an hour of one GPU, for the price of that run
        from_: file of a plan's --json, whose options are taken where no other is given
        gpu_watts: power of the card where it is less than its data sheet's
        gpu_memory_gib: memory of the card; this and the next three correct a card of the table, or describe another one
        gpu_tflops: dense bf16, in units of 10^12 a second
        gpu_bandwidth_gbps: GB/s of its memory
        link_gbps: GB/s that one card sends to another in its node
        network_gbps: GB/s that one card sends to other nodes
        host_memory_gib: of one machine, for offload
        disk_gbps: GB/s of one machine's disk, for offload
        measured_step_s: seconds of one measured step on such cards, which calibrates all times
        measured_at: its configuration: strategy,checkpointing,micro-batch,GPUs; without it the one that the other options fix
        measure: measure this machine, store that, and end; all its GPUs, else two CPU ranks
        measured_file: where that is stored; without it in the user's cache folder
        gpus_table: show the table of cards with their sources, and end
        explain: show the arithmetic by hand beside what was traced
        json: print JSON alone
        html: file for a page with the pictures
    """

    model: str = "llama3-8b"
    task: str | None = None
    gpu: str = "h100"
    gpus: int | None = None
    nodes: int | None = None
    fewer: bool = False
    seq: int = 4096
    micro_batch: int | None = None
    accumulate: int = 1
    no_sync: bool = False
    engine: str = "accordion"
    global_batch: int | None = None
    optimizer: str = "adamw"
    precision: Literal["bf16", "fp16", "fp32", "bf16-pure"] = "bf16"
    reduce: Literal["fp32", "bf16"] = "fp32"
    loss: str = "plain"
    attention: str = "auto"
    lora_rank: int = 0
    lora_targets: str = "all"
    quantize: Literal["none", "nf4"] = "none"
    strategy: str | None = None
    units: str | None = None
    replicas: int | None = None
    secondary: int | None = None
    offload: str | None = None
    offload_activations: str | None = None
    checkpoint_activations: str | None = None
    expert_parallel: int = 1
    lengths: str | None = None
    packed: bool = False
    tokens: float | None = None
    price: float | None = None
    from_: str | None = None
    gpu_watts: float | None = None
    gpu_memory_gib: float | None = None
    gpu_tflops: float | None = None
    gpu_bandwidth_gbps: float | None = None
    link_gbps: float | None = None
    network_gbps: float = NETWORK_GBPS
    host_memory_gib: float | None = None
    disk_gbps: float = DISK_GBPS
    measured_step_s: float | None = None
    measured_at: str = ""
    measure: bool = False
    measured_file: str | None = None
    gpus_table: bool = False
    explain: bool = False
    json: bool = False
    html: str | None = None


def run(words: list[str]) -> int:
    """The subcommand. Returns the exit code: 1 where nothing fits."""
    own, words = split_task(words)
    o = _options(words)
    if o is None:
        return 0
    if o.gpus_table:
        show(of_table())
        return 0
    file = Path(o.measured_file) if o.measured_file else cache_folder() / "measured.json"
    if o.measure:
        return _measure(o, file)
    gpus, node = counts_of(o)
    seq, mean_tokens = (o.seq, None) if o.lengths is None else lengths_of(o.lengths)
    gpu = file if o.gpu == "measured" else o.gpu
    card = gpu_named(gpu, o.gpu_memory_gib, o.gpu_tflops, o.gpu_bandwidth_gbps, o.link_gbps)
    if o.gpu_watts is not None:
        card = at_watts(card, o.gpu_watts)
    if o.html is not None:
        check_place(Path(o.html))
    units: dict[str, Any] = {} if o.units is None else {"units": units_named(o.units)}
    say = partial(print, file=sys.stderr)
    with without_collections():  # of millions of small objects that no cycle holds
        made = plan(
            **what_of(o, own),
            gpu=card,
            gpus=gpus,
            node=node,
            network_gbps=o.network_gbps,
            host_memory_gib=o.host_memory_gib,
            disk_gbps=o.disk_gbps,
            strategy=o.strategy,
            replicas=o.replicas,
            secondary=o.secondary,
            offload=o.offload,
            offload_activations=o.offload_activations,
            checkpoint_activations=o.checkpoint_activations,
            expert_parallel=o.expert_parallel,
            seq=seq,
            mean_tokens=mean_tokens,
            packed=o.packed,
            tokens=o.tokens,
            price=o.price,
            accumulate=o.accumulate,
            no_sync=o.no_sync,
            engine=o.engine,
            global_batch=o.global_batch,
            optimizer=o.optimizer,
            precision=precision_of(o),
            kernels=kernels_of(o),
            measured_step_s=o.measured_step_s,
            measured_at=o.measured_at,
            say=say,
            processes=2 if o.task is None else 1,  # a task of a file is no module that another process can import
            **units,
        )
    change = "" if made.fits or o.task is not None or names_code(o.model) else _change(o, made, seq, say)
    if o.json:
        more = {"smallest_change": change} if change else {}
        print(json.dumps({**made.as_dict(), **more, "command": asked(o)}, indent=1))
    else:
        show(of_plan(made, explain=o.explain, change=change))
    if o.html is not None:
        from accordion.plan.cli.html import write

        write(made, Path(o.html))
        say(f"written: {o.html}")
    return 0 if made.fits else NOT_FOUND


def what_of(o: Options, own: list[str]) -> dict[str, Any]:
    """What is planned: a language model by its name, or a task with the options in `own`. Raises `UsageError`, `TaskError`."""
    if o.task is None:
        if own:
            raise UsageError(f"{own[0]} is an option of a task, and none is named; give --task.")
        return {"model": o.model, "micro_batch": o.micro_batch}
    size = o.micro_batch or TASK_BATCH
    task = read_task(o.task, own, "accordion plan")
    with of_the_task("model()"):
        model = model_of(task)
    with of_the_task("dataset('train')"):
        batch = example_of(task, size)
    print(f"{task.name}: a micro-batch is one of {size} samples, or as its loader gives it", file=sys.stderr)
    return {"model": model, "loss": partial(mean_loss, task), "batch": batch}


def _options(words: list[str]) -> Options | None:
    """As `words` say, over those of the plan that `--from` names. Raises `UsageError`."""
    given = values_of(Options, words, "accordion plan", ABOUT)
    if given is None:
        return None
    if given.get("from_") is None:
        return made_of(Options, given)
    told = saved(given["from_"]).get("command")
    known = {f.name for f in fields(Options)}
    if not isinstance(told, dict) or not known.issuperset(told):
        raise UsageError(
            f"--from {given['from_']!r} holds no options of a plan; it takes what `accordion plan --json` printed."
        )
    flags = [w for key, value in told.items() for w in _words(key, value)]
    before = values_of(Options, flags, "accordion plan", ABOUT) or {}
    return made_of(Options, {**before, **given})


def _words(key: str, value: object) -> list[str]:
    """An option as it is typed."""
    flag = f"--{key.rstrip('_').replace('_', '-')}"
    return [flag] if value is True else [flag, str(value)]


OUTPUTS = ("json", "html", "explain", "from_", "measure", "gpus_table")


def asked(o: Options) -> dict[str, Any]:
    """Options that are not as by default, for `--from`."""
    return {f.name: getattr(o, f.name) for f in fields(o) if getattr(o, f.name) != f.default and f.name not in OUTPUTS}


def saved(file: str) -> dict[str, Any]:
    """A plan that `--json` printed. Raises `UsageError`."""
    try:
        found = json.loads(read_text(Path(file)))
    except FileNotFoundError:
        raise UsageError(f"--from {file!r} is not there; it takes what `accordion plan --json` printed.") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"--from {file!r} cannot be read as JSON: {error}") from None
    if not isinstance(found, dict) or "config" not in found:
        raise UsageError(f"--from {file!r} holds no plan; it takes what `accordion plan --json` printed.")
    return found


def lengths_of(text: str) -> tuple[int, int]:
    """(longest, mean) of "mean,longest". Raises `UsageError`."""
    words = text.split(",")
    if len(words) != 2 or not all(w.strip().isdecimal() and len(w.strip()) < 10 for w in words):
        raise UsageError(f"--lengths {text!r} is not understood; it takes mean,longest in tokens, such as 900,4096.")
    mean, longest = (int(w) for w in words)
    return longest, mean


def precision_of(o: Options) -> Precision:
    """`pure`: the model is in bf16, and so are what the optimizer steps and its states."""
    reduce = {"fp32": torch.float32, "bf16": torch.bfloat16}[o.reduce]
    if o.precision == PURE:
        return Precision(params=torch.bfloat16, reduce=reduce, master=None)
    return Precision(params=COMPUTE_DTYPES[o.precision], reduce=reduce)


def kernels_of(o: Options) -> Kernels:
    return Kernels(
        loss=o.loss,
        attention=o.attention,
        pure=o.precision == PURE,
        lora_rank=o.lora_rank,
        lora_targets=o.lora_targets,
        four_bits=o.quantize == "nf4",
    )


def show(page: Page) -> None:
    """On the screen; what draws there is not needed for JSON, and takes a while to import."""
    from accordion.pages import show

    show.show(page)


def cache_folder() -> Path:
    """Where what was measured on this machine is kept for this user."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "accordion"


def _measure(o: Options, file: Path) -> int:
    from accordion.plan.cli.measure import measured, of_measured, write

    if o.gpus is not None and o.gpus < 1:
        raise UsageError(f"--gpus is {o.gpus}; it takes 1 or more.")
    if file.is_dir():
        raise UsageError(f"--measured-file {str(file)!r} is a folder; name a file.")
    found = measured(num_ranks=o.gpus or 0)
    write(found, file)
    if o.json:
        print(json.dumps(found, indent=1))
    else:
        show(of_measured(found, file))
    return 0


def _change(o: Options, made: Plan, seq: int, say: Any) -> str:
    config = configuration(o.model, seq)
    where, kernels = f"model {o.model!r}", made.space.kernels
    num_params = sum(p.numel() for p in trained_model(config, where, kernels).parameters() if p.requires_grad)
    subject_for = partial(language_subject, config, where, seq=seq, kernels=kernels)
    return smallest_change(subject_for, made.space, made.cluster, num_params, say, made.found.logs)


def counts_of(o: Options) -> tuple[list[int], int]:
    """Numbers of GPUs to look at, and GPUs of a node. Raises `UsageError` where --gpus and --nodes contradict."""
    for flag, value in (("--gpus", o.gpus), ("--nodes", o.nodes)):
        if value is not None and not 1 <= value <= LARGEST_GPUS:
            raise UsageError(f"{flag} is {value}; it takes 1 to {LARGEST_GPUS:,}.")
    gpus = o.gpus or NODE * (o.nodes or 1)
    if o.nodes and gpus % o.nodes:
        raise UsageError(f"{gpus} GPUs do not divide over {o.nodes} nodes; take a multiple of {o.nodes} for --gpus.")
    node = gpus // o.nodes if o.nodes else min(gpus, NODE)
    counts = [gpus]
    while o.fewer and counts[0] > 1 and counts[0] % 2 == 0:
        counts.insert(0, counts[0] // 2)
    return counts, node


def check_place(path: Path) -> None:
    """Before a search that takes a minute: the file can be written. Raises `UsageError`."""
    folder = path.absolute().parent
    if path.is_dir() or not folder.is_dir():
        found = "is a folder" if path.is_dir() else f"has no folder {str(folder)!r} to lie in"
        raise UsageError(f"--html {str(path)!r} {found}; name a file.")
