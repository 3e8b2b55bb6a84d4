"""`sequence_parallel`: check a model of transformers, and run its attention over the ranks of a sequence."""

from __future__ import annotations

import sys

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from accordion.engine.hooks import engine_of
from accordion.errors import UsageError
from accordion.sequence.exchange import group_of


def sequence_parallel(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Let the ranks of `mesh` share each sequence in the attention of a transformers `model`; change it in place and return it.

    Call it before `shard`, which shards over all ranks as without it, and pass the model parts of `split_sequence`. The model's
    attention implementation (sdpa, eager, flash or flex attention) then runs on whole sequences of some of the heads. The call
    does not communicate. Each forward gathers the padding mask, or without one the position ids. The model gets a copy of its
    `config` that names an attention implementation of Accordion. In its forward `use_cache` is False by default.
    `use_cache=True`, `generate`, and labels without `num_items_in_batch` raise `UsageError`.

    Args:
        model: a model of transformers that reads text, or one of PEFT around it.
        mesh: 1-D, the ranks that share each sequence, in the order of their parts.

    Raises `UsageError`, before anything changes, if `model` is sharded already or not of transformers, if its attention is not in
    transformers' registry, if the ranks do not divide its heads, or if other layers need whole sequences (such as Mamba).
    """
    group = group_of(mesh)
    if engine_of(model) is not None:
        raise UsageError("sequence_parallel got a model that is sharded already; call it before shard().")
    if "transformers" in sys.modules:
        from accordion.sequence import registry

        if registry.attach(model, group):
            return model
    raise UsageError(
        f"sequence_parallel got {type(model).__name__}, which is no model of transformers; in a model of your own, call "
        "accordion.sequence_attention in its attention, and pass it the parts of split_sequence."
    )
