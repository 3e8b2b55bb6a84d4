"""The search: fixed fields, logs derived from others, accumulation, offload, bounds and verdicts."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from functools import partial
from itertools import permutations, product

import pytest
import torch

import accordion as acc
from accordion.config import checkpointing_named
from accordion.engine.layout import ALIGN_BYTES
from accordion.offload.budget import estimate_memory
from accordion.plan.choice import moved_as
from accordion.plan.events import Alloc, Category, Collective, Enter, Free, Log
from accordion.plan.hardware import GIB, GPUS, TELLABLE, Cluster
from accordion.plan.replay.allocator import reserved_bytes
from accordion.plan.replay.offload import disk_bytes, host_bytes, offloaded
from accordion.plan.replay.peak import peak_of
from accordion.plan.replay.predict import log_of, memory_of, step_of, step_of_choice
from accordion.plan.search import evaluate, traces
from accordion.plan.search.bounds import Floor, floor_of, least_bytes, least_host_bytes, messages_s
from accordion.plan.search.evaluate import HOST_MARGIN, Candidate, Evaluator
from accordion.plan.search.search import SearchResult, closest, search_in, why_not
from accordion.plan.trace.setup import Subject, TrainingSetup
from accordion.plan.trace.trace import trace
from accordion.sharding import offload_words
from tests.plan.builders import BF16, OFFLOADS, choice, gpt, run_of, space, traced
from tests.support.checks import logged

CLUSTER = Cluster(gpu=GPUS["h100"])
NARROW = acc.Precision(params=torch.bfloat16, reduce=torch.bfloat16)  # else sums take as long as all gathers


# -- the space


def test_fixed_fields_are_not_searched():
    left = space(strategies=["full_shard"], checkpointing=["full"], micro_batches=[2]).choices()
    assert left == [choice(checkpoint_activations="full", micro_batch=2)]


def test_accumulation_follows_from_the_global_batch():
    fixed = {"strategies": ["full_shard"], "checkpointing": ["none"]}
    left = space(**fixed, global_batch=96, micro_batches=[1, 2, 4, 8]).choices()
    assert {(c.micro_batch, c.accumulate) for c in left} == {(1, 12), (2, 6), (4, 3)}
    with pytest.raises(acc.UsageError, match="global-batch"):
        space(global_batch=7).choices()


def test_hybrids_are_tried_with_shards_over_one_two_and_four_nodes():
    fixed = {"strategies": ["hybrid_shard"], "checkpointing": ["none"], "micro_batches": [1], "gpus": [64]}
    assert [(c.replicas, c.shards) for c in space(**fixed).choices()] == [(8, 8), (4, 16), (2, 32)]
    assert [c.replicas for c in space(**fixed, replicas=2).choices()] == [2]
    with pytest.raises(acc.UsageError, match="there is no configuration to try"):
        space(**fixed, replicas=3).choices()


def test_several_nodes_give_about_200_choices():
    assert len(space(gpus=[16, 32]).choices()) >= 200


# -- logs from other logs


@pytest.mark.parametrize("strategy", [acc.FULL_SHARD, pytest.param(acc.SHARD_OPTIM, marks=pytest.mark.slow)])
def test_micro_batches_in_between_are_interpolated(strategy):
    run, asked = run_of(8, strategy=strategy, accumulate=5), choice(strategy=strategy.name, accumulate=5)
    part = replace(run, accumulate=asked.num_traced)
    whole, some = trace(gpt(2), run), trace(gpt(2), part)
    assert peak_of(some).num_bytes == pytest.approx(peak_of(whole).num_bytes, rel=1e-3)
    derived = step_of_choice(some, part, asked, CLUSTER, "middle")
    wanted = step_of(whole, run, CLUSTER)
    assert derived.seconds == pytest.approx(wanted.seconds, rel=0.01)
    assert derived.flops == pytest.approx(wanted.flops, rel=1e-6)


# -- secondary shards


def gathered(log: Log) -> dict[str, list[tuple[str, int]]]:
    """Return the bytes and axis of gathers, by phase."""
    phase, gathers = "", dict[str, list[tuple[str, int]]]()
    for event in log.events:
        if isinstance(event, Enter):
            phase = event.place.phase.value
        elif isinstance(event, Collective) and event.kind == "gather":
            gathers.setdefault(phase, []).append((event.axis, event.num_bytes))
    return gathers


def test_a_backward_with_secondary_shards_gathers_inside_the_node():
    """All blocks but the last are gathered again, in messages of their full buffers; the secondary shards take memory."""
    plain, kept = (traced(4, 16, precision=NARROW, **more) for more in ({}, {"secondary": 8}))
    without, others = gathered(plain), gathered(kept)
    assert others["forward"] == without["forward"]
    assert {axis for axis, _ in without["backward"]} == {"shard"}
    assert {axis for axis, _ in others["backward"]} == {"near"}
    assert len(others["backward"]) == len(without["backward"])
    parts = [n // 8 // ALIGN_BYTES * ALIGN_BYTES for _, n in others["backward"]]  # without the tags
    taken = [e.num_bytes for e in kept.events if isinstance(e, Alloc) and e.category is Category.GATHERED]
    before = [e.num_bytes for e in plain.events if isinstance(e, Alloc) and e.category is Category.GATHERED]
    assert [taken.count(n) - before.count(n) for n in parts] == [len(parts)] * len(parts), "one for each, of one size"


def test_secondary_shards_make_a_step_over_nodes_faster():
    cluster = replace(CLUSTER, network_gbps=1.0)
    asked = ({"precision": NARROW, **given} for given in ({}, {"secondary": 8}, {"secondary": 16}))
    plain, kept, inside = (step_of(traced(4, 16, **given), run_of(16, **given), cluster) for given in asked)
    assert kept.seconds < plain.seconds
    assert inside.seconds == plain.seconds, "all ranks: nothing is kept"


def test_secondary_shards_are_tried_with_the_fastest_choices():
    fixed = {"strategies": ["full_shard"], "checkpointing": ["none"], "micro_batches": [1], "precision": NARROW}

    def searched(**given: object) -> SearchResult:
        return search_in(space(lambda size: gpt(4, size), **fixed, num_params=10_000, network_gbps=1.0, **given))

    def kept(result: SearchResult) -> list[int | None]:
        return [c.choice.sharding.secondary for c in result.candidates]

    result = searched(gpus=[16], copies=True)
    assert kept(result) == [None, 8]
    assert result.best.choice.sharding.secondary == 8
    assert "copies kept over 8" in str(result.best.choice)
    assert kept(searched(gpus=[8], copies=True)) == [None]


# -- offload


def test_offload_moves_states_and_all_gradients_off_the_device():
    plain = traced(3, 8)
    before = peak_of(plain)
    for offload, kept in (("optimizer", 0.5), ("all", 0.0), ("disk", 0.0)):
        moved = offloaded(plain, choice(offload=OFFLOADS[offload]).offload, compute_bytes=2)
        peak = peak_of(moved)
        assert peak.highest["optimizer"] <= 0.01 * before.highest["optimizer"] + 4096
        assert peak.highest["parameters"] == pytest.approx(kept * before.highest["parameters"], rel=0.05, abs=4096)
        assert peak.num_bytes < before.num_bytes
        gradients = {e.number for e in moved.events if isinstance(e, Alloc) and e.category is Category.GRADIENTS}
        assert gradients <= {e.number for e in moved.events if isinstance(e, Free)}
        for expandable in (True, False):
            assert reserved_bytes(moved, expandable=expandable) >= peak.num_bytes


def test_host_and_disk_bytes_equal_those_that_tiers_state():
    """For all ranks of a machine, and a model whose parameters are large compared with pages."""
    wide = gpt(2, width=1024)
    log = trace(wide, run_of(8))
    for places in ("optimizer", "all", "disk"):
        chosen = choice(offload=OFFLOADS[places])
        estimated = estimate_memory(wide.make(), chosen.offload, 8, precision=BF16)
        assert host_bytes(log, chosen, 2, CLUSTER) == pytest.approx(8 * estimated.host, rel=0.02)
        assert disk_bytes(log, chosen, CLUSTER) == pytest.approx(8 * estimated.disk, rel=0.02)


def take_host_memory(mesh) -> int:
    """Return the bytes of the arena that `shard` reports in its log."""
    with logged() as messages:
        acc.shard(gpt(4).make(), mesh, precision=BF16, offload=OFFLOADS["all"])
    return next(
        int(match[1]) for text in messages if (match := re.match(r"offload: .* take (\d+) bytes on the host", text))
    )


def test_estimated_host_memory_equals_the_engines_arena(run_fake):
    """One rank of eight; the optimizer's states are not in the arena."""
    places = choice(offload=OFFLOADS["all"]).offload
    assert run_fake(8, 0, take_host_memory) == estimate_memory(gpt(4).make(), places, 8, precision=BF16).arena


# -- the search

CARD_GIB = 2.09  # three blocks need 2.092 with states on the card, and 2.088 without


def searched_on_a_small_card(**fixed: object) -> SearchResult:
    """Search for two GPUs on which the states do not fit next to the rest of a step."""
    gpu = replace(GPUS["l40s"], memory_gib=CARD_GIB)
    fixed |= {"strategies": ["full_shard"], "micro_batches": [2], "precision": BF16, "num_params": 700_000}
    return search_in(space(lambda size: gpt(3, batch=size), **fixed, gpus=[2], gpu=gpu, node=2))


@pytest.fixture(scope="module")
def found() -> SearchResult:
    return searched_on_a_small_card(checkpointing=["none", "full"])


def test_an_offload_is_tried_if_the_one_before_does_not_fit(found):
    by = {(c.choice.checkpointing, offload_words(c.choice.offload)): c for c in found.candidates}
    assert {key for key, c in by.items() if key[1] == "none" and c.fits} == set()
    assert found.best.choice.offload.is_any
    offload, way = moved_as(found.best.choice).offload, found.best.choice.checkpointing
    own = traced(3, 2, offload=offload, checkpoint_activations=way)  # what is chosen was traced with its offload
    assert found.best.memory.peak.num_bytes == peak_of(own).num_bytes
    for (checkpointing, offload), c in by.items():
        if offload != "none":
            assert not by[checkpointing, "none"].fits
        assert bool(c.why) == (c is not found.best)
        if c.fits:
            assert c.memory.needed_bytes < CARD_GIB * GIB


def test_the_closest_candidate_was_evaluated(found):
    """It is no choice that a bound ruled out, for which only a lower bound is known."""
    ruled_out = Candidate(choice=choice(gpus=2), fits=False, least_bytes=1, bound="takes more than full_shard")
    assert closest([ruled_out, *found.candidates], space(gpus=[2])).memory is not None
    assert closest([ruled_out], space(gpus=[2])) is ruled_out


def test_offload_that_no_machine_holds_is_reported():
    small = searched_on_a_small_card(checkpointing=["full"], offloads=[OFFLOADS["all"]], host_memory_gib=0.001)
    assert small.best is None
    assert "of a machine's memory" in small.candidates[0].why


def test_host_memory_defaults_to_the_usual_machine_of_a_gpu():
    usual, custom = Cluster(gpu=GPUS["h100"]), Cluster(gpu=GPUS["h100"], host_memory_gib=512)
    assert usual.host_bytes == 2048 * GIB
    assert usual.host_is == "host memory: 2 TiB a node of 8, the usual one; host_memory_gib changes it"
    assert custom.host_is == "host memory: 512 GiB a node of 8, as given"
    # The least host memory of 70 B parameters, in float32 with gradients and states.
    looked = space(precision=BF16, num_params=70 * 10**9)
    assert least_host_bytes(choice(offload=OFFLOADS["all"]), looked) * HOST_MARGIN < usual.host_bytes


WIDE: dict[str, Log] = {}
"""Logs of the model of `test_bounds_change_no_recommendation`, traced once for all its searches."""


def log_of_wide(subject: Subject, run: TrainingSetup) -> Log:
    if repr(run) not in WIDE:
        WIDE[repr(run)] = log_of(subject, run)
    return WIDE[repr(run)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("memory_gib", "host_gib"),
    [
        (4.0, 15),  # full_shard fits with states on disk; those of a hybrid are too much for a card, and for a machine
        *((m, h) for m in (3.2, 4.0, 5.2, 48.0) for h in (5, 64)),
    ],
)
def test_bounds_change_no_recommendation(memory_gib, host_gib, monkeypatch):
    """Compared with a search that evaluates everything; two billion parameters."""
    monkeypatch.setattr(traces, "log_of", log_of_wide)
    subject_for = partial(gpt, 40, width=2048)
    ways = ["none", "every:2", "full"] if memory_gib == 48.0 else ["full"]
    fixed = {"strategies": ["full_shard", "hybrid_shard"], "checkpointing": ways, "micro_batches": [1]}
    gpu = replace(GPUS["l40s"], memory_gib=memory_gib)
    cluster = Cluster(gpu=gpu, gpus=16, network_gbps=0.3, host_memory_gib=host_gib)
    num_params = sum(p.numel() for p in subject_for(1).make().parameters())
    looked = space(subject_for, **fixed, cluster=cluster, precision=BF16, num_params=num_params)
    quick = search_in(looked)
    monkeypatch.setattr(Evaluator, "_bound_of", lambda self, choice: "")
    for bound in ("least_bytes", "least_host_bytes"):
        monkeypatch.setattr(evaluate, bound, lambda choice, space: 0)
    whole = search_in(looked)
    assert all(c.memory is not None for c in whole.candidates)
    if (memory_gib, host_gib) == (4.0, 15):
        assert [c.bound for c in quick.candidates if c.bound] == ["needs at least 21 of 15 GiB of a machine's memory"]
    one, other = (best and (best.choice, best.memory, best.steps) for best in (quick.best, whole.best))
    assert one == other


def test_host_bytes_are_never_below_their_bound():
    """Bytes derived from a log are not below the bound, and a choice whose states fit no machine is not traced."""
    subject = gpt(2, width=1024)
    elements = sum(p.numel() for p in subject.make().parameters())
    for gpus, optimizer in ((8, "adamw"), (16, "sgd")):
        looked = space(precision=BF16, optimizer=optimizer, num_params=elements)
        log = trace(subject, looked.setup(choice(gpus=gpus, precision=BF16)))
        for tier in ("optimizer", "all"):
            asked = choice(gpus=gpus, offload=OFFLOADS[tier])
            least, actual = least_host_bytes(asked, looked), host_bytes(log, asked, 2, CLUSTER)
            assert 0.8 * actual < least <= actual
    narrow, wide = space(precision=BF16, num_params=elements), space(num_params=elements)
    disk = least_host_bytes(choice(offload=OFFLOADS["disk"]), narrow)
    assert disk == elements * (4 + 4 + 2) < least_host_bytes(choice(offload=OFFLOADS["all"]), wide)

    gpu = replace(GPUS["l40s"], memory_gib=2.0)  # tracing would fail here
    small = Cluster(gpu=gpu, host_memory_gib=20)
    looked = space(precision=BF16, cluster=small, num_params=2 * 10**9)
    none, disk = Evaluator(looked, lambda text: None).candidates([choice(gpus=16, strategy="hybrid_shard", replicas=2)])
    assert (none.memory, disk.memory, disk.fits) == (None, None, False)
    assert offload_words(disk.choice.offload) == OFFLOADS["disk"]
    assert disk.bound == "needs at least 20 of 20 GiB of a machine's memory"


def test_least_bytes_include_a_strategys_states():
    billion = 10**9
    looked = space(precision=BF16, num_params=billion)
    assert least_bytes(choice(), looked) == 1.5 * billion
    assert least_bytes(choice(strategy="shard_grad_op"), looked) == 3.5 * billion
    assert least_bytes(choice(strategy="no_shard"), looked) == 14 * billion
    assert least_bytes(choice(strategy="hybrid_shard", gpus=16, replicas=2), looked) == 1.5 * billion
    assert least_bytes(choice(strategy="hybrid_shard_optim", gpus=16, replicas=2), looked) == 0.75 * billion
    assert least_bytes(choice(offload=OFFLOADS["all"]), looked) == 0


def test_a_choice_that_cannot_be_chosen_is_not_traced():
    """FULL_SHARD bounds the others in memory, and in time without waits. A trace would raise here."""
    cluster = replace(CLUSTER, network_gbps=0.1)
    evaluator = Evaluator(space(precision=BF16, cluster=cluster, num_params=10**6), lambda text: None)
    evaluator._rates.update({8: 2.0, 64: 2.0})  # samples a second of the fastest that fits
    for gpus, floor, reason in (
        (8, Floor(GIB, 0.625), "20 % slower"),
        (8, Floor(GIB, 0.495), "only 1 % faster"),
        (8, Floor(100 * GIB, 0.1), "107.0 GiB"),
        (64, Floor(GIB, 0.1, gathered=(GIB,)), "if only its messages took time"),
        (64, Floor(GIB, 0.1, reduced=(GIB,)), "if only its messages took time"),
    ):
        evaluator._floors[choice(gpus=gpus)] = floor
        candidate = evaluator.candidate(choice(strategy="shard_grad_op", gpus=gpus))
        assert reason in candidate.bound
        assert not candidate.fits
    inside = choice(strategy="hybrid_shard", gpus=64, replicas=8)  # its messages stay in the node: it comes first
    evaluator._floors[choice(gpus=64)] = Floor(GIB, 0.1, gathered=(GIB,))
    assert evaluator.promising([choice(strategy="shard_grad_op", gpus=64), inside])[0] == inside
    evaluator._floors[choice()] = Floor(GIB, 0.4)  # a quarter faster if nothing waited: it may win
    with pytest.raises((TypeError, AttributeError)):
        evaluator.candidate(choice(strategy="shard_grad_op"))


@pytest.mark.parametrize(
    "name",
    [
        "hybrid_shard_optim",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("shard_grad_op", "hybrid_shard", "shard_optim")),
    ],
)
def test_no_step_is_faster_than_its_messages(name):
    """The messages' time, from FULL_SHARD's log, bounds the traced step, and is close to it if only messages take time."""
    cluster = replace(CLUSTER, network_gbps=0.01)
    looked, base = space(precision=BF16, cluster=cluster), choice(gpus=16, precision=BF16)
    asked = choice(strategy=name, gpus=16, replicas=2 if "hybrid" in name else 1, precision=BF16)
    log = trace(gpt(3), looked.setup(base))
    floor = floor_of(log, 0, step_of(log, looked.setup(base), cluster), base, cluster)
    run = looked.setup(asked)
    step = step_of(trace(gpt(3), run), run, cluster)
    assert 0.3 * step.seconds < messages_s(asked, floor, looked) <= step.seconds


@pytest.mark.parametrize("way", ["full", *(pytest.param(w, marks=pytest.mark.slow) for w in ("every:2", "selective"))])
def test_recomputation_adds_its_forward_to_the_bound(way):
    looked, base = space(precision=BF16), choice(precision=BF16)
    log = trace(gpt(4), looked.setup(base))
    floor = floor_of(log, GIB, step_of(log, looked.setup(base), CLUSTER), base, CLUSTER)
    bound = floor.recomputing(checkpointing_named(way))
    run = looked.setup(base.but(checkpoint_activations=way))
    step = step_of(trace(gpt(4), run), run, CLUSTER)
    assert bound.num_bytes == 0
    assert floor.seconds < bound.seconds <= step.seconds - step.exposed_s


# -- a plan calls one configuration slower than another only if that holds when each rate is a little off

SLOW = Cluster(  # slow enough that a small model's kernels are not all as short as their launch
    gpu=replace(GPUS["h100"], tflops=0.05, bandwidth_gbps=40.0, link_gbps=0.1, latency_s=1e-4, attention=0.01)
)


def off_by(most: float, draw: random.Random) -> Cluster:
    """Return GPUs whose rates of kernels, copies and messages are up to so much higher or lower, each independently."""
    names = ("products", "attention", "bandwidth_gbps", "link_gbps", "latency_s")
    factors = {name: 1 + draw.choice((-1, 1)) * most * draw.random() ** 0.2 for name in names}
    return replace(SLOW, gpu=replace(SLOW.gpu, **{name: getattr(SLOW.gpu, name) * x for name, x in factors.items()}))


def test_a_claimed_order_holds_for_rates_that_are_a_little_off():
    """10 % are enough for rates that are 4.7 % off independently."""
    draw, candidates, runs = random.Random(0), list[Candidate](), list[tuple[Log, TrainingSetup]]()
    for strategy, way in product((acc.FULL_SHARD, acc.SHARD_GRAD_OP, acc.NO_SHARD), ("none", "full")):
        fixed = {"strategy": strategy, "checkpoint_activations": way}
        run, log, asked = run_of(8, **fixed), traced(3, 8, **fixed), choice(**fixed, micro_batch=2)
        steps = {"middle": step_of(log, run, SLOW)}
        candidates.append(Candidate(choice=asked, fits=True, least_bytes=0, memory=memory_of(log), steps=steps))
        runs.append((log, run))
    claimed = {
        (a, b): why_not(candidates[b], candidates[a], space(cluster=SLOW)).endswith("slower")
        for a, b in permutations(range(len(candidates)), 2)
    }
    assert sum(claimed.values()) >= 5
    most = TELLABLE / (2 + TELLABLE) - 5e-4
    flipped = 0
    for _ in range(16):
        other = off_by(most, draw)
        seconds = [step_of(log, run, other).seconds for log, run in runs]
        for (a, b), is_claimed in claimed.items():
            assert not is_claimed or seconds[a] < seconds[b]
            nearer = candidates[a].steps["middle"].seconds < candidates[b].steps["middle"].seconds
            flipped += not is_claimed and nearer and seconds[a] > seconds[b]
    assert flipped > 0, "no pair was close: the test says nothing"
