"""`accordion.compat.fsdp2` and torch's own FSDP2 in one process: equal numbers, names, shapes and placements."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as theirs
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import accordion as acc
import accordion.compat.fsdp2 as ours
from accordion.engine.order import Phase
from tests.devices import device
from tests.inside import units_of
from tests.support import models
from tests.support.checks import assert_close, batch, mean_grads, one_loss, step_all
from tests.support.meters import Wire
from tests.support.ranked import on_mesh, on_world
from tests.support.reference import grads_of, params_of, whole
from tests.support.sample import sampled

SIDES = (theirs, ours)


def sharded(api: Any, mesh: Any, build: Any = models.plain, inner: Any = None, **options: Any) -> models.Tiny:
    """Return the model that `build` creates, sharded block by block and then as a whole; blocks have the options `inner` too."""
    model = build()
    for block in model.blocks:
        api.fully_shard(block, mesh=mesh, **{**options, **(inner or {})})
    return api.fully_shard(model, mesh=mesh, **options)


def both(mesh: Any, build: Any = models.plain, **options: Any) -> list[models.Tiny]:
    return [sharded(api, mesh, build, **options) for api in SIDES]


def assert_gradients_are_means(
    mesh: Any, plain: nn.Module, model: nn.Module, step: int = 0, tolerance: float = 1e-6
) -> Any:
    """Run a backward of both models on this rank's batch, and compare gradients of the sharded `model` with the means over ranks
    of those of the unsharded `plain`. Return the means. Collective."""
    for m in (plain, model):
        one_loss(m, step).backward()
    means = mean_grads(mesh, plain)
    assert_close(grads_of(model), means, tolerance)
    return means


def assert_trains_as_plain(mesh: Any, plain: nn.Module, model: nn.Module) -> None:
    """Train both models; gradients of the sharded `model` are the means over ranks of those of the unsharded `plain`."""
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model)]
    for step in range(2):
        means = assert_gradients_are_means(mesh, plain, model, step, 1e-5)
        for name, p in plain.named_parameters():
            p.grad = means[name]
        step_all(optimizers)


def assert_same_gradients(reference: nn.Module, model: nn.Module, tolerance: float = 1e-6) -> None:
    """Compare sharded gradients, with errors relative to the largest gradient of each parameter on any rank. Collective."""
    wanted, found = [{n: p.grad for n, p in m.named_parameters()} for m in (reference, model)]
    assert found.keys() == wanted.keys()
    by_mesh: dict[Any, list[tuple[str, Tensor, Tensor]]] = {}
    for name, a in wanted.items():
        b = found[name]
        assert (a is None) == (b is None), name
        if a is not None:
            assert isinstance(a, DTensor) == isinstance(b, DTensor), name
            assert not isinstance(a, DTensor) or (a.placements, a.device_mesh) == (b.placements, b.device_mesh), name
            pair = [t.to_local() if isinstance(t, DTensor) else t for t in (a, b)]
            by_mesh.setdefault(getattr(a, "device_mesh", None), []).append((name, *pair))
    for mesh, rows in by_mesh.items():
        largest = torch.stack([torch.stack([largest_of(a), largest_of(b - a)]) for _, a, b in rows])
        for i in range(0 if mesh is None else mesh.ndim):
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=mesh.get_group(i))
        for (name, _, _), (scale, error) in zip(rows, largest.tolist(), strict=True):
            assert error <= tolerance * max(scale, 1e-30), f"{name} differs by {error}"


def assert_backwards_agree(pair: Any, steps: int = 2, **options: Any) -> None:
    """Run backwards of both models on the same batches, and compare the gradients, which add up. Collective."""
    for step in range(steps):
        for m in pair:
            one_loss(m, step).backward()
    assert_same_gradients(*pair, **options)


def largest_of(rows: Tensor) -> Tensor:
    return rows.float().abs().max() if rows.numel() else torch.zeros((), device=device())


def describe(tensor: Any) -> tuple[Any, ...]:
    local = tensor.to_local()
    return tensor.shape, tensor.dtype, tensor.placements, tensor.device_mesh, local.shape, tensor.requires_grad


def assert_same_parameters(reference: nn.Module, model: nn.Module) -> None:
    """Compare the names and placements of sharded parameters."""
    wanted, found = (
        {n: describe(p) for n, p in m.named_parameters() if isinstance(p, DTensor)} for m in (reference, model)
    )
    assert found == wanted


def trains_as_torchs(mesh, build: str, **options: Any) -> None:
    reference, model = both(mesh, getattr(models, build), **options)
    assert type(model).__name__ == type(reference).__name__ == "FSDPTiny"
    assert isinstance(model, ours.FSDPModule)
    assert isinstance(model, models.Tiny)
    wanted, found = reference.state_dict(), model.state_dict()
    assert list(found) == list(wanted)
    assert {n: describe(t) for n, t in found.items()} == {n: describe(t) for n, t in wanted.items()}
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in reference.named_parameters()]
    held = list(model.parameters())
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (reference, model)]
    for step in range(2):
        losses = [one_loss(m, step) for m in (reference, model)]
        assert torch.allclose(*losses, rtol=1e-6), losses
        for loss in losses:
            loss.backward()
        assert_same_gradients(reference, model)
        for p in model.parameters():
            assert p.grad is None or describe(p.grad)[:5] == describe(p)[:5]
        norms = [torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1) for m in (reference, model)]
        assert torch.allclose(*[n.full_tensor() for n in norms], rtol=1e-5)
        step_all(optimizers)
    assert all(a is b for a, b in zip(held, model.parameters(), strict=True)), (
        "the optimizer's parameters are the model's"
    )
    assert_close(params_of(model), params_of(reference), 1e-5)
    assert {n: describe(t) for n, t in model.state_dict().items()} == {
        n: describe(t) for n, t in reference.state_dict().items()
    }


# "narrow" has rows that ranks do not divide.
@pytest.mark.parametrize(
    ("build", "num_ranks"),
    sampled(
        [("plain", 2), ("frozen", 1), ("wide", 2), ("narrow", 4)], lambda build, ranks: build in ("frozen", "narrow")
    ),
)
def test_training_is_that_of_fully_shard(world, build, num_ranks):
    world.run(num_ranks, trains_as_torchs, build)


@on_world(2)
def test_cpu_offload(mesh) -> None:
    trains_as_torchs(mesh, "narrow", offload_policy=theirs.CPUOffloadPolicy(pin_memory=False))
    results = []
    for offload in (None, ours.CPUOffloadPolicy()):
        model = sharded(ours, mesh, offload_policy=offload)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if offload is not None:
            optimizer = acc.wrap_optimizer(optimizer)  # steps behind the caller's back
        for step in range(2):
            model.set_requires_gradient_sync(False)
            one_loss(model, 10 + step).backward()
            model.set_requires_gradient_sync(True)
            one_loss(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(whole(model.state_dict()))
    assert_close(results[1], results[0], 0.0)
    shard_buffers = [type(g.shard_buffer).__name__ for unit in units_of(model) for g in unit.groups]
    assert set(shard_buffers) == {"HostShards"}
    model.to(torch.float64)
    model(batch(model)[0]).sum().backward()


@pytest.mark.parametrize("how", ["before the forward", "before the backward", "one block"])
@on_world(2)
def test_gradients_add_up_without_communication(mesh, how: str) -> None:
    reference, model = both(mesh)
    for m in (reference, model):
        part = m.blocks[0] if how == "one block" else m
        for step in range(2):
            for micro in range(3):
                last = micro == 2
                if how != "before the backward":
                    part.set_requires_gradient_sync(last)
                loss = one_loss(m, 10 * step + micro)
                part.set_requires_gradient_sync(last)
                m.set_is_last_backward(last)
                loss.backward()
            if step == 0:
                m.zero_grad()
    assert_same_gradients(reference, model)


class Checkpointed(models.Tiny):
    reentrant = False

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(self.norm(x))


@pytest.mark.parametrize("reentrant", [False, pytest.param(True, marks=pytest.mark.slow)])
@on_world(2)
def test_blocks_under_checkpoint(mesh, reentrant: bool) -> None:
    def build() -> nn.Module:
        model = models.plain()
        model.__class__ = Checkpointed
        model.reentrant = reentrant
        return model

    assert_backwards_agree(both(mesh, build))


# -- policies


POLICIES = {
    "bf16": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32, "output_dtype": torch.float32},
    "bf16 reduce": {"param_dtype": torch.bfloat16},
    "output": {"reduce_dtype": torch.float32, "output_dtype": torch.bfloat16},
    "a model in bf16": {},
}


@pytest.mark.parametrize("name", POLICIES)
@on_world(2)
def test_mixed_precision(mesh, name: str) -> None:
    policy, own = POLICIES[name], torch.float32 if POLICIES[name] else torch.bfloat16
    inner = {"mp_policy": theirs.MixedPrecisionPolicy(**{**policy, "output_dtype": None})}
    mixed = theirs.MixedPrecisionPolicy(**policy)
    pair = both(mesh, lambda: models.plain().to(own), inner=inner, mp_policy=mixed)
    outs = [m(batch(m)[0]) for m in pair]
    assert outs[0].dtype == outs[1].dtype
    seen = []
    for m in pair:
        m.blocks[0].up.register_forward_hook(
            lambda module, args, out: seen.append((args[0].dtype, module.weight.dtype))
        )
    assert_backwards_agree(pair, steps=1, tolerance=3e-2)
    assert seen[0] == seen[1]
    for a, b in zip(pair[0].parameters(), pair[1].parameters(), strict=True):
        assert a.grad.dtype == b.grad.dtype == a.dtype == b.dtype == own


def leases(model: nn.Module) -> list[int]:
    return [unit.leases for unit in units_of(model)]


@on_world(2)
def test_resharding_after_the_forward(mesh) -> None:
    for option, kept in ((True, [0, 0, 0, 0]), (False, [1, 1, 1, 1]), (None, [1, 0, 0, 1])):
        reference, model = both(mesh, reshard_after_forward=option)
        for step in range(2):
            losses = [one_loss(m, step) for m in (reference, model)]
            if step:  # the engine has learned by then which unit comes last
                assert leases(model) == kept, (option, leases(model))
            for loss in losses:
                loss.backward()
        assert leases(model) == [0, 0, 0, 0]
        assert_same_gradients(reference, model)


@on_world(4)
def test_an_int_reshards_over_that_many_ranks_until_the_backward(mesh) -> None:
    """With an int, the backward gathers over that many neighbours, as torch's does, until another setting."""
    pair = both(mesh, reshard_after_forward=2)
    for m in pair:
        for step in range(2):
            loss = one_loss(m, step)
            assert m is pair[0] or leases(m) == [0, 0, 0, 0]
            with Wire() as wire:
                loss.backward()
        assert {call.group for call in wire.of("gather")} == {"2"}, type(m)
        m.set_reshard_after_forward(True)
        loss = one_loss(m)
        with Wire() as wire:
            loss.backward()
        assert {call.group for call in wire.of("gather")} == {"4"}, type(m)
    assert_same_gradients(*pair)


@on_world(2)
def test_resharding_is_set_between_steps(mesh) -> None:
    reference, model = both(mesh)
    for m in (reference, model):
        m.set_reshard_after_forward(True)
        m.blocks[1].set_reshard_after_forward(False, recurse=False)
        m.set_reshard_after_backward(False)
        for micro in range(3):
            m.set_requires_gradient_sync(micro == 2)
            loss = one_loss(m, micro)
            if m is model:
                assert leases(m) == [0, 0, 1, 0]
            loss.backward()
            if m is model and micro < 2:
                assert all(unit.is_full for unit in units_of(m))
    for module in (reference, *reference.blocks):
        module.reshard()  # torch's shows full parameters until then, without gradients
    assert_same_gradients(reference, model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (reference, model)]
    for m, optimizer in zip((reference, model), optimizers, strict=True):
        optimizer.step()
        m.reshard()
        for block in m.blocks:
            block.reshard()
    assert torch.allclose(one_loss(reference), one_loss(model), rtol=1e-6), "no full copy outlives a step"
    with pytest.raises(ValueError, match="pass True or False"):
        model.set_reshard_after_forward(2)


def full_memory(model: nn.Module) -> list[bool]:
    """Return, for the root and each block, if its full parameters have memory."""
    parts = [model, *model.blocks]
    if isinstance(model, ours.FSDPModule):
        return [unit.is_unsharded for unit in units_of(model)]
    params = [part._get_fsdp_state()._fsdp_param_group.fsdp_params for part in parts]
    return [any(out.untyped_storage().size() for p in own for out in p.all_gather_outputs) for own in params]


@on_world(2)
def test_full_parameters_are_resharded_by_hand(mesh) -> None:
    """Call `reshard` between a forward that keeps full parameters and its backward, and `unshard` before and after."""
    reference, model = both(mesh, reshard_after_forward=False)
    seen: list[list[Any]] = [[], []]
    for m, states in zip((reference, model), seen, strict=True):
        for step in range(2):
            loss = one_loss(m, step)
            states.append(full_memory(m))
            m.blocks[0].reshard()
            m.blocks[2].reshard()
            states.append(full_memory(m))
            m.blocks[2].unshard()
            m.blocks[0].unshard(async_op=True).wait()
            states.append(next(m.blocks[0].parameters()).detach().clone())
            m.blocks[0].reshard()
            loss.backward()
            assert m is reference or not any(unit.module_params.is_shown for unit in units_of(m))
            states.append(full_memory(m))
            states.append(loss.detach())
    assert_same_gradients(reference, model)
    torch.testing.assert_close(seen[1], seen[0], rtol=1e-5, atol=1e-8)


@on_world(2)
def test_prefetch_follows_the_lists_that_were_set_and_blocks_that_are_not_used_are_freed(mesh) -> None:
    """A prefetched block that the forward skips is freed at the end, and the next forward is right."""
    reference, model = both(mesh, reshard_after_forward=True)
    begun: list[list[bool]] = []
    model.blocks[0].register_forward_hook(lambda *_: begun.append([u.is_unsharded for u in units_of(model)[2:]]))
    for m in (reference, model):
        m.blocks[0].set_modules_to_forward_prefetch([m.blocks[1], m.blocks[2]])
        m.blocks[2].set_modules_to_backward_prefetch([m.blocks[1], m.blocks[0]])
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
        for step, skip in enumerate(([1], [], [1, 2], [0, 1], [])):
            optimizer.zero_grad()
            tokens, targets = batch(m, step)
            models.loss_of(m(tokens, skip=skip), targets).backward()
            assert full_memory(m) == [False] * 4, (type(m), step)
            optimizer.step()
    units = units_of(model)
    assert units[1].unit_policy.ahead == {Phase.FORWARD: [2, 3]}
    assert units[3].unit_policy.ahead == {Phase.BACKWARD: [2, 1]}
    assert begun[1:] == [[True, True]] * 3
    assert_same_gradients(reference, model)


@on_mesh((2, 2), ("replicate", "shard"))
def test_a_mesh_of_two_axes_is_hybrid(mesh) -> None:
    trains_as_torchs(mesh, "narrow")
    reference, model = both(mesh)
    for m in (reference, model):
        for micro in range(3):
            m.set_requires_all_reduce(micro == 2)
            one_loss(m, micro).backward()
    assert_same_gradients(reference, model)
