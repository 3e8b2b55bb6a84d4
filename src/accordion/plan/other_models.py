"""Models of transformers that do not read text alone: images, images beside texts, speech, one text into another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accordion.errors import UsageError
from accordion.garbage import without_collections
from accordion.models.language import built
from accordion.plan.losses import expect_labels, loss_of_logits


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelKind:
    """How models of a kind are trained. `auto`: the class of transformers that builds them. `mapping`: of it, the
    configurations that are of this kind. `batch`: the model's named inputs, (configuration, micro-batch, seq) -> name -> tensor.
    `loss`: of (kind of loss, output, inputs), 0-d. `words`: what it does. `has_tokens`: what it makes are tokens of a vocabulary.
    """

    auto: str
    mapping: str
    batch: Callable[[Any, int, int], dict[str, Tensor]]
    loss: Callable[[str, Any, dict[str, Tensor]], Tensor]
    words: str
    has_tokens: bool = False


def kind_of(config: Any) -> ModelKind | None:
    """The kind that a configuration is of; None for language models, and for what is not known."""
    with without_collections():
        from transformers.models.auto import modeling_auto
    for kind in KINDS:
        if type(config) in getattr(modeling_auto, kind.mapping):
            is_pair = not kind.has_tokens or getattr(config, "is_encoder_decoder", False)
            if is_pair:
                return kind
    return None


def model_of_kind(kind: ModelKind, config: Any, where: str, attention: str | None) -> nn.Module:
    """On the meta device. Raises `UsageError`."""
    import transformers

    return built(getattr(transformers, kind.auto), config, where, attention, torch.float32)


def tokens_of(kind: ModelKind, config: Any, seq: int) -> int:
    """Of a sample, which is what is counted: those that it makes, or 1 for a sample without any."""
    return int(kind.batch(config, 1, seq)["decoder_input_ids"].shape[-1]) if kind.has_tokens else 1


def check_loss(kind: ModelKind, loss: str, where: str) -> None:
    """Raises `UsageError`."""
    if loss != "plain" and not kind.has_tokens:
        raise UsageError(f"{where} {kind.words} and has no head over a vocabulary; leave --loss {loss} out.")


def loss_of_kind(kind: ModelKind, loss: str, model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """0-d."""
    if loss == "chunked":
        expect_labels(model, inputs["decoder_input_ids"])
    return kind.loss(loss, model(**inputs), inputs)


# -- what goes in


def _images(config: Any, micro_batch: int, seq: int) -> dict[str, Tensor]:
    """(micro_batch, channels, height, width)."""
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", 224)  # convolutional networks take any
    high, wide = (size, size) if isinstance(size, int) else size
    return {"pixel_values": torch.zeros(micro_batch, getattr(vision, "num_channels", 3), high, wide)}


def _texts(micro_batch: int, seq: int) -> Tensor:
    return torch.zeros(micro_batch, seq, dtype=torch.int64)


def _pairs(config: Any, micro_batch: int, seq: int) -> dict[str, Tensor]:
    text = config.text_config
    longest = getattr(text, "max_position_embeddings", seq)
    return {**_images(config, micro_batch, seq), "input_ids": _texts(micro_batch, min(seq, longest))}


def _speech(config: Any, micro_batch: int, seq: int) -> dict[str, Tensor]:
    """Whole windows: as many frames as positions of the encoder, each of two."""
    if config.model_type != "whisper":
        raise UsageError(
            f"models of type {config.model_type!r} are planned from Python alone, with accordion.plan(model, loss, batch)."
        )
    frames = torch.zeros(micro_batch, config.num_mel_bins, 2 * config.max_source_positions)
    return {"input_features": frames, "decoder_input_ids": _texts(micro_batch, min(seq, config.max_target_positions))}


def _two_texts(config: Any, micro_batch: int, seq: int) -> dict[str, Tensor]:
    return {"input_ids": _texts(micro_batch, seq), "decoder_input_ids": _texts(micro_batch, seq)}


# -- what comes out


def _classified(loss: str, out: Any, inputs: dict[str, Tensor]) -> Tensor:
    labels = torch.zeros(inputs["pixel_values"].shape[0], dtype=torch.int64)
    return F.cross_entropy(out.logits.float(), labels)


def _paired(loss: str, out: Any, inputs: dict[str, Tensor]) -> Tensor:
    """Each image tells its text from the others of the micro-batch, and each text its image."""
    logits, labels = out.logits_per_image.float(), torch.arange(inputs["pixel_values"].shape[0])
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2


def _written(loss: str, out: Any, inputs: dict[str, Tensor]) -> Tensor:
    return loss_of_logits(loss, out.logits, inputs["decoder_input_ids"])


KINDS = (  # the first that fits
    ModelKind(
        auto="AutoModelForSpeechSeq2Seq",
        mapping="MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING",
        batch=_speech,
        loss=_written,
        words="writes down speech",
        has_tokens=True,
    ),
    ModelKind(
        auto="AutoModelForSeq2SeqLM",
        mapping="MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
        batch=_two_texts,
        loss=_written,
        words="makes one text of another, both of --seq tokens",
        has_tokens=True,
    ),
    ModelKind(
        auto="AutoModelForZeroShotImageClassification",
        mapping="MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING",
        batch=_pairs,
        loss=_paired,
        words="finds the text of an image among those of a micro-batch of one rank",
    ),
    ModelKind(
        auto="AutoModelForImageClassification",
        mapping="MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING",
        batch=_images,
        loss=_classified,
        words="classifies images",
    ),
)
