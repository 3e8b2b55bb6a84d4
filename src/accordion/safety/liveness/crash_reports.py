"""The wish to have crashes reported, without which `faulthandler` is left alone."""

from __future__ import annotations

_wishes: list[bool] = []


def report_crashes() -> None:
    """Have `faulthandler` write the stacks of a crash to the other ranks of a model, which name its line.

    Call it before `shard`; `accordion run` does. If the program has enabled `faulthandler` itself, that stays as it is.
    """
    _wishes.append(True)


def reports_crashes() -> bool:
    """Return True after `report_crashes`."""
    return bool(_wishes)
