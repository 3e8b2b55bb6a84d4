"""Swap the parameters that modules of a unit see: full ones during a call and its backward, shards at other times."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from accordion import _torch
from accordion.engine.params import Param
from accordion.errors import UsageError


class ModuleParams:
    """Sets the parameters that a unit's modules see: those of the last `show` that no `hide` has undone, or shards."""

    def __init__(self, params: Sequence[Param]) -> None:
        self._params = params
        self.has_around = any(p.around is not None or p.extension is not None for p in params)
        places = [(ref(), attr, i) for i, p in enumerate(params) for ref, attr in p.places]
        # `__dict__`s in place of weak references to modules, which would cost 30 thousand instructions per step in a unit
        # of nine parameters. The dict of a deleted module is written without effect.
        self._places = [(module.__dict__, attr, i) for module, attr, i in places if module is not None]
        self.shards = [p.sharded for p in params]
        self._storages = _torch.storages_of(self.shards)
        self._in_registry = self._in_dict = False  # where the full parameters are: `_parameters` or `__dict__`
        self._shown: list[tuple[Sequence[Tensor], bool]] = []  # (full parameters, True if in the registry)
        self._rnns = [weakref.ref(module) for module in self.modules() if isinstance(module, nn.RNNBase)]

    def modules(self) -> list[nn.Module]:
        """Return the modules that read these parameters, each once, without deleted modules."""
        refs = dict.fromkeys(ref for p in self._params for ref, _ in p.places)
        return [module for module in (ref() for ref in refs) if module is not None]

    def check_registry(self) -> None:
        """Raise `UsageError` if a module's parameter was replaced since `shard`. Does nothing while full ones are shown."""
        if self._shown:
            return
        shards = self.shards
        for attributes, attr, i in self._places:
            if attributes["_parameters"].get(attr) is not shards[i]:
                raise UsageError(
                    f"parameter {self._params[i].name!r} was replaced after shard(), by functional_call or by assignment, and "
                    "the sharded model would not use it; write into it under full_params(model, write=True)."
                )

    def check_data(self) -> None:
        """Raise `UsageError` if `p.data = ...` was assigned to a sharded parameter, because this does not change its shard."""
        storages = _torch.storages_of(self.shards)
        if storages == self._storages:
            return
        unlike = [p for p, new, old in zip(self._params, storages, self._storages, strict=True) if new is not old]
        raise UsageError(
            f"the data of parameter {unlike[0].name!r} was assigned after shard() (`p.data = ...`), which does not reach its "
            "shards; write in place, `with torch.no_grad(): p.copy_(...)`, and convert dtypes before shard() or with Precision."
        )

    def around(self, fulls: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return `fulls` in the types that the parameters had before `shard`: tensor subclasses, DTensors or plain tensors."""
        if not self.has_around:
            return fulls
        seen = [f if p.extension is None else p.extension(f) for f, p in zip(fulls, self._params, strict=True)]
        return [f if p.around is None else p.around(f) for f, p in zip(seen, self._params, strict=True)]

    def show(self, fulls: Sequence[Tensor], *, registered: bool = True) -> None:
        """Make `module.weight` return its full tensor instead of the shard, until `hide` gets the same object `fulls`, a list
        of one tensor per parameter of the unit. If `registered`, `module.parameters()` has the full tensor too."""
        # A backward passes False, because no hook would put the shards back into the registry if it raised.
        self._shown.append((fulls, registered))
        self._install()

    def hide(self, fulls: Sequence[Tensor]) -> None:
        """Undo the last `show` of the object `fulls`. Modules then see the tensors of the latest other `show`, or shards."""
        for i in reversed(range(len(self._shown))):  # remove one entry: a recursive call may show the same list twice
            if self._shown[i][0] is fulls:
                del self._shown[i]
                break
        self._install()

    @property
    def is_shown(self) -> bool:
        return bool(self._shown)

    def hide_all(self) -> None:
        if self._shown:
            self._shown.clear()
            self._install()

    def forget(self) -> None:
        """Hide full parameters and drop all references to modules, because the model is deleted."""
        self.hide_all()
        self._places = []

    def detach(self) -> None:
        """Give modules the shards as parameters, and a new plain dict as `_parameters`, because the unit is no longer used."""
        self.hide_all()
        for module in self.modules():
            module.__dict__["_parameters"] = dict(module._parameters)

    def _install(self) -> None:
        """Write the full parameters that were shown last, or the shards, into the dicts (and lists, of RNNs) of modules."""
        fulls, registered = self._shown[-1] if self._shown else (None, False)
        in_dict = fulls is not None and not registered
        # A module may register its parameter again, as quantized ones do, also while a backward recomputes it.
        left = self._in_registry or (self._in_dict and not in_dict)
        to_registry = fulls if registered else self.shards if left else None
        if to_registry is not None:
            for attributes, attr, i in self._places:
                attributes["_parameters"][attr] = to_registry[i]
        if in_dict and fulls is not None:
            for attributes, attr, i in self._places:
                attributes[attr] = fulls[i]
        elif self._in_dict:
            for attributes, attr, _ in self._places:
                attributes.pop(attr, None)
        self._in_registry, self._in_dict = registered, in_dict
        for ref in self._rnns:  # RNNs also keep their parameters in a list
            rnn: Any = ref()
            if rnn is not None:
                tensors = {**rnn._parameters, **rnn.__dict__}
                rnn.__dict__["_flat_weights"] = [tensors.get(n) for n in rnn._flat_weights_names]

    def convert(self, module: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
        """Apply the conversion `function` of `module.to(...)` and similar methods to the module's full parameters, if shown.
        Otherwise convert nothing, and raise `UsageError` if the conversion would change dtype or device of a shard: torch would
        replace the sharded parameters by others that neither the graph nor the engine knows."""
        for attributes, attr, i in self._places:
            if attributes is not module.__dict__:
                continue
            if self._shown:
                target: Any = module._parameters if self._shown[-1][1] else attributes
                target[attr] = function(target[attr])
                continue
            local = _torch.local_of(self._params[i].sharded)
            new = function(local.new_empty(0))
            if (new.dtype, new.device) != (local.dtype, local.device):
                raise UsageError(
                    f"parameter {self._params[i].name!r} is sharded as {local.dtype} on {local.device} and cannot become "
                    f"{new.dtype} on {new.device}; convert before shard(), or choose with Precision and the mesh's device."
                )
