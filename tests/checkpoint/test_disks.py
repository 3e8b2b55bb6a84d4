"""Real disks that are full, read-only or slow: small file systems, mounted where that is allowed."""

import errno
import os
from pathlib import Path

import pytest

from accordion.checkpoint import latest, load, save
from accordion.checkpoint.reading import verify
from accordion.errors import CheckpointError
from tests.support.checkpoints import filled, holds
from tests.support.disks import mounted, run
from tests.support.processes import run_python

MIB = 2**20
WIDTH = 3 * MIB // 8  # of a model of 3 MiB


@pytest.fixture(params=["tmpfs", "ext4"])
def disk(request, tmp_path):
    """A file system of about 8 or 16 MiB."""
    if request.param == "tmpfs":
        with mounted(tmp_path / "disk", "size=8m") as folder:
            yield folder
        return
    image, folder = tmp_path / "image", tmp_path / "disk"
    folder.mkdir()
    image.touch()
    os.truncate(image, 16 * MIB)
    run("mkfs.ext4", "-q", "-m", "0", "-O", "^has_journal", str(image))
    run("mount", "-o", "loop", str(image), str(folder))
    yield folder
    run("umount", "-l", str(folder))


def until_full(folder: Path, background: bool) -> int:
    """Save one checkpoint after another until one fails; return the number of the last good one."""
    for step in range(1, 20):
        try:
            save(folder / f"step-{step}", filled(step, WIDTH), background=background).wait()
        except CheckpointError as error:
            return step - 1 if os.strerror(errno.ENOSPC) in str(error) else 0
    raise AssertionError("the disk never filled")


@pytest.mark.parametrize("background", [False, True])
def test_full_disk_raises_and_keeps_older_checkpoints(disk, background):
    good = until_full(disk, background)
    assert good >= 2
    assert latest(disk) == str(disk / f"step-{good}")
    other = filled(0, WIDTH)
    load(latest(disk), other)
    assert all((param == good).all() for param in other.parameters())
    assert all(verify(disk / f"step-{step}") == [] for step in range(1, good + 1))
    there = {name for name in os.listdir(disk) if name != "lost+found"}
    # Nothing half-written is left, which would fill it for good.
    assert there == {f"step-{step}" for step in range(1, good + 1)}
    with pytest.raises(CheckpointError, match="No space left"):  # nor is the last one taken away for its successor
        save(disk / f"step-{good}", filled(50, WIDTH), background=background).wait()
    assert verify(disk / f"step-{good}") == []
    save(disk / f"step-{good + 1}", filled(1), background=background).wait()  # a smaller one finds its place
    assert latest(disk) == str(disk / f"step-{good + 1}")


def test_read_only_disk_raises(disk):
    save(disk / "step-1", filled(1))
    run("mount", "-o", "remount,ro", str(disk))
    with pytest.raises(CheckpointError, match="Read-only file system"):
        save(disk / "step-2", filled(2))
    with pytest.raises(CheckpointError, match="Read-only file system"):
        save(disk / "step-1", filled(2), background=True).wait()
    assert verify(disk / "step-1") == []
    assert latest(disk) == str(disk / "step-1")
    run("mount", "-o", "remount,rw", str(disk))
    save(disk / "step-2", filled(2))
    assert latest(disk) == str(disk / "step-2")


# -- programs that end during a save

ENDS = """
import os, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from accordion.checkpoint import save
from tests.support.checkpoints import filled

real, last_line = os.pwrite, threading.Event()

def late(handle, *words):
    last_line.wait()
    time.sleep(0.05)  # the program has come to its end by then: Python waits for the threads that save
    if "fails" in os.readlink(f"/proc/self/fd/{handle}"):
        raise OSError(28, "No space left on device")
    return ThreadPoolExecutor().submit(real, handle, *words).result()

os.pwrite = late
for name in ("good", "fails"):  # the first model is gone when the program ends
    save(f"{sys.argv[1]}/{name}", filled(3), background=True)
last_line.set()
"""


def test_program_finishes_its_saves_before_it_exits_and_logs_failures(tmp_path):
    """This includes storage that looks up addresses in thread pools."""
    ended = run_python("-c", ENDS, tmp_path)
    assert ended.returncode == 0
    assert holds(tmp_path / "good", 3)
    assert os.listdir(tmp_path) == ["good"]
    assert ended.stderr.count("the checkpoint in the background was not written") == 1
    assert "No space left" in ended.stderr
    assert "Traceback" not in ended.stderr
