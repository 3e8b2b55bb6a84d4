"""Ranks with different paths, arguments or names: all raise the same error, none waits, and nothing changes."""

import os
from pathlib import Path

import pytest
import torch.distributed as dist

import accordion as acc
from accordion.errors import CheckpointError, UsageError
from tests.devices import here
from tests.support.checkpoints import filled
from tests.support.checks import everyone
from tests.support.ranked import on_world


def built(mesh, value):
    return acc.shard(here(filled(value)), mesh)


def assert_filled(model, value):
    assert all((param.to_local() == value).all() for param in model.parameters())


def assert_refused(mesh, kind, error, act):
    """Check that `act` raises the same error on all ranks."""
    with pytest.raises(kind, match=error) as caught:
        act()
    text = str(caught.value).encode()
    assert everyone(mesh, text) == [text] * mesh.size()


@on_world(3)
def test_ranks_that_load_different_checkpoints_are_refused(mesh, tmp_path):
    rank, model = mesh.get_rank(), built(mesh, 7)
    for step in (1, 2):
        acc.save(tmp_path / f"step-{step}", built(mesh, step), extra=step)
    digest = ", whose manifest has the digest "
    differ = (
        f"^ranks were given different checkpoints, rank 0: {tmp_path}/step-1{digest}.*; rank 1, 2: {tmp_path}/step-2"
    )
    assert_refused(
        mesh, CheckpointError, f"{differ}{digest}", lambda: acc.load(tmp_path / f"step-{2 if rank else 1}", model)
    )
    none = r"^rank 0: the path is None; if `latest` returned it, there is no checkpoint yet\.$"
    assert_refused(mesh, UsageError, none, lambda: acc.load(tmp_path / "step-1" if rank else None, model))
    no_state = r"^rank 1, 2: AttributeError: 'int' object has no attribute 'state_dict'$"
    state = {"a": 3} if rank else {}
    assert_refused(mesh, CheckpointError, no_state, lambda: acc.save(tmp_path / "c", model, state=state))
    assert_filled(model, 7)
    os.chdir(tmp_path if rank else tmp_path.parent)
    try:  # one checkpoint, spelled in two ways
        assert acc.load("step-2" if rank else f"{tmp_path.name}/step-2", model) == 2
    finally:
        os.chdir("/")
    assert_filled(model, 2)


@on_world(3)
def test_ranks_that_save_to_different_paths_are_refused(mesh, tmp_path):
    rank, model = mesh.get_rank(), built(mesh, 1)
    path = f"rank 1: this rank saves to {tmp_path}/of-1 and rank 0 to {tmp_path}/of-0; pass the same path"
    assert_refused(mesh, CheckpointError, path, lambda: acc.save(tmp_path / f"of-{rank}", model))
    keep, folder = "2" if rank else 0, "" if rank == 2 else tmp_path / "c"
    number = r"^rank 1, 2: keep is '2'; it takes a num"
    assert_refused(mesh, UsageError, number, lambda: acc.save(tmp_path / "c", model, keep=keep))
    assert_refused(mesh, UsageError, r"^rank 2: the path is '';", lambda: acc.save(folder, model))
    odd = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    odd.mkdir(exist_ok=True)
    (odd / "notes.txt").write_text("mine")
    dist.barrier(mesh.get_group())
    assert_refused(mesh, CheckpointError, r"notes\.txt", lambda: acc.save(odd, model))
    assert_refused(mesh, CheckpointError, r"notes\.txt", lambda: acc.save(odd, model, background=True).wait())
    assert [name for name in os.listdir(tmp_path) if name[0] in ".co"] == []
