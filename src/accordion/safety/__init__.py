"""Checks that watch a model in training: each file is one, attached to the engine from outside."""

from accordion.safety.liveness.own_process import own_process

__all__ = ["own_process"]
