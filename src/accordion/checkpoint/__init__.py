"""Checkpoints of safetensors and JSON that are complete or absent, and that any number of ranks can load."""

from accordion.checkpoint.background import Saving
from accordion.checkpoint.contents import RandomState
from accordion.checkpoint.load import load
from accordion.checkpoint.prune import latest
from accordion.checkpoint.save import save

__all__ = ["RandomState", "Saving", "latest", "load", "save"]
