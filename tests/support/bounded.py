"""Calls in a process of their own with little memory."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.pool import run_fake


def run_bounded(act: Callable[..., Any], *args: Any) -> tuple[Any, int]:
    """Call `act(*args)` in a forked process that may map 1 GiB more; return its result and the growth of memory in MiB."""
    result: tuple[Any, int] = run_fake(1, 0, _bounded, act, args, timeout_s=600)
    return result


def _bounded(_: object, act: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, int]:
    before = _kib("VmHWM")
    resource.setrlimit(resource.RLIMIT_AS, (_kib("VmSize") * 1024 + 2**30,) * 2)
    return act(*args), (_kib("VmHWM") - before) // 1024


def _kib(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key))
