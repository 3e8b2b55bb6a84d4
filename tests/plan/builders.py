"""Plans, choices, spaces and traces of small models from plain keywords: each goes to the value that has a field of that name."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import accordion as acc
from accordion import cli
from accordion.bench.model import GPT, loss_of
from accordion.plan.choice import Choice, Search
from accordion.plan.events import Collective, Log, Op
from accordion.plan.hardware import Cluster
from accordion.plan.result import Plan
from accordion.plan.search.space import Space
from accordion.plan.trace.setup import Subject, TrainingSetup
from accordion.plan.trace.trace import trace
from accordion.plan.workload import Workload, subject_of

BF16 = acc.Precision(params=torch.bfloat16)
OFFLOADS = {
    "none": "none",
    "optimizer": "optimizer=host",
    "all": "params=host,optimizer=host",
    "disk": "params=host,optimizer=disk:FOLDER",
}
ONE_CHOICE: dict[str, Any] = {
    "gpus": 2, "strategy": "full_shard", "checkpoint_activations": "none", "offload": "none", "units": acc.only_blocks(),
    "micro_batch": 1,
}  # fmt: skip
"""Arguments of `planned` that leave nothing to search."""
ONE_CHOICE_FLAGS = "--gpus 2 --strategy full_shard --checkpoint-activations none --offload none --units blocks"


def split(values: Mapping[str, Any], *kinds: type) -> list[dict[str, Any]]:
    """Return keywords by the first of these dataclasses that has a field of that name."""
    known = [{f.name for f in fields(kind)} for kind in kinds]
    parts: list[dict[str, Any]] = [{} for _ in kinds]
    for name, value in values.items():
        parts[next(i for i, names in enumerate(known) if name in names)][name] = value
    return parts


def planned(
    model: Any, loss: Any = None, batch: Any = None, *, say: Callable[[str], None] = lambda text: None, **fixed: Any
) -> Plan:
    """Return `acc.plan` of these values; `micro_batch` is the only one to try. `model`: a module, a name or a folder."""
    if "micro_batch" in fixed:
        fixed["micro_batches"] = [fixed.pop("micro_batch")]
    fixed = {name: value for name, value in fixed.items() if name == "host_memory_gib" or value is not None}
    cluster, search, workload, sharding = split(fixed, Cluster, Search, Workload, acc.Sharding)
    model = str(model) if isinstance(model, Path) else model
    return acc.plan(Workload(model, loss, batch, **workload), Cluster(**cluster), sharding, Search(**search), say=say)


def choice(**fixed: Any) -> Choice:
    """Return full sharding without checkpointing of one sample on eight GPUs, with `fixed` in place of these."""
    plain = {"strategy": "full_shard", "checkpoint_activations": "none", "micro_batch": 1, "gpus": 8}
    mine, sharding = split({**plain, **fixed}, Choice, acc.Sharding)
    return Choice(sharding=acc.Sharding(**sharding), **mine)


def space(subject_for: Callable[[int], Subject] | None = None, **fixed: Any) -> Space:
    """Return a space with the default units and inputs on the device, with `fixed` in place of these."""
    plain: dict[str, Any] = {"gpu": "h100", "activations": ["device"], "copies": False, "num_params": 1}
    cluster, search, mine, sharding = split({**plain, **fixed}, Cluster, Search, Space, acc.Sharding)
    return Space(
        subject_for=subject_for or (lambda size: None),  # type: ignore[arg-type,return-value]
        cluster=mine.pop("cluster", None) or Cluster(**cluster),
        sharding=acc.Sharding(**sharding),
        search=Search(**search),
        **mine,
    )


def command(capture: pytest.CaptureFixture[str], folder: Path, *flags: str, code: int = 0) -> str:
    """Run `accordion plan` for the model in `folder` with the flags of `ONE_CHOICE`, which `flags` may override, and return
    what it printed. Assert that its exit code is `code`."""
    capture.readouterr()
    words = ["plan", "--model", str(folder), *ONE_CHOICE_FLAGS.split(), "--micro-batch", "1", "--seq", "64", *flags]
    assert cli.main(words) == code
    return capture.readouterr().out


# -- models


def config_in(folder: Path, model_type: str = "llama", **changes: object) -> Path:
    """Write the config.json of a model with two layers of width 64, with `changes`, to `folder`, and return `folder`."""
    config = {
        "model_type": model_type, "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 128, "bos_token_id": None, **changes,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def total(model: nn.Module, batch: Tensor) -> Tensor:
    """Return a loss for models of one output."""
    return model(batch).float().square().mean()


def gpt(blocks: int = 10, batch: int = 2, width: int = 128) -> Subject:
    with torch.device("meta"):
        model = GPT(vocab=512, width=width, blocks=blocks, heads=4, positions=64)
    tokens = torch.zeros(batch, 64, dtype=torch.long)
    return subject_of(model, lambda model, pair: loss_of(model(pair[0]), pair[1]), (tokens, tokens.clone()))


def run_of(ranks: int = 8, **fixed: object) -> TrainingSetup:
    setup, sharding = split({"precision": BF16, **fixed}, TrainingSetup, acc.Sharding)
    return TrainingSetup(ranks=ranks, sharding=acc.Sharding(**sharding), **setup)


TRACED: dict[str, Log] = {}


def traced(blocks: int, ranks: int, batch: int = 2, **fixed: object) -> Log:
    """Return the log of `gpt` under `run_of`, traced once for all tests, which do not change it."""
    run = run_of(ranks, **fixed)
    key = f"{blocks} {batch} {run!r}"
    if key not in TRACED:
        TRACED[key] = trace(gpt(blocks, batch=batch), run)
    return TRACED[key]


# -- figures of plans and logs


def peak(plan: Plan) -> int:
    return plan.chosen.memory.peak.num_bytes


def held(plan: Plan, category: str) -> int:
    """Return the bytes of a category between steps."""
    return sum(alloc.num_bytes for alloc, _ in plan.log.held if alloc.category.value == category)


def flops(plan: Plan) -> float:
    return sum(e.flops for e in plan.log.events if isinstance(e, Op))


def sent(plan: Plan, *kinds: str, axis: str = "shard") -> list[int]:
    return [e.num_bytes for e in plan.log.events if isinstance(e, Collective) and e.kind in kinds and e.axis == axis]
