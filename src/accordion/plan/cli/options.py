"""The options of `accordion plan`; imports no torch, so that help comes at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from accordion.models.llama import PUBLISHED
from accordion.plan.hardware import DISK_GBPS, GPUS, NETWORK_GBPS

ABOUT = (
    "Say what a training step of a model takes on given GPUs, and which configuration is the fastest that fits. What a flag "
    f"fixes is not looked for. Presets: {', '.join(PUBLISHED)}. Cards: {', '.join(GPUS)}."
)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Say what a training step of a model takes on given GPUs, and which configuration is the fastest that fits.

    Args:
        model: a preset, a folder with a transformers config.json, or that file; or file.py:build or package.module:build, a
            function without arguments that gives a language model
        task: a task of your own in its place, file.py, file.py:Name or package.module:Name, with options as --task.width 64 and
            batches of --micro-batch samples (8)
        gpu: a card of the table (--gpus-table shows it), measured: what --measure found here, or a file that it wrote
        gpus: GPUs in all; without it eight on each of --nodes
        nodes: machines; without it as many as --gpus fill, eight to each
        fewer: look at smaller numbers of GPUs too, halving
        seq: tokens of a sequence
        micro_batch: sequences of one rank at a time; without it: look for it
        accumulate: micro-batches of a step
        no_sync: micro-batches of a step but the last reduce nothing, and full gradients stay on each rank
        engine: accordion, or fsdp2: PyTorch's own in its place
        global_batch: sequences of a step over all GPUs; accumulation follows from it
        optimizer: adamw (fused), adamw_foreach, sgd (fused, with momentum), or adamw_bf16, adamw_8bit, adamw_4bit: AdamW with
            moments in so many bits
        precision: what the model computes in, over float32 masters; bf16-pure: without them
        reduce: in which gradients are summed over ranks
        loss: plain (a float32 copy of the logits), fused (one kernel over them) or chunked (head and loss by rows, no logits)
        lora_rank: of adapters beside frozen weights; 0: all is trained
        lora_targets: all (linear layers but the head), or the last parts of names of layers, such as q_proj,v_proj
        quantize: nf4 keeps the frozen weights in four bits (QLoRA)
        attention: auto (FlashAttention-2 where it can be), eager (products and a softmax), fa1, fa2, fa3, cudnn or flex
        strategy: of accordion.shard, such as full_shard; without it: look for it
        units: what is gathered together: auto, blocks, min_params:N or names of classes; without it: look for it
        replicas: copies of the model with a hybrid strategy; without it: look for it
        secondary: ranks that keep one copy of a unit from its forward to its backward, 0: none; without it and without a
            strategy: look for it
        offload: none, optimizer (with masters and gradients on the host), all (parameters too) or disk (states there); without
            it: the first of them that fits
        offload_activations: device, host or disk: where inputs of recomputed units wait; without it: elsewhere than on the
            device only where nothing fits
        checkpoint_activations: none, every:K, selective or full; without it: look for it
        expert_parallel: neighbouring ranks that share the experts of a mixture; tokens are assumed to choose them evenly
        lengths: tokens of a sample as mean,longest: all are padded to the longest, and the mean counts as trained
        packed: with --lengths: samples of the mean length fill rows of the longest, and each looks at itself alone
        tokens: of a whole run, whose hours and GPU-hours are shown
        price: dollars for an hour of one GPU, for the price of that run
        from_: file of a plan's --json, whose options are taken where no other is given
        gpu_watts: power of the card where it is less than its data sheet's
        gpu_memory_gib: memory of the card; this and the next three correct a card of the table, or describe another one
        gpu_tflops: dense bf16, in units of 10^12 a second
        gpu_bandwidth_gbps: GB/s of its memory
        link_gbps: GB/s that one card sends to another in its node
        network_gbps: GB/s that one card sends to other nodes
        host_memory_gib: of one machine, for offload; without it that of the card's usual node
        disk_gbps: GB/s of one machine's disk, for offload
        measured_step_s: seconds of one measured step on such cards, which calibrates all times
        measured_at: its configuration: strategy,checkpointing,micro-batch,GPUs; without it the one that the other options fix
        measure: measure this machine, store that, and end; all its GPUs, else two CPU ranks
        measured_file: where that is stored; without it in the user's cache folder
        gpus_table: show the table of cards with their sources, and end
        explain: show the arithmetic by hand beside what was traced
        json: print JSON alone
        html: file for a page with the pictures
    """

    model: str = "llama3-8b"
    task: str | None = None
    gpu: str = "h100"
    gpus: int | None = None
    nodes: int | None = None
    fewer: bool = False
    seq: int = 4096
    micro_batch: int | None = None
    accumulate: int = 1
    no_sync: bool = False
    engine: str = "accordion"
    global_batch: int | None = None
    optimizer: str = "adamw"
    precision: Literal["bf16", "fp16", "fp32", "bf16-pure"] = "bf16"
    reduce: Literal["fp32", "bf16"] = "fp32"
    loss: str = "plain"
    attention: str = "auto"
    lora_rank: int = 0
    lora_targets: str = "all"
    quantize: Literal["none", "nf4"] = "none"
    strategy: str | None = None
    units: str | None = None
    replicas: int | None = None
    secondary: int | None = None
    offload: str | None = None
    offload_activations: str | None = None
    checkpoint_activations: str | None = None
    expert_parallel: int = 1
    lengths: str | None = None
    packed: bool = False
    tokens: float | None = None
    price: float | None = None
    from_: str | None = None
    gpu_watts: float | None = None
    gpu_memory_gib: float | None = None
    gpu_tflops: float | None = None
    gpu_bandwidth_gbps: float | None = None
    link_gbps: float | None = None
    network_gbps: float = NETWORK_GBPS
    host_memory_gib: float | None = None
    disk_gbps: float = DISK_GBPS
    measured_step_s: float | None = None
    measured_at: str = ""
    measure: bool = False
    measured_file: str | None = None
    gpus_table: bool = False
    explain: bool = False
    json: bool = False
    html: str | None = None
