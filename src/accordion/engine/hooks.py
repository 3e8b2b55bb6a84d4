"""The forward hooks of a unit: gather parameters, show them to modules, and make the autograd nodes that start its backward."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from accordion import _torch
from accordion.engine.autograd import AwaitReduce, Gather, OutputNode
from accordion.engine.calls import Call, transform_error
from accordion.engine.engine import IN_BACKWARD, Engine, KeptLease
from accordion.engine.order import FORWARD
from accordion.engine.tree import map_tensors, overlapping, tensors_of
from accordion.engine.unit import ReduceNode, Unit

ATTACHED = "_accordion"  # the attribute of a unit's module that holds its hooks
# By module that has some of a unit's parameters.
_HOOKS_OF = weakref.WeakKeyDictionary[nn.Module, "list[weakref.ref[Hooks]]"]()


class Hooks:
    """The forward hooks of one unit, a module whose parameters are gathered together, and the stack of its running calls. The
    constructor adds the unit to `engine`, in the order of indices; `attach` registers the hooks."""

    def __init__(self, engine: Engine, unit: Unit) -> None:
        self.unit, self.engine = unit, engine
        self._calls: list[tuple[Call, Sequence[Tensor]] | None] = []
        # (number of the root call, autograd sequence number) reserved for the AwaitReduce node of the next call.
        self._reserved: tuple[int, int] | None = None
        self._handles: list[RemovableHandle] = []
        self.modules: list[weakref.ref[nn.Module]] = []
        self._last_hooks: dict[int, int] = {}  # by id of the module
        assert unit.index == len(engine.units), "units come in the order of their indices"
        unit.observers = engine.observers
        engine.units.append(unit)
        engine.order.num_bytes.append(unit.full_bytes)
        engine.hooks.append(self)
        for module in unit.module_params.modules():
            _HOOKS_OF.setdefault(module, []).append(weakref.ref(self))

    def attach(self, module: nn.Module) -> None:
        """Register `before` and `after` as hooks of `module`, and store this object in the module's attribute `ATTACHED`."""
        module.__dict__[ATTACHED] = self
        self.modules.append(weakref.ref(module))
        # Dynamo cannot trace a hook that communicates. Wrapped once: wrapping at each call, as FSDP2 does, takes 14.6 us.
        before, after = _torch.unseen_by_dynamo(self.before), _torch.unseen_by_dynamo(self.after)
        # First, so that pre-hooks of other code (weight_norm's, for example) see full parameters.
        self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True, prepend=True))
        self._handles.append(module.register_forward_hook(after, with_kwargs=True, always_call=True))
        self._last_hooks[id(module)] = self._handles[-1].id

    def attached_modules(self) -> list[nn.Module]:
        return [module for module in (ref() for ref in self.modules) if module is not None]

    def detach(self, modules: Iterable[nn.Module]) -> None:
        """Remove all hooks of this unit, whose modules see shards from then on. `modules`: all modules that have the hooks."""
        for handle in self._handles:
            handle.remove()
        for module in modules:
            module.__dict__.pop(ATTACHED, None)
        self.modules.clear()
        self.unit.module_params.detach()

    def attach_method(self, module: nn.Module, name: str) -> None:
        """Set the attribute `name` of `module` to the method of its class, with a gather of the unit as for the unit's forward.
        Another function that was assigned to the attribute before is lost."""
        reference, method = weakref.ref(module), getattr(type(module), name)

        @wraps(method)
        def entered(*args: Any, **kwargs: Any) -> Any:
            owner = reference()
            assert owner is not None, "a module's method runs while the module lives"
            return self.enter(owner, partial(method, owner), args, kwargs)

        module.__dict__[name] = entered

    def enter(self, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run `call(*args, **kwargs)` between the hooks `before` and `after` of `module`; return its result. `before` may replace
        the arguments, and `after` the result."""
        out, changed = None, torch.compiler.disable(self.before)(module, args, kwargs)
        args, kwargs = (args, kwargs) if changed is None else changed
        try:
            out = call(*args, **kwargs)
        finally:
            replaced = torch.compiler.disable(self.after)(module, args, kwargs, out)
        return out if replaced is None else replaced

    # -- the node that waits for the reduce

    def forget(self) -> None:
        """Forget all running calls, after an interrupt for which torch did not call `after`."""
        self._calls.clear()
        self._reserved = None

    def _edge(self, call: Call) -> Tensor:
        """Return the input of a call's Gather node: the output of the unit's AwaitReduce node (made if needed), or a dummy leaf
        under no_sync or without trained parameters. In the first case also set `call.reduce_node`, and `call.number`, the
        sequence number of AwaitReduce in autograd: the one that `reserve` reserved in this forward, or a new one."""
        engine, trained = self.engine, call.trained
        if not call.sync or not trained.indices:
            return engine.leaf
        reserved, self._reserved = self._reserved, None
        if reserved is not None and reserved[0] == engine.root_call:
            call.number = reserved[1]
        else:
            call.number = _torch.reserve_number()
        stream = engine.context.reduce_stream.compute()
        node: ReduceNode | None = trained.reduce_node
        if node is None or node.stream != stream:  # one node per compute stream
            node = trained.reduce_node = ReduceNode(engine.leaf, stream, {})
            node.edge = _torch.apply(AwaitReduce, weakref.ref(node), engine.leaf, *trained.params)
        call.reduce_node = node
        return node.edge

    def reserve(self, root_call: int) -> None:
        """Reserve an autograd sequence number for the AwaitReduce node of the unit's next call in forward number `root_call`.
        Does nothing if this forward has one already."""
        if self._reserved is None or self._reserved[0] != root_call:
            self._reserved = root_call, _torch.reserve_number()

    # -- one call

    def before(self, module: nn.Module, args: Any, kwargs: Any, *, by_read: bool = False) -> Any:
        """Forward pre-hook: gather the unit, let its modules see full parameters, and begin a call. Returns cast (args,
        kwargs), or None to keep them. Inside `full_params` returns None and gathers nothing. `by_read`: True if a read of the
        layer's weight calls this method, instead of torch. Raises `UsageError` in a transform of torch.func and if the user
        replaced a parameter or its data, `DivergenceError`, and errors of observers."""
        engine, unit = self.engine, self.unit
        if engine.suspended:
            self._calls.append(None)
            return None
        try:
            if _torch.transforms_active():
                raise transform_error()
            for notify in engine.observers.unit_is_called:
                notify()
        except BaseException:
            self._calls.append(None)  # for `after`, which torch runs now and which must not take another thread's call
            raise
        hooks: Any = module._forward_hooks
        last = self._last_hooks.get(id(module))
        if last is not None and next(reversed(hooks)) != last:
            hooks.move_to_end(last)  # so that hooks registered since also see full parameters
        engine.enter()
        # A weight that is read may be combined with an input that needs a gradient, also if the weight is frozen.
        differentiable = torch.is_grad_enabled() and (
            by_read or bool(unit.trained.indices) or self._passes_gradients(args, kwargs)
        )
        if not _torch.is_in_backward():
            for enters in engine.observers.unit_enters:
                enters(unit, differentiable, by_read)
        else:
            unit.see_trained()  # a forward since that of this backward may have trained other parameters
            if not unit.leases:  # with a lease it is not gathered
                for returns in engine.observers.unit_returns:
                    returns(unit, None)
        call, fulls = self._begin(differentiable, by_read)  # if it raises, `after` finds no call
        self._calls.append((call, fulls))
        unit.module_params.show(fulls)
        for watch in engine.observers.unit_is_full:
            watch(call, fulls)
        return self._cast_inputs(call, args, kwargs)

    def _cast_inputs(self, call: Call, args: Any, kwargs: Any) -> Any:
        """Return (args, kwargs) with floating tensors cast to `unit.inputs`, or None to keep them. Sets `call.inputs` to the
        autograd nodes of inputs that require a gradient. If `unit.views_inputs`, each of these that was not cast, outside of
        lists and mappings, is replaced by a view, whose gradient comes from this call alone."""
        unit, dtype = self.unit, self.unit.inputs
        if dtype is None and not unit.views_inputs:
            if torch.is_grad_enabled():
                call.inputs = [_torch.node_of(t) for t in tensors_of((args, kwargs)) if t.requires_grad]
            return None
        results: dict[int, Tensor] = {}  # by id of the input, for inputs that occur twice
        call.inputs = nodes = list[Any]()

        def cast(may_view: bool, tensor: Tensor) -> Tensor:
            if id(tensor) in results:
                return results[id(tensor)]
            original = tensor
            if dtype is not None and tensor.is_floating_point() and tensor.dtype != dtype:
                tensor = tensor.to(dtype)
            if tensor.requires_grad and torch.is_grad_enabled():
                if may_view and tensor is original and unit.views_inputs:
                    tensor = tensor.view_as(tensor)
                nodes.append(_torch.node_of(tensor))
            results[id(original)] = tensor
            return tensor

        take, keep = partial(cast, True), partial(cast, False)  # no views in lists and mappings, which are the caller's
        return map_tensors(take, args, keep), {k: map_tensors(take, v, keep) for k, v in kwargs.items()}

    def _passes_gradients(self, args: Any, kwargs: Any) -> bool:
        """Return True if a backward may pass through a call of this unit although its own parameters are frozen: an input
        requires a gradient, or the module reads trained parameters of other units."""
        # All ranks must then gather for it, also those that do not use the unit's output.
        units = self.engine.units
        if any(units[i].trained.indices for i in self.unit.reads):
            return True
        return any(t.requires_grad for t in tensors_of((args, kwargs)))

    def _begin(self, differentiable: bool, by_read: bool, is_dummy: bool = False) -> tuple[Call, Sequence[Tensor]]:
        """Gather the unit and begin a call, which the caller ends with `_end_forward`; outside of a backward also begin to
        gather the units expected next. Returns (call, full parameters that modules should see). If `differentiable`, those that
        are trained are outputs of the call's Gather node in autograd's graph."""
        unit, engine = self.unit, self.engine
        unit.module_params.check_registry()
        unit.keep_until_stale = False
        version = engine.acquire(unit)
        engine.depth += 1
        try:
            call = Call(engine, unit, by_read, is_dummy)
            outside = call.root != IN_BACKWARD
            if outside:
                engine.gather_ahead(FORWARD, unit)
            if not differentiable:
                return call, unit.module_params.around(unit.views)
            call.version = version
            edge = self._edge(call)
            following = engine.order.after(FORWARD, unit.index) if outside else None
            if following is not None and engine.units[following].trained.indices:
                engine.hooks[following].reserve(engine.root_call)
            call.reached, *outs = _torch.apply(Gather, call, edge)
            fulls = outs
            if len(outs) < len(unit.views):
                fulls = list(unit.views)
                for i, full in zip(call.trained.indices, outs, strict=True):
                    fulls[i] = full
            return call, unit.module_params.around(fulls)
        except BaseException:
            unit.release()
            engine.depth -= 1
            raise

    def after(self, module: nn.Module, args: Any, kwargs: Any, out: Any) -> Any:
        """Forward hook, also after an error (`out` None): end the call of `before`; return a replacement for `out`, or None.

        Returns None at once if `before` has begun no call. Raises `UsageError` if the forward wrote into full parameters,
        because such a write does not reach the shards. An error of an observer is raised after the call has ended.
        """
        if not self._calls or (entry := self._calls.pop()) is None:
            return None
        call, fulls = entry
        engine, unit, result = self.engine, self.unit, out
        error = sys.exc_info()[1] if out is None else None  # torch calls this hook while it handles an error
        failed: BaseException | None = None
        for watch in engine.observers.unit_leaves:
            try:
                out = watch(call, out, error)
            except BaseException as caught:  # the other observers must end the call too
                error = failed = caught
        unit.module_params.hide(fulls)
        if (refused := unit.lost_write(call.writes, fulls)) is not None:
            unit.release()
            engine.leave(refused)
            raise refused
        if call.root == IN_BACKWARD:
            engine.drop_kept(lambda lease: lease.root == IN_BACKWARD)
        if error is None:
            try:
                out = map_tensors(self.own_memory, out)
                if torch.is_grad_enabled():
                    out = self._watch_outputs(call, fulls, out, (args, kwargs))
            except BaseException as caught:  # raised after the call has ended
                error = failed = caught
        self._end_forward(call, failed=error is not None)
        engine.leave(error)
        if failed is not None:
            raise failed
        dtype = unit.outputs
        if dtype is not None:
            out = map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, out)
        return None if out is result else out

    def own_memory(self, tensor: Tensor) -> Tensor:
        """Return `tensor`, an output of the unit, or a copy if it shares memory with a full parameter (learned positions),
        which will be freed."""
        return tensor.clone() if self.unit.holds(tensor) else tensor

    def _watch_outputs(self, call: Call, fulls: Sequence[Tensor], out: Any, inputs: Any) -> Any:
        """Return `out` with autograd nodes or hooks that begin the call's backward when the gradient of `out` is computed.
        `inputs`: (args, kwargs) of the call. Also notifies observers."""
        # A pre-backward node serves backwards through the model's outputs: autograd runs the newest ready node first, and the
        # outermost call makes these nodes ready. Hooks on outputs serve backwards of other tensors, or without gradients of
        # parameters. `safety/hidden_losses.py` serves losses that are not in the outputs.
        engine, begin = self.engine, partial(call.begin, fulls)
        self._make_pre_backward_node(call, begin)
        tensors = [out] if isinstance(out, Tensor) else tensors_of(out)
        watched = list({id(t): t for t in tensors if t.requires_grad}.values())
        to_reach: list[Tensor] = []
        if engine.depth == 1 and engine.nodes_of == _torch.current_graph_task():
            to_reach, engine.pre_backward_nodes = engine.pre_backward_nodes, []
        replaced: dict[int, Tensor] = {}
        if watched and to_reach:
            shared = overlapping(watched, tensors_of(inputs))
            outputs = OutputNode.apply(begin, engine.zero, len(watched), shared, *watched, *to_reach)  # type: ignore[no-untyped-call]
            replaced = {id(t): new for t, new in zip(watched, outputs, strict=True)}
            out = map_tensors(lambda t: replaced.get(id(t), t), out)
        for tensor in watched:
            if id(tensor) not in replaced and tensor.grad_fn is not None:
                _torch.on_gradient(tensor, begin)
        for notify in engine.observers.outputs_are_ready:
            notify(call, fulls, out, inputs)
        return out

    def _make_pre_backward_node(self, call: Call, begin: Callable[[Tensor | None], None]) -> None:
        if call.reached is not None and self.engine.nodes_of == _torch.current_graph_task():
            # Without a kernel. Not `view`, whose backward reshapes the gradient: 15 thousand instructions per unit and step.
            node = call.reached.squeeze()
            _torch.on_gradient(node, begin)
            self.engine.pre_backward_nodes.append(node)

    def _end_forward(self, call: Call, *, failed: bool = False) -> None:
        """Release the lease of the forward, or keep it for the backward, as the unit's policy says. If its `keep` is None, keep
        the lease if the strategy says so, or if the backward begins with this unit. In a recomputation, keep it only if it is
        the unit's single lease. Never keep it after an error (`failed`), or if the backward does not use it."""
        engine, unit, keep = self.engine, self.unit, self.unit.unit_policy.keep
        if failed or call.reached is None or not call.needs_full_in_backward:
            keep = False
        elif call.root == IN_BACKWARD:
            # Reentrant checkpointing recomputes calls and runs the backward of the last at once: at most one lease waits.
            keep = unit.leases == 1
        elif keep is None:
            keep = engine.context.keep_until_backward or engine.depth == 1 or engine.is_among_last(unit)
        call.reached = None
        if keep:
            call.kept_lease = KeptLease(unit, call.root)
            engine.kept_leases.append(call.kept_lease)
        else:
            unit.release()

    # -- dummy calls: a unit that this rank skipped is gathered, because other ranks call it

    def begin_dummy(self, differentiable: bool, by_read: bool) -> tuple[Call, Sequence[Tensor]]:
        """Join the gather of the unit, which other ranks call and this rank skips; return (call, full parameters) for
        `end_dummy`. `differentiable`: a backward may follow. `by_read`: on other ranks, a read of a weight began the call."""
        with torch.set_grad_enabled(differentiable):
            call, fulls = self._begin(differentiable, by_read, is_dummy=True)
        for watch in self.engine.observers.unit_is_full:
            watch(call, fulls)
        return call, fulls

    def end_dummy(self, call: Call, fulls: Sequence[Tensor]) -> None:
        """End a dummy call. `call`, `fulls`: as `begin_dummy` returned them. If the call was differentiable, this rank joins
        the unit's collectives in the backward too, with zeros as its gradients."""
        for watch in self.engine.observers.unit_leaves:
            watch(call, (), None)
        with torch.enable_grad():
            self._make_pre_backward_node(call, partial(call.begin, fulls))
        self._end_forward(call)
        self.engine.depth -= 1


def attached_to(module: nn.Module) -> Hooks | None:
    """Return the hooks that are attached to `module`; None if `module` is no unit."""
    return module.__dict__.get(ATTACHED)


def hooks_of(module: nn.Module) -> list[Hooks]:
    """Return the hooks of each unit that owns a parameter of `module` itself; a tied weight may belong to another unit. Hooks
    that were detached are left out."""
    return [hooks for hooks in (ref() for ref in _HOOKS_OF.get(module, ())) if hooks is not None and hooks.modules]


def engine_of(model: nn.Module) -> Engine | None:
    """Return the engine of the first sharded module in `model`; None if nothing in it is sharded."""
    return next((hooks.engine for hooks in map(attached_to, model.modules()) if hooks is not None), None)
