"""The options of `accordion plan`; imports no torch, so that help comes at once."""

from __future__ import annotations

from dataclasses import dataclass

from accordion.models.llama import PUBLISHED
from accordion.plan.hardware import GPUS

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
        gpu: a card, or "table" to show all. More words correct it: memory_gib, tflops (dense bf16), bandwidth_gbps, link_gbps
            (in a node) and watts of the card, network_gbps of a card to other nodes, host_memory_gib and disk_gbps of a node,
            price in dollars for an hour of a card; h100,host_memory_gib=512,price=2.5 for example
        gpus: GPUs in all, eight to a node; 2x4 for two nodes of four; 8,16,32 looks at smaller numbers too
        seq: tokens of a sequence
        lengths: tokens of a sample as mean,longest in place of --seq: all are padded to the longest, and the mean counts as
            trained; mean,longest,packed: samples of the mean length fill rows of the longest, and each attends to itself alone
        micro_batch: sequences of one rank at a time; without it: look for it
        accumulate: micro-batches of a step
        no_sync: micro-batches of a step but the last reduce nothing, and full gradients stay on each rank
        global_batch: sequences of a step over all GPUs; accumulation follows from it
        engine: accordion, or fsdp2: PyTorch's own in its place
        optimizer: adamw (fused), adamw_foreach, sgd (fused, with momentum), or adamw_bf16, adamw_8bit, adamw_4bit: AdamW with
            moments in so many bits
        loss: plain (a float32 copy of the logits), fused (one kernel over them) or chunked (head and loss by rows, no logits)
        attention: auto (FlashAttention-2 where it can be), eager (products and a softmax), fa1, fa2, fa3, cudnn or flex
        lora: rank of adapters next to frozen weights; more words: targets=q_proj+v_proj for the layers that have them (all
            linear ones but the head), base=nf4 for frozen weights in four bits (QLoRA)
        precision: dtype of the computation, over float32 masters: bf16, fp16 or fp32; bf16-pure: no masters; with
            reduce=bf16 gradients are summed in it: bf16,reduce=bf16
        strategy: of accordion.shard, such as full_shard; without it: look for it
        units: modules that are gathered together: auto, blocks, min_params:N or names of classes; without it: look for it
        offload: none, or places of states: optimizer=host (with masters and gradients), params=host too, optimizer=disk:/folder,
            and activations=host or activations=disk:/folder for inputs of recomputed units; without it: the first that fits
        checkpoint_activations: none, every:K, selective or full; without it: look for it
        sharding: more fields of accordion.Sharding as NAME=VALUE, with commas between
        replicas: copies of the model with a hybrid strategy; without it: look for it
        expert_parallel: neighbouring ranks that share the experts of a mixture; tokens are assumed to choose them evenly
        tokens: of a whole run, whose hours and GPU-hours are shown, and its price if --gpu has one
        calibrate: seconds of one measured step on such cards, which calibrate all times; of the configuration that the other
            options fix, or of strategy,checkpointing,micro-batch,GPUs after a comma: 2.84,full_shard,selective,2,8
        json: print JSON alone
        html: file for a page with the pictures
    """

    model: str = "llama3-8b"
    task: str | None = None
    gpu: str = "h100"
    gpus: str | None = None
    seq: int = 4096
    lengths: str | None = None
    micro_batch: int | None = None
    accumulate: int = 1
    no_sync: bool = False
    global_batch: int | None = None
    engine: str = "accordion"
    optimizer: str = "adamw"
    loss: str = "plain"
    attention: str = "auto"
    lora: str | None = None
    precision: str = "bf16"
    strategy: str | None = None
    units: str | None = None
    offload: str | None = None
    checkpoint_activations: str | None = None
    sharding: str | None = None
    replicas: int | None = None
    expert_parallel: int = 1
    tokens: float | None = None
    calibrate: str | None = None
    json: bool = False
    html: str | None = None
