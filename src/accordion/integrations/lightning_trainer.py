"""A Trainer of Lightning on sharded models: mixed into the DDP strategy of its package, which is not imported here."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from accordion.checkpoint import load
from accordion.checkpoint.collective import Team
from accordion.engine.hooks import attached_to
from accordion.engine.tree import map_tensors
from accordion.errors import UsageError
from accordion.integrations.lightning_common import ShardedStrategy
from accordion.integrations.pairs import engines_of, paired, parts
from accordion.integrations.sharding import step_on_shards
from accordion.integrations.whole_states import OF_MODEL, load_whole, placed, state_for_all, whole
from accordion.optim import clip_norm_of
from accordion.shard.api import entry_point
from accordion.state import no_sync, settle

NAMES = "accordion_names"  # in a sharded checkpoint: the model's own name of each tensor that a hook has renamed
STEPS = ("training_step", "validation_step", "test_step", "predict_step")


class TrainerMixin(ShardedStrategy):
    """Mixed into the DDPStrategy of `lightning.pytorch`, it shards the LightningModule in place of wrapping it.

    `sharding`: a `Sharding`, or a dict of the arguments of `accordion.shard`; a hybrid strategy's replicas are nodes.
    `state_dict_type`: "full" writes the file that Lightning writes without sharding, of tensors that are gathered one by one to
    the first rank; "sharded" a folder, of what `accordion.save` writes. Both load on any number of ranks, whatever is said here.

    The module is sharded as a whole, and its steps use full parameters as a forward does. With manual optimisation each module
    in it is sharded by itself, so that steps of optimizers may lie between their calls. What `configure_model` has sharded
    is left as it is. What is on the meta device is read from the folder of its weights, or initialised.
    Raises `UsageError` for options of DistributedDataParallel.
    """

    lightning_module: Any
    model: Any
    precision_plugin: Any
    cluster_environment: Any
    optimizers: Any
    _folder: Path | None = None  # the sharded checkpoint from which the model was filled
    _own_state: Mapping[str, Any] = {}  # the model's tensors as a checkpoint's hooks were given them

    # -- setting up

    def setup(self, trainer: Any) -> None:
        self.accelerator.setup(trainer)
        self._shard_all(trainer)
        if trainer.state.fn == "fit":
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()  # type: ignore[attr-defined]
        plugin = self.precision_plugin
        if _is_lightnings(type(plugin).clip_grad_by_norm):
            vars(plugin)["clip_grad_by_norm"] = self._clip_grad_by_norm

    def _shard_all(self, trainer: Any) -> None:
        """Shard the LightningModule and its averages, unless they are already."""
        fitting, layer_sync = trainer.state.fn == "fit", getattr(self, "_layer_sync", None)
        model = self.lightning_module
        self.roots = _roots(model)
        if not self.roots:
            model = layer_sync.apply(model) if fitting and layer_sync else model
            model = self.precision_plugin.convert_module(model)
            self.roots = self._shard(model)
        self.model = model
        self._averages = list(_averages_of(trainer))
        for average in self._averages:
            if not _roots(average):
                self._shard(average)

    def _shard(self, model: Any) -> list[nn.Module]:
        precision = getattr(self.precision_plugin, "precision", "32-true")
        roots = [model] if model.automatic_optimization else _models_in(model)
        for root in roots:
            self._sharded(root, precision)
        if model.automatic_optimization:
            for name in STEPS:
                if not _is_lightnings(getattr(type(model), name)):
                    entry_point(model, name)
        return roots

    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)  # type: ignore[misc]
        for optimizer in self.optimizers:
            step_on_shards(optimizer)
        self.optimizers = self.optimizers  # Lightning's own around them take their class after them

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Whole models stay off the device: `empty_init` begins on meta."""
        with torch.device("meta") if empty_init else nullcontext(), self.precision_plugin.tensor_init_context():
            yield

    def teardown(self) -> None:
        """As Lightning's; the model stays sharded where it is."""
        vars(self.precision_plugin).pop("clip_grad_by_norm", None)
        for one in (self.cluster_environment, self.precision_plugin, self.accelerator, self.checkpoint_io):
            if one is not None:
                one.teardown()

    # -- steps

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        with ExitStack() as stack:
            for root in self.roots:
                stack.enter_context(no_sync(root))
            yield

    def pre_backward(self, closure_loss: Tensor) -> None: ...
    def post_backward(self, closure_loss: Tensor) -> None: ...

    def _clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        clip_norm_of(engines_of(self.roots), self.precision_plugin.main_params(optimizer), clip_val)

    # -- checkpoints

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Of sharded tensors; `save_checkpoint` gathers them. Called by all ranks together."""
        for engine in engines_of(self.roots):
            settle(engine, "takes the state dict")
        state = self.lightning_module.state_dict()
        self._own_state = dict(state)
        return state  # type: ignore[no-any-return]

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        inner = getattr(optimizer, "optimizer", optimizer)
        return state_for_all(inner) if self.state_dict_type == "full" else {}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        path = str(self.broadcast(filepath))
        if self.state_dict_type == "sharded":
            if storage_options is not None:
                raise UsageError("storage_options are not taken with state_dict_type='sharded'; leave them out.")
            with_states = "optimizer_states" in checkpoint
            averaged = "averaging_state" in checkpoint
            rest = {key: one for key, one in checkpoint.items() if key not in OF_MODEL}
            rest = whole(rest, self.is_global_zero, mark=True)
            if not averaged:
                rest |= whole(self._changes(checkpoint.get("state_dict", {})), self.is_global_zero)
            self._write_folder(Path(path), self._parts(with_states, averaged), rest)
            return
        keep, write = self.is_global_zero, super().save_checkpoint  # type: ignore[misc]
        full = {key: whole(one, keep, mark=key not in OF_MODEL) for key, one in checkpoint.items()}
        Team.of(()).agree(lambda: self._clear(path))
        Team.of(()).agree(lambda: write(full, path, storage_options))

    def load_checkpoint(self, checkpoint_path: str | os.PathLike[str], *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return what a file holds, or the rest of what a folder does, from which the model is filled here.

        Lightning calls this before `setup`, so that callbacks have their states when fitting starts, as without sharding.
        """
        path = str(self.broadcast(checkpoint_path))
        self._shard_all(self.lightning_module.trainer)
        self._folder = Path(path) if Path(path).is_dir() else None
        if self._folder is None:
            read = super().load_checkpoint  # type: ignore[misc]
            restored = Team.of(()).agree(lambda: read(path, *args, **kwargs))
            return placed(restored, self.roots)
        averaged = (self._folder / "average_sharded_0").is_dir()
        restored = placed(
            self._read_folder(self._folder, self._parts(False, averaged and bool(self._averages)), **kwargs), self.roots
        )
        if averaged and self._averages:  # its callback loads both from here, which are in place already
            restored["current_model_state"] = self.lightning_module.state_dict()
        elif averaged:
            for name, model, _ in parts(paired(self.roots, ())):
                load(self._folder / f"average_{name}", model)
        source = self._averages[0] if averaged and self._averages else self.lightning_module
        own = self._own_state = source.state_dict()
        names = restored.pop(NAMES, {name: name for name in own})
        restored["state_dict"] = {**{name: own[old] for name, old in names.items()}, **restored.get("state_dict", {})}
        return {**restored, "optimizer_states": []}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        state, own = checkpoint["state_dict"], self._own_state
        if self._folder is not None:
            if state.keys() == own.keys() and all(state[name] is own[name] for name in own):
                return  # in place already
            # Copies, as a hook may have given a tensor of the model the name of another.
            checkpoint = {**checkpoint, "state_dict": map_tensors(torch.clone, state)}
        super().load_model_state_dict(checkpoint, strict)  # type: ignore[misc]

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if self._folder is not None:
            for name, model, optimizer in parts(paired(self.roots, self.optimizers)):
                load(self._folder / name, model, optimizer, only=())
            return
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            load_whole(optimizer, state)

    def _changes(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return what hooks of the checkpoint made of the model's state dict: other tensors, and other names of its own."""
        old = {id(tensor): name for name, tensor in self._own_state.items()}
        names = {name: old[id(one)] for name, one in state.items() if id(one) in old}
        if names == {name: name for name in self._own_state} and len(names) == len(state):
            return {}
        return {NAMES: names, "state_dict": {name: one for name, one in state.items() if name not in names}}

    def _parts(self, with_states: bool, averaged: bool) -> dict[str, list[Any]]:
        found = {"": list(parts(paired(self.roots, self.optimizers if with_states else ())))}
        if averaged:
            found["average_"] = list(parts(paired(_roots(self._averages[0]), ())))
        return found


def _is_lightnings(method: Any) -> bool:
    return method.__module__.partition(".")[0] in ("lightning", "pytorch_lightning", "lightning_fabric")


def _roots(model: nn.Module) -> list[nn.Module]:
    """The models that are sharded in it, each by its outermost module. Raises `UsageError` for parameters outside of them."""
    roots: dict[int, nn.Module] = {}
    for module in model.modules():
        hooks = attached_to(module)
        if hooks is not None:
            roots.setdefault(id(hooks.engine), module)
    found = list(roots.values())
    inside = {id(param) for root in found for param in root.parameters()}
    left = [name for name, param in model.named_parameters() if id(param) not in inside and param.requires_grad]
    if found and left:
        raise UsageError(
            f"configure_model has sharded a part of {type(model).__name__} and not its parameter {left[0]!r}, whose gradients "
            "nobody would sum; shard what holds it too."
        )
    return found


def _models_in(model: nn.Module) -> list[nn.Module]:
    """Each module in `model` that is called by itself. Raises `UsageError` for parameters that are in none, or in two."""
    own = [name for name, _ in model.named_parameters(recurse=False)]
    if own:
        raise UsageError(
            f"parameter {own[0]!r} lies in {type(model).__name__} itself; with manual optimisation each module in it is sharded "
            "by itself, so put it into one."
        )
    found: list[nn.Module] = []
    for child in model.children():
        is_list = type(child).forward is nn.Module.forward
        found += _models_in(child) if is_list else [child] if next(child.parameters(), None) is not None else []
    holder: dict[int, nn.Module] = {}
    for one in found:
        for name, param in one.named_parameters():
            if holder.setdefault(id(param), one) is not one:
                raise UsageError(
                    f"parameter {name!r} of {type(one).__name__} lies in another module too, and with manual optimisation each "
                    "is sharded by itself; put both into one module, or shard them together in configure_model."
                )
    return found


def _averages_of(trainer: Any) -> Iterator[Any]:
    """The copies of the LightningModule that callbacks average (`WeightAveraging`, `StochasticWeightAveraging`)."""
    for callback in trainer.callbacks:
        average = getattr(callback, "_average_model", None)
        if isinstance(average, AveragedModel):
            yield average.module
        elif isinstance(average, nn.Module):
            yield average
