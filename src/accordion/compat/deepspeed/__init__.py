"""A DeepSpeed configuration, read into what `shard`, an optimizer, a scheduler and a training loop take.

And `initialize`, for programs whose loop is DeepSpeed's.
"""

from accordion.compat.deepspeed.engine import DeepSpeedEngine, initialize
from accordion.compat.deepspeed.optimizers import OptimizerChoice
from accordion.compat.deepspeed.reading import read
from accordion.compat.deepspeed.scaling import LossScale, LossScaler
from accordion.compat.deepspeed.schedules import Schedule
from accordion.compat.deepspeed.settings import BatchSizes, Settings

__all__ = [
    "BatchSizes",
    "DeepSpeedEngine",
    "LossScale",
    "LossScaler",
    "OptimizerChoice",
    "Schedule",
    "Settings",
    "initialize",
    "read",
]
