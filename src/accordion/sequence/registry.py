"""Attention of transformers over the ranks of a sequence, through its registries of attention functions and of masks."""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel, masking_utils

from accordion.errors import UsageError
from accordion.sequence.exchange import check_heads, exchange, gathered, numbers_of_rank, whole_sequences

MARK = "_sequence_"  # in the names of the implementations that are registered here
LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}
ROPES_BY_LENGTH = {"dynamic", "longrope"}  # rotary embeddings that depend on the largest position


def attach(module: nn.Module, group: dist.ProcessGroup) -> bool:
    """Change the outermost transformers model in `module` so that its attention runs over the ranks of `group`; return True, or
    False if there is no such model. Registers an attention implementation with transformers, gives the model a copy of its
    config and forward pre-hooks, and replaces `generate`. Raises `UsageError`, before any change, if attention cannot run so."""
    model = checked(module, dist.get_world_size(group))
    if model is None:
        return False
    implementation = model.config._attn_implementation
    sequences = _Sequences(implementation, group)
    name = f"{implementation}{MARK}{group.group_name}"
    AttentionInterface.register(name, sequences.attend)
    if implementation in AttentionMaskInterface():
        AttentionMaskInterface.register(name, sequences.mask)
    config = copy.deepcopy(model.config)  # another model may have the same object
    config._attn_implementation = name
    for inner in [inner for inner in module.modules() if vars(inner).get("config") is model.config]:
        inner.config = config
    body, sums_losses = model.base_model, "loss_function(" in inspect.getsource(type(model).forward)
    names = list(inspect.signature(body.forward).parameters)

    # Closures, because a model with a process group in its attributes could not be copied.
    def before_loss(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if kwargs.get("labels") is not None and not (sums_losses and "num_items_in_batch" in kwargs):
            without = "" if sums_losses else " without labels, and take the loss of its logits (docs/long-context.md)"
            raise UsageError(
                f"{type(model).__name__} would average the loss over this rank's tokens alone; pass it "
                f"**split_sequence(batch, mesh){without}."
            )

    def generate(*_: Any, **__: Any) -> None:
        raise UsageError("a sequence parallel model does not generate; load its saved weights into another one.")

    def before_forward(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        inputs = sequences.prepared(dict(zip(names, args, strict=False)) | kwargs)
        return (), inputs | ({"use_cache": False} if "use_cache" in names else {})

    model.generate = generate
    if "use_cache" in inspect.signature(model.forward).parameters:
        model.register_forward_pre_hook(_without_cache, with_kwargs=True)
    model.register_forward_pre_hook(before_loss, with_kwargs=True)
    body.register_forward_pre_hook(before_forward, with_kwargs=True)
    return True


def _without_cache(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    # Models whose own forward reads `config.use_cache` would pass True on.
    return args, kwargs | {"use_cache": kwargs.get("use_cache") or False}


def checked(module: nn.Module, num_ranks: int) -> PreTrainedModel | None:
    """Return the outermost transformers model in `module`, or None. Raises `UsageError` if it cannot run on `num_ranks` ranks."""
    model = next((inner for inner in module.modules() if isinstance(inner, PreTrainedModel)), None)
    if model is None:
        return None
    name, config = type(model).__name__, model.config
    if MARK in config._attn_implementation:
        raise UsageError(f"{name} is sequence parallel already; call sequence_parallel once.")
    if not model._can_set_attn_implementation():
        raise UsageError(
            f"the attention of {name} is not in transformers' registry (AttentionInterface), so sequence_parallel cannot run it; "
            "choose another model, or call accordion.sequence_attention in its attention."
        )
    if needs := _needs_whole_sequences(model):
        raise UsageError(
            f"{name} has {', '.join(sorted(needs))}, which each rank would compute from its part of a sequence alone; "
            "sequence_parallel takes models of text whose tokens meet in attention only."
        )
    check_heads(config.num_attention_heads, num_ranks)
    return model


def _needs_whole_sequences(model: PreTrainedModel) -> set[str]:
    """Return names, such as "recurrent layers", of features of `model`, besides attention, that need whole sequences."""
    config, rotary = model.config, [getattr(module, "rope_type", None) for module in model.modules()]
    ropes: set[Any] = {kind for kinds in rotary for kind in (kinds.values() if isinstance(kinds, dict) else [kinds])}
    parts = {
        "recurrent layers": model._is_stateful,
        "an encoder and a decoder": getattr(config, "is_encoder_decoder", False),
        "parts for images or sound": config.get_text_config() is not config,
        "attn_temperature_tuning": getattr(config, "attn_temperature_tuning", False),
        "no argument position_ids": "position_ids" not in inspect.signature(model.base_model.forward).parameters,
    }
    layers = set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES
    return {part for part, is_in in parts.items() if is_in} | layers | (ropes & ROPES_BY_LENGTH)


class _Sequences:
    """Attention over whole sequences, each divided over the ranks of `group`, by one attention implementation of transformers,
    such as "sdpa". Call `prepared` before each forward: it stores the padding, or the positions of packed texts, of all ranks.
    In the forward, transformers calls `mask` and `attend`, which change no state."""

    def __init__(self, implementation: str, group: dist.ProcessGroup) -> None:
        self._implementation, self._group = implementation, group
        # (batch, all tokens), bool: False for padding; None without padding.
        self._padding: Tensor | None = None
        # (batch, all tokens) each: position in a text, number of the text; None for texts that are not packed.
        self._packed: tuple[Tensor, Tensor] | None = None

    def prepared(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Change `inputs`, the arguments of a forward, in place; return them. Adds this rank's `position_ids` if absent. A mask
        that is absent or 2-D becomes all True, (rows, all tokens): only its shape is used; `mask` applies the padding. A
        collective if there is a 2-D mask, or position ids without a mask. Raises `UsageError` for a key/value cache."""
        if inputs.get("past_key_values") is not None or inputs.get("use_cache"):
            raise UsageError("sequence parallelism has no key/value cache; pass use_cache=False.")
        tokens = inputs["input_ids"] if inputs.get("input_ids") is not None else inputs["inputs_embeds"]
        (rows, size), num_ranks = tokens.shape[:2], dist.get_world_size(self._group)
        positions, mask = inputs.get("position_ids"), inputs.get("attention_mask")
        self._padding = self._packed = None
        if positions is None:
            first = dist.get_rank(self._group) * size
            inputs["position_ids"] = torch.arange(first, first + size, device=tokens.device)[None]
        elif mask is None:
            whole = gathered(positions.expand(rows, -1), self._group)
            numbers = masking_utils.find_packed_sequence_indices(whole)
            self._packed = None if numbers is None else (whole, numbers)
        if isinstance(mask, Tensor) and mask.ndim == 2:
            self._padding = gathered(mask, self._group).bool()
        if mask is None or self._padding is not None:
            # Its shape tells transformers the number of keys; `mask` below has the values.
            inputs["attention_mask"] = tokens.new_ones(rows, size * num_ranks, dtype=torch.bool)
        return inputs

    def mask(self, *, q_length: int, kv_length: int, mask_function: Callable[..., Any], **kwargs: Any) -> Any:
        """Return the mask of whole sequences by the implementation's own function; for packed flash attention, position ids."""
        make = AttentionMaskInterface()[self._implementation]
        kwargs["attention_mask"] = self._padding
        # In full attention, transformers does not tell packed sequences apart.
        if "allow_is_bidirectional_skip" not in kwargs and self._packed is not None:
            if "flash" in self._implementation:
                return self._packed[0]  # instead of a mask; `attend` passes it on as position ids
            inner, (at, text) = mask_function, self._packed
            mask_function = lambda b, h, q, kv: (text[b, q] == text[b, kv]) & inner(b, h, at[b, q], at[b, kv])  # noqa: E731
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
        """Return (attention of this rank's tokens (batch, tokens, heads, head dim), None in place of weights). A collective."""
        group = self._group
        if kwargs.get("position_bias") is not None:
            raise UsageError(f"{type(module).__name__} adds a bias by position, which sequence_parallel does not take.")
        q, k, v = whole_sequences(query, key, value, group)
        heads = slice(first := dist.get_rank(group) * q.shape[1], first + q.shape[1])
        kwargs["position_ids"] = None  # those of this rank, by which a kernel would find packed sequences
        if getattr(attention_mask, "dtype", None) == torch.int64:  # from `mask`, for a flash kernel
            kwargs["position_ids"], attention_mask = attention_mask, None
        config = _Shown(module.config, {"_attn_implementation": self._implementation})
        replaced = {"num_key_value_groups": q.shape[1] // k.shape[1], "config": config}
        for sinks in ("s_aux", "sinks"):  # one number per head, as an argument and as a parameter
            if kwargs.get(sinks) is not None:
                kwargs[sinks] = kwargs[sinks][heads]
            if isinstance(getattr(module, sinks, None), Tensor):
                replaced[sinks] = getattr(module, sinks)[heads]
        eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        kernel = AttentionInterface().get_interface(self._implementation, eager)
        with numbers_of_rank(group, q.device) if dropout else nullcontext():
            out, _ = kernel(_Shown(module, replaced), q, k, v, attention_mask, dropout=dropout, **kwargs)
        return exchange(out, group, split=1, join=2), None


class _Shown:
    """Proxy of `thing`, an attention module or its config, for a kernel: has attributes `replaced`, and all others of `thing`."""

    def __init__(self, thing: Any, replaced: dict[str, Any]) -> None:
        vars(self).update(replaced, _thing=thing)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._thing, name)
