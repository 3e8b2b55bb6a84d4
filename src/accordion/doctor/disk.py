"""The disk of a folder: space, locks, and what it reads and writes with and without the page cache."""

from __future__ import annotations

import fcntl
import mmap
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from accordion.doctor.findings import Finding

DIRECT: int = getattr(os, "O_DIRECT", 0)
MIB = 2**20
BLOCK_BYTES = 4 * MIB
MEASURED_BYTES = 256 * MIB
SYNC_BYTES = 32 * MIB  # between two waits for the disk, so that a slow one is noticed within the time below
BUDGET_S = 5.0  # of one measurement; a slow disk is measured with less
SLOW = 100e6  # bytes a second, below what one spinning disk or a gigabit network gives
USUAL = "a network disk gives 200 to 1,000 MB/s, one NVMe 1,000 and more"
OF_A_BILLION = 12e9  # bytes in a checkpoint of 10^9 parameters with AdamW's states, in float32
LITTLE_BYTES, LEAST_BYTES = 20 * 2**30, 2**30
IN_MEMORY = ("tmpfs", "ramfs")


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Bytes a second."""

    write: float
    read: float


def disk(folder: Path) -> list[Finding]:
    """Return the findings about the disk of `folder`, which exists. No file stays there."""
    found = [space(folder)]
    try:
        plain = measured(folder, MEASURED_BYTES, direct=False)
    except OSError as error:
        return [
            *found,
            Finding(
                check="disk.write",
                severity="problem",
                found=f"nothing can be written to {folder}: {error.strerror}",
                means="a run cannot begin: it keeps its metrics and checkpoints there",
                do="make room, take another folder, or let this user write there.",
            ),
        ]
    found.append(_speed("disk.write", "through the page cache, and waited for", plain.write, "written"))
    found.append(_speed("disk.read", "through the page cache, which was emptied of it", plain.read, "read"))
    found += _direct(folder)
    found.append(locks(folder))
    return found


def space(folder: Path) -> Finding:
    stats, kind = os.statvfs(folder), file_system(folder)
    free, total = stats.f_bavail * stats.f_frsize, stats.f_blocks * stats.f_frsize
    short, little = free < LEAST_BYTES, free < LITTLE_BYTES
    said = f"{folder.resolve()} ({kind}) has {free / 2**30:,.1f} of {total / 2**30:,.1f} GiB free"
    data = {"free_bytes": free, "total_bytes": total, "file_system": kind}
    if kind in IN_MEMORY:
        return Finding(
            check="disk.space",
            severity="warning",
            found=said,
            means="it is held in memory: checkpoints take the memory of the ranks, and are gone when the machine stops",
            do="give --dir a folder on a disk, and train there.",
            data=data,
        )
    return Finding(
        check="disk.space",
        severity="problem" if short else "warning" if little else "ok",
        found=said,
        means="a checkpoint with AdamW takes 12 bytes a parameter; one that does not fit is given up, and the run goes on without"
        if little
        else "12 bytes a parameter for each checkpoint with AdamW",
        do="make room, or take another folder; accordion checkpoint prune takes old checkpoints away."
        if little
        else "",
        data=data,
    )


def file_system(folder: Path, mounts: Path = Path("/proc/self/mounts")) -> str:
    """Its kind, as the system names it: ext4, nfs4, tmpfs."""
    try:
        lines = [line.split() for line in mounts.read_text(errors="replace").splitlines()]
    except OSError:
        return "unknown file system"
    at = os.path.realpath(folder)
    holding = [(line[1].replace("\\040", " "), line[2]) for line in lines if len(line) > 2]
    fits = [(len(point), i, kind) for i, (point, kind) in enumerate(holding) if _is_below(at, point)]
    return max(fits)[2] if fits else "unknown file system"


def _is_below(path: str, point: str) -> bool:
    return path == point or path.startswith(point.rstrip("/") + "/")


def measured(folder: Path, num_bytes: int, *, direct: bool) -> Speed:
    """Write and read so many bytes, fewer where that takes long. Raises `OSError` where the folder does not take it."""
    handle, name = tempfile.mkstemp(prefix=".accordion-doctor-", dir=folder)
    try:
        if direct:
            os.close(handle)
            handle = os.open(name, os.O_RDWR | DIRECT)
    finally:
        with suppress(OSError):
            os.unlink(name)
    buffer = mmap.mmap(-1, BLOCK_BYTES)  # begins at a page, as direct access wants it
    try:
        buffer.write(os.urandom(BLOCK_BYTES))  # a disk that compresses takes zeros for nothing
        written, write = _rate(lambda at: os.pwrite(handle, buffer, at), num_bytes, lambda: os.fsync(handle))
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        _, read = _rate(lambda at: os.preadv(handle, [buffer], at), written, lambda: None)
    finally:
        buffer.close()
        os.close(handle)
    return Speed(write=write, read=read)


def _rate(block: Callable[[int], int], num_bytes: int, settle: Callable[[], None]) -> tuple[int, float]:
    """How many bytes were moved, and how many a second. `block`: moves one at an offset. `settle`: waits for the disk."""
    done, began = 0, time.perf_counter()
    while done < num_bytes and time.perf_counter() - began < BUDGET_S:
        count = block(done)
        if count <= 0:
            break
        done += count
        if done % SYNC_BYTES == 0:
            settle()
    settle()
    return done, done / max(1e-9, time.perf_counter() - began)


def _speed(check: str, how: str, rate: float, done: str) -> Finding:
    slow = rate < SLOW
    minutes = OF_A_BILLION / rate / 60
    return Finding(
        check=check,
        severity="warning" if slow else "ok",
        found=f"{rate / 1e6:,.0f} MB/s {done} {how}" + (f"; {USUAL}" if slow else ""),
        means=f"a checkpoint of a billion parameters with AdamW takes {minutes:,.1f} minutes"
        + (", and training waits for it where it comes often" if slow else ""),
        do="take a faster disk for --run.dir, save less often (--checkpoint.every), and see whether others use the disk now."
        if slow
        else "",
        data={"bytes_per_s": rate},
    )


def _direct(folder: Path) -> list[Finding]:
    """Past the page cache, as offloaded state is read and written."""
    try:
        if not DIRECT:
            raise OSError(0, "this system has no O_DIRECT")
        speed = measured(folder, MEASURED_BYTES, direct=True)
    except OSError as error:
        return [
            Finding(
                check="disk.direct",
                severity="note",
                found=f"{folder}: no access past the page cache (O_DIRECT): {error.strerror}",
                means="offload to this disk works through the page cache, which takes host memory and time",
                do="take a folder on a local disk for --shard.offload optimizer=disk:/folder, if states are to rest on disk.",
            )
        ]
    how = "past the page cache (O_DIRECT)"
    return [
        _speed("disk.direct-write", how, speed.write, "written"),
        _speed("disk.direct-read", how, speed.read, "read"),
    ]


def locks(folder: Path) -> Finding:
    """Whether a second job in one run folder would be noticed at once."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return Finding(
            check="disk.locks",
            severity="note",
            found=f"{folder} has no file locks: {error.strerror}",
            means="that two jobs use one run folder is told by signs of life alone, which takes up to 20 seconds at a start",
            do="nothing; or mount it with locks (-o flock of Lustre, a lock server of NFS).",
        )
    return Finding(
        check="disk.locks",
        severity="ok",
        found=f"{folder} has file locks",
        means="a second job in a run folder is refused at once",
    )
