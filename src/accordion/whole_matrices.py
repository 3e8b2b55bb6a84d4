"""Step sharded matrices whole: an owner rank gets the rows of each, in buckets, and sends back the rows of the result."""

from __future__ import annotations

import ast
import heapq
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, product
from math import prod
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from accordion import _torch
from accordion.engine.communicator import Axis, Communicator
from accordion.engine.engine import Engine
from accordion.engine.layout import Cut
from accordion.engine.params import Param
from accordion.engine.streams import SideStream, Steps, Transfer
from accordion.errors import UsageError
from accordion.offload.step.optimizer_copy import OptimizerCopy, Part, exchange

TENSOR = "$tensor"  # begins the description of a tensor
T = TypeVar("T")
BUCKET_NUMEL = 2**25  # elements of the whole matrices of a bucket; enough to hide the latency of an exchange
Levels: TypeAlias = tuple[tuple[Axis, Cut], ...]
"""(axis, cut) of each division of a matrix over several ranks, the first one first."""


# -- owners


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """A tensor that one rank steps whole.

    Attributes:
        group: index of its param group.
        rows: this rank's local tensor.
        shape: of the whole tensor.
        levels: its divisions over ranks; none if every rank has the whole tensor, and steps it.
        owner: rank of the owner on the axis of each level.
        side_stream: on which its rows are sent; None without levels.
    """

    group: int
    rows: Tensor
    shape: tuple[int, ...]
    levels: Levels
    owner: tuple[int, ...]
    side_stream: SideStream | None

    @property
    def work(self) -> int:
        return _work(self.shape)

    def owned_here(self, level: int = 0) -> bool:
        """Return True if this rank has the matrix once the rows of `level` and all levels after it are joined."""
        pairs = zip(self.levels[level:], self.owner[level:], strict=True)
        return all(axis.rank == owner for (axis, _), owner in pairs)


def _work(shape: Sequence[int]) -> int:
    """Return a number proportional to the multiplications of a matrix product of a matrix and its transpose."""
    rows, numel = max(1, shape[0]) if shape else 1, prod(shape)
    return numel * min(rows, numel // rows)


@cache
def sharded_engines() -> weakref.WeakSet[Engine]:
    """Return the set of the engines of all sharded models in this process."""
    return weakref.WeakSet()


def matrices_of(groups: Sequence[Mapping[str, Any]]) -> list[Matrix]:
    """Return the parameters of all param groups, during a step on local tensors, each with its owner.

    Owners are the same on all ranks and in all steps: in each group the longest work goes first, to the rank that has the
    least. Raises `UsageError` if tensor parallelism splits a parameter.
    """
    params = {id(_torch.local_of(param.sharded)): param for engine in sharded_engines() for param in engine.params}
    loads: dict[tuple[int, ...], list[tuple[int, tuple[int, ...]]]] = {}  # by axes: heap of (work so far, rank)
    matrices = []
    for i, group in enumerate(groups):
        sharded = [(rows, params.get(id(rows))) for rows in group["params"]]
        shaped = [(rows, tuple(rows.shape) if param is None else param.cut.shape, param) for rows, param in sharded]
        for rows, shape, param in sorted(shaped, key=lambda each: -_work(each[1])):
            levels = () if param is None else _levels(param)
            axes = tuple(axis for axis, _ in levels)
            heap = loads.setdefault(_key(levels), [(0, rank) for rank in product(*(range(a.num_ranks) for a in axes))])
            load, owner = heap[0]
            heapq.heapreplace(heap, (load + _work(shape), owner))
            side_stream = param.context.reduce_stream if param is not None and levels else None
            matrices.append(
                Matrix(group=i, rows=rows, shape=shape, levels=levels, owner=owner, side_stream=side_stream)
            )
    return matrices


def _levels(param: Param) -> Levels:
    if param.around is not None:
        raise UsageError(
            f"{param.name!r} is split by tensor or expert parallelism too, and no rank can step the whole matrix; take an "
            "elementwise optimizer for it, such as AdamW."
        )
    levels = param.context.levels(param.cut)
    return tuple((axis, cut) for axis, cut in levels if cut.dim is not None and axis.num_ranks > 1)


def _key(levels: Levels) -> tuple[int, ...]:
    return tuple(id(axis) for axis, _ in levels)


def buckets_of(matrices: Iterable[Matrix]) -> list[list[Matrix]]:
    """Divide `matrices` into buckets over the same axes, in which all ranks have about the same work; longest work first."""
    turns = Counter[Any]()
    rounds: dict[Any, list[Matrix]] = {}  # the n-th matrix of each owner
    for matrix in sorted(matrices, key=lambda matrix: -matrix.work):
        key = (_key(matrix.levels), matrix.rows.dtype, matrix.rows.device)
        turns[key, matrix.owner] += 1
        rounds.setdefault((key, turns[key, matrix.owner]), []).append(matrix)
    buckets: dict[Any, list[list[Matrix]]] = {}
    for (key, _), members in rounds.items():
        latest = buckets.setdefault(key, [[]])
        if sum(prod(matrix.shape) for matrix in latest[-1]) >= BUCKET_NUMEL:
            latest.append([])
        latest[-1].extend(members)
    return [bucket for of_axes in buckets.values() for bucket in of_axes]


# -- exchanges


class AllToAll(NamedTuple):
    """Arguments of one all-to-all of 1-D tensors, which `PendingExchanges` launches. `sizes`: (number of elements of `received`
    from each rank, number of elements of `sent` to each rank)."""

    communicator: Communicator
    received: Tensor
    sent: Tensor
    sizes: tuple[list[int], list[int]]


Exchanges: TypeAlias = Generator[AllToAll | None, None, list[Tensor]]
"""Exchanges, one after the other. The generator yields a message (None: this rank sends nothing), is resumed when that has been
received, and returns the tensors that this rank has at the end.
"""


def to_owners(bucket: Sequence[Matrix], rows: list[Tensor]) -> Exchanges:
    """Send `rows`, (..., *local shape) of each matrix, to its owner; return (..., *shape) of each that this rank owns."""
    for level in reversed(range(len(bucket[0].levels))):
        members = [matrix for matrix in bucket if matrix.owned_here(level + 1)]
        if not members:
            return []
        axis, cuts, owners = _on_axis(members, level)
        lead = rows[0].shape[: rows[0].dim() - len(cuts[0].shape)]
        of_rank = [[i for i, owner in enumerate(owners) if owner == rank] for rank in range(axis.num_ranks)]
        sent = [[rows[i] for i in indices] for indices in of_rank]
        own = [cuts[i] for i in of_rank[axis.rank]]
        shapes = [[(*lead, *cut.local_shape(rank)) for cut in own] for rank in range(axis.num_ranks)]
        received = yield from _exchanged(axis, sent, shapes, rows[0])
        rows = [torch.cat(pieces, _dim(cut)) for cut, pieces in zip(own, zip(*received, strict=True), strict=True)]
    return rows


def from_owners(bucket: Sequence[Matrix], wholes: list[Tensor], like: Tensor) -> Exchanges:
    """Send the rows of `wholes`, the matrices that this rank owns, to all ranks; return this rank's rows of each matrix.

    `like`: a tensor with the dtype and device of the message.
    """
    for level in range(len(bucket[0].levels)):
        members = [matrix for matrix in bucket if matrix.owned_here(level + 1)]
        if not members:
            yield None  # so that all ranks of the next axis begin its exchange at the same time
            continue
        axis, cuts, owners = _on_axis(members, level)
        of_rank = [[i for i, owner in enumerate(owners) if owner == rank] for rank in range(axis.num_ranks)]
        own = [cuts[i] for i in of_rank[axis.rank]]
        parts = [
            whole.split([cut.rows_of(rank) for rank in range(axis.num_ranks)], _dim(cut))
            for cut, whole in zip(own, wholes, strict=True)
        ]
        sent = [[part[rank] for part in parts] for rank in range(axis.num_ranks)]
        shapes = [[cuts[i].local_shape(axis.rank) for i in indices] for indices in of_rank]
        received = yield from _exchanged(axis, sent, shapes, like)
        by_index = dict(zip(chain(*of_rank), chain(*received), strict=True))
        wholes = [by_index[i] for i in range(len(members))]
    return wholes


def _on_axis(members: Sequence[Matrix], level: int) -> tuple[Axis, list[Cut], list[int]]:
    """Return (axis, cut of each matrix, rank of each owner) at one level of matrices over the same axes."""
    cuts = [matrix.levels[level][1] for matrix in members]
    return members[0].levels[level][0], cuts, [matrix.owner[level] for matrix in members]


def _dim(cut: Cut) -> int:
    """Return the dimension that `cut` divides, counted from the last one."""
    assert cut.dim is not None, "levels divide their matrices"
    return cut.dim - len(cut.shape)


def _exchanged(
    axis: Axis, sent: Sequence[Sequence[Tensor]], shapes: Sequence[Sequence[tuple[int, ...]]], like: Tensor
) -> Generator[AllToAll, None, list[list[Tensor]]]:
    """Send the tensors `sent[r]` to rank r of `axis`; return those that each rank r sent here, of the shapes `shapes[r]`."""
    numels = [[prod(shape) for shape in of_rank] for of_rank in shapes]
    sizes = [sum(of_rank) for of_rank in numels], [sum(t.numel() for t in to_rank) for to_rank in sent]
    received = like.new_empty(sum(sizes[0]))
    message = torch.cat([like.new_empty(0), *(t.flatten() for t in chain(*sent))])
    yield AllToAll(axis.reduce, received, message, sizes)
    return [
        [piece.view(shape) for piece, shape in zip(part.split(of_rank), shapes_of, strict=True)]
        for part, of_rank, shapes_of in zip(received.split(sizes[0]), numels, shapes, strict=True)
    ]


class PendingExchanges:
    """Exchanges in flight on a side stream. Their tensors are allocated on the compute stream, which packs and unpacks them."""

    def __init__(self, side_stream: SideStream | None, exchanges: Exchanges) -> None:
        self._side_stream, self._exchanges = side_stream, exchanges
        self._transfer: Transfer | None = None
        self._tensors: list[Tensor] | None = None  # until the last exchange has ended
        self._start_next()

    def wait(self) -> list[Tensor]:
        """Let the compute stream wait for the end, and return the tensors that this rank has then. On gloo the host waits."""
        while self._tensors is None:
            if self._transfer is not None:
                self._transfer.land()
            self._start_next()
        return self._tensors

    def _start_next(self) -> None:
        try:
            message = next(self._exchanges)
        except StopIteration as end:
            self._tensors = end.value
            return
        self._transfer = None if message is None else self._start(message)

    def _start(self, message: AllToAll) -> Transfer:
        communicator, received, sent, sizes = message
        assert self._side_stream is not None, "matrices that are sent have levels"

        def steps() -> Steps:
            yield communicator.exchange([(received, sent, *sizes)])

        return self._side_stream.start(steps(), [received, sent], "exchanges rows of matrices")


# -- steps


class WholeStep(Optimizer):
    """Base of the mixins that step matrices on their owners. The parameters are local tensors during `step`."""

    def check(self) -> None:
        """Raise `UsageError` for parameters that this optimizer cannot step. Called before each step."""

    def _pack(self, matrix: Matrix) -> Tensor:
        """Return this rank's rows of what the owner needs, (..., *local shape)."""
        raise NotImplementedError

    def _compute(self, matrices: list[Matrix], wholes: list[Tensor]) -> list[Tensor]:
        """Return the result of each matrix that this rank owns, (*shape), from `wholes`, (..., *shape) each."""
        raise NotImplementedError

    def _unpack(self, matrix: Matrix, rows: Tensor) -> None:
        """Apply this rank's rows of the result, (*local shape), to the parameter."""
        raise NotImplementedError

    @Optimizer.profile_hook_step
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all parameters that have a gradient, which must be the same ones on all ranks. Collective."""
        buckets = buckets_of(matrix for matrix in matrices_of(self.param_groups) if matrix.rows.grad is not None)
        # While one bucket is computed, the rows of the next one and the results of the one before it are in flight.
        gathering = _one_ahead(self._send_rows(bucket) for bucket in buckets)
        returning = _one_ahead(self._send_results(*sent) for sent in gathering)
        for bucket, pending in returning:
            for matrix, rows in zip(bucket, pending.wait(), strict=True):
                self._unpack(matrix, rows)

    def _send_rows(self, bucket: list[Matrix]) -> tuple[list[Matrix], Tensor, PendingExchanges]:
        """Start to send the rows of `bucket` to the owners. Return the bucket, a tensor of the message's dtype, the exchanges."""
        rows = [self._pack(matrix) for matrix in bucket]
        return bucket, rows[0].new_empty(0), PendingExchanges(bucket[0].side_stream, to_owners(bucket, rows))

    def _send_results(
        self, bucket: list[Matrix], like: Tensor, pending: PendingExchanges
    ) -> tuple[list[Matrix], PendingExchanges]:
        """Wait for the matrices that this rank owns, compute their results and start to send them back."""
        wholes = pending.wait()
        results = self._compute([matrix for matrix in bucket if matrix.owned_here()], wholes)
        return bucket, PendingExchanges(bucket[0].side_stream, from_owners(bucket, results, like))


def _one_ahead(items: Iterable[T]) -> Iterator[T]:
    """Iterate over `items`, and take the next one from `items` before each is yielded."""
    iterator = iter(items)
    for current in iterator:
        for following in iterator:
            yield current
            current = following
        yield current


def refuse_vectors(muon: Optimizer) -> None:
    """Raise `UsageError` if a Muon has a parameter that is no matrix."""
    for p in chain.from_iterable(group["params"] for group in muon.param_groups):
        if p.dim() != 2:
            raise UsageError(
                f"Muon orthogonalises matrices, and it has a parameter of shape {tuple(p.shape)}; give parameters of other than "
                "two dimensions to a second optimizer, such as AdamW."
            )


class MuonStep(WholeStep):
    """Mixin with the step of torch.optim.Muon: momentum and weights are stepped in rows, updates orthogonalised by owners."""

    def check(self) -> None:
        refuse_vectors(self)

    def _pack(self, matrix: Matrix) -> Tensor:
        group, grad = self.param_groups[matrix.group], matrix.rows.grad
        assert grad is not None, "only parameters with a gradient are stepped"
        state, momentum = self.state[matrix.rows], group["momentum"]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(grad)
        average = state["momentum_buffer"].lerp_(grad, 1 - momentum)
        # Muon orthogonalises in bf16, so nothing is lost on the way.
        return (grad.lerp(average, momentum) if group["nesterov"] else average).bfloat16()

    def _compute(self, matrices: list[Matrix], wholes: list[Tensor]) -> list[Tensor]:
        # Steps of torch.optim.Muon at a rate of 1 from zero, so that its weights become the negative updates. The rate is
        # adjusted to the shape afterwards: that of a wide matrix stays 1.
        options: list[dict[str, Any]] = []
        for matrix, whole in zip(matrices, wholes, strict=True):
            group, is_tall = self.param_groups[matrix.group], matrix.shape[0] > matrix.shape[1]
            wide = whole.t() if is_tall else whole
            weight = torch.zeros_like(wide)
            weight.grad = wide
            options.append({"params": [weight], **{key: group[key] for key in ("ns_coefficients", "ns_steps", "eps")}})
        if options:
            torch.optim.Muon(options, lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False).step()
        weights = [each["params"][0] for each in options]
        return [w.t() if m.shape[0] > m.shape[1] else w for m, w in zip(matrices, weights, strict=True)]

    def _unpack(self, matrix: Matrix, rows: Tensor) -> None:
        group = self.param_groups[matrix.group]
        rate = group["lr"].squeeze() if isinstance(group["lr"], Tensor) else group["lr"]
        matrix.rows.mul_(1 - rate * group["weight_decay"])
        alpha: Any = _torch.muon_rate(rate, group["adjust_lr_fn"], matrix.shape)
        matrix.rows.add_(rows, alpha=alpha)


# -- optimizers of users


class OwnerStep(WholeStep):
    """Mixin for an optimizer of the user's own: each owner steps its parameters whole, and has their states whole."""

    _kind: type[Optimizer]  # the optimizer's class before it was wrapped
    _copy: OptimizerCopy  # during a step

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        self._copy = OptimizerCopy(self, self._kind)
        try:
            super().step()
            with torch.no_grad():
                self._copy.write_after(self)
        finally:
            del self._copy

    def _pack(self, matrix: Matrix) -> Tensor:
        assert matrix.rows.grad is not None, "only parameters with a gradient are stepped"
        return torch.stack([matrix.rows, matrix.rows.grad.to(matrix.rows.dtype)])

    def _compute(self, matrices: list[Matrix], wholes: list[Tensor]) -> list[Tensor]:
        parts: list[Part] = []
        for matrix, whole in zip(matrices, wholes, strict=True):
            param = whole[0]
            param.grad = whole[1].clone()  # in aligned memory, as otherwise kernels would sum in another order
            parts.append((matrix.group, matrix.rows, param, self.state.get(matrix.rows, {})))
        states = self._copy.step(parts)
        for matrix, (_, _, param, _) in zip(matrices, parts, strict=True):
            self.state[matrix.rows] = states.get(param, {})
        return [param for _, _, param, _ in parts]

    def _unpack(self, matrix: Matrix, rows: Tensor) -> None:
        matrix.rows.copy_(rows)

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict with the states of all owners, those of their parameter's shape in rows. Collective."""
        saved = super().state_dict()
        for index, p, matrix in self._sharded():
            state = _from_owner({k: _torch.local_or_same(v) for k, v in self.state.get(p, {}).items()}, matrix)
            saved["state"].pop(index, None)
            if state:

                def rows(tensor: Tensor, p: DTensor = p, matrix: Matrix = matrix) -> Tensor:
                    is_like = tuple(tensor.shape) == matrix.shape
                    return _torch.as_dtensor(_own_rows(tensor, matrix), p) if is_like else tensor

                saved["state"][index] = exchange(state, rows)
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict as `state_dict` returns it, on any number of ranks; owners keep their states. Collective."""
        super().load_state_dict(state_dict)
        for _, p, matrix in self._sharded():
            state = self.state.pop(p, {})

            def whole(tensor: Tensor, matrix: Matrix = matrix) -> Tensor:
                if not isinstance(tensor, DTensor):
                    return tensor
                own = PendingExchanges(matrix.side_stream, to_owners([matrix], [_torch.local_of(tensor)])).wait()
                return own[0] if own else tensor

            exchange(state, whole)
            if state and matrix.owned_here():
                self.state[p] = state

    def _sharded(self) -> Iterator[tuple[int, DTensor, Matrix]]:
        """Iterate over (index, parameter, matrix) of all parameters that are divided over ranks, in order of indices."""
        groups = [{"params": [_torch.local_or_same(p) for p in group["params"]]} for group in self.param_groups]
        matrices = {id(matrix.rows): matrix for matrix in matrices_of(groups)}
        for index, p in enumerate(chain.from_iterable(group["params"] for group in self.param_groups)):
            matrix = matrices[id(_torch.local_or_same(p))]
            if isinstance(p, DTensor) and matrix.levels:
                yield index, p, matrix


def _own_rows(whole: Tensor, matrix: Matrix) -> Tensor:
    """Return a copy of this rank's rows of the tensor `whole`, divided as `matrix`."""
    for axis, cut in matrix.levels:
        whole = whole.split([cut.rows_of(rank) for rank in range(axis.num_ranks)], _dim(cut))[axis.rank]
    return whole.clone(memory_format=torch.contiguous_format)


def _from_owner(state: dict[str, Any], matrix: Matrix) -> dict[str, Any]:
    """Return on every rank the `state` of the owner of `matrix`: numbers, texts and tensors in lists, tuples and dicts.

    Collective. Raises `UsageError` on every rank for other values.
    """
    tensors: list[Tensor] = []
    text = repr(_described(state, tensors)).encode() if matrix.owned_here() else b""
    length = _sent_by_owner(torch.tensor(len(text), device=matrix.rows.device), matrix)
    padded = torch.frombuffer(bytearray(text.ljust(int(length), b" ")) or bytearray(1), dtype=torch.uint8)
    text = _sent_by_owner(padded.to(matrix.rows.device), matrix).cpu().numpy().tobytes()
    try:
        description = ast.literal_eval(text.decode())
    except (ValueError, SyntaxError) as error:
        raise UsageError(
            "the state of an optimizer that steps whole matrices has a value other than finite numbers, texts and tensors in "
            f"lists, tuples and dicts: {text.decode()[:200]}"
        ) from error
    own_tensors = iter(tensors)

    def built(tree: Any) -> Any:
        if isinstance(tree, dict):
            return {key: built(value) for key, value in tree.items()}
        if isinstance(tree, tuple) and tree[:1] == (TENSOR,):
            _, dtype, shape = tree
            empty = torch.empty(shape, dtype=getattr(torch, dtype), device=matrix.rows.device)
            return _sent_by_owner(next(own_tensors, empty).to(empty.device), matrix)
        return type(tree)(map(built, tree)) if isinstance(tree, list | tuple) else tree

    whole_state: dict[str, Any] = built(description)
    return whole_state


def _described(tree: Any, tensors: list[Tensor]) -> Any:
    """Return `tree` with (TENSOR, dtype, shape) in place of each tensor, and append the tensors to `tensors`."""
    if isinstance(tree, Tensor):
        tensors.append(tree)
        return TENSOR, str(tree.dtype).removeprefix("torch."), tuple(tree.shape)
    if isinstance(tree, dict):
        return {key: _described(value, tensors) for key, value in tree.items()}
    return type(tree)(_described(value, tensors) for value in tree) if type(tree) in (list, tuple) else tree


def _sent_by_owner(tensor: Tensor, matrix: Matrix) -> Tensor:
    """Return on every rank the `tensor` of the owner of `matrix`; it has the same shape and dtype on all. Collective."""
    tensor = tensor.detach().clone(memory_format=torch.contiguous_format)
    for level, (axis, _) in enumerate(matrix.levels):
        if matrix.owned_here(level + 1) and tensor.numel():
            message = tensor.view(-1).view(torch.uint8)
            dist.broadcast(message, group=axis.gather.group, group_src=matrix.owner[level])
    return tensor
