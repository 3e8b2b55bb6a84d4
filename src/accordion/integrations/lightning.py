"""Strategies for the `Trainer` and the `Fabric` of Lightning that shard modules instead of wrapping them in DDP."""

from __future__ import annotations

import inspect
import os
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from accordion.errors import CheckpointError, UsageError, not_installed

try:
    import lightning.fabric.strategies
    import lightning.pytorch.strategies
except ModuleNotFoundError as error:
    raise not_installed(__name__, [str(error.name)], "integrations") from None

from accordion.checkpoint import load, save
from accordion.checkpoint.collective import Team
from accordion.engine.hooks import attached_to, engine_of
from accordion.integrations.sharding import ShardArguments, step_on_shards
from accordion.integrations.states import (
    Pair,
    engines_of,
    load_whole,
    paired,
    parts,
    placed,
    state_for_all,
    whole,
    why_incomplete,
)
from accordion.optimizers.wrap import clip_norm_of
from accordion.shard.api import entry_point
from accordion.sharding import Sharding
from accordion.state import no_sync, settle
from accordion.weights.initialise import initialise
from accordion.weights.pretrained import source_of

MIXED = {"bf16-mixed": "bf16", "16-mixed": "fp16"}  # Lightning's names -> those of `ShardArguments.apply`
META = "meta.pt"  # the rest of a checkpoint, without models and optimizers; written last, it marks a complete folder
KINDS = ("full", "sharded")
NOT_WRAPPED = ("ddp_comm_state", "ddp_comm_hook", "ddp_comm_wrapper", "model_averaging_period")
STEPS = ("training_step", "validation_step", "test_step", "predict_step")
OF_MODEL = ("state_dict", "current_model_state", "optimizer_states")  # keys with states of models and optimizers


class ShardedStrategy:
    """Mixin to put before Lightning's `DDPStrategy` in the bases of a class: shards modules, writes and reads checkpoints. For
    `sharding` and `state_dict_type` see `AccordionStrategy`. `DDPStrategy` sets the attributes declared here."""

    accelerator: Any
    checkpoint_io: Any
    root_device: torch.device
    num_nodes: int
    is_global_zero: bool
    broadcast: Callable[[Any], Any]

    def __init__(
        self,
        *args: Any,
        sharding: Sharding | Mapping[str, Any] | None = None,
        state_dict_type: str = "full",
        **kwargs: Any,
    ) -> None:
        self.shard_arguments = ShardArguments.of(sharding)
        if state_dict_type not in KINDS:
            raise UsageError(f"state_dict_type is {state_dict_type!r}; valid: {', '.join(map(repr, KINDS))}.")
        self.state_dict_type = state_dict_type
        known = inspect.signature(super().__init__).parameters
        for name, value in kwargs.items():
            if name not in known or name in NOT_WRAPPED:
                raise UsageError(
                    f"{name}={value!r} is not supported: nothing is wrapped in DistributedDataParallel. Pass arguments of "
                    "`accordion.shard` as sharding=dict(...)."
                )
        super().__init__(*args, **kwargs)

    def _shard_one(self, module: nn.Module, precision: object) -> None:
        """Shard `module` in place. A module on the meta device then loads its weights from the folder that it remembers, or is
        initialised if it remembers none. Collective. If `shard_arguments` have no mesh, stores a mesh of all ranks in them; for a
        hybrid strategy, each node has one replica. `precision`: Lightning's name, such as "bf16-mixed"."""
        on_meta = any(param.is_meta for param in module.parameters()) and source_of(module) is None
        if self.shard_arguments.mesh is None:
            ranks, hybrid = dist.get_world_size(), self.shard_arguments.sharding.strategy.hybrid
            shape = (self.num_nodes, ranks // self.num_nodes) if hybrid else (ranks,)
            names = ("replicate", "shard") if hybrid else None
            mesh = init_device_mesh(self.root_device.type, shape, mesh_dim_names=names)
            self.shard_arguments = replace(self.shard_arguments, mesh=mesh)
        self.shard_arguments.apply(module, MIXED.get(str(precision), "no"))
        if on_meta:
            _initialise(module)

    def _write_folder(self, folder: Path, pairs: list[Pair], rest: Any) -> None:
        """Write the models and optimizers in `pairs` to `folder`, then `rest`, all other content, to the file `META` in it. The
        folder is complete once `META` is written. Replaces a file or an older checkpoint of that name. Collective."""
        team = Team.of(())

        def begin() -> None:
            if folder.is_file():
                folder.unlink()
            folder.mkdir(parents=True, exist_ok=True)
            (folder / META).unlink(missing_ok=True)

        team.agree(lambda: begin() if self.is_global_zero else None)
        for name, model, optimizer in parts(pairs):
            save(folder / name, model, optimizer)
        team.agree(lambda: self.checkpoint_io.save_checkpoint(rest, folder / META) if self.is_global_zero else None)

    def _read_folder(self, folder: Path, pairs: list[Pair], **kwargs: Any) -> dict[str, Any]:
        """Load the models and optimizers in `pairs` from `folder`, and return the content of the file `META`: all other content.
        Collective. Raises `CheckpointError` on all ranks if the folder is incomplete."""

        def rest() -> dict[str, Any]:
            if not (folder / META).is_file():
                raise CheckpointError(
                    f"{folder} has no {META}: it is not a checkpoint of this strategy, or its save was interrupted."
                )
            lost = [f"{name}: {why}" for name, _, _ in parts(pairs) if (why := why_incomplete(folder / name))]
            if lost:
                raise CheckpointError(f"{folder} cannot be loaded: {'; '.join(lost)}.")
            return self.checkpoint_io.load_checkpoint(folder / META, **kwargs)  # type: ignore[no-any-return]

        others = Team.of(()).agree(rest)
        for name, model, optimizer in parts(pairs):
            load(folder / name, model, optimizer)
        return others

    def _write_file(self, path: str, content: Any, storage_options: Any) -> None:
        """Write `content`, a full checkpoint, as the file `path` on the first rank. If `path` is the folder of a sharded
        checkpoint, remove the folder first. Collective."""

        def write() -> None:
            if self.is_global_zero:
                if (Path(path) / META).is_file():
                    shutil.rmtree(path)
                self.checkpoint_io.save_checkpoint(content, path, storage_options)

        Team.of(()).agree(write)


class AccordionStrategy(ShardedStrategy, lightning.pytorch.strategies.DDPStrategy):  # type: ignore[misc]
    """Strategy for Lightning's `Trainer` that shards the LightningModule instead of wrapping it in DDP.

    The module is sharded as a whole. Its `training_step` and other steps gather parameters as `forward` does. With manual
    optimisation each submodule is sharded separately, so optimizers may step between their calls. Modules that `configure_model`
    has sharded are not changed. Modules on the meta device are loaded from the folder of their weights, or initialised.
    `sharding`: a `Sharding`, or a dict of arguments of `accordion.shard`. With a hybrid strategy each node has one replica.
    `state_dict_type`: "full" gathers tensors one by one to the first rank and writes one file, as Lightning does; "sharded"
    writes a folder, as `accordion.save` does. Both load with either setting, on any number of ranks.
    Raises `UsageError` for options of DistributedDataParallel, and if "sharded" would lose averaged weights or changes of hooks.
    """

    lightning_module: Any
    model: Any
    precision_plugin: Any
    cluster_environment: Any
    optimizers: Any
    _folder: Path | None = None  # the sharded checkpoint from which the model was filled
    _own_state: Mapping[str, Any] = {}  # the model's state dict before hooks of a checkpoint

    # -- setting up

    def setup(self, trainer: Any) -> None:
        self.accelerator.setup(trainer)
        self._shard_all(trainer)
        if trainer.state.fn == "fit":
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        plugin = self.precision_plugin
        if _is_lightnings(type(plugin).clip_grad_by_norm):
            vars(plugin)["clip_grad_by_norm"] = self._clip_grad_by_norm

    def _shard_all(self, trainer: Any) -> None:
        """Shard the LightningModule, and its copies that callbacks average, unless they are sharded already. Store the sharded
        modules of the LightningModule in `roots`, and the LightningModule in `model`. Collective. Raises `UsageError` if a
        callback averages weights and `state_dict_type` is "sharded"."""
        fitting, layer_sync = trainer.state.fn == "fit", getattr(self, "_layer_sync", None)
        model = self.lightning_module
        self.roots = _roots(model)
        if not self.roots:
            model = layer_sync.apply(model) if fitting and layer_sync else model
            model = self.precision_plugin.convert_module(model)
            self.roots = self._shard(model)
        self.model = model
        # Copies of the LightningModule that callbacks average (`WeightAveraging`, `StochasticWeightAveraging`).
        copies = [getattr(callback, "_average_model", None) for callback in trainer.callbacks]
        if self.state_dict_type == "sharded" and any(isinstance(average, AveragedModel) for average in copies):
            raise UsageError(
                "callbacks that average weights need state_dict_type='full', or use accordion.EMA instead of the callback."
            )
        copies = [average.module if isinstance(average, AveragedModel) else average for average in copies]
        for average in copies:
            if isinstance(average, nn.Module) and not _roots(average):
                self._shard(average)

    def _shard(self, model: Any) -> list[nn.Module]:
        precision = getattr(self.precision_plugin, "precision", "32-true")
        roots = [model] if model.automatic_optimization else _models_in(model)
        for root in roots:
            self._shard_one(root, precision)
        if model.automatic_optimization:
            for name in STEPS:
                if not _is_lightnings(getattr(type(model), name)):
                    entry_point(model, name)
        return roots

    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            step_on_shards(optimizer)
        self.optimizers = self.optimizers  # the setter wraps them again, by their class after `step_on_shards`

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Context manager in which models are created on the host, or with `empty_init` on the meta device."""
        with torch.device("meta") if empty_init else nullcontext(), self.precision_plugin.tensor_init_context():
            yield

    def teardown(self) -> None:
        # Unlike Lightning's method this leaves the model where it is, sharded.
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
        """Wait for optimizer steps, and return the LightningModule's state dict with sharded tensors. With `state_dict_type`
        "full", `save_checkpoint` gathers them later. Collective."""
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
                raise UsageError("storage_options are not supported with state_dict_type='sharded'; leave them out.")
            state, own = checkpoint["state_dict"], self._own_state
            if state.keys() != own.keys() or any(state[name] is not own[name] for name in own):
                raise UsageError(
                    "a hook has changed the state_dict of the checkpoint, which state_dict_type='sharded' does not save; pass "
                    "'full'."
                )
            rest = {key: one for key, one in checkpoint.items() if key not in OF_MODEL}
            pairs = paired(self.roots, self.optimizers if "optimizer_states" in checkpoint else ())
            self._write_folder(Path(path), pairs, whole(rest, self.is_global_zero, mark=True))
            return
        keep = self.is_global_zero
        full = {key: whole(one, keep, mark=key not in OF_MODEL) for key, one in checkpoint.items()}
        self._write_file(path, full, storage_options)

    def load_checkpoint(self, checkpoint_path: str | os.PathLike[str], *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Shard the model, then read the checkpoint `checkpoint_path` and return its content. Collective.

        If the checkpoint is a file, the content is returned and nothing is loaded. If it is a folder, the model is loaded from
        it. Then "state_dict" has the tensors of the loaded model, which Lightning copies to themselves, and "optimizer_states"
        is empty, because `load_optimizer_state_dict` reads the folder. Raises `CheckpointError` if the folder is incomplete.
        """
        path = str(self.broadcast(checkpoint_path))
        self._shard_all(self.lightning_module.trainer)
        self._folder = Path(path) if Path(path).is_dir() else None
        if self._folder is None:
            read = super().load_checkpoint
            restored = Team.of(()).agree(lambda: read(path, *args, **kwargs))
            return placed(restored, self.roots)
        restored = placed(self._read_folder(self._folder, paired(self.roots, ()), **kwargs), self.roots)
        return {**restored, "state_dict": self.lightning_module.state_dict(), "optimizer_states": []}

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if self._folder is not None:
            for name, model, optimizer in parts(paired(self.roots, self.optimizers)):
                load(self._folder / name, model, optimizer, only=())
            return
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            load_whole(optimizer, state)


class FabricStrategy(ShardedStrategy, lightning.fabric.strategies.DDPStrategy):  # type: ignore[misc]
    """Strategy for Lightning's `Fabric` that shards modules instead of wrapping them in DDP. `sharding`: a `Sharding`, or a dict
    of arguments of `accordion.shard`. `state_dict_type`: "full" saves one file with full tensors, "sharded" saves a folder.
    Optimizers in `fabric.setup(model, optimizer)` may be created before the model is sharded."""

    precision: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._backward_sync_control = self  # Fabric calls its `no_backward_sync`
        self._modules: WeakSet[nn.Module] = WeakSet()  # modules that `setup_module` has seen

    def module_to_device(self, module: nn.Module) -> None:
        """Do nothing: the whole model may not fit the device, and sharding moves each rank's rows there."""

    def setup_module(self, module: nn.Module) -> nn.Module:
        if engine_of(module) is None and next(module.parameters(), None) is not None:
            self._shard_one(module, getattr(self.precision, "precision", "32-true"))
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
                    "storage_options and filter are not supported with state_dict_type='sharded'; leave them out."
                )
            rest = {key: one for key, one in state.items() if not isinstance(one, (nn.Module, Optimizer))}
            rest = {key: one.state_dict() if hasattr(one, "state_dict") else one for key, one in rest.items()}
            rest = whole(rest, self.is_global_zero, mark=True)
            self._write_folder(Path(path), self._pairs(state), rest)
            return
        states = self._convert_stateful_objects_in_state(state, filter=filter or {})
        checkpoint = {
            key: whole(one, self.is_global_zero, mark=not isinstance(state[key], (nn.Module, Optimizer)))
            for key, one in states.items()
        }
        self._write_file(path, checkpoint, storage_options)

    def load_checkpoint(
        self, path: str | os.PathLike[str], state: Any = None, strict: bool = True, **kwargs: Any
    ) -> dict[str, Any]:
        path = str(self.broadcast(path))
        if Path(path).is_dir():
            if not isinstance(state, dict):
                raise UsageError(f"{path} is a sharded checkpoint; load it with a dict of the saved objects.")
            saved = placed(self._read_folder(Path(path), self._pairs(state), **kwargs), self._modules)
        else:
            read = super().load_checkpoint
            saved = placed(Team.of(()).agree(lambda: read(path, None, **kwargs)), self._modules)
            if not state:
                return saved
        if isinstance(state, (nn.Module, Optimizer)):
            self._fill(state, saved, strict)
            return {}
        in_place = (nn.Module, Optimizer) if Path(path).is_dir() else ()
        lost = [key for key, one in state.items() if key not in saved and not isinstance(one, in_place)]
        if strict and lost:
            raise KeyError(f"{path} has no {', '.join(map(repr, lost))}; pass strict=False to load the rest.")
        for key, one in list(state.items()):
            if key in saved and hasattr(one, "load_state_dict"):
                self._fill(one, saved.pop(key), strict)
            elif key in saved:
                state[key] = saved.pop(key)
        return saved

    def _fill(self, one: Any, content: Any, strict: bool) -> None:
        if isinstance(one, Optimizer):
            load_whole(one, content)
        else:
            one.load_state_dict(content, **({"strict": strict} if isinstance(one, nn.Module) else {}))

    def _pairs(self, state: Mapping[str, Any]) -> list[Pair]:
        models = [one for one in state.values() if isinstance(one, nn.Module)]
        return paired(models, [one for one in state.values() if isinstance(one, Optimizer)])

    def no_backward_sync(self, module: nn.Module, enabled: bool = True) -> AbstractContextManager[None]:
        return no_sync(module) if enabled else nullcontext()


def _initialise(module: nn.Module) -> None:
    """Initialise the sharded `module` with the values that it would get on one device. Collective. If the CPU random generators
    of the ranks differ, all ranks start from the first rank's initial seed, and get their own generator state back afterwards."""
    seen = Team.of(()).shared(str(zlib.crc32(bytes(torch.get_rng_state().tolist()))))
    if len(set(seen)) == 1:
        initialise(module)
        return
    seed = int(Team.of(()).shared(str(torch.initial_seed()))[0])
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        initialise(module)


def _is_lightnings(method: Callable[..., Any]) -> bool:
    return method.__module__.partition(".")[0] == "lightning"


def _roots(model: nn.Module) -> list[nn.Module]:
    """Return the outermost sharded modules in `model`, [] if nothing is sharded. Raises `UsageError` if some are sharded, but a
    parameter of `model` that requires a gradient is in none of them."""
    roots: dict[int, nn.Module] = {}
    for module in model.modules():
        if (hooks := attached_to(module)) is not None:
            roots.setdefault(id(hooks.engine), module)
    inside = {id(param) for root in roots.values() for param in root.parameters()}
    left = [name for name, param in model.named_parameters() if id(param) not in inside and param.requires_grad]
    if roots and left:
        raise UsageError(
            f"configure_model has sharded a part of {type(model).__name__}, but not its parameter {left[0]!r}, so its gradients "
            "would not be reduced. Shard the module that contains it too."
        )
    return list(roots.values())


def _models_in(model: nn.Module) -> list[nn.Module]:
    """Return the submodules to shard separately: the children of `model` that have parameters. A child without a forward, such as
    a ModuleList, is replaced by its own children. Raises `UsageError` unless each parameter is in exactly one of them."""
    direct = [name for name, _ in model.named_parameters(recurse=False)]
    if direct:
        raise UsageError(
            f"parameter {direct[0]!r} belongs to {type(model).__name__} itself. With manual optimisation each submodule is "
            "sharded separately, so move the parameter into one."
        )
    modules: list[nn.Module] = []
    for child in model.children():
        is_list = type(child).forward is nn.Module.forward
        modules += _models_in(child) if is_list else [child] if next(child.parameters(), None) is not None else []
    holder: dict[int, nn.Module] = {}
    for one in modules:
        for name, param in one.named_parameters():
            if holder.setdefault(id(param), one) is not one:
                raise UsageError(
                    f"parameter {name!r} of {type(one).__name__} belongs to another module too, but with manual optimisation "
                    "each is sharded separately. Put both into one module, or shard them together in configure_model."
                )
    return modules
