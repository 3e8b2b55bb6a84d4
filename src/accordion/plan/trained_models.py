"""Build the models to plan from presets and transformers configurations, with the loss that they are trained with."""

from __future__ import annotations

import json
import re
import traceback
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accordion import _torch
from accordion.errors import AccordionError, UsageError, check_installed, nearest
from accordion.garbage import without_collections
from accordion.losses.chunks import head_returns_loss
from accordion.models.language import brief, is_encoder, language_model, masked_model
from accordion.models.llama import PUBLISHED, llama_config
from accordion.plan.adapters import ALL, with_adapters
from accordion.plan.trace.setup import Subject
from accordion.sequence.tiles import tile_mlps
from accordion.weights.four_bits import FourBits


def configuration(model: str, seq: int) -> Any:
    """Return the transformers configuration of `model`: the name of a preset, a folder with a config.json, or the path of such
    a file. A preset has at least `seq` positions. Raises `UsageError` if transformers is not installed, or if the file is
    missing, cannot be read, describes a model that cannot be planned, or has fewer than `seq` positions."""
    check_installed("a model by name or configuration", ["transformers"], "plan")
    if model in PUBLISHED:
        with without_collections():
            return llama_config(PUBLISHED[model], max(8192, seq))
    path = Path(model)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        missing = f"the folder {model!r} has no config.json"
        unknown = f"model {model!r} is no file, folder or preset"
        raise UsageError(f"{missing if path.is_dir() else unknown}; {nearest(model, PUBLISHED)}")
    try:
        described = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"model {model!r}: {file} cannot be read as JSON: {error}") from None
    if not isinstance(described, dict) or not isinstance(described.get("model_type"), str):
        raise UsageError(f"model {model!r}: {file} names no model_type, so it is not a transformers configuration.")
    from transformers import AutoConfig

    try:
        config = AutoConfig.for_model(**described)
    except Exception as error:  # transformers raises many types of errors for invalid configurations
        raise UsageError(f"model {model!r}: {brief(error)}") from None
    _check_config(config, model)
    longest = getattr(config, "max_position_embeddings", None)
    if isinstance(longest, int) and seq > longest:
        raise UsageError(
            f"seq is {seq}, longer than the {longest} positions of {model!r}; take --seq {longest} or less."
        )
    return config


LOOPS = re.compile("Mamba.*Mixer|GatedDelta|RgLru|xLSTM|mLSTM|Rwkv.*Attention")
"""Matches names of transformers' modules that loop over tokens, or chunks of them, if their fused kernels are not installed."""
ATTENTIONS = {  # option -> the key of `Efficiency.attention` whose speed is assumed
    "auto": "fa2", "eager": "fa2", "fa1": "fa1", "fa2": "fa2", "fa3": "fa3", "cudnn": "cudnn", "flex": "flex",
}  # fmt: skip


def _check_config(config: Any, model: str) -> None:
    """Raise `UsageError` if `config` has no layers, has both an encoder and a decoder, or has quantized weights."""
    layers = getattr(config.get_text_config(), "num_hidden_layers", None)
    if isinstance(layers, int) and layers < 1:
        raise UsageError(f"model {model!r} has {layers} layers (num_hidden_layers); it takes 1 or more.")
    # transformers would build the decoder alone, as a causal language model.
    if getattr(config, "is_encoder_decoder", False):
        raise UsageError(
            f"model {model!r} is of type {config.model_type!r}, an encoder with a decoder; plan it as a task (--task), or from "
            "Python, as accordion.Workload(model, loss, batch)."
        )
    if getattr(config, "quantization_config", None):
        raise UsageError(
            f"model {model!r} has quantized weights (quantization_config), whose training cannot be planned; remove that entry. "
            "Frozen weights in four bits are --lora 16 --quantize nf4."
        )


def remarks_on(config: Any, model: nn.Module) -> list[str]:
    """Return texts that tell the user how `model`, built from the transformers configuration `config`, is planned; [] for a
    causal model without loops over tokens."""
    remarks = []
    if is_encoder(config):
        remarks.append(
            f"an encoder: planned as {type(model).__name__}, which fills in masked tokens, and not as a causal model"
        )
    loops = sorted({type(m).__name__ for m in model.modules() if LOOPS.search(type(m).__name__)})
    if loops:
        remarks.append(
            f"{', '.join(loops)}: timed by a reference loop over tokens, and fused kernels take a small part of that time, so "
            "the step time and tokens/s are no prediction"
        )
    return remarks


LOSSES = {
    "plain": "logits, and a copy of them in float32 from which the loss and its gradient are computed",
    "fused": "one kernel over logits in the compute dtype, and one for their gradient (FlashAttention's, Liger's)",
    "chunked": "`accordion.linear_cross_entropy`: head and loss together in chunks of tokens, never the logits of all",
    "head_rows": "the same with a few rows of the head at a time, never the whole head",
}
OF_HEAD = ("chunked", "head_rows")  # computed together with the head, an `nn.Linear`


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """Options of a language model: how it computes loss, attention and MLPs, and which parameters it trains in which dtype.
    Raises `UsageError` for an unknown name, or a number out of range."""

    loss: str = "plain"  # a key of `LOSSES`
    attention: str = "auto"  # a key of `ATTENTIONS`
    mlp_tiles: int = 1  # parts of the tokens that an MLP computes one after another
    pure: bool = False  # parameters in bf16
    lora_rank: int = 0  # rank of LoRA adapters; all other parameters are frozen. 0: no adapters
    lora_targets: str = ALL  # linear layers with adapters: last names separated by commas; "all": all but the head
    quantize: str | None = None  # data type of four bits of frozen weights, as `accordion.quantize` takes it

    def __post_init__(self) -> None:
        known = {"loss": list(LOSSES), "attention": list(ATTENTIONS), "quantize": list(get_args(FourBits))}
        for kind, names in known.items():
            name = getattr(self, kind)
            if name not in names and (kind, name) != ("quantize", None):
                raise UsageError(f"{kind} {name!r} is unknown; {nearest(name, names)}")
        if self.mlp_tiles < 1:
            raise UsageError(f"mlp_tiles is {self.mlp_tiles}; it takes 1 or more.")
        if not 0 <= self.lora_rank <= 4096:
            raise UsageError(f"lora_rank is {self.lora_rank}; it takes 0 (no adapters) to 4,096.")


def trained_model(config: Any, label: str, kernels: Kernels) -> nn.Module:
    """Return the language model of `config` on the meta device, with the dtype, attention, MLP tiles and adapters of `kernels`.
    `label`: its name in errors. Raises `UsageError` if it cannot be built, or if adapters, four bits or loss do not suit it."""
    attention = "eager" if kernels.attention == "eager" else None
    model = (masked_model if is_encoder(config) else language_model)(config, label, attention)
    if kernels.pure:
        model = model.to(torch.bfloat16)
    if kernels.lora_rank:
        model = with_adapters(model, label, kernels.lora_rank, kernels.lora_targets, kernels.quantize)
    elif kernels.quantize is not None:
        raise UsageError(
            f"{label} has weights of four bits, which cannot be trained; train adapters instead: --lora 16."
        )
    if kernels.mlp_tiles > 1:
        tile_mlps(model, kernels.mlp_tiles)
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if kernels.loss in OF_HEAD and not isinstance(head, nn.Linear):
        raise UsageError(f"the head of {label} is no nn.Linear; take --loss fused or plain.")
    return model


def language_subject(config: Any, label: str, micro_batch: int, seq: int, kernels: Kernels) -> Subject:
    """Return the training to trace: the language model of `config`, micro-batches of `micro_batch` random sequences of `seq`
    tokens, and a loss, which raises `UsageError` if the model's own code fails. `label`: name of the model in errors."""
    vocab = int(config.get_text_config().vocab_size)

    def tokens_and_labels() -> tuple[Tensor, Tensor]:
        both = torch.randint(vocab, (2, micro_batch, seq))
        return both[0], both[1]

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        try:
            return token_loss(kernels.loss, model, *batch)
        except Exception as error:  # torch and transformers raise many types of errors for sizes that do not match
            raised_in = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
            ours = raised_in.is_relative_to(Path(__file__).parents[1])
            if ours or isinstance(error, AccordionError) or _torch.asks_for_values(error):
                raise
            raise UsageError(f"{label} can be built, but not run: {brief(error)}") from error

    return Subject(make=partial(trained_model, config, label, kernels), batch=tokens_and_labels, loss=loss)


# -- losses of a language model, which differ in the memory that they take


def token_loss(kind: str, model: Any, tokens: Tensor, labels: Tensor) -> Tensor:
    """Run `model` on `tokens`, and return its loss for `labels`, summed over tokens, 0-d. `kind`: a key of `LOSSES`; with
    "fused" the value is wrong, but memory and kernels are right. `tokens`, `labels`: (micro_batch, seq)."""
    if kind in OF_HEAD:
        head = model.get_output_embeddings()
        with head_returns_loss(head, labels, reduction="sum", head_rows=kind == "head_rows"):
            loss: Tensor = model(input_ids=tokens, use_cache=False).logits
        return loss
    logits = model(input_ids=tokens, use_cache=False).logits  # (micro_batch, seq, vocab)
    if kind == "fused":
        return _Fused.apply(logits, labels).float()  # type: ignore[no-any-return,no-untyped-call]
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum")


class _Fused(torch.autograd.Function):
    """Stand-in for a fused loss: forward reads the logits once, backward reads them and writes a gradient. Values are wrong."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        sums = torch.logsumexp(logits, -1)  # (micro_batch, seq)
        ctx.save_for_backward(logits)
        return sums.float().sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (logits,) = ctx.saved_tensors
        return logits * grads[0].to(logits.dtype), None
