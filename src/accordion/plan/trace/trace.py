"""A training step of one rank that needs no weights, no GPU and no other rank: the real engine on fake tensors."""

from __future__ import annotations

import gc
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

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
from accordion.plan.trace.setup import Rig, Subject, TrainingSetup
from accordion.plan.trace.spread import EXPERT_DATA_AXIS, EXPERTS_AXIS
from accordion.plan.trace.substitutes import Substitutes
from accordion.plan.trace.tracker import Tracker

CUBLAS_BYTES = 32 << 20  # of each thread that multiplies: forward and backward (torch's default on Hopper)


def trace(subject: Subject, run: TrainingSetup) -> Log:
    """The log of a step once optimizer state is there. Raises `UsageError` for a model that cannot run without values.

    Needs a process without a process group; leaves none.
    """
    if dist.is_initialized():
        raise UsageError("a plan needs a process without a process group; plan before init_process_group.")
    tracker = Tracker()
    stand_ins = Substitutes() if run.device == "cuda" else None
    engine = ENGINES[run.engine]
    with ExitStack() as stack:
        stack.enter_context(without_collections())  # see `_steps`
        mesh = stack.enter_context(_fake_mesh(run))
        model = subject.make()
        stack.enter_context(_one_sequence_a_row())
        stack.enter_context(engine.silenced(tracker, run))
        stack.enter_context(_torch.fake_tensors())
        _torch.forget_references()
        stack.callback(_torch.forget_references)
        stack.enter_context(tracker)
        stack.enter_context(stand_ins.installed() if stand_ins else nullcontext())
        tracker.with_workspaces = run.device == "cuda"
        tracker.attention_share = subject.attention_share
        try:
            with tracker.paused():
                _as_fakes(model)
            tracker.enter(StepPhase.BUILD)
            return _steps(subject, run, model, engine.build(model, mesh, run, tracker), tracker, stand_ins)
        except Exception as error:
            if not _torch.asks_for_values(error):
                raise
            raise UsageError(_needs_values(error)) from None


ENGINES: Mapping[str, Any] = {"accordion": own_engine, "fsdp2": fsdp2}
"""Modules with `silenced`, which lets collectives say nothing, and `build`, which makes a `Rig` of a model."""


def _steps(
    subject: Subject, run: TrainingSetup, model: nn.Module, rig: Rig, tracker: Tracker, stand_ins: Substitutes | None
) -> Log:
    kept = [torch.empty(CUBLAS_BYTES, dtype=torch.uint8) for _ in range(2)] if run.device == "cuda" else []
    tracker.belongs(kept, Category.OTHER)
    tracker.only_memory = True
    _step(subject, run, model, rig, tracker)
    tracker.only_memory = False
    # What cycles hold counts as held within a step, for when a collection runs is not known; between steps it does not. There is
    # none in a trace but this, so that the youngest generation is all that the trace has made; one over all of torch takes 0.3 s.
    gc.collect(0)
    owners = rig.owners()
    held = [(alloc, owners.get(key)) for key, alloc in tracker.live.items()]
    start = len(tracker.events)
    _step(subject, run, model, rig, tracker)
    log = Log(
        held=held,
        events=tracker.events[start:],
        units=rig.units,
        substituted=dict(stand_ins.substituted) if stand_ins else {},
        unmodelled={**tracker.unknown_workspaces, **(stand_ins.unmodelled if stand_ins else {})},
    )
    return without_host(log)


def _step(subject: Subject, run: TrainingSetup, model: nn.Module, rig: Rig, tracker: Tracker) -> None:
    for i in range(run.accumulate):
        tracker.enter(StepPhase.FORWARD)
        alone = run.no_sync or run.strategy.grads is Place.REPLICATE
        later = alone and i + 1 < run.accumulate
        with rig.no_sync() if later else nullcontext():
            loss = _scalar(subject.loss(model, subject.batch()))
            tracker.enter(StepPhase.BACKWARD)
            torch.autograd.backward(loss)
    for parameter in model.parameters():
        tracker.belongs(parameter.grad, Category.GRADIENTS)
    tracker.enter(StepPhase.STEP)
    rig.clip(1.0)
    with tracker.taken_for(Category.OPTIMIZER):
        rig.optimizer.step()
    rig.optimizer.zero_grad()


def _scalar(loss: object) -> torch.Tensor:
    """Raises `UsageError` for what has no backward."""
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
        what = f"of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else f"a {type(loss).__name__}"
        raise UsageError(f"the loss is {what}; a step takes one number that depends on parameters, such as its mean.")
    return loss


# -- a rank of a world that does not exist


@contextmanager
def _fake_mesh(run: TrainingSetup) -> Iterator[DeviceMesh]:
    """A mesh of CPU ranks of which only the first is there."""
    dist.init_process_group("fake", store=_torch.fake_store(), rank=0, world_size=run.ranks)
    shape: tuple[int, ...]
    names: tuple[str, ...]
    try:
        if run.expert_parallel > 1:
            shape, names = (run.ranks // run.expert_parallel, run.expert_parallel), (EXPERT_DATA_AXIS, EXPERTS_AXIS)
        elif run.strategy.hybrid:
            shape, names = (run.ranks // run.shards, run.shards), ("replicate", "shard")
        else:
            shape, names = (run.ranks,), ("shard",)
        yield DeviceMesh("cpu", torch.arange(run.ranks).view(shape), mesh_dim_names=names)
    finally:
        dist.destroy_process_group()


@contextmanager
def _one_sequence_a_row() -> Iterator[None]:
    """transformers looks at positions for several sequences packed into one, and takes tensors without values for such."""
    masks: Any = sys.modules.get("transformers.masking_utils")
    name = "find_packed_sequence_indices"
    if not hasattr(masks, name):
        yield
        return
    before = getattr(masks, name)
    setattr(masks, name, lambda *args, **kwargs: None)
    try:
        yield
    finally:
        setattr(masks, name, before)


def _as_fakes(model: nn.Module) -> None:
    """Parameters stay on the meta device, where `shard` takes none of their memory; buffers stand on the device."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in made:
                    fake = torch.empty_like(parameter, device="meta")
                    made[id(parameter)] = nn.Parameter(fake, requires_grad=parameter.requires_grad)
                module._parameters[name] = made[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty_like(buffer, device="cpu")


def _needs_values(error: BaseException) -> str:
    """Which operator and line of the model ask for the value of a tensor."""
    frames = [
        f
        for f in traceback.extract_tb(error.__traceback__)
        if "/torch/" not in f.filename and "/accordion/" not in f.filename
    ]
    where = f" at {frames[-1].filename}:{frames[-1].lineno} ({frames[-1].line})" if frames else ""
    what = str(error).splitlines()[0] or type(error).__name__
    return (
        f"the model needs the values of a tensor{where}: {what}; a trace has none. Pass a loss and a batch that avoid "
        "it, or a model in which that line is replaced by its worst case."
    )
