"""Optimizers of sharded parameters: steps on local tensors, and clipping by the norm of all gradients."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from accordion import _torch
from accordion.engine.communicator import Communicator
from accordion.engine.engine import Engine
from accordion.engine.hooks import engine_of
from accordion.engine.params import Param
from accordion.errors import NonFiniteError, UsageError
from accordion.offload.step.deferred_step import defer, engines_of, expose, owned_by, prepare, refuse_unwrapped
from accordion.offload.step.optimizer_copy import exchange, local_state, write_back
from accordion.optimizers.grad_norm import NormPart, multiply, norms
from accordion.optimizers.low_bit import OURS, LowBitStates, check_blocks, low_bit_kind
from accordion.optimizers.whole_matrices import MuonStep, OwnerStep, WholeStep, refuse_vectors, sharded_engines
from accordion.row_marks import params_of, refuse_other_rows, refuse_states_of_others, sharded_axes

Opt = TypeVar("Opt", bound=Optimizer)
PARKED = "_accordion_parked"  # attribute of a sharded parameter while its model is parked
ELEMENTWISE = (
    *(torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax),
    *(torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.ASGD, torch.optim.RMSprop, torch.optim.Rprop),
)


class LocalStep(Optimizer):
    """Mixin that `wrap_optimizer` adds to an optimizer's class: its step runs on the local tensors of sharded parameters. A step
    on DTensors takes 2.6 to 4.5 times as long. Outside of a step `param_groups` and `state` hold DTensors, as state dicts,
    schedulers and scalers expect."""

    _kind: type[Optimizer]  # the optimizer's class before it was wrapped

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step, and return the loss of `closure`, or None. Offloaded parameters may be stepped on a thread, after this has
        returned. Raises `UsageError` for a parked model. Collective for Muon and with `whole_matrices`."""
        refuse_parked(self)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        _torch.count_step(self)
        if isinstance(self, WholeStep):
            self.current_owners()
            _refuse_offload(self)
        if engines_of(self):
            defer(self, self._kind)
        else:
            self._step_here()
        return loss

    # Otherwise torch's `load_state_dict` would wrap `step` once more, and the step hooks would run twice.
    step.hooked = True  # type: ignore[attr-defined]
    _torch.counts_itself(step)

    def _step_here(self) -> None:
        """Step with local tensors in place of DTensors in all attributes of the optimizer, then put the DTensors back. Raises
        `UsageError` after the step if the optimizer holds parameters in an object, where they are not replaced."""
        outer_state = self.state
        pairs: list[tuple[Tensor, Tensor]] = [(p, _torch.local_or_same(p)) for p in params_of(self)]
        sharded: dict[int, Tensor] = {id(local): p for p, local in pairs}

        def to_local(tensor: Tensor) -> Tensor:
            if not isinstance(tensor, DTensor):
                return tensor
            local = _torch.local_of(tensor)
            sharded.setdefault(id(local), tensor)
            return local

        def from_local(tensor: Tensor) -> Tensor:
            return sharded.get(id(tensor), tensor)

        state = _local_grads_and_state(pairs, outer_state)
        # A key that is no parameter belongs to a state that all parameters share.
        state.update({k: exchange(value, to_local) for k, value in outer_state.items() if not isinstance(k, Tensor)})
        try:
            self.state = state
            # This includes attributes other than `param_groups`, such as a list of parameters.
            self._exchange(to_local)
            super().step()
        finally:
            self.state = outer_state
            self._exchange(from_local)
            for p, local in pairs:
                if local is not p:
                    local.grad = None
                    torch.autograd.graph.increment_version(local)  # fused optimizers do not (2.13)
                if local in state:
                    write_back(outer_state[p], state.pop(local), p)
            outer_state.update({key: exchange(value, from_local) for key, value in state.items()})
        if any(isinstance(key, DTensor) for key in state):
            raise UsageError(
                f"{type(self).__name__} holds its parameters in an object, in which wrap_optimizer does not find them; keep them "
                "in a list or dict of the optimizer, or leave out wrap_optimizer."
            )

    def _exchange(self, swap: Callable[[Tensor], Tensor]) -> None:
        for name, value in list(vars(self).items()):
            if name != "state":
                vars(self)[name] = exchange(value, swap)

    def _wait_for_steps(self) -> None:
        for engine in engines_of(self):
            engine.synchronize()

    def zero_grad(self, set_to_none: bool = True) -> None:
        if not set_to_none:  # this writes to gradients that a step of offloaded parameters reads on another thread
            self._wait_for_steps()
        super().zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Wait for optimizer steps in progress, and return the state dict with this rank's rows."""
        self._wait_for_steps()
        expose(self)
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict with this rank's rows, after optimizer steps in progress. Collective. Raises `UsageError` on all
        ranks, before anything is loaded, if one of them got the rows of another rank."""
        refuse_other_rows(self, state_dict)
        self._wait_for_steps()
        super().load_state_dict(state_dict)
        prepare(self, self._kind)
        expose(self)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self._wait_for_steps()
        super().add_param_group(param_group)


class StepHooks:
    """Hooks that torch calls before and after each step of any optimizer: they notify the watches that `add` registers, and
    raise `UsageError` before a step if an optimizer cannot step its sharded parameters. `step_hooks` returns the instance."""

    # One pair for all models, never removed: removing hooks would change torch's dict while a step may be iterating over it.
    def __init__(self) -> None:
        self._watches: list[weakref.ref[Any]] = []
        self._checked: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Notify the watches. Then, if `optimizer` is not wrapped, raise `UsageError` if it cannot step its sharded parameters:
        they are parked, or an `Offload` steps them chunk by chunk; it is an LBFGS, or an Adafactor of parameters on several
        ranks; or it has loaded another rank's states. The first call for `optimizer` registers a hook on it that checks later
        loads."""
        self._notify("steps", optimizer)
        if isinstance(optimizer, LocalStep) or not any(OURS in vars(p) for p in params_of(optimizer)):
            return
        refuse_parked(optimizer)
        refuse_unwrapped(optimizer)
        if optimizer not in self._checked:
            refuse_adafactor(optimizer)
            _refuse_lbfgs(optimizer)
            self._checked.add(optimizer)
            optimizer.register_load_state_dict_post_hook(refuse_states_of_others)
            refuse_states_of_others(optimizer)

    def after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._notify("stepped", optimizer)

    def _notify(self, moment: str, optimizer: Optimizer) -> None:
        for reference in self._watches:
            callback = getattr(reference(), moment, None)
            if callback is not None:
                callback(optimizer)

    def add(self, watch: Any) -> None:
        """Register `watch`, without keeping it alive: from now on `watch.steps(optimizer)` is called before, and
        `watch.stepped(optimizer)` after, each step of any optimizer, if `watch` has these methods."""
        # A new list, because a step on another thread may be iterating over the old one.
        self._watches = [*(each for each in self._watches if each() is not None), weakref.ref(watch)]


@cache
def step_hooks() -> StepHooks:
    """Return the `StepHooks` of this process; the first call creates the object and registers its hooks with torch."""
    hooks = StepHooks()
    register_optimizer_step_pre_hook(hooks.before)
    register_optimizer_step_post_hook(hooks.after)
    return hooks


def mark_sharded(engine: Engine) -> None:
    """Set the attribute `OURS` on the sharded parameters of `engine`, so that `StepHooks` checks the optimizers that step them,
    and add `engine` to `sharded_engines()`. The first call registers the hooks for all optimizers of the process."""
    for param in engine.params:
        vars(param.sharded)[OURS] = param.name
    sharded_engines().add(engine)
    step_hooks()


def refuse_parked(optimizer: Optimizer) -> None:
    """Raise `UsageError` if the first parameter of `optimizer` is of a model that `park` has moved off the device."""
    params = optimizer.param_groups[0]["params"]
    if params and PARKED in vars(params[0]):
        raise parked_error()


def parked_error() -> UsageError:
    return UsageError(
        "this model is parked off the device; call accordion.unpark(model, optimizer) before its next use."
    )


def refuse_adafactor(optimizer: Optimizer) -> None:
    """Raise `UsageError` for an Adafactor, of torch or transformers, with a parameter that is sharded over several ranks."""
    is_sharded = any(isinstance(p, DTensor) and sharded_axes(p) for p in params_of(optimizer))
    if is_sharded and "Adafactor" in {kind.__name__ for kind in type(optimizer).__mro__}:
        raise UsageError(
            "Adafactor keeps means over the rows and columns of whole matrices, and a rank holds only some rows of each sharded "
            'parameter; use AdamW (optim="adamw_torch" of a Trainer), whose states are sharded too.'
        )


def _refuse_lbfgs(optimizer: Optimizer) -> None:
    """Raise `UsageError` if `optimizer` is an LBFGS, which steps all parameters as one vector and evaluates one rank's loss."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UsageError(
            "LBFGS computes with the vector of all parameters and with the loss of one rank, and sharded parameters are rows of "
            "it; use AdamW, or train the model without shard()."
        )


def _local_grads_and_state(pairs: Iterable[tuple[Tensor, Tensor]], state: Mapping[Any, Any]) -> defaultdict[Any, Any]:
    """Set `.grad` of each local tensor in `pairs` (parameter, local tensor) to the parameter's local gradient. Return {local
    tensor: state of its parameter, in which local tensors replace DTensors}, for parameters that have a state."""
    local_states: defaultdict[Any, Any] = defaultdict(dict)
    for p, local in pairs:
        if local is not p:
            grad = _torch.local_or_same(p.grad)
            if grad is not None and grad.dtype is not local.dtype:
                local.grad_dtype = grad.dtype
            local.grad = grad
        if p in state:
            local_states[local] = local_state(state[p])
    return local_states


def inner_of(optimizer: Optimizer) -> Optimizer:
    """Return the innermost optimizer in wrappers such as accelerate's (attribute `optimizer`); `optimizer` if it wraps none."""
    inner: Any = getattr(optimizer, "optimizer", None)
    is_outer = isinstance(optimizer, Optimizer) and isinstance(inner, Optimizer) and inner is not optimizer
    return inner_of(inner) if is_outer else optimizer


def _refuse_stored_step(optimizer: Optimizer) -> None:
    """Raise `UsageError` if `optimizer`, or a wrapper in it, has stored the bound `step` of the optimizer that it wraps."""
    while inner_of(optimizer) is not optimizer:
        inner: Any = optimizer.optimizer  # type: ignore[attr-defined]
        if any(getattr(v, "__self__", 0) is inner and v.__name__ == "step" for v in vars(optimizer).values()):
            raise UsageError(
                f"{type(optimizer).__name__} has already stored the step of the {type(inner).__name__} in it, as it does with a "
                "gradient scaler; call wrap_optimizer on the inner optimizer before it is prepared."
            )
        optimizer = inner


def wrap_optimizer(optimizer: Opt, *, elementwise: bool = False, whole_matrices: bool = False) -> Opt:
    """Make `optimizer` step on the local tensors of sharded parameters; return the same object, now of a subclass of its class.

    No effect if wrapped before. `param_groups` and `state` keep DTensors. Elementwise optimizers of torch.optim step correctly
    without this too, but more slowly; parameters that an `Offload` steps chunk by chunk need it. `state_dict` returns the rows of
    this rank; `load_state_dict` is collective, and raises `UsageError` on all ranks if one gets another rank's rows. The result
    can be copied, not pickled. In `torch.compile` the step runs uncompiled. If `optimizer` wraps another one (accelerate's), the
    inner one is changed. Low-bit optimizers of torchao and bitsandbytes need whole blocks on each rank: `shard(state_block=256)`.
    A step of torch.optim.Muon is collective: for each matrix, one rank gets all rows, orthogonalises, and sends the rows back.

    Args:
        elementwise: for an optimizer that is not of torch.optim, promise that an element's update depends on that element alone.
        whole_matrices: promise that the update of a parameter depends on that parameter alone (SOAP, Shampoo). One rank per
            parameter steps it whole and keeps its states. Steps and state dicts are collective. Not together with `elementwise`.

    Raises:
        UsageError: without a promise, for an optimizer other than Muon, elementwise ones of torch.optim and low-bit ones; for
            LBFGS, SparseAdam, and an Adafactor of parameters on several ranks; for one without sharded parameters, made before
            `shard`, or whose step was replaced; if Muon or `whole_matrices` meets offloaded parameters; or if ranks would split
            low-bit blocks.
    """
    target: object = optimizer
    if not isinstance(target, Optimizer):
        raise UsageError(f"wrap_optimizer takes a torch.optim.Optimizer, not {type(target).__name__}.")
    if inner_of(target) is not target:
        if not isinstance(inner_of(target), LocalStep):
            _refuse_stored_step(target)
        wrap_optimizer(inner_of(target), elementwise=elementwise, whole_matrices=whole_matrices)
        return optimizer
    if isinstance(target, LocalStep):
        return optimizer
    if elementwise and whole_matrices:
        raise UsageError("wrap_optimizer got elementwise=True and whole_matrices=True; pass one of them.")
    _check_wrappable(target, elementwise, whole_matrices)
    low_bit = low_bit_kind(target)
    kind = type(optimizer)
    attributes: dict[str, Any] = {"__module__": kind.__module__, "__doc__": kind.__doc__}
    if low_bit is not None:
        check_blocks(target, low_bit)
        kind = type(kind.__name__, (low_bit, kind), attributes)
    # Inside a compiled function the step runs uncompiled: dynamo cannot trace the change to local tensors and back.
    attributes |= {"_kind": kind, "step": _torch.unseen_by_dynamo(LocalStep.step)}
    step = (MuonStep,) if kind is torch.optim.Muon else (OwnerStep,) if whole_matrices else ()
    optimizer.__class__ = type(kind.__name__, (LocalStep, *step, kind), attributes)
    vars(optimizer).pop("step", None)  # by which a scheduler counts steps
    if isinstance(target, LowBitStates):
        target.keep_whole_shapes()
    prepare(optimizer, kind)
    return optimizer


def is_elementwise(optimizer: Optimizer) -> bool:
    """Return True if `wrap_optimizer` knows that the update of an element depends on that element, or its block, alone."""
    return isinstance(optimizer, ELEMENTWISE) or low_bit_kind(optimizer) is not None


def _check_wrappable(optimizer: Optimizer, elementwise: bool, whole_matrices: bool) -> None:
    """Raise `UsageError` if `wrap_optimizer` does not support this optimizer or it has no sharded parameters."""
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise UsageError(
            "SparseAdam steps sparse gradients, and those of sharded parameters are dense; take Adam or AdamW."
        )
    if isinstance(optimizer, torch.optim.Muon) and elementwise:
        raise UsageError(f"{name} steps whole matrices, and elementwise=True says the contrary; leave it out.")
    is_muon = type(optimizer) is torch.optim.Muon  # a subclass may step otherwise
    _refuse_lbfgs(optimizer)
    if not (elementwise or whole_matrices or is_muon or is_elementwise(optimizer)):
        raise UsageError(
            f"wrap_optimizer does not know {name}; pass elementwise=True if its step treats each element by itself, as Adam "
            "does, or whole_matrices=True if it treats each parameter by itself; otherwise leave out wrap_optimizer."
        )
    refuse_adafactor(optimizer)
    if "step" in vars(optimizer) and not _torch.has_counted_step(optimizer):
        raise UsageError(f"the step method of this {name} was replaced; call wrap_optimizer before that happens.")
    params = params_of(optimizer)
    for p in params:
        _ = p.grad  # raises for a parameter that `shard` has replaced
    if not any(isinstance(p, DTensor) for p in params):
        raise UsageError("this optimizer holds no sharded parameter; make it from model.parameters() after shard().")
    if is_muon:
        refuse_vectors(optimizer)
    if is_muon or whole_matrices:
        _refuse_offload(optimizer)


def _refuse_offload(optimizer: Optimizer) -> None:
    """Raise `UsageError` if `optimizer`, which steps whole matrices, has offloaded parameters."""
    for _, _, _, unit in owned_by(optimizer):
        raise UsageError(
            f"{type(optimizer).__name__} steps whole matrices on the device, and the Offload of unit {unit.name or 'root'!r} "
            "steps its parameters elsewhere; leave out that Offload, or take AdamW for this unit."
        )


def clip_grad_norm_(
    model: nn.Module, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """Scale the gradients of a sharded model in place to a norm of at most `max_norm`; return the norm before, 0-d float32.

    The norm is over all gradients, and equal on all ranks. Collective; waits for optimizer steps in progress. Gradients of
    parameters that are not sharded must be equal on all ranks. With `error_if_nonfinite`, a norm of NaN or inf raises
    `NonFiniteError` on every rank, before any gradient changes; this synchronizes with the device. Raises `UsageError` if `model`
    is not sharded.
    """
    target: object = model
    engine = engine_of(model) if isinstance(target, nn.Module) else None
    if engine is None:
        raise UsageError(
            f"clip_grad_norm_ takes the model that shard() returned, and this {type(target).__name__} is not sharded; write "
            "clip_grad_norm_(model, 1.0)."
        )
    return clip_norm_of([engine], model.parameters(), max_norm, norm_type, error_if_nonfinite)


def clip_norm_of(
    engines: Sequence[Engine],
    parameters: Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale the gradients of `parameters`, of the models of `engines`, in place to a joint norm of at most `max_norm`; return
    the norm before. Collective: all ranks must pass the same parameters. `error_if_nonfinite`: raise if it is NaN or inf."""
    wanted = {id(param): param for param in parameters}
    for engine in engines:
        engine.synchronize()
        for notify in engine.observers.gradients_are_clipped:
            notify(float(max_norm), float(norm_type))
    owned = owned_by_id(engines)
    # All sharded parameters, in the engine's order: ranks add the same sets in the same order, whatever they pass.
    every = [*(param.sharded for _, param in owned.values()), *(p for key, p in wanted.items() if key not in owned)]
    parts = norm_parts(every, owned, lambda p: p.grad if id(p) in wanted else None) or [NormPart([])]
    norm = norms([parts], float(norm_type), engines[0].context.device)[0]
    if error_if_nonfinite and not torch.isfinite(norm):
        raise NonFiniteError(
            f"the norm of the gradients is {norm.item()}, so they were not clipped; skip the step, or leave out "
            'error_if_nonfinite to clip anyway; shard(debug="finite") names the module in which NaN or inf first appears.'
        )
    grads = [_torch.local_or_same(param.grad) for param in wanted.values() if param.grad is not None]
    multiply(grads, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
    return norm


def owned_by_id(engines: Iterable[Engine]) -> dict[int, tuple[Engine, Param]]:
    """Return {`id` of the sharded parameter: (engine, `Param`)} for all parameters of `engines`."""
    return {id(param.sharded): (engine, param) for engine in engines for param in engine.params}


def norm_parts(
    params: Iterable[Tensor], owned: Mapping[int, tuple[Engine, Param]], value_of: Callable[[Tensor], Tensor | None]
) -> list[NormPart]:
    """Return this rank's values of `params` for `norms`: one `NormPart` per set of ranks over which values are sharded, without
    values that another rank counts. `owned`: from `owned_by_id`; other parameters count whole. `value_of(p)` returns the value
    of parameter p, such as its gradient, or None to skip p. All ranks must pass the same `params`."""
    parts: dict[tuple[int, ...], NormPart] = {}
    for p in params:
        communicators, counts = _norm_over(*owned[id(p)]) if id(p) in owned else ([], True)
        part = parts.setdefault(tuple(id(each.group) for each in communicators), NormPart(communicators))
        value = value_of(p)
        if counts and value is not None:
            part.tensors.append(_torch.local_of(value) if id(p) in owned else value)
    return list(parts.values())


def scale_gradients(model: nn.Module, factor: Tensor) -> None:
    """Multiply all gradients of a sharded model, also offloaded ones, in place by `factor` (0-d, equal on all ranks), after
    waiting for optimizer steps in progress."""
    engine = engine_of(model)
    assert engine is not None, "a sharded model"
    engine.synchronize()
    multiply([_torch.local_or_same(p.grad) for p in model.parameters() if p.grad is not None], factor)


def _norm_over(engine: Engine, param: Param) -> tuple[Sequence[Communicator], bool]:
    """Return (communicators over which the norm of the gradient of `param` is reduced, True if this rank's rows of that
    gradient count, False if another rank counts the same rows)."""
    context, model = param.context, engine.context
    if context is model or param.around is not None:
        cut = list(context.cut_communicators) if param.cut.dim is not None else []
        return [*cut, *([] if param.around is None else param.around.communicators)], True
    # The parameter has a mesh of its own that does not cover all ranks: the others have other parameters under its name.
    is_first = context.replicate.rank == 0 and (param.cut.dim is not None or context.shard.rank == 0)
    return [axis.gather for axis in (model.shard, model.replicate) if axis.num_ranks > 1], is_first
