"""`Accelerator` of accelerate, whose `prepare` shards models on this engine in place of wrapping them for data parallelism."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import accelerate
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from accordion.checkpoint import load, save
from accordion.checkpoint.collective import Team
from accordion.engine.hooks import engine_of
from accordion.errors import CheckpointError, UsageError
from accordion.integrations.sharding import ShardArguments, step_on_shards
from accordion.integrations.states import Beside, Pair, engines_of, paired, parts, why_incomplete
from accordion.optim import clip_norm_of
from accordion.sharding import Sharding
from accordion.state import full_state_dict, no_sync

PLUGINS = {
    "fsdp_plugin": "FullyShardedDataParallelPlugin, or `accelerate launch --use_fsdp`",
    "deepspeed_plugin": "DeepSpeedPlugin, or `accelerate launch --use_deepspeed`",
    "megatron_lm_plugin": "MegatronLMPlugin",
    "parallelism_config": "ParallelismConfig",
}


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]
    """accelerate's own, with `sharding` besides: a `Sharding`, or a dict of the arguments of `accordion.shard`.

    `prepare` and `prepare_model` shard a model in place and return it; optimizers made before follow, of its old parameters, in
    the same call or a later one, and step on shards. A model that is sharded already is left as it is. All ranks call together
    what is collective: `prepare`, `clip_grad_norm_`, `get_state_dict` (full, on the first rank, and empty on the others),
    `save_model`, `save_state` and `load_state`, which takes any number of ranks.
    Raises `UsageError` beside accelerate's own FSDP, DeepSpeed, Megatron-LM and parallelism.
    """

    _models: list[Any]
    _custom_objects: list[Any]
    _optimizers: list[Any]

    def __init__(self, *args: Any, sharding: Sharding | Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        arguments = ShardArguments.of(sharding)
        super().__init__(*args, **kwargs)
        self._take(arguments)

    @classmethod
    def of(cls, accelerator: accelerate.Accelerator, arguments: ShardArguments) -> Accelerator:
        """`accelerator` itself, which has prepared nothing yet, made one of this class."""
        if type(accelerator) is not accelerate.Accelerator:
            raise UsageError(f"sharding needs accelerate's own Accelerator, not a {type(accelerator).__name__}.")
        accelerator.__class__ = cls
        accelerator._take(arguments)
        return accelerator  # type: ignore[no-any-return]

    def _take(self, arguments: ShardArguments) -> None:
        self.shard_arguments = arguments
        for key, words in PLUGINS.items():
            if getattr(self.state, key, None) is not None:
                raise UsageError(
                    f"Accordion shards the model itself and takes no {key} beside it ({words}); leave that out."
                )
        if self.state.mixed_precision == "fp8":
            raise UsageError(
                "mixed_precision='fp8' is not taken with sharding; use 'bf16', or convert the model before."
            )
        if self.state.dynamo_plugin.backend != accelerate.utils.DynamoBackend.NO:
            raise UsageError(
                "a dynamo backend compiles the model as a whole, through its units; leave it out and compile blocks: "
                "`for block in model.blocks: block.compile()`."
            )
        if self.state.mixed_precision == "fp16" and self.device.type == "cpu":  # where accelerate computes in float32
            self.native_amp = True
            options = {} if self.scaler_handler is None else self.scaler_handler.to_kwargs()
            self.scaler = torch.amp.GradScaler("cpu", **options)

    # -- preparing

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        for model in (one for one in args if isinstance(one, nn.Module)):
            self.shard(model)
        for optimizer in (one for one in args if isinstance(one, Optimizer)):
            step_on_shards(optimizer)
        return super().prepare(*args, device_placement=device_placement)

    def shard(self, model: nn.Module) -> nn.Module:
        """`model`, sharded as this accelerator was told, unless it is already or has no parameters."""
        if engine_of(model) is None and next(model.parameters(), None) is not None:
            self.shard_arguments.applied(model, self.mixed_precision if self.native_amp else "no")
        return model

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        self.shard(model)
        # In evaluation mode nothing is put around it.
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

    # -- steps

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        with no_sync(model) if engine_of(model) is not None else super().no_sync(model):
            yield

    @staticmethod
    @contextmanager
    def trigger_sync_in_backward(model: nn.Module) -> Iterator[None]:
        if engine_of(model) is not None:
            raise UsageError(
                "trigger_sync_in_backward is not taken with sharding: a forward inside no_sync is not reduced by its backward; "
                "leave no_sync before the last forward."
            )
        with accelerate.Accelerator.trigger_sync_in_backward(model):
            yield

    def join_uneven_inputs(self, joinables: Iterable[Any], even_batches: bool | None = None) -> Any:
        joinables = list(joinables)
        if any(isinstance(one, nn.Module) and engine_of(one) is not None for one in joinables):
            raise UsageError(
                "join_uneven_inputs is not taken with sharding: ranks make each step together; keep even_batches, or drop_last."
            )
        return super().join_uneven_inputs(joinables, even_batches)

    def clip_grad_norm_(self, parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2) -> Tensor:
        """As accelerate's; of parameters of one or more sharded models, all or some, the norm over all ranks' rows."""
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        ids = {id(param) for param in given}
        models = [m for m in self._models if engine_of(m) is not None and any(id(p) in ids for p in m.parameters())]
        engines = engines_of(models)
        if not engines:
            return super().clip_grad_norm_(given, max_norm, norm_type)  # type: ignore[no-any-return]
        holders = [
            o for o in self._optimizers if any(id(p) in ids for group in o.param_groups for p in group["params"])
        ]
        self.unscale_gradients(holders)
        return clip_norm_of(engines, given, max_norm, norm_type)

    # -- states

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        if engine_of(model) is None:
            return super().get_state_dict(model, unwrap)  # type: ignore[no-any-return]
        return full_state_dict(model)

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **kwargs: Any) -> Any:
        """As accelerate's; each sharded model and its optimizer are a checkpoint of `accordion.save` in that folder.

        A folder whose save was cut short has not all of them, and `load_state` refuses it. Hooks of
        `register_save_state_pre_hook` get all models and their full weights, on the first rank; of a model whose weights they
        take out, the optimizer alone is saved. Sharded tensors of registered objects are saved too.
        """
        pairs = self._pairs()
        with self._without(pairs, self._save_model_state_pre_hook) as taken:
            folder = super().save_state(output_dir, safe_serialization, **kwargs)
        for name, model, optimizer in parts(pairs):
            save(os.path.join(folder, name), model, optimizer, only=() if model in taken else None)
        return folder

    def load_state(self, input_dir: str | None = None, load_kwargs: Any = None, **kwargs: Any) -> None:
        """As accelerate's, of a folder of any number of ranks. Raises `CheckpointError` where it is not complete."""
        pairs = self._pairs()
        names = [name for name, _, _ in parts(pairs)]
        folder = Team.of(()).agree(lambda: self._complete(input_dir, names))
        with self._without(pairs, self._load_model_state_pre_hook) as taken:
            super().load_state(str(folder), load_kwargs, **kwargs)
        for name, model, optimizer in parts(pairs):
            load(folder / name, model, optimizer, only=() if model in taken else None)

    def _complete(self, input_dir: str | None, names: list[str]) -> Path:
        """The folder from which to load: without one the newest that was named by accelerate and is complete."""
        if input_dir is not None:
            folder = Path(input_dir).expanduser()
            lost = [name for name in names if why_incomplete(folder / name)]
            if lost:
                raise CheckpointError(
                    f"{folder} has no {' and no '.join(lost)}: it was not saved by this Accelerator, or its save was cut short; "
                    "load another one."
                )
            return folder
        if not self.project_configuration.automatic_checkpoint_naming:
            raise UsageError("load_state needs a folder, as automatic_checkpoint_naming is off.")
        found = sorted(
            Path(self.project_dir, "checkpoints").glob("checkpoint_*"), key=lambda p: int(p.name.rpartition("_")[2])
        )
        for folder in reversed(found):
            if not any(why_incomplete(folder / name) for name in names):
                return folder
        raise CheckpointError(f"{self.project_dir}/checkpoints has no complete checkpoint of {', '.join(names)}.")

    def _pairs(self) -> list[Pair]:
        return paired([model for model in self._models if engine_of(model) is not None], self._optimizers)

    @contextmanager
    def _without(self, pairs: list[Pair], hooks: dict[int, Any]) -> Iterator[list[nn.Module]]:
        """Hide `pairs` from accelerate's own save or load inside, and let `hooks` see all models all the same.

        Yields a list that is filled with the models of `pairs` that hooks took out of what is saved or loaded, on all ranks as
        on the first.
        """
        models, optimizers, objects, hidden = self._models, self._optimizers, self._custom_objects, dict(hooks)
        sharded, taken = [model for model, _ in pairs], list[nn.Module]()

        def run_hooks(shown: list[Any], *rest: Any) -> None:
            """Call each hook as accelerate does: with (models, weights, folder) in a save, with (models, folder) in a load."""
            *weights, folder = rest
            listed = weights[0] if weights else shown  # out of which hooks take what they save or load themselves
            own = iter(list(listed))
            every = [
                (self.get_state_dict(model) if weights else model) if model in sharded else next(own)
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

        own_optimizers = [optimizer for _, own in pairs for optimizer in own]
        self._models = [m for m in models if m not in sharded]
        self._optimizers = [o for o in optimizers if all(o is not one for one in own_optimizers)]
        if sharded:
            self._custom_objects = [Beside(one, sharded, self.is_local_main_process) for one in objects]
            if hooks:
                hooks.clear()
                hooks[-1] = run_hooks
        try:
            yield taken
        finally:
            self._models, self._optimizers, self._custom_objects = models, optimizers, objects
            hooks.clear()
            hooks.update(hidden)
