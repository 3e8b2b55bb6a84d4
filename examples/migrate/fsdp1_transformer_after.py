"""A small transformer, sharded by block, in bf16, with both kinds of checkpoints; run it with torchrun --nproc-per-node 2."""

import functools
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from accordion.compat.fsdp1 import (
    BackwardPrefetch,
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecision,
    StateDictType,
)
from accordion.compat.fsdp1 import FullyShardedDataParallel as FSDP  # noqa: N817
from accordion.compat.fsdp1.wrap import transformer_auto_wrap_policy

VOCAB, WIDTH, LENGTH = 32, 32, 16


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens):
        x = self.embed(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device))
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device, dtype=x.dtype)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(x).float()


def build(device="cpu", offload=None):
    torch.manual_seed(0)
    model = FSDP(
        Model().to(device),
        auto_wrap_policy=functools.partial(
            transformer_auto_wrap_policy, transformer_layer_cls={nn.TransformerEncoderLayer}
        ),
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        cpu_offload=CPUOffload(offload_params=device != "cpu" if offload is None else offload),
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
        device_id=torch.device(device),
        sync_module_states=device != "cpu",
        use_orig_params=True,
    )
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3)


def train(model, optimizer, steps, first=0, device="cpu"):
    losses = []
    for step in range(first, first + steps):
        draw = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        start = torch.randint(VOCAB, (8, 1), generator=draw)
        tokens = ((start + 3 * torch.arange(LENGTH + 1)) % VOCAB).to(device)  # each is three more than the one before
        loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def save_sharded(model, optimizer, folder):
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        dcp.save({"model": model.state_dict(), "optim": FSDP.optim_state_dict(model, optimizer)}, checkpoint_id=folder)


def load_sharded(model, optimizer, folder):
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state = {"model": model.state_dict(), "optim": FSDP.optim_state_dict(model, optimizer)}
        dcp.load(state, checkpoint_id=folder)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, state["optim"]))


def full_state(model, optimizer):
    configs = (FullStateDictConfig(offload_to_cpu=True, rank0_only=True), FullOptimStateDictConfig(rank0_only=True))
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, *configs):
        return model.state_dict(), FSDP.optim_state_dict(model, optimizer)


if __name__ == "__main__":
    gpus = torch.cuda.is_available()
    dist.init_process_group("nccl" if gpus else "gloo")
    if gpus:
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    device = f"cuda:{torch.cuda.current_device()}" if gpus else "cpu"
    model, optimizer = build(device)
    losses = train(model, optimizer, 20, device=device)
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder, src=0)
    save_sharded(model, optimizer, folder[0])
    again, its_optimizer = build(device)
    train(again, its_optimizer, 1, device=device)
    load_sharded(again, its_optimizer, folder[0])
    weights, state = full_state(again, its_optimizer)
    if dist.get_rank() == 0:
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; {len(weights)} tensors, {len(state['state'])} with state")
    dist.destroy_process_group()
