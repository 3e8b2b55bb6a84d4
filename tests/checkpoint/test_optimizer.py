"""Loading an optimizer on one process: reordered groups, other classes, refusals that change nothing, forged states."""

import copy

import pytest
import torch

from accordion.checkpoint import load, save
from accordion.errors import CheckpointError
from tests.support.checkpoints import forged, small, stepped


def in_groups(model, order=(0, 1), make=torch.optim.AdamW):
    """Return an optimizer with two groups: weights with weight decay, biases without."""
    groups = [
        {"params": [model[0].weight, model[1].weight], "weight_decay": 0.5},
        {"params": [model[0].bias, model[1].bias], "weight_decay": 0.0, "lr": 0.25},
    ]
    return make([groups[i] for i in order], lr=0.1)


def everything(model, optimizer):
    return copy.deepcopy([model.state_dict(), optimizer.state_dict()])


def same(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return len(one) == len(other) and all(map(same, one, other)) if isinstance(one, list) else one == other


def options_of(optimizer):
    return [(group["weight_decay"], group["lr"]) for group in optimizer.param_groups]


def test_reordered_groups_take_options_by_their_parameters(tmp_path):
    model = small()
    save(tmp_path / "c", model, stepped(model, in_groups(model)))
    other = small(1)
    mine = in_groups(other, (1, 0))
    for group in mine.param_groups:
        group["weight_decay"], group["lr"] = 9.0, 9.0
    with pytest.raises(CheckpointError, match=r"the parameters of group 0 are in group 1 of the checkpoint"):
        load(tmp_path / "c", other, mine)
    with pytest.warns(UserWarning, match=r"the parameters of group 0 are in group 1 of the checkpoint"):
        load(tmp_path / "c", other, mine, strict=False)
    assert options_of(mine) == [(0.0, 0.25), (0.5, 0.1)]
    assert mine.state[other[0].weight]["exp_avg"].shape == (3, 4)


def test_optimizer_without_weights_is_saved_and_loaded(tmp_path):
    model, other = small(), small(3)
    optimizer = stepped(model, in_groups(model))
    save(tmp_path / "both", model, optimizer)
    save(tmp_path / "alone", model, optimizer, only=())
    for name in ("both", "alone"):
        weights, its = copy.deepcopy(other.state_dict()), in_groups(other)
        load(tmp_path / name, other, its, only=())
        assert str(its.state_dict()) == str(optimizer.state_dict())
        assert str(other.state_dict()) == str(weights)
    with pytest.raises(CheckpointError, match="4 missing in the checkpoint"):
        load(tmp_path / "alone", other)


def test_groups_merged_from_several_keep_their_options(tmp_path):
    model = small()
    save(tmp_path / "c", model, stepped(model, in_groups(model)))
    for groups, wanted in (
        (lambda m: [{"params": list(m.parameters()), "weight_decay": 0.7}], [(0.7, 0.9)]),
        (lambda m: [{"params": [p], "weight_decay": 0.7} for p in m.parameters()], [(0.5, 0.1), (0.0, 0.25)] * 2),
    ):
        other = small(1)
        mine = torch.optim.AdamW(groups(other), lr=0.9)
        with pytest.warns(UserWarning, match=r"the parameters of group"):
            load(tmp_path / "c", other, mine, strict=False)
        assert options_of(mine) == wanted
        assert all(mine.state[p] for p in other.parameters())


@pytest.mark.parametrize(
    ("saved", "own"),
    [("AdamW", "SGD"), ("SGD", "AdamW"), ("Adagrad", "Adam")],
)
def test_optimizer_of_another_class_is_named_and_nothing_changes(tmp_path, saved, own):
    model, other = small(), small(1)
    save(tmp_path / "c", model, stepped(model, getattr(torch.optim, saved)(model.parameters(), lr=0.1)))
    mine = stepped(other, getattr(torch.optim, own)(other.parameters(), lr=0.3))
    before = everything(other, mine)
    with pytest.raises(CheckpointError, match=f"saved with {saved} and the optimizer is {own}"):
        load(tmp_path / "c", other, mine)
    assert same(everything(other, mine), before)
    with pytest.warns(UserWarning, match=f"saved with {saved} and the optimizer is {own}"):
        load(tmp_path / "c", other, mine, strict=False)
    assert same(mine.state_dict(), before[1])
    assert same(other.state_dict(), model.state_dict())


def test_subclass_takes_the_states_of_its_base(tmp_path):
    class Mine(torch.optim.AdamW):
        pass

    model, other = small(), small(1)
    save(tmp_path / "c", model, stepped(model, torch.optim.AdamW(model.parameters(), lr=0.1)))
    load(tmp_path / "c", other, Mine(other.parameters()))
    save(tmp_path / "d", model, stepped(model, Mine(model.parameters(), lr=0.1)))
    load(tmp_path / "d", other, torch.optim.AdamW(other.parameters()))


def test_refused_state_of_unknown_class_gives_an_error_of_one_sentence(tmp_path):
    """Converted checkpoints do not name the optimizer's class, nor do those from before it was saved."""
    model, other = small(), small(1)
    save(tmp_path / "c", model, stepped(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)))
    forged(tmp_path / "c", lambda words: words["optimizer"].pop("kind"))
    mine = stepped(other, torch.optim.AdamW(other.parameters(), lr=0.3))
    before = everything(other, mine)
    with pytest.raises(
        CheckpointError, match=r"AdamW refuses the saved state of the optimizer .*KeyError: 'step'.*another kind"
    ):
        load(tmp_path / "c", other, mine)
    assert same(everything(other, mine), before)


class Refusing(torch.optim.AdamW):
    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        raise ValueError("not these")


class Thing:
    def __init__(self, refuses=False):
        self.held, self.refuses = 1, refuses

    def state_dict(self):
        return {"held": self.held, "empty": torch.empty(0, 4)}

    def load_state_dict(self, state):
        assert state["empty"].shape == (0, 4)
        if self.refuses:
            raise KeyError("rank")
        self.held = state["held"]


@pytest.mark.parametrize("has_states", [True, False])
def test_refused_state_changes_nothing(tmp_path, has_states):
    model, other, thing = small(), small(1), Thing()
    save(tmp_path / "c", model, stepped(model, torch.optim.AdamW(model.parameters(), lr=0.1)), state={"thing": thing})
    for make, its in ((Refusing, Thing()), (torch.optim.AdamW, Thing(refuses=True))):
        its.held = 5
        mine = stepped(other, make(other.parameters(), lr=0.3), steps=int(has_states))
        held = {id(value): value for state in mine.state.values() for value in state.values()}
        before = everything(other, mine)
        with pytest.raises(CheckpointError, match=r"not these|rank"):
            load(tmp_path / "c", other, mine, state={"thing": its})
        assert same(everything(other, mine), before)
        assert {id(value) for state in mine.state.values() for value in state.values()} == set(held)
        assert its.held == 5
        stepped(other, mine)
