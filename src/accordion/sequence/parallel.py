"""`sequence_parallel`, which changes a model, and `split_sequence`, which takes this rank's part of each sequence of a batch."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from accordion import _torch
from accordion.engine.hooks import engine_of
from accordion.errors import UsageError
from accordion.sequence.exchange import group_of
from accordion.tensor_checksum import checksums


def sequence_parallel(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Let the ranks of `mesh` share each sequence in the attention of a transformers `model`; change it in place and return it.

    Call it before `shard`, which still shards over all ranks, and pass the model the results of `split_sequence`. The model's
    attention implementation (sdpa, eager, flash or flex attention) then runs on whole sequences of some of the heads. The call
    does not communicate. Each forward gathers a 2-D mask, or the position ids if there is no mask. The model gets a copy of its
    `config` that names an attention implementation of Accordion. In its forward `use_cache` is False by default.
    `use_cache=True`, `generate`, and labels without `num_items_in_batch` raise `UsageError`. So do any labels if the model's
    forward does not call `loss_function`; take the loss of its logits instead.

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


def split_sequence(
    batch: Mapping[str, Any], mesh: DeviceMesh, *, shift: bool = True, ignore_index: int = -100
) -> dict[str, Any]:
    """Return this rank's part of a `batch` of whole sequences, as keyword arguments of the model.

    All ranks of `mesh` pass the same batch. The first call on a mesh compares the batches of its ranks, which is a collective;
    later calls do not communicate.

    Args:
        batch: `input_ids` or `inputs_embeds`, and `labels` if there is a loss. Tensors with the same number of tokens in dim 1
            are split there, `position_ids` in the last dim. All else, such as a mask (batch, 1, tokens, tokens), stays whole.
        mesh: 1-D, the ranks that share each sequence.
        shift: token i predicts label i + 1, also across the ends of parts. Pass False if token i predicts label i.
        ignore_index: the label of tokens without a loss.

    Returns: the parts, with `position_ids` (1, tokens of this rank) if `batch` has none. With `labels` or `shift_labels` also:
        `shift_labels`: (batch, tokens of this rank), the label that each token predicts: of `batch`, or else new, if `shift`.
        `num_items_in_batch`: the number of tokens of the whole batch that have a loss, or instead the `num_items_in_batch` of
            `batch` if it has one; in both cases divided by the number of ranks. The sum of this rank's losses divided by this
            number is a loss whose mean over ranks is that of the whole batch.

    Raises `UsageError` if `mesh` is not 1-D, if the ranks do not divide the tokens, or if the ranks' first batches differ.
    """
    labels, num_items = batch.get("labels"), batch.get("num_items_in_batch")
    targets = batch.get("shift_labels", labels)
    parts = own_part(batch, mesh)
    tokens = _tokens(parts)
    rank, size = mesh.get_local_rank(), tokens.shape[1]
    if parts.get("position_ids") is None:
        parts["position_ids"] = torch.arange(rank * size, (rank + 1) * size, device=tokens.device)[None]
    if labels is not None and shift and "shift_labels" not in batch:
        targets = F.pad(labels[:, 1:], (0, 1), value=ignore_index)
        parts["shift_labels"] = targets.chunk(mesh.size(), 1)[rank].contiguous()
    if num_items is None and targets is not None:
        num_items = (targets != ignore_index).sum().clamp(min=1)
    if num_items is not None:
        parts["num_items_in_batch"] = num_items / mesh.size()
    return parts


def own_part(batch: Mapping[str, Any], mesh: DeviceMesh) -> dict[str, Any]:
    """Return `batch` with this rank's part of each tensor whose dim 1 (of `position_ids` the last) has the tokens. The first
    call on `mesh` is collective. Raises `UsageError` if the ranks do not divide the tokens, or their first batches differ."""
    _compare_once(batch, group_of(mesh))
    num_ranks, rank, num_tokens = mesh.size(), mesh.get_local_rank(), _tokens(batch).shape[1]
    if num_tokens % num_ranks:
        raise UsageError(
            f"sequences of {num_tokens} tokens cannot be divided over {num_ranks} ranks; pad them to a multiple, with 0 in an "
            "attention_mask and labels of -100 (pad_to_multiple_of of transformers' tokenizers and collators)."
        )

    def part(name: str, value: Any) -> Any:
        dim = value.ndim - 1 if name == "position_ids" else 1
        return value.chunk(num_ranks, dim)[rank].contiguous() if value.shape[dim] == num_tokens else value

    return {n: part(n, v) if isinstance(v, Tensor) and v.ndim > 1 else v for n, v in batch.items()}


def _tokens(batch: Mapping[str, Any]) -> Tensor:
    """Return `input_ids`, or else `inputs_embeds`. Raises `UsageError` if there is neither, or if it has no dim of tokens."""
    tokens: Tensor | None = next((batch[n] for n in ("input_ids", "inputs_embeds") if batch.get(n) is not None), None)
    if tokens is None or tokens.ndim < 2:
        raise UsageError(
            f"split_sequence got a batch of {', '.join(batch) or 'nothing'}; pass input_ids (batch, tokens), or inputs_embeds."
        )
    return tokens


def _compare_once(batch: Mapping[str, Any], group: dist.ProcessGroup) -> None:
    """In the first call with `group`, a collective, raise `UsageError` on all ranks if their batches' tensors differ. Later
    calls do nothing."""
    compared = f"accordion/sequence/{_torch.name_of_group(group)}/"
    if _torch.kept_with_job(compared):
        return
    tensors = {name: value for name, value in batch.items() if isinstance(value, Tensor)}
    shapes, digests = {name: tuple(tensor.shape) for name, tensor in tensors.items()}, checksums(tensors)
    batches = [None] * dist.get_world_size(group)
    dist.all_gather_object(batches, (shapes, digests), group=group)
    other = next((rank for rank, one in enumerate(batches) if one != batches[0]), None)
    if other is not None:
        raise UsageError(
            f"rank {other} of a sequence group got another batch than rank 0, and they share each sequence; give the ranks of a "
            'group the same data: DistributedSampler(data, num_replicas=mesh["dp"].size(), rank=mesh["dp"].get_local_rank()).'
        )
    _torch.keep_with_job(compared, True)
