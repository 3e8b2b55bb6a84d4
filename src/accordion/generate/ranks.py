"""What every rank does: join, hold the model, answer its own prompts, and take part in the gathers of the others."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import Store

import accordion as acc
from accordion.generate.memory import SHARE, Need, free_bytes, need_of
from accordion.generate.options import GenerateOptions
from accordion.generate.printer import Printer
from accordion.generate.prompts import Prompt, num_new
from accordion.generate.writer import TextWriter
from accordion.models.stored import StoredModel, computing, dtype_of, meta_model, tokenizer_of
from accordion.train.launch import RankPlace, join_group
from accordion.weights.export import load_exported
from accordion.weights.meta_start import load_saved

AS_STORED = acc.Precision(reduce=None, master=None)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
GIB = 2**30
TIMEOUT_S = 600  # after which a rank exits that waits for another one


def generate(
    place: RankPlace, store: Store, options: GenerateOptions, stored: StoredModel, prompts: Sequence[Prompt], kind: str
) -> None:
    """Answer all `prompts`: the whole of one rank. The first one prints."""
    warnings.simplefilter("ignore")  # of transformers, about settings that are not the user's
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    device = join_group(place, store, kind, TIMEOUT_S)
    whole = meta_model(stored, dtype_of(stored) if options.dtype == "auto" else DTYPES[options.dtype])
    model = computing(whole)
    new = num_new(options, prompts, model.config)
    longest = max(len(prompt.ids) for prompt in prompts) + new
    full, how = _held(options, need_of(model, model.config, longest, options.batch), place, device)
    acc.shard(model, init_device_mesh(device.type, (place.world,), mesh_dim_names=("shard",)), precision=AS_STORED)
    _fill(whole, model, stored)
    tokenizer = tokenizer_of(stored)
    printer = Printer(prompts, store, tokenizer, options, speaks=place.rank == 0)
    writer = TextWriter(model, tokenizer, stored, replace(options, max_new_tokens=new), device)
    mine = range(place.rank, len(prompts), place.world)
    with torch.no_grad():
        if full:
            with acc.full_params(model):
                _answer(writer, prompts, mine, options.batch, printer)
        else:
            steps = CommonSteps(model, device)
            _answer(writer, prompts, mine, options.batch, printer)
            steps.finish(printer)
    printer.end(f"{how}, {place.world} rank{'s' if place.world > 1 else ''}")
    dist.barrier()
    dist.destroy_process_group()


def _answer(writer: TextWriter, prompts: Sequence[Prompt], mine: range, batch: int, printer: Printer) -> None:
    for at in range(0, len(mine), batch):
        chosen = mine[at : at + batch]
        printer.keep(writer.write({i: prompts[i].ids for i in chosen}, printer.streamer()))
        printer.show()


def _held(options: GenerateOptions, need: Need, place: RankPlace, device: torch.device) -> tuple[bool, str]:
    """Whether all ranks keep the whole model, and that in words. Before anything of it is in memory."""
    free = torch.tensor(free_bytes(device, place.local_world), dtype=torch.int64, device=device)
    dist.all_reduce(free, op=dist.ReduceOp.MIN)
    fits = need.full(place.world) <= SHARE * int(free)
    sizes = f"{need.full(place.world) / GIB:.2f} GiB a rank of {int(free) / GIB:.2f} free"
    full = options.hold == "full" or (options.hold == "auto" and fits)
    return full, f"{'full parameters' if full else 'unit by unit'} ({sizes})"


def _fill(whole: nn.Module, model: nn.Module, stored: StoredModel) -> None:
    """The weights, of which each rank reads its own rows."""
    if stored.kind == "checkpoint":
        load_saved(model, stored.path)
    else:
        acc.load_pretrained(model, stored.path)
    if stored.adapter is not None and stored.lora is None:
        load_exported(whole, stored.adapter)
    elif stored.adapter is not None:
        acc.load(stored.adapter, whole, only="trained")


class CommonSteps:
    """Owns the step that ranks take together where each forward gathers units: who has no prompt left computes for nothing.

    Each call of the model begins with one number summed over ranks: how many still have something to write. So ranks whose
    prompts differ in number and in length call the model equally often, and none waits for one that has gone.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model, self._device = model, device
        self._handle = model.register_forward_pre_hook(lambda *_: self._begin(1), prepend=True)

    def _begin(self, working: int) -> None:
        self._num_working = torch.tensor(working, device="cpu")
        dist.all_reduce(self._num_working)

    def finish(self, printer: Printer) -> None:
        """Take part until no rank has anything left; answers that have come are printed meanwhile."""
        self._handle.remove()
        token = torch.zeros(1, 1, dtype=torch.int64, device=self._device)  # (b, tokens)
        while True:
            self._begin(0)
            if not int(self._num_working):
                return
            self._model(input_ids=token, use_cache=False)
            printer.show()
