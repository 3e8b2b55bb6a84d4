"""Saved states of objects, background saves, partial loads, and the number of checkpoints that stay."""

import copy
import os
import pickle
import random

import numpy as np
import pytest
import torch
from torch import nn

from accordion.checkpoint import RandomState, latest, load, save
from accordion.checkpoint import background as bg
from accordion.errors import CheckpointError
from tests.support.checkpoints import small, stepped


def draw():
    return random.random(), np.random.rand(), np.random.standard_normal(), torch.rand(()).item()


def test_schedulers_scalers_and_random_states_resume(tmp_path):
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    np.random.standard_normal()  # one is left over in numpy's state
    optimizer.step()
    scheduler.step()
    save(tmp_path / "c", model, optimizer, state={"scheduler": scheduler, "scaler": scaler, "random": RandomState()})
    drawn = draw()
    optimizer.step()
    scheduler.step()
    wanted = scheduler.state_dict()

    other = torch.optim.SGD(model.parameters(), lr=9.0)
    late = torch.optim.lr_scheduler.StepLR(other, 7, 0.1)
    fresh = torch.amp.GradScaler("cpu")
    state = {"scheduler": late, "scaler": fresh, "random": RandomState()}
    load(tmp_path / "c", model, other, state=state)
    assert draw() == drawn
    assert fresh.get_scale() == 64.0
    other.step()
    late.step()
    assert late.state_dict() == wanted
    with pytest.raises(CheckpointError, match="no state for loader; it has scheduler, scaler, random"):
        load(tmp_path / "c", model, state={"loader": scaler})
    save(tmp_path / "d", model)
    with pytest.raises(CheckpointError, match="saved without state"):
        load(tmp_path / "d", model, state={"scaler": scaler})


def test_strict_false_leaves_misfits_and_warns(tmp_path):
    model, other = small(1), small(2, width=5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    save(tmp_path / "c", model, stepped(model, optimizer), extra=7)
    other.append(nn.Linear(2, 1))
    mine = torch.optim.AdamW(other.parameters())
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    with pytest.warns(UserWarning, match=r"loaded in part: 2 missing .*2\.weight.* of another shape: model/0\.weight"):
        assert load(tmp_path / "c", other, mine, strict=False) == 7
    for name, tensor in other.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name] if name == "1.bias" else before[name]), name
    assert list(mine.state) == [other[1].bias]
    assert torch.equal(mine.state[other[1].bias]["exp_avg"], optimizer.state[model[1].bias]["exp_avg"])
    assert mine.param_groups[0]["lr"] == 0.5
    same = small(3)
    load(tmp_path / "c", same, strict=False)  # fits: not a word
    assert torch.equal(same[0].weight, model[0].weight)


def test_model_can_be_copied_during_a_background_save(tmp_path):
    model = small()
    save(tmp_path / "c", model, background=True)
    copied, again = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    assert torch.equal(copied[0].weight, again[0].weight)
    assert bg.saver_of(copied) is not bg.saver_of(model)
    bg.saver_of(model).wait()


def test_newest_good_checkpoints_are_kept(tmp_path):
    model = small()
    for step in (1, 2, 3, 10):
        save(tmp_path / f"step-{step}", model)
    save(tmp_path / "best", model)  # has another name but for its number: neither counted nor removed
    for name in ("step-11", "step-12"):  # torn ones do not count as kept, and are not touched
        save(tmp_path / name, model)
        os.truncate(tmp_path / name / "rank-00000.safetensors", 9)
    save(tmp_path / "step-20", model, keep=2)
    assert sorted(os.listdir(tmp_path)) == ["best", "step-10", "step-11", "step-12", "step-20"]
    assert latest(tmp_path) == str(tmp_path / "step-20")
