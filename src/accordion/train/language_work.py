"""Training of a causal language model on packed text or on examples with answers: losses, validation, samples."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence, Sized
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional
from torch.optim import Optimizer

from accordion.describe import describe
from accordion.errors import UsageError
from accordion.losses.chunks import head_returns_loss
from accordion.models.language import is_encoder, language_model
from accordion.models.stored import ends_of, generation_config, with_lora
from accordion.sequence.parallel import own_part, sequence_parallel
from accordion.sequence.tiles import tile_mlps
from accordion.state import Only, full_params, sharded_engine
from accordion.tasks.loaded import made_optimizer, optimizer_of
from accordion.train.batches import OrderedBatches, means_of
from accordion.train.config import Config, DataConfig
from accordion.train.data import IGNORED, GlobalOrder, Sequences, Share, validation_batches, validation_order
from accordion.train.metrics import Validation
from accordion.train.model import check_loss_of_head, configuration, documents_in_rows
from accordion.train.packing import Batch, Collate, ExampleRows
from accordion.train.screen import Screen
from accordion.train.sources import Split
from accordion.train.token_tables import TokenFiles
from accordion.weights.four_bits import quantize
from accordion.weights.initialise import initialise
from accordion.weights.pretrained import load_pretrained

SAMPLE_TOKENS, PROMPT_TOKENS = 64, 16
SMALL_BYTES = 4 << 30  # smaller models are sampled from full parameters, larger ones sharded, unit by unit
TEMPERATURE = 0.8
# Two documents whose logits are compared in either order.
ROWS_OF_TEST = ((1, 2, 3, 4), (5, 6, 7, 8, 9))


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageWork:
    """Training of a language model on text or on examples with answers: the methods that the training loop calls. `generation`:
    content of generation_config.json. `spec`: content of tokenizer.json. `sequence`: mesh of the ranks that share each
    sequence; None before ranks start, or if each rank has whole sequences. `counted`: unit of the reported speed."""

    config: Config
    files: TokenFiles
    generation: Mapping[str, Any]
    spec: str
    sequence: DeviceMesh | None = None
    counted: str = field(default="tokens", init=False)

    @property
    def is_text(self) -> bool:
        return self.config.data.format == "text"

    @property
    def data(self) -> str:
        """Text, stored in checkpoints, that differs between two runs if the rows of their data differ."""
        data = self.config.data
        return f"{self.files.digest} {data.packing} {data.seq_len}"

    def agreed(self) -> dict[str, str]:
        files = self.files
        return {
            f"training {'tokens' if self.is_text else 'examples'}": f"{files.num_train:,} ({files.digest[:12]})",
            "a tokenizer": files.tokenizer_digest[:12],
        }

    def progress(self, model: nn.Module) -> dict[str, Any]:
        """Return name -> value to store in `extra` of a checkpoint: "model_config", "generation_config" and, with adapters,
        "adapter", for `accordion export` and `generate`; "data" and "tokenizer", texts that identify those of the run."""
        config = json.loads(model.config.to_json_string(use_diff=False))  # type: ignore[operator, union-attr]
        config["eos_token_id"] = ends_of(config.get("eos_token_id"), self.generation["eos_token_id"])
        extra: dict[str, Any] = {"model_config": config, "generation_config": dict(self.generation)}
        if self.config.adapter.kind != "none":
            assert self.config.model.path is not None, "adapters have a pretrained base"
            base = str(Path(self.config.model.path).absolute())
            extra["adapter"] = {**asdict(self.config.adapter), "base": base, "quantize": self.config.model.quantize}
        return {**extra, "data": self.data, "tokenizer": self.files.tokenizer_digest}

    def has_data_of(self, extra: Mapping[str, Any]) -> bool:
        return bool(extra["data"] == self.data)

    def _collate(self) -> Collate:
        data, multiple = self.config.data, self.config.shard.sequence
        return Collate(data.seq_len, "none" if self.is_text else data.packing, multiple)

    def batches(self, share: Share, seed: int, *, pins: bool) -> OrderedBatches:
        return OrderedBatches(rows_in(self.files, "train", self.config.data), share, seed, self._collate(), pins=pins)

    def notes(self, share: Share) -> list[str]:
        data, size = self.config.data, self.config.shard.sequence
        who = "ranks" if size == 1 else f"groups of {size} ranks"
        return GlobalOrder(len(rows_in(self.files, "train", data)), share, 0).notes(unit_of(data), who)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor | tuple[Tensor, Tensor]:
        """Return the loss of this rank's part of `batch`: the mean over tokens of text, else (sum, number of answer tokens)."""
        total, count = label_losses(model, batch, kind=self.config.model.loss, sequence=self.sequence)
        num_tokens = batch["labels"].numel() // self.config.shard.sequence
        return total / num_tokens if self.is_text else (total, count)

    def num_counted(self, share: Share, batches: list[Any]) -> int:
        """Estimate the tokens, without padding, that all ranks read in a step: those in `batches`, the micro-batches of this
        rank, times the number of ranks (or of groups that share sequences)."""
        return share.world * sum(int(batch["num_tokens"]) for batch in batches)

    @torch.no_grad()
    def validate(self, model: nn.Module, share: Share, device: torch.device) -> Validation:
        """Return the mean loss over the validation labels that are not `IGNORED`, and in `words` the perplexity. Collective."""
        rows = rows_in(self.files, "validation", self.config.data)
        order = validation_order(len(rows), self.config.train.validation_rows)
        options: dict[str, Any] = {"kind": self.config.model.loss, "sequence": self.sequence}
        batches = validation_batches(rows, order, share, self._collate())
        means = means_of(model, batches, lambda batch: {"loss": label_losses(model, batch, **options)}, device)
        perplexity = math.exp(min(means["loss"], 700.0))
        whose = "" if self.is_text else " of an answer's token"
        read = "all" if len(order) == len(rows) else f"{len(order):,} of"
        words = f" (perplexity {perplexity:,.1f}{whose}; {read} {len(rows):,} rows)"
        return Validation(loss=means["loss"], words=words)

    @torch.no_grad()
    def finish(self, model: nn.Module, device: torch.device, seed: int, screen: Screen) -> None:
        """Generate and show up to `SAMPLE_TOKENS` tokens, equal on every rank, after the start of the validation text, or as an
        answer to the first validation example; nothing if the prompt is empty. `seed`: of the sampling. Collective."""
        if self.is_text:
            prompt = self.files.text("validation")[:PROMPT_TOKENS].to_pylist()
        else:
            example, answers = self.files.examples("validation")[0]
            prompt = example[: int(answers.argmax())].tolist()[-self.config.data.seq_len :]
        if not prompt:
            return
        generator = torch.Generator().manual_seed(seed)
        small = describe(model).total_params * 4 <= SMALL_BYTES
        was_training = model.training
        model.eval()
        ids = list(prompt)
        with full_params(model) if small else nullcontext():
            for _ in range(SAMPLE_TOKENS):
                shown = torch.tensor([ids[-self.config.data.seq_len :]], device=device)  # (1, tokens)
                last = logits_at(model, {"input_ids": shown}, [shown.shape[1] - 1], self.sequence)
                logits = last[0, 0].float().cpu()  # (vocab,)
                token = int(torch.multinomial(torch.softmax(logits / TEMPERATURE, dim=-1), 1, generator=generator))
                if token in self.generation["eos_token_id"]:
                    break
                ids.append(token)
        model.train(was_training)
        decode = partial(Tokenizer.from_str(self.spec).decode, skip_special_tokens=self.is_text)
        screen.sample(decode(prompt), decode(ids[len(prompt) :]))

    def model(self, seed: int) -> nn.Module:
        model = trained_model(self.config)
        if self.config.model.loss != "plain":
            check_loss_of_head(model, self.config.model.loss, self.config.shard.units)
        if self.config.model.mlp_tiles > 1:
            tile_mlps(model, self.config.model.mlp_tiles)
        if self.sequence is not None:
            sequence_parallel(model, self.sequence)
        return model

    def units(self) -> None:
        return None

    def fill(self, model: nn.Module, seed: int, *, on_meta: bool) -> None:
        """Fill the sharded `model` with random or pretrained weights, which do not depend on the number of ranks, and
        initialise adapters as PEFT does. Leaves torch's generators seeded: differently on each rank if adapters have dropout,
        otherwise equally. Raises `UsageError` if examples that are packed into one row attend to each other. Collective."""
        torch.manual_seed(seed)
        if self.config.model.path is not None and self.config.model.init == "pretrained":
            load_pretrained(model, self.config.model.path)
        else:
            initialise(model)
        if not self.is_text and self.config.data.packing == "documents":
            check_apart(model, self.sequence)
        if self.config.adapter.dropout:
            torch.manual_seed(seed + 1 + dist.get_rank())

    def optimizer(self, model: nn.Module) -> Optimizer | None:
        make = optimizer_of(self.config.parts)
        return None if make is None else made_optimizer(make, model)

    def scheduler(self, optimizer: Optimizer) -> None:
        return None

    def only(self) -> Only:
        return None if self.config.adapter.kind == "none" else "trained"

    def state(self) -> dict[str, Any]:
        return {}


def rows_in(files: TokenFiles, split: Split, data: DataConfig) -> Sequences | ExampleRows:
    if data.format == "text":
        return Sequences(files.text(split), data.seq_len, rest=split == "validation")
    return ExampleRows(files.examples(split), data.seq_len, data.packing)


def unit_of(data: DataConfig) -> str:
    """Return a word for the rows of `data`, for messages: "examples", or "rows of 128 tokens"."""
    several = data.format == "text" or data.packing == "documents"
    return f"rows of {data.seq_len} tokens" if several else "examples"


def check_enough(rows: Mapping[Split, Sized], data: DataConfig, global_batch: int, where: str) -> None:
    """Raise `UsageError`, which names `where`, if a split in `rows` is empty, or "train" has fewer rows than `global_batch`."""
    empty = next((split for split, split_rows in rows.items() if not len(split_rows)), None)
    if empty is not None:
        raise UsageError(
            f"{where} has less {empty} text than a row of data.seq_len {data.seq_len} tokens takes; lower data.seq_len or give "
            "more text."
            if data.format == "text"
            else f"no {empty} example of {where} has an answer to learn among its first {data.seq_len} tokens (data.seq_len); "
            "raise data.seq_len, shorten the prompts, or give some answers a weight."
        )
    if len(rows["train"]) < global_batch:
        raise UsageError(
            f"one step takes {global_batch} {unit_of(data)} (ranks x train.micro_batch x train.accumulate), {where} has "
            f"{len(rows['train'])}; lower one of these or data.seq_len, or give more data."
        )


# -- losses


def label_losses(
    model: nn.Module, batch: Batch, *, kind: str = "plain", sequence: DeviceMesh | None = None
) -> tuple[Tensor, Tensor]:
    """Return (sum of the cross entropy of the labels in `batch` that are not `IGNORED`, number of these labels), 0-d float32.
    If ranks share each sequence (`sequence`), both are of this rank's part. `kind`: value of `model.loss`; unless it is
    "plain", the head computes the loss itself, without the logits of all tokens."""
    shown: dict[str, Tensor] = {n: batch[n] for n in ("input_ids", "position_ids", "labels") if n in batch}
    several = "position_ids" in shown
    if several and in_one_row(model):
        shown = {name: value.reshape(1, -1) for name, value in shown.items()}
    if sequence is not None:
        shown = own_part(shown, sequence)
    labels: Tensor = shown.pop("labels")
    options: dict[str, Any] = {"ignore_index": IGNORED, "reduction": "sum"}
    if kind == "plain":
        with documents_in_rows(several=several):
            logits = model(**shown, use_cache=False).logits  # (b, tokens, vocab)
        total = functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), **options)
    else:
        head: Any = model.get_output_embeddings()  # type: ignore[operator]
        head_rows = kind == "head_rows"
        with documents_in_rows(several=several), head_returns_loss(head, labels, head_rows=head_rows, **options):
            total = model(**shown, use_cache=False).logits  # the loss, which the head computes in their place
    return total, (labels != IGNORED).sum().float()


def in_one_row(model: nn.Module) -> bool:
    """Return True if the model's attention separates documents only in batches of one row, as flash attention does."""
    return str(getattr(model.config, "_attn_implementation", "")).startswith("flash")


def logits_at(model: nn.Module, whole: dict[str, Tensor], places: Sequence[int], sequence: DeviceMesh | None) -> Tensor:
    """Return the logits of the tokens at indices `places` of each sequence, (b, places, vocab). `whole`: argument of `model` ->
    (b, tokens). If ranks share each sequence (mesh `sequence`), each computes a part and returns all these logits.
    Collective."""
    at = torch.tensor(places, device=whole["input_ids"].device)
    if sequence is None:
        return model(**whole, use_cache=False).logits[:, at]  # type: ignore[no-any-return]
    padding = -whole["input_ids"].shape[1] % sequence.size()
    part = own_part({name: functional.pad(value, (0, padding)) for name, value in whole.items()}, sequence)
    logits = model(**part, use_cache=False).logits  # (b, tokens of this rank, vocab)
    at -= sequence.get_local_rank() * logits.shape[1]
    is_own = (at >= 0) & (at < logits.shape[1])
    chosen = torch.where(is_own[:, None], logits[:, at.clamp(0, logits.shape[1] - 1)].float(), 0.0)
    dist.all_reduce(chosen, group=sequence.get_group())
    return chosen.to(logits.dtype)


@torch.no_grad()
def check_apart(model: nn.Module, sequence: DeviceMesh | None = None) -> None:
    """Run `model` on two short documents, and raise `UsageError` on every rank if documents in a row attend to each other.
    Collective. `sequence`: mesh of the ranks that share each sequence, if there is one."""
    # Compare the logits of a document before and after another one. No attribute of a model shows if its mask uses position ids.
    device = sharded_engine(model, "training").context.device
    was_training = model.training
    model.eval()
    first, second = ROWS_OF_TEST
    ids = torch.tensor([[*first, *second], [*second, *first]], device=device)
    places = [torch.arange(len(part), device=device) for part in (first, second)]
    positions = torch.stack([torch.cat(places), torch.cat(places[::-1])])
    if in_one_row(model):
        ids, positions = ids.reshape(1, -1), positions.reshape(1, -1)
    with documents_in_rows(several=True):
        logits = logits_at(model, {"input_ids": ids, "position_ids": positions}, range(ids.shape[1]), sequence)
    bound = 1e-3 if logits.dtype == torch.float32 else 5e-2
    logits = logits.float().reshape(2, len(first) + len(second), -1)
    model.train(was_training)
    trailing, leading = logits[0, len(first) :], logits[1, : len(second)]
    everywhere = ((trailing - leading).abs().max() <= bound * trailing.abs().max()).to(torch.int64)
    dist.all_reduce(everywhere, op=dist.ReduceOp.MIN)
    if not int(everywhere):
        raise UsageError(
            f"data.packing is 'documents', but in {type(model).__name__} the examples in a row attend to each other; take "
            "--data.packing none."
        )


# -- the model, and the files next to its weights


def generation_settings(config: Config, ends: list[int]) -> dict[str, Any]:
    """Return the generation settings (name -> value) of the model that a run starts from. `ends`: more end tokens to add."""
    base = configuration(config.model, config.data)
    settings = {key: getattr(base, key, None) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    if config.model.path is not None:
        settings |= generation_config(Path(config.model.path)) or {}
    present = {key: value for key, value in settings.items() if value is not None}
    return {**present, "eos_token_id": ends_of(settings["eos_token_id"], ends)}


def trained_model(config: Config) -> nn.Module:
    """Return the model of `config` on the meta device. With `model.quantize`, its linear layers except the head are frozen ones
    of four bits. With adapters, it is a PEFT model in which only the adapters are trained. Raises `UsageError` if transformers
    cannot build the model, or if it is no causal language model."""
    choice = config.model
    described = configuration(choice, config.data)
    attention = None if choice.attention == "auto" else choice.attention
    model = language_model(described, choice.path or choice.preset, attention)
    if is_encoder(described) and not getattr(model.config, "is_decoder", False):
        raise UsageError(
            f"model.path {choice.path!r} is an encoder ({described.model_type}) without a causal mask: it would see the tokens "
            "that it is to predict. Set is_decoder in its config.json, or write your own task (--task)."
        )
    if choice.quantize != "none":
        quantize(model, choice.quantize)
    return model if config.adapter.kind == "none" else with_lora(model, asdict(config.adapter), choice.path)
