"""GGUF, as llama.cpp reads it: names and metadata by the `gguf` package, tensors written one at a time."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from accordion.checkpoint.streamed import TensorSource, write_data
from accordion.errors import UsageError
from accordion.export.tensors import NamedTensors


@dataclass(frozen=True, slots=True)
class GgufFamily:
    """How a model type of transformers is written. `architecture`: the package's name of it.

    `pairs`: rotary positions turn neighbours there, and halves of a head here, so rows of queries and keys change places.
    """

    architecture: str
    pairs: bool


FAMILIES: Mapping[str, GgufFamily] = {
    "llama": GgufFamily("llama", pairs=True),
    "mistral": GgufFamily("llama", pairs=True),
    "qwen2": GgufFamily("qwen2", pairs=False),
    "qwen3": GgufFamily("qwen3", pairs=False),
}
TYPES = {
    torch.float32: ("F32", "ALL_F32"),
    torch.float16: ("F16", "MOSTLY_F16"),
    torch.bfloat16: ("BF16", "MOSTLY_BF16"),
}
# The patterns by which a byte-level tokenizer cuts words, by the names that llama.cpp has for them.
_CUT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|NUMBERS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CUTS = {_CUT.replace("NUMBERS", r"\p{N}{1,3}"): "llama-bpe", _CUT.replace("NUMBERS", r"\p{N}"): "qwen2"}
NORMAL, CONTROL, ADDED, UNUSED = 1, 3, 4, 5  # types of tokens there


def check_gguf(config: Any) -> GgufFamily:
    """Raises `UsageError` where GGUF has no place for such a model."""
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise UsageError(
            f"--format gguf takes models of type {', '.join(FAMILIES)}, and SOURCE is of type {config.model_type!r}; take hf, "
            "and llama.cpp's own converter."
        )
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") != "default":
        raise UsageError(
            f"--format gguf takes plain rotary positions, and SOURCE scales them ({rope['rope_type']}); take hf, and llama.cpp's "
            "own converter."
        )
    if family.pairs and (getattr(config, "attention_bias", False) or getattr(config, "mlp_bias", False)):
        raise UsageError("--format gguf takes Llamas without biases, and SOURCE has some; take hf.")
    return family


def write_gguf(path: Path, found: NamedTensors, config: Any, tokenizer: Any, name: str) -> list[str]:
    """One file; what was left out, in words. Matrices are in the dtype of their sources, vectors in float32 as llama.cpp wants.

    `tokenizer`: of transformers, or None. Raises `UsageError` for a tensor that GGUF has no name for.
    """
    import gguf

    family = check_gguf(config)
    architecture = next(a for a, n in gguf.MODEL_ARCH_NAMES.items() if n == family.architecture)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    sources = []
    for source in found.sources:
        own = names.get_name(source.name, try_suffixes=(".weight", ".bias"))
        if own is None:
            raise UsageError(f"--format gguf has no name for the tensor {source.name} of SOURCE; take hf.")
        sources.append(_as_there(source, own, family, config))
    writer = gguf.GGUFWriter(path, family.architecture)
    try:
        writer.add_name(f"{config.model_type} {name}")  # of Mistral's type tells a reader that it is no Llama
        dtype = max((s.dtype for s in sources if len(s.shape) > 1), key=lambda d: d.itemsize, default=torch.float32)
        writer.add_file_type(gguf.LlamaFileType[TYPES[dtype][1]])
        _add_sizes(writer, config)
        left = _add_tokenizer(writer, tokenizer, config)
        for source in sources:
            kind = gguf.GGMLQuantizationType[TYPES[source.dtype][0]]
            writer.add_tensor_info(source.name, source.shape, None, source.num_bytes, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        (sink,) = writer.fout
        for source in sources:
            writer.write_padding(sink, sink.tell())
            write_data(sink, source)
        writer.write_padding(sink, sink.tell())
    finally:
        writer.close()
    return left


def _as_there(source: TensorSource, name: str, family: GgufFamily, config: Any) -> TensorSource:
    source = replace(source, name=name)
    if len(source.shape) < 2 or source.dtype not in TYPES:
        return source.cast(torch.float32)
    if not family.pairs or not name.endswith(("attn_q.weight", "attn_k.weight")):
        return source
    heads = config.num_attention_heads if "attn_q" in name else config.num_key_value_heads or config.num_attention_heads
    return replace(source, read=partial(_paired, source, heads))


def _paired(source: TensorSource, heads: int) -> Tensor:
    """Rows of each head: first and second half in turn."""
    weight = source.read()  # (heads x head_dim, hidden)
    rows, hidden = weight.shape
    return weight.view(heads, 2, rows // heads // 2, hidden).transpose(1, 2).reshape(rows, hidden)


def _add_sizes(writer: Any, config: Any) -> None:
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    rope = getattr(config, "rope_parameters", None) or {}
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.num_key_value_heads or heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(float(rope.get("rope_theta", 10000.0)))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)


def _add_tokenizer(writer: Any, tokenizer: Any, config: Any) -> list[str]:
    """Byte-level BPE whose cuts llama.cpp has a name for; any other is left out and said so."""
    spec = json.loads(tokenizer.backend_tokenizer.to_str()) if hasattr(tokenizer, "backend_tokenizer") else {}
    cut = _cut_of(spec.get("pre_tokenizer"))
    if spec.get("model", {}).get("type") != "BPE" or cut is None:
        return ["the tokenizer: it is none that llama.cpp has a name for" if tokenizer is not None else "a tokenizer"]
    by_id = {number: word for word, number in tokenizer.get_vocab().items()}
    added = {entry["id"]: entry for entry in spec.get("added_tokens", ())}
    kinds = [
        UNUSED if i not in by_id else NORMAL if i not in added else CONTROL if added[i]["special"] else ADDED
        for i in range(config.vocab_size)
    ]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(cut)
    writer.add_token_list([by_id.get(i, f"[PAD{i}]") for i in range(config.vocab_size)])
    writer.add_token_types(kinds)
    merges = spec["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    for word in ("bos", "eos", "pad"):
        number = getattr(tokenizer, f"{word}_token_id", None)
        number = _first(getattr(config, f"{word}_token_id", None)) if number is None else number
        if number is not None:
            getattr(writer, f"add_{word}_token_id")(number)
    writer.add_add_bos_token(bool(getattr(tokenizer, "add_bos_token", False)))
    if isinstance(getattr(tokenizer, "chat_template", None), str):
        writer.add_chat_template(tokenizer.chat_template)
    return []


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, list) and value else value


def _cut_of(pre: Any) -> str | None:
    """llama.cpp's name of how words are cut before they are merged."""
    steps = pre.get("pretokenizers", [pre]) if isinstance(pre, dict) else []
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"] and steps[0].get("use_regex") and not steps[0].get("add_prefix_space"):
        return "gpt-2"
    if kinds == ["Split", "ByteLevel"] and not steps[1].get("use_regex"):
        return CUTS.get(steps[0].get("pattern", {}).get("Regex"))
    return None
