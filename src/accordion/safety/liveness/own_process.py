"""What is only done to a process that is ours, or whose user asks for it."""

from __future__ import annotations

_granted: list[bool] = []


def own_process() -> None:
    """Let Accordion enable `faulthandler` when a model is sharded, so that the other ranks name the line of a crash.

    `accordion run` calls this first. Under torchrun a program may call it before `shard`. If the program has enabled
    `faulthandler` itself, that stays as it is.
    """
    _granted.append(True)


def is_own_process() -> bool:
    """Return True after `own_process`."""
    return bool(_granted)
