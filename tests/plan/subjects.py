"""Three architectures and ways to train each, and a mixture of experts, to plan and to count on ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import accordion as acc
from accordion.bench.model import GPT, loss_of
from accordion.plan.trace.setup import Subject, TrainingSetup
from accordion.plan.trained_models import token_loss

VOCAB, WIDTH, SEQ, BATCH = 2048, 256, 128, 4


class Patches(nn.Module):
    """A vision transformer: (batch, 3, 64, 64) pictures to (batch, 100) scores."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.cut = nn.Conv2d(3, WIDTH, 4, stride=4)
        self.positions = nn.Parameter(torch.zeros(1, 256, WIDTH))
        layer = partial(nn.TransformerEncoderLayer, WIDTH, 4, 4 * WIDTH, 0.0, batch_first=True, norm_first=True)
        self.blocks = nn.ModuleList(layer() for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 100)

    def forward(self, pictures: Tensor) -> Tensor:
        x = self.cut(pictures).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


class Adapted(nn.Module):
    """A frozen linear layer, to whose output that of two trained low-rank layers is added (LoRA)."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.down = nn.Linear(inner.in_features, 8, bias=False)
        self.up = nn.Linear(8, inner.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.up(self.down(x))


def gpt() -> nn.Module:
    return GPT(vocab=VOCAB, width=WIDTH, blocks=4, heads=4, positions=SEQ)


def llama() -> nn.Module:
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, num_hidden_layers=4, num_attention_heads=4, intermediate_size=3 * WIDTH
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def mixture() -> nn.Module:
    from transformers import AutoModelForCausalLM, MixtralConfig

    config = MixtralConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
        intermediate_size=2 * WIDTH, num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def tied(model: nn.Module) -> None:
    if isinstance(model, Patches):
        model.blocks[1].linear1.weight = model.blocks[0].linear1.weight
    else:
        head, embed = (
            (model.head, model.tokens) if isinstance(model, GPT) else (model.lm_head, model.model.embed_tokens)
        )
        head.weight = embed.weight


def frozen(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(part in name for part in ("s.2.", "s.3.", "norm", "head")))


def adapted(model: nn.Module) -> None:
    model.requires_grad_(False)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and name in ("up", "up_proj", "linear1"):
                setattr(module, name, Adapted(child))


@dataclass(frozen=True, kw_only=True)
class Case:
    sharding: dict[str, Any] = field(default_factory=dict)
    ranks: int = 2
    accumulate: int = 1
    change: Callable[[nn.Module], None] | None = None
    expert_parallel: int = 1
    sequence: int = 1


BF16 = acc.Precision(params=torch.bfloat16)
CASES = {
    "full_shard": Case(),
    "shard_grad_op": Case(sharding={"strategy": acc.SHARD_GRAD_OP}),
    "shard_optim": Case(sharding={"strategy": acc.SHARD_OPTIM}),
    "no_shard": Case(sharding={"strategy": acc.NO_SHARD}),
    "hybrid_shard": Case(sharding={"strategy": acc.HYBRID_SHARD}, ranks=4),
    "checkpoint full": Case(sharding={"checkpoint_activations": "full"}),
    "checkpoint every:2, bf16": Case(sharding={"checkpoint_activations": "every:2", "precision": BF16}),
    "checkpoint selective": Case(sharding={"checkpoint_activations": "selective"}),
    "accumulate": Case(accumulate=3, sharding={"strategy": acc.SHARD_OPTIM}),
    "tied": Case(change=tied),
    "frozen": Case(change=frozen),
    "offload": Case(sharding={"offload": acc.Offload(optimizer="host")}),
    "offload all, bf16": Case(sharding={"offload": acc.Offload(params="host", optimizer="host"), "precision": BF16}),
    "inputs on the host": Case(
        sharding={"checkpoint_activations": "full", "offload": acc.Offload(activations="host"), "precision": BF16}
    ),
    "secondary": Case(sharding={"secondary": 2}, ranks=4),
    "lora": Case(change=adapted, ranks=4),
}
EXPERTS = {
    "experts on all ranks": Case(ranks=4, sharding={"precision": BF16}),
    "experts over 2": Case(ranks=4, expert_parallel=2, sharding={"precision": BF16}),
    "experts over 4, recomputed": Case(
        ranks=4, expert_parallel=4, sharding={"checkpoint_activations": "full", "precision": BF16}
    ),
}
"""Cases of the mixture alone."""
SEQUENCES = {
    "sequences over 2": Case(sequence=2),
    "sequences over 2 of 4, recomputed, bf16": Case(
        ranks=4, sequence=2, sharding={"checkpoint_activations": "full", "precision": BF16}
    ),
    "sequences over 4, bf16": Case(ranks=4, sequence=4, sharding={"precision": BF16}),
}
"""Cases of the llama alone."""
EVERY = {**CASES, **EXPERTS, **SEQUENCES}
ARCHITECTURES = {"gpt": gpt, "llama": llama, "vision": partial(Patches, 4)}


def batch_of(architecture: str) -> tuple[Tensor, Tensor]:
    if architecture == "vision":
        return torch.randn(BATCH, 3, 64, 64), torch.randint(0, 100, (BATCH,))
    return torch.randint(0, VOCAB, (BATCH, SEQ)), torch.randint(0, VOCAB, (BATCH, SEQ))


def loss(architecture: str, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    if architecture == "rows":
        return token_loss("head_rows", model, inputs, targets) / targets.numel()
    if architecture in ("llama", "mixture"):
        return loss_of(model(input_ids=inputs, use_cache=False), targets)
    return F.cross_entropy(model(inputs), targets) if architecture == "vision" else loss_of(model(inputs), targets)


def made(architecture: str, case: str, device: str) -> nn.Module:
    with torch.device(device):
        model = {**ARCHITECTURES, "mixture": mixture, "rows": llama}[architecture]().train()
        if change := EVERY[case].change:
            change(model)
    return model


def subject_of(architecture: str, case: str) -> Subject:
    return Subject(
        make=partial(made, architecture, case, "meta"),
        batch=partial(batch_of, architecture),
        loss=partial(loss, architecture),
    )


def run_of(architecture: str, case: str, engine: str = "accordion") -> TrainingSetup:
    """Return the setup on CPU ranks; of the vision model not in bf16, since oneDNN makes float32 copies inside such products."""
    c = EVERY[case]
    sharding = {k: v for k, v in c.sharding.items() if not (k == "precision" and architecture == "vision")}
    if engine == "fsdp2":
        sharding = {"units": acc.only_blocks(), **sharding}
    return TrainingSetup(
        engine=engine,
        ranks=c.ranks,
        node=max(1, c.ranks // 2),
        accumulate=c.accumulate,
        expert_parallel=c.expert_parallel,
        sequence=c.sequence,
        sharding=acc.Sharding(**sharding),
        device="cpu",
    )
