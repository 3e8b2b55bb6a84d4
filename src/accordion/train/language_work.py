"""Training of a causal language model on packed text or on examples with answers: losses, validation and samples."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from accordion.checkpoint.streamed import draft_of
from accordion.describe import describe
from accordion.errors import UsageError
from accordion.models.stored import ends_of, generation_config, with_lora
from accordion.state import Only, full_params, sharded_engine
from accordion.tasks.loaded import made_optimizer, optimizer_of
from accordion.train.batches import OrderedBatches, on_device
from accordion.train.config import Config
from accordion.train.data import (
    IGNORED,
    GlobalOrder,
    Sequences,
    Share,
    inputs_and_labels,
    num_sequences,
    num_windows,
    rows_read,
    validation_batches,
    validation_order,
)
from accordion.train.metrics import Validation
from accordion.train.model import causal_model, configuration, documents_in_rows, fill
from accordion.train.packing import Batch, Collate, ExampleRows, LengthOrder, validation_rows
from accordion.train.screen import Screen
from accordion.train.sources import Split
from accordion.train.token_tables import ExampleFiles, TokenFiles

SAMPLE_TOKENS, PROMPT_TOKENS = 64, 16
SMALL_BYTES = 4 << 30  # smaller models are sampled from full parameters, larger ones sharded, unit by unit
TEMPERATURE = 0.8
BASE = "base"  # in the run folder, for the randomly initialised base of adapters
# Two documents whose logits are compared in either order.
ROWS_OF_TEST = ((1, 2, 3, 4), (5, 6, 7, 8, 9))


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageWork:
    """Base class of language model training. `generation`, `spec`: content of generation_config.json and tokenizer.json.
    `unit`, `of_what`: for messages, the name of the units of data, and text after "perplexity"."""

    config: Config
    files: TokenFiles | ExampleFiles
    generation: Mapping[str, Any]
    spec: str
    unit: str
    of_what: str = ""
    counted: str = "tokens"

    def _held_out(self) -> tuple[int, Callable[[Share, Sequence[int]], Iterator[Any]]]:
        """Return (number of validation rows, function of a share and an order of rows that yields this rank's batches)."""
        raise NotImplementedError

    def _sums(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """Return (sum of the losses of the labels that are not `IGNORED`, number of these labels), both 0-d."""
        raise NotImplementedError

    @property
    def data(self) -> str:
        """Digest of the run's data, stored in checkpoints to recognise other data."""
        return self.files.digest

    def agreed(self) -> dict[str, str]:
        files = self.files
        return {
            self.unit: f"{files.num_train:,} ({files.digest[:12]})",
            "a tokenizer": files.tokenizer_digest[:12],
        }

    def progress(self, model: nn.Module) -> dict[str, Any]:
        return {**self.described(model), "data": self.data, "tokenizer": self.files.tokenizer_digest}

    def has_data_of(self, extra: Mapping[str, Any]) -> bool:
        return bool(extra["data"] == self.data)

    @torch.no_grad()
    def validate(self, model: nn.Module, share: Share, device: torch.device) -> Validation:
        """Return the validation: the mean loss of the labels of all ranks that are not `IGNORED`. Collective."""
        count, batches_of = self._held_out()
        order = validation_order(count, self.config.train.validation_rows)
        was_training = model.training
        model.eval()
        total = torch.zeros(2, dtype=torch.float64, device=device)  # loss, tokens
        for batch in batches_of(share, order):
            total += torch.stack([value.double() for value in self._sums(model, on_device(batch, device))])
        dist.all_reduce(total)
        model.train(was_training)
        loss, tokens = total.tolist()
        perplexity = math.exp(min(loss / tokens, 700.0))
        words = f" (perplexity {perplexity:,.1f}{self.of_what}; {rows_read(order, count)})"
        return Validation(loss=loss / tokens, words=words)

    @torch.no_grad()
    def _show_sample(
        self, model: nn.Module, device: torch.device, prompt: list[int], seed: int, screen: Screen, **words: bool
    ) -> None:
        """Show a continuation of `prompt` by the model, up to an end token. Collective; equal on every rank. `device`: device of
        the computation; parameters may be elsewhere. `words`: options of the tokenizer's `decode`."""
        generator = torch.Generator().manual_seed(seed)
        small = describe(model).total_params * 4 <= SMALL_BYTES
        was_training = model.training
        model.eval()
        ids = list(prompt)
        with full_params(model) if small else nullcontext():
            for _ in range(SAMPLE_TOKENS):
                shown = torch.tensor([ids[-self.config.data.seq_len :]], device=device)  # (1, tokens)
                logits = model(input_ids=shown, use_cache=False).logits[0, -1].float().cpu()  # (vocab,)
                token = int(torch.multinomial(torch.softmax(logits / TEMPERATURE, dim=-1), 1, generator=generator))
                if token in self.generation["eos_token_id"]:
                    break
                ids.append(token)
        model.train(was_training)
        tokenizer = Tokenizer.from_str(self.spec)
        screen.sample(tokenizer.decode(prompt, **words), tokenizer.decode(ids[len(prompt) :], **words))

    def model(self, seed: int) -> nn.Module:
        return trained_model(self.config)

    def units(self) -> None:
        return None

    def fill(self, model: nn.Module, seed: int, *, on_meta: bool) -> None:
        """Initialise the model, adapters like PEFT. If they have dropout, ranks draw different random numbers afterwards."""
        fill(model, self.config.model, seed)
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

    def described(self, model: nn.Module) -> dict[str, Any]:
        """Return what a checkpoint stores of its model, end tokens and adapters, for `accordion export` and `generate`."""
        config = json.loads(model.config.to_json_string(use_diff=False))  # type: ignore[operator, union-attr]
        config["eos_token_id"] = ends_of(config.get("eos_token_id"), self.generation["eos_token_id"])
        extra = {"model_config": config, "generation_config": dict(self.generation)}
        if self.config.adapter.kind == "none":
            return extra
        assert self.config.model.path is not None, "set by with_base"
        base = str(Path(self.config.model.path).absolute())
        return {**extra, "adapter": {**asdict(self.config.adapter), "base": base}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Text(LanguageWork):
    """Training of a language model on text."""

    files: TokenFiles
    unit: str = "training tokens"

    def batches(self, share: Share, seed: int, *, pins: bool) -> OrderedBatches:
        sequences = Sequences(self.files.read("train"), self.config.data.seq_len)
        return OrderedBatches(sequences, share, seed, None, pins=pins)

    def notes(self, share: Share) -> list[str]:
        count = num_sequences(self.files.num_train, self.config.data.seq_len)
        return GlobalOrder(count, share, 0).notes(f"sequences of {self.config.data.seq_len} tokens")

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        """Return the mean loss of a token in `batch`, 0-d."""
        return token_losses(model, batch) / (batch.shape[0] * self.config.data.seq_len)

    def num_counted(self, share: Share, batches: list[Any]) -> int:
        return share.global_batch * self.config.data.seq_len

    def _held_out(self) -> tuple[int, Callable[[Share, Sequence[int]], Iterator[Any]]]:
        tokens, seq_len = self.files.read("validation"), self.config.data.seq_len
        return num_windows(len(tokens), seq_len), partial(validation_batches, tokens, seq_len)

    def _sums(self, model: nn.Module, batch: Tensor) -> tuple[Tensor, Tensor]:
        return token_losses(model, batch), (batch[:, 1:] != IGNORED).sum()

    def finish(self, model: nn.Module, device: torch.device, seed: int, screen: Screen) -> None:
        """Show a sample of text."""
        prompt = self.files.read("validation")[:PROMPT_TOKENS].to_pylist()
        self._show_sample(model, device, prompt, seed, screen)


@dataclass(frozen=True, slots=True, kw_only=True)
class Instructions(LanguageWork):
    """Training of a language model on examples with answers."""

    files: ExampleFiles
    unit: str = "training examples"
    of_what: str = " of an answer's token"

    @property
    def data(self) -> str:
        data = self.config.data
        return f"{self.files.digest} {data.packing} {data.seq_len}"

    def fill(self, model: nn.Module, seed: int, *, on_meta: bool) -> None:
        LanguageWork.fill(self, model, seed, on_meta=on_meta)
        if self.config.data.packing == "documents":
            check_apart(model)

    def _rows(self, split: Any) -> ExampleRows:
        return ExampleRows(self.files.read(split), self.config.data.seq_len, self.config.data.packing)

    def _collate(self) -> Collate:
        return Collate(self.config.data.seq_len, self.config.data.packing)

    def batches(self, share: Share, seed: int, *, pins: bool) -> OrderedBatches:
        order = LengthOrder if self.config.data.packing == "length" else GlobalOrder
        return OrderedBatches(self._rows("train"), share, seed, self._collate(), pins=pins, order=order)

    def notes(self, share: Share) -> list[str]:
        data, rows = self.config.data, self._rows("train")
        what = f"rows of {data.seq_len} tokens" if data.packing == "documents" else "examples"
        return GlobalOrder(len(rows), share, 0).notes(what)

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return (sum of the losses of answer tokens in `batch`, number of answer tokens), 0-d float32."""
        return answer_losses(model, batch)

    def num_counted(self, share: Share, batches: list[Any]) -> int:
        """Estimate the tokens of all ranks in a step, without padding: those of this rank times the number of ranks."""
        return share.world * sum(int(batch["num_tokens"]) for batch in batches)

    def _held_out(self) -> tuple[int, Callable[[Share, Sequence[int]], Iterator[Any]]]:
        rows = self._rows("validation")
        return len(rows), partial(validation_rows, rows, self._collate())

    def _sums(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        return answer_losses(model, batch)

    def finish(self, model: nn.Module, device: torch.device, seed: int, screen: Screen) -> None:
        """Show an answer to the first held-out example."""
        ids, answers = self.files.read("validation")[0]
        prompt = [int(token) for token in ids[: int(answers.argmax())]][-self.config.data.seq_len :]
        if prompt:
            self._show_sample(model, device, prompt, seed, screen, skip_special_tokens=False)


# -- losses


def token_losses(model: nn.Module, batch: Tensor) -> Tensor:
    """Return the sum of the losses of the labels in `batch` (b, seq_len + 1) that are not `IGNORED`, 0-d float32."""
    inputs, labels = inputs_and_labels(batch)
    with documents_in_rows(several=False):
        logits = model(input_ids=inputs, use_cache=False).logits  # (b, seq_len, vocab)
    return sum_of_losses(logits, labels)


def sum_of_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the sum of the cross entropy, 0-d float32, over labels that are not `IGNORED`. `logits`: (b, tokens, vocab).
    `labels`: (b, tokens)."""
    return functional.cross_entropy(
        logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum"
    )


def check_enough_rows(rows: Mapping[Split, ExampleRows], config: Config, global_batch: int, where: str) -> None:
    """Raise `UsageError` if a split in `rows` has no answer, or if there is less to train on than a global batch."""
    data = config.data
    for split, split_rows in rows.items():
        if not len(split_rows) or not split_rows.fit.num_answers:
            raise UsageError(
                f"no {split} example of {where} has an answer to learn among its first {data.seq_len} tokens (data.seq_len); "
                "raise data.seq_len, shorten the prompts, or give some answers a weight."
            )
    count = len(rows["train"])
    if count < global_batch:
        several = data.packing == "documents"
        what, less = (f"rows of {data.seq_len} tokens", " lower data.seq_len") if several else ("examples", "")
        raise UsageError(
            f"one step takes {global_batch} {what} (ranks x train.micro_batch x train.accumulate), {where} has {count}; lower "
            f"one of these,{less} or give more data."
        )


def answer_losses(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return (sum of the losses of the labels of `batch` that are not `IGNORED`, number of these labels), 0-d float32."""
    shown = {name: batch[name] for name in ("input_ids", "position_ids") if name in batch}
    labels: Tensor = batch["labels"]
    several = "position_ids" in shown
    if several and in_one_row(model):
        shown, labels = {name: value.reshape(1, -1) for name, value in shown.items()}, labels.reshape(1, -1)
    with documents_in_rows(several=several):
        logits = model(**shown, use_cache=False).logits  # (b, tokens, vocab)
    return sum_of_losses(logits, labels), (labels != IGNORED).sum().float()


def in_one_row(model: nn.Module) -> bool:
    """Return True if the model's attention separates documents only in batches of one row, like flash attention."""
    return str(getattr(model.config, "_attn_implementation", "")).startswith("flash")


@torch.no_grad()
def check_apart(model: nn.Module) -> None:
    """Raise `UsageError` on every rank if documents in a row attend to each other. Compares the logits of a document before and
    after another one. Collective."""
    # No attribute of a model shows if its mask uses position ids.
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
        logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    bound = 1e-3 if logits.dtype == torch.float32 else 5e-2
    logits = logits.float().reshape(2, len(first) + len(second), -1)
    model.train(was_training)
    trailing, leading = logits[0, len(first) :], logits[1, : len(second)]
    are_equal = (trailing - leading).abs().max() <= bound * trailing.abs().max()
    everywhere = are_equal.to(torch.int64)
    dist.all_reduce(everywhere, op=dist.ReduceOp.MIN)
    if not int(everywhere):
        raise UsageError(
            f"data.packing is 'documents', but in {type(model).__name__} the examples in a row attend to each other; take "
            "--data.packing length."
        )


# -- the model, and the files next to its weights


def generation_settings(config: Config, ends: list[int]) -> dict[str, Any]:
    """Return the generation settings of the model that is trained from, with the end tokens `ends` added."""
    base = configuration(config.model, config.data)
    settings = {key: getattr(base, key, None) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    if config.model.path is not None:
        settings |= generation_config(Path(config.model.path)) or {}
    present = {key: value for key, value in settings.items() if value is not None}
    return {**present, "eos_token_id": ends_of(settings["eos_token_id"], ends)}


def trained_model(config: Config) -> nn.Module:
    """Return the model of `config` on the meta device; with adapters on frozen weights if it has adapters."""
    model = causal_model(config.model, config.data)
    return model if config.adapter.kind == "none" else with_lora(model, asdict(config.adapter), config.model.path)


def with_base(config: Config, run_dir: Path) -> Config:
    """Save the frozen weights below adapters, if they are randomly initialised, in the run folder, which `config` then names.
    Checkpoints of adapters do not have them. The whole model is in host memory meanwhile. Returns the new `config`."""
    if config.adapter.kind == "none" or config.model.init == "pretrained":
        return config
    folder = run_dir / BASE
    if not folder.is_dir():
        from transformers import AutoModelForCausalLM

        torch.manual_seed(config.train.seed)
        base = AutoModelForCausalLM.from_config(configuration(config.model, config.data))
        with draft_of(folder) as draft:
            base.save_pretrained(draft)
            if not folder.is_dir():  # else another host has saved the same base
                draft.rename(folder)
    return replace(config, model=replace(config.model, path=str(folder), init="pretrained"))
