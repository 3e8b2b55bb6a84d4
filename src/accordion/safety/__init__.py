"""Checks that watch a model in training: each file is one, attached to the engine from outside."""

from accordion.safety.liveness.links import report_crashes

__all__ = ["report_crashes"]
