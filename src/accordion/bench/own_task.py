"""`accordion bench --task`: train the user's task under each contender; each rank loads the task itself."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from itertools import count, islice
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from accordion.bench.contenders import Loop, Setting, loop_of
from accordion.bench.trainer import Trainer
from accordion.errors import UsageError
from accordion.tasks.errors import of_the_task
from accordion.tasks.flags import read_task
from accordion.tasks.loaded import LoadedTask, data_of, example_of, is_indexed, is_loader, mean_loss, model_of
from accordion.train.batches import rows_of
from accordion.workers.ranks import Seat

PROG = "accordion bench"
BATCH = 8  # default samples per rank and step


def measured_task(class_path: str, words: list[str], batch: int, *, bf16: bool) -> tuple[Setting, float]:
    """Run one forward and backward of a task in this process. Returns (its setting, floating-point operations of a step). Raises
    `UsageError` if the task cannot be measured, and `TaskError` if the user's code fails."""
    task, size = read_task(class_path, words, PROG), batch or BATCH
    with of_the_task("model()"):
        model = _real(task)
    with of_the_task("dataset('train')"):
        example = example_of(task, size)
    with of_the_task("loss(model, batch)"), FlopCounterMode(display=False) as counter:
        mean_loss(task, model.train(), copy.deepcopy(example)).backward()
    setting = Setting(model=task.name, batch=rows_of(example), seq=1, bf16=bf16, task=(class_path, *words))
    return setting, float(counter.get_total_flops())


def _real(task: LoadedTask) -> nn.Module:
    model = model_of(task)
    if any(p.is_meta for p in model.parameters()):
        raise UsageError(
            f"the model of task {task.name!r} is on the meta device, which other contenders do not support; return a real one."
        )
    return model


def start_task(seat: Seat, contender: str, setting: Setting) -> Trainer:
    """Return the trainer of one rank of a task under `contender`."""
    class_path, *words = setting.task
    task = read_task(class_path, words, PROG)

    def build() -> Loop:
        torch.manual_seed(setting.seed)
        loop = loop_of(contender, _real(task).to(seat.device).train(), seat, setting)
        loop.loss = partial(mean_loss, task)
        return loop

    batches = ((batch,) for batch in _batches(task, seat, setting.batch))
    return Trainer(seat, build, batches, bf16=setting.bf16)


def _batches(task: LoadedTask, seat: Seat, size: int) -> Iterator[Any]:
    """Yield this rank's batches, without end and in the order of the data, so that they are equal for all contenders."""
    data = data_of(task, "train", seat.rank, seat.num_ranks)
    if is_loader(data):
        while True:
            yield from data
    for step in count():
        begin = (step * seat.num_ranks + seat.rank) * size
        if is_indexed(data):
            yield task.collate([data[i % len(data)] for i in range(begin, begin + size)])
        else:
            samples = list(islice(iter(data), begin, begin + size))
            # If an iterable has too few samples, this rank reads its first ones.
            yield task.collate(samples if len(samples) == size else list(islice(iter(data), size)))
