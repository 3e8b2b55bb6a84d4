"""Casts on load keep the kind of number, and tensors of a model have unique names."""

import os

import pytest
import torch
from torch import nn

import accordion
from accordion.checkpoint.load import load
from accordion.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Held(nn.Module):
    def __init__(self, buffer, weight):
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.register_buffer("seen", buffer)


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
    accordion.save(tmp_path / "c", Held(saved, torch.ones(3)))
    model = Held(now.clone(), torch.zeros(3))
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
        accordion.save(tmp_path / "c", model)
    assert os.listdir(tmp_path) == []
