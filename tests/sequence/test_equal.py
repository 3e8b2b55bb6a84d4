"""Training on parts of sequences equals that of an unsharded model on whole ones, in losses, gradients and steps."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import accordion as acc
from tests.devices import device
from tests.pool import Pool
from tests.sequence.subjects import (
    BATCHES,
    FAMILIES,
    SHAPES,
    Attending,
    Own,
    all_ranks,
    check_equal,
    family,
    plain_batch,
    seeded,
)
from tests.support.checks import logged, step_all
from tests.support.ranked import on_mesh
from tests.support.reference import adamw, assert_close, params_of
from tests.support.sample import sampled

NAMES = ("dp", "sp")
on_shapes = on_mesh(lambda given: (given.pop("shape"), NAMES), takes=("shape",))
GRID = [(shape, name) for shape in SHAPES for name in FAMILIES]


@pytest.mark.parametrize(("shape", "name"), sampled(GRID, lambda shape, name: name[:5] == "Llama" or shape[1] == 4))
@on_shapes
def test_families_of_transformers(mesh: Any, name: str) -> None:
    plain, model = family(name), family(name)
    with logged() as messages:
        acc.shard(acc.sequence_parallel(model, mesh["sp"]), all_ranks(mesh))
        for kind, make in BATCHES.items():
            if (name, kind) != ("GptOssForCausalLM", "packed"):  # transformers packs it for flash attention alone
                check_equal(mesh, plain, model, [make(seed) for seed in range(mesh["dp"].size())], f"{name} {kind}")
    assert len([message for message in messages if "key/value heads" in message]) <= 1


@pytest.mark.parametrize("shape", SHAPES)
@on_shapes
def test_a_model_of_ones_own(mesh: Any) -> None:
    for chunked in (False, True):
        plain, model = seeded(Own), seeded(partial(Own, mesh["sp"], chunked))
        acc.shard(model, all_ranks(mesh), units={Attending, nn.Linear, nn.Embedding})
        batches = [plain_batch(seed) for seed in range(mesh["dp"].size())]
        check_equal(mesh, plain, model, batches, f"{chunked=}", joined=chunked)


@on_mesh((1, 2), NAMES)
def test_full_attention(mesh: Any) -> None:
    """An encoder, with and without padding; a sum over the tokens of a rank is multiplied by the ranks."""
    plain, model = (family("BertModel", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0) for _ in range(2))
    acc.shard(acc.sequence_parallel(model, mesh["sp"]), all_ranks(mesh))
    for batch in (BATCHES["plain"](0), BATCHES["padded"](0)):
        batch.pop("labels")
        plain(**batch).last_hidden_state.pow(3).sum().backward()
        parts = acc.split_sequence(batch, mesh["sp"])
        (model(**parts).last_hidden_state.pow(3).sum() * mesh.size()).backward()
        assert set(parts) == {*batch, "position_ids"}
        grads = {name: p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None}
        wanted = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
        assert_close(grads, wanted, 1e-5, least=1.0)  # those of key biases are zero but for rounding
        plain.zero_grad()
        model.zero_grad()


@pytest.mark.slow
@pytest.mark.cpu("other devices have other kernels, and the simulated one has none")
@on_mesh((1, 2), NAMES)
def test_flex_attention(mesh: Any) -> None:
    """Outputs alone, since torch has no backward of flex attention on the CPU."""
    plain, model = (family("LlamaForCausalLM", attn_implementation="flex_attention", hidden_size=64) for _ in range(2))
    acc.sequence_parallel(model, mesh["sp"])
    for make in BATCHES.values():
        batch = make(0)
        batch.pop("labels")
        with torch.no_grad(), warnings.catch_warnings(action="ignore"):
            expected = plain(**batch).logits.chunk(2, dim=1)[mesh["sp"].get_local_rank()]
            logits = model(**acc.split_sequence(batch, mesh["sp"])).logits
        mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
        own = mask.chunk(2, dim=1)[mesh["sp"].get_local_rank()]
        torch.testing.assert_close(logits[own], expected[own], rtol=1e-5, atol=1e-6)


OPTIONS: dict[str, dict[str, Any]] = {
    "full_shard": {
        "checkpoint_activations": "full",
        "offload": "params=disk,grads=disk,optimizer=disk,activations=disk",
    },
    "shard_grad_op": {"checkpoint_activations": "full", "offload": "activations=host"},
    "shard_optim": {"offload": "optimizer=host"},
    "hybrid_shard": {"checkpoint_activations": "every:2"},
    "hybrid_shard_optim": {"checkpoint_activations": "selective"},
    "no_shard": {},
}


@pytest.mark.parametrize("strategy", sampled(OPTIONS, {"full_shard", "hybrid_shard"}.__contains__))
@on_mesh((2, 2), NAMES)
def test_steps_with_accumulation_and_clipping(mesh: Any, tmp_path: Path, strategy: str) -> None:
    plain, model = family("LlamaForCausalLM"), family("LlamaForCausalLM")
    options = dict(OPTIONS[strategy])
    if "offload" in options:
        options["offload"] = options["offload"].replace("disk", f"disk:{tmp_path}")
    shape, names = ((2, 2), ("replicate", "shard")) if "hybrid" in strategy else ((4,), ("shard",))
    over = init_device_mesh(device().type, shape, mesh_dim_names=names)
    acc.shard(acc.sequence_parallel(model, mesh["sp"]), over, strategy=strategy, **options)
    optimizers = adamw(plain.parameters()), acc.wrap_optimizer(adamw(model.parameters()))
    for step in range(2):
        for micro in range(2):
            batches = [plain_batch(4 * step + 2 * micro + rank) for rank in range(2)]
            (sum(plain(**batch).loss for batch in batches) / 4).backward()
            parts = acc.split_sequence(batches[mesh["dp"].get_local_rank()], mesh["sp"])
            with acc.no_sync(model) if micro == 0 else nullcontext():
                (model(**parts).loss / 2).backward()
        norms = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5), acc.clip_grad_norm_(model, 0.5)
        torch.testing.assert_close(norms[1], norms[0], rtol=1e-5, atol=0)
        step_all(optimizers)
    acc.synchronize(model)
    assert_close(params_of(model), dict(plain.named_parameters()), 1e-4)


def train(mesh: Any, steps: range, resume: Path | None, save: Path | None) -> None:
    """Train on two sequences a step, whatever the ranks; compare with the unsharded model after the last step."""
    plain, model = family("LlamaForCausalLM"), family("LlamaForCausalLM")
    acc.shard(acc.sequence_parallel(model, mesh["sp"]), all_ranks(mesh))
    optimizers = adamw(plain.parameters()), acc.wrap_optimizer(adamw(model.parameters()))
    if resume is not None:
        acc.load(resume, model, optimizers[1])
    data = mesh["dp"]
    for step in range(steps.stop):
        ids = plain_batch(step)["input_ids"]
        plain(input_ids=ids, labels=ids).loss.backward()
        step_all(optimizers[:1])
        if step >= steps.start:
            own = ids.chunk(data.size())[data.get_local_rank()]
            model(**acc.split_sequence({"input_ids": own, "labels": own}, mesh["sp"])).loss.backward()
            step_all(optimizers[1:])
    assert_close(params_of(model), dict(plain.named_parameters()), 1e-4)
    if save is not None:
        acc.save(save, model, optimizers[1])


def test_a_checkpoint_resumes_on_other_sequence_ranks(world: Pool, tmp_path: Path) -> None:
    world.run_mesh((1, 4), NAMES, train, range(2), None, tmp_path / "first")
    world.run_mesh((2, 2), NAMES, train, range(2, 4), tmp_path / "first", tmp_path / "second")
    world.run_mesh((1, 1), NAMES, train, range(4, 5), tmp_path / "second", None)
