"""Read DeepSpeed configurations with `read`, and run programs with DeepSpeed's own training loop with `initialize`."""

from typing import NoReturn

from accordion.compat.deepspeed.engine import DeepSpeedEngine, add_config_arguments, init_distributed, initialize
from accordion.compat.deepspeed.optimizers import OptimizerChoice
from accordion.compat.deepspeed.reading import BatchSizes, Settings, read
from accordion.compat.deepspeed.scaling import LossScaler
from accordion.compat.deepspeed.schedules import Schedule

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

ELSEWHERE = {
    "zero": "build the model inside `with torch.device('meta')`, and initialise it after shard() with accordion.initialise",
    "pipe": "use torch.distributed.pipelining, and accordion.compat.fsdp2 for its stages",
    "PipelineModule": "use torch.distributed.pipelining, and accordion.compat.fsdp2 for its stages",
    "checkpointing": "pass checkpoint_activations= to shard(), or use torch.utils.checkpoint",
    "init_inference": "this library trains; accordion.full_params unshards a model for evaluation",
}
"""Names of DeepSpeed that this module lacks, and what to use instead."""


def __getattr__(name: str) -> NoReturn:
    hint = f": {ELSEWHERE[name]}" if name in ELSEWHERE else ""
    raise AttributeError(f"accordion.compat.deepspeed has no {name!r}{hint}.")
