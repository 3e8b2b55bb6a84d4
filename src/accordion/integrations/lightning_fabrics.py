"""Fabric of Lightning on sharded models: mixed into the DDP strategy of its package, which is not imported here."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from accordion.checkpoint.collective import Team
from accordion.engine.hooks import engine_of
from accordion.errors import UsageError
from accordion.integrations.lightning_common import ShardedStrategy
from accordion.integrations.pairs import engines_of, paired, parts
from accordion.integrations.sharding import step_on_shards
from accordion.integrations.whole_states import load_whole, placed, state_for_all, whole
from accordion.optim import clip_norm_of
from accordion.state import no_sync, settle


class FabricMixin(ShardedStrategy):
    """Mixed into the DDPStrategy of `lightning.fabric`, it shards modules in place of wrapping them.

    `sharding`, `state_dict_type`: as of the Trainer's strategy. `fabric.setup(model, optimizer)` takes optimizers made before.
    """

    precision: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._backward_sync_control = NoBackwardSync()
        self._modules: WeakSet[nn.Module] = WeakSet()  # that were set up

    def module_to_device(self, module: nn.Module) -> None:
        """Nothing: each rank's rows go to its device when the model is sharded; the whole model may not fit there."""

    def setup_module(self, module: nn.Module) -> nn.Module:
        if engine_of(module) is None and next(module.parameters(), None) is not None:
            self._sharded(module, getattr(self.precision, "precision", "32-true"))
        self._modules.add(module)
        return module

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        step_on_shards(optimizer)
        return optimizer

    @contextmanager
    def module_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        with torch.device("meta") if empty_init else nullcontext(), self.precision.module_init_context():
            yield

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        self.precision.unscale_gradients(optimizer)
        params = self.precision.main_params(optimizer)
        return clip_norm_of(engines_of([module]), params, max_norm, norm_type, error_if_nonfinite)

    # -- checkpoints

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        engine = engine_of(module)
        if engine is not None:
            settle(engine, "takes the state dict")
        return module.state_dict()

    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return state_for_all(optimizer)

    def save_checkpoint(
        self,
        path: str | os.PathLike[str],
        state: dict[str, Any],
        storage_options: Any = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        path = str(self.broadcast(path))
        if self.state_dict_type == "sharded":
            if storage_options is not None or filter is not None:
                raise UsageError(
                    "storage_options and filter are not taken with state_dict_type='sharded'; leave them out."
                )
            rest = {key: one for key, one in state.items() if not isinstance(one, (nn.Module, Optimizer))}
            rest = {key: one.state_dict() if hasattr(one, "state_dict") else one for key, one in rest.items()}
            rest = whole(rest, self.is_global_zero, mark=True)
            self._write_folder(Path(path), self._parts(state), rest)
            return
        states = self._convert_stateful_objects_in_state(state, filter=filter or {})  # type: ignore[attr-defined]
        checkpoint = {
            key: whole(one, self.is_global_zero, mark=not isinstance(state[key], (nn.Module, Optimizer)))
            for key, one in states.items()
        }
        Team.of(()).agree(lambda: self._clear(path))
        write = partial(self.checkpoint_io.save_checkpoint, checkpoint, path, storage_options)
        Team.of(()).agree(lambda: write() if self.is_global_zero else None)

    def load_checkpoint(
        self, path: str | os.PathLike[str], state: Any = None, strict: bool = True, **kwargs: Any
    ) -> dict[str, Any]:
        path = str(self.broadcast(path))
        if Path(path).is_dir():
            if not isinstance(state, dict):
                raise UsageError(f"{path} is a sharded checkpoint; load it with a dict of the objects that were saved.")
            found = placed(self._read_folder(Path(path), self._parts(state), **kwargs), self._modules)
        else:
            read = super().load_checkpoint  # type: ignore[misc]
            found = placed(Team.of(()).agree(lambda: read(path, None, **kwargs)), self._modules)
            if not state:
                return found
        if isinstance(state, (nn.Module, Optimizer)):
            self._fill(state, found, strict)
            return {}
        done = (
            {key for key, one in state.items() if isinstance(one, (nn.Module, Optimizer))}
            if Path(path).is_dir()
            else ()
        )
        lost = [key for key in state if key not in found and key not in done]
        if strict and lost:
            raise KeyError(f"{path} has no {', '.join(map(repr, lost))}; pass strict=False to load the rest.")
        for key, one in list(state.items()):
            if key in found and hasattr(one, "load_state_dict"):
                self._fill(one, found.pop(key), strict)
            elif key in found:
                state[key] = found.pop(key)
        return found

    def _fill(self, one: Any, given: Any, strict: bool) -> None:
        if isinstance(one, nn.Module):
            one.load_state_dict(given, strict=strict)
        elif isinstance(one, Optimizer):
            load_whole(one, given)
        else:
            one.load_state_dict(given)

    def _parts(self, state: Mapping[str, Any]) -> dict[str, list[Any]]:
        models = [one for one in state.values() if isinstance(one, nn.Module)]
        return {"": list(parts(paired(models, [one for one in state.values() if isinstance(one, Optimizer)])))}


class NoBackwardSync:
    """What `fabric.no_backward_sync` asks."""

    def no_backward_sync(self, module: nn.Module, enabled: bool = True) -> AbstractContextManager[None]:
        return no_sync(module) if enabled else nullcontext()
