"""Examine the disk of a folder: free space, and the speed of reads and writes."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from accordion.doctor.findings import Finding

MIB = 2**20
BLOCK_BYTES = 4 * MIB
MEASURED_BYTES = 256 * MIB
SYNC_BYTES = 32 * MIB  # bytes between two calls of fsync, so that a slow disk does not exceed `BUDGET_S` by much
BUDGET_S = 5.0  # seconds after which a measurement ends; a slow disk is measured with fewer bytes
SLOW = 100e6  # bytes a second; one spinning disk or a gigabit network is faster
USUAL = "a network disk gives 200 to 1,000 MB/s, one NVMe 1,000 and more"
OF_A_BILLION = 12e9  # bytes in a checkpoint of 10^9 parameters with AdamW's states, in float32
LITTLE_BYTES, LEAST_BYTES = 20 * 2**30, 2**30


def disk(folder: Path) -> list[Finding]:
    """Return the findings about the disk of `folder`, which must exist; written files are removed."""
    try:
        write, read = measured(folder, MEASURED_BYTES)
    except OSError as error:
        failed = Finding(
            check="disk.write",
            severity="problem",
            found=f"nothing can be written to {folder}: {error.strerror}",
            means="a run cannot begin: it writes its metrics and checkpoints there",
            do="free space, use another folder, or give this user write permission.",
        )
        return [space(folder), failed]
    return [space(folder), _speed("write", write), _speed("read", read)]


def space(folder: Path) -> Finding:
    stats = os.statvfs(folder)
    free, total = stats.f_bavail * stats.f_frsize, stats.f_blocks * stats.f_frsize
    little = free < LITTLE_BYTES
    return Finding(
        check="disk.space",
        severity="problem" if free < LEAST_BYTES else "warning" if little else "ok",
        found=f"{folder.resolve()} has {free / 2**30:,.1f} of {total / 2**30:,.1f} GiB free",
        means="a checkpoint with AdamW takes 12 bytes a parameter; one that does not fit is skipped, and the run continues",
        do="free space, or use another folder; checkpoint.keep removes old checkpoints after a save." if little else "",
        data={"free_bytes": free, "total_bytes": total},
    )


def measured(folder: Path, num_bytes: int) -> tuple[float, float]:
    """Return (written, read) bytes/s of a temporary file in `folder`, which has `num_bytes`, or fewer if writing them takes
    longer than `BUDGET_S`. Raises `OSError` if a write or read fails."""
    block = os.urandom(BLOCK_BYTES)  # random, since some disks compress zeros
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        handle = file.fileno()
        written, write = _rate(lambda at: os.pwrite(handle, block, at), num_bytes, lambda: os.fsync(handle))
        if hasattr(os, "posix_fadvise"):  # empties the page cache of the file
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        _, read = _rate(lambda at: len(os.pread(handle, BLOCK_BYTES, at)), written, lambda: None)
    return write, read


def _rate(block: Callable[[int], int], num_bytes: int, settle: Callable[[], None]) -> tuple[int, float]:
    """Call `block` until `num_bytes` are transferred, or for 5 s; return (bytes transferred, bytes per second). `block(offset)`
    transfers one block and returns its number of bytes; 0 ends the transfer. `settle()` waits until the bytes are on disk."""
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


def _speed(way: str, rate: float) -> Finding:
    slow = rate < SLOW
    return Finding(
        check=f"disk.{way}",
        severity="warning" if slow else "ok",
        found=f"{way}: {rate / 1e6:,.0f} MB/s" + (f"; {USUAL}" if slow else ""),
        means=f"a checkpoint of a billion parameters with AdamW takes {OF_A_BILLION / rate / 60:,.1f} minutes",
        do="use a faster disk for --run.dir, save less often (--checkpoint.every), and check if others use the disk now."
        if slow
        else "",
        data={"bytes_per_s": rate},
    )
