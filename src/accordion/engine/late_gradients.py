"""Gradients that the end of a backward settles: those that perhaps no rank has."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class UndecidedGradients:
    """Owns, for each parameter without a gradient of this rank's own, what stands for one, and where it is counted who has one.

    A rank whose experts got no token learns from the reduce whether others' did. To ask at each unit would let the host
    wait for the device in the middle of the backward.
    """

    def __init__(self) -> None:
        self._found: dict[int, tuple[Tensor, Tensor, list[tuple[Tensor, int]]]] = {}  # by id of the parameter

    def __bool__(self) -> bool:
        return bool(self._found)

    def note(self, param: Tensor, standing: Tensor | None, grad: Tensor, counted: tuple[Tensor, int] | None) -> None:
        """`grad` comes where `standing` was the parameter's gradient.

        `counted`: a tensor, and the place in it of how many ranks have one; None where this rank does.
        """
        held = self._found.get(id(param))
        if counted is None:
            self._found.pop(id(param), None)
        elif standing is None:
            self._found[id(param)] = param, grad, [counted]
        elif held is not None and standing is held[1]:
            held[2].append(counted)

    def forget(self) -> None:
        self._found.clear()

    def settle(self) -> None:
        """Take away what stands for gradients that no rank has. The host waits, where anything is undecided."""
        if not self._found:
            return
        found, self._found = self._found, {}
        places: dict[int, int] = {}  # of each tensor of counts among all, by its id
        counts: list[Tensor] = []
        at = 0
        for _, _, counted in found.values():
            for sums, _ in counted:
                if id(sums) not in places:
                    places[id(sums)], at = at, at + sums.numel()
                    counts.append(sums)
        numbers = torch.cat(counts).tolist()
        for param, grad, counted in found.values():
            if param.grad is grad and not any(numbers[places[id(sums)] + k] for sums, k in counted):
                param.grad = None


def runs(indices: Sequence[int]) -> list[slice]:
    """Rising indices as slices of neighbours."""
    found: list[slice] = []
    for i in indices:
        if found and found[-1].stop == i:
            found[-1] = slice(found[-1].start, i + 1)
        else:
            found.append(slice(i, i + 1))
    return found
