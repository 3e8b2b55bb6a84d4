"""GRPO with a stand-in for the inference engine, on any number of ranks.

    torchrun --nproc-per-node 2 examples/inference/grpo.py

Each step: stream the weights to the engine, park the model, generate groups of completions, unpark, reward, log-probabilities,
step. The engine is a whole copy of the model on each rank; vLLM or SGLang would have the parked model's memory here.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import accordion as acc

VOCABULARY, WIDTH, PROMPTS, GROUP, NEW_TOKENS = 32, 24, 4, 6, 5
LIKED = 7  # the reward counts this token


class Policy(nn.Module):
    """A small language model: each token depends on the mean of the embeddings before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.hidden = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)  # (batch, seq, width)
        counts = torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]
        return self.head(x + self.hidden(x.cumsum(1) / counts))  # (batch, seq, vocabulary)


class Engine:
    """The stand-in: generates with weights that it is sent."""

    def __init__(self) -> None:
        self.model = Policy()

    def update_weight(self, name: str, tensor: Tensor) -> None:
        self.model.get_parameter(name).data.copy_(tensor)

    @torch.no_grad()
    def generate(self, prompts: Tensor, random: torch.Generator) -> Tensor:
        """Return `prompts` (batch, seq) with `NEW_TOKENS` sampled tokens each."""
        tokens = prompts
        for _ in range(NEW_TOKENS):
            chances = self.model(tokens)[:, -1].softmax(-1)
            tokens = torch.cat([tokens, torch.multinomial(chances, 1, generator=random)], 1)
        return tokens


def grpo_loss(model: nn.Module, tokens: Tensor) -> tuple[Tensor, float]:
    """Return (loss of completions `tokens`, whose groups are neighbours; their mean reward)."""
    rewards = (tokens[:, -NEW_TOKENS:] == LIKED).float().sum(1).view(PROMPTS, GROUP)
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    logits = model(tokens[:, :-1])[:, -NEW_TOKENS:]
    log_probs = -F.cross_entropy(logits.flatten(0, 1), tokens[:, -NEW_TOKENS:].flatten(), reduction="none")
    return -(advantages.view(-1, 1) * log_probs.view(-1, NEW_TOKENS)).mean(), rewards.mean().item()


def train(steps: int, ranks: Sequence[int], sharded: bool = True) -> list[tuple[float, float]]:
    """Return (loss, mean reward) of each step over the prompts of `ranks`: this rank's own, or those of all on one process."""
    torch.manual_seed(0)
    model: nn.Module = Policy()
    engine = Engine()
    if sharded:
        model = acc.shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.03)
    stream: Any = "start"
    history = []
    for step in range(steps):
        if sharded:
            stream = acc.stream_weights(model, changed_since=stream)
            for name, tensor in stream:
                engine.update_weight(name, tensor)
            acc.park(model, optimizer)
        else:
            engine.model.load_state_dict(model.state_dict())
        batches = []
        for rank in ranks:
            random = torch.Generator().manual_seed(100 * step + rank)
            prompts = torch.randint(VOCABULARY, (PROMPTS, 3), generator=random).repeat_interleave(GROUP, 0)
            batches.append(engine.generate(prompts, random))
        if sharded:
            acc.unpark(model, optimizer)
        results = [grpo_loss(model, tokens) for tokens in batches]
        loss = torch.stack([loss for loss, _ in results]).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        history.append((loss.item(), sum(reward for _, reward in results) / len(results)))
    return history


if __name__ == "__main__":
    acc.init("cpu")
    for step, (loss, reward) in enumerate(train(int(sys.argv[1]) if sys.argv[1:] else 40, [dist.get_rank()])):
        print(f"rank {dist.get_rank()} step {step}: loss {loss:.4f}, reward {reward:.2f}")
