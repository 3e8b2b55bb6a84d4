"""A mixture of experts on the source of Python's standard library:

torchrun --nproc-per-node 2 examples/mixture_of_experts.py [STEPS]

The model is a small Mixtral of transformers with random weights: a router sends each byte of the text to two of eight experts.
Every rank has other text, so its experts have other numbers of tokens; all ranks shard the parameters of all experts. Prints
the loss of modules that are not trained on, in bits for a byte, and how many of the tokens each expert has. Takes transformers.
"""

import math
import sys
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import MixtralConfig, MixtralForCausalLM

import accordion as acc

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 200
BATCH, LENGTH = 8, 128  # sequences in a batch of one rank; bytes in a sequence


def text() -> tuple[Tensor, Tensor]:
    """Return the bytes of the modules to train on, and of those held out: every tenth."""
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    parts = [
        b"".join(path.read_bytes() for i, path in enumerate(modules) if (i % 10 == 0) == held) for held in (False, True)
    ]
    train, held_out = (torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in parts)
    return train, held_out


def batch(text: Tensor, seed: int) -> Tensor:
    """Return random sequences (BATCH, LENGTH) of the text."""
    starts = torch.randint(len(text) - LENGTH, (BATCH, 1), generator=torch.Generator().manual_seed(seed))
    return text[starts + torch.arange(LENGTH)].long()


device = acc.init()
torch.manual_seed(0)  # every rank builds the same model; shard() checks that
sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
experts = {"num_local_experts": 8, "num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.1}
model = acc.shard(MixtralForCausalLM(MixtralConfig(vocab_size=256, num_key_value_heads=2, **sizes, **experts)))
optimizer = acc.wrap_optimizer(torch.optim.AdamW(model.parameters(), lr=3e-3))

train, held_out = text()
for step in range(STEPS):
    tokens = batch(train, step * dist.get_world_size() + dist.get_rank()).to(device)  # each rank has a batch of its own
    loss = model(input_ids=tokens, labels=tokens).loss  # with the router's, which is low if experts have equal numbers
    loss.backward()
    acc.clip_grad_norm_(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0 and step % 50 == 49:
        print(f"step {step + 1}: loss {loss.item():.3f}")

model.eval()
tokens = torch.cat([batch(held_out, i) for i in range(4)]).to(device)
with torch.no_grad():  # all ranks evaluate: the forward gathers parameters
    out = model(input_ids=tokens, labels=tokens)
loss = torch.nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).item()
if dist.get_rank() == 0:
    print(f"held-out loss {loss:.3f}, {loss / math.log(2):.2f} bits for a byte")
    for layer, logits in enumerate(out.router_logits):  # (tokens, experts)
        shares = logits.topk(2).indices.flatten().bincount(minlength=logits.shape[1]) / logits.shape[0] / 2
        print(f"layer {layer}: tokens of each expert", *(f"{share:.0%}" for share in shares))
