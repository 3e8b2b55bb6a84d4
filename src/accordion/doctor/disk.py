"""Examine the disk of a folder: free space, and the speed of writes."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

from accordion.doctor.findings import Finding

BLOCK_BYTES, NUM_BLOCKS = 4 * 2**20, 16
SLOW = 100e6  # bytes a second; one spinning disk or a gigabit network is faster
USUAL = "a network disk gives 200 to 1,000 MB/s, one NVMe 1,000 and more"
OF_A_BILLION = 12e9  # bytes in a checkpoint of 10^9 parameters with AdamW's states, in float32
LITTLE_BYTES, LEAST_BYTES = 20 * 2**30, 2**30


def disk(folder: Path) -> list[Finding]:
    """Return two findings about the existing `folder`: the free space on its disk, and the speed of a write. To measure the
    speed, writes a temporary file; if that fails, the second finding is a problem."""
    stats = os.statvfs(folder)
    free, total = stats.f_bavail * stats.f_frsize, stats.f_blocks * stats.f_frsize
    little = free < LITTLE_BYTES
    space = Finding(
        check="disk.space",
        severity="problem" if free < LEAST_BYTES else "warning" if little else "ok",
        found=f"{folder.resolve()} has {free / 2**30:,.1f} of {total / 2**30:,.1f} GiB free",
        means="a checkpoint with AdamW takes 12 bytes a parameter; one that does not fit ends the run",
        do="free space, or use another folder; checkpoint.keep removes old checkpoints after a save." if little else "",
        data={"free_bytes": free, "total_bytes": total},
    )
    try:
        rate = write_rate(folder)
    except OSError as error:
        failed = Finding(
            check="disk.write",
            severity="problem",
            found=f"nothing can be written to {folder}: {error.strerror}",
            means="a run cannot begin: it writes its metrics and checkpoints there",
            do="free space, use another folder, or give this user write permission.",
        )
        return [space, failed]
    slow = rate < SLOW
    speed = Finding(
        check="disk.write",
        severity="warning" if slow else "ok",
        found=f"write: {rate / 1e6:,.0f} MB/s" + (f"; {USUAL}" if slow else ""),
        means=f"a checkpoint of a billion parameters with AdamW takes {OF_A_BILLION / rate / 60:,.1f} minutes",
        do="use a faster disk for --run.dir, save less often (--checkpoint.every), and check if others use the disk now."
        if slow
        else "",
        data={"bytes_per_s": rate},
    )
    return [space, speed]


def write_rate(folder: Path) -> float:
    """Write a file of 64 MiB in `folder`, flush it, remove it, and return the rate in bytes/s. Raises `OSError` if that fails."""
    block = os.urandom(BLOCK_BYTES)  # random, since some disks compress zeros
    began = time.perf_counter()
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        for _ in range(NUM_BLOCKS):
            file.write(block)
        os.fsync(file.fileno())
        return NUM_BLOCKS * BLOCK_BYTES / (time.perf_counter() - began)
