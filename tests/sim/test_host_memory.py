"""Host memory stays on the host under any default device, and a scaler's gradients there are right."""

from functools import partial
from unittest import mock

import pytest
import torch

import accordion as acc
from accordion import _torch
from tests.devices import device
from tests.sim.test_gathers import small_blocks
from tests.support import models
from tests.support.checks import assert_equal, one_loss
from tests.support.processes import run_python
from tests.support.ranked import on_world
from tests.support.reference import assert_close, grads_of

pytestmark = pytest.mark.sim


def three_steps(model, optimizer, place):
    for step in range(3):
        x = torch.randn(4, 16, generator=torch.Generator("cpu").manual_seed(step), device="cpu").to(place)
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("place", ["device", "host", "disk:{}"])
@on_world(2)
def test_a_default_device_changes_nothing(mesh, tmp_path, place):
    place = place.format(tmp_path)
    offload = acc.Offload(optimizer=place, **({} if place == "device" else {"params": place, "grads": place}))
    plain, model = small_blocks(), small_blocks()
    three_steps(plain, torch.optim.AdamW(plain.parameters(), lr=0.1), "cpu")
    with torch.device(device()):
        acc.shard(model, mesh, offload=offload)
        optimizer = acc.wrap_optimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
        three_steps(model, optimizer, device())
        acc.save(tmp_path / "c", model, optimizer)
        acc.load(tmp_path / "c", model, optimizer)
        found = acc.full_state_dict(model, rank0_only=False)
    assert_close(found, plain.state_dict(), tolerance=1.3e-6)


def scaled(mesh, offload):
    """Return the gradients after each of ten `unscale_`: torch's scaler copies the scale to the host without a wait."""
    model = acc.shard(small_blocks(), mesh, offload=offload, precision=acc.Precision(params=torch.float16))
    optimizer = acc.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.0))
    scaler = torch.amp.GradScaler(device().type, init_scale=1024.0)
    found = []
    for _ in range(10):
        scaler.scale(model(torch.ones(2, 16, device=device())).sum()).backward()
        scaler.unscale_(optimizer)
        found.append(grads_of(model))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize("place", ["host", "disk:{}"])
@on_world(2)
def test_a_scaler_reads_its_scale_after_it_has_arrived(mesh, tmp_path, place):
    on_device = scaled(mesh, acc.Offload())[0]
    for grads in scaled(mesh, acc.Offload(optimizer="host", grads=place.format(tmp_path))):
        assert_equal(grads, on_device)


BACKGROUND = """
from types import SimpleNamespace
import torch
from accordion.checkpoint.background import Saver

data = torch.arange(5 << 20, dtype=torch.uint8, device="sim")
part = SimpleNamespace(data=data)
copy = Saver().copy(SimpleNamespace(parts=[part], num_bytes=data.nbytes))
assert bytes(copy) == bytes(data.cpu().numpy())
"""


def test_a_save_in_the_background_pins_what_it_copies_and_no_more():
    """Torch's pinned allocator rounds up to powers of two: it would pin 8 MiB for 5, and this machine allows 6."""
    done = run_python("-c", BACKGROUND, SIM_PIN_LIMIT=str(6 << 20), SIM_DEVICES="1")
    assert done.returncode == 0, done.stderr


def offloaded_inputs(mesh, offload):
    """Return the gradients of a forward after another forward without a backward; copies to the host run late."""
    model = models.seeded(num_blocks=6)
    model = acc.shard(model, mesh, offload=offload, checkpoint_activations="full", debug="streams")
    with mock.patch.object(_torch, "sleep_on_device", partial(torch.sim._sleep, 20_000_000)):
        loss = one_loss(model)
        one_loss(model, 1)
        loss.backward()
    return grads_of(model)


@on_world(1)
def test_memory_of_inputs_that_nobody_wants_is_used_again_when_they_have_arrived(mesh, tmp_path):
    found = offloaded_inputs(mesh, acc.Offload(activations=f"disk:{tmp_path}"))
    assert_equal(found, offloaded_inputs(mesh, acc.Offload()))
