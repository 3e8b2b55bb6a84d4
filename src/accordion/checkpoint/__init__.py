"""Save and load checkpoints: folders of safetensors and JSON that appear complete or not at all, for any number of ranks."""

from accordion.checkpoint.background import Saving
from accordion.checkpoint.contents import RandomState
from accordion.checkpoint.load import load
from accordion.checkpoint.prune import latest
from accordion.checkpoint.save import save

__all__ = ["RandomState", "Saving", "latest", "load", "save"]
