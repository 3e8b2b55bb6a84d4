"""Presets of Llama models: some for `accordion train` and the benchmarks, and published ones for the planner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import LlamaConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaShape:
    """Sizes of a Llama model. `mlp`: `intermediate_size`. `tied`: the head shares the weights of the embedding."""

    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int
    tied: bool = False


PUBLISHED: Mapping[str, LlamaShape] = {  # from the configurations that their makers published
    "llama3-405b": LlamaShape(vocab=128256, hidden=16384, layers=126, heads=128, kv_heads=8, mlp=53248),
    "llama3-70b": LlamaShape(vocab=128256, hidden=8192, layers=80, heads=64, kv_heads=8, mlp=28672),
    "llama3-8b": LlamaShape(vocab=128256, hidden=4096, layers=32, heads=32, kv_heads=8, mlp=14336),
    "llama3-3b": LlamaShape(vocab=128256, hidden=3072, layers=28, heads=24, kv_heads=8, mlp=8192, tied=True),
    "llama3-1b": LlamaShape(vocab=128256, hidden=2048, layers=16, heads=32, kv_heads=8, mlp=8192, tied=True),
    "llama2-13b": LlamaShape(vocab=32000, hidden=5120, layers=40, heads=40, kv_heads=40, mlp=13824),
    "llama2-7b": LlamaShape(vocab=32000, hidden=4096, layers=32, heads=32, kv_heads=32, mlp=11008),
    "mistral-7b": LlamaShape(vocab=32768, hidden=4096, layers=32, heads=32, kv_heads=8, mlp=14336),
}
"""The presets of `accordion plan`."""

TRAINED: Mapping[str, LlamaShape] = {  # `vocab` is also the size of the tokenizer that is trained for it
    "llama-tiny": LlamaShape(vocab=1024, hidden=64, layers=2, heads=2, kv_heads=2, mlp=192),
    "llama-10m": LlamaShape(vocab=4096, hidden=320, layers=6, heads=5, kv_heads=5, mlp=864),
    "llama-30m": LlamaShape(vocab=8192, hidden=512, layers=8, heads=8, kv_heads=8, mlp=1376),
    "llama-125m": LlamaShape(vocab=32768, hidden=768, layers=12, heads=12, kv_heads=12, mlp=2048),
    "llama-1b": LlamaShape(vocab=32768, hidden=2048, layers=16, heads=32, kv_heads=8, mlp=8192),
    "llama-8b": PUBLISHED["llama3-8b"],
}
"""The presets of `accordion train` and `accordion bench`."""


def llama_config(shape: LlamaShape, positions: int, **more: Any) -> LlamaConfig:
    """Return a `LlamaConfig` with the sizes in `shape`, for sequences of up to `positions` tokens. Token 0 ends a text; there is
    no start token. `more`: other arguments of `LlamaConfig`."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.mlp,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=positions,
        tie_word_embeddings=shape.tied,
        bos_token_id=None,
        eos_token_id=0,
        **more,
    )
