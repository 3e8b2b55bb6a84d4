"""Training on parts of sequences equals that of an unsharded model on whole ones, in losses, gradients and steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import accordion as acc
from tests.devices import device
from tests.sequence import subjects
from tests.sequence.subjects import BATCHES, FAMILIES, SHAPES, Own, all_ranks, check_equal, family, loss_of, seeded
from tests.support.checks import logged
from tests.support.ranked import on_mesh
from tests.support.reference import adamw, assert_close, params_of

on_shapes = on_mesh(lambda given: (given.pop("shape"), ("dp", "sp")), takes=("shape",))


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("shape", SHAPES)
@on_shapes
def test_families_of_transformers(mesh: Any, name: str) -> None:
    plain, model = family(name), family(name)
    with logged() as messages:
        acc.shard(acc.sequence_parallel(model, mesh["sp"]), all_ranks(mesh))
        for kind, make in BATCHES.items():
            if (name, kind) != ("GptOssForCausalLM", "packed"):  # transformers packs it for flash attention alone
                check_equal(mesh, plain, model, [make(seed) for seed in range(mesh["dp"].size())], f"{name} {kind}")
    said = [message for message in messages if "key/value heads" in message]
    few = mesh["sp"].size() == 4 and name != "GPT2LMHeadModel"  # two heads of keys and values
    assert len(said) <= 1 and (not few or mesh.get_rank() or subjects.SHAPES)


@pytest.mark.parametrize("shape", SHAPES)
@on_shapes
def test_a_model_of_ones_own(mesh: Any) -> None:
    for chunked in (False, True):
        plain, model = seeded(Own), seeded(lambda: Own(mesh["sp"], chunked))
        acc.shard(model, all_ranks(mesh), units={subjects.Attending, nn.Linear, nn.Embedding})
        check_equal(mesh, plain, model, [BATCHES["plain"](seed) for seed in range(mesh["dp"].size())], f"{chunked=}")
