"""Paths of saves: files of others, links, other jobs, readers, impossible paths, and ranks that were given different ones."""

import errno
import fcntl
import os
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import accordion as acc
from accordion.checkpoint import claims, latest, load, save
from accordion.checkpoint.command import inspect
from accordion.checkpoint.reading import verify
from accordion.checkpoint.storage.folders import folder_at
from accordion.errors import AccordionError, CheckpointError, UsageError
from tests.checkpoint.failing import failing
from tests.devices import here
from tests.support.checkpoints import filled, holds, names, saving_meanwhile
from tests.support.checks import everyone
from tests.support.disks import mounted
from tests.support.ranked import on_world

# -- what a save may replace


@pytest.mark.usefixtures("no_waiting")
@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("thesis.tex", r"c exists and is no checkpoint, it holds thesis\.tex"),
        (
            "manifest.json",
            r"is no checkpoint, it holds manifest\.json; pass another path, a folder in it for example, or",
        ),
        ("notes.txt", r"c holds notes\.txt beside a checkpoint"),
    ],
)
def test_save_replaces_nothing_but_checkpoints(tmp_path, name, error):
    (tmp_path / "c").mkdir()
    if name == "notes.txt":
        save(tmp_path / "c", filled(1))
    (tmp_path / "c" / name).write_text('{"name": "a page"}')
    before = {path: path.read_bytes() for path in (tmp_path / "c").iterdir()}
    with pytest.raises(CheckpointError, match=error):
        save(tmp_path / "c", filled(2))
    assert {path: path.read_bytes() for path in (tmp_path / "c").iterdir()} == before
    (tmp_path / "file").write_text("mine")
    for path, why in (("file", "is no checkpoint but a file"), ("file/c", "Not a dir")):
        with pytest.raises(CheckpointError, match=why):
            save(tmp_path / path, filled(1))
    assert (tmp_path / "file").read_text() == "mine"
    assert names(tmp_path) == ["c", "file"]


def test_file_put_into_a_checkpoint_during_a_save_stays(tmp_path, monkeypatch):
    save(tmp_path / "c", filled(1))
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: ((tmp_path / "c" / "notes.txt").write_text("mine"), fsync(handle)))
    with pytest.raises(CheckpointError, match=r"c holds notes\.txt"):
        save(tmp_path / "c", filled(2))
    assert (tmp_path / "c" / "notes.txt").read_text() == "mine"
    assert names(tmp_path) == ["c"]


def test_empty_folder_and_checkpoint_even_if_damaged_are_replaced(tmp_path):
    (tmp_path / "c").mkdir()
    for damage in (lambda path: None, lambda path: os.truncate(path, 50), lambda path: path.write_text('{"schema":9}')):
        save(tmp_path / "c", filled(1))
        damage(tmp_path / "c" / "manifest.json")
        save(tmp_path / "c", filled(2))
        assert holds(tmp_path / "c", 2)
        assert names(tmp_path) == ["c"]


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("", "the path is ''; pass a string"),
        ("a\0b", "the path is 'a.*b'; pass a string"),
        (3, "the path is 3; pass a string"),
        (None, "the path is None"),
        ("/", "/ (is a mount point|exists and is no checkpoint)"),
        ("x" * 250, "File name too long"),
    ],
)
def test_impossible_paths_are_refused(tmp_path, monkeypatch, path, why):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AccordionError, match=why):
        save(path, filled(1))
    assert names(tmp_path) == []


def test_a_mount_point_is_refused_by_name(tmp_path):
    with mounted(tmp_path / "disk", "size=8m") as disk:
        with pytest.raises(
            CheckpointError, match="disk is a mount point, which cannot be renamed; pass another path, a folder in it"
        ):
            save(disk, filled(1))
        save(disk / "c", filled(1))


# -- two jobs


def at_call(monkeypatch, of, name, number, act):
    """Call `act` before the call of this number of the function `of.name`, from 1 on."""
    count, function = [0], getattr(of, name)

    def called(*words, **more):
        count[0] += 1
        if count[0] == number:
            monkeypatch.setattr(of, name, function)
            act()
        return function(*words, **more)

    monkeypatch.setattr(of, name, called)


def test_rank_without_the_folder_of_the_first_rank_raises(tmp_path):
    folder = folder_at(tmp_path / "c").begun("0123abcd")
    with pytest.raises(CheckpointError, match="does not exist on this rank"), folder.create("a.safetensors"):
        pass


@pytest.mark.parametrize(
    ("call", "number", "is_there"), [("fsync", 1, False), ("rename", 1, True), ("rename", 2, True)]
)
def test_second_job_under_a_name_is_refused_at_once(tmp_path, monkeypatch, call, number, is_there):
    monkeypatch.setattr(claims, "LOCK_TIMEOUT_S", 0.0)
    if is_there:
        save(tmp_path / "last", filled(1))

    def another():
        busy = f"is being saved or removed by process {os.getpid()} on .*; no other job may save under this name"
        with pytest.raises(CheckpointError, match=busy):
            save(tmp_path / "last", filled(3))

    at_call(monkeypatch, os, call, number, another)
    save(tmp_path / "last", filled(2))
    assert holds(tmp_path / "last", 2)
    assert names(tmp_path) == ["last"]


def test_second_job_waits_a_little_for_the_first(tmp_path):
    begun = folder_at(tmp_path / "last").begin("0123abcd")
    timer = threading.Timer(0.3, begun.discard)
    timer.start()
    save(tmp_path / "last", filled(2))
    timer.join()
    assert names(tmp_path) == ["last"]


def test_without_locks_a_save_fails_if_another_job_takes_its_folder(tmp_path, monkeypatch):
    with failing(fcntl, "flock", errno.ENOLCK):
        save(tmp_path / "last", filled(1))
        at_call(monkeypatch, os, "rename", 1, lambda: save(tmp_path / "last", filled(3)))
        with pytest.raises(CheckpointError, match="was saved by another job at the same time"):
            save(tmp_path / "last", filled(2))
    assert holds(tmp_path / "last", 3)
    assert names(tmp_path) == ["last"]


def test_checkpoint_renamed_by_a_killed_save_is_read_and_renamed_back(tmp_path):
    save(tmp_path / "last", filled(1))
    (tmp_path / "last").rename(tmp_path / ".last.old")
    assert holds(tmp_path / "last", 1)
    assert latest(tmp_path) == str(tmp_path / "last")
    with pytest.raises(CheckpointError, match="without state"):
        load(tmp_path / "last", filled(1), state={"a": torch.amp.GradScaler("cpu")})
    begun = folder_at(tmp_path / "last").begin("0123abcd")
    assert "last" in names(tmp_path)
    begun.discard()
    assert holds(tmp_path / "last", 1)
    save(tmp_path / "last", filled(2))
    assert names(tmp_path) == ["last"]
    assert holds(tmp_path / "last", 2)


# -- readers beside writers


@pytest.mark.parametrize("times", [50, pytest.param(400, marks=pytest.mark.slow)])
def test_readers_see_no_fault_while_checkpoints_are_overwritten_and_removed(tmp_path, times):
    width, errors = 3000, []

    def saves(value):
        save(tmp_path / "last", filled(value, width))
        save(tmp_path / "steps" / f"step-{value}", filled(value), keep=1)

    saves(0)
    model = filled(-1, width)
    with saving_meanwhile(saves):
        for _ in range(times):
            try:
                load(tmp_path / "last", model)
            except CheckpointError as error:
                errors.append(str(error))
            else:
                assert len({float(value) for param in model.parameters() for value in param.detach().unique()}) == 1
            assert verify(tmp_path / "last") == [] or errors.append("verify")
            inspect(tmp_path / "last")
            assert latest(tmp_path) == str(tmp_path / "last")
            assert latest(tmp_path / "steps") is not None
    assert [text for text in errors if "again and again" not in text] == []
    assert len(errors) < times / 5


# -- names and words


def test_names_that_utf8_cannot_encode_are_escaped_in_errors(tmp_path):
    """Errors must be encodable, because they are printed and sent to other ranks."""
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    save(path, filled(1))
    assert holds(path, 1)
    (path / "rank-00000.safetensors").unlink()
    with pytest.raises(CheckpointError) as caught:
        load(path, filled(1))
    str(caught.value).encode()
    odd = nn.ParameterDict({"a\ud800": nn.Parameter(torch.ones(2))})
    save(tmp_path / "odd", odd)
    with pytest.raises(AccordionError) as caught:
        load(tmp_path / "odd", filled(1))
    str(caught.value).encode()


# -- ranks with different paths or arguments: all raise the same error, none waits, and nothing changes


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
