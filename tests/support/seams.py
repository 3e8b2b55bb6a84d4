"""The private names of other libraries that the integrations override or read, and a check that these still exist."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec


@dataclass(frozen=True, slots=True, kw_only=True)
class Seam:
    """A private name of a library: attribute `name` of class `owner` in `module`. `versions`: versions of the library that have
    the name. `use`: what it is needed for, the end of a sentence "so that ..."."""

    module: str
    owner: str
    name: str
    versions: str
    use: str


TRAINER = ("transformers.trainer", "Trainer", "5.0.0, 5.23.0")
LIGHTNING = [
    ("pytorch.strategies.parallel", "ParallelStrategy", "_layer_sync", "batch norms are synchronised as it says"),
    (
        "pytorch.callbacks.weight_averaging",
        "WeightAveraging",
        "_average_model",
        "the copy of the model that is averaged is sharded too",
    ),
    (
        "fabric.strategies.ddp",
        "DDPStrategy",
        "_backward_sync_control",
        "fabric.no_backward_sync adds gradients up without communication",
    ),
    (
        "fabric.strategies.strategy",
        "Strategy",
        "_convert_stateful_objects_in_state",
        "a full checkpoint has what Fabric's own has, filtered as it is told",
    ),
]
SEAMS = [
    *(
        Seam(module=TRAINER[0], owner=TRAINER[1], name=name, versions=TRAINER[2], use=use)
        for name, use in {
            "_move_model_to_device": "the whole model never goes to one device",
            "_save": "a folder has the configuration, tokenizer and arguments that the Trainer writes",
            "_save_optimizer_and_scheduler": "the optimizer is saved in shards",
            "_save_rng_state": "the Trainer's state, which is written next, testifies to all ranks' files",
            "_load_from_checkpoint": "weights are read into shards",
            "_load_optimizer_and_scheduler": "the optimizer is read into shards",
            "_load_best_model": "the best weights are read into shards",
        }.items()
    ),
    Seam(
        module="transformers.modeling_utils",
        owner="PreTrainedModel",
        name="_from_config",
        versions="5.0.0, 5.23.0",
        use="a class that is no AutoModel begins on meta in the dtype of its files",
    ),
    *(
        Seam(module="accelerate.accelerator", owner="Accelerator", name=name, versions="1.12, 1.15", use=use)
        for name, use in {
            "_models": "accelerate does not write sharded models itself",
            "_optimizers": "accelerate does not write their optimizers itself",
            "_custom_objects": "sharded tensors of registered objects are saved whole",
            "_save_model_state_pre_hook": "hooks of a save get the sharded models too",
            "_load_model_state_pre_hook": "hooks of a load get the sharded models too",
        }.items()
    ),
    *(
        Seam(module=f"lightning.{module}", owner=owner, name=name, versions="lightning 2.6.6", use=use)
        for module, owner, name, use in LIGHTNING
    ),
]


def lost() -> Iterator[str]:
    """Yield a sentence for each of `SEAMS` that its library lacks. Libraries that are not installed are left out."""
    for seam in SEAMS:
        if find_spec(seam.module.partition(".")[0]) is None:
            continue
        owner = getattr(import_module(seam.module), seam.owner, None)
        if owner is None or not (hasattr(owner, seam.name) or seam.name in owner.__init__.__code__.co_names):
            yield (
                f"{seam.module}.{seam.owner} has no {seam.name} any more (it had in {seam.versions}), which is needed so that "
                f"{seam.use}; find where the library does that now, and mend accordion.integrations."
            )
