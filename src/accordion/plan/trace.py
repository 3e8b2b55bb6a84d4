"""A training step of one rank that needs no weights, no GPU and no other rank: the real engine on fake tensors."""

from __future__ import annotations

import gc
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from accordion import _torch
from accordion.config import FULL_SHARD, Strategy
from accordion.config import Place as Lies
from accordion.engine.autograd import engine_of
from accordion.engine.collectives import SENDING_RANKS, Link, Pending
from accordion.errors import UsageError
from accordion.optim import clip_grad_norm_, wrap_optimizer
from accordion.plan.events import Category, Log, Phase
from accordion.plan.substitute import CUDA_WORKSPACES, Substitutes
from accordion.plan.tracker import Tracker
from accordion.plan.watching import owners_of, watch
from accordion.shard import shard
from accordion.state import no_sync

CUBLAS_BYTES = 32 << 20  # of each thread that multiplies: forward and backward (torch's default on Hopper)


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is trained. `make`: the model on the meta device. `batch`: called for each micro-batch; what it
    gives is handed to `loss`. `make` may be called many times. Tensors that `batch` makes need no values.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[], Any]
    loss: Callable[[nn.Module, Any], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """How it is trained. `sharding`: the keyword arguments of `shard`. `node`: ranks of one machine. `replicas`: of a hybrid
    strategy; 0: one a machine.

    `device`: "cuda" traces what a GPU would do; "cpu" the engine on CPU ranks, over gloo. `optimizer`: adamw, adamw_foreach, sgd.
    """

    ranks: int = 8
    node: int = 8
    replicas: int = 0
    accumulate: int = 1
    optimizer: str = "adamw"
    sharding: Mapping[str, Any] = field(default_factory=dict)
    device: Literal["cuda", "cpu"] = "cuda"

    @property
    def strategy(self) -> Strategy:
        strategy: Strategy = self.sharding.get("strategy", FULL_SHARD)
        return strategy

    @property
    def shards(self) -> int:
        """Ranks over which parameters are cut."""
        if not self.strategy.hybrid:
            return self.ranks
        return self.ranks // self.replicas if self.replicas else min(self.ranks, self.node)


OPTIMIZERS: Mapping[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": partial(torch.optim.AdamW, lr=1e-3, fused=True),
    "adamw_foreach": partial(torch.optim.AdamW, lr=1e-3, foreach=True),
    "sgd": partial(torch.optim.SGD, lr=1e-3, momentum=0.9, fused=True),
}


def trace(subject: Subject, run: Run) -> Log:
    """The log of a step once optimizer state is there. Raises `UsageError` for a model that cannot run without values.

    Needs a process without a process group; leaves none.
    """
    if dist.is_initialized():
        raise UsageError("a plan needs a process without a process group; plan before init_process_group.")
    tracker = Tracker()
    stand_ins = Substitutes() if run.device == "cuda" else None
    with ExitStack() as stack:
        mesh = stack.enter_context(_fake_mesh(run))
        model = subject.make()
        stack.enter_context(_one_sequence_a_row())
        stack.enter_context(_silent_links(tracker, run.device == "cuda"))
        stack.enter_context(_torch.fake_tensors())
        _torch.forget_references()
        stack.callback(_torch.forget_references)
        stack.enter_context(tracker)
        stack.enter_context(stand_ins.installed() if stand_ins else nullcontext())
        tracker.workspaces = CUDA_WORKSPACES if run.device == "cuda" else {}
        try:
            return _steps(subject, run, model, mesh, tracker, stand_ins)
        except _torch.NEEDS_VALUES as error:
            raise UsageError(_needs_values(error)) from None


def _steps(
    subject: Subject, run: Run, model: nn.Module, mesh: DeviceMesh, tracker: Tracker, stand_ins: Substitutes | None
) -> Log:
    with tracker.paused():
        _as_fakes(model)
    tracker.enter(Phase.BUILD)
    shard(model, mesh, **run.sharding)
    engine = engine_of(model)
    assert engine is not None
    if run.device == "cuda":
        engine.wiring.shard.one_node = run.shards <= run.node
        engine.wiring.replicate.one_node = run.ranks <= run.node
    watch(engine, tracker)
    optimizer = wrap_optimizer(OPTIMIZERS[run.optimizer](model.parameters()))
    kept = [torch.empty(CUBLAS_BYTES, dtype=torch.uint8) for _ in range(2)] if run.device == "cuda" else []
    tracker.belongs(kept, Category.OTHER)
    _step(subject, run, model, optimizer, tracker)
    gc.collect()
    owners = owners_of(engine, optimizer)
    held = [(alloc, owners.get(key)) for key, alloc in tracker.live.items()]
    start = len(tracker.events)
    gc.disable()  # what cycles hold counts as held: when a collection runs is not known
    try:
        _step(subject, run, model, optimizer, tracker)
    finally:
        gc.enable()
    return Log(
        held=held,
        events=tracker.events[start:],
        units=[unit.name for unit in engine.units],
        substituted=dict(stand_ins.substituted) if stand_ins else {},
        unmodelled=dict(stand_ins.unmodelled) if stand_ins else {},
    )


def _step(subject: Subject, run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, tracker: Tracker) -> None:
    for i in range(run.accumulate):
        tracker.enter(Phase.FORWARD)
        later = run.strategy.grads is Lies.REPLICATE and i + 1 < run.accumulate
        with no_sync(model) if later else nullcontext():
            loss = subject.loss(model, subject.batch())
            tracker.enter(Phase.BACKWARD)
            torch.autograd.backward(loss)
    for parameter in model.parameters():
        tracker.belongs(parameter.grad, Category.GRADIENTS)
    tracker.enter(Phase.STEP)
    clip_grad_norm_(model, 1.0)
    with tracker.taken_for(Category.OPTIMIZER):
        optimizer.step()
    optimizer.zero_grad()


# -- a rank of a world that does not exist


@contextmanager
def _fake_mesh(run: Run) -> Iterator[DeviceMesh]:
    """A mesh of CPU ranks of which only the first is there."""
    dist.init_process_group("fake", store=_torch.fake_store(), rank=0, world_size=run.ranks)
    try:
        shape, names = (run.ranks,), ("shard",)
        if run.strategy.hybrid:
            shape, names = (run.ranks // run.shards, run.shards), ("replicate", "shard")  # type: ignore[assignment]
        yield DeviceMesh("cpu", torch.arange(run.ranks).view(shape), mesh_dim_names=names)
    finally:
        dist.destroy_process_group()


_make = Link.__init__


def _made_to_send(link: Link, group: Any, device: torch.device) -> None:
    _make(link, group, device)
    link.sends = 2 <= link.num_ranks <= SENDING_RANKS


def _sends(link: Link, messages: Sequence[tuple[Sequence[Tensor], Sequence[Tensor]]]) -> list[Any]:
    return [_Done() for _ in messages]


class _Done:
    """Work of a backend that does not order by streams; done at once."""

    def wait(self, timeout: object = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


@contextmanager
def _silent_links(tracker: Tracker, stream_ordered: bool) -> Iterator[None]:
    """Let links say nothing, and write down what they would have said."""
    works = () if stream_ordered else (_Done(),)

    def said(kind: str, which: Callable[..., Sequence[Tensor]]) -> Callable[..., Pending]:
        def say(link: Link, *args: Any) -> Pending:
            tensors = which(*args)
            if link.num_ranks > 1 and tensors:
                tracker.collective(kind, sum(t.numel() * t.itemsize for t in tensors), axis_of(link))
                return Pending(link, works)
            return Pending(link)

        return say

    def axis_of(link: Link) -> str:
        return tracker.axes.get(id(link), "shard")

    stand_ins: dict[str, Callable[..., Any]] = {
        "gather": said("gather", lambda fulls, shards: fulls),
        "exchange": said("exchange", lambda sends: [sent for _, sent, _, _ in sends]),
        "scatter_sum": said("scatter_sum", lambda outs, inputs: inputs),
        "sum": said("sum", lambda tensors: tensors),
    }
    if not stream_ordered:  # gloo's ranks, which send each other what is large
        stand_ins |= {"__init__": _made_to_send, "send_each": _sends}
    before = {name: getattr(Link, name) for name in stand_ins}
    for name, stand_in in stand_ins.items():
        setattr(Link, name, stand_in)
    try:
        yield
    finally:
        for name, method in before.items():
            setattr(Link, name, method)


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
