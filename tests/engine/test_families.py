"""Families of transformers, in units found by themselves: two steps sharded are two steps unsharded."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.pool import Pool
from tests.support.sample import sampled

transformers = pytest.importorskip("transformers")

from tests.support.families import FAMILIES  # noqa: E402
from tests.support.family_table import (  # noqa: E402
    RANKS,
    WORKING,
    Found,
    compare,
    render,
)

BF16 = torch.bfloat16
TOLERANCE = 1e-6
DOCUMENT = Path(__file__).parents[2] / "docs" / "models.md"
LLAMA, GPT2, MIXTRAL = "LlamaForCausalLM", "GPT2LMHeadModel", "MixtralForCausalLM"
T5, BERT, CLIP = "T5ForConditionalGeneration", "BertForMaskedLM", "CLIPModel"
WHISPER, VIT, MAMBA = "WhisperForConditionalGeneration", "ViTForImageClassification", "MambaForCausalLM"
SWITCH = "SwitchTransformersForConditionalGeneration"
USUAL = {LLAMA, MIXTRAL, T5, WHISPER, "ZambaForCausalLM"}


def assert_equal_within(ranks: list[Found], tolerance: float = TOLERANCE) -> None:
    for rank, found in enumerate(ranks):
        for kind in ("grads", "losses", "params"):
            worst = getattr(found, kind)
            assert worst.error <= tolerance, f"{kind} of rank {rank}: {worst.name} differs by {worst.error:.3g}"


@cache
def in_float32(world: Pool, name: str) -> list[Found]:
    return world.run(RANKS, compare, name)


@pytest.mark.parametrize("name", sampled(WORKING, USUAL.__contains__))
def test_two_steps_are_those_of_the_unsharded_model(world, name):
    assert_equal_within(in_float32(world, name))


IN_BFLOAT16 = [name for name in WORKING if FAMILIES[name].bf16 in ("yes", "with buffers")]
SOME, MORE = [LLAMA, GPT2, MIXTRAL, T5, BERT, WHISPER, VIT], [LLAMA, GPT2, MIXTRAL, SWITCH, T5, BERT, CLIP, MAMBA]
ENTERED = ["SqueezeBertForMaskedLM"]  # calls the forward of layers, and trains with entry points
VARIANTS = {  # what differs from the usual run: number of ranks, arguments, families, those of `make test`
    "bfloat16 over float32 masters": (RANKS, {"compute": BF16}, IN_BFLOAT16, [GPT2, MIXTRAL, MAMBA]),
    "on 3 ranks": (3, {}, MORE, [MIXTRAL]),
    "on 4 ranks": (4, {}, MORE, []),
    "their checkpoints": (RANKS, {"use_reentrant": False}, SOME, [MIXTRAL]),
    "their reentrant checkpoints": (RANKS, {"use_reentrant": True}, SOME, [MIXTRAL]),
    "units recomputed": (RANKS, {"checkpoint_activations": "full"}, [*SOME, CLIP, MAMBA], [T5]),
    "entry points": (RANKS, {"entered": True}, ENTERED, ENTERED),
    "entry points in bfloat16": (RANKS, {"entered": True, "compute": BF16}, ENTERED, []),
}


@pytest.mark.parametrize(
    ("variant", "name"),
    sampled(
        [(variant, name) for variant, (_, _, names, _) in VARIANTS.items() for name in names],
        lambda variant, name: name in VARIANTS[variant][3],
    ),
)
def test_in_bfloat16_on_more_ranks_with_recomputation_and_with_entry_points(world, variant, name):
    num_ranks, arguments, _, _ = VARIANTS[variant]
    tolerance = FAMILIES[name].bf16_tolerance if "compute" in arguments else TOLERANCE
    assert_equal_within(world.run(num_ranks, compare, name, **arguments), tolerance)


@pytest.mark.parametrize(
    "name",
    sampled([T5, "BartForConditionalGeneration", WHISPER, "DetrModel", "XLMWithLMHeadModel"], USUAL.__contains__),
)
def test_what_several_units_read_is_summed_in_the_same_order(world, name):
    """Such as an encoder's output: its gradient has the bits of the unsharded model's."""
    assert_equal_within(in_float32(world, name), 0.0)


# -- docs/models.md


def without_errors(text: str) -> str:
    """Figures of errors differ between machines."""
    return re.sub(r"\| (0|< 1e-?\d+) (?=\|)", "| . ", text)


@pytest.mark.slow
def test_the_table_of_the_documentation(world):
    written = DOCUMENT.read_text()
    if f"transformers {transformers.__version__}," not in " ".join(written.split()):  # whatever the lines' ends
        pytest.skip(f"docs/models.md was not made with transformers {transformers.__version__}")
    found = render({name: in_float32(world, name) for name in WORKING})
    assert without_errors(found) == without_errors(written), (
        "write it anew: python -m tests.support.family_table > docs/models.md"
    )


# -- what does not work; last, since a failure restarts the ranks


# These go around the hooks of their layers, as they would with any engine that gathers in hooks.
@pytest.mark.parametrize("name", [family.cls for family in FAMILIES.values() if family.fails])
def test_families_that_do_not_train(world, name):
    with pytest.raises(AssertionError):
        assert_equal_within(world.run(RANKS, compare, name))
