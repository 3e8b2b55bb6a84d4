"""Limits of the system on each process: open files, locked memory, shared memory."""

from __future__ import annotations

import os
import resource
from pathlib import Path

from accordion.doctor.findings import Finding

OPEN_FILES = (
    160  # of a rank: 15 to 18 when its group has formed (`accordion doctor --json`), and shards of data, logs, loaders
)
FILES_PER_RANK = 4  # sockets to each other rank, of two groups, and their threads' own
USUAL_FILES = 1024  # what systems give; shards of data and loaders' workers take hundreds
SHARED_BYTES = 2**30  # batches of a loader's workers, and NCCL's buffers between ranks of one machine
LEAST_SHARED_BYTES = 2**26  # what containers have where nobody says; NCCL needs more with eight ranks
UNLIMITED = resource.RLIM_INFINITY
MIB = 2**20


def open_files(num_ranks: int) -> Finding:
    """`num_ranks`: of the whole job, for each rank has a connection to each other one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = OPEN_FILES + FILES_PER_RANK * num_ranks
    few = soft != UNLIMITED and soft < needed
    little = few or (soft != UNLIMITED and soft < USUAL_FILES)
    most, said = "unlimited" if hard == UNLIMITED else hard, "no limit on" if soft == UNLIMITED else f"{soft:,}"
    return Finding(
        check="limits.open-files",
        severity="problem" if few else "warning" if little else "ok",
        found=f"{said} open files a process; a rank of {num_ranks} takes up to {needed}",
        means="a rank fails with `Too many open files`, mostly when it connects or opens data" if little else "enough",
        do=f"ulimit -n 65536 before the start (here at most {most}); LimitNOFILE= of a service, --ulimit nofile= of docker."
        if little
        else "",
        data={"soft": soft, "hard": hard, "needed": needed},
    )


def locked_memory(*, pins: bool, has_rdma: bool) -> Finding:
    """`pins`: ranks have an accelerator, to which host memory is pinned. `has_rdma`: cards of the network read memory."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limited = soft != UNLIMITED
    said = f"{soft / MIB:,.0f} MiB" if limited else "no limit"
    if limited and has_rdma:
        severity, means = (
            "problem",
            "cards of InfiniBand cannot register memory: NCCL fails, or falls back to TCP, many times slower",
        )
    elif limited and pins:
        severity, means = (
            "warning",
            "some drivers pin host memory within this limit alone; offload pins the optimizer's whole state",
        )
    elif limited:
        severity, means = "note", "it matters for accelerators and InfiniBand, of which this machine has none"
    else:
        severity, means = "ok", "memory can be pinned and registered"
    return Finding(
        check="limits.locked-memory",
        severity=severity,  # type: ignore[arg-type]
        found=f"locked memory of a process: {said}",
        means=means,
        do="ulimit -l unlimited before the start; LimitMEMLOCK=infinity of services, --ulimit memlock=-1 of docker."
        if limited
        else "",
        data={"soft": soft, "hard": hard},
    )


def rdma_cards(root: Path = Path("/sys/class/infiniband")) -> list[str]:
    """Names of the cards that read memory of the host by themselves."""
    return sorted(path.name for path in root.glob("*"))


def shared_memory(folder: Path = Path("/dev/shm")) -> Finding:
    """What processes of this machine can share."""
    check = "limits.shared-memory"
    if not folder.is_dir():
        return Finding(
            check=check,
            severity="warning",
            found=f"{folder} is not there",
            means="workers of a DataLoader cannot hand over batches, nor ranks of one machine messages by NCCL",
            do=f"mount a tmpfs at {folder}.",
        )
    stats = os.statvfs(folder)
    total, free = stats.f_blocks * stats.f_frsize, stats.f_bavail * stats.f_frsize
    short, little = free < LEAST_SHARED_BYTES, free < SHARED_BYTES
    return Finding(
        check=check,
        severity="problem" if short else "warning" if little else "ok",
        found=f"{folder} has {free / MIB:,.0f} of {total / MIB:,.0f} MiB free",
        means="workers of a DataLoader end with `Bus error`, and NCCL fails with `No space left on device`"
        if little
        else "enough",
        do="docker run --shm-size=8g or --ipc=host; elsewhere mount -o remount,size=8g "
        f"{folder}, and take away what ended jobs left there."
        if little
        else "",
        data={"total_bytes": total, "free_bytes": free},
    )
