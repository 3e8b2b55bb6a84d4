"""The options of `accordion plan`. Imports no torch, so that `--help` is fast."""

from __future__ import annotations

from dataclasses import dataclass

from accordion.models.llama import PUBLISHED
from accordion.plan.hardware import GPUS

ABOUT = (
    "Predict memory and time of a training step on given GPUs, and choose the fastest configuration that fits. The search "
    f"covers what no flag fixes. Presets: {', '.join(PUBLISHED)}. GPUs: {', '.join(GPUS)}."
)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Predict memory and time of a training step on given GPUs, and choose the fastest configuration that fits.

    Args:
        model: a preset, a folder with a transformers config.json, or that file
        task: plan a task of your own instead: file.py, file.py:Name or package.module:Name, with options as --task.width 64;
            a batch has --micro-batch samples (default 8)
        gpu: name of a GPU. NAME=VALUE after commas correct it: memory_gib, tflops (dense bf16),
            bandwidth_gbps and link_gbps (in a node) of the GPU; network_gbps of one GPU to other nodes; host_memory_gib
            and disk_gbps of a node; price in dollars per GPU-hour. Example: h100,host_memory_gib=512,price=2.5
        gpus: total number of GPUs, eight per node; 2x4 is two nodes of four; 8,16,32 also tries the smaller numbers
        seq: tokens per sequence
        micro_batch: sequences of one rank in one forward; searched if left out
        accumulate: micro-batches per step
        no_sync: reduce gradients in the last micro-batch of a step only; full gradients stay on each rank
        global_batch: sequences per step over all GPUs; sets --accumulate
        engine: accordion, or fsdp2 for PyTorch's own fully_shard
        optimizer: adamw (fused), adamw_ema (with accordion.EMA on the device), adamw_foreach, sgd (fused, with momentum), or
            AdamW with moments of fewer bits: adamw_bf16, adamw_8bit, adamw_4bit
        loss: plain (a float32 copy of the logits), fused (one kernel over them), chunked (head and loss together for some
            tokens at a time, no logits) or head_rows (also with a few rows of the head at a time)
        attention: auto (FlashAttention-2 if possible), eager (products and a softmax), fa1, fa2, fa3, cudnn or flex
        mlp_tiles: parts of the tokens that an MLP computes one after another, and again in the backward (accordion.tile)
        lora: rank of adapters next to frozen weights, then optionally targets=q_proj+v_proj for the layers that have them
            (default: all linear layers but the head)
        quantize: data type of the frozen weights of linear layers, for --lora: nf4 or fp4, or nf4-double or fp4-double, which
            quantise their scales too (QLoRA)
        precision: dtype of the computation over float32 masters: bf16, fp16 or fp32; bf16-pure has no masters; with
            bf16,reduce=bf16 gradients are summed in bf16
        strategy: strategy of accordion.shard, such as full_shard; searched if left out
        units: modules that are gathered together: auto, blocks, min_params:N or names of classes; default: auto, fsdp2: blocks
        offload: none, or optimizer=host (with masters and gradients) or optimizer=disk:/folder, with params=host, and
            activations=host or activations=disk:/folder for inputs of recomputed units; the first that fits if left out
        checkpoint_activations: none, every:K, selective or full; searched if left out
        sharding: more fields of accordion.Sharding as NAME=VALUE, separated by commas
        replicas: copies of the model under a hybrid strategy; searched if left out
        expert_parallel: number of neighbouring ranks that share the experts of a mixture; each expert gets equally many tokens
        sequence: number of neighbouring ranks that share each sequence (accordion.sequence_parallel); if left out, powers of
            two are tried if nothing fits without
        reserve_gb: GiB of each GPU that an inference engine keeps; plans for the rest, and shows what is free while the engine
            generates beside the parked model (accordion.park) or the model, and in a step
        tokens: tokens of a whole run, to show its hours and GPU-hours, and its price if --gpu has one
        html: file for a page that draws the planned step: streams, and memory by kind
        json: print JSON only
    """

    model: str = "llama3-8b"
    task: str | None = None
    gpu: str = "h100"
    gpus: str | None = None
    seq: int = 4096
    micro_batch: int | None = None
    accumulate: int = 1
    no_sync: bool = False
    global_batch: int | None = None
    engine: str = "accordion"
    optimizer: str = "adamw"
    loss: str = "plain"
    attention: str = "auto"
    mlp_tiles: int = 1
    lora: str | None = None
    quantize: str | None = None
    precision: str = "bf16"
    strategy: str | None = None
    units: str | None = None
    offload: str | None = None
    checkpoint_activations: str | None = None
    sharding: str | None = None
    replicas: int | None = None
    expert_parallel: int = 1
    sequence: int | None = None
    reserve_gb: float = 0.0
    tokens: float | None = None
    html: str | None = None
    json: bool = False
