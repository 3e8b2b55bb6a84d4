"""Random models and step programs: sharded training is that of the unsharded model, whatever is put together."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from accordion.config import STRATEGIES
from tests.support import programs
from tests.support.programs import CONTAINERS, GIVES, LEAVES, Node, Program

small = st.integers(0, 40)


@st.composite
def leaves(draw: Any) -> Node:
    kind = draw(st.sampled_from(["linear", "linear", "pair", *LEAVES, "again"]))
    return Node(
        kind=kind,
        unit=draw(st.sampled_from(["", "self", "inner", "both"])),
        turns=draw(st.lists(st.integers(0, 3), min_size=1, max_size=2).map(tuple)),
        gives=draw(st.sampled_from(["tensor", "tensor", *GIVES])),
        keeps=draw(st.sampled_from([False, False, True])),
        rows=draw(st.integers(1, 9)),
        bias=draw(st.booleans()),
        dtype=draw(st.sampled_from(["", "", "", "bf16", "fp64"])) if kind in ("linear", "pair", "norm", "list") else "",
    )


def containers(kids: st.SearchStrategy[Node]) -> st.SearchStrategy[Node]:
    return st.builds(
        Node,
        kind=st.sampled_from([*CONTAINERS]),
        kids=st.lists(kids, min_size=1, max_size=3).map(tuple),
        unit=st.sampled_from(["", "self"]),
        turns=st.lists(st.integers(0, 3), min_size=1, max_size=3).map(tuple),
        turn=st.sampled_from(["step", "micro"]),
        checkpoint=st.sampled_from(["", "", "plain", "reentrant"]),
        gives=st.sampled_from(["tensor", "tensor", *GIVES]),
        keeps=st.sampled_from([False, False, True]),
    )


trees = containers(st.one_of(leaves(), containers(st.one_of(leaves(), containers(leaves())))))


def nodes_of(tree: Node) -> list[Node]:
    return [tree, *(node for kid in tree.kids for node in nodes_of(kid))]


def units_in(tree: Node) -> int:
    return sum({"": 0, "self": 1, "inner": 1, "both": 2}[node.unit] for node in nodes_of(tree))


def works(program: Program) -> bool:
    """Leaves out what the engine cannot do."""
    nodes = nodes_of(program.tree)
    apart = any(node.kind in ("sometimes", "drop") for node in nodes)  # ranks do not use the same
    # engine: in a reentrant recomputation every rank must use the parameters that any rank uses.
    if apart and any(node.checkpoint == "reentrant" for node in nodes):
        return False
    # engine: ranks that go apart recompute at different times, which must not gather.
    recomputed = [node for node in nodes if node.checkpoint or (program.checkpoint != "none" and node.unit)]
    return not (apart and any(units_in(node) > (node.unit != "") for node in recomputed))


@st.composite
def all_programs(draw: Any) -> Program:
    strategy = draw(st.sampled_from([*STRATEGIES]))
    steps, micros = draw(st.integers(2, 3)), draw(st.integers(1, 3))
    order = draw(st.sampled_from(["each", "each", "sum", "first", "last"]))
    if STRATEGIES[strategy].hybrid:
        shape = draw(st.sampled_from([(2, 2), (2, 2), (1, 2), (2, 1), (1, 3)]))
    else:
        shape = draw(st.sampled_from([(2,), (3,), (4,), (1,)]))
    return Program(
        tree=draw(trees),
        width=draw(st.integers(5, 9)),
        ties=draw(st.lists(small, max_size=3).map(tuple)),
        frozen=draw(st.lists(small, max_size=4).map(tuple)),
        toggles=draw(st.lists(st.lists(small, max_size=3).map(tuple), max_size=2).map(tuple)),
        strategy=strategy,
        shape=shape,
        reduce=draw(st.sampled_from(["auto", "exchange", "reduce_scatter"])),
        steps=steps,
        micros=micros,
        no_sync=order in ("each", "first") and micros > 1 and draw(st.booleans()),
        checkpoint=draw(st.sampled_from(["none", "none", "full", "selective", "every:2"])),
        order=order,
        between=draw(
            st.lists(st.sampled_from(["", "evaluate", "full_params", "inference", "abandon"]), max_size=steps).map(
                tuple
            )
        ),
        set_to_none=draw(st.booleans()),
        budget_bytes=draw(st.sampled_from([None, 0, 1 << 20])),
        debug=draw(st.sampled_from([(), ("streams",)])),
        packed_bytes=draw(st.sampled_from([programs.layout.PACK_LIMIT_BYTES, 100, 0])),
        padding_bytes=draw(st.sampled_from([programs.layout.PADDING_BYTES, 0])),
        optimizer=draw(st.sampled_from(["sgd", "adamw"])),
        wrapped=draw(st.booleans()),
        input_grad=draw(st.booleans()),
    )


COMMON: dict[str, Any] = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}


@settings(max_examples=10, derandomize=True, **COMMON)
@given(program=all_programs().filter(works))
def test_a_program_trains_as_without_sharding(world, program):
    programs.run(program, world)


@pytest.mark.slow
@settings(max_examples=300, print_blob=True, **COMMON)
@given(program=all_programs().filter(works))
def test_a_fresh_program_trains_as_without_sharding(world, program):
    programs.run(program, world)
