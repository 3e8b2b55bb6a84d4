"""Ranks with different paths, arguments or names: all raise the same error, none waits, and nothing changes."""

import os
from pathlib import Path

import pytest
import torch
from torch import nn

import accordion as acc
from accordion.errors import AccordionError, CheckpointError, UsageError


def built(mesh, value):
    model = acc.shard(nn.Sequential(nn.Linear(4, 6, bias=False)), mesh)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(value)
    return model


def refused(act):
    with pytest.raises(AccordionError) as caught:
        act()
    return type(caught.value).__name__, str(caught.value)


def loads(mesh, folder):
    rank = mesh.get_rank()
    for step in (1, 2):
        acc.save(folder / f"step-{step}", built(mesh, step), extra=step)
    acc.save(folder / "again", built(mesh, 2), extra=2)
    model, told = built(mesh, 7), []
    told.append(refused(lambda: acc.load(folder / f"step-{2 if rank else 1}", model)))
    told.append(refused(lambda: acc.load(folder / "step-1" if rank else None, model)))
    told.append(refused(lambda: acc.save(folder / "c", model, state={"a": 3} if rank else {})))
    assert all((param.to_local() == 7).all() for param in model.parameters())
    os.chdir(folder if rank else folder.parent)
    try:  # one checkpoint, spelled in two ways
        assert acc.load("step-2" if rank else f"{folder.name}/step-2", model) == 2
    finally:
        os.chdir("/")
    assert all((param.to_local() == 2).all() for param in model.parameters())
    return told


def test_ranks_that_load_different_checkpoints_are_refused(world, tmp_path):
    found = world.run(3, loads, tmp_path)
    (kind, text), (none, path), (state, key) = found[0]
    assert found == [found[0]] * 3
    assert kind == "CheckpointError"
    assert text.startswith(
        f"ranks were given different checkpoints, rank 0: {tmp_path}/step-1, whose manifest has the digest "
    )
    assert f"; rank 1, 2: {tmp_path}/step-2, whose manifest has the digest " in text
    assert (none, path) == (
        "UsageError",
        "rank 0: the path is None; if `latest` returned it, there is no checkpoint yet.",
    )
    assert (state, key) == ("CheckpointError", "rank 1, 2: AttributeError: 'int' object has no attribute 'state_dict'")


def saves(mesh, folder):
    rank, model = mesh.get_rank(), built(mesh, 1)
    told = [refused(lambda: acc.save(folder / f"of-{rank}", model))]
    told.append(refused(lambda: acc.save(folder / "c", model, keep="2" if rank else 0)))
    told.append(refused(lambda: acc.save("" if rank == 2 else folder / "c", model)))
    odd = Path(os.fsdecode(os.fsencode(folder) + b"/\xff"))
    odd.mkdir(exist_ok=True)
    torch.distributed.barrier(mesh.get_group())
    (odd / "notes.txt").write_text("mine")
    torch.distributed.barrier(mesh.get_group())
    told.append(refused(lambda: acc.save(odd, model)))
    told.append(refused(lambda: acc.save(odd, model, background=True).wait()))
    return told


def test_ranks_that_save_to_different_paths_are_refused(world, tmp_path):
    found = world.run(3, saves, tmp_path)
    assert found == [found[0]] * 3
    (kind, text), (keep, number), (path, empty), *odd = found[0]
    assert kind == "CheckpointError"
    assert f"rank 1: this rank saves to {tmp_path}/of-1 and rank 0 to {tmp_path}/of-0; pass the same path" in text
    assert (keep, number[:38]) == ("UsageError", "rank 1, 2: keep is '2'; it takes a num")
    assert (path, empty[:26]) == ("UsageError", "rank 2: the path is empty;")
    assert [kind for kind, _ in odd] == ["CheckpointError"] * 2
    assert all("notes.txt" in text and text.encode() for _, text in odd)
    assert [name for name in os.listdir(tmp_path) if name[0] in ".co"] == []


def lagging(mesh, folder):
    """Load from a shared folder in which one rank does not see the newest checkpoint yet, so that `latest` differs."""
    for step in (1, 2):
        acc.save(folder / f"step-{step}", built(mesh, step))
    seen = acc.latest(folder) if mesh.get_rank() else str(folder / "step-1")
    model = built(mesh, 7)
    with pytest.raises(CheckpointError, match="ranks were given different checkpoints"):
        acc.load(seen, model)
    return all(bool((param.to_local() == 7).all()) for param in model.parameters())


def test_load_refuses_if_latest_differs_between_ranks(world, tmp_path):
    assert world.run(2, lagging, tmp_path) == [True, True]
    with pytest.raises(UsageError, match="the path is None"):
        acc.latest(None)
