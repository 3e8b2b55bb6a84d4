"""Advice for torch's error "got mixed torch.Tensor and DTensor", raised if a sharded parameter meets a plain tensor."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterable

from torch import nn

from accordion.engine.unit import Unit
from accordion.errors import UsageError

MIXED = "got mixed torch.Tensor and DTensor"
WAYS_OUT = (
    "Outside of its unit's forward, a sharded parameter is a DTensor of which each rank holds some rows. Write a loss on weights "
    "as `weight.pow(2).sum().full_tensor()`; move other code into the model's forward, or make its method an entry point with "
    "`accordion.entry_point(module, 'name of the method')`; or read parameters on all ranks with `param.full_tensor()` or "
    "`with accordion.full_params(model):`. See docs/errors.md."
)


def advise(error: BaseException) -> None:
    """Add `WAYS_OUT` as a note to torch's error about mixed tensors; leave other errors unchanged."""
    if MIXED in str(error) and WAYS_OUT not in getattr(error, "__notes__", ()):
        error.add_note(WAYS_OUT)


def print_advice(error: BaseException) -> None:
    """Print `WAYS_OUT` if torch's error about mixed tensors ended the program and has no note of it."""
    if MIXED in str(error) and WAYS_OUT not in getattr(error, "__notes__", ()):
        print(f"accordion: {WAYS_OUT}", file=sys.stderr, flush=True)


def read_outside(error: BaseException, units: Iterable[Unit]) -> UsageError:
    """Return the error to raise in place of torch's `error` about mixed tensors in a forward.

    It names the sharded parameters of the innermost module in the traceback that has any.
    """
    units = list(units)
    shards = {id(p.sharded): (p.name, unit.name) for unit in units for p in unit.params}
    read = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = next((frame.f_locals.get(name) for name in frame.f_code.co_varnames[:1]), None)
        params = module._parameters.values() if isinstance(module, nn.Module) else ()
        named = [shards[id(param)] for param in params if id(param) in shards]
        if named:
            read = f" ({', '.join(name for name, _ in named)} of unit {named[0][1]!r})"
    names = ", ".join(unit.name or "(root)" for unit in units)
    return UsageError(
        f"the forward read a parameter of a unit{read} outside of that unit's own forward, where it is a shard; choose `units` "
        f"so that one unit holds all modules that read it, or pass the method to entry_point. The units are: {names}."
    )
