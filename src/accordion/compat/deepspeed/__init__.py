"""Read DeepSpeed's configurations with `read`, and run programs with DeepSpeed's own training loop with `initialize`."""

from accordion.compat.deepspeed.engine import DeepSpeedEngine, add_config_arguments, init_distributed, initialize
from accordion.compat.deepspeed.reading import BatchSizes, Settings, read
from accordion.compat.deepspeed.rules import LossScaler, OptimizerChoice, Schedule

__all__ = [
    "BatchSizes",
    "DeepSpeedEngine",
    "LossScaler",
    "OptimizerChoice",
    "Schedule",
    "Settings",
    "add_config_arguments",
    "init_distributed",
    "initialize",
    "read",
]
