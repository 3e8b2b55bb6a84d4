"""Checks of a model in training. Each file is one check; most are observers of the engine."""

from accordion.safety.liveness.links import report_crashes

__all__ = ["report_crashes"]
