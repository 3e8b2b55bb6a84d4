"""`shard` without a trainer's integration: plain loops learn as unsharded, common uses of a library's model work or raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import accordion as acc
from tests.integrations.jobs import library_job, needs
from tests.support.ranked import on_job

pytestmark = pytest.mark.cpu("plain tensors lie there, batches are drawn and compared there")
libraries = needs("transformers", "accelerate")
STEPS, WIDTH = 4, 8


def net(seed: int, out: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh()), nn.Linear(16, out))


def drawn(rank: int, step: int) -> Tensor:
    return torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def descend(optimizer: torch.optim.Optimizer, losses: list[Tensor]) -> float:
    """Make a step down the mean loss of this process's batches, and return the mean."""
    loss = torch.stack(losses).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)


def gan(prepare: Callable[[nn.Module], nn.Module], ranks: list[int]) -> list[float]:
    """Train a generator and a discriminator; gradients of the generator's loss for the discriminator are not used."""
    generator, critic = prepare(net(0, WIDTH)), prepare(net(1, 1))
    first, second = optimizer_of(generator), optimizer_of(critic)
    found = []
    for step in range(STEPS):
        noise, real = ([drawn(rank, 2 * step + kind) for rank in ranks] for kind in (0, 1))
        judged = [(critic(x), critic(generator(z).detach())) for x, z in zip(real, noise, strict=True)]
        found.append(descend(second, [F.softplus(-good).mean() + F.softplus(bad).mean() for good, bad in judged]))
        found.append(descend(first, [F.softplus(-critic(generator(z))).mean() for z in noise]))
        second.zero_grad()
    return found


def alike(found: list[float], expected: list[float]) -> None:
    """Compare the mean over ranks of the losses with those of the unsharded run."""
    mean = torch.tensor(found)
    dist.all_reduce(mean)
    assert (mean / dist.get_world_size()).tolist() == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert len({round(loss, 3) for loss in expected}) > 1, "it learned something"


@on_job(2)
def test_a_plain_loop_of_two_models_learns_as_unsharded(mesh: Any) -> None:
    alike(gan(lambda model: acc.shard(model, mesh), [mesh.get_local_rank()]), gan(lambda model: model, [0, 1]))


# -- models of transformers

TOKENS, PIXELS = torch.arange(2, 10)[None], torch.randn(2, 3, 16, 16)


def t5() -> Any:
    import transformers

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    special = {"decoder_start_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, **special)).eval()


def clip() -> Any:
    import transformers

    torch.manual_seed(0)
    tower = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    words = {"vocab_size": 64, "max_position_embeddings": 16, "bos_token_id": 0, "eos_token_id": 1, **tower}
    picture = {"image_size": 16, "patch_size": 8, **tower}
    return transformers.CLIPModel(transformers.CLIPConfig(text_config=words, vision_config=picture, projection_dim=16))


def scaled(model: Any) -> Any:
    out = model(input_ids=TOKENS.expand(2, -1), pixel_values=PIXELS)
    return (out.image_embeds @ out.text_embeds.T * model.logit_scale.exp()).mean()


def generated(model: Any) -> Any:
    return model.generate(TOKENS, max_new_tokens=6, do_sample=False)


# What is done to the model, and the method to make an entry point, if one does it.
PROGRAMS: dict[str, tuple[Callable[[], Any], Callable[[Any], torch.Tensor], str]] = {
    "T5 generates": (t5, generated, "generate"),
    "a scale in the loss": (clip, scaled, ""),
}


@libraries
@pytest.mark.parametrize("name", PROGRAMS)
@on_job(2)
def test_a_parameter_outside_of_a_forward_raises_and_what_errors_md_says_works(mesh: Any, name: str) -> None:
    make, use, method = PROGRAMS[name]
    plain = make()
    model = acc.shard(make(), mesh)
    with pytest.raises(RuntimeError, match=r"got mixed torch\.Tensor and DTensor"):
        use(model)
    expected = use(plain)
    if method:
        acc.entry_point(model, method)
        torch.testing.assert_close(use(model), expected)
    with acc.full_params(model):
        torch.testing.assert_close(use(model), expected)


@libraries
@on_job(2)
def test_a_sharded_model_in_accelerates_prepare(mesh: Any) -> None:
    import accelerate

    with library_job():
        model = acc.shard(nn.Linear(8, 8), mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        theirs = accelerate.Accelerator(cpu=True)
        with pytest.raises(
            acc.UsageError, match=r"this model is sharded, and DistributedDataParallel.*accordion.integr"
        ):
            theirs.prepare(model, optimizer)
    with library_job():
        from accordion.integrations.accelerate import Accelerator

        one = Accelerator(cpu=True)
        model, optimizer = one.prepare(model, optimizer)
        one.backward(model(torch.ones(2, 8)).sum())
        optimizer.step()
