"""`Accelerator` of accelerate, whose `prepare` shards models on this engine instead of wrapping them in DDP."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from accordion.errors import CheckpointError, UsageError, not_installed

try:
    import accelerate
except ModuleNotFoundError as error:
    raise not_installed(__name__, [str(error.name)], "integrations") from None

from accordion.checkpoint import load, save
from accordion.checkpoint.collective import Team
from accordion.engine.hooks import engine_of
from accordion.integrations.sharding import ShardArguments, step_on_shards
from accordion.integrations.states import Pair, SavedFull, engines_of, paired, parts, why_incomplete
from accordion.optimizers.wrap import clip_norm_of
from accordion.sharding import Sharding
from accordion.state import full_state_dict, no_sync

PLUGINS = {
    "fsdp_plugin": "FullyShardedDataParallelPlugin, or `accelerate launch --use_fsdp`",
    "deepspeed_plugin": "DeepSpeedPlugin, or `accelerate launch --use_deepspeed`",
    "megatron_lm_plugin": "MegatronLMPlugin",
    "parallelism_config": "ParallelismConfig",
}


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]
    """accelerate's `Accelerator` with one more argument, `sharding`: a `Sharding`, or a dict of arguments of `accordion.shard`.

    `prepare` and `prepare_model` return the model, and shard it in place unless it is sharded already. An optimizer that was
    created from its old parameters steps on the shards once it has passed through `prepare`, in the same call or a later one.
    These methods are collective: `prepare`, `clip_grad_norm_`, `get_state_dict` (full on the first rank, empty on the others),
    `save_model`, `save_state`, and `load_state`, which may run on another number of ranks than the save. Raises `UsageError` if
    accelerate's own FSDP, DeepSpeed, Megatron-LM, parallelism, fp8 or a dynamo backend is configured.
    """

    sequences: DeviceMesh | None = None
    """mesh of ("dp_shard", "cp"), accelerate's names, if the ranks of "cp" share each sequence; set it before `prepare`"""
    _by_group = False  # `gather` returns the values of one rank of each sequence group
    _models: list[Any]
    _custom_objects: list[Any]
    _optimizers: list[Any]

    def __init__(self, *args: Any, sharding: Sharding | Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        arguments = ShardArguments.of(sharding)
        super().__init__(*args, **kwargs)
        self._take(arguments)

    @classmethod
    def of(cls, accelerator: accelerate.Accelerator, arguments: ShardArguments) -> Accelerator:
        """Change the class of `accelerator` to this one, in place, and return it. Call it before `accelerator.prepare`. Raises
        `UsageError` if its class is not accelerate's own, or if its configuration is one that the constructor refuses."""
        if type(accelerator) is not accelerate.Accelerator:
            raise UsageError(f"sharding needs an Accelerator of accelerate, not a {type(accelerator).__name__}.")
        accelerator.__class__ = cls
        accelerator._take(arguments)
        return accelerator  # type: ignore[no-any-return]

    def _take(self, arguments: ShardArguments) -> None:
        self.shard_arguments = arguments
        for key, words in PLUGINS.items():
            if getattr(self.state, key, None) is not None:
                raise UsageError(
                    f"Accordion shards the model itself, so {key} ({words}) cannot be used with it; leave it out."
                )
        if self.state.mixed_precision == "fp8":
            raise UsageError(
                "mixed_precision='fp8' is not supported with sharding; use 'bf16', or convert the model before."
            )
        if self.state.dynamo_plugin.backend != accelerate.utils.DynamoBackend.NO:
            raise UsageError(
                "a dynamo backend would compile the model across its units. Leave it out and compile the blocks: "
                "`for block in model.blocks: block.compile()`."
            )
        if self.state.mixed_precision == "fp16" and self.device.type == "cpu":  # accelerate would compute in float32
            self.native_amp = True
            options = {} if self.scaler_handler is None else self.scaler_handler.to_kwargs()
            self.scaler = torch.amp.GradScaler("cpu", **options)

    # -- preparing

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        for model in (one for one in args if isinstance(one, nn.Module)):
            self.shard(model)
        return super().prepare(*args, device_placement=device_placement)

    def shard(self, model: nn.Module) -> nn.Module:
        """Shard `model` in place and return it. Does nothing if it is sharded already, or has no parameters. Collective."""
        if engine_of(model) is None and next(model.parameters(), None) is not None:
            self.shard_arguments.apply(model, self.mixed_precision if self.native_amp else "no")
        return model

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        self.shard(model)
        # With evaluation_mode=True accelerate does not wrap the model.
        return super().prepare_model(model, device_placement=False, evaluation_mode=True)

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> Any:
        step_on_shards(optimizer)
        return super().prepare_optimizer(optimizer, device_placement=False)

    def unwrap_model(self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> Any:
        if engine_of(model) is None:
            return super().unwrap_model(model, keep_fp32_wrapper, keep_torch_compile)
        if not keep_fp32_wrapper and "_original_forward" in vars(model):
            model.forward = vars(model).pop("_original_forward")
        return model

    # -- ranks that share each sequence

    def _prepare_device_mesh(self) -> Any:
        return super()._prepare_device_mesh() if self.sequences is None else self.sequences

    def prepare_data_loader(self, *args: Any, **kwargs: Any) -> Any:
        """Prepare a loader as accelerate does. Ranks that share each sequence (`sequences`) get equal batches; if there are such
        ranks, a loader whose first rank reads the batches of all ranks raises `UsageError`."""
        loader = super().prepare_data_loader(*args, **kwargs)
        if self.sequences is not None and isinstance(loader, accelerate.data_loader.DataLoaderDispatcher):
            raise UsageError(
                "the first rank would give each rank a batch of its own, also those that share each sequence; pass "
                "accelerator_config={'dispatch_batches': False}, or a dataset with a length."
            )
        return loader

    def gather(self, tensor: Any) -> Any:
        whole = super().gather(tensor)
        if not self._by_group or self.sequences is None:
            return whole
        size = self.sequences["cp"].size()
        return tree_map(lambda t: t.unflatten(0, (self.num_processes, -1))[::size].flatten(0, 1), whole)

    def gather_for_metrics(self, *args: Any, **kwargs: Any) -> Any:
        """Gather as accelerate does. If ranks share each sequence, gather from one rank per group: each sample counts once."""
        self._by_group = True
        try:
            return super().gather_for_metrics(*args, **kwargs)
        finally:
            self._by_group = False

    # -- steps

    def no_sync(self, model: nn.Module) -> Any:
        return no_sync(model) if engine_of(model) is not None else super().no_sync(model)

    @staticmethod
    def trigger_sync_in_backward(model: nn.Module) -> Any:
        if engine_of(model) is not None:
            raise UsageError(
                "trigger_sync_in_backward is not supported with sharding: gradients of a forward inside no_sync are not reduced "
                "by its backward. Leave no_sync before the last forward."
            )
        return accelerate.Accelerator.trigger_sync_in_backward(model)

    def clip_grad_norm_(self, parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2) -> Tensor:
        """Unscale and clip the gradients of `parameters` in place, as accelerate does, and return their norm before clipping. For
        sharded models this is a collective, and the norm is that of the full gradients, over all ranks."""
        params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        ids = {id(param) for param in params}
        models = [m for m in self._models if engine_of(m) is not None and any(id(p) in ids for p in m.parameters())]
        engines = engines_of(models)
        if not engines:
            return super().clip_grad_norm_(params, max_norm, norm_type)  # type: ignore[no-any-return]
        holders = [
            o for o in self._optimizers if any(id(p) in ids for group in o.param_groups for p in group["params"])
        ]
        self.unscale_gradients(holders)
        return clip_norm_of(engines, params, max_norm, norm_type)

    # -- states

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        if engine_of(model) is None:
            return super().get_state_dict(model, unwrap)  # type: ignore[no-any-return]
        return full_state_dict(model)

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **kwargs: Any) -> Any:
        """Save as accelerate does, and return the folder. In it, `accordion.save` writes each sharded model with its optimizer.

        Collective. `load_state` refuses a folder whose save was interrupted. Hooks of `register_save_state_pre_hook` get all
        models, and on the first rank their full weights. If a hook removes a model's weights there, only that model's optimizer
        is saved. Sharded tensors in registered objects are saved as full tensors.
        """
        pairs = self._pairs()
        with self._without(pairs, self._save_model_state_pre_hook) as taken:
            folder = super().save_state(output_dir, safe_serialization, **kwargs)
        for name, model, optimizer in parts(pairs):
            save(os.path.join(folder, name), model, optimizer, only=() if model in taken else None)
        return folder

    def load_state(self, input_dir: str | None = None, load_kwargs: Any = None, **kwargs: Any) -> None:
        """Load as accelerate does, from a folder that any number of ranks saved. Collective. `input_dir`: None for the newest
        complete folder. Raises `CheckpointError` on all ranks if the folder is incomplete."""
        pairs = self._pairs()
        names = [name for name, _, _ in parts(pairs)]
        folder = Team.of(()).agree(lambda: self._complete(input_dir, names))
        with self._without(pairs, self._load_model_state_pre_hook) as taken:
            super().load_state(str(folder), load_kwargs, **kwargs)
        for name, model, optimizer in parts(pairs):
            load(folder / name, model, optimizer, only=() if model in taken else None)

    def _complete(self, input_dir: str | None, names: list[str]) -> Path:
        """Return the folder to load: `input_dir`; if that is None, the newest of accelerate's folders `checkpoint_N` that has a
        complete checkpoint of `accordion.save` for each of `names`. Raises `CheckpointError` if no such folder exists, or if
        `input_dir` lacks one of the checkpoints. Raises `UsageError` for None if automatic_checkpoint_naming is off."""
        if input_dir is not None:
            folder = Path(input_dir).expanduser()
            lost = [name for name in names if why_incomplete(folder / name)]
            if lost:
                raise CheckpointError(
                    f"{folder} has no {' and no '.join(lost)}: it was not saved by this Accelerator, or its save was "
                    "interrupted. Load another folder."
                )
            return folder
        if not self.project_configuration.automatic_checkpoint_naming:
            raise UsageError("load_state needs a folder, because automatic_checkpoint_naming is off.")
        folders = [p for p in Path(self.project_dir, "checkpoints").glob("checkpoint_*") if p.name[11:].isdigit()]
        for folder in sorted(folders, key=lambda p: int(p.name[11:]), reverse=True):
            if not any(why_incomplete(folder / name) for name in names):
                return folder
        raise CheckpointError(f"{self.project_dir}/checkpoints has no complete checkpoint of {', '.join(names)}.")

    def _pairs(self) -> list[Pair]:
        return paired([model for model in self._models if engine_of(model) is not None], self._optimizers)

    @contextmanager
    def _without(self, pairs: list[Pair], hooks: dict[int, Any]) -> Iterator[list[nn.Module]]:
        """Context manager in which accelerate's save or load skips `pairs`, has full tensors in registered objects, and calls
        `hooks` with all models nevertheless. Yields a list that the hooks fill, on all ranks, with the models of `pairs` that a
        hook on the first rank removes from its list: the caller must not save or load them, because the hook does."""
        models, optimizers, objects, hidden = self._models, self._optimizers, self._custom_objects, dict(hooks)
        sharded, taken = [model for model, _ in pairs], list[nn.Module]()

        def run_hooks(shown: list[Any], *rest: Any) -> None:
            """Call each hook with all models: (models, weights, folder) in a save, (models, folder) in a load. Collective.
            `shown`: accelerate's models, not in `pairs`. What a hook removes from its list is removed from accelerate's too."""
            *weights, folder = rest
            listed = weights[0] if weights else shown  # hooks remove from it what they save or load themselves
            listed_items = iter(list(listed))
            every = [
                (self.get_state_dict(model) if weights else model) if model in sharded else next(listed_items)
                for model in models
            ]
            left = list(every)
            for hook in hidden.values():
                hook(*([list(models)] if weights else []), left, folder)
            is_left = [any(one is other for other in left) for one in every]
            listed[:] = [
                one for one, m, stays in zip(every, models, is_left, strict=True) if stays and m not in sharded
            ]
            is_left = json.loads(Team.of(()).shared(json.dumps(is_left))[0])
            taken.extend(m for m, stays in zip(models, is_left, strict=True) if not stays and m in sharded)

        own_optimizers = [optimizer for _, steppers in pairs for optimizer in steppers]
        self._models = [m for m in models if m not in sharded]
        self._optimizers = [o for o in optimizers if all(o is not one for one in own_optimizers)]
        if sharded:
            self._custom_objects = [SavedFull(one, sharded, self.is_local_main_process) for one in objects]
            if hooks:
                hooks.clear()
                hooks[-1] = run_hooks
        try:
            yield taken
        finally:
            self._models, self._optimizers, self._custom_objects = models, optimizers, objects
            hooks.clear()
            hooks.update(hidden)
