"""Plans with offloaded inputs of recomputed units: bytes compared with ranks, streams computed by hand, the search."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

import accordion as acc
from accordion.engine.hooks import engine_of
from accordion.offload.step.deferred_step import tiers_of
from accordion.plan.choice import Choice
from accordion.plan.events import Enter, Land, Launch, Log, Op, StepPart, StepPhase
from accordion.plan.extrapolate.inputs import inputs_of
from accordion.plan.extrapolate.offload import host_bytes, offloaded
from accordion.plan.hardware import GB, GIB, GPUS, MARGIN, REACHED, Cluster
from accordion.plan.parts import by_kind
from accordion.plan.replay.cost import costs_of
from accordion.plan.replay.timeline import simulate
from accordion.plan.search.evaluate import HOST_MARGIN
from accordion.plan.trace.trace import trace
from tests.plan import builders, subjects
from tests.plan.builders import planned

CASE = "inputs on the host"
INPUT = 1 << 30
LAYERS, SEQ, WIDTH = 5, 16384, 512
KEPT = 2 * LAYERS * SEQ * WIDTH  # bytes that inputs of a rank take, in bf16
CLUSTER = Cluster(
    gpu=replace(GPUS["h100"], host_gbps=2 * INPUT / GB / REACHED["middle"].link)
)  # an input in half a second


def choice(activations: str, **more: Any) -> Choice:
    return builders.choice(checkpoint_activations="full", gpus=2, offload=acc.Offload(activations=activations), **more)


def kept_elsewhere(mesh: Any) -> int:
    """Return the bytes of the host that the inputs of one rank take."""
    model = subjects.made("gpt", CASE, "cpu")
    acc.shard(model, mesh, **{**subjects.CASES[CASE].sharding, "offload": acc.Offload(activations="host")})
    for _ in range(2):
        subjects.loss("gpt", model, subjects.batch_of("gpt")).backward()
    engine = engine_of(model)
    assert engine is not None
    return tiers_of(engine).activation_offload.host_bytes


@pytest.mark.slow
def test_bytes_on_the_host_match_what_ranks_take(world: Any) -> None:
    log = trace(subjects.subject_of("gpt", CASE), replace(subjects.run_of("gpt", CASE), device="cuda"))
    inputs = inputs_of(log)
    assert len(inputs) == 4
    assert world.run_mesh((2,), ("shard",), kept_elsewhere)[0] == sum(inputs)
    assert host_bytes(log, choice("host"), 2, CLUSTER) == 2 * sum(inputs)
    assert host_bytes(log, choice("device"), 2, CLUSTER) == 0


def log_of(units: int, forward_s: float) -> Log:
    """Return a log that stores an input before its unit and fetches it one unit ahead; a backward takes three forwards."""

    def product(seconds: float) -> Op:
        flops = seconds * CLUSTER.gpu.tflops * 1e12 * CLUSTER.gpu.products
        return Op("aten.mm.default", flops, 0, "bfloat16", "compute")

    def copy(stream: str) -> Op:
        return Op("aten.copy_.default", 0.0, 2 * INPUT, "bfloat16", stream)

    events: list[Any] = [Enter(StepPart(StepPhase.FORWARD, -1))]
    for u in range(units):
        events += [Enter(StepPart(StepPhase.FORWARD, u)), *([Land(99 + u)] if u else [])]
        events += [Launch(100 + u, "store"), copy("store"), product(forward_s)]
    events += [Enter(StepPart(StepPhase.BACKWARD, -1)), Land(99 + units)]
    for u in reversed(range(units)):
        events.append(Enter(StepPart(StepPhase.BACKWARD, u)))
        for which in [u] * (u == units - 1) + [u - 1] * (u > 0):
            events += [Launch(200 + which, "fetch"), copy("fetch")]
        events += [Land(200 + u), product(3 * forward_s)]
    return Log(held=[], events=events, units=[f"blocks.{u}" for u in range(units)])


@pytest.mark.parametrize(
    ("forward_s", "seconds"),
    [
        # Stores are hidden by forwards. The backward waits half a second for the first fetch.
        (1.0, 20.5),
        # All units leave as fast as the link lets them: the last one's forward is over at 2.5, then one input comes back, and
        # four more beside backwards of 0.3.
        (0.1, 2.5 + 0.5 + 4 * 0.5 + 0.3),
    ],
)
def test_streams_of_offloaded_inputs_match_arithmetic(forward_s: float, seconds: float) -> None:
    step = simulate(offloaded(log_of(5, forward_s), choice("host").offload, 2), costs_of(CLUSTER, "middle", 2))
    assert step.seconds == pytest.approx(seconds, rel=1e-3)
    assert {"copies to the host", "copies from the host"} <= {part.name for part in by_kind(step)}


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


def test_offloaded_inputs_are_tried_if_nothing_fits(folder: str) -> None:
    fixed = {**FIXED, "offloads": ["none"]}
    plain = planned(folder, **fixed, checkpoint_activations="full")
    assert {c.choice.offload.activations for c in plain.found.candidates} == {"device"}
    needed = plain.chosen.memory.needed_bytes
    card = replace(GPUS["h100"], memory_gib=(needed - MARGIN * KEPT / 4) / GIB)
    for room, fits in ((0.9, False), (1.1, True)):  # of the bytes that two ranks take
        made = planned(
            folder,
            **fixed,
            checkpoint_activations="full",
            gpu=card,
            host_memory_gib=room * HOST_MARGIN * 2 * KEPT / GIB,
        )
        assert [c.choice.offload.activations for c in made.found.candidates] == ["device", "host"]
        assert [c.fits for c in made.found.candidates] == [False, fits]
        on_host = made.found.candidates[1]
        assert on_host.memory.fits(made.cluster)
        assert on_host.host_bytes == 2 * KEPT
        assert ("of a machine's memory" in on_host.why) is not fits
    assert made.as_dict()["config"]["offload"] == "activations=host"
    assert "checkpointing full with inputs on the host" in str(made.chosen.choice)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"offload": "activations=hots"}, r"Offload\(activations='hots'\) is no place; .*'host'"),
        ({"offload": "activations=host", "checkpoint_activations": "none"}, r"inputs of recomputed units .* is 'none'"),
        ({"offload": "activations=host", "engine": "fsdp2"}, r"fsdp2 with offload=activations=host cannot be planned"),
    ],
)
def test_unsupported_combinations_raise_one_sentence(folder: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(acc.UsageError, match=said) as raised:
        planned(folder, **{**FIXED, **options})
    assert "\n" not in str(raised.value)
