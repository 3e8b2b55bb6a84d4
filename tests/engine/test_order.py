"""Prediction of the next unit: one surprise costs one guess, and the guesses depend on the order alone."""

from __future__ import annotations

from accordion.engine.order import Phase, UnitOrder


def seen(phase: Phase, *passes: list[int]) -> UnitOrder:
    """An order that has seen forwards, or a forward 0, 1, 2, 3 and backwards."""
    order = UnitOrder()
    for at, units in [(Phase.FORWARD, [0, 1, 2, 3])] * (phase is Phase.BACKWARD) + [(phase, units) for units in passes]:
        order.begin(at)
        for unit in units:
            order.visit(at, unit)
        order.end(at)
    return order


def ahead(
    order: UnitOrder, units: list[int], budget: int | None = None, phase: Phase = Phase.FORWARD
) -> list[list[int]]:
    order.budget_bytes, order.num_bytes = budget, [10] * 8
    return [list(order.ahead(phase, unit)) for unit in units]


def test_the_order_seen_is_the_order_expected_and_one_surprise_costs_one_guess() -> None:
    assert ahead(UnitOrder(), [0]) == [[]]
    once = seen(Phase.FORWARD, [0, 1, 2, 3])
    assert ahead(once, [0, 1, 2, 3]) == [[1], [2], [3], []]
    assert [once.ends_with(Phase.FORWARD, unit) for unit in (2, 3)] == [False, True]
    assert ahead(seen(Phase.FORWARD, [0, 1, 2, 3, 4], [0, 1, 3, 4]), [0, 1, 3]) == [[1], [3], [4]]


def test_the_backward_is_expected_reversed_until_it_was_seen() -> None:
    assert ahead(seen(Phase.BACKWARD), [3, 2, 1], phase=Phase.BACKWARD) == [[2], [1], [0]]
    assert ahead(seen(Phase.BACKWARD, [3, 1, 2, 0]), [3, 1, 2, 0], phase=Phase.BACKWARD) == [[1], [2], [0], []]


def test_a_budget_bounds_what_is_ahead_and_loops_end() -> None:
    order = seen(Phase.FORWARD, [0, 1, 2, 3])
    assert ahead(order, [0], budget=25) == [[1, 2]]
    assert ahead(order, [0], budget=5) == [[]]
    assert ahead(seen(Phase.FORWARD, [0, 1, 0, 1]), [0], budget=1000) == [[1]]
