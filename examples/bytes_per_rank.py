"""Bytes that each rank keeps under each strategy: torchrun --nproc-per-node 8 examples/bytes_per_rank.py [layers width]"""

import copy
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

import accordion as acc

MIB = 2**20


def main(layers: int = 6, width: int = 320) -> None:
    acc.init("cpu")
    world = dist.get_world_size()
    flat = init_device_mesh("cpu", (world,))
    square = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    heads = max(1, width // 64)
    torch.manual_seed(0)
    shape = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": layers, "vocab_size": 4096}
    model = LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=heads, num_key_value_heads=heads))
    rows = []
    for strategy in (
        acc.NO_SHARD, acc.SHARD_OPTIM, acc.SHARD_GRAD_OP, acc.FULL_SHARD, acc.HYBRID_SHARD, acc.HYBRID_SHARD_OPTIM
    ):  # fmt: skip
        sharded = acc.shard(copy.deepcopy(model), square if strategy.hybrid else flat, strategy=strategy)
        report = acc.describe(sharded)
        kept = [sum(getattr(u, f"{k}_bytes") for u in report.units) for k in ("parameter", "gradient", "optimizer")]
        gathered = [u.full_bytes for u in report.units]
        at_once = strategy.params is acc.Place.REPLICATE or strategy.keep_until_backward
        inner = sum(u.inner_shard_bytes for u in report.units)
        rows.append((strategy.name, *kept, inner + (sum(gathered) if at_once else 2 * max(gathered))))
    if dist.get_rank() == 0:
        print(f"{report.total_params:,} parameters in float32, AdamW, {world} ranks; MiB on each rank")
        print("| strategy | parameters | gradients | optimizer | gathered beside them |\n|---|---|---|---|---|")
        for name, *numbers in rows:
            print(f"| `{name}` | " + " | ".join(f"{n / MIB:.1f}" for n in numbers) + " |")


if __name__ == "__main__":
    main(*(int(word) for word in sys.argv[1:]))
