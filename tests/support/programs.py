"""Programs: descriptions of a model and of its training steps, and a run that compares them sharded and unsharded.

A `Program` is plain data, so that it can be sent to ranks and pasted into a file. To see a failure again:

    from tests.support.programs import Node, Program, run
    run(Program(...))
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import accordion as acc
from accordion.config import STRATEGIES
from accordion.engine import layout, reduce
from tests import pool
from tests.devices import device
from tests.support.checks import FLAT, HYBRID, assert_at_rest
from tests.support.compare import Case, NamedParams, Twins, Unsharded, no_sync
from tests.support.reference import adamw

BATCH, LENGTH, VOCAB = 2, 3, 5
DTYPES = {"": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
# Relative to the largest values that are summed over ranks, not to the sum: gradients may cancel. In bfloat16 autograd
# rounds the sum of two uses of a parameter; the engine adds calls of a unit in float32.
TOLERANCE, IN_BF16 = 2e-6, 2e-2
# Where gradients of activations pass through bf16, another order of their sums is rounded to another bf16 number here and there.
THROUGH_BF16 = 1e-4
TIMEOUT_S = 60.0


class Short:
    """Base class of dataclasses whose `repr` has only the fields that differ from their defaults."""

    def __repr__(self) -> str:
        changed = [(f, getattr(self, f.name)) for f in dataclasses.fields(self)]  # type: ignore[arg-type]
        return f"{type(self).__name__}({', '.join(f'{f.name}={v!r}' for f, v in changed if v != f.default)})"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Node(Short):
    """One module of a `Program`. `kind`: a key of `LEAVES` or `CONTAINERS`, or "again" for an earlier module of the tree once
    more.

    `unit`: what is a unit: the module ("self"), the torch module inside a leaf ("inner"), or "both". `turns`: for a loop the
    number of calls of its children, for "pick" the index of a child, in each step or micro-batch (as `turn` says) in turn; for
    "sometimes" and "drop" the ranks that use it; for "again" the index of the module. `checkpoint`: torch's activation
    checkpointing of this module, "reentrant" or "plain". `gives`: the form of its output, a key of `GIVES`. `keeps`: its
    forward stores a number in an attribute, which is added to the loss.
    """

    kind: str
    kids: tuple[Node, ...] = ()
    unit: str = ""
    turns: tuple[int, ...] = (1,)
    turn: str = "step"
    checkpoint: str = ""
    gives: str = "tensor"
    keeps: bool = False
    rows: int = 4
    bias: bool = True
    dtype: str = ""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Program(Short):
    """A model and its training steps.

    `ties`: each number chooses a pair of parameters of equal shape and dtype to tie. `frozen`: indices of parameters.
    `toggles`: for each step after the first, indices of parameters whose `requires_grad` is inverted. `order`: backward after
    "each" forward, or after all of them: of the "sum" of losses, or of each loss, the "first" or the "last" one first.
    `between`: for each step, what else is done. `reduce`: the strategy's algorithm of reduces. `packed_bytes`, `padding_bytes`:
    limits of the layout; with small ones, tiny tensors are sent and sharded as large ones are.
    """

    tree: Node
    width: int = 6
    ties: tuple[int, ...] = ()
    frozen: tuple[int, ...] = ()
    toggles: tuple[tuple[int, ...], ...] = ()
    strategy: str = "full_shard"
    shape: tuple[int, ...] = (2,)
    reduce: str = "auto"
    steps: int = 2
    micros: int = 1
    no_sync: bool = False
    checkpoint: str = "none"
    order: str = "each"
    between: tuple[str, ...] = ()
    set_to_none: bool = True
    budget_bytes: int | None = None
    debug: tuple[str, ...] = ()
    packed_bytes: int = layout.PACK_LIMIT_BYTES
    padding_bytes: int = layout.PADDING_BYTES
    optimizer: str = "sgd"
    wrapped: bool = False
    input_grad: bool = False

    def policy(self) -> acc.Strategy:
        return dataclasses.replace(STRATEGIES[self.strategy], reduce=self.reduce)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class At:
    """The step, micro-batch and rank of a forward."""

    step: int
    micro: int
    rank: int


# -- modules


def _list_of(width: int) -> nn.ParameterList:
    """Return a list of four parameters; the last one is never used."""
    return nn.ParameterList([torch.ones(width), torch.full((LENGTH, width), 0.1), torch.tensor(0.5), torch.ones(2)])


LEAVES: Mapping[str, tuple[Callable[[Node, int], nn.Module], Callable[[Any, Tensor, Tensor], Tensor]]] = {
    "linear": (lambda node, w: nn.Linear(w, w, bias=node.bias), lambda m, x, tokens: m(x)),
    "pair": (
        lambda node, w: nn.Sequential(nn.Linear(w, node.rows, bias=node.bias), nn.Tanh(), nn.Linear(node.rows, w)),
        lambda m, x, tokens: m(x),
    ),
    "norm": (lambda node, w: nn.LayerNorm(w, bias=node.bias), lambda m, x, tokens: m(x)),
    "lookup": (lambda node, w: nn.Embedding(VOCAB, w), lambda m, x, tokens: x + m(tokens)),
    "gain": (lambda node, w: nn.ParameterList([torch.tensor(0.7)]), lambda m, x, tokens: x * m[0]),
    "conv": (
        lambda node, w: nn.Conv1d(w, w, 3, padding=1, bias=node.bias),
        lambda m, x, tokens: m(x.transpose(1, 2)).transpose(1, 2),
    ),
    "gru": (lambda node, w: nn.GRU(w, w, batch_first=True, bias=node.bias), lambda m, x, tokens: m(x)[0]),
    "list": (lambda node, w: _list_of(w), lambda m, x, tokens: (x * m[0] + m[1]) * m[2]),
    "outside": (
        lambda node, w: nn.Linear(w, w, bias=node.bias),
        lambda m, x, tokens: m(x) + 0.3 * torch.tanh(x) @ m.weight,
    ),
    "only_outside": (lambda node, w: nn.Linear(w, w), lambda m, x, tokens: F.linear(x, m.weight)),
    "sometimes": (lambda node, w: nn.Linear(w, w, bias=node.bias), lambda m, x, tokens: x + m(x)),
}
NOT_CALLED = ("gain", "list", "outside", "only_outside", "sometimes")  # the torch module in it cannot be a unit


class Base(nn.Module):
    """Base class of leaves and containers: its forward calls `body`, with activation checkpointing if the node asks for it, and
    gives the output the form `node.gives`."""

    def __init__(self, node: Node) -> None:
        super().__init__()
        self.node, self.is_unit = node, node.unit in ("self", "both")
        self.kept: Tensor | None = None

    def forward(self, x: Tensor, tokens: Tensor, *, at: At) -> Any:
        node = self.node
        if node.checkpoint and torch.is_grad_enabled() and x.requires_grad:
            y = checkpoint(self.body, x, tokens, at, use_reentrant=node.checkpoint == "reentrant")
        else:
            y = self.body(x, tokens, at)
        if node.keeps:
            self.kept = y.square().mean()
        return GIVES[node.gives][0](x, y)

    def body(self, x: Tensor, tokens: Tensor, at: At) -> Tensor:
        raise NotImplementedError


def call(module: nn.Module, x: Tensor, tokens: Tensor, at: At) -> Tensor:
    return GIVES[module.node.gives][1](module(x, tokens, at=at))


GIVES: Mapping[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], Tensor]]] = {
    "tensor": (lambda x, y: y, lambda out: out),
    "tuple": (lambda x, y: (y, y.mean()), lambda out: out[0] + 0.1 * out[1]),
    "ignored": (lambda x, y: (y, y.mean(), None), lambda out: out[0]),
    "dict": (lambda x, y: {"y": y, "more": [y.square(), 3]}, lambda out: out["y"] + 0.1 * out["more"][0]),
    "input": (lambda x, y: (y, x), lambda out: out[0] + 0.2 * out[1]),
    "view": (lambda x, y: (y * 1.0).transpose(0, 1), lambda out: out.mul_(0.9).transpose(0, 1)),
}


class Leaf(Base):
    def __init__(self, node: Node, width: int) -> None:
        super().__init__(node)
        build, self.use = LEAVES[node.kind]
        self.inner = build(node, width).to(DTYPES[node.dtype])
        self.inner.is_unit = node.unit in ("inner", "both") and node.kind not in NOT_CALLED

    def body(self, x: Tensor, tokens: Tensor, at: At) -> Tensor:
        if self.node.kind == "sometimes" and at.rank not in self.node.turns:
            return x
        return self.use(self.inner, x.to(DTYPES[self.node.dtype]), tokens).to(x.dtype)


class Container(Base):
    def __init__(self, node: Node, kids: list[nn.Module]) -> None:
        super().__init__(node)
        self.kids = nn.ModuleList(kids)

    def body(self, x: Tensor, tokens: Tensor, at: At) -> Tensor:
        node = self.node
        now = node.turns[(at.step if node.turn == "step" else at.micro) % len(node.turns)]
        return CONTAINERS[node.kind](node, [functools.partial(call, kid) for kid in self.kids], now, x, tokens, at)


def _seq(node: Node, kids: list[Callable[..., Tensor]], now: int, x: Tensor, *rest: Any) -> Tensor:
    for kid in kids:
        x = kid(x, *rest)
    return x


def _residual(node: Node, kids: list[Callable[..., Tensor]], now: int, x: Tensor, *rest: Any) -> Tensor:
    return x + _seq(node, kids, now, x, *rest)


def _sum(node: Node, kids: list[Callable[..., Tensor]], now: int, x: Tensor, *rest: Any) -> Tensor:
    return sum((kid(x, *rest) for kid in kids), 0.1 * x)


def _loop(node: Node, kids: list[Callable[..., Tensor]], now: int, x: Tensor, *rest: Any) -> Tensor:
    for _ in range(now):
        x = torch.tanh(_seq(node, kids, now, x, *rest))
    return x


def _pick(node: Node, kids: list[Callable[..., Tensor]], now: int, x: Tensor, *rest: Any) -> Tensor:
    """Call the child with index `now`; return `x` unchanged if there is none."""
    return kids[now](x, *rest) if now < len(kids) else x


def _drop(node: Node, kids: list[Callable[..., Tensor]], now: int, x: Tensor, tokens: Tensor, at: At) -> Tensor:
    """Call the children on all ranks, and add their output to `x` only on ranks in `node.turns`."""
    y = _seq(node, kids, now, x, tokens, at)
    return x + y if at.rank in node.turns else x


CONTAINERS = {"seq": _seq, "residual": _residual, "sum": _sum, "loop": _loop, "pick": _pick, "drop": _drop}


class Root(nn.Module):
    """The model: the modules of a program's tree, and a factor `gain` that is always trained."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body, self.gain = body, nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor, tokens: Tensor, at: At) -> Tensor:
        for module in self.bases():
            module.kept = None
        return call(self.body, x, tokens, at) * self.gain

    def bases(self) -> list[Base]:
        return [m for m in self.modules() if isinstance(m, Base)]


def build(program: Program) -> Root:
    """Return the unsharded model of a program, with seeded weights. Its indices are taken modulo the number of choices."""
    torch.manual_seed(0)
    made: list[Base] = []

    def make(node: Node) -> Base:
        if node.kind == "again":
            return made[node.turns[0] % len(made)] if made else Leaf(Node(kind="gain"), program.width)
        if node.kind in LEAVES:
            module: Base = Leaf(node, program.width)
        else:
            module = Container(node, [make(kid) for kid in node.kids])
        made.append(module)
        return module

    model = Root(make(program.tree))
    for tie in program.ties:
        places = [(m, n, p) for m in model.body.modules() for n, p in m._parameters.items() if p is not None]
        pairs = [
            (a, b)
            for i, a in enumerate(places)
            for b in places[i + 1 :]
            if a[2] is not b[2] and (a[2].shape, a[2].dtype) == (b[2].shape, b[2].dtype)
        ]
        if pairs:
            (_, _, kept), (_, _, dropped) = pairs[tie % len(pairs)]
            for module, name, param in places:
                if param is dropped:
                    setattr(module, name, kept)
    params = trainable(model)
    for i in program.frozen:
        params[i % len(params)].requires_grad_(False)
    return model


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that a program may freeze: all but the gain, or a new parameter if there are no others."""
    return [p for name, p in model.named_parameters() if name != "gain"] or [nn.Parameter(torch.zeros(()))]


def toggle(model: nn.Module, program: Program, step: int, fixed: set[str]) -> None:
    """Invert `requires_grad` of the parameters in the program's `toggles` for this step, except those named in `fixed`."""
    if 0 < step <= len(program.toggles):
        names = [name for name, _ in model.named_parameters() if name != "gain"]
        params = dict(model.named_parameters())
        for i in program.toggles[step - 1] if names else ():
            name = names[i % len(names)]
            if name not in fixed:
                params[name].requires_grad_(not params[name].requires_grad)


# -- steps


def data(program: Program, at: At) -> tuple[Tensor, Tensor, Tensor]:
    """Return (input, tokens, target) of one forward: random, but equal in every run."""
    g = torch.Generator().manual_seed(1000 * at.step + 100 * at.micro + at.rank)
    x, target = torch.randn(2, BATCH, LENGTH, program.width, generator=g).to(device())
    return x.requires_grad_(program.input_grad), torch.randint(VOCAB, (BATCH, LENGTH), generator=g).to(device()), target


def loss_of(model: Root, x: Tensor, tokens: Tensor, target: Tensor, at: At) -> Tensor:
    loss = (model(x, tokens, at) - target).square().mean()
    return sum((0.1 * m.kept for m in model.bases() if m.kept is not None), loss)


def walk(model: Root, step: int, program: Program) -> list[Tensor]:
    """Run forwards and backwards of one step. Return the losses of all micro-batches, then the gradients of inputs, if any."""
    losses, inputs = [], []
    between = program.between[step] if step < len(program.between) else ""
    for micro in range(program.micros):
        at = At(step, micro, dist.get_rank())
        waits = program.no_sync and micro < program.micros - 1
        with no_sync(model) if waits else contextlib.nullcontext():
            x, tokens, target = data(program, at)
            losses.append(loss_of(model, x, tokens, target, at))
            inputs.append(x)
            if between == "evaluate":
                with torch.no_grad():
                    loss_of(model.eval(), *data(program, at), at)
                model.train()
            if program.order == "each":
                losses[-1].backward()
    if program.order == "sum":
        sum(losses).backward()
    elif program.order != "each":
        for loss in losses if program.order == "first" else losses[::-1]:
            loss.backward()
    return [*(loss.detach() for loss in losses), *(x.grad for x in inputs if x.grad is not None)]


def optimizer_of(program: Program, named: NamedParams) -> torch.optim.Optimizer:
    params = [p for _, p in named]
    if program.optimizer == "sgd":
        return torch.optim.SGD(params, lr=0.05, momentum=0.9)
    return adamw(params)


@contextlib.contextmanager
def limits(program: Program) -> Iterator[None]:
    with (
        mock.patch.object(layout, "PACK_LIMIT_BYTES", program.packed_bytes),
        mock.patch.object(reduce, "PACK_LIMIT_BYTES", program.packed_bytes),
        mock.patch.object(layout, "PADDING_BYTES", program.padding_bytes),
    ):
        yield


def case_of(program: Program) -> Case:
    """Return the `Case` with the model and the training steps of a program, without what `before_training` does."""
    uses_bf16 = any(p.dtype == torch.bfloat16 for p in build(program).parameters())
    tolerance = THROUGH_BF16 if uses_bf16 else TOLERANCE
    return Case(
        build=functools.partial(build, program),
        run=functools.partial(walk, program=program),
        units=lambda name, module: getattr(module, "is_unit", False),
        options={
            "strategy": program.policy(),
            "prefetch": acc.Prefetch(budget_bytes=program.budget_bytes),
            "checkpoint_activations": program.checkpoint,
            "debug": program.debug,
        },
        optimizer=functools.partial(optimizer_of, program),
        is_wrapped=program.wrapped,
        set_to_none=program.set_to_none,
        exact=False,
        tolerance=tolerance,
        narrow_tolerance=IN_BF16,
        output_tolerance=tolerance,
    )


def compare(mesh: Any, program: Program) -> None:
    """Run a program on this rank, sharded and unsharded, and compare each step."""
    with limits(program):
        twins = Twins(mesh, case_of(program))
        plain, model = twins.unsharded, twins.sharded.model
        fixed = {n for n, p in plain.params.items() if p.dtype == torch.bfloat16 and not p.requires_grad}
        for step in range(program.steps):
            toggle(plain.model, program, step, fixed)
            toggle(model, program, step, fixed)
            before_training(program, step, model, plain)
            twins.check_backward(step)
            if "abandon" not in program.between[: step + 1]:
                assert_at_rest(model)
            twins.check_step()


def before_training(program: Program, step: int, model: Root, plain: Unsharded) -> None:
    """Do "full_params", "inference" or "abandon" (a forward without a backward), if `program.between` has it for this step."""
    what = program.between[step] if step < len(program.between) else ""
    at = At(step, 0, dist.get_rank())
    if what == "full_params":
        with acc.full_params(model):
            for name, p in model.named_parameters():
                assert torch.equal(p, plain.masters[name]), f"full {name}"
            if all(p.dtype == plain.params[name].dtype for name, p in model.named_parameters()):  # masters are wider
                model(*data(program, at)[:2], at)
    elif what == "inference":
        with torch.inference_mode():
            model(*data(program, at)[:2], at)
    elif what == "abandon":
        model(*data(program, at)[:2], at)


def run(program: Program, world: pool.Pool | None = None) -> None:
    """Run a program, with its comparison, on the ranks of `world`, or on new ones if that is None."""
    __tracebackhide__ = True
    ranks = world or pool.Pool()
    names = HYBRID if program.policy().hybrid else FLAT
    try:
        ranks.run_mesh(program.shape, names, compare, program, timeout_s=TIMEOUT_S)
    finally:
        if world is None:
            ranks.close()
