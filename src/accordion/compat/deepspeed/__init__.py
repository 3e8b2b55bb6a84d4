"""A DeepSpeed configuration, read into what `shard`, an optimizer, a scheduler and a training loop take.

And `initialize`, for programs whose loop is DeepSpeed's.
"""

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
    "zero": "build the model inside `with torch.device('meta')` and fill it after shard() with accordion.initialise",
    "pipe": "pipelines are torch.distributed.pipelining's, with accordion.compat.fsdp2 for their stages",
    "PipelineModule": "pipelines are torch.distributed.pipelining's, with accordion.compat.fsdp2 for their stages",
    "checkpointing": "say checkpoint_activations= to shard(), or use torch.utils.checkpoint",
    "init_inference": "this library trains; accordion.full_params shows a model for evaluation",
}
"""Names of DeepSpeed that are not here, and what to do."""


def __getattr__(name: str) -> NoReturn:
    hint = f": {ELSEWHERE[name]}" if name in ELSEWHERE else ""
    raise AttributeError(f"accordion.compat.deepspeed has no {name!r}{hint}.")
