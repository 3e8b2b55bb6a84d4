"""What sequence parallelism sends and keeps, its random numbers, kernels, batches and tiles, and what it refuses."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import accordion as acc
from accordion import _torch
from accordion.sequence.tiles import tile_mlps
from tests.devices import device
from tests.sequence.subjects import (
    BATCHES,
    DECODER,
    HEADS,
    TOKENS,
    WIDTH,
    all_ranks,
    check_equal,
    family,
    packed_batch,
    padded_batch,
    plain_batch,
)
from tests.support import forked
from tests.support.meters import Wire
from tests.support.ranked import on_mesh, on_world
from tests.support.sample import sampled

LAYERS, KV_HEADS, FLOAT = 2, 2, 4


@pytest.mark.parametrize("num_ranks", [2, 4])
@on_mesh(lambda given: ((1, given.pop("num_ranks")), ("dp", "sp")), takes=("num_ranks",))
def test_bytes_sent_and_kept(mesh: Any) -> None:
    """Two exchanges per layer and pass, no other message but one of position ids; activations are divided by the ranks."""
    ranks, plain, model = mesh.size(), family("LlamaForCausalLM"), family("LlamaForCausalLM")
    acc.sequence_parallel(model, mesh["sp"])
    batch = plain_batch(0)
    parts = acc.split_sequence(batch, mesh["sp"])
    with Wire() as wire:
        kept, loss = kept_bytes(model, parts)
    heads = HEADS + 2 * max(KV_HEADS, ranks)
    part = 2 * (TOKENS // ranks) * (WIDTH // HEADS) * FLOAT  # bytes of one head's activations on a rank
    forward = [call.num_bytes for call in wire.calls if call.numels and call.dtype == torch.float32]
    assert forward == [heads * part, HEADS * part] * LAYERS
    assert sum(call.num_bytes for call in wire.calls) - sum(forward) == 2 * TOKENS * 8
    with Wire() as wire:
        loss.backward()
    assert [call.num_bytes for call in wire.calls] == [HEADS * part, heads * part] * LAYERS
    if device().type == "cpu":  # on other devices torch may compute attention by kernels that keep other tensors
        # Attention keeps its output, and the next layer keeps it in the other layout; repeated heads are kept too.
        more = LAYERS * part * (HEADS + heads - HEADS - 2 * KV_HEADS)
        assert kept == pytest.approx(kept_bytes(plain, batch)[0] / ranks + more, rel=0.005)


def kept_bytes(model: nn.Module, batch: Any) -> tuple[int, Tensor]:
    """Return (bytes that autograd keeps from the forward, without parameters; loss)."""
    kept, params = dict[int, int](), {p.untyped_storage().data_ptr() for p in model.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in params:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(**batch).loss
    return sum(kept.values()), loss


@on_world(2)
def test_dropout_differs_by_head_and_repeats(mesh: Any) -> None:
    """With equal seeds on all ranks, also in a recomputation, which finds the device's own generator as it was."""
    x = torch.ones(1, 4, 8, 8, device=device(), requires_grad=True)

    def attend(x: Tensor) -> Tensor:
        return acc.sequence_attention(x, x, x, mesh, dropout_p=0.5)

    results = []
    for recomputed in (False, True):
        torch.manual_seed(5)
        out = checkpoint(attend, x, use_reentrant=False) if recomputed else attend(x)
        out = out + attend(x)
        (grad,) = torch.autograd.grad(out.square().sum(), x)
        results.append((out.detach(), grad))
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)
    heads = attend(x)[0]
    assert all(not heads[i].equal(heads[j]) for i in range(4) for j in range(i))
    assert not attend(x)[0].equal(heads)


@on_world(2)
def test_flash_kernels_get_whole_positions_and_padding(mesh: Any) -> None:
    """A stand-in for transformers' flash attention, which has no mask and takes packed sequences by their position ids."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    seen: list[Any] = []

    def flash(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, position_ids: Any = None, **kwargs: Any) -> Any:
        assert module.config._attn_implementation == "flash_stand_in"
        assert module.num_key_value_groups == q.shape[1] // k.shape[1]
        seen.append((mask, position_ids))
        return sdpa_attention_forward(module, q, k, v, None, **kwargs)

    AttentionInterface.register("flash_stand_in", flash)
    AttentionMaskInterface.register("flash_stand_in", AttentionMaskInterface()["flash_attention_2"])
    model = family("LlamaForCausalLM")
    config = model.config
    config._attn_implementation, config.use_cache = "flash_stand_in", True
    acc.sequence_parallel(model, mesh)
    assert config._attn_implementation == "flash_stand_in"  # another model may have this object
    packed, padded = packed_batch(0), padded_batch(0)
    for batch in (plain_batch(0), packed, padded):
        model(**acc.split_sequence(batch, mesh))
    assert seen[0] == (None, None)
    assert seen[LAYERS][0] is None
    assert seen[LAYERS][1].equal(packed["position_ids"])
    assert seen[-1][0].equal(padded["attention_mask"].bool())
    assert seen[-1][1] is None
    assert model.config.use_cache  # a saved config keeps it, for generation
    assert model(**acc.split_sequence(plain_batch(0), mesh)).past_key_values is None
    copy.deepcopy(model)(**acc.split_sequence(plain_batch(0), mesh))  # a copy shares the group, which cannot be copied


@on_world(2)
def test_split_sequence(mesh: Any) -> None:
    batch = {**packed_batch(0), "inputs_embeds": torch.randn(2, TOKENS, 3), "mask": torch.ones(2, 1, TOKENS, TOKENS)}
    batch |= {"ids_of_texts": torch.arange(2), "name": "x", "position_ids": batch["position_ids"].expand(3, 2, -1)}
    parts, half = acc.split_sequence(batch, mesh), TOKENS // 2
    mine = slice(mesh.get_rank() * half, (mesh.get_rank() + 1) * half)
    shifted = F.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    assert parts["shift_labels"].equal(shifted[:, mine])
    assert parts["position_ids"].equal(batch["position_ids"][..., mine])
    assert parts["inputs_embeds"].equal(batch["inputs_embeds"][:, mine])
    assert all(parts[name] is batch[name] for name in ("mask", "ids_of_texts", "name"))
    assert parts["num_items_in_batch"] == (shifted != -100).sum() / 2
    assert acc.split_sequence(batch | {"num_items_in_batch": 6}, mesh)["num_items_in_batch"] == 3
    unshifted = acc.split_sequence(batch, mesh, shift=False)
    assert "shift_labels" not in unshifted
    assert unshifted["num_items_in_batch"] == (batch["labels"] != -100).sum() / 2


@on_mesh((1, 2), ("dp", "sp"))
def test_bad_input(mesh: Any) -> None:
    import transformers

    group, batch, refused = mesh["sp"], plain_batch(0), lambda words: pytest.raises(acc.UsageError, match=words)
    q = torch.ones(1, 3, 4, 2, device=device())

    def wrong(name: str, words: str, **fields: Any) -> None:
        model = getattr(transformers, name)(getattr(transformers, name).config_class(**fields))
        before = model.config._attn_implementation
        with refused(words):
            acc.sequence_parallel(model, group)
        assert model.config._attn_implementation == before

    wrong("BloomForCausalLM", "not in transformers' registry", hidden_size=8, n_layer=1, n_head=2)
    wrong(
        "LlamaForCausalLM",
        "3 attention heads cannot be divided",
        **DECODER | {"hidden_size": 48, "num_attention_heads": 3},
    )
    wrong("MambaForCausalLM", "recurrent layers", hidden_size=8, num_hidden_layers=1)
    longrope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    wrong("LlamaForCausalLM", "longrope", **DECODER, rope_parameters=longrope)
    wrong("T5Model", "an encoder and a decoder", d_model=8, d_ff=8, num_layers=1)
    model, sharded = family("LlamaForCausalLM"), acc.shard(family("LlamaForCausalLM"), group)
    with refused("1-D"):
        acc.sequence_parallel(model, mesh)
    with refused("no model of transformers"):
        acc.sequence_parallel(nn.Linear(2, 2), group)
    with refused("sharded already"):
        acc.sequence_parallel(sharded, group)
    acc.sequence_parallel(model, group)
    with refused("sequence parallel already"):
        acc.sequence_parallel(model, group)
    with refused("has no key/value cache"):
        model(batch["input_ids"], use_cache=True)
    with refused("does not generate"):
        model.generate(batch["input_ids"], max_new_tokens=2)
    with refused(r"pass it \*\*split_sequence"):
        model(**batch)
    with refused("3 attention heads"):
        acc.sequence_attention(q, q, q, group)
    with refused("1 queries and 4 keys"):
        acc.sequence_attention(q[:, :2, :1], q, q, group)
    with refused("15 tokens cannot be divided over 2 ranks; pad them"):
        acc.split_sequence({"input_ids": batch["input_ids"][:, 1:]}, group)
    with refused("a batch of labels"):
        acc.split_sequence({"labels": batch["labels"]}, group)
    with mock.patch.object(_torch, "kept_with_job", return_value=[]), refused("another batch than rank 0"):
        acc.split_sequence(plain_batch(mesh.get_rank()), group)


def test_the_example_learns_across_parts(capfd: pytest.CaptureFixture[str]) -> None:
    example = Path(__file__).parents[2] / "examples" / "long_context.py"
    assert forked.script_under_torchrun(example, 2) == 0
    losses = [
        float(line.split("loss ")[1].split(",")[0]) for line in capfd.readouterr().out.splitlines() if "loss " in line
    ]
    assert losses[-1] < 0.5 * losses[0]


# -- modules that compute a few tokens at a time


CASES = [("LlamaForCausalLM", how) for how in ("none", "full")] + [("GPT2LMHeadModel", "selective")]


def mlps(model: nn.Module) -> list[nn.Module]:
    return [module for name, module in model.named_modules() if name.endswith(".mlp")]


@pytest.mark.parametrize(("name", "recomputed"), sampled(CASES, lambda name, recomputed: recomputed == "full"))
@on_mesh((1, 2), ("dp", "sp"))
def test_tiles_train_as_the_unsharded_model(mesh: Any, name: str, recomputed: Any) -> None:
    plain, model = family(name), family(name)
    for mlp in mlps(model):
        acc.tile(mlp, 3)  # which does not divide the tokens
    acc.sequence_parallel(model, mesh["sp"])
    acc.shard(model, all_ranks(mesh), checkpoint_activations=recomputed)
    for kind, make in BATCHES.items():
        check_equal(mesh, plain, model, [make(0)], f"{name} {kind}")


def test_a_tiled_module_keeps_its_input_alone() -> None:
    plain, model = family("LlamaForCausalLM"), family("LlamaForCausalLM")
    for mlp in mlps(model):
        acc.tile(mlp, 4)
    batch = plain_batch(0)
    num_bytes = [kept_bytes(one, batch)[0] for one in (plain, model)]
    tokens, inner = batch["input_ids"].numel(), mlps(plain)[0].gate_proj.out_features
    # gate, its activation, up and their product; the input is kept in any case.
    assert num_bytes[0] - num_bytes[1] == pytest.approx(len(mlps(model)) * 4 * tokens * inner * 4, rel=0.01)


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor, *, p: float) -> Tensor:
        return F.dropout(x * self.scale, p)


def test_a_recomputation_draws_the_same_numbers_and_a_copy_has_its_own_weights() -> None:
    module = acc.tile(Dropping(), 3)
    x = torch.ones(2, 7, WIDTH, requires_grad=True)
    out = module(x, p=0.5)
    out.sum().backward()
    assert x.grad is not None
    assert x.grad.equal(out.detach())
    twin = copy.deepcopy(module)
    nn.init.zeros_(twin.scale)
    assert not twin(x, p=0.0).any()
    with torch.no_grad():
        assert module(x, p=0.0).equal(x)


def test_modules_that_cannot_be_tiled_are_refused() -> None:
    with pytest.raises(acc.UsageError, match=r"num_tiles=0; pass the number of parts"):
        acc.tile(nn.Linear(2, 2), 0)
    with pytest.raises(acc.UsageError, match="Linear has been replaced; call tile once"):
        acc.tile(acc.tile(nn.Linear(2, 2), 2), 2)
    with pytest.raises(acc.UsageError, match="MixtralForCausalLM has no modules called mlp without experts; leave it"):
        tile_mlps(family("MixtralForCausalLM"), 2)
