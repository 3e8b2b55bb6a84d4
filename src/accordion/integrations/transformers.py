"""`Trainer` of transformers on this engine, a mixin for trainers derived from it, and models on the meta device."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from accordion.errors import CheckpointError, UsageError, not_installed

try:
    import transformers
    from transformers.trainer import TRAINER_STATE_NAME
except ModuleNotFoundError as error:
    raise not_installed(__name__, [str(error.name)], "integrations") from None

from accordion.checkpoint import load, save
from accordion.checkpoint.collective import Team
from accordion.integrations.accelerate import Accelerator
from accordion.integrations.sharding import ShardArguments
from accordion.integrations.states import why_incomplete
from accordion.losses.chunks import head_returns_loss
from accordion.sequence.parallel import sequence_parallel, split_sequence
from accordion.sharding import Sharding
from accordion.state import Only
from accordion.weights.export import is_peft, load_exported, state_on_disk
from accordion.weights.pretrained import local_folder, remember_source

SHARDED = "sharded"  # name of our checkpoint in a checkpoint folder of the Trainer
CHUNKED = ("chunked", "head_rows")  # values of `loss` that are ours

REFUSED = {
    "fsdp": "Accordion shards the model itself; leave --fsdp out",
    "deepspeed": "Accordion shards the model itself; leave --deepspeed out (accordion.compat.deepspeed reads its file)",
    "parallelism_config": "Accordion shards over all data-parallel ranks; leave parallelism_config out",
    "bf16_full_eval": "it casts the model, but shards keep their dtype; bf16=True also evaluates in bf16",
    "fp16_full_eval": "it casts the model, but shards keep their dtype; fp16=True also evaluates in fp16",
    "torch_compile": "it compiles the model across its units; compile blocks instead: `for block in ...: block.compile()`",
}


class ShardedTrainer:
    """Mixin for a Trainer that shards its model instead of wrapping it: `class SFT(ShardedTrainer, trl.SFTTrainer)`.

    The model is sharded when training or evaluation begins; TrainingArguments keep their meaning. A checkpoint folder has the
    files that `from_pretrained` loads, and next to them the folder `sharded` with parameters, optimizer and scheduler, which
    loads on any number of ranks. Only complete folders are resumed. Raises `UsageError` for --fsdp, --deepspeed,
    parallelism_config, bf16_full_eval, fp16_full_eval, torch_compile and `hyperparameter_search`.

    `sharding`: a `Sharding`, or a dict of arguments of `accordion.shard`. `loss`: "library" for the loss of the model or of the
    trainer. "chunked" and "head_rows" compute the loss of a causal language model with `accordion.linear_cross_entropy`, which
    needs no logits; "head_rows" does not gather the whole head either. Evaluation with `compute_metrics` needs logits, and always
    uses the library's loss.

    `sequence`: number of ranks, neighbours, that share each sequence (docs/long-context.md). They get the same batches, and a
    step has `per_device_train_batch_size` sequences for each group of them. If above 1, the constructor is collective. Raises
    `UsageError` for what needs whole sequences on each rank: `compute_metrics`, `predict`, label smoothing, a loss of one's own.
    Class attributes of these three names are the defaults.
    """

    sharding: Sharding | Mapping[str, Any] | None = None
    loss: Literal["library", "chunked", "head_rows"] = "library"
    sequence: int = 1
    # Attributes of the Trainer.
    args: Any
    model: Any
    optimizer: Any
    lr_scheduler: Any
    accelerator: Any
    state: Any
    is_in_train: bool
    _needs_logits = True  # of `compute_loss` with `return_outputs`
    model_accepts_loss_kwargs: bool
    compute_loss_func: Any
    compute_metrics: Any
    model_init: Any

    def __init__(
        self,
        *args: Any,
        sharding: Sharding | Mapping[str, Any] | None = None,
        loss: Literal["library", "chunked", "head_rows"] | None = None,
        sequence: int | None = None,
        **kwargs: Any,
    ) -> None:
        self._shard_arguments = ShardArguments.of(sharding if sharding is not None else type(self).sharding)
        self.loss = loss or type(self).loss
        if self.loss not in ("library", *CHUNKED):
            raise UsageError(f"loss={self.loss!r} is unknown; pass 'library', 'chunked' or 'head_rows'.")
        self.sequence = type(self).sequence if sequence is None else sequence
        super().__init__(*args, **kwargs)
        if self.sequence != 1:
            self._share_sequences()
        if self.loss in CHUNKED and (
            self.compute_loss_func is not None or self.args.__dict__.get("loss_type") == "dft"
        ):
            raise UsageError(
                f"loss={self.loss!r} replaces the trainer's loss, and another one was asked for, by compute_loss_func or "
                "loss_type='dft'; pass one of them."
            )

    def create_accelerator_and_postprocess(self) -> None:
        for key, why in REFUSED.items():
            if getattr(self.args, key, None):
                raise UsageError(
                    f"{key}={getattr(self.args, key)!r} of TrainingArguments is not supported with sharding: {why}."
                )
        if self.args.n_gpu > 1:
            raise UsageError(
                f"this process has {self.args.n_gpu} GPUs; start one process for each GPU, with torchrun for example."
            )
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        Accelerator.of(self.accelerator, self._shard_arguments)

    def _share_sequences(self) -> None:
        """Let groups of `self.sequence` neighbouring ranks share each sequence: prepare the model, the accelerator and the
        gathering of metrics for that. Collective. Raises `UsageError` if the number of ranks or an option forbids it."""
        size, world = self.sequence, self.args.world_size
        if not isinstance(size, int) or size < 1 or world % size:
            raise UsageError(f"sequence={size!r} does not divide the {world} ranks; pass a divisor of {world}.")
        inherited: Any = super().compute_loss  # type: ignore[misc]
        whole = {
            "compute_metrics": self.compute_metrics,
            "compute_loss_func": self.compute_loss_func,
            "label_smoothing_factor": self.args.label_smoothing_factor,
            "model_init": self.model_init,
            f"the loss of {type(self).__name__}": inherited.__func__ is not transformers.Trainer.compute_loss,
        }
        if (name := next((name for name, value in whole.items() if value), None)) is not None:
            raise UsageError(
                f"{name} needs whole sequences on each rank, and sequence={size} splits them; leave one out."
            )
        # With accelerate's names, its loaders give the ranks of "cp" equal batches.
        mesh = init_device_mesh(self.args.device.type, (world // size, size), mesh_dim_names=("dp_shard", "cp"))
        sequence_parallel(self.model, mesh["cp"])
        self.accelerator.sequences = mesh
        self.gather_function = self.accelerator.gather_for_metrics  # the Trainer bound it before the class changed

    def get_cp_size(self) -> int:
        return self.sequence  # by which the Trainer divides numbers of samples and tokens that it counts over all ranks

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Do nothing: the whole model may not fit the device, and sharding moves each rank's rows there."""

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        self.accelerator.shard(self.model)
        return super().create_optimizer(*args, **kwargs)  # type: ignore[misc]

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise UsageError(
            "hyperparameter_search is not supported with sharding: trials begin on one rank alone. Start a job for each trial."
        )

    # -- the loss

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the loss, or (loss, outputs) if `return_outputs`. Calls the library's method if `self.loss` is "library", if
        there are no labels, or if `return_outputs`, except in an evaluation of the loss alone. Otherwise computes the loss
        without logits; `outputs` is then {"loss": loss}. In this case raises `UsageError` if the model's logits are not the
        output of its head alone, or if it has a loss of routers."""
        labels, divisor, shift = inputs.get("labels"), num_items_in_batch, True
        if self.sequence > 1:
            inputs = split_sequence(inputs, self.accelerator.sequences["cp"])
            labels, shift = inputs.get("shift_labels"), False
            divisor = inputs.get("num_items_in_batch") if divisor is None else divisor
        if self.loss == "library" or labels is None or (return_outputs and self._needs_logits):
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)  # type: ignore[misc]
        sums = self.model_accepts_loss_kwargs and divisor is not None
        head = self.model.get_output_embeddings()
        with head_returns_loss(
            head,
            labels,
            shift=shift,
            reduction="sum" if sums else "mean",
            label_smoothing=self.args.label_smoothing_factor,
            head_rows=self.loss == "head_rows",
        ) as losses:
            outputs = model(**{**inputs, "labels": None, "use_cache": False})
        is_loss = len(losses) == 1 and outputs.logits.data_ptr() == losses[0].data_ptr()
        if not is_loss or getattr(outputs, "aux_loss", None) is not None:
            raise UsageError(
                f"loss={self.loss!r} needs a causal language model whose logits are the output of its head alone, without a loss "
                f"of routers, unlike {type(self.model).__name__}; leave loss out."
            )
        loss = outputs.logits
        if sums:
            # `num_items_in_batch` counts the labels of all ranks if the trainer averages over them; gradients are averaged too.
            over_ranks = self.args.average_tokens_across_devices and num_items_in_batch is not None
            loss = loss * (self.accelerator.num_processes if over_ranks else 1)
            loss = loss / divisor
        return (loss, {"loss": loss}) if return_outputs else loss

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> Any:
        if self.sequence > 1 and not prediction_loss_only:
            raise UsageError(
                f"logits are of this rank's part of each sequence alone (sequence={self.sequence}); evaluate the loss with "
                "evaluate(), and predict with a Trainer without sequence."
            )
        self._needs_logits = not prediction_loss_only
        try:
            loss, *rest = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)  # type: ignore[misc]
        finally:
            self._needs_logits = True
        if self.sequence > 1 and loss is not None:
            dist.all_reduce(loss, group=self.accelerator.sequences["cp"].get_group())
            loss = loss / self.sequence
        return loss, *rest

    # -- saving

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write a folder that `from_pretrained` loads, as the Trainer does. Shards the model first if it is not sharded yet.
        Collective. Pushes the folder to the hub if `args.push_to_hub`, unless `_internal_call`. `_internal_call`: True if the
        Trainer writes a checkpoint; then an older checkpoint in the folder first loses `trainer_state.json`, so that it
        does not count as complete."""
        folder = output_dir or self.args.output_dir
        if _internal_call and self.args.should_save:  # from here on an older checkpoint of this name is not complete
            Path(folder, TRAINER_STATE_NAME).unlink(missing_ok=True)
        self.accelerator.shard(self.model)
        team = Team.of(self.model.parameters())
        with state_on_disk(self.model, folder) as state:
            team.agree(lambda: self._save(folder, state_dict=state) if self.args.should_save else None)  # type: ignore[attr-defined]
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)  # type: ignore[attr-defined]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        path, state = os.path.join(output_dir, SHARDED), {"scheduler": self.lr_scheduler}
        save(path, self.model, self.optimizer, state=state, only=_saved_only(self.model))

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)  # type: ignore[misc]
        self.accelerator.wait_for_everyone()  # the Trainer's state, written next, marks the checkpoint as complete

    # -- resuming

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train as the Trainer does. Collective. `resume_from_checkpoint`: a path, or True for the newest complete checkpoint;
        None or False begins anew. Raises `CheckpointError` on all ranks if that checkpoint is incomplete, or none exists."""
        path: str | bool | None = resume_from_checkpoint
        if path:
            path = Team.of(()).agree(lambda: _newest(self.args.output_dir) if path is True else _checked(str(path)))
            path = Team.of(()).shared(str(path))[0]
        return super().train(path or None, *args, **kwargs)  # type: ignore[misc]

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        self.accelerator.shard(self.model)
        # When training resumes from our checkpoint, weights are loaded later, together with the optimizer.
        if not (self.is_in_train and Path(resume_from_checkpoint, SHARDED).is_dir()):
            self._load_weights(resume_from_checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None and Path(checkpoint, SHARDED).is_dir():
            path, state = os.path.join(checkpoint, SHARDED), {"scheduler": self.lr_scheduler}
            load(path, self.model, self.optimizer, state=state, only=_saved_only(self.model))

    def _load_best_model(self) -> None:
        self._load_weights(self.state.best_model_checkpoint)

    def _load_weights(self, folder: str) -> None:
        if Path(folder, SHARDED).is_dir():
            load(os.path.join(folder, SHARDED), self.model, only=_saved_only(self.model))
        else:
            load_exported(self.model, folder)


class Trainer(ShardedTrainer, transformers.Trainer):  # type: ignore[misc]
    """`transformers.Trainer` that shards its model. Takes three more keyword arguments, described at `ShardedTrainer`:
    `sharding`, a `Sharding` or a dict of arguments of `accordion.shard`; `loss`, "library" (default), or for a loss without
    logits "chunked" or "head_rows"; and `sequence`, the number of ranks that share each sequence (default 1)."""


def from_pretrained(kind: type[Any], folder: str | os.PathLike[str], **kwargs: Any) -> Any:
    """Return a model on the meta device that remembers the folder of its weights; they are loaded when an integration shards it.

    No rank ever has the whole model in memory. PEFT may add adapters before the model is sharded. `kind`: `AutoModelForCausalLM`
    or a model class. `folder`: a folder with the model's config and safetensors, or "owner/name" to download. `kwargs`:
    `config`, or values of the folder's config; and `dtype`, by default that of the config, or float32 if the config has none.
    Raises `UsageError` for any other keyword, and `CheckpointError` if there is no such folder, on disk or on the hub.
    """
    source = local_folder(folder)
    dtype = kwargs.pop("dtype", "auto")
    config = kwargs.pop("config", None)
    if config is None:
        config, kwargs = transformers.AutoConfig.from_pretrained(source, return_unused_kwargs=True, **kwargs)
    if kwargs:
        raise UsageError(
            f"from_pretrained on meta does not take {', '.join(map(str, kwargs))}; pass values of the config, and dtype."
        )
    dtype = (config.dtype or torch.float32) if dtype == "auto" else dtype
    make = kind.from_config if hasattr(kind, "from_config") else kind._from_config
    with torch.device("meta"):
        model = make(config, dtype=dtype)
    if (source / "generation_config.json").exists() and hasattr(model, "generation_config"):
        model.generation_config = transformers.GenerationConfig.from_pretrained(source)
    model.name_or_path = str(folder)
    remember_source(model, source)
    return model


def _saved_only(model: nn.Module) -> Only:
    """Return the argument `only` of `save` and `load`: "trained" for PEFT models, whose base is stored elsewhere; else None."""
    return "trained" if is_peft(model) else None


# -- which checkpoints are complete


def _newest(folder: str) -> str:
    """Return the newest complete checkpoint in `folder`. Raises `CheckpointError` if there is none."""
    folders = [p for p in Path(folder).glob("checkpoint-*") if p.is_dir() and p.name.rpartition("-")[2].isdigit()]
    for path in sorted(folders, key=lambda p: int(p.name.rpartition("-")[2]), reverse=True):
        if not _why_torn(path):
            return str(path)
    raise CheckpointError(
        f"{folder} has no complete checkpoint to resume. Pass the path of one to be told what it lacks."
    )


def _checked(folder: str) -> str:
    why = _why_torn(Path(folder))
    if why:
        raise CheckpointError(
            f"{folder} cannot be resumed: {why}. Pass resume_from_checkpoint=True for the newest complete checkpoint."
        )
    return folder


def _why_torn(path: Path) -> str:
    """Return the reason why the checkpoint folder `path` cannot be resumed; "" if it can."""
    try:  # the Trainer writes its state last
        json.loads((path / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return f"its {TRAINER_STATE_NAME} is missing or incomplete, so its save was interrupted"
    if (path / "optimizer.pt").exists():
        return "its optimizer.pt was written without sharding; start from its weights instead"
    return why_incomplete(path / SHARDED) if (path / SHARDED).is_dir() else ""
