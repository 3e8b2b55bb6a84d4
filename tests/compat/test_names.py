"""Our FSDP1 and FSDP2 have every name, method and argument of the installed torch's, and docs/compat.md lists each."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import torch.distributed.fsdp as theirs
import torch.distributed.fsdp.wrap as their_wrap

import accordion.compat.fsdp2 as ours
from accordion.compat import fsdp1
from accordion.compat.fsdp1 import fully_sharded_data_parallel, wrap

TABLE = (Path(__file__).parents[2] / "docs" / "compat.md").read_text(encoding="utf-8")
NAMES = [
    name
    for name in theirs.__all__
    if getattr(theirs, name).__module__ == "torch.distributed.fsdp"
    and not name.startswith(("Flat", "FullyShardedData"))
]
METHODS = [n for n, f in vars(theirs.FSDPModule).items() if inspect.isfunction(f)]


def parameters(function: object) -> dict[str, object]:
    return {n: p.kind for n, p in inspect.signature(function).parameters.items()}  # type: ignore[arg-type]


def test_every_exported_name_is_here() -> None:
    assert {"fully_shard", "FSDPModule", "UnshardHandle", "share_comm_ctx"} <= set(NAMES)
    assert not set(NAMES) - set(ours.__all__)
    for name in NAMES:
        assert getattr(ours, name) is not None
        assert re.search(rf"^\|[^|]*`{name}`[^|]*\|", TABLE, re.MULTILINE), f"{name} is not in the table"


def test_every_method_is_here_and_takes_the_same() -> None:
    """If our class derives from torch's, it also overrides the private methods."""
    public = [name for name in METHODS if not name.startswith("_")]
    assert public
    for name in public:
        method = getattr(ours.FSDPModule, name)
        if not str(method.__doc__).startswith("Accepted without effect"):  # those take any arguments
            assert parameters(method) == parameters(getattr(theirs.FSDPModule, name)), name
        assert f"`FSDPModule.{name}`" in TABLE, f"{name} is not in the table"
    assert not [n for n in METHODS if n not in vars(ours.FSDPModule) and not n.startswith("_set_unshard")]
    assert issubclass(ours.FSDPModule, theirs.FSDPModule) == hasattr(theirs.FSDPModule, "finalize_backward")


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


def test_every_name_of_fsdp1_is_here_and_documented() -> None:
    mine, its = fsdp1.FullyShardedDataParallel, theirs.FullyShardedDataParallel
    assert set(theirs.__all__) - {"FlatParameter"} - set(ours.__all__) <= set(fsdp1.__all__)
    assert set(their_wrap.__all__) == set(wrap.__all__)
    assert set(theirs.fully_sharded_data_parallel.__all__) - set(fully_sharded_data_parallel.__all__) <= {
        "FlatParameter"
    }
    public = {name for name in vars(its) if not name.startswith("_")}
    assert public <= set(dir(mine)), public - set(dir(mine))
    assert list(parameters(mine)) == list(parameters(its))
    section = TABLE[TABLE.index("## `accordion.compat.fsdp1`") : TABLE.index("## `accordion.compat.deepspeed`")]
    arguments = set(parameters(mine)) - {"module"}
    for name in {*fsdp1.__all__, *wrap.__all__, *public, *arguments, "FlatParameter"}:
        assert f"`{name}`" in section, name
