"""`accordion plan`: the plan that its options ask for."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import torch

from accordion.config import COMPUTE_DTYPES, Precision
from accordion.errors import UsageError
from accordion.files import read_text
from accordion.garbage import without_collections
from accordion.options import made as made_of
from accordion.options import values_of
from accordion.pages.page import Page
from accordion.plan.api import plan
from accordion.plan.cli.options import ABOUT, Options
from accordion.plan.cli.pages import of_plan, of_table
from accordion.plan.hardware import at_watts, gpu_named
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
