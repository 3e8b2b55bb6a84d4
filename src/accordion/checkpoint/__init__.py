"""Checkpoints of safetensors and JSON that are complete or absent, and that any number of ranks can load."""

from accordion.checkpoint.load import latest, load
from accordion.checkpoint.save import save

__all__ = ["latest", "load", "save"]
