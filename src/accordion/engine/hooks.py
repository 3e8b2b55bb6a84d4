"""What happens around the forward of a unit: leases, what its module sees, and marks by which a backward finds the call."""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial, wraps
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from accordion import _torch
from accordion.engine.autograd import Call, Gather, OutputNode, ReduceNode
from accordion.engine.engine import IN_BACKWARD
from accordion.engine.finite import Moment
from accordion.engine.order import Phase
from accordion.engine.reads import ListeningParameters, read_outside
from accordion.engine.together import UnitCall
from accordion.engine.tree import map_tensors, overlapping, tensors_in, tensors_of, written_into
from accordion.engine.unit import Unit


class Hooks:
    """The forward hooks of one unit; owns its stack of calls and the number reserved for the Stage of its next one."""

    def __init__(self, unit: Unit) -> None:
        self.unit, self.engine = unit, unit.engine
        self._calls: list[tuple[Call, Sequence[Tensor]] | None] = []
        self._reserved: tuple[int, int] | None = None  # in which root call, and the number
        self._watches: dict[int, torch.autograd.graph.saved_tensors_hooks] = {}  # by id of their call
        self._handles: list[RemovableHandle] = []
        self.modules: list[weakref.ref[nn.Module]] = []
        self._guarded: tuple[Any, Any] | None = None  # the root's forward, and the one of its own that it had
        self._last_hooks: dict[int, int] = {}  # by id of the module
        self.engine.hooks_by_unit[unit.index] = self

    def attach(self, module: nn.Module) -> None:
        """Make each call of `module` one of the unit."""
        module.__dict__["_accordion"] = self.unit
        self.modules.append(weakref.ref(module))
        # Wrapped once: FSDP2 wraps at every call, 14.6 us each. Dynamo cannot trace a hook that communicates.
        before, after = _torch.unseen_by_dynamo(self.before), _torch.unseen_by_dynamo(self.after)
        # First, so that the pre-hooks of others (weight_norm's, say) see full parameters.
        self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True, prepend=True))
        self._handles.append(module.register_forward_hook(after, with_kwargs=True, always_call=True))
        self._last_hooks[id(module)] = self._handles[-1].id
        if self.unit.index == 0:
            self._guard(module)
        # What makes a tensor subclass of a gathered tensor looks at its module while it is gathered: not a read from outside.
        elif next(module.children(), None) is None and not self.unit.window.has_around:
            read = partial(self.engine.reads.begin, self, weakref.ref(module))
            module.__dict__["_parameters"] = ListeningParameters(module._parameters, read)
        for name in ("__deepcopy__", "__reduce_ex__"):  # the hooks would fail first, obscurely
            module.__dict__[name] = getattr(self.unit, name)

    def detach(self, modules: Iterable[nn.Module]) -> None:
        """Take back what `attach` did to `modules`, all of the unit's."""
        for handle in self._handles:
            handle.remove()
        for module in modules:
            for name in ("_accordion", "__deepcopy__", "__reduce_ex__"):
                module.__dict__.pop(name, None)
            module.__dict__["_parameters"] = dict(module._parameters)
            if self._guarded is not None and module.__dict__.get("forward") is self._guarded[0]:
                del module.__dict__["forward"]
                if self._guarded[1] is not None:
                    module.__dict__["forward"] = self._guarded[1]
        self.unit.window.detach()

    def _guard(self, module: nn.Module) -> None:
        """Put the errors of the model's forward right that hooks do not see.

        torch runs no hooks after a KeyboardInterrupt, and what was under way would seem so for ever. And who reads the weight
        of a unit from outside of its forward gets a shard, of which torch's error says nothing.
        """
        own, function, reference = module.__dict__.get("forward"), type(module).forward, weakref.ref(module)
        engine = self.engine

        @wraps(function)
        def forward(*args: Any, **kwargs: Any) -> Any:
            try:
                return own(*args, **kwargs) if own is not None else function(reference(), *args, **kwargs)
            except Exception as error:
                if "mixed torch.Tensor and DTensor" in str(error):
                    raise read_outside(error, engine.units) from error
                raise
            except BaseException:
                engine.reset()
                raise

        forward.__signature__ = inspect.signature(own or module.forward)  # type: ignore[attr-defined]
        module.__dict__["forward"] = forward
        self._guarded = (forward, own)

    def attach_method(self, module: nn.Module, name: str) -> None:
        """Let `module.name(...)` enter the unit as a call of the module does."""
        reference, method = weakref.ref(module), getattr(type(module), name)

        @wraps(method)
        def entered(*args: Any, **kwargs: Any) -> Any:
            owner = reference()
            assert owner is not None, "a module's method runs while the module lives"
            return self.enter(owner, partial(method, owner), args, kwargs)

        module.__dict__[name] = entered

    def enter(self, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """`call(*args, **kwargs)` as a call of the unit through `module`."""
        out, changed = None, torch.compiler.disable(self.before)(module, args, kwargs)
        args, kwargs = (args, kwargs) if changed is None else changed
        try:
            out = call(*args, **kwargs)
        finally:
            replaced = torch.compiler.disable(self.after)(module, args, kwargs, out)
        return out if replaced is None else replaced

    # -- staging

    def forget(self) -> None:
        self._calls.clear()
        for watch in self._watches.values():  # an interrupt: torch ran no hooks
            self._end_watch(watch)
        self._watches.clear()
        self._reserved = None

    def _stage(self, call: Call) -> Tensor:
        """The token for a call's Gather. The number that was reserved for its Stage is older than the unit before."""
        if not call.sync:
            return self.engine.anchor
        reserved, self._reserved = self._reserved, None
        same = reserved is not None and reserved[0] == self.engine.root_call
        call.number = reserved[1] if same and reserved is not None else _torch.reserve_number()
        call.staged = ReduceNode.of(call)
        return call.staged.token

    def _stage_ahead(self) -> None:
        following = self.engine.expected(self.unit)
        if following is not None and following.trained.indices:
            hooks, root_call = self.engine.hooks_by_unit[following.index], self.engine.root_call
            if hooks._reserved is None or hooks._reserved[0] != root_call:
                hooks._reserved = root_call, _torch.reserve_number()

    # -- one call

    def before(self, module: nn.Module, args: Any, kwargs: Any, *, reads: bool = False) -> Any:
        engine, unit = self.engine, self.unit
        if engine.suspended:
            self._calls.append(None)
            return None
        hooks: Any = module._forward_hooks
        last = self._last_hooks.get(id(module))
        if last is not None and next(reversed(hooks)) != last:  # hooks set since then see full parameters too
            hooks.move_to_end(last)
        engine.enter()
        differentiable = torch.is_grad_enabled() and self._is_differentiable(args, kwargs)
        if _torch.current_graph_task() == -1:
            engine.enters(unit, differentiable, reads)
        elif not unit.leases:  # else it stands, and is not gathered
            engine.comes_back(unit)
        engine.depth += 1
        try:
            call, fulls = self._open(differentiable, reads)
        except BaseException:
            engine.depth -= 1  # torch runs `after` now, and it finds no call
            raise
        self._calls.append((call, fulls))
        unit.window.show(fulls)
        if call.reached is not None and (unit.begins_at_reads is not False or not call.needs_full_in_backward):
            self._watch_reads(call, fulls)
        if engine.finite is not None:
            engine.finite.look(unit.index, Moment.PARAMETERS, unit.views)
        if unit.inputs is None and not unit.views_inputs:
            if torch.is_grad_enabled():
                call.inputs = [_torch.node_of(t) for t in tensors_of((args, kwargs)) if t.requires_grad]
            return None
        done: dict[int, Tensor] = {}
        nodes: list[Any] = []
        take, keep = partial(self._input, nodes, done, True), partial(self._input, nodes, done, False)
        taken = map_tensors(take, args, keep), {k: map_tensors(take, v, keep) for k, v in kwargs.items()}
        call.inputs = nodes
        return taken

    def _is_differentiable(self, args: Any, kwargs: Any) -> bool:
        """Whether a backward may come through this call: then all ranks must gather for it, whatever they use."""
        unit, units = self.unit, self.engine.units
        if unit.trained.indices or any(units[i].trained.indices for i in unit.reads):
            return True
        return any(t.requires_grad for t in tensors_of((args, kwargs)))

    def _open(self, differentiable: bool, reads: bool) -> tuple[Call, Sequence[Tensor]]:
        """Take the lease of the forward, gather and stage ahead, and give what the module shall see."""
        unit, engine = self.unit, self.engine
        outside = _torch.current_graph_task() == -1
        unit.window.check_registry()
        unit.stays = False
        version = unit.acquire()
        try:
            return self._opened(Call(unit, engine.sync, reads), differentiable, version, outside)
        except BaseException:
            unit.release()
            raise

    def _opened(self, call: Call, differentiable: bool, version: int, outside: bool) -> tuple[Call, Sequence[Tensor]]:
        engine, unit = self.engine, self.unit
        if outside:
            engine.gather_ahead(Phase.FORWARD, unit)
        if not differentiable:
            return call, unit.window.around(unit.views)
        call.version = version
        token = self._stage(call) if unit.trained.indices else engine.anchor
        if outside:
            self._stage_ahead()
        call.reached, *outs = _torch.apply(Gather, call, token)
        fulls = list(unit.views)
        for i, full in zip(call.trained.indices, outs, strict=True):
            fulls[i] = full
        return call, unit.window.around(fulls)

    def _watch_reads(self, call: Call, fulls: Sequence[Tensor]) -> None:
        """Let a backward begin this call where it reads a full parameter, if nothing else has begun it.

        So a loss that left the unit through a global or an object can be walked back alone. Each saved tensor costs two calls of
        Python: so only until the first backward has come by a mark or an output, and after that where one did not. Where others
        have such hooks (checkpointing, offload), theirs are left to work.
        """
        unit, begin, outer = self.unit, partial(call.begin_unseen, fulls), _torch.saving_hook()
        if outer is not None and outer not in self.engine.saving:
            return

        def pack(tensor: Tensor) -> Any:
            if unit.holds(tensor):
                return SavedParam(begin, tensor)
            return tensor if outer is None else outer(tensor)

        watch = self._watches[id(call)] = torch.autograd.graph.saved_tensors_hooks(pack, read)
        self.engine.saving.append(pack)
        watch.__enter__()

    def _end_watch(self, watch: torch.autograd.graph.saved_tensors_hooks) -> None:
        self.engine.saving.pop()
        watch.__exit__()

    def _input(self, nodes: list[Any], done: dict[int, Tensor], may_view: bool, tensor: Tensor) -> Tensor:
        """Cast an input and keep its node: where it is watched, that of a view, whose gradient is what this call contributes.

        In a list or a mapping (`may_view` false) the tensor itself is watched: the module may append to the caller's own.
        """
        if id(tensor) in done:
            return done[id(tensor)]
        given, dtype = tensor, self.unit.inputs
        if dtype is not None and tensor.is_floating_point() and tensor.dtype != dtype:
            tensor = tensor.to(dtype)
        if tensor.requires_grad and torch.is_grad_enabled():
            if may_view and tensor is given and self.unit.views_inputs:
                tensor = tensor.view_as(tensor)
            nodes.append(_torch.node_of(tensor))
        done[id(given)] = tensor
        return tensor

    def after(self, module: nn.Module, args: Any, kwargs: Any, out: Any) -> Any:
        if not self._calls:
            return None
        if (entry := self._calls.pop()) is None:
            return None
        call, fulls = entry
        engine, unit, given = self.engine, self.unit, out
        error = sys.exc_info()[1] if out is None else None  # torch calls this hook while it handles an error too
        inside, failed = _torch.current_graph_task() != -1, None
        try:
            out = engine.reads.end(engine.depth, out)
            if not inside and error is None:
                engine.leaves(unit)
        except BaseException as caught:
            error = failed = caught
        watch_of_reads = self._watches.pop(id(call), None)
        if watch_of_reads is not None:
            self._end_watch(watch_of_reads)
        unit.window.hide(fulls)
        if (refused := unit.lost_write(call.writes, fulls)) is not None:
            unit.release()
            engine.leave(None)
            raise refused
        if inside:
            engine.drop_kept(lambda kept: kept.root == IN_BACKWARD)
        if error is None:
            if engine.finite is not None:
                engine.finite.look(unit.index, Moment.FORWARD, tensors_of(out))
            if torch.is_grad_enabled():
                out = self._watch_outputs(call, fulls, map_tensors(self.own_memory, out), (args, kwargs))
            else:
                out = map_tensors(self.own_memory, out)
        self._end_lease(call, keep=error is None and self._keeps_lease(inside))
        engine.leave(error)
        if failed is not None:
            raise failed
        dtype = unit.outputs
        if dtype is not None:
            out = map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, out)
        return None if out is given else out

    def own_memory(self, tensor: Tensor) -> Tensor:
        """An output that is a view of a full parameter (learned positions, say) would be let go with it."""
        return tensor.clone() if self.unit.holds(tensor) else tensor

    def _watch_outputs(self, call: Call, fulls: Sequence[Tensor], out: Any, inputs: Any) -> Any:
        """See to it that a backward begins this call before it reaches any node of it, whichever way it comes.

        By a mark, a node made now: autograd runs what is ready from the newest node to the oldest, and the outermost call
        makes the marks of all calls below it ready. And by hooks on outputs, and on what was left in attributes, for
        backwards that do not come through the outermost call's outputs or want no gradients of parameters.
        """
        engine, begin = self.engine, partial(call.begin, fulls)
        self._mark(call, begin)
        single = isinstance(out, Tensor)
        tensors = [out] if single else tensors_of(out)
        found = list({id(t): t for t in tensors if t.requires_grad}.values())
        pre_backward_nodes = engine.take_marks()
        replaced: dict[int, Tensor] = {}
        if found and pre_backward_nodes:
            shared = overlapping(found, tensors_of(inputs))
            left = OutputNode.apply(begin, engine.zero, len(found), shared, *found, *pre_backward_nodes)  # type: ignore[no-untyped-call]
            replaced = {id(t): new for t, new in zip(found, left, strict=True)}
            out = map_tensors(lambda t: replaced.get(id(t), t), out)
        others = [t for t in found if id(t) not in replaced]
        hidden = () if single else tensors_in(out, opaque_depth=3)
        for tensor in (*others, *hidden, *self.unit.window.leaked(), *written_into(inputs)):
            if tensor.requires_grad and tensor.grad_fn is not None:
                _torch.on_gradient(tensor, begin)
        return out

    def _mark(self, call: Call, begin: Callable[[Tensor | None], None]) -> None:
        if call.reached is not None and self.engine.collects():
            mark = call.reached.view(())  # a node without a kernel
            _torch.on_gradient(mark, begin)
            self.engine.pre_backward_nodes.append(mark)

    def _end_lease(self, call: Call, *, keep: bool) -> None:
        """A call's forward has ended: its lease waits for the backward, or ends too."""
        if call.reached is not None and keep and call.needs_full_in_backward:
            call.kept = self.engine.keep(self.unit, call.root)
        else:
            self.unit.release()
        call.reached = None

    # -- a call for others, whose output nobody uses

    def open_for_others(self, step: UnitCall) -> tuple[Call, Sequence[Tensor]]:
        with torch.set_grad_enabled(step.differentiable):
            self.engine.depth += 1
            try:
                opened = self._open(step.differentiable, step.reads)
            except BaseException:
                self.engine.depth -= 1
                raise
        if self.engine.finite is not None:  # all ranks look at the same places
            self.engine.finite.look(self.unit.index, Moment.PARAMETERS, self.unit.views)
        return opened

    def close_for_others(self, call: Call, fulls: Sequence[Tensor]) -> None:
        if self.engine.finite is not None:
            self.engine.finite.look(self.unit.index, Moment.FORWARD, ())
        with torch.enable_grad():
            self._mark(call, partial(call.begin, fulls))
        self._end_lease(call, keep=self._keeps_lease(inside=False))
        self.engine.depth -= 1

    def _keeps_lease(self, inside: bool) -> bool:
        """Whether full parameters stay until the backward: what it needs first, or what the strategy says."""
        engine, keep = self.engine, self.unit.unit_policy.keep
        if inside:  # reentrant checkpointing recomputes calls and walks the last one at once; one waits at most
            return self.unit.leases == 1
        if keep is not None:
            return keep
        return engine.context.keep_until_backward or engine.depth == 1 or engine.is_among_last(self.unit)


class SavedParam(NamedTuple):
    """A full parameter that autograd saves, and what must be done before it is read."""

    begin: Callable[[], None]
    tensor: Tensor


def read(saved: Any) -> Tensor:
    if isinstance(saved, SavedParam):
        saved.begin()
        return saved.tensor
    return cast(Tensor, saved)
