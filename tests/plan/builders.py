"""Plans, choices and spaces from plain keywords: each goes to the value that has a field of that name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import torch

import accordion as acc
from accordion.plan.choice import Choice, Search
from accordion.plan.hardware import Cluster
from accordion.plan.result import Plan
from accordion.plan.search.space import Space
from accordion.plan.trace.setup import Subject
from accordion.plan.workload import Workload

BF16 = acc.Precision(params=torch.bfloat16)
OFFLOADS = {
    "none": "none",
    "optimizer": "optimizer=host",
    "all": "params=host,optimizer=host",
    "disk": "params=host,optimizer=disk:FOLDER",
}


def split(given: Mapping[str, Any], *kinds: type) -> list[dict[str, Any]]:
    """Keywords by the first of these dataclasses that has a field of that name."""
    known = [{f.name for f in fields(kind)} for kind in kinds]
    parts: list[dict[str, Any]] = [{} for _ in kinds]
    for name, value in given.items():
        parts[next(i for i, names in enumerate(known) if name in names)][name] = value
    return parts


def planned(
    model: Any, loss: Any = None, batch: Any = None, *, say: Callable[[str], None] = lambda text: None, **given: Any
) -> Plan:
    """`acc.plan` of these values; `micro_batch` is the only one that is looked through. `loss`, with a name: of its kernels."""
    if "micro_batch" in given:
        given["micro_batches"] = [given.pop("micro_batch")]
    given = {name: value for name, value in given.items() if name == "host_memory_gib" or value is not None}
    cluster, search, workload, sharding = split(given, Cluster, Search, Workload, acc.Sharding)
    return acc.plan(Workload(model, loss, batch, **workload), Cluster(**cluster), sharding, Search(**search), say=say)


def choice(**given: Any) -> Choice:
    """Full sharding without checkpointing of one sample on eight GPUs, but for what is given."""
    plain = {"strategy": "full_shard", "checkpoint_activations": "none", "micro_batch": 1, "gpus": 8}
    mine, sharding = split({**plain, **given}, Choice, acc.Sharding)
    return Choice(sharding=acc.Sharding(**sharding), **mine)


def space(subject_for: Callable[[int], Subject] | None = None, **given: Any) -> Space:
    """What is looked through, with the default units and inputs on the device, but for what is given."""
    plain: dict[str, Any] = {
        "gpu": "h100",
        "activations": ["device"],
        "copies": False,
        "num_params": 1,
    }
    cluster, search, mine, sharding = split({**plain, **given}, Cluster, Search, Space, acc.Sharding)
    assert subject_for is not None or "subject_for" not in mine
    return Space(
        subject_for=subject_for or (lambda size: None),  # type: ignore[arg-type,return-value]
        cluster=mine.pop("cluster", None) or Cluster(**cluster),
        sharding=acc.Sharding(**sharding),
        search=Search(**search),
        **mine,
    )
