"""What modules see of a unit's parameters: shards in the registry between calls, full parameters in a call or its backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from accordion import _torch
from accordion.engine.params import Param
from accordion.errors import UsageError


class ModuleParams:
    """Owns the stack of full parameters that are shown in place of shards, one entry a call under way."""

    def __init__(self, params: Sequence[Param]) -> None:
        self._params = params
        self.has_around = any(p.around is not None or p.extension is not None for p in params)
        places = [(ref(), attr, i) for i, p in enumerate(params) for ref, attr in p.places]
        # Attributes of modules, not modules: each step would ask a weak reference for a module, and the module for these, 36
        # times a unit of nine parameters, 30 thousand instructions. A module that is gone has others write into them in vain.
        self._places = [(module.__dict__, attr, i) for module, attr, i in places if module is not None]
        self._shards = [p.sharded for p in params]
        self._storages = _torch.storages_of(self._shards)
        self._in_registry = self._in_dict = False  # where modules have full parameters now
        self._shown: list[tuple[Sequence[Tensor], bool]] = []  # full parameters, and whether the registry has them
        self._rnns = [weakref.ref(module) for module in self.modules() if isinstance(module, nn.RNNBase)]

    def modules(self) -> list[nn.Module]:
        """The modules that hold one of the parameters, each once, as far as they are alive."""
        refs = dict.fromkeys(ref for p in self._params for ref, _ in p.places)
        return [module for module in (ref() for ref in refs) if module is not None]

    def check_registry(self) -> None:
        """Full parameters take the place of what is registered, so somebody who replaced that would not be heard."""
        if self._shown:
            return
        shards = self._shards
        for attributes, attr, i in self._places:
            if attributes["_parameters"].get(attr) is not shards[i]:
                raise UsageError(
                    f"parameter {self._params[i].name!r} was replaced after shard(), by functional_call or by assignment, and "
                    "the sharded model would not use it; write into it under full_params(model, write=True)."
                )

    def check_data(self) -> None:
        """Raise `UsageError` if `p.data = ...` was written for a sharded parameter, whose local tensor does not follow."""
        storages = _torch.storages_of(self._shards)
        if storages == self._storages:
            return
        unlike = [p for p, now, own in zip(self._params, storages, self._storages, strict=True) if now is not own]
        raise UsageError(
            f"the data of parameter {unlike[0].name!r} was assigned after shard() (`p.data = ...`), which does not reach its "
            "shards; write in place, `with torch.no_grad(): p.copy_(...)`, and convert dtypes before shard() or with Precision."
        )

    def around(self, fulls: Sequence[Tensor]) -> Sequence[Tensor]:
        """What modules see of full tensors: the same list where no parameter says otherwise."""
        if not self.has_around:
            return fulls
        seen = [f if p.extension is None else p.extension(f) for f, p in zip(fulls, self._params, strict=True)]
        return [f if p.around is None else p.around(f) for f, p in zip(seen, self._params, strict=True)]

    def show(self, fulls: Sequence[Tensor], *, registered: bool = True) -> None:
        """Put full parameters in the place of shards, for reads of `module.weight`.

        `registered`: for `parameters()` and the like too. Not in a backward: it may raise, and nobody would tidy up.
        """
        self._shown.append((fulls, registered))
        self._install()

    def hide(self, fulls: Sequence[Tensor]) -> None:
        """Take them away again; what an outer call showed comes back."""
        for at in reversed(range(len(self._shown))):  # one entry: a recursive call without gradients shows a list twice
            if self._shown[at][0] is fulls:
                del self._shown[at]
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
        """The model is gone: hold no attributes of its modules."""
        self.hide_all()
        self._places = []

    def detach(self) -> None:
        """Leave the modules with shards for parameters, in registries of torch's own."""
        self.hide_all()
        for module in self.modules():
            module.__dict__["_parameters"] = dict(module._parameters)

    def _install(self) -> None:
        """Let modules show what was shown last, or the shards."""
        fulls, registered = self._shown[-1] if self._shown else (None, False)
        in_dict = fulls is not None and not registered
        # A module that registers its parameter again, as quantised ones do, may also do so while a backward recomputes it.
        left = self._in_registry or (self._in_dict and not in_dict)
        to_registry = fulls if registered else self._shards if left else None
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
        for ref in self._rnns:  # they keep their parameters in a list too
            rnn: Any = ref()
            if rnn is not None:
                now = {**rnn._parameters, **rnn.__dict__}
                rnn.__dict__["_flat_weights"] = [now.get(n) for n in rnn._flat_weights_names]

    def convert(self, module: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
        """What `module.to(...)` and its kin do to the parameters: the full ones while they are shown, nothing to shards.

        torch would swap the sharded parameters for others, out of the graph and out of the engine's sight.
        """
        for attributes, attr, i in self._places:
            if attributes is not module.__dict__:
                continue
            if self._shown:
                where: Any = module._parameters if self._shown[-1][1] else attributes
                where[attr] = function(where[attr])
                continue
            now = _torch.local_of(self._params[i].sharded)
            new = function(now.new_empty(0))
            if (new.dtype, new.device) != (now.dtype, now.device):
                raise UsageError(
                    f"parameter {self._params[i].name!r} is sharded as {now.dtype} on {now.device} and cannot become "
                    f"{new.dtype} on {new.device}; convert before shard(), or choose with Precision and the mesh's device."
                )
