"""`deepspeed.initialize` and the engine that it returns: a program's loop stays as it is, the work is `shard`'s."""

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
from accordion.compat.deepspeed.reading import Settings, read
from accordion.config import Place
from accordion.engine.communicator import device_type_of_job
from accordion.errors import UsageError
from accordion.files import read_text
from accordion.optim import clip_grad_norm_, wrap_optimizer
from accordion.shard.api import shard
from accordion.state import no_sync

LATEST = "latest"  # the file that names the newest checkpoint of a folder


def init_distributed(dist_backend: str | None = None, **options: Any) -> None:
    """Join the process group unless there is one. `options` are DeepSpeed's; `timeout`, `rank` and `world_size` are used."""
    if dist.is_initialized():
        return
    used = {key: options[key] for key in ("timeout", "rank", "world_size") if options.get(key) not in (None, -1)}
    dist.init_process_group(dist_backend, **used)


def add_config_arguments(parser: ArgumentParser) -> ArgumentParser:
    """`--deepspeed` and `--deepspeed_config FILE`, which `initialize(args=...)` reads."""
    group = parser.add_argument_group("DeepSpeed")
    group.add_argument("--deepspeed", action="store_true", help="accepted: what is initialized is sharded")
    group.add_argument("--deepspeed_config", help="the ds_config.json")
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
    """DeepSpeed's own call: the engine, its optimizer, a loader of `training_data`, and the scheduler.

    `config`: a path, or what stands in one; or `args.deepspeed_config`. `model_parameters`: of the model as it is given here,
    or groups of them; by default all that train. `optimizer`: not stepped yet, or a function of parameters; by default what
    the configuration names. Joins a process group where there is none. Raises `UsageError` for `mpu` and `mesh_param`.
    """
    source = next((c for c in (config, config_params, getattr(args, "deepspeed_config", None)) if c is not None), None)
    if source is None:
        raise UsageError("initialize() was given no configuration; pass config=, a path or a dict.")
    if not isinstance(model, nn.Module):
        raise UsageError(f"initialize() takes a torch.nn.Module as model=, not {type(model).__name__}.")
    if mpu is not None or mesh_param is not None:
        raise UsageError(
            "initialize(mpu=, mesh_param=) is not supported: model parallelism is the caller's; leave it out."
        )
    settings = read(source)
    init_distributed()
    device_type = device_type_of_job()
    groups = list(model_parameters) if model_parameters is not None else None
    shard(model, settings.mesh(device_type), settings.sharding, sync=True)
    made = _optimizer(model, optimizer, groups, settings)
    make: Any = settings.scheduler if lr_scheduler is None else lr_scheduler
    scheduler = make if make is None or isinstance(make, LRScheduler) else make(made)
    engine = DeepSpeedEngine(model, made, scheduler, settings, device_type)
    loader = None
    if training_data is not None:
        size = engine.train_micro_batch_size_per_gpu()
        loader = DataLoader(training_data, size, sampler=DistributedSampler(training_data), collate_fn=collate_fn)
    return engine, made, loader, scheduler


def _optimizer(model: nn.Module, given: Any, groups: list[Any] | None, settings: Settings) -> Optimizer:
    """The optimizer, over the sharded parameters of those that were named before."""
    if isinstance(given, Optimizer):
        if given.state:
            raise UsageError(
                "initialize() was given an optimizer with state; give a new one, or a function that makes it."
            )
        for group in given.param_groups:
            group["params"] = [_now(p) for p in group["params"]]
        return wrap_optimizer(given) if settings.sharding.offload.streams else given
    make = given or settings.optimizer
    if make is None:
        raise UsageError("the configuration names no optimizer and initialize() was given none; give one of both.")
    if groups is None:
        groups = [p for p in model.parameters() if p.requires_grad]
    moved = [{**g, "params": [_now(p) for p in g["params"]]} if isinstance(g, dict) else _now(g) for g in groups]
    made: Optimizer = make(moved)
    return wrap_optimizer(made) if given is None else made


def _now(param: Any) -> nn.Parameter:
    """The sharded parameter that stands for one of the model before."""
    own = param[1] if isinstance(param, tuple) else param  # of named_parameters()
    found: nn.Parameter = vars(own).get("moved_to", own)
    return found


class DeepSpeedEngine(nn.Module):
    """Around a sharded model: owns where in an accumulation the loop stands, the scale of losses, and counts of steps."""

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
        index = torch.accelerator.current_device_index() if device_type != "cpu" else None
        self.device = torch.device(device_type, index) if index is not None else torch.device("cpu")
        self.micro_steps = self.global_steps = self.skipped_steps = 0
        self._norm: Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        adds_up = self.training and self.settings.sharding.strategy.grads is Place.REPLICATE
        with no_sync(self.module) if adds_up and not self.is_gradient_accumulation_boundary() else nullcontext():
            return self.module(*args, **kwargs)

    def backward(self, loss: Tensor) -> Tensor:
        """The backward of one micro-batch, its loss divided by their number; returns the loss as it was."""
        self.scaler.scale(loss / self.sizes.accumulation).backward()
        return loss

    def step(self) -> None:
        """After each backward; the last micro-batch of a step clips, steps the optimizer and the scheduler, clears gradients."""
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
        """Whether the micro-batch under way is the last of its step."""
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
        """The norm of all gradients in the last step, before clipping; None where nothing is clipped or scaled."""
        return None if self._norm is None else float(self._norm)

    @property
    def local_rank(self) -> int:
        return self.device.index or 0

    # -- checkpoints

    def save_checkpoint(
        self, save_dir: str | Path, tag: str | None = None, client_state: Mapping[str, Any] | None = None, **_: Any
    ) -> bool:
        """Write `save_dir/tag`, a checkpoint of this library, which any number of ranks load. Collective."""
        tag = tag or f"global_step{self.global_steps}"
        extra = {
            "client_state": dict(client_state or {}),
            "scheduler": None if self.lr_scheduler is None else self.lr_scheduler.state_dict(),
            "scaler": self.scaler.state_dict(),
            "steps": [self.micro_steps, self.global_steps, self.skipped_steps],
        }
        Path(save_dir).mkdir(parents=True, exist_ok=True)
        checkpoint.save(Path(save_dir, tag), self.module, self.optimizer, extra=extra)
        if dist.get_rank() == 0:
            Path(save_dir, LATEST).write_text(tag, encoding="utf-8")
        dist.barrier()
        return True

    def load_checkpoint(
        self, load_dir: str | Path, tag: str | None = None, **_: Any
    ) -> tuple[str | None, dict[str, Any]]:
        """Go on from `load_dir/tag`, by default the newest; (its path, the client state), or (None, {}) where there is none."""
        newest = Path(load_dir, LATEST)
        if tag is None and not newest.exists():
            return None, {}
        path = Path(load_dir, tag or _tag_in(newest))
        extra: Any = checkpoint.load(path, self.module, self.optimizer)
        if self.lr_scheduler is not None and extra["scheduler"] is not None:
            self.lr_scheduler.load_state_dict(extra["scheduler"])
        self.scaler.load_state_dict(extra["scaler"])
        self.micro_steps, self.global_steps, self.skipped_steps = extra["steps"]
        return str(path), extra["client_state"]


def _tag_in(newest: Path) -> str:
    """The tag that a file names. Raises `UsageError` if it is no regular file, or no text."""
    try:
        return read_text(newest).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{newest} names no checkpoint: {getattr(error, 'strerror', None) or error}; pass load_checkpoint(tag=...)."
        ) from error
