"""Plans with offloaded inputs of recomputed units: bytes compared with ranks, times computed by hand, the search."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import accordion as acc
from accordion.engine.hooks import engine_of
from accordion.offload.activations.stores import NUM_STAGES
from accordion.offload.step.deferred_step import tiers_of
from accordion.plan.choice import Choice
from accordion.plan.events import Enter, Log, Op, StepPart, StepPhase
from accordion.plan.extrapolate.offload import disk_bytes, host_bytes, inputs_of
from accordion.plan.hardware import GB, GIB, GPUS, MARGIN, Cluster
from accordion.plan.replay.cost import costs_of
from accordion.plan.replay.host_work import host_work, with_host_work
from accordion.plan.replay.timeline import Step
from accordion.plan.search.evaluate import HOST_MARGIN
from accordion.plan.trace.trace import trace
from tests.plan import builders, subjects
from tests.plan.builders import planned

CASE = "inputs on the host"
INPUT = 1 << 30
LAYERS, SEQ, WIDTH = 5, 16384, 512
KEPT = 2 * LAYERS * SEQ * WIDTH  # bytes that inputs of a rank take, in bf16
CLUSTER = Cluster(
    disk_gbps=INPUT / GB / 3  # an input in three seconds: two ranks share it
)


def choice(activations: str, **more: Any) -> Choice:
    place = f"disk:{tempfile.gettempdir()}" if activations == "disk" else activations
    return builders.choice(checkpoint_activations="full", gpus=2, offload=acc.Offload(activations=place), **more)


def kept_elsewhere(mesh: Any, place: str) -> tuple[int, int]:
    """Return the bytes of host and disk that the inputs of one rank take."""
    model = subjects.made("gpt", CASE, "cpu")
    offload = acc.Offload(activations=place)
    acc.shard(model, mesh, **{**subjects.CASES[CASE].sharding, "offload": offload})
    for _ in range(2):
        subjects.loss("gpt", model, subjects.batch_of("gpt")).backward()
    engine = engine_of(model)
    assert engine is not None
    waits = tiers_of(engine).activation_offload
    return waits.host_bytes, waits.disk_bytes


@pytest.mark.slow
def test_bytes_on_host_and_disk_match_what_ranks_take(world: Any, tmp_path: Path) -> None:
    log = trace(subjects.subject_of("gpt", CASE), replace(subjects.run_of("gpt", CASE), device="cuda"))
    inputs = inputs_of(log)
    assert len(inputs) == 4
    found = [world.run_mesh((2,), ("shard",), kept_elsewhere, place)[0] for place in ("host", f"disk:{tmp_path}")]
    assert found == [(sum(inputs), 0), (NUM_STAGES * max(inputs), sum(inputs))]
    of_machine = [
        (host_bytes(log, c, 2, CLUSTER), disk_bytes(log, c, CLUSTER)) for c in (choice("host"), choice("disk"))
    ]
    assert of_machine == [(2 * host, 2 * disk) for host, disk in found]
    assert host_bytes(log, choice("device"), 2, CLUSTER) == 0


@pytest.mark.parametrize(
    ("units", "forward_s", "seconds"),
    [
        (5, 4.0, 80.0),  # five inputs are written and the first two read, six seconds each: 42, hidden by the step
        (5, 1.0, 42.0),  # and here the step waits for the disk
        (3, 1.0, 18.0),  # three inputs stay in buffers: nothing is read
    ],
)
def test_a_step_takes_at_least_as_long_as_its_disk(units: int, forward_s: float, seconds: float) -> None:
    copies: list[Any] = [Op("aten.copy_.default", 0.0, 2 * INPUT, "bfloat16", "store")] * units
    log = Log(held=[], events=[Enter(StepPart(StepPhase.FORWARD, -1)), *copies], units=[])
    device_s = 4 * units * forward_s
    step = Step(seconds=device_s, exposed_s=0.0, flops=0.0, by_kind={}, waits={}, by_place={})
    costs, asked = costs_of(CLUSTER, "middle", 2), choice("disk")
    assert with_host_work(step, host_work(log, asked, 2), asked, units, costs).seconds == pytest.approx(seconds)
    assert with_host_work(step, host_work(log, choice("host"), 2), asked, units, costs) is step


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = tmp_path_factory.mktemp("model")
    config = {
        "model_type": "llama", "vocab_size": 512, "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
        "num_key_value_heads": 4, "intermediate_size": 512, "max_position_embeddings": 32768, "bos_token_id": None,
    }  # fmt: skip
    (made / "config.json").write_text(json.dumps(config))
    return str(made)


FIXED: dict[str, Any] = {
    "strategy": "full_shard", "micro_batch": 1, "gpus": 2, "seq": SEQ, "units": acc.only_blocks(),
}  # fmt: skip


def test_offloaded_inputs_are_tried_if_nothing_fits_and_the_disk_if_the_host_is_full(folder: str) -> None:
    fixed = {**FIXED, "offloads": ["none"]}
    plain = planned(folder, **fixed, checkpoint_activations="full")
    assert {c.choice.offload.activations for c in plain.found.candidates} == {"device"}
    needed = plain.chosen.memory.needed_bytes
    card = replace(GPUS["h100"], memory_gib=(needed - MARGIN * KEPT / 4) / GIB)
    room = HOST_MARGIN * 1.5 * KEPT / GIB  # of two ranks; buffers on the way to the disk take 1.2
    made = planned(folder, **fixed, checkpoint_activations="full", gpu=card, host_memory_gib=room)
    _, on_host, on_disk = made.found.candidates
    assert [c.choice.offload.activations for c in made.found.candidates] == ["device", "host", "disk:FOLDER"]
    assert [c.fits for c in made.found.candidates] == [False, False, True]
    assert on_host.memory.fits(made.cluster)
    assert "of a machine's memory" in on_host.why
    assert (on_host.host_bytes, on_host.disk_bytes) == (2 * KEPT, 0)
    assert (on_disk.host_bytes, on_disk.disk_bytes) == (2 * KEPT * 3 // LAYERS, 2 * KEPT)
    host, disk = (c.memory.peak for c in (on_host, on_disk))
    assert host == disk
    assert made.chosen.steps["middle"].seconds > on_host.steps["middle"].seconds
    assert made.as_dict()["config"]["offload"] == "activations=disk:FOLDER"
    assert "checkpointing full with inputs on the disk" in str(made.chosen.choice)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"offload": "activations=hots"}, r"Offload\(activations='hots'\) is no place; .*'host'"),
        ({"offload": "activations=host", "checkpoint_activations": "none"}, r"inputs of recomputed units .* is 'none'"),
        (
            {"offload": "activations=disk:/x", "engine": "fsdp2"},
            r"fsdp2 with offload=activations=disk:/x cannot be planned",
        ),
    ],
)
def test_unsupported_combinations_raise_one_sentence(folder: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(acc.UsageError, match=said) as raised:
        planned(folder, **{**FIXED, **options})
    assert "\n" not in str(raised.value)
