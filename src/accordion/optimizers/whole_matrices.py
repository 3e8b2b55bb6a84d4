"""Steps of whole matrices: one rank, the owner, receives all rows of a matrix, and sends each rank its rows of the result."""

from __future__ import annotations

import ast
import heapq
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain
from math import prod
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from accordion import _torch
from accordion.engine.communicator import Communicator, carried, gathered_rows, group_of_job
from accordion.engine.engine import Engine
from accordion.engine.layout import Cut
from accordion.engine.params import Param
from accordion.engine.streams import SideStream, Steps
from accordion.errors import UsageError, some_of
from accordion.offload.step.optimizer_copy import OptimizerCopy, Part, exchange, local_state
from accordion.row_marks import params_of

TENSOR = "$tensor"  # begins the description of a tensor
T = TypeVar("T")
BUCKET_NUMEL = 2**25  # elements of the whole matrices of a bucket; enough to hide the latency of an exchange
Wait: TypeAlias = Callable[[], T]
"""Function that lets the compute stream wait for an exchange (on gloo the host waits), and returns the received tensors."""


# -- owners


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Division:
    """The ranks over which tensors are divided by rows; a row is a slice of the divided dim, `Matrix.dim`."""

    communicator: Communicator
    side_stream: SideStream  # on which rows are sent
    # Rows are divided among `splits[0]` ranks, and each part among `splits[1]` ranks if there are two.
    splits: tuple[int, ...]
    order: tuple[int, ...]  # the ranks in the order of their rows

    def counts(self, matrix: Matrix) -> tuple[int, ...]:
        """Return the number of rows of `matrix` on each rank; entry i is the number on rank `order[i]`."""
        return _counts(matrix.shape[matrix.dim], self.splits)

    def local_shape(self, matrix: Matrix, rank: int) -> tuple[int, ...]:
        shape = list(matrix.shape)
        shape[matrix.dim] = self.counts(matrix)[self.order.index(rank)]
        return tuple(shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """A parameter that its owner rank steps whole, or a state of one. If each rank has it whole, every rank steps it."""

    index: int  # position of the parameter in its optimizer
    group: int  # index of its param group
    name: str
    shape: tuple[int, ...]  # of the whole tensor
    division: Division | None  # None: every rank has the whole tensor
    dim: int  # the divided dim, counted from the last one (negative)
    owner: int = 0  # rank in the division

    @property
    def is_owned(self) -> bool:
        return self.division is None or self.owner == self.division.communicator.rank

    def state(self, shape: tuple[int, ...]) -> Matrix:
        """Return the `Matrix` of a state of `shape` (1-D or more): divided like the parameter if shapes agree, else on dim 0."""
        return self if shape == self.shape else replace(self, shape=shape, dim=-len(shape))


@cache
def _counts(num_rows: int, splits: tuple[int, ...]) -> tuple[int, ...]:
    counts = [num_rows]
    for num_ranks in splits:
        counts = [Cut((count,), 0, num_ranks).rows_of(rank) for count in counts for rank in range(num_ranks)]
    return tuple(counts)


@cache
def sharded_engines() -> weakref.WeakSet[Engine]:
    """Return the set of the engines of all sharded models in this process, always the same object; `mark_sharded` adds to it."""
    return weakref.WeakSet()


class Owners:
    """Choice, equal on all ranks, of an owner rank for each parameter in the param `groups` of an optimizer:
    `matrices[i].owner` is the owner of `params[i]`. `buckets` chooses the parameters to exchange together. The
    constructor is collective, and raises `UsageError` if tensor or expert parallelism splits a parameter."""

    def __init__(self, groups: Sequence[Mapping[str, Any]]) -> None:
        pairs = [(i, p) for i, group in enumerate(groups) for p in group["params"]]
        self.params: list[Tensor] = [p for _, p in pairs]
        self._kinds = [(p.dtype, p.device) for p in self.params]
        sharded = {id(param.sharded): param for engine in sharded_engines() for param in engine.params}
        self.matrices: list[Matrix] = []
        divisions: dict[int, Division | None] = {}  # by id of the sharding context
        for index, (group, p) in enumerate(pairs):
            param, shape, division = sharded.get(id(p)), tuple(p.shape), None
            name, dim = (f"parameter {index}", None) if param is None else (repr(param.name), param.cut.dim)
            if param is not None and dim is not None:
                if param.around is not None:
                    raise UsageError(
                        f"{param.name!r} is split by tensor or expert parallelism too, and no rank can step the whole matrix; "
                        "take an elementwise optimizer for it, such as AdamW."
                    )
                if id(param.context) not in divisions:
                    divisions[id(param.context)] = _division(param)
                division = divisions[id(param.context)]
            self.matrices.append(
                Matrix(index=index, group=group, name=name, shape=shape, division=division, dim=(dim or 0) - len(shape))
            )
        # In each param group the longest work goes first, to the rank that has the least.
        self._order = sorted(range(len(pairs)), key=lambda i: (pairs[i][0], -_work(self.matrices[i].shape)))
        loads: dict[Division, list[tuple[int, int]]] = {}  # heap of (work so far, rank)
        for index in self._order:
            matrix = self.matrices[index]
            if matrix.division is not None:
                ranks = range(matrix.division.communicator.num_ranks)
                heap = loads.setdefault(matrix.division, [(0, rank) for rank in ranks])
                load, owner = heap[0]
                heapq.heapreplace(heap, (load + _work(matrix.shape), owner))
                self.matrices[index] = replace(matrix, owner=owner)
        self._stepped: set[int] = set()
        self._buckets: list[list[Matrix]] = []

    def buckets(self, stepped: set[int]) -> list[list[Matrix]]:
        """Return the matrices with the indices `stepped`, the same on all ranks, in buckets, each of one division, dtype and
        device. Within a param group, matrices with more work come first, so the work in a bucket is about equal for all
        owners."""
        if stepped == self._stepped:
            return self._buckets
        buckets: dict[Any, list[list[Matrix]]] = {}
        for index in self._order:
            if index in stepped:
                matrix = self.matrices[index]
                of_kind = buckets.setdefault((matrix.division, self._kinds[index]), [[]])
                num_ranks = 1 if matrix.division is None else matrix.division.communicator.num_ranks
                is_round = len(of_kind[-1]) % num_ranks == 0
                if is_round and sum(prod(member.shape) for member in of_kind[-1]) >= BUCKET_NUMEL:
                    of_kind.append([])
                of_kind[-1].append(matrix)
        self._stepped, self._buckets = stepped, list(chain.from_iterable(buckets.values()))
        return self._buckets


def _work(shape: Sequence[int]) -> int:
    """Return a number that is proportional to the cost of multiplying a matrix of `shape` by its transpose."""
    rows, numel = max(1, shape[0]) if shape else 1, prod(shape)
    return numel * min(rows, numel // rows)


def _division(param: Param) -> Division | None:
    """Return the division of all sharded parameters in the context of `param`; None if each rank has them whole. Collective."""
    context = param.context
    axes = [axis for axis, _ in context.levels(param.cut) if axis.num_ranks > 1]
    if not axes:
        return None
    splits, communicator = tuple(axis.num_ranks for axis in axes), axes[0].reduce
    order = list(range(prod(splits)))
    if len(axes) == 2:  # of a mesh whose first axis replicates, while rows are divided over the second one first
        ranks = _torch.ranks_of(param.sharded.device_mesh)  # type: ignore[attr-defined]
        group = group_of_job([axis.gather for axis in axes], sorted(ranks), context.device)
        communicator = type(axes[0].reduce)(group, context.device)
        order = [communicator.ranks.index(rank) for i in range(splits[0]) for rank in ranks[i :: splits[0]]]
    stream = context.reduce_stream
    return Division(communicator=communicator, side_stream=stream, splits=splits, order=tuple(order))


# -- exchanges


def to_owners(bucket: Sequence[Matrix], rows: list[Tensor]) -> Wait[list[Tensor]]:
    """Start to send `rows`, this rank's (..., *local shape) of each matrix in `bucket`, to the owners. Return a function that
    waits, and returns the whole tensors, (..., *shape), of the matrices that this rank owns. Collective."""
    division = bucket[0].division
    if division is None:
        return lambda: rows
    ranks = range(division.communicator.num_ranks)
    lead = rows[0].shape[: rows[0].dim() - len(bucket[0].shape)]
    own = [matrix for matrix in bucket if matrix.is_owned]
    sent = [[r for matrix, r in zip(bucket, rows, strict=True) if matrix.owner == rank] for rank in ranks]
    shapes = [[(*lead, *division.local_shape(m, rank)) for m in own] for rank in ranks]
    wait = _exchanged(division, bucket, sent, shapes, rows[0])

    def wholes() -> list[Tensor]:
        received = wait()
        return [torch.cat([received[rank][i] for rank in division.order], m.dim) for i, m in enumerate(own)]

    return wholes


def from_owners(bucket: Sequence[Matrix], wholes: list[Tensor], like: Tensor) -> Wait[list[Tensor]]:
    """Start to send all ranks their rows of `wholes`, the tensors of the matrices in `bucket` that this rank owns. Return a
    function that waits, and returns this rank's rows of every matrix. Collective. `like`: has the messages' dtype and device."""
    division = bucket[0].division
    if division is None:
        return lambda: wholes
    communicator = division.communicator
    own = zip([matrix for matrix in bucket if matrix.is_owned], wholes, strict=True)
    parts = [dict(zip(division.order, whole.split(division.counts(m), m.dim), strict=True)) for m, whole in own]
    sent = [[part[rank] for part in parts] for rank in range(communicator.num_ranks)]
    shapes: list[list[tuple[int, ...]]] = [[] for _ in sent]
    for matrix in bucket:
        shapes[matrix.owner].append(division.local_shape(matrix, communicator.rank))
    wait = _exchanged(division, bucket, sent, shapes, like)

    def rows() -> list[Tensor]:
        received = [iter(of_rank) for of_rank in wait()]
        return [next(received[matrix.owner]) for matrix in bucket]

    return rows


def _exchanged(
    division: Division,
    bucket: Sequence[Matrix],
    sent: Sequence[Sequence[Tensor]],
    shapes: Sequence[Sequence[tuple[int, ...]]],
    like: Tensor,
) -> Wait[list[list[Tensor]]]:
    """Start to send the tensors `sent[r]` to each rank r of `division`. Return a function that waits, and returns for each rank
    r a list of the tensors received from r, with the shapes `shapes[r]`. Collective. `bucket`: the matrices to name in errors.
    `like`: a tensor with the dtype and device of the messages."""
    numels = [[prod(shape) for shape in of_rank] for of_rank in shapes]
    sizes = [sum(of_rank) for of_rank in numels], [sum(t.numel() for t in to_rank) for to_rank in sent]
    received = like.new_empty(sum(sizes[0]))  # allocated on the compute stream, which packs and unpacks
    message = torch.cat([like.new_empty(0), *(t.flatten() for t in chain(*sent))])
    carried_each = like.itemsize // carried(like).itemsize  # elements of the carried dtype for one of `like`
    splits = [[carried_each * size for size in of_ranks] for of_ranks in sizes]

    def steps() -> Steps:
        yield division.communicator.exchange([(carried(received), carried(message), splits[0], splits[1])])

    what = f"exchanges rows of {some_of([matrix.name for matrix in bucket], 2)} with their owners"
    transfer = division.side_stream.start(steps(), [received, message], what)

    def wait() -> list[list[Tensor]]:
        transfer.land()
        return [
            [piece.view(shape) for piece, shape in zip(part.split(of_rank), shapes_of, strict=True)]
            for part, of_rank, shapes_of in zip(received.split(sizes[0]), numels, shapes, strict=True)
        ]

    return wait


# -- steps


class WholeStep(Optimizer):
    """Base of the mixins that step whole matrices: every rank calls `_pack` on its rows of a parameter, the owner `_compute` on
    the whole tensor, and every rank `_unpack` on its rows of the result, if it has a gradient. A parameter that is not divided
    is computed on every rank. Call `current_owners` before `step`, in which the parameters are local tensors."""

    _owners: Owners | None = None

    def current_owners(self) -> Owners:
        """Return the `Owners` of the parameters. They are chosen anew, by a collective, if parameters have changed since the last
        call. Not for use in a step, which sees local tensors. Raises `UsageError` for parameters that cannot be stepped whole."""
        if self._owners is None or [*map(id, self._owners.params)] != [*map(id, params_of(self))]:
            self._owners = Owners(self.param_groups)
        return self._owners

    def without_gradient(self) -> list[str]:
        """Return the names of the parameters without a gradient, in order. Call it after `current_owners`."""
        owners = self._owners
        assert owners is not None, "it has stepped"
        return [matrix.name for matrix, p in zip(owners.matrices, params_of(self), strict=True) if p.grad is None]

    def _pack(self, matrix: Matrix, rows: Tensor) -> Tensor:
        """Return the tensor that this rank sends to the owner of `matrix`: (..., *local shape), computed from `rows`, this
        rank's rows of the parameter, and their gradient, with zeros for a gradient that is None. Leading dims stack several
        tensors of the local shape, such as rows and gradient. May update the states of `rows`."""
        raise NotImplementedError

    def _compute(self, owned: list[tuple[Matrix, Tensor, Tensor]]) -> list[Tensor]:
        """Return a tensor of the matrix's shape, whose rows `_unpack` applies on all ranks, for each (matrix, this rank's rows,
        whole tensor (..., *shape)) in `owned`. The whole tensor is joined from what `_pack` returned on all ranks."""
        raise NotImplementedError

    def _unpack(self, matrix: Matrix, rows: Tensor, result: Tensor) -> None:
        """Update `rows`, this rank's rows of a parameter, in place by `result`, this rank's rows of the result of `_compute`."""
        raise NotImplementedError

    @Optimizer.profile_hook_step
    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Step all parameters that have a gradient on this rank; for others that require one, only exchange rows. Collective.
        Call `current_owners` and the closure before."""
        params, owners = params_of(self), self._owners
        assert owners is not None, "`current_owners` was called before"
        # Also those without a gradient: a rank that has one would wait for this rank's rows. `StepWatch` names such ranks.
        pairs = enumerate(zip(params, owners.params, strict=True))
        stepped = {i for i, (rows, p) in pairs if rows.grad is not None or p.requires_grad}

        def gathering() -> Iterator[tuple[list[Matrix], Tensor, Wait[list[Tensor]]]]:
            for bucket in owners.buckets(stepped):
                packed = [self._pack(matrix, params[matrix.index]) for matrix in bucket]
                yield bucket, packed[0].new_empty(0), to_owners(bucket, packed)

        def returning() -> Iterator[tuple[list[Matrix], Wait[list[Tensor]]]]:
            for bucket, like, wait in _one_ahead(gathering()):
                own = [matrix for matrix in bucket if matrix.is_owned]
                owned = [(matrix, params[matrix.index], whole) for matrix, whole in zip(own, wait(), strict=True)]
                yield bucket, from_owners(bucket, self._compute(owned), like)

        # While one bucket is computed, the rows of the next one and the results of the one before it are in flight.
        for bucket, wait in _one_ahead(returning()):
            for matrix, result in zip(bucket, wait(), strict=True):
                if params[matrix.index].grad is not None:
                    self._unpack(matrix, params[matrix.index], result)


def _one_ahead(items: Iterable[T]) -> Iterator[T]:
    """Yield each of `items` in order, after taking the item that follows it from `items`."""
    iterator = iter(items)
    for current in iterator:
        for following in iterator:
            yield current
            current = following
        yield current


def refuse_vectors(muon: Optimizer) -> None:
    """Raise `UsageError` if the optimizer `muon` has a parameter that is not 2-D."""
    for p in params_of(muon):
        if p.dim() != 2:
            raise UsageError(
                f"Muon orthogonalises matrices, and it has a parameter of shape {tuple(p.shape)}; give parameters of other than "
                "two dimensions to a second optimizer, such as AdamW."
            )


class MuonStep(WholeStep):
    """Mixin that `wrap_optimizer` adds to torch.optim.Muon: each rank updates its rows of momentum and weights; one rank for each
    parameter, the owner, orthogonalises the whole update."""

    def current_owners(self) -> Owners:
        refuse_vectors(self)
        return super().current_owners()

    def _pack(self, matrix: Matrix, rows: Tensor) -> Tensor:
        group, grad = self.param_groups[matrix.group], rows.grad
        if grad is None:
            return torch.zeros_like(rows, dtype=torch.bfloat16)
        state = self.state[rows]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(grad)
        average = state["momentum_buffer"].lerp_(grad, 1 - group["momentum"])
        # Muon orthogonalises in bf16, so nothing is lost on the way.
        return (grad.lerp(average, group["momentum"]) if group["nesterov"] else average).bfloat16()

    def _compute(self, owned: list[tuple[Matrix, Tensor, Tensor]]) -> list[Tensor]:
        # Steps of torch.optim.Muon at a rate of 1 from zero, so that its weights become the negative updates. The rate is
        # adjusted to the shape afterwards: that of a wide matrix stays 1.
        options: list[dict[str, Any]] = []
        results = []
        for matrix, rows, whole in owned:
            group, is_tall = self.param_groups[matrix.group], matrix.shape[0] > matrix.shape[1]
            wide = whole.t() if is_tall else whole
            weight = torch.zeros_like(wide)
            weight.grad = wide
            results.append(weight.t() if is_tall else weight)
            if rows.grad is not None:
                values = {key: group[key] for key in ("ns_coefficients", "ns_steps", "eps")}
                options.append({"params": [weight], **values})
        if options:
            torch.optim.Muon(options, lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False).step()
        return results

    def _unpack(self, matrix: Matrix, rows: Tensor, result: Tensor) -> None:
        group = self.param_groups[matrix.group]
        rate = group["lr"].squeeze() if isinstance(group["lr"], Tensor) else group["lr"]
        alpha: Any = _torch.muon_rate(rate, group["adjust_lr_fn"], matrix.shape)
        rows.mul_(1 - rate * group["weight_decay"]).add_(result, alpha=alpha)


# -- optimizers of users


class OwnerStep(WholeStep):
    """Mixin that `wrap_optimizer(whole_matrices=True)` adds to an optimizer: the owner of a parameter steps it whole, with the
    step of the optimizer's own class, and alone keeps the states. Every rank steps the parameters that are not sharded."""

    _kind: type[Optimizer]  # the optimizer's class before it was wrapped
    _copy: OptimizerCopy  # during a step

    def step(self) -> None:  # type: ignore[override]
        self._copy = OptimizerCopy(self, self._kind)
        try:
            super().step()
            with torch.no_grad():
                self._copy.write_after(self)
        finally:
            del self._copy

    def _pack(self, matrix: Matrix, rows: Tensor) -> Tensor:
        return torch.stack([rows, torch.zeros_like(rows) if rows.grad is None else rows.grad.to(rows.dtype)])

    def _compute(self, owned: list[tuple[Matrix, Tensor, Tensor]]) -> list[Tensor]:
        parts: list[Part] = []
        for matrix, rows, (param, grad) in owned:
            if rows.grad is not None:
                param.grad = grad.clone()  # in aligned memory, as otherwise kernels would sum in another order
                parts.append((matrix.group, rows, param, self.state.get(rows, {})))
        states = self._copy.step(parts)
        for _, rows, param, _ in parts:
            self.state[rows] = states.get(param, {})
        return [param for _, _, (param, _) in owned]

    def _unpack(self, matrix: Matrix, rows: Tensor, result: Tensor) -> None:
        rows.copy_(result)

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict with the states of all owners on every rank: tensors as DTensors of rows, scalars as they are.
        Collective. Raises `UsageError` on every rank if a state has values other than finite numbers, texts and tensors."""
        saved = super().state_dict()
        divided: dict[Division, dict[Matrix, DTensor]] = defaultdict(dict)
        for matrix, p in zip(self.current_owners().matrices, params_of(self), strict=True):
            if matrix.division is not None and isinstance(p, DTensor):
                divided[matrix.division][matrix] = p
        for division, params in divided.items():
            states = {m.index: local_state(self.state.get(p, {})) for m, p in params.items()}
            trees, tensors = _shared(states, division.communicator)
            for matrix, p in params.items():
                saved["state"].pop(matrix.index, None)
                if trees.get(matrix.index):
                    saved["state"][matrix.index] = _in_rows(trees[matrix.index], matrix, p, iter(tensors[matrix.index]))
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a `state_dict` saved on any number of ranks. Only the owner of a parameter keeps its states, whole. Collective."""
        super().load_state_dict(state_dict)
        for matrix, p in zip(self.current_owners().matrices, params_of(self), strict=True):
            state = exchange(self.state.pop(p, {}), partial(_whole, matrix))
            if state and matrix.is_owned:
                self.state[p] = state


def _whole(matrix: Matrix, state: Tensor) -> Tensor:
    """Return `state`, a DTensor, as a whole tensor on the owner of `matrix`, and as this rank's rows on other ranks. Return a
    `state` that is no DTensor as it is. Collective."""
    if not isinstance(state, DTensor):
        return state
    rows = _torch.local_of(state)
    return next(iter(to_owners([matrix.state(tuple(state.shape))], [rows])()), rows)


def _shared(states: Mapping[int, Any], communicator: Communicator) -> tuple[dict[int, Any], dict[int, list[Tensor]]]:
    """Send descriptions of `states`, {index of a parameter: its state on this rank}, to all ranks. Return ({index: description
    by `_described`} from all ranks, {index: tensors of at least one dim} from this rank). Collective. Raises `UsageError` on
    every rank for values other than finite numbers, texts and tensors in lists, tuples and dicts."""
    tensors: dict[int, list[Tensor]] = defaultdict(list)
    text = repr({index: _described(state, tensors[index]) for index, state in states.items() if state}).encode()
    num_bytes = gathered_rows(torch.tensor([len(text)], device=communicator.device), communicator)
    padded = torch.frombuffer(bytearray(text.ljust(int(num_bytes.max()))), dtype=torch.uint8)
    trees: dict[int, Any] = {}
    for row in gathered_rows(padded.to(communicator.device), communicator).cpu().numpy():
        line = row.tobytes().decode()
        try:
            trees |= ast.literal_eval(line)
        except (ValueError, SyntaxError) as error:
            raise UsageError(
                "the state of an optimizer that steps whole matrices has a value other than finite numbers, texts and tensors "
                f"in lists, tuples and dicts: {line[:200]}"
            ) from error
    return trees, tensors


def _described(tree: Any, tensors: list[Tensor]) -> Any:
    """Return a copy of `tree`, a state, with (TENSOR, dtype, shape, value) in place of each tensor. The value is None unless the
    tensor is 0-d. Appends the tensors that are not 0-d to `tensors`."""
    if isinstance(tree, Tensor):
        tensors += [tree] if tree.dim() else []
        return TENSOR, str(tree.dtype).removeprefix("torch."), tuple(tree.shape), None if tree.dim() else tree.item()
    if isinstance(tree, dict):
        return {key: _described(value, tensors) for key, value in tree.items()}
    return type(tree)(_described(value, tensors) for value in tree) if type(tree) in (list, tuple) else tree


def _in_rows(tree: Any, matrix: Matrix, p: DTensor, own: Iterator[Tensor]) -> Any:
    """Return the state of `p` from `tree`, a result of `_described`: 0-d tensors as they were, others as DTensors of rows.
    `own`: on the owner of `matrix`, these others as whole tensors, in the order of `tree`. Collective."""
    if isinstance(tree, dict):
        return {key: _in_rows(value, matrix, p, own) for key, value in tree.items()}
    if not (isinstance(tree, tuple) and tree[:1] == (TENSOR,)):
        return type(tree)(_in_rows(item, matrix, p, own) for item in tree) if isinstance(tree, list | tuple) else tree
    _, dtype, shape, value = tree
    like = torch.empty(0, dtype=getattr(torch, dtype), device=_torch.local_of(p).device)
    if not shape:
        return like.new_tensor(value)
    (rows,) = from_owners([matrix.state(shape)], [next(own)] if matrix.is_owned else [], like)()
    return _torch.as_dtensor(rows, p) if shape == matrix.shape else _torch.rows_dtensor(rows, p, shape)
