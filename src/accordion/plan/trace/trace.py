"""Run one rank's training step with the real engine on fake tensors, without weights, GPU or other ranks, and log it."""

from __future__ import annotations

import gc
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from accordion import _torch
from accordion.config import Place
from accordion.errors import UsageError
from accordion.garbage import without_collections
from accordion.plan.events import Category, Log, StepPhase, without_host
from accordion.plan.trace import fsdp2, own_engine
from accordion.plan.trace.experts import EXPERT_DATA_AXIS, EXPERTS_AXIS
from accordion.plan.trace.sequence import part_of, share_sequences
from accordion.plan.trace.setup import ShardedTraining, Subject, TrainingSetup
from accordion.plan.trace.substitutes import Substitutes
from accordion.plan.trace.tracker import Tracker
from accordion.safety.liveness.wording import place_of

CUBLAS_BYTES = 32 << 20  # workspace of each thread that multiplies, forward and backward (torch's default on Hopper)


def trace(subject: Subject, run: TrainingSetup) -> Log:
    """Run two training steps of `subject` with the setup `run` on fake tensors, and return the log of the second step, before
    which the optimizer's states exist already, without work on the host.

    Creates a fake process group, and destroys it at the end. Raises `UsageError` if this process has a process group already,
    if the model needs the values of a tensor, if the loss is not one number that requires a gradient, if ranks cannot share its
    sequences, or if the engine refuses the model or `run`.
    """
    if dist.is_initialized():
        raise UsageError("a plan needs a process without a process group; plan before init_process_group.")
    tracker = Tracker()
    stand_ins = Substitutes() if run.device == "cuda" else None
    engine = ENGINES[run.engine]
    with ExitStack() as stack:
        stack.enter_context(without_collections())  # `_steps` says why
        mesh = stack.enter_context(_fake_mesh(run))
        model = subject.make()
        share_sequences(model, run.sequence)
        stack.enter_context(_one_sequence_a_row())
        stack.enter_context(engine.silenced(tracker, run))
        stack.enter_context(_torch.fake_tensors())
        _torch.forget_references()
        stack.callback(_torch.forget_references)
        stack.enter_context(tracker)
        stack.enter_context(stand_ins.installed() if stand_ins else nullcontext())
        tracker.with_workspaces = run.device == "cuda"
        try:
            with tracker.paused():
                _as_fakes(model)
            tracker.enter(StepPhase.BUILD)
            return _steps(subject, run, model, engine.build(model, mesh, run, tracker), tracker, stand_ins)
        except Exception as error:
            if not _torch.asks_for_values(error):
                raise
            place = place_of(reversed(list(traceback.walk_tb(error.__traceback__))))
            reason = str(error).splitlines()[0] or type(error).__name__
            raise UsageError(
                f"the model needs the values of a tensor{' ' if place else ''}{place}: {reason}; a trace has none. Pass a loss "
                "and a batch that avoid it, or a model in which that line is replaced by its worst case."
            ) from None


ENGINES: Mapping[str, Any] = {"accordion": own_engine, "fsdp2": fsdp2}
"""Name -> module with two functions. `silenced(tracker, run)` returns a context manager in which collectives send nothing;
inside it, `build(model, mesh, run, tracker)` shards the model and returns a `ShardedTraining`."""


def _steps(
    subject: Subject,
    run: TrainingSetup,
    model: nn.Module,
    training: ShardedTraining,
    tracker: Tracker,
    stand_ins: Substitutes | None,
) -> Log:
    workspaces = [torch.empty(CUBLAS_BYTES, dtype=torch.uint8) for _ in range(2)] if run.device == "cuda" else []
    tracker.set_category(workspaces, Category.OTHER)
    tracker.only_memory = True
    _step(subject, run, model, training, tracker)
    tracker.only_memory = False
    # Within a step, memory in reference cycles counts as live, because nobody knows when a collection runs. Between steps it does
    # not. No other collection runs in a trace, so the youngest generation has all of its objects; a full one takes 0.3 s.
    gc.collect(0)
    owners = training.owners()
    allocs = [(alloc, owners.get(key)) for key, alloc in tracker.live.items()]
    start = len(tracker.events)
    _step(subject, run, model, training, tracker)
    log = Log(
        held=allocs,
        events=tracker.events[start:],
        units=training.units,
        substituted=dict(stand_ins.substituted) if stand_ins else {},
        unmodelled={**tracker.unknown_workspaces, **(stand_ins.unmodelled if stand_ins else {})},
        master_bytes=min((p.element_size() for p in model.parameters() if p.is_floating_point()), default=4),
    )
    return without_host(log)


def _step(subject: Subject, run: TrainingSetup, model: nn.Module, training: ShardedTraining, tracker: Tracker) -> None:
    for i in range(run.accumulate):
        tracker.enter(StepPhase.FORWARD)
        accumulates_locally = run.no_sync or run.strategy.grads is Place.REPLICATE
        without_reduce = accumulates_locally and i + 1 < run.accumulate
        with training.no_sync() if without_reduce else nullcontext():
            loss: object = subject.loss(model, part_of(subject.batch(), run.sequence))
            if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
                kind = f"of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else f"a {type(loss).__name__}"
                raise UsageError(
                    f"the loss is {kind}; it must be one number that depends on parameters, such as its mean."
                )
            tracker.enter(StepPhase.BACKWARD)
            torch.autograd.backward(loss)
    for parameter in model.parameters():
        tracker.set_category(parameter.grad, Category.GRADIENTS)
    tracker.enter(StepPhase.STEP)
    training.clip(1.0)
    with tracker.new_memory_as(Category.OPTIMIZER):
        training.optimizer.step()
    training.optimizer.zero_grad()


# -- the mesh and the model


@contextmanager
def _fake_mesh(run: TrainingSetup) -> Iterator[DeviceMesh]:
    """Context manager that creates a fake process group of `run.ranks` ranks, in which this process is rank 0, yields a CPU
    mesh of all ranks, and destroys the group at the end. The axes of the mesh are `EXPERT_DATA_AXIS` and `EXPERTS_AXIS` if
    ranks share experts, "replicate" and "shard" for a hybrid strategy, and otherwise "shard" alone."""
    dist.init_process_group("fake", store=_torch.fake_store(), rank=0, world_size=run.ranks)
    ranks = torch.arange(run.ranks)
    names: tuple[str, ...] = ("shard",)
    try:
        if run.expert_parallel > 1:
            ranks, names = ranks.view(-1, run.expert_parallel), (EXPERT_DATA_AXIS, EXPERTS_AXIS)
        elif run.strategy.hybrid:
            ranks, names = ranks.view(-1, run.shards), ("replicate", "shard")
        yield DeviceMesh("cpu", ranks, mesh_dim_names=names)
    finally:
        dist.destroy_process_group()


def _one_sequence_a_row() -> AbstractContextManager[Any]:
    """Return a context manager in which transformers does not look for packed sequences, for which it would read the values of
    positions. It does nothing if this process has not imported transformers' masks."""
    masks = sys.modules.get("transformers.masking_utils")
    if not hasattr(masks, "find_packed_sequence_indices"):
        return nullcontext()
    return mock.patch.multiple(masks, find_packed_sequence_indices=lambda *args, **kwargs: None)


def _as_fakes(model: nn.Module) -> None:
    """Replace the parameters of `model`, in all its modules, by new ones on the meta device, which take no memory before
    sharding, and its buffers by empty CPU tensors. The caller's mode makes them fake tensors. Tied parameters stay tied."""
    fakes: dict[int, nn.Parameter] = {}  # by id of the parameter
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in fakes:
                    fake = torch.empty_like(parameter, device="meta")
                    fakes[id(parameter)] = nn.Parameter(fake, requires_grad=parameter.requires_grad)
                module._parameters[name] = fakes[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty_like(buffer, device="cpu")
