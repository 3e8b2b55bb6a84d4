"""The public names of the package; `accordion` imports them from here at their first use."""

from accordion.checkpoint import latest, load, save
from accordion.config import (
    FULL_SHARD,
    HYBRID_SHARD,
    HYBRID_SHARD_OPTIM,
    NO_SHARD,
    SHARD_GRAD_OP,
    SHARD_OPTIM,
    Offload,
    Place,
    Precision,
    Prefetch,
    Strategy,
)
from accordion.describe import describe
from accordion.ema import EMA
from accordion.errors import AccordionError, CheckpointError, DivergenceError, NonFiniteError, OffloadError, UsageError
from accordion.even_batches import even
from accordion.losses.chunks import linear_cross_entropy
from accordion.norms import log_norms
from accordion.observe.recorder import observe
from accordion.offload.estimate import estimate_memory
from accordion.optimizers.wrap import clip_grad_norm_, wrap_optimizer
from accordion.park import park, unpark
from accordion.plan.api import plan
from accordion.plan.choice import Search
from accordion.plan.hardware import Cluster
from accordion.plan.workload import Workload
from accordion.sequence.exchange import sequence_attention
from accordion.sequence.parallel import sequence_parallel, split_sequence
from accordion.sequence.tiles import tile
from accordion.shard.api import entry_point, shard
from accordion.sharding import Sharding
from accordion.state import full_params, full_state_dict, no_sync, synchronize
from accordion.train.fit import fit
from accordion.train.init import init
from accordion.units import min_params, only_blocks
from accordion.weights.export import save_pretrained
from accordion.weights.four_bits import quantize
from accordion.weights.initialise import initialise
from accordion.weights.pretrained import load_pretrained
from accordion.weights.stream import stream_weights

__all__ = [
    "EMA",
    "FULL_SHARD",
    "HYBRID_SHARD",
    "HYBRID_SHARD_OPTIM",
    "NO_SHARD",
    "SHARD_GRAD_OP",
    "SHARD_OPTIM",
    "AccordionError",
    "CheckpointError",
    "Cluster",
    "DivergenceError",
    "NonFiniteError",
    "Offload",
    "OffloadError",
    "Place",
    "Precision",
    "Prefetch",
    "Search",
    "Sharding",
    "Strategy",
    "UsageError",
    "Workload",
    "clip_grad_norm_",
    "describe",
    "entry_point",
    "estimate_memory",
    "even",
    "fit",
    "full_params",
    "full_state_dict",
    "init",
    "initialise",
    "latest",
    "linear_cross_entropy",
    "load",
    "load_pretrained",
    "log_norms",
    "min_params",
    "no_sync",
    "observe",
    "only_blocks",
    "park",
    "plan",
    "quantize",
    "save",
    "save_pretrained",
    "sequence_attention",
    "sequence_parallel",
    "shard",
    "split_sequence",
    "stream_weights",
    "synchronize",
    "tile",
    "unpark",
    "wrap_optimizer",
]
