"""Models and batches for sequence parallelism, and the comparison with an unsharded model on whole sequences."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F

import accordion as acc
from tests.devices import device, here
from tests.support.reference import assert_close, grads_of

WORDS, TOKENS, WIDTH, HEADS = 48, 16, 32, 4
SHAPES = [(2, 1), (1, 2), (2, 2), (1, 4)]  # data x sequence ranks
DECODER = {
    "vocab_size": WORDS, "hidden_size": WIDTH, "intermediate_size": 40, "num_hidden_layers": 2, "max_position_embeddings": 64,
    "num_attention_heads": HEADS, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GPT2 = {
    "vocab_size": WORDS, "n_embd": WIDTH, "n_layer": 2, "n_head": HEADS, "n_positions": 64, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
}  # fmt: skip
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
# Class of transformers -> fields of its config.
FAMILIES: dict[str, Mapping[str, Any]] = {
    "LlamaForCausalLM": DECODER,
    "Qwen3ForCausalLM": {**DECODER, "head_dim": 8},
    "GPT2LMHeadModel": GPT2,
    "MistralForCausalLM": {**DECODER, "sliding_window": 5},
    "MixtralForCausalLM": {**DECODER, **EXPERTS},
    # Its attention has sinks, one parameter per head; windows in every second layer.
    "GptOssForCausalLM": {**DECODER, **EXPERTS, "head_dim": 8, "sliding_window": 5, "attn_implementation": "eager"},
}


def family(name: str, **fields: Any) -> Any:
    """Return a tiny model of transformers with the same weights on every rank."""
    import transformers

    cls = getattr(transformers, name)
    config = cls.config_class(**{**FAMILIES.get(name, DECODER), **fields})
    config.use_cache = False  # with a cache, transformers attends over the ends of packed sequences
    return seeded(lambda: cls(config))


def seeded(build: Callable[[], nn.Module]) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return here(build())


class Own(nn.Module):
    """A model of one's own: grouped heads (one key/value head), a loss of logits or `linear_cross_entropy`."""

    def __init__(self, mesh: DeviceMesh | None = None, chunked: bool = False) -> None:
        super().__init__()
        self.mesh, self.chunked = mesh, chunked
        self.embed, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList(Attending(mesh) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, input_ids: Tensor, labels: Tensor, position_ids: Tensor | None = None, **counted: Any) -> Tensor:
        positions = torch.arange(input_ids.shape[1], device=input_ids.device) if position_ids is None else position_ids
        x = self.embed(input_ids) + self.places(positions)
        for block in self.blocks:
            x = block(x)
        targets = counted.get("shift_labels", F.pad(labels[:, 1:], (0, 1), value=-100))
        if self.chunked:
            return acc.linear_cross_entropy(x, self.head, targets, over_ranks=True)
        total = F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten(), reduction="sum")
        return total / counted.get("num_items_in_batch", (targets != -100).sum())


class Attending(nn.Module):
    """A block with four heads of queries and one of keys and values, which has another head dim."""

    def __init__(self, mesh: DeviceMesh | None) -> None:
        super().__init__()
        self.mesh, self.inputs, self.out = mesh, nn.Linear(WIDTH, WIDTH + 8 + 6), nn.Linear(HEADS * 6, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.inputs(x).split([WIDTH, 8, 6], -1)
        heads = [t.unflatten(-1, (-1, d)).transpose(1, 2) for t, d in ((q, 8), (k, 8), (v, 6))]
        options = {"is_causal": True, "enable_gqa": True}
        if self.mesh is None:
            out = F.scaled_dot_product_attention(*heads, **options)
        else:
            out = acc.sequence_attention(*heads, self.mesh, **options)
        return x + self.out(out.transpose(1, 2).flatten(2))


def plain_batch(seed: int, rows: int = 2) -> dict[str, Tensor]:
    ids = torch.randint(3, WORDS, (rows, TOKENS), generator=torch.Generator().manual_seed(seed)).to(device())
    return {"input_ids": ids, "labels": ids.masked_fill(ids % (4 + seed) == 0, -100)}


def padded_batch(seed: int) -> dict[str, Tensor]:
    """The first sequence begins with padding; the second ends with it, inside of the part of each rank but the first of two."""
    batch, places = plain_batch(seed), torch.arange(TOKENS, device=device())
    mask = torch.stack([places >= 3, places < TOKENS - 7])
    return {**batch, "labels": batch["labels"].masked_fill(~mask, -100), "attention_mask": mask.long()}


def packed_batch(seed: int) -> dict[str, Tensor]:
    """Three texts in each sequence, none of which ends where a part does."""
    batch = plain_batch(seed)
    positions = torch.cat([torch.arange(n) for n in (7, 6, 3)]).to(device()).expand(2, -1)
    return {**batch, "labels": batch["labels"].masked_fill(positions == 0, -100), "position_ids": positions}


BATCHES = {"plain": plain_batch, "padded": padded_batch, "packed": packed_batch}


def all_ranks(mesh: DeviceMesh) -> DeviceMesh:
    """Return a 1-D mesh of all ranks of a (data, sequence) mesh, as `shard` has by default."""
    data, sequence = mesh["dp"], mesh["sp"]
    if data.size() == 1 or sequence.size() == 1:
        return sequence if data.size() == 1 else data
    return init_device_mesh(device().type, (mesh.size(),))


def loss_of(out: Any) -> Tensor:
    return out if isinstance(out, Tensor) else out.loss


def check_equal(
    mesh: DeviceMesh,
    plain: nn.Module,
    model: nn.Module,
    batches: Sequence[Mapping[str, Tensor]],
    say: str = "",
    joined: bool = False,
) -> None:
    """Compare loss and gradients of the sharded `model`, on parts, with those of `plain`, on the whole batch of each data rank.

    `joined`: the loss is the mean over the tokens of all data ranks, and not the mean of their means.
    """
    wholes = [{name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}] if joined else batches
    whole = torch.stack([loss_of(plain(**batch)) for batch in wholes]).mean()
    whole.backward()
    parts = acc.split_sequence(batches[mesh["dp"].get_local_rank()], mesh["sp"])
    loss = loss_of(model(**parts))
    loss.backward()
    mean = loss.detach() / mesh.size()
    dist.all_reduce(mean, group=all_ranks(mesh).get_group())
    torch.testing.assert_close(mean, whole.detach(), rtol=1e-5, atol=1e-5, msg=say)
    try:
        assert_close(grads_of(model), {name: p.grad for name, p in plain.named_parameters()}, 1e-5)
    except AssertionError as error:
        raise AssertionError(say) from error
    plain.zero_grad()
    model.zero_grad()
