"""Train LoRA adapters next to a sharded base of four bits: torchrun --nproc-per-node 2 examples/qlora.py [FOLDER]

FOLDER: a model of transformers in bf16; without it, a small Llama with random weights is written first. Takes
transformers, peft and bitsandbytes.
"""

import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

import accordion as acc


def folder_of_base() -> Path:
    """Return the folder of the base; the first rank writes it if none was named."""
    if len(sys.argv) > 1:
        return Path(sys.argv[1])
    names = [tempfile.mkdtemp()] if dist.get_rank() == 0 else [""]
    if dist.get_rank() == 0:
        sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
        config = LlamaConfig(vocab_size=512, **sizes)
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(names[0])
    dist.broadcast_object_list(names)
    return Path(names[0])


def bytes_of(model: torch.nn.Module) -> int:
    """Return the bytes of this rank's frozen weights."""
    return sum(p.to_local().nbytes for p in model.parameters() if not p.requires_grad)


device = acc.init()
torch.manual_seed(0)
folder = folder_of_base()

with torch.device("meta"):  # no rank ever has the whole model
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    model = acc.quantize(model, "nf4-double")
    model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
model = acc.shard(model)
acc.load_pretrained(model, folder)  # each rank reads and quantises its own rows; adapters begin as PEFT's
if dist.get_rank() == 0:
    print(f"frozen weights on this rank: {bytes_of(model):,} bytes")

adapters = [p for p in model.parameters() if p.requires_grad]
optimizer = acc.wrap_optimizer(torch.optim.AdamW(adapters, lr=1e-2))
own = torch.Generator().manual_seed(dist.get_rank())  # each rank has a batch of its own
text = torch.randint(0, 512, (4, 32), generator=own).to(device)
for step in range(20):
    loss = model(input_ids=text, labels=text).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0 and step % 5 == 4:
        print(f"step {step + 1}: loss {loss.item():.3f}")

acc.save(folder / "adapters", model, optimizer, only="trained")  # resumes on any number of ranks
acc.save_pretrained(model, folder / "peft")  # for PeftModel.from_pretrained
