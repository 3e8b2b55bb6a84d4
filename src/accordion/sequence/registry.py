"""Attention of transformers over the ranks of a sequence, through its registries of attention functions and of masks."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import find_packed_sequence_indices

from accordion.errors import UsageError
from accordion.sequence.exchange import check_heads, exchange, gathered, numbers_of_rank, whole_sequences

MARK = "_sequence_"  # in the names of the implementations that are registered here
LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}


def find(model: nn.Module) -> PreTrainedModel | None:
    """Return the outermost model of transformers in `model`, None if there is none."""
    return next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)


def attach(model: PreTrainedModel, group: dist.ProcessGroup) -> None:
    """Run the attention of `model` over the ranks of `group`. Raises `UsageError`, before anything changes, if it cannot."""
    _check(model, dist.get_world_size(group))
    implementation = model.config._attn_implementation
    sequences = _Sequences(implementation, group)
    name = f"{implementation}{MARK}{group.group_name}"
    AttentionInterface.register(name, sequences.attend)
    if implementation in AttentionMaskInterface():
        AttentionMaskInterface.register(name, sequences.mask)
    model.config._attn_implementation = name
    model.config.use_cache = False
    body, sums_losses = model.base_model, "loss_function(" in inspect.getsource(type(model).forward)
    names = list(inspect.signature(body.forward).parameters)

    # Closures, because a model with a process group in its attributes could not be copied.
    def before_loss(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if kwargs.get("labels") is not None and not (sums_losses and "num_items_in_batch" in kwargs):
            raise UsageError(
                f"{type(model).__name__} got labels, and would average over the tokens of this rank alone; pass it "
                "**split_sequence(batch, mesh)"
                + (
                    "."
                    if sums_losses
                    else " without labels, and compute the loss of its logits as docs/long-context.md shows."
                )
            )

    def before_forward(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return (), sequences.prepared(dict(zip(names, args, strict=False)) | kwargs)

    model.register_forward_pre_hook(before_loss, with_kwargs=True)
    body.register_forward_pre_hook(before_forward, with_kwargs=True)


def _check(model: PreTrainedModel, num_ranks: int) -> None:
    """Raise `UsageError` if the attention of `model` cannot run over `num_ranks` ranks of a sequence."""
    name, config = type(model).__name__, model.config
    layers = set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES
    if MARK in config._attn_implementation:
        raise UsageError(f"{name} is sequence parallel already; call sequence_parallel once.")
    if getattr(config, "is_encoder_decoder", False) or config.get_text_config() is not config:
        raise UsageError(
            f"sequence_parallel got {name}; it takes models that read text alone, with one stack of layers."
        )
    if not model._can_set_attn_implementation():
        raise UsageError(
            f"the attention of {name} is not in transformers' registry (AttentionInterface), so sequence_parallel cannot run it; "
            "choose another model, or call accordion.sequence_attention in its attention."
        )
    if layers or model._is_stateful:
        raise UsageError(
            f"{name} has layers that sequence_parallel does not know ({', '.join(sorted(layers)) or 'with a state'}); each rank "
            "would run them on its part alone."
        )
    if "position_ids" not in inspect.signature(model.base_model.forward).parameters:
        raise UsageError(f"{name} takes no position_ids, so each rank of a sequence would count its tokens from 0.")
    check_heads(config.num_attention_heads, num_ranks)


class _Sequences:
    """Attention and masks of whole sequences for one implementation and one group of ranks.

    Owns what a forward has gathered until its masks are made. Attention itself has no state, so it can be computed again.
    """

    def __init__(self, implementation: str, group: dist.ProcessGroup) -> None:
        self._implementation, self._group = implementation, group
        self._padding: Tensor | None = None  # (batch, all tokens), bool: False for padding; None without padding
        self._positions: Tensor | None = None  # (batch, all tokens) of packed sequences; None if they are not packed
        self._numbers: Tensor | None = None  # (batch, all tokens): the packed sequence of each token

    def prepared(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Return the `inputs` of a forward with what it needs of other ranks' tokens. A collective."""
        if inputs.get("past_key_values") is not None or inputs.get("use_cache"):
            raise UsageError(
                "sequence parallelism keeps no key/value cache; pass use_cache=False, and generate without it."
            )
        tokens = inputs["input_ids"] if inputs.get("input_ids") is not None else inputs["inputs_embeds"]
        size, num_ranks = tokens.shape[1], dist.get_world_size(self._group)
        positions, mask = inputs.get("position_ids"), inputs.get("attention_mask")
        self._padding = self._positions = self._numbers = None
        if positions is None:
            first = dist.get_rank(self._group) * size
            inputs["position_ids"] = torch.arange(first, first + size, device=tokens.device)[None]
        elif mask is None:
            whole = gathered(positions.expand(tokens.shape[0], -1), self._group)
            self._numbers = find_packed_sequence_indices(whole)
            self._positions = None if self._numbers is None else whole
        if isinstance(mask, Tensor) and mask.ndim == 2:
            self._padding = mask.bool() if mask.shape[1] == size * num_ranks else gathered(mask, self._group).bool()
        if mask is None or self._padding is not None:
            # A mask of this shape tells transformers the number of keys. `mask` below has the values.
            inputs["attention_mask"] = torch.ones(
                tokens.shape[0], size * num_ranks, dtype=torch.bool, device=tokens.device
            )
        return inputs

    def mask(self, *, q_length: int, kv_length: int, mask_function: Callable[..., Any], **kwargs: Any) -> Any:
        """Return the mask of whole sequences: the registered function of the implementation, with their length and padding."""
        make = AttentionMaskInterface()[self._implementation]
        kwargs["attention_mask"] = self._padding
        is_causal = (
            "allow_is_bidirectional_skip" not in kwargs
        )  # transformers masks packed sequences if they are causal
        if is_causal and self._positions is not None:
            if "flash" in self._implementation:
                return self._positions  # instead of a mask; `attend` passes it on as position ids
            mask_function = _packed(mask_function, self._positions, self._numbers)
            kwargs["allow_is_causal_skip"] = False
        return make(q_length=kv_length, kv_length=kv_length, mask_function=mask_function, **kwargs)

    def attend(
        self,
        module: nn.Module,
        query: Tensor,  # (batch, heads, tokens of this rank, head dim)
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        dropout: float = 0.0,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Return (the attention of this rank's tokens (batch, tokens, heads, head dim), None in place of weights)."""
        group = self._group
        if kwargs.get("position_bias") is not None:
            raise UsageError(
                f"{type(module).__name__} adds a bias to each position, which sequence_parallel does not split."
            )
        q, k, v = whole_sequences(query, key, value, group)
        heads = slice(dist.get_rank(group) * q.shape[1], (dist.get_rank(group) + 1) * q.shape[1])
        kwargs["position_ids"] = None
        if (
            "flash" in self._implementation
            and isinstance(attention_mask, Tensor)
            and attention_mask.dtype == torch.int64
        ):
            kwargs["position_ids"], attention_mask = attention_mask, None
        config = _Shown(module.config, {"_attn_implementation": self._implementation})
        replaced = {"num_key_value_groups": q.shape[1] // k.shape[1], "config": config}
        for sinks in ("s_aux", "sinks"):  # one number per head, as an argument and as a parameter
            if kwargs.get(sinks) is not None:
                kwargs[sinks] = kwargs[sinks][heads]
            if isinstance(getattr(module, sinks, None), Tensor):
                replaced[sinks] = getattr(module, sinks)[heads]
        with numbers_of_rank(group, q.device) if dropout else nullcontext():
            out, _ = self._kernel(module)(_Shown(module, replaced), q, k, v, attention_mask, dropout=dropout, **kwargs)
        return exchange(out, group, split=1, join=2), None

    def _kernel(self, module: nn.Module) -> Callable[..., tuple[Tensor, Any]]:
        """Return the attention function of the implementation; the eager one is in the file of the model."""
        eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        return AttentionInterface().get_interface(self._implementation, eager)


class _Shown:
    """An attention module, or its config, as a kernel reads it: some attributes are `replaced`, the others are those of `thing`."""

    def __init__(self, thing: Any, replaced: dict[str, Any]) -> None:
        vars(self).update(replaced, _thing=thing)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._thing, name)


def _packed(mask_function: Callable[..., Any], positions: Tensor, numbers: Tensor) -> Callable[..., Any]:
    """Return `mask_function` for packed sequences: it gets positions, and tokens of different sequences are masked."""

    def masked(batch: Any, head: Any, q: Any, kv: Any) -> Any:
        inside = mask_function(batch, head, positions[batch, q], positions[batch, kv])
        return (numbers[batch, q] == numbers[batch, kv]) & inside

    return masked
