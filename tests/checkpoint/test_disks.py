"""Real disks that are full, read-only or slow: small file systems, mounted where that is allowed."""

import errno
import fcntl
import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from accordion.checkpoint import latest, load, save
from accordion.checkpoint.inspect import verify
from accordion.checkpoint.storage import direct as files
from accordion.errors import CheckpointError

MIB = 2**20


def filled(value, num_bytes=3 * MIB):
    """Return a model of two tensors, so that a disk may be full between them or within one."""
    model = nn.Module()
    for name in ("a", "b"):
        setattr(model, name, nn.Parameter(torch.full((num_bytes // 8,), float(value))))
    return model


def run(*words):
    subprocess.run(words, check=True, capture_output=True, text=True)


def make_ext4(image: Path, folder: Path) -> None:
    with image.open("wb") as file:
        file.truncate(16 * MIB)
    run("mkfs.ext4", "-q", "-m", "0", "-O", "^has_journal", str(image))
    run("mount", "-o", "loop", str(image), str(folder))


@pytest.fixture(params=["tmpfs", "ext4"])
def disk(request, tmp_path):
    """A file system of about 8 or 16 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    try:
        if request.param == "tmpfs":
            run("mount", "-t", "tmpfs", "-o", "size=8m", "accordion", str(folder))
        else:
            make_ext4(tmp_path / "image", folder)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"{request.param} cannot be mounted here: {getattr(error, 'stderr', error)}")
    yield folder
    run("umount", "-l", str(folder))


def until_full(folder: Path, background: bool) -> int:
    """Save one checkpoint after another until one fails; return the number of the last good one."""
    for step in range(1, 20):
        try:
            save(folder / f"step-{step}", filled(step), background=background).wait()
        except CheckpointError as error:
            return step - 1 if os.strerror(errno.ENOSPC) in str(error) else 0
    raise AssertionError("the disk never filled")


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("past_cache", [False, True])
def test_full_disk_raises_and_keeps_older_checkpoints(disk, monkeypatch, background, past_cache):
    monkeypatch.setattr(files, "BUFFER_BYTES", 2**16 if past_cache else 2**22)
    good = until_full(disk, background)
    assert good >= 2
    assert latest(disk) == str(disk / f"step-{good}")
    other = filled(0)
    load(latest(disk), other)
    assert (other.a == good).all()
    assert (other.b == good).all()
    assert all(verify(disk / f"step-{step}") == [] for step in range(1, good + 1))
    held = {name for name in os.listdir(disk) if name != "lost+found"}
    assert held == {
        f"step-{step}" for step in range(1, good + 1)
    }  # nothing half-written is left, which would fill it for good
    with pytest.raises(CheckpointError, match="No space left"):  # nor is the last one taken away for its successor
        save(disk / f"step-{good}", filled(50), background=background).wait()
    assert verify(disk / f"step-{good}") == []
    save(disk / f"step-{good + 1}", filled(1, 8), background=background).wait()  # a smaller one finds its place
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


# -- past the system's cache


@pytest.fixture
def calls(monkeypatch):
    """Record each write to the disk as (bytes, True if it bypasses the cache), with small buffers."""
    seen, real = [], os.pwrite

    def pwrite(handle, data, at):
        seen.append((len(data), bool(fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_DIRECT)))
        return real(handle, data, at)

    monkeypatch.setattr(files, "BUFFER_BYTES", 2**14)
    monkeypatch.setattr(os, "pwrite", pwrite)
    return seen


def written(path, num_bytes, steps=(1, 4096, 7, 2**15)):
    """Write `num_bytes` in parts of odd lengths; return the bytes that the file should have."""
    whole = memoryview(os.urandom(num_bytes))
    with files.created(path, num_bytes) as file:
        left, lengths = whole, itertools.cycle(steps)
        while left:
            step = left[: next(lengths)]
            file.write(step)
            left = left[len(step) :]
    return bytes(whole)


@pytest.mark.parametrize("num_bytes", [0, 1, 4096, 2**14, 2**14 + 1, 5 * 2**14 - 1, 5 * 2**14, 9 * 2**14 + 4097])
def test_file_of_any_length_has_the_written_bytes(tmp_path, calls, num_bytes):
    assert written(tmp_path / "f", num_bytes) == (tmp_path / "f").read_bytes()
    if any(direct for _, direct in calls):
        assert num_bytes > 2**14  # a small one is not worth it
        assert all(length % 4096 == 0 for length, _ in calls)


def takes_direct_access(folder):
    (folder / "probe").touch()
    try:
        os.close(os.open(folder / "probe", os.O_WRONLY | os.O_DIRECT))
    except OSError:
        return False
    return True


def test_large_file_bypasses_the_page_cache(tmp_path, calls):
    folder = tmp_path / "ext4"
    folder.mkdir()
    try:
        make_ext4(tmp_path / "image", folder)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"ext4 cannot be mounted here: {getattr(error, 'stderr', error)}")
    try:
        if not takes_direct_access(folder):
            pytest.skip("this system's ext4 takes no direct access")
        assert written(folder / "f", 5 * 2**14 + 3) == (folder / "f").read_bytes()
        assert sorted(calls) == [(4096, True), *[(2**14, True)] * 5]  # four threads write
        with pytest.raises(OSError, match="No space left"), files.created(folder / "g", 2**30):
            raise AssertionError("it has no room, and says so before anything is written")
    finally:
        run("umount", "-l", str(folder))


@pytest.mark.parametrize("short", [False, True])
def test_disk_without_direct_access_is_written_through_the_cache(tmp_path, calls, monkeypatch, short):
    seen = os.pwrite

    def refuses(handle, data, at):
        if fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no")
        return seen(handle, data[:1000] if short else data, at)

    monkeypatch.setattr(os, "pwrite", refuses)
    assert written(tmp_path / "f", 9 * 2**14 + 5) == (tmp_path / "f").read_bytes()
    assert not any(direct for _, direct in calls)


@pytest.mark.parametrize("turn", [1, 3, 9])
def test_failed_write_raises(tmp_path, calls, monkeypatch, turn):
    seen = os.pwrite

    def fails(handle, data, at):
        if at >= (turn - 1) * 2**14:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return seen(handle, data, at)

    monkeypatch.setattr(os, "pwrite", fails)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        written(tmp_path / "f", 9 * 2**14)
    assert len(calls) == turn - 1


ENDS = """
import os, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
import torch
from torch import nn
from accordion.checkpoint import save
from accordion.checkpoint.storage import direct

real, last_line = os.pwrite, threading.Event()

def late(*words):
    last_line.wait()
    time.sleep(0.05)  # the program has come to its end by then: Python waits for the writers' threads
    return real(*words)

os.pwrite, direct.BUFFER_BYTES = late, 2**18
model = nn.Module()
model.a = nn.Parameter(torch.full((2**20,), 3.0))
save(sys.argv[1], model, background=True)
last_line.set()
"""
IN_A_POOL = ENDS.replace("return real(*words)", "return ThreadPoolExecutor().submit(real, *words).result()")


def test_program_finishes_its_save_before_it_exits(tmp_path):
    """This includes storage that looks up addresses in thread pools."""
    subprocess.run([sys.executable, "-c", IN_A_POOL, tmp_path / "c"], check=True, timeout=300)
    model = nn.Module()
    model.a = nn.Parameter(torch.zeros(2**20))
    load(tmp_path / "c", model)
    assert (model.a == 3).all()


def test_save_that_fails_while_the_program_ends_is_logged(tmp_path):
    fails = ENDS.replace("return real(*words)", 'raise OSError(28, "No space left on device")')
    ended = subprocess.run(
        [sys.executable, "-c", fails, tmp_path / "c"], check=True, timeout=300, capture_output=True, text=True
    )
    assert ended.stderr.count("the checkpoint in the background was not written") == 1
    assert "No space left" in ended.stderr
    assert "Traceback" not in ended.stderr
