"""Every key of DeepSpeed's configuration: used, not needed here, or not supported, and why. Written as docs/compat_deepspeed.md.

`python -m accordion.compat.deepspeed > docs/compat_deepspeed.md` writes the table anew.
Source: DeepSpeed's documentation of its JSON and its `runtime/config.py`, `zero/config.py`, of autumn 2026.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any


class Use(Enum):
    """How a key is treated."""

    USED = "used"
    NOT_NEEDED = "not needed"
    REFUSED = "not supported"


@dataclass(frozen=True, slots=True)
class Key:
    """One row of the table.

    Args:
        takes: the values of a used key: words, `bool`, `float` for 0 and more, or a whole number for it and more.
        off: further values of a refused key that ask for nothing.
        asked: the key of `accordion train` that answers an `"auto"`, which otherwise the caller must.
        auto: the value of `"auto"` without an answer: the default of transformers' TrainingArguments.
        follows: what `"auto"` follows from, if from other keys.
    """

    use: Use
    why: str
    takes: Any = None
    off: tuple[Any, ...] = ()
    asked: str = ""
    auto: Any = None
    follows: str = ""


def used(why: str, takes: Any = None, **auto: Any) -> Key:
    return Key(Use.USED, why, takes, **auto)


def not_needed(why: str) -> Key:
    return Key(Use.NOT_NEEDED, why)


def refused(why: str, *off: Any) -> Key:
    return Key(Use.REFUSED, why, off=off)


DTYPES = ("fp32", "bf16", "fp16")
DEVICES = ("none", "cpu", "nvme")
BUCKETS = not_needed("a unit is what is gathered and reduced together; there are no buckets")
ONE_STEP = not_needed("there is one implementation of a step")
ANY_RANKS = not_needed("every checkpoint loads on any number of ranks")
UNITS = not_needed("`shard(units=)` says what is gathered together")
COMPILE = "compile your blocks with torch.compile, before or after `shard`"

# A row is for one key or, with spaces between them, for several. `name.*`: all keys below that one.
BATCH: dict[str, Key] = {
    "train_batch_size": used(
        "sequences or samples in a step: micro batch x accumulation x ranks",
        1,
        follows="micro batch x accumulation x ranks",
    ),
    "train_micro_batch_size_per_gpu": used(
        "`batch(num_ranks).micro_batch`; `train.micro_batch`", 1, asked="train.micro_batch"
    ),
    "gradient_accumulation_steps": used(
        "`batch(num_ranks).accumulation`; `train.accumulate`", 1, asked="train.accumulate"
    ),
    "managed_gradient_accumulation": not_needed("the loop says when it steps"),
    "dataloader_drop_last": not_needed("the loader is the caller's; that of `accordion train` keeps ranks even"),
    "elasticity.*": refused("batch sizes are given, not searched; checkpoints load on any number of ranks"),
}
OPTIMIZER: dict[str, Key] = {
    "optimizer.type": used(
        "`optimizer`: Adam, AdamW, Adagrad, and each class of torch.optim by its name. Lamb, Lion, Muon, the 1-bit and the "
        "mu-P ones are not in torch.optim, or step whole matrices with parameters split by use, and are refused"
    ),
    "optimizer.params": used(
        "keyword arguments of that class; for Adam and AdamW weight_decay is 0 if it is not given, as in FusedAdam"
    ),
    "optimizer.params.lr": used("the learning rate", float, asked="train.lr"),
    "optimizer.params.betas": used("decay rates of the moments", auto=(0.9, 0.999)),
    "optimizer.params.eps": used("what is added to the denominator", auto=1e-8),
    "optimizer.params.weight_decay": used("the weight decay", asked="train.weight_decay", auto=0.0),
    "optimizer.params.adam_w_mode": used("Adam is AdamW unless this is false", bool),
    "optimizer.params.torch_adam": used("torch's default for weight_decay in AdamW, 0.01", bool),
    "optimizer.params.bias_correction": refused("torch's Adam always corrects", True),
    "optimizer.params.max_grad_norm": refused("DeepSpeed does not support it either; give gradient_clipping", 0, 0.0),
    "optimizer.legacy_fusion": ONE_STEP,
    "zero_allow_untested_optimizer": not_needed("every optimizer of torch.optim is stepped on shards"),
    "zero_force_ds_cpu_optimizer": not_needed("torch's optimizers step on every device"),
}
SCHEDULER: dict[str, Key] = {
    "scheduler.type": used(
        "`scheduler`: WarmupLR, WarmupDecayLR, WarmupCosineLR, LRRangeTest, step for step. OneCycle is refused: it changes "
        "`betas` too"
    ),
    "scheduler.params.warmup_min_lr": used("of the first step; a list gives one for each parameter group", auto=0.0),
    "scheduler.params.warmup_max_lr": used(
        "after the warmup; a list gives one for each parameter group", follows="the learning rate of the optimizer"
    ),
    "scheduler.params.warmup_num_steps": used("steps of the warmup; fewer than 2 count as 2", asked="train.warmup"),
    "scheduler.params.warmup_type": used('"log" (DeepSpeed\'s default) or "linear"'),
    "scheduler.params.total_num_steps": used(
        "where WarmupDecayLR reaches 0 and WarmupCosineLR its floor", asked="train.steps"
    ),
    "scheduler.params.warmup_min_ratio": used("WarmupCosineLR: share of the rate at which the warmup begins"),
    "scheduler.params.cos_min_ratio": used("WarmupCosineLR: share of the rate at its end"),
    "scheduler.params.lr_range_test_min_lr": used("LRRangeTest: the first rate"),
    "scheduler.params.lr_range_test_step_size": used("LRRangeTest: steps in an interval"),
    "scheduler.params.lr_range_test_step_rate": used("LRRangeTest: growth in an interval"),
    "scheduler.params.lr_range_test_staircase": used("LRRangeTest: grow at the end of an interval only"),
    "scheduler.params.last_batch_iteration": refused("a checkpoint knows how far the schedule is", -1),
    "scheduler.params.cycle_min_lr scheduler.params.cycle_max_lr scheduler.params.decay_lr_rate "
    "scheduler.params.cycle_first_step_size scheduler.params.cycle_second_step_size "
    "scheduler.params.cycle_first_stair_count scheduler.params.cycle_second_stair_count "
    "scheduler.params.decay_step_size scheduler.params.cycle_momentum scheduler.params.cycle_min_mom "
    "scheduler.params.cycle_max_mom scheduler.params.decay_mom_rate": refused(
        "of OneCycle, which changes `betas` at each step too; take torch.optim.lr_scheduler.OneCycleLR"
    ),
}
PRECISION: dict[str, Key] = {
    "bf16.enabled": used("`Precision(params=torch.bfloat16)` over float32 masters", bool, asked="shard.precision"),
    "bf16.bf16_master_weights_and_grads bf16.bf16_optimizer_states": used(
        "`Precision(master=torch.bfloat16)`; only both together, since states have the dtype of masters", bool
    ),
    "bf16.immediate_grad_update": not_needed("gradients are reduced as they come"),
    "bf16.check_grad_overflow": refused(
        'steps are not skipped in bf16; `shard(debug="finite")` names where NaN or inf begin'
    ),
    "bfloat16": used("the older name of bf16, with the same keys"),
    "fp16.enabled": used(
        "`Precision(params=torch.float16)` and `scaler()`. `accordion train` counts a step that overflows in the schedule; "
        "DeepSpeed does not",
        bool,
        asked="shard.precision",
    ),
    "fp16.auto_cast": not_needed("floating inputs of each unit are cast in any case"),
    "fp16.loss_scale": used("a fixed scale; 0: dynamic", float),
    "fp16.initial_scale_power": used("`init_scale` is 2 to this power", 0),
    "fp16.loss_scale_window": used("`growth_interval`", 1),
    "fp16.hysteresis": used("overflows before the scale is halved; `scaler()` counts them, torch's does not", 1),
    "fp16.consecutive_hysteresis": used("whether a good step resets that count", bool),
    "fp16.min_loss_scale": used("if it would go below, `update` raises, as in DeepSpeed", float),
    "fp16.fp16_master_weights_and_grads": refused("fp16 masters need DeepSpeed's CPU Adam; masters are float32"),
    "fp16.fused_mode": ONE_STEP,
    "amp.*": refused("Apex is not used; take bf16 or fp16"),
    "torch_autocast.*": refused(
        "autocast saves a cast copy of each weight at each use; take bf16 or fp16, or write torch.autocast in your loop"
    ),
    "communication_data_type": used(
        "`Precision.reduce`, the dtype in which gradients are summed; float32 if not given", DTYPES
    ),
    "seq_parallel_comm_data_type": not_needed("there is no sequence parallelism"),
    "data_types.grad_accum_dtype": not_needed("gradients add up in the dtype of masters"),
    "data_types.buffer_dtype": used(
        "`Precision.buffers`; not given, buffers stay as they are; DeepSpeed casts them", DTYPES
    ),
    "data_types.param_dtype": refused("parameters keep their dtype; bf16 and fp16 choose that of the computation"),
    "gradient_clipping": used("`clip` for `acc.clip_grad_norm_`; 0 or not given: none", float, asked="train.clip"),
    "gradient_allreduce_op": used('`reduce_op`: "mean" or "sum"; here "sum" works in stage 3 too', ("mean", "sum")),
    "prescale_gradients gradient_predivide_factor": not_needed(
        "sums are taken in float32 and divided once: nothing overflows on the way"
    ),
    "sparse_gradients": refused("gradients of embeddings are dense"),
}
_ZERO: dict[str, Key] = {
    "stage": used("0 NO_SHARD, 1 SHARD_OPTIM, 2 SHARD_GRAD_OP (which keeps shards between steps), 3 FULL_SHARD", 0),
    "zero_hpz_partition_size": used(
        "stage 3: HYBRID_SHARD_OPTIM on a mesh whose inner axis has so many ranks: parameters are gathered inside it, the "
        "optimizer is cut over all",
        0,
    ),
    "mics_shard_size": used("stage 3: HYBRID_SHARD on a mesh whose inner axis has so many ranks", -1),
    "mics_hierarchical_params_gather": not_needed("parameters are gathered inside the inner axis only"),
    "offload_param.device": used(
        'stage 3: "cpu" is `Offload(params="host")`, rows are brought at each gather; "nvme" is `"disk:nvme_path"`, rows and '
        "masters in a file there, read ahead",
        DEVICES,
    ),
    "offload_optimizer.device": used(
        'from stage 1 on: "cpu" is `Offload(optimizer="host")`, states, masters and gradients; "nvme" is `"disk:nvme_path"`, the '
        "states in a file there",
        DEVICES,
    ),
    "offload_param.nvme_path offload_optimizer.nvme_path": used('the folder, if the device is "nvme"'),
    "cpu_offload": used("an older name of offload_optimizer to cpu", bool),
    "cpu_offload_params cpu_offload_param": used("an older name of offload_param to cpu", bool),
    "offload_param.pin_memory offload_param.buffer_count offload_param.buffer_size offload_param.max_in_cpu "
    "offload_optimizer.pin_memory offload_optimizer.buffer_count offload_optimizer.fast_init "
    "offload_optimizer.pipeline_read offload_optimizer.pipeline_write offload_optimizer.pipeline "
    "offload_optimizer.ratio offload_optimizer.super_offload offload_optimizer.convert_grad_on_cpu "
    "offload_optimizer.cpuadam_cores_perc cpu_offload_use_pin_memory": not_needed(
        "host memory is sized from the model, pinned, and copied to and from between events"
    ),
    "zenflow.*": refused("changes which gradients a step sees"),
    "allgather_partitions allgather_bucket_size reduce_bucket_size contiguous_gradients "
    "use_multi_rank_bucket_allreduce round_robin_gradients": BUCKETS,
    "reduce_scatter": not_needed("chosen for each message; `Strategy(reduce=)` forces it"),
    "overlap_comm": not_needed("communication always overlaps"),
    "parameter_alignment": not_needed("parameters start at multiples of 256 bytes"),
    "compute_grad_norm": not_needed("the norm is computed if the loop clips"),
    "sub_group_size": not_needed("a step is made on the shards as they are stored"),
    "stage3_max_live_parameters": not_needed("what is unsharded are the units in use and the one gathered ahead"),
    "stage3_max_reuse_distance": not_needed("the last unit and the root stay gathered for the backward, others do not"),
    "stage3_prefetch_bucket_size": not_needed("one unit is gathered ahead; `Prefetch(budget_bytes=)` for more"),
    "stage3_param_persistence_threshold stage3_model_persistence_threshold": not_needed(
        "small parameters travel packed in one message of their unit"
    ),
    "stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save": not_needed(
        "`acc.full_state_dict` gathers when it is asked for"
    ),
    "stage3_module_granularity_threshold leaf_module.*": UNITS,
    "stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential": not_needed(
        "parameters are gathered straight into place, without a bucket to copy to"
    ),
    "stage3_partition_stream_chunk_size": not_needed(
        "`acc.initialise` and `acc.load_pretrained` hold one tensor at a time"
    ),
    "load_from_fp32_weights": not_needed("masters are what checkpoints hold"),
    "elastic_checkpoint": ANY_RANKS,
    "pipeline_loading_checkpoint": not_needed("each rank reads its own rows"),
    "ignore_unused_parameters": refused("parameters without a gradient are not looked for; only true is", True),
    "legacy_stage1": ONE_STEP,
    "zero_quantized_weights zero_quantized_nontrainable_weights zero_quantized_gradients zeropp_loco_param.*": refused(
        "messages are not quantized; gradients travel in the dtype of the computation and are added in float32"
    ),
    "memory_efficient_linear": not_needed("no operator of torch is replaced"),
    "override_module_apply": not_needed("no method of torch's classes is replaced"),
    "log_trace_cache_warnings": not_needed("there is no trace to invalidate: each unit predicts its successor"),
    "enable_sanity_checks": not_needed("ranks always agree before anything new"),
    "save_muon_momentum_buffer_in_memory": not_needed("of Muon, which is not there"),
}
ZERO = {" ".join(f"zero_optimization.{name}" for name in names.split()): key for names, key in _ZERO.items()}
OTHERS: dict[str, Key] = {
    "allgather_size": BUCKETS,
    "disable_allgather": not_needed("old; has no effect in DeepSpeed either"),
    "vocabulary_size": not_needed("the model knows its own"),
    "activation_checkpointing.partition_activations": refused("recomputed activations stay whole"),
    "activation_checkpointing.cpu_checkpointing": refused(
        "of `shard`: `checkpoint_activations` with `Offload(activations='host')`"
    ),
    "activation_checkpointing.contiguous_memory_optimization activation_checkpointing.number_checkpoints "
    "activation_checkpointing.synchronize_checkpoint_boundary activation_checkpointing.profile": not_needed(
        "says how, and not that, activations are recomputed"
    ),
    "aio.*": not_needed("the tier on disk reads and writes through a few buffers of its own size"),
    "checkpoint.tag_validation": not_needed("the manifest of a checkpoint is written last, by one rank"),
    "checkpoint.load_universal": ANY_RANKS,
    "checkpoint.parallel_write.* checkpoint.writer.*": not_needed("every rank writes its own rows"),
    "checkpoint.use_node_local_storage": refused("a checkpoint is one folder that all ranks see"),
    "compile.deepcompile": refused(COMPILE),
    "compile.* graph_harvesting": not_needed(COMPILE),
    "tensor_parallel.*": refused("there is no tensor parallelism"),
    "expert_parallel.* use_data_before_expert_parallelism": refused("there is no expert parallelism"),
    "sequence_parallel_size": refused("there is no sequence parallelism", 1),
    "pipeline.*": refused("there is no pipeline parallelism"),
    "hybrid_engine.*": refused("there are no inference kernels; generate inside `acc.full_params`"),
    "sparse_attention.* progressive_layer_drop.* curriculum_learning.* data_efficiency.* eigenvalue.* "
    "compression_training.* quantize_training.* weight_quantization.*": refused(
        "changes the model or the data, which stay the caller's"
    ),
    "autotuning.*": refused("settings are taken as written"),
    "nebula.* datastates.*": refused("checkpoints are folders of safetensors, written by the ranks"),
    "steps_per_print wall_clock_breakdown memory_breakdown dump_state log_level tensorboard.* wandb.* csv_monitor.* comet.* "
    "monitor_config.* comms_logger.* timers.* flops_profiler.*": not_needed(
        "`accordion train` writes metrics.jsonl and TensorBoard; a loop of your own logs as it likes"
    ),
}
PARTS: dict[str, dict[str, Key]] = {
    "Batch": BATCH,
    "Optimizer": OPTIMIZER,
    "Scheduler": SCHEDULER,
    "Precision and gradients": PRECISION,
    "ZeRO": ZERO,
    "Others": OTHERS,
}
_NAMED = [(name, key) for part in PARTS.values() for names, key in part.items() for name in names.split()]
KEYS: Mapping[str, Key] = {name.removesuffix(".*"): key for name, key in _NAMED}
SECTIONS = {name.removesuffix(".*") for name, _ in _NAMED if name.endswith(".*")}


def render() -> str:
    """Return the table as Markdown."""
    lines = [
        "# DeepSpeed's configuration, key by key",
        "",
        "Written by `python -m accordion.compat.deepspeed > docs/compat_deepspeed.md`; a test compares. How to use a",
        "file: [compat.md](compat.md).",
        "",
        "A key that is not here is refused with the nearest that is. `name.*`: the keys below it share the row. A key",
        'that is not supported is accepted if it asks for nothing: `false`, `null`, `"enabled": false`, or its value',
        "in brackets.",
    ]
    for title, part in PARTS.items():
        lines += ["", f"## {title}", "", "| key | | how, or why |", "|---|---|---|"]
        for names, key in part.items():
            off = f" ({', '.join(str(value).lower() for value in key.off)})" if key.off else ""
            lines.append(f"| {', '.join(f'`{n}`' for n in names.split())} | {key.use.value}{off} | {key.why} |")
    lines += ["", '## `"auto"`', "", "| key | becomes |", "|---|---|"]
    for name, key in KEYS.items():
        becomes = [f"`{key.asked}` in `accordion train`, else what `read(auto=)` gives"] if key.asked else []
        becomes += [f"{'else ' if key.asked else ''}`{key.auto}`"] if key.auto is not None else []
        becomes += [key.follows] if key.follows else []
        lines += [f"| `{name}` | {', '.join(becomes)} |"] if becomes else []
    lines += ["", 'Keys that are not needed may be `"auto"` too. Any other `"auto"` is refused.', ""]
    return "\n".join(lines)
