"""Prediction of the next unit: one surprise costs one guess, and the guesses depend on the order alone."""

from __future__ import annotations

from accordion.engine.order import Phase, UnitOrder


def forward(order: UnitOrder, units: list[int]) -> None:
    order.begin(Phase.FORWARD)
    for unit in units:
        order.visit(Phase.FORWARD, unit)
    order.end(Phase.FORWARD)


def ahead(order: UnitOrder, unit: int, budget: int | None = None, phase: Phase = Phase.FORWARD) -> list[int]:
    return list(order.ahead(phase, unit, [10] * 8, budget))


def test_nothing_is_guessed_before_the_first_step() -> None:
    assert ahead(UnitOrder(), 0) == []


def test_the_order_seen_is_the_order_expected() -> None:
    order = UnitOrder()
    forward(order, [0, 1, 2, 3])
    assert [ahead(order, unit) for unit in range(4)] == [[1], [2], [3], []]
    assert order.ends_with(Phase.FORWARD, 3)
    assert not order.ends_with(Phase.FORWARD, 2)


def test_the_backward_is_expected_reversed_until_it_was_seen() -> None:
    order = UnitOrder()
    forward(order, [0, 1, 2, 3])
    assert [ahead(order, unit, phase=Phase.BACKWARD) for unit in (3, 2, 1)] == [[2], [1], [0]]
    order.begin(Phase.BACKWARD)
    for unit in (3, 1, 2, 0):
        order.visit(Phase.BACKWARD, unit)
    order.end(Phase.BACKWARD)
    assert [ahead(order, unit, phase=Phase.BACKWARD) for unit in (3, 1, 2, 0)] == [[1], [2], [0], []]


def test_one_surprise_costs_one_guess() -> None:
    order = UnitOrder()
    forward(order, [0, 1, 2, 3, 4])
    forward(order, [0, 1, 3, 4])
    assert ahead(order, 1) == [3]
    assert ahead(order, 3) == [4]
    assert ahead(order, 0) == [1]


def test_a_budget_bounds_what_is_ahead_and_loops_end() -> None:
    order = UnitOrder()
    forward(order, [0, 1, 2, 3])
    assert ahead(order, 0, budget=25) == [1, 2]
    assert ahead(order, 0, budget=5) == []
    order.begin(Phase.FORWARD)
    for unit in (0, 1, 0, 1):
        order.visit(Phase.FORWARD, unit)
    assert ahead(order, 0, budget=1000) == [1]


def test_two_orders_that_saw_the_same_say_the_same() -> None:
    orders = [UnitOrder(), UnitOrder()]
    for order in orders:
        forward(order, [0, 2, 1, 3])
        forward(order, [0, 1, 2, 3])
    assert [ahead(orders[0], u, 25) for u in range(4)] == [ahead(orders[1], u, 25) for u in range(4)]
