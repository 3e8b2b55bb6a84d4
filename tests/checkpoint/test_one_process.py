"""Checkpoints of a model that is not sharded: one process, no process group."""

import copy
import os
import pickle
import random
import secrets

import numpy as np
import pytest
import torch
from torch import nn

from accordion.checkpoint import RandomState, latest, load, save
from accordion.checkpoint import background as bg
from accordion.errors import CheckpointError
from tests.support.checkpoints import assert_same_tensors, filled, small, stepped


class Tied(nn.Module):
    """A model of two layers, a tied head, a 0-d parameter and both kinds of buffers."""

    def __init__(self, rows=5, width=3, tie=True):
        super().__init__()
        self.embed = nn.Embedding(rows, width)
        self.head = nn.Linear(width, rows, bias=False)
        if tie:
            self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.rand(()))
        self.register_buffer("seen", torch.randint(9, (4,)))
        self.register_buffer("scratch", torch.rand(2), persistent=False)

    def forward(self, _):
        return self.head(self.embed(torch.arange(4))) * self.scale


def assert_same_state(optimizer, other):
    ours, theirs = optimizer.state_dict(), other.state_dict()
    assert repr(ours) == repr(theirs)
    assert ours["param_groups"] == theirs["param_groups"]


def test_round_trip_into_the_same_storage(tmp_path):
    model, fresh = Tied(), Tied()
    optimizer = stepped(model, steps=2)
    save(tmp_path / "c", model, optimizer, extra={"step": 2, "shape": (1, 2)})
    places = {name: tensor.data_ptr() for name, tensor in fresh.state_dict().items()}
    other = torch.optim.AdamW(fresh.parameters())
    assert load(tmp_path / "c", fresh, other) == {"step": 2, "shape": (1, 2)}
    assert_same_state(optimizer, other)
    moment = other.state[fresh.scale]["exp_avg"].fill_(7)
    load(tmp_path / "c", fresh, other)
    assert_same_state(optimizer, other)
    assert other.state[fresh.scale]["exp_avg"] is moment
    assert {name: tensor.data_ptr() for name, tensor in fresh.state_dict().items()} == places
    assert_same_tensors(model, fresh)
    assert fresh.head.weight is fresh.embed.weight


def test_options_of_groups_round_trip(tmp_path):
    model = Tied()
    groups = [
        {"params": [model.scale], "lr": torch.tensor(0.25), "weight_decay": 1e-17, "note": ["a", (None, True)]},
        {"params": [model.embed.weight], "betas": (0.1, 0.2), "schedule": {"warmup": 3}},
    ]
    optimizer = torch.optim.AdamW(groups, lr=3e-4, foreach=False)
    save(tmp_path / "c", model, optimizer)
    bare = [{"params": [model.scale]}, {"params": [model.embed.weight]}]
    other = torch.optim.AdamW(bare, lr=1)
    load(tmp_path / "c", model, other)
    for saved, loaded in zip(optimizer.param_groups, other.param_groups, strict=True):
        assert {k: v for k, v in saved.items() if k != "params"} == {k: v for k, v in loaded.items() if k != "params"}
    assert isinstance(other.param_groups[0]["lr"], torch.Tensor)
    assert isinstance(other.param_groups[1]["betas"], tuple)


@pytest.mark.parametrize(
    "make",
    [
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        lambda params: torch.optim.Adagrad(params),
        lambda params: torch.optim.Adafactor(params),
        lambda params: torch.optim.LBFGS(params, max_iter=2),
        lambda params: torch.optim.AdamW(params, amsgrad=True, capturable=False),
    ],
)
def test_other_optimizers_round_trip(tmp_path, make):
    model = Tied()

    def closure():
        loss = model(None).square().sum()
        loss.backward()
        return loss

    optimizer, other = make(model.parameters()), make(model.parameters())
    optimizer.step(closure)
    save(tmp_path / "c", model, optimizer)
    load(tmp_path / "c", model, other)
    assert_same_state(optimizer, other)


def test_names_have_no_wrapper_prefixes(tmp_path):
    compiled = nn.Module()
    compiled._orig_mod = model = nn.Sequential(Tied())  # as torch.compile has it
    save(tmp_path / "c", compiled)
    load(tmp_path / "c", model)


def test_tied_checkpoint_loads_into_an_untied_model_but_not_the_other_way(tmp_path):
    tied, untied = Tied(), Tied(tie=False)
    save(tmp_path / "tied", tied)
    load(tmp_path / "tied", untied)
    assert torch.equal(untied.head.weight, tied.embed.weight)
    save(tmp_path / "untied", untied)
    with pytest.raises(CheckpointError, match=r"model/head.weight \(the model ties it to model/embed.weight\)"):
        load(tmp_path / "untied", tied)


def test_different_optimizers_are_named(tmp_path):
    model = Tied()
    save(tmp_path / "none", model)
    with pytest.raises(CheckpointError, match="saved without an optimizer"):
        load(tmp_path / "none", model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(CheckpointError, match=r"shape \(2,\) that is not the model's"):
        save(tmp_path / "foreign", model, torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=1))


def test_model_on_the_meta_device_is_refused(tmp_path):
    save(tmp_path / "c", Tied())
    with pytest.raises(CheckpointError, match="meta device"):
        load(tmp_path / "c", Tied().to("meta"))


def test_save_removes_leftovers_of_a_killed_save_and_nothing_else(tmp_path):
    for name in (".c.0123abcd.tmp", ".c.d.0123abcd.tmp", ".c.notes.tmp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rank-00000.safetensors").write_text("half")
    save(tmp_path / "c", Tied())
    assert sorted(os.listdir(tmp_path)) == [".c.d.0123abcd.tmp", ".c.notes.tmp", "c"]


def test_odd_paths(tmp_path, monkeypatch):
    model, other = Tied(), Tied()
    monkeypatch.chdir(tmp_path)
    odd = ["c", "with spaces/and (more) ü.d/", "./x/../y/step-1/", "%41*?[a]"]
    for path in odd:
        save(path, model, extra=path)
        assert load(path, other) == load(os.path.abspath(path), other) == path
    assert latest("y/") == latest(f"file://{tmp_path}/y/") == str(tmp_path / "y" / "step-1")
    save(f"file://{tmp_path}/y/step-2", model, keep=1)
    assert os.listdir("y") == ["step-2"]
    assert sorted(os.listdir()) == ["%41*?[a]", "c", "with spaces", "y"]


def test_links_to_checkpoints(tmp_path):
    """A link is followed by `load`, refused by `save`, and neither counted nor followed by `keep`."""
    model, other = Tied(), Tied()
    for step in (1, 2):
        save(tmp_path / f"step-{step}", model, extra=step)
    (tmp_path / "step-3").symlink_to(tmp_path / "step-2")
    assert latest(tmp_path) == str(tmp_path / "step-3")
    assert load(tmp_path / "step-3", other) == 2
    with pytest.raises(CheckpointError, match=r"step-3 is a link to .*step-2, and a save replaces none"):
        save(tmp_path / "step-3", model, extra=4)
    assert sorted(os.listdir(tmp_path)) == ["step-1", "step-2", "step-3"]
    assert [load(tmp_path / f"step-{step}", other) for step in (2, 3)] == [2, 2]
    save(tmp_path / "step-4", model, keep=1)
    assert sorted(os.listdir(tmp_path)) == ["step-3", "step-4"]
    assert latest(tmp_path) == str(tmp_path / "step-4")


def test_new_states_are_read_once(tmp_path, monkeypatch):
    """Existing weights are read to be checked and again to be filled; states that a load creates are read once, in place."""
    model = nn.Linear(300, 40)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 300)).sum().backward()
    optimizer.step()
    save(tmp_path / "c", model, optimizer)
    read, preadv = [], os.preadv
    monkeypatch.setattr(os, "preadv", lambda *words: read.append(preadv(*words)) or read[-1])
    num_bytes = sum(param.numel() * 4 for param in model.parameters())
    for fresh in (True, False):
        other = nn.Linear(300, 40)
        mine = torch.optim.AdamW(other.parameters())
        if not fresh:
            other(torch.ones(1, 300)).sum().backward()
            mine.step()
        read.clear()
        load(tmp_path / "c", other, mine)
        assert num_bytes * (4 if fresh else 6) <= sum(read) < num_bytes * (4 if fresh else 6) + 4000
        for one, two in zip(model.parameters(), other.parameters(), strict=True):
            assert all(torch.equal(optimizer.state[one][key], mine.state[two][key]) for key in optimizer.state[one])


def test_frozen_parameters_and_optimizers_of_some(tmp_path):
    """Frozen parameters are saved and loaded; parameters that the optimizer does not have get no state."""
    model, other = small(1), small(2)
    model[0].requires_grad_(False)
    optimizer = stepped(model, torch.optim.AdamW(model[1].parameters()))
    save(tmp_path / "c", model, optimizer)
    other[0].requires_grad_(False)
    mine = torch.optim.AdamW(other[1].parameters())
    load(tmp_path / "c", other, mine)
    assert_same_tensors(model, other)
    assert [p.requires_grad for p in other.parameters()] == [False, False, True, True]
    assert torch.equal(mine.state[other[1].weight]["exp_avg"], optimizer.state[model[1].weight]["exp_avg"])
    thawed = torch.optim.AdamW(other.parameters())
    with pytest.raises(CheckpointError, match=r"2 missing in the checkpoint's parameter groups: 0\.weight, 0\.bias"):
        load(tmp_path / "c", other, thawed)
    with pytest.warns(UserWarning, match="was loaded in part"):
        load(tmp_path / "c", other, thawed, strict=False)
    assert torch.equal(thawed.state[other[1].weight]["exp_avg"], optimizer.state[model[1].weight]["exp_avg"])
    assert not thawed.state[other[0].weight]


def test_everything_is_synced_before_the_rename(tmp_path, monkeypatch):
    """A loss of power leaves what was synced: the files, their names, the name of the folder and that of its parent, in order."""
    model, log = nn.Linear(2, 2), []
    fsync, rename = os.fsync, os.rename

    def place(path):
        return os.path.relpath(path, tmp_path)

    monkeypatch.setattr(
        os, "fsync", lambda handle: (log.append(place(os.readlink(f"/proc/self/fd/{handle}"))), fsync(handle))
    )
    monkeypatch.setattr(os, "rename", lambda a, b, **k: (log.append(f"{place(a)} -> {place(b)}"), rename(a, b, **k)))
    monkeypatch.setattr(secrets, "token_hex", lambda num_bytes: "0" * 2 * num_bytes)
    save(tmp_path / "new" / "run" / "c", model)
    begun, old = "new/run/.c.00000000.tmp", "new/run/.c.old"
    files = [f"{begun}/rank-00000.safetensors", f"{begun}/manifest.json", begun]
    assert log == ["new", ".", *files, f"{begun} -> new/run/c", "new/run"]
    log.clear()
    save(tmp_path / "new" / "run" / "c", model)
    assert log == [*files, f"new/run/c -> {old}", f"{begun} -> new/run/c", "new/run", f"{old} -> {begun}"]


# -- states of objects


def draw():
    return random.random(), np.random.rand(), np.random.standard_normal(), torch.rand(()).item()


def test_random_states_resume_and_missing_states_are_named(tmp_path):
    model = small()
    np.random.standard_normal()  # one is left over in numpy's state
    scaler = torch.amp.GradScaler("cpu")
    save(tmp_path / "c", model, state={"scaler": scaler, "random": RandomState()})
    drawn = draw()
    load(tmp_path / "c", model, state={"scaler": scaler, "random": RandomState()})
    assert draw() == drawn
    with pytest.raises(CheckpointError, match="no state for loader; it has scaler, random"):
        load(tmp_path / "c", model, state={"loader": scaler})
    save(tmp_path / "d", model)
    with pytest.raises(CheckpointError, match="saved without state"):
        load(tmp_path / "d", model, state={"scaler": scaler})


def test_strict_false_leaves_misfits_and_warns(tmp_path):
    model, other = small(1), small(2, width=5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    save(tmp_path / "c", model, stepped(model, optimizer), extra=7)
    other.append(nn.Linear(2, 1))
    mine = stepped(other)
    before = copy.deepcopy(other.state_dict())
    moments = {param: mine.state[param]["exp_avg"].clone() for param in other.parameters()}
    with pytest.warns(UserWarning, match=r"loaded in part: 2 missing .*2\.weight.* of another shape: model/0\.weight"):
        assert load(tmp_path / "c", other, mine, strict=False) == 7
    for name, tensor in other.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name] if name == "1.bias" else before[name]), name
    moments[other[1].bias] = optimizer.state[model[1].bias]["exp_avg"]
    assert all(torch.equal(mine.state[param]["exp_avg"], moment) for param, moment in moments.items())
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


# -- kinds of numbers


def with_buffer(value, seen):
    model = filled(value)
    model.register_buffer("seen", seen)
    return model


CASTS = [
    (torch.ones(2), torch.zeros(2, dtype=torch.int64), False),
    (torch.ones(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int32), False),
    (torch.ones(2, dtype=torch.bool), torch.zeros(2, dtype=torch.uint8), False),
    (torch.ones(2, dtype=torch.uint8), torch.zeros(2, dtype=torch.int16), True),
    (torch.ones(2), torch.zeros(2, dtype=torch.bfloat16), True),
    (torch.ones(2, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.float64), True),
]


@pytest.mark.parametrize(("saved", "now", "fits"), CASTS)
def test_load_casts_only_within_floats_or_integers(tmp_path, saved, now, fits):
    save(tmp_path / "c", with_buffer(1, saved))
    model = with_buffer(0, now.clone())
    if fits:
        load(tmp_path / "c", model)
        assert model.seen.tolist() == [1, 1]
        return
    with pytest.raises(
        CheckpointError, match=r"1 of another kind: model/seen is .* in the checkpoint and .* in the model"
    ):
        load(tmp_path / "c", model)
    assert not model.weight.any()
    with pytest.warns(UserWarning, match="model/seen is "):
        load(tmp_path / "c", model, strict=False)
    assert torch.equal(model.seen, now)
    assert model.weight.all()


def test_tensors_with_equal_names_without_wrappers_are_refused(tmp_path):
    model = nn.Module()
    model.weight = nn.Parameter(torch.ones(2))
    model.add_module("_orig_mod", nn.Module())
    model._orig_mod.weight = nn.Parameter(torch.zeros(2))
    with pytest.raises(
        CheckpointError, match=r"_orig_mod.weight and another tensor of the model have the same name weight"
    ):
        save(tmp_path / "c", model)
    assert os.listdir(tmp_path) == []
