"""`deepspeed.initialize` and the engine that it returns, for training loops that were written for DeepSpeed."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from accordion import checkpoint
from accordion.checkpoint.collective import Team
from accordion.compat.deepspeed.reading import Settings, read
from accordion.config import Place
from accordion.engine.communicator import device_type_of_job
from accordion.errors import UsageError
from accordion.files import read_text
from accordion.optimizers.wrap import clip_grad_norm_, wrap_optimizer
from accordion.shard.api import shard
from accordion.state import no_sync

LATEST = "latest"  # the file with the tag of the newest checkpoint in a folder


def init_distributed(dist_backend: str | None = None, **options: Any) -> None:
    """Create the process group; do nothing if there is one. `dist_backend`: as in `dist.init_process_group`. Of `options`, only
    `timeout`, `rank` and `world_size` are used, unless they are None or -1."""
    if not dist.is_initialized():
        used = {key: options[key] for key in ("timeout", "rank", "world_size") if options.get(key) not in (None, -1)}
        dist.init_process_group(dist_backend, **used)


def add_config_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add the options `--deepspeed` (without effect) and `--deepspeed_config FILE` to `parser`, and return `parser`.
    `initialize(args=...)` reads FILE if it gets no other configuration."""
    group = parser.add_argument_group("DeepSpeed")
    group.add_argument("--deepspeed", action="store_true", help="accepted without effect: initialize() always shards")
    group.add_argument("--deepspeed_config", help="path of the ds_config.json")
    return parser


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Optimizer | Callable[[Iterable[Any]], Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: LRScheduler | Callable[[Optimizer], LRScheduler] | None = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[..., Any] | None = None,
    config: str | Path | Mapping[str, Any] | None = None,
    mesh_param: Any = None,
    config_params: Any = None,
) -> tuple[DeepSpeedEngine, Optimizer, DataLoader[Any] | None, LRScheduler | None]:
    """Shard `model` in place, create optimizer, scheduler and data loader, and return (engine, optimizer, loader, scheduler).

    Collective. Creates the process group if there is none. All ranks get the first rank's weights. `distributed_port` and
    `dist_init_required` have no effect. Raises `UsageError` without a configuration, a model or an optimizer, for a wrong key
    or value in the configuration, and for an optimizer with state.

    Args:
        config: the path of a ds_config.json, or its content; by default `config_params`, then `args.deepspeed_config`.
        model_parameters: parameters of `model`, (name, parameter) pairs or param groups, as they were before this call; by
            default all parameters that require gradients. Not used if `optimizer` is an optimizer.
        optimizer: an optimizer without state, whose own parameters are replaced by their shards, or a function that is called
            with a list of the sharded `model_parameters`; by default the configuration's.
        lr_scheduler: a scheduler, or a function that is called with the returned optimizer; by default the configuration's, or
            None if it has none.
        training_data: dataset of which the loader gives each rank its micro-batches; without one, the loader is None.
        mpu, mesh_param: refused, because there is no model parallelism.
    """
    source = next((c for c in (config, config_params, getattr(args, "deepspeed_config", None)) if c is not None), None)
    if source is None:
        raise UsageError("initialize() got no configuration; pass config=, a path or a dict.")
    if not isinstance(model, nn.Module):
        raise UsageError(f"initialize() takes a torch.nn.Module as model=, not {type(model).__name__}.")
    if mpu is not None or mesh_param is not None:
        raise UsageError("initialize(mpu=, mesh_param=) is not supported: there is no model parallelism; leave it out.")
    settings = read(source)
    init_distributed()
    device_type = device_type_of_job()
    groups = list(model_parameters) if model_parameters is not None else None
    shard(model, settings.mesh(device_type), settings.sharding, sync=True)
    ready_optimizer = _optimizer(model, optimizer, groups, settings)
    make: Any = settings.scheduler if lr_scheduler is None else lr_scheduler
    scheduler = make if make is None or isinstance(make, LRScheduler) else make(ready_optimizer)
    engine = DeepSpeedEngine(model, ready_optimizer, scheduler, settings, device_type)
    loader = None
    if training_data is not None:
        size = engine.train_micro_batch_size_per_gpu()
        loader = DataLoader(training_data, size, sampler=DistributedSampler(training_data), collate_fn=collate_fn)
    return engine, ready_optimizer, loader, scheduler


def _optimizer(model: nn.Module, choice: Any, groups: list[Any] | None, settings: Settings) -> Optimizer:
    """Return the optimizer for the sharded `model`: `choice` with shards as its parameters; or, if it is a function, its result
    for the sharded `groups`, param groups or parameters (None: all that require gradients); or, if None, that of `settings`,
    wrapped. Others are wrapped if offload streams their state. Raises `UsageError` without an optimizer, or if it has state."""
    if isinstance(choice, Optimizer):
        if choice.state:
            raise UsageError("initialize() got an optimizer with state; pass a new one, or a function that makes it.")
        for group in choice.param_groups:
            group["params"] = [_sharded(p) for p in group["params"]]
        return wrap_optimizer(choice) if settings.sharding.offload.streams else choice
    make = choice or settings.optimizer
    if make is None:
        raise UsageError("the configuration names no optimizer, and initialize() got none; pass one, or name one.")
    if groups is None:
        groups = [p for p in model.parameters() if p.requires_grad]
    moved = [
        {**g, "params": [_sharded(p) for p in g["params"]]} if isinstance(g, dict) else _sharded(g) for g in groups
    ]
    optimizer: Optimizer = make(moved)
    wraps = choice is None or settings.sharding.offload.streams
    return wrap_optimizer(optimizer) if wraps else optimizer


def _sharded(param: Any) -> nn.Parameter:
    """Return the shard that has replaced `param`, a parameter or (name, parameter) pair; the parameter itself if none has."""
    before = param[1] if isinstance(param, tuple) else param
    sharded: nn.Parameter = vars(before).get("moved_to", before)
    return sharded


class DeepSpeedEngine(nn.Module):
    """The model that `initialize` returns, with DeepSpeed's training loop for each micro-batch: `loss = engine(batch)`,
    `engine.backward(loss)`, `engine.step()`. It accumulates gradients, scales losses, steps and counts."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        scheduler: LRScheduler | None,
        settings: Settings,
        device_type: str,
    ) -> None:
        super().__init__()
        self.module, self.optimizer, self.lr_scheduler, self.settings = model, optimizer, scheduler, settings
        self.sizes, self.scaler = settings.batch(dist.get_world_size()), settings.scaler(device_type)
        self.device = torch.device("cpu")
        if device_type != "cpu":
            self.device = torch.device(device_type, torch.accelerator.current_device_index())
        self.micro_steps = self.global_steps = self.skipped_steps = 0
        self._norm: Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        adds_up = self.training and self.settings.sharding.strategy.grads is Place.REPLICATE
        with no_sync(self.module) if adds_up and not self.is_gradient_accumulation_boundary() else nullcontext():
            return self.module(*args, **kwargs)

    def backward(self, loss: Tensor) -> Tensor:
        """Run the backward of `loss`, divided by the accumulation steps, and scaled under fp16. Return `loss` unchanged."""
        self.scaler.scale(loss / self.sizes.accumulation).backward()
        return loss

    def step(self) -> None:
        """Count a micro-batch; call this after each backward. After the last micro-batch of a step, also clip gradients, step
        optimizer and scheduler, and clear gradients. Under fp16, a step with gradients that are not finite is skipped and
        counted in `skipped_steps`, and a dynamic loss scale is lowered; at its minimum, `AccordionError` is raised."""
        boundary = self.is_gradient_accumulation_boundary()
        self.micro_steps += 1
        if not boundary:
            return
        self.scaler.unscale_(self.optimizer)
        scales = self.scaler.is_enabled()
        if self.settings.clip or scales:
            self._norm = clip_grad_norm_(self.module, self.settings.clip or float("inf"))
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.global_steps += 1
        overflowed = scales and self._norm is not None and not bool(self._norm.isfinite())
        self.skipped_steps += overflowed
        if self.lr_scheduler is not None and not overflowed:
            self.lr_scheduler.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return True if the micro-batch that the next call of `step` counts is the last of its optimizer step."""
        return (self.micro_steps + 1) % self.sizes.accumulation == 0

    def gradient_accumulation_steps(self) -> int:
        return self.sizes.accumulation

    def train_micro_batch_size_per_gpu(self) -> int:
        return self.sizes.micro_batch

    def train_batch_size(self) -> int:
        return self.sizes.train_batch

    def get_lr(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups]

    def get_global_grad_norm(self) -> float | None:
        """Return the gradient norm of the last step, before clipping. Return None before the first step, and if neither
        clipping nor fp16 is enabled. Waits for the device."""
        return None if self._norm is None else float(self._norm)

    @property
    def local_rank(self) -> int:
        return self.device.index or 0

    # -- checkpoints

    def save_checkpoint(
        self, save_dir: str | Path, tag: str | None = None, client_state: Mapping[str, Any] | None = None, **_: Any
    ) -> bool:
        """Write the checkpoint `save_dir/tag` in this library's format, and its tag to the file `save_dir/latest`. Returns
        True. Collective. Any number of ranks can load the checkpoint. `tag`: by default "global_step" and the number of steps.
        `client_state`: data that `load_checkpoint` returns. Other arguments of DeepSpeed are ignored."""
        tag = tag or f"global_step{self.global_steps}"
        extra = {
            "client_state": dict(client_state or {}),
            "scheduler": None if self.lr_scheduler is None else self.lr_scheduler.state_dict(),
            "scaler": self.scaler.state_dict(),
            "steps": [self.micro_steps, self.global_steps, self.skipped_steps],
        }
        team = Team.of(self.module.parameters())
        team.agree(lambda: Path(save_dir).mkdir(parents=True, exist_ok=True))
        checkpoint.save(Path(save_dir, tag), self.module, self.optimizer, extra=extra)
        team.agree(lambda: Path(save_dir, LATEST).write_text(tag, encoding="utf-8") if team.leads else None)
        return True

    def load_checkpoint(
        self, load_dir: str | Path, tag: str | None = None, **_: Any
    ) -> tuple[str | None, dict[str, Any]]:
        """Load model, optimizer, scheduler, scaler and step counts from `load_dir/tag`. If `tag` is None, use the tag in the
        file `load_dir/latest`; without that file, load nothing and return (None, {}). Otherwise return (path of the checkpoint,
        the `client_state` that was saved). Collective. Raises `CheckpointError` if the checkpoint cannot be loaded."""
        newest = Path(load_dir, LATEST)
        if tag is None and not newest.exists():
            return None, {}
        path = Path(load_dir, tag or read_text(newest).strip())
        extra: Any = checkpoint.load(path, self.module, self.optimizer)
        if self.lr_scheduler is not None and extra["scheduler"] is not None:
            self.lr_scheduler.load_state_dict(extra["scheduler"])
        self.scaler.load_state_dict(extra["scaler"])
        self.micro_steps, self.global_steps, self.skipped_steps = extra["steps"]
        return str(path), extra["client_state"]
