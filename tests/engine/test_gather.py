"""Copies of a packed message to where small parameters stand: neighbours that lie equally far apart take one."""

from __future__ import annotations

import torch

from accordion.engine.gather import in_runs


def test_neighbours_of_one_shape_that_lie_equally_far_apart_are_copied_at_once() -> None:
    places = [(0, 4), (8, 4), (16, 4), (24, 6), (30, 6), (50, 6), (60, 4)]  # three even ones; three uneven; one alone
    flat, packed = torch.zeros(64), torch.arange(34.0)
    tos = [flat[at : at + numel].view(2, -1) for at, numel in places]
    sources = [part.view(2, -1) for part in packed.split([numel for _, numel in places])]
    runs = list(in_runs(tos, sources))
    assert [tuple(to.shape) for to, _ in runs] == [(3, 2, 2), (1, 2, 3), (1, 2, 3), (1, 2, 3), (1, 2, 2)]
    for to, source in runs:
        to.copy_(source)
    assert all(torch.equal(to, source) for to, source in zip(tos, sources, strict=True))
