"""Generation on one rank: join the group, load the model, answer prompts, join all-gathers of other ranks, print."""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import Store

import accordion as acc
from accordion.generate.options import GenerateOptions
from accordion.generate.prompts import Prompt, num_new
from accordion.models.stored import (
    StoredModel,
    computing,
    dtype_of,
    end_of_turn,
    ends_of,
    meta_model,
    tokenizer_of,
)
from accordion.train.launch import RankPlace, join_group
from accordion.weights.export import load_exported
from accordion.weights.pretrained import load_saved

AS_STORED = acc.Precision(reduce=None, master=None)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
GIB = 2**30
SHARE = 0.9  # fraction of the free memory for the model: allocators round up, and activations need some
CGROUPS = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))
POLL_S = 0.02  # interval between two polls of the store for answers
TIMEOUT_S = 600  # how long a rank waits for another one before it exits
FIRST = 0  # padding token if neither tokenizer nor model names one: every model has it


def generate(
    place: RankPlace, store: Store, options: GenerateOptions, stored: StoredModel, prompts: Sequence[Prompt], kind: str
) -> None:
    """Run one rank: load the model `stored`, and generate texts for this rank's share of `prompts`; rank 0 prints the texts of
    all ranks. Creates the process group and destroys it at the end. Turns off warnings of Python and transformers in this
    process. Collective. `place`: rank and number of ranks. `store`: the job's store. `kind`: device type."""
    warnings.simplefilter("ignore")  # transformers warns about settings that are not the user's
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    device = join_group(place, store, kind, TIMEOUT_S)
    whole = meta_model(stored, dtype_of(stored) if options.dtype == "auto" else DTYPES[options.dtype])
    model = computing(whole)
    new = num_new(options, prompts, model.config)
    longest = max(len(prompt.ids) for prompt in prompts) + new
    needed = full_bytes(model, place.world, longest, options.batch)
    full, how = _fits(options, needed, place, device)
    acc.shard(model, init_device_mesh(device.type, (place.world,), mesh_dim_names=("shard",)), precision=AS_STORED)
    _fill(whole, model, stored)
    tokenizer = tokenizer_of(stored)
    printer = Printer(prompts, store, tokenizer, options, speaks=place.rank == 0)
    writer = TextWriter(model, tokenizer, stored, replace(options, max_new_tokens=new), device)
    indices = range(place.rank, len(prompts), place.world)
    with torch.no_grad(), acc.full_params(model) if full else nullcontext():
        steps = None if full else CommonSteps(model, device)
        for at in range(0, len(indices), options.batch):
            chosen = {i: prompts[i].ids for i in indices[at : at + options.batch]}
            printer.send(writer.write(chosen, printer.streamer()))
            printer.show()
        if steps is not None:
            steps.finish(printer)
    printer.end(f"{how}, {place.world} rank{'s' if place.world > 1 else ''}")
    dist.barrier()
    dist.destroy_process_group()


def full_bytes(model: nn.Module, num_ranks: int, num_tokens: int, batch: int) -> int:
    """Estimate the bytes that one rank needs to keep all unsharded parameters, its shards, and the cache of keys and values of
    `batch` sequences of `num_tokens` tokens each. `model`: on any device, in the dtype of the computation."""
    config: Any = model.config
    weights = sum(p.nbytes for p in {id(p): p for p in model.parameters()}.values())
    words = config.get_text_config() if hasattr(config, "get_text_config") else config
    heads = getattr(words, "num_attention_heads", None) or 1
    kv_heads = getattr(words, "num_key_value_heads", None) or heads
    hidden, layers = getattr(words, "hidden_size", None) or 0, getattr(words, "num_hidden_layers", None) or 0
    head_dim = getattr(words, "head_dim", None) or hidden // heads
    cache = 2 * layers * kv_heads * head_dim * next(model.parameters()).element_size() * num_tokens * batch
    return weights + weights // num_ranks * (num_ranks > 1) + cache  # with one rank the shards are the full parameters


def free_bytes(device: torch.device, num_ranks: int) -> int:
    """Return the free memory of an accelerator in bytes. For the CPU, return the bytes that the system or the control group has
    available, whichever are fewer, divided by `num_ranks` (ranks on this host); 0 if unknown."""
    if device.type != "cpu":
        return int(torch.accelerator.get_memory_info(device)[0])
    free = []
    with suppress(OSError, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    for limit, used in CGROUPS:
        with suppress(OSError, ValueError):  # no such control group, or one without a limit ("max")
            most = int(Path("/sys/fs/cgroup", limit).read_text())
            free.append(most - int(Path("/sys/fs/cgroup", used).read_text()))
    return max(0, min(free, default=0)) // num_ranks


def _fits(options: GenerateOptions, needed: int, place: RankPlace, device: torch.device) -> tuple[bool, str]:
    """Return (True if each rank is to keep the whole model, text for the user), equal on all ranks. `needed`: bytes of a whole
    model on one rank. If the option `hold` is "auto", the least free memory of all ranks decides. Collective."""
    free = torch.tensor(free_bytes(device, place.local_world), dtype=torch.int64, device=device)
    dist.all_reduce(free, op=dist.ReduceOp.MIN)
    full = options.hold == "full" or (options.hold == "auto" and needed <= SHARE * int(free))
    sizes = f"{needed / GIB:.2f} GiB a rank of {int(free) / GIB:.2f} free"
    return full, f"{'full parameters' if full else 'unit by unit'} ({sizes})"


def _fill(whole: nn.Module, model: nn.Module, stored: StoredModel) -> None:
    """Load the shards of `model` from `stored`, then the shards of the adapter, if there is one. Collective. `whole`: the PEFT
    model around `model`, or `model` itself if there is no adapter."""
    if stored.kind == "checkpoint":
        load_saved(model, stored.path)
    else:
        acc.load_pretrained(model, stored.path)
    if stored.adapter is not None and stored.lora is None:
        load_exported(whole, stored.adapter)
    elif stored.adapter is not None:
        acc.load(stored.adapter, whole, only="trained")


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenText:
    """A frozen record of the text generated for one prompt, which a rank sends as JSON to the rank that prints."""

    index: int  # of the prompt
    text: str
    num_tokens: int
    ended: bool  # by an end token, and not by the limit of tokens


class TextWriter:
    """Generates text with a model of transformers. The constructor replaces the model's `generation_config`. If each call of
    the model all-gathers parameters, create `CommonSteps` before the first `write`, so that all ranks call the model equally
    often."""

    def __init__(
        self, model: nn.Module, tokenizer: Any, stored: StoredModel, options: GenerateOptions, device: torch.device
    ) -> None:
        self._model: Any = model
        self._tokenizer, self._options, self._device = tokenizer, options, device
        self._settings = settings_of(model, tokenizer, stored, options)
        self._model.generation_config = self._settings  # `generate` would merge the model's own settings into ours

    def write(self, prompts: Mapping[int, tuple[int, ...]], streamer: Any = None) -> list[WrittenText]:
        """Generate text for `prompts` (index -> token ids) in one batch, and return the texts in order. Seeds torch's generators
        with the option `seed` plus the lowest index. `streamer` of transformers: prints the text of a single prompt meanwhile."""
        longest = max(len(ids) for ids in prompts.values())
        rows = [[self._settings.pad_token_id] * (longest - len(ids)) + list(ids) for ids in prompts.values()]
        real = [[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts.values()]
        torch.manual_seed(self._options.seed + min(prompts))
        written = self._model.generate(
            input_ids=torch.tensor(rows, device=self._device),  # (b, tokens), padded on the left
            attention_mask=torch.tensor(real, device=self._device),
            generation_config=self._settings,
            streamer=streamer,
        )
        answers, ends = [], self._settings.eos_token_id or ()
        for index, row in zip(prompts, written, strict=True):
            ids = row[longest:].tolist()
            end = next((i for i, token in enumerate(ids) if token in ends), None)
            text = self._tokenizer.decode(ids[:end], skip_special_tokens=True)
            num_tokens = len(ids) if end is None else end + 1
            answers.append(WrittenText(index=index, text=text, num_tokens=num_tokens, ended=end is not None))
        return answers


def settings_of(model: nn.Module, tokenizer: Any, stored: StoredModel, options: GenerateOptions) -> Any:
    """Return the `GenerationConfig`: end, padding and first tokens from `stored.generation` (`model`'s settings if that is
    None) and from `tokenizer`; sampling and number of tokens from `options`, whose `max_new_tokens` must not be None."""
    from transformers import GenerationConfig

    base: Any = getattr(model, "generation_config", None)
    if stored.generation is not None:
        base = GenerationConfig(**stored.generation)
    of_chat = end_of_turn(tokenizer) if options.chat else None
    ends = sorted(ends_of(getattr(base, "eos_token_id", None), of_chat) or ends_of(tokenizer.eos_token_id))
    pads = (tokenizer.pad_token_id, getattr(base, "pad_token_id", None), *ends)
    draws = options.temperature > 0
    how = {"temperature": options.temperature, "top_p": options.top_p, "top_k": 0} if draws else {}  # 0: no limit
    return GenerationConfig(
        max_new_tokens=options.max_new_tokens,
        do_sample=draws,
        eos_token_id=ends or None,
        pad_token_id=next((pad for pad in pads if pad is not None), FIRST),
        bos_token_id=getattr(base, "bos_token_id", None),
        **how,
    )


class Printer:
    """Shows the answers of all ranks. Each rank passes its own to `send`, calls `show` in between, and `end` last. The rank
    that `speaks` prints all answers, in the order of `prompts`; the others are silent."""

    def __init__(
        self, prompts: Sequence[Prompt], store: Store, tokenizer: Any, options: GenerateOptions, *, speaks: bool
    ) -> None:
        self._prompts, self._store, self._tokenizer, self._speaks = prompts, store, tokenizer, speaks
        self._as_json, self._num_shown, self._num_tokens = options.json, 0, 0
        self._streams = speaks and len(prompts) == 1 and not options.json
        self._began_s = time.perf_counter()

    def streamer(self) -> Any:
        """Return a streamer that prints text as it is generated; None with --json, for several prompts, or on a silent rank."""
        if not self._streams:
            return None
        from transformers import TextStreamer

        return TextStreamer(self._tokenizer, skip_prompt=True, skip_special_tokens=True)

    def send(self, answers: Sequence[WrittenText]) -> None:
        for answer in answers:
            self._store.set(_key(answer.index), json.dumps(asdict(answer)))

    def show(self) -> None:
        """Print new answers in the order of the prompts, up to the first missing one. Does nothing on a silent rank."""
        while self._speaks and self._num_shown < len(self._prompts) and self._store.check([_key(self._num_shown)]):
            answer = WrittenText(**json.loads(self._store.get(_key(self._num_shown))))
            prompt = self._prompts[self._num_shown].text
            if self._as_json:
                words = {"prompt": prompt, "text": answer.text, "tokens": answer.num_tokens, "ended": answer.ended}
                print(json.dumps(words), flush=True)
            elif len(self._prompts) > 1:
                print(f"> {prompt}\n{answer.text}\n", flush=True)
            elif not self._streams:
                print(answer.text, flush=True)
            self._num_shown += 1
            self._num_tokens += answer.num_tokens

    def end(self, how: str) -> None:
        """Wait for all ranks' answers, print them, then speed and the text `how` to stderr. Does nothing on a silent rank."""
        if not self._speaks:
            return
        while self._num_shown < len(self._prompts):
            self.show()
            time.sleep(POLL_S)
        seconds = time.perf_counter() - self._began_s
        speed = f"{self._num_tokens:,} tokens in {seconds:.1f} s, {self._num_tokens / seconds:,.1f} tokens/s"
        print(f"{speed}; {how}", file=sys.stderr, flush=True)


def _key(index: int) -> str:
    return f"accordion/answer/{index}"


class CommonSteps:
    """Makes all ranks call a sharded `model` equally often, since each call all-gathers parameters; ranks may have different
    numbers of prompts. The constructor adds a hook to `model` that, before each call, counts the ranks that still generate. A
    rank without prompts left calls `finish`, which makes dummy calls as long as another rank generates."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model, self._device = model, device
        self._handle = model.register_forward_pre_hook(lambda *_: self._begin(1), prepend=True)

    def _begin(self, working: int) -> None:
        self._num_working = torch.tensor(working, device="cpu")
        dist.all_reduce(self._num_working)

    def finish(self, printer: Printer) -> None:
        """Make dummy calls of the model until no rank generates; after each, `printer` prints new answers. Each rank must call
        this method once, when it has no prompts left. Removes the hook that the constructor added."""
        self._handle.remove()
        token = torch.zeros(1, 1, dtype=torch.int64, device=self._device)  # (b, tokens)
        while True:
            self._begin(0)
            if not int(self._num_working):
                return
            self._model(input_ids=token, use_cache=False)
            printer.show()
