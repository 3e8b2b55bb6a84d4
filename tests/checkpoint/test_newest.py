"""The newest checkpoint and the old ones: which one is chosen, which are removed, and the report on those that are skipped."""

import errno
import os
import shutil

import pytest

from accordion.checkpoint import latest, load, save
from accordion.checkpoint.command import inspect
from accordion.checkpoint.convert import export
from accordion.checkpoint.storage.folders import folder_at
from accordion.checkpoint.storage.local import Local
from accordion.errors import CheckpointError, UsageError
from tests.checkpoint.failing import failing
from tests.support.checkpoints import filled, names

# -- removing old ones


def test_failed_removal_raises_once_and_is_repeated_later(tmp_path):
    for step in (1, 2):
        save(tmp_path / f"step-{step}", filled(step))
    with failing(os, "unlink", errno.EPERM, lambda path: "rank-" in str(path)):
        with pytest.raises(CheckpointError, match=r"step-3 is written, but not all older ones are removed: .*step-1"):
            save(tmp_path / "step-3", filled(3), keep=2)
        assert latest(tmp_path) == str(tmp_path / "step-3")
        assert [name.rpartition(".")[2] for name in names(tmp_path)] == ["tmp", "step-2", "step-3"]
        save(tmp_path / "step-3", filled(3), keep=3)  # tries again without an error
    (tmp_path / ".theirs.01234567.tmp").mkdir()
    (tmp_path / ".theirs.01234567.tmp" / "thesis.tex").write_text("...")
    save(tmp_path / "step-4", filled(4), keep=3)
    assert names(tmp_path) == [".theirs.01234567.tmp", "step-2", "step-3", "step-4"]


def test_keep_removes_leftovers_of_killed_jobs(tmp_path):
    save(tmp_path / "step-1", filled(1))
    shutil.copytree(tmp_path / "step-1", tmp_path / ".step-0.01234567.tmp")
    begun = folder_at(tmp_path / "step-2").begin("01234567")
    (begun.path / "rank-00000.safetensors").touch()
    save(tmp_path / "step-3", filled(3), keep=2)
    assert (begun.path / "rank-00000.safetensors").exists()  # its job is running
    begun.discard()
    assert names(tmp_path) == ["step-1", "step-3"]


def torn(path):
    os.truncate(path / "rank-00000.safetensors", 9)


def with_notes(path):
    (path / "notes.txt").write_text("mine")


KEEPS = [  # the checkpoints before, what is done to some, the one to save, how many to keep, and those that are left
    (["step-100", "step-200"], {}, "step-5", 1, ["step-100", "step-200", "step-5"]),
    (["step-100", "step-200", "step-5"], {}, "step-6", 1, ["step-100", "step-200", "step-6"]),
    (["step-100", "step-200", "step-6"], {}, "step-300", 1, ["step-300"]),
    (["step-1", "step-2"], {"step-1": with_notes}, "step-3", 1, ["step-1", "step-3"]),
    (  # torn ones do not count as kept, and neither they nor one whose name differs in more than the number are removed
        ["step-1", "step-2", "step-3", "step-10", "best", "step-11", "step-12"],
        {"step-11": torn, "step-12": torn},
        "step-20",
        2,
        ["best", "step-10", "step-11", "step-12", "step-20"],
    ),
]


@pytest.mark.parametrize(("there", "changes", "saved", "keep", "left"), KEEPS)
def test_keep_leaves_the_newest_good_checkpoints_and_those_of_others(tmp_path, there, changes, saved, keep, left):
    """The saved one and newer ones are never removed."""
    for name in there:
        save(tmp_path / name, filled(1))
    for name, change in changes.items():
        change(tmp_path / name)
    save(tmp_path / saved, filled(2), keep=keep)
    assert names(tmp_path) == left
    assert latest(tmp_path) == str(tmp_path / max(left, key=lambda name: int("0" + name[5:])))


@pytest.mark.parametrize("keep", ["2", 2.0, True, -1, None])
def test_keep_must_be_a_number(tmp_path, keep):
    with pytest.raises(UsageError, match=r"keep is .*; it takes a number of checkpoints"):
        save(tmp_path / "c", filled(1), keep=keep)
    assert names(tmp_path) == []


# -- choosing the newest


def test_latest_raises_if_the_newest_cannot_be_read(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path / f"step-{step}", filled(step))
    with failing(Local, "read", errno.ESTALE, lambda folder, name: folder.path.name == "step-3"):
        with pytest.raises(
            CheckpointError, match=r"step-3 cannot be read \(Stale file handle\), and it may be the newest"
        ):
            latest(tmp_path)
        for look in (inspect, lambda path: load(path, filled(0)), lambda path: export(path, tmp_path / "out")):
            with pytest.raises(CheckpointError, match=r"step-3 cannot be read: Stale file handle"):
                look(tmp_path / "step-3")
    with failing(Local, "read", errno.ESTALE, lambda folder, name: folder.path.name == "step-2"):
        assert latest(tmp_path) == str(tmp_path / "step-3")  # an older one decides nothing


def test_latest_names_the_damaged_checkpoints_it_skips(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path / f"step-{step}", filled(step))
    os.truncate(tmp_path / "step-3" / "manifest.json", 200)
    (tmp_path / "step-2" / "manifest.json").unlink()
    (tmp_path / "step-9").mkdir()
    (tmp_path / "step-400").mkdir()  # nothing tells that it was a checkpoint
    (tmp_path / "step-400" / "manifest.json").write_text('{"schema": 1')
    (tmp_path / ".step-500.tmp").mkdir()
    (tmp_path / "step-600").write_text("a file")
    with pytest.warns(
        UserWarning, match=r"step-1 is the newest complete .*step-3/manifest.json cannot.*step-2 .* no man"
    ) as warned:
        assert latest(tmp_path) == str(tmp_path / "step-1")
    assert len(warned) == 1
    assert "step-400" not in str(warned[0].message)
    os.truncate(tmp_path / "step-1" / "manifest.json", 200)
    with pytest.raises(CheckpointError, match=r"there are checkpoints, and none is complete: .*step-1/manifest"):
        latest(tmp_path)
    for step in (1, 2, 3):
        shutil.rmtree(tmp_path / f"step-{step}")
    assert latest(tmp_path) is None


def test_the_newest_has_the_largest_number_or_the_latest_time(tmp_path):
    assert latest(tmp_path / "absent") is None
    for age, name in enumerate(("a", "c", "b")):
        save(tmp_path / name, filled(1))
        os.utime(tmp_path / name / "manifest.json", (age, age))
    assert latest(tmp_path) == str(tmp_path / "b")
    for name in ("step-9", "step-100", "step-20", "best"):
        save(tmp_path / name, filled(1))
    assert latest(str(tmp_path)) == str(tmp_path / "step-100")


def test_missing_checkpoints_and_files_are_refused(tmp_path):
    with pytest.raises(UsageError, match="the path is None; if `latest` returned it, there is no checkpoint yet"):
        load(latest(tmp_path), filled(1))
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "file").write_text("...")
    for act in (latest, inspect, lambda path: load(path, filled(1)), lambda path: export(path, tmp_path / "out")):
        for name in ("loop", "file", "file/below"):
            with pytest.raises(CheckpointError, match=str(tmp_path)):
                act(tmp_path / name)
    assert latest(tmp_path) is None  # nor is a loop in it a checkpoint
    save(tmp_path / "c", filled(1))
    assert latest(tmp_path) == str(tmp_path / "c")


def test_lost_and_found_is_ignored(tmp_path):
    (tmp_path / "lost+found").mkdir()
    with failing(Local, "sizes", errno.EACCES, lambda folder: folder.path.name == "lost+found"):
        assert latest(tmp_path) is None


def test_load_of_other_formats_names_the_convert_command(tmp_path):
    save(tmp_path / "c", filled(1))
    for kind, error in (
        ("torch", r"torch is no checkpoint: it is a file.* `accordion checkpoint convert`"),
        ("hf", r"no manifest\.json, but safetensors files; `accordion checkpoint convert`"),
        ("dcp", r"of torch\.distributed\.checkpoint; read it into the sharded model with"),
    ):
        export(tmp_path / "c", tmp_path / kind, kind)
        with pytest.raises(CheckpointError, match=error):
            load(tmp_path / kind, filled(1))
