"""The private names of other libraries that the integrations override or read, and a check that these still exist."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec

# (module, class, versions of the library that have the names) -> {private name: what it is needed for, as in "so that ..."}.
SEAMS = {
    ("transformers.trainer", "Trainer", "5.0.0, 5.23.0"): {
        "_move_model_to_device": "the whole model never goes to one device",
        "_save": "a folder has the configuration, tokenizer and arguments that the Trainer writes",
        "_save_optimizer_and_scheduler": "the optimizer is saved in shards",
        "_save_rng_state": "the Trainer's state, which is written next, testifies to all ranks' files",
        "_load_from_checkpoint": "weights are read into shards",
        "_load_optimizer_and_scheduler": "the optimizer is read into shards",
        "_load_best_model": "the best weights are read into shards",
    },
    ("transformers.modeling_utils", "PreTrainedModel", "5.0.0, 5.23.0"): {
        "_from_config": "a class that is no AutoModel begins on meta in the dtype of its files",
    },
    ("accelerate.accelerator", "Accelerator", "1.12, 1.15"): {
        "_models": "accelerate does not write sharded models itself",
        "_optimizers": "accelerate does not write their optimizers itself",
        "_custom_objects": "sharded tensors of registered objects are saved whole",
        "_save_model_state_pre_hook": "hooks of a save get the sharded models too",
        "_load_model_state_pre_hook": "hooks of a load get the sharded models too",
    },
    ("lightning.pytorch.strategies.parallel", "ParallelStrategy", "lightning 2.6.6"): {
        "_layer_sync": "batch norms are synchronised as it says",
    },
    ("lightning.pytorch.callbacks.weight_averaging", "WeightAveraging", "lightning 2.6.6"): {
        "_average_model": "the copy of the model that is averaged is sharded too",
    },
    ("lightning.fabric.strategies.ddp", "DDPStrategy", "lightning 2.6.6"): {
        "_backward_sync_control": "fabric.no_backward_sync adds gradients up without communication",
    },
    ("lightning.fabric.strategies.strategy", "Strategy", "lightning 2.6.6"): {
        "_convert_stateful_objects_in_state": "a full checkpoint has what Fabric's own has, filtered as it is told",
    },
}


def lost() -> Iterator[str]:
    """Yield a sentence for each name in `SEAMS` that its library lacks. Libraries that are not installed are left out."""
    for (module, owner, versions), names in SEAMS.items():
        if find_spec(module.partition(".")[0]) is None:
            continue
        cls = getattr(import_module(module), owner, None)
        for name, use in names.items():
            if cls is None or not (hasattr(cls, name) or name in cls.__init__.__code__.co_names):
                yield (
                    f"{module}.{owner} has no {name} any more (it had in {versions}), which is needed so that {use}; find where "
                    "the library does that now, and mend accordion.integrations."
                )
