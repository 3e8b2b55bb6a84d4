"""docs/compat.md lists every name that the installed torch exports for `fully_shard`, and each one exists."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import torch.distributed.fsdp as theirs

import accordion.compat.fsdp2 as ours

TABLE = (Path(__file__).parents[2] / "docs" / "compat.md").read_text(encoding="utf-8")
NAMES = [
    name
    for name in theirs.__all__
    if getattr(theirs, name).__module__ == "torch.distributed.fsdp"
    and not name.startswith(("Flat", "FullyShardedData"))
]
METHODS = [n for n, f in vars(theirs.FSDPModule).items() if inspect.isfunction(f) and not n.startswith("_")]


def parameters(function: object) -> dict[str, object]:
    return {n: p.kind for n, p in inspect.signature(function).parameters.items()}  # type: ignore[arg-type]


def test_every_exported_name_is_here() -> None:
    assert {"fully_shard", "FSDPModule", "UnshardHandle", "share_comm_ctx"} <= set(NAMES)
    assert not set(NAMES) - set(ours.__all__)
    for name in NAMES:
        assert getattr(ours, name) is not None
        assert re.search(rf"^\|[^|]*`{name}`[^|]*\|", TABLE, re.MULTILINE), f"{name} is not in the table"


def test_every_method_is_here_and_takes_the_same() -> None:
    for name in METHODS:
        assert parameters(getattr(ours.FSDPModule, name)) == parameters(getattr(theirs.FSDPModule, name)), name
        assert f"`FSDPModule.{name}`" in TABLE, f"{name} is not in the table"


def test_fully_shard_takes_the_same() -> None:
    of_torch = parameters(inspect.unwrap(theirs.fully_shard))
    if not hasattr(theirs, "DataParallelMeshDims"):  # torch 2.11
        of_torch["dp_mesh_dims"] = inspect.Parameter.KEYWORD_ONLY
    assert parameters(ours.fully_shard) == of_torch
    for name in list(parameters(ours.fully_shard))[1:]:
        assert f"`fully_shard({name}=)`" in TABLE, name
    for name in ("register_fsdp_forward_method", "share_comm_ctx"):
        assert parameters(getattr(ours, name)) == parameters(getattr(theirs, name))


def test_each_row_of_the_table_has_one_of_four_states() -> None:
    rows = re.findall(r"^\| `(?:fully_shard|FSDPModule)[^|]*\| ([^|]*) \|", TABLE, re.MULTILINE)
    assert len(rows) > 25
    assert set(rows) <= {"same", "better", "no effect", "refused"}
