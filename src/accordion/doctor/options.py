"""What `accordion doctor` is told, and the limits of each number."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from accordion.errors import UsageError

LIMITS: Mapping[str, tuple[int, int]] = {
    "nproc": (0, 2**16),
    "disk_mib": (8, 2**20),
    "message_mib": (1, 2**12),
    "timeout_s": (5, 24 * 3600),
}
LAST_PORT = 65535


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """Look for what is wrong with this machine, and with ranks on it: each finding with what it means and what to do.

    Args:
        nproc: ranks on this machine; 0: one for each accelerator found, else 2
        device: `auto` takes the accelerators of this machine where there are some; `cpu`, or a type of device
        dir: folder whose disk is measured, where runs and checkpoints will be; what is written there is taken away again
        master: HOST:PORT where ranks of several machines will meet; without it MASTER_ADDR and MASTER_PORT, else torchrun's own
            port of this machine
        disk_mib: written and read in `dir`, with and without the page cache
        message_mib: gathered and exchanged between the ranks
        timeout_s: seconds after which ranks that do not answer are ended
        json: print one JSON object
    """

    nproc: int = 0
    device: str = "auto"
    dir: str = "."
    master: str | None = None
    disk_mib: int = 256
    message_mib: int = 64
    timeout_s: int = 120
    json: bool = False

    def check(self) -> None:
        """What can be said before anything is looked at. Raises `UsageError` naming the flag, the value and the limit."""
        for key, (least, most) in LIMITS.items():
            value = getattr(self, key)
            if not least <= value <= most:
                raise UsageError(f"--{key.replace('_', '-')} is {value}; it must be between {least} and {most}.")
        if not self.dir.strip() or "\0" in self.dir:
            raise UsageError("--dir is empty; give a folder.")
        if not Path(self.dir).is_dir():
            raise UsageError(f"--dir {self.dir!r} is no folder; name one that exists, on the disk that runs will use.")
        if self.master is not None:
            host_and_port("--master", self.master)


def host_and_port(name: str, text: str) -> tuple[str, int]:
    """`gpu01:29500` -> ("gpu01", 29500); an IPv6 address stands in brackets. Raises `UsageError`; `name`: whose value it is."""
    host, colon, port = text.rpartition(":")
    digits = port.isascii() and port.isdecimal() and len(port) <= 5
    if not colon or not host.strip("[]") or not digits or not 0 < int(port) <= LAST_PORT:
        raise UsageError(f"{name} is {text!r}; it takes HOST:PORT, with a port between 1 and {LAST_PORT}.")
    return host.strip("[]"), int(port)
