"""Uses of optimizers that raise an error of one sentence: pickles, wrappers of other libraries, norms that are not finite."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist

import accordion as acc
from tests.optim.test_states import trained
from tests.support import models
from tests.support.checks import assert_equal, full, go_on, one_loss
from tests.support.ranked import on_world
from tests.support.row_states import InBlocks


@on_world(2)
def test_a_wrapped_optimizer_is_copied_but_not_pickled(mesh):
    _, optimizer = trained(mesh, 1)
    with pytest.raises(pickle.PicklingError, match=r"not the same object as torch.optim.adamw.AdamW"):
        pickle.dumps(optimizer)
    for twin in (copy.deepcopy(optimizer), copy.copy(optimizer)):
        assert type(twin) is type(optimizer)
        assert isinstance(twin, torch.optim.AdamW)
        assert twin.param_groups[0]["lr"] == 1e-2
        twin.step()


class Prepared(torch.optim.Optimizer):
    """An optimizer around another, like accelerate's `AcceleratedOptimizer`; with a scaler it stores the other's step."""

    def __init__(self, optimizer, scaler=None):
        self.optimizer, self.scaler = optimizer, scaler
        if scaler is not None:
            self._original_step = optimizer.step

    def __getattr__(self, name):
        if name not in ("state", "param_groups", "defaults"):
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def state_dict(self):
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict):
        self.optimizer.load_state_dict(state_dict)

    def zero_grad(self, set_to_none=None):
        self.optimizer.zero_grad()

    def step(self, closure=None):
        self.optimizer.step(closure)


@on_world(2)
def test_inner_optimizer_of_another_is_wrapped(mesh, tmp_path):
    model = acc.shard(models.seeded(0), mesh=mesh)
    prepared = Prepared(Prepared(torch.optim.AdamW(model.parameters(), lr=1e-2)))
    assert acc.wrap_optimizer(prepared) is prepared
    assert acc.wrap_optimizer(prepared) is prepared
    other = acc.shard(models.seeded(0), mesh=mesh)
    plain = acc.wrap_optimizer(torch.optim.AdamW(other.parameters(), lr=1e-2))
    assert type(prepared.optimizer.optimizer).__mro__[1:] == type(plain).__mro__[1:]
    for background in (False, True):
        for m, o in ((model, prepared), (other, plain)):
            go_on(m, o, [0])
        acc.save(tmp_path / str(background), model, prepared, background=background).wait()
    dist.barrier(mesh.get_group())
    again = acc.shard(models.seeded(3), mesh=mesh)
    its = Prepared(acc.wrap_optimizer(torch.optim.AdamW(again.parameters(), lr=1e-2)))
    acc.load(tmp_path / "True", again, its)
    for m, o in ((model, prepared), (other, plain), (again, its)):
        go_on(m, o, [1])
    for m in (model, again):
        assert_equal(full(m), full(other))
    with pytest.raises(acc.UsageError, match=r"has already stored the step of the AdamW.*wrap_optimizer.*before"):
        acc.wrap_optimizer(Prepared(torch.optim.AdamW(model.parameters()), scaler=object()))
    with pytest.raises(acc.UsageError, match=r"does not know InBlocks; pass elementwise=True.*or whole_matrices=True"):
        acc.wrap_optimizer(Prepared(InBlocks(model.parameters())))
    other = torch.optim.AdamW(model.parameters())
    vars(other)["step"] = lambda: None
    with pytest.raises(acc.UsageError, match="the step method of this AdamW was replaced"):
        acc.wrap_optimizer(other)
    with pytest.raises(acc.UsageError, match=r"takes a torch.optim.Optimizer, not LambdaLR"):
        acc.wrap_optimizer(torch.optim.lr_scheduler.LambdaLR(plain, lambda step: 1.0))


@on_world(2)
def test_nonfinite_norm_raises_if_requested(mesh):
    model = acc.shard(models.seeded(0), mesh=mesh)
    one_loss(model).backward()
    before = {name: p.grad.to_local().clone() for name, p in model.named_parameters()}
    norm = acc.clip_grad_norm_(model, 1e9, error_if_nonfinite=True)
    assert torch.isfinite(norm)
    bad = next(p for p in model.parameters() if p.grad.to_local().numel())
    for value in (float("inf"), float("nan")):
        if dist.get_rank() == 0:
            bad.grad.to_local().view(-1)[0] = value
        with pytest.raises(acc.NonFiniteError, match=r"norm of the gradients is (inf|nan).*error_if_nonfinite"):
            acc.clip_grad_norm_(model, 1.0, 2.0, True)
        for name, p in model.named_parameters():
            assert torch.equal(p.grad.to_local(), before[name]) or (p is bad and dist.get_rank() == 0), name
    assert not torch.isfinite(acc.clip_grad_norm_(model, 1.0))


@on_world(2)
def test_a_list_of_optimizers_that_overlap_or_are_none_is_refused(mesh, tmp_path):
    path = tmp_path / "ckpt"
    model = acc.shard(models.seeded(0), mesh=mesh)
    params = list(model.parameters())
    for what, optimizers in {
        "2 optimizers has a parameter twice": [torch.optim.AdamW(params[:3]), torch.optim.SGD(params[2:])],
        "0 optimizers is empty": [],
        "optimizer has a dict": [torch.optim.AdamW(params), {}],
    }.items():
        for call in (acc.save, acc.load):
            with pytest.raises(acc.UsageError, match=what):
                call(path, model, optimizers)
    assert not path.exists()
