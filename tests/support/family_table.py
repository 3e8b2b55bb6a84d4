"""Train model families of transformers with and without sharding, and write the differences as docs/models.md.

`python -m tests.support.family_table > docs/models.md` writes the page anew.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import accordion as acc
from accordion.engine.tree import map_tensors
from accordion.units import choose_units
from tests.inside import units_of
from tests.pool import Pool
from tests.support.checks import assert_at_rest
from tests.support.compare import Case, Twins, seed_of
from tests.support.families import FAMILIES, Family
from tests.support.family_inputs import loss_of
from tests.support.reference import grads_of, params_of

LR = 1e-2
# Biases of keys: they shift all scores of a query alike, which the softmax does not see. Their gradient is zero but for
# rounding, and another noise when a model's own sums are made in another order; it is measured by the weight's beside it.
KEY_BIASES = ("*k_proj.bias", "*key.bias", "*key_proj.bias", "*k_lin.bias", "*k_head.bias")


@dataclass(frozen=True, slots=True, kw_only=True)
class Worst:
    """The largest error among tensors, relative to the largest value of its tensor, and the name of that tensor."""

    error: float = 0.0
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Result of `compare` on one rank. `tied`: names of each tied parameter. `grads`, `losses`, `params`: largest errors of the
    sharded run against the unsharded one."""

    num_params: int
    units: dict[str, int]  # class -> number, without the root
    tied: list[list[str]]
    grads: Worst
    losses: Worst
    params: Worst


def case_of(name: str, compute: torch.dtype | None = None, use_reentrant: bool | None = None, **options: Any) -> Case:
    """Return the `Case` of two steps of the family `name`.

    `compute`: dtype of the weights and of floating inputs of each unit; also of buffers, if the family needs that.
    `use_reentrant`: argument of the model's own activation checkpointing, in both runs; None: no checkpointing. `options`:
    arguments of `shard`.
    """
    family = FAMILIES[name]
    buffers = compute if family.bf16 == "with buffers" else None

    def build() -> nn.Module:
        model = family.build()
        if use_reentrant is not None:
            with warnings.catch_warnings():  # the name that takes its place is not in all of transformers 5
                warnings.simplefilter("ignore", FutureWarning)
                model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
        return model

    def reference() -> nn.Module:
        model = build()
        for buffer in model.buffers():
            buffer.data = cast(buffer.data, buffers)
        if compute is not None:
            cast_inputs(model, compute)
        return model

    def run(model: nn.Module, step: int) -> Tensor:
        loss = loss_of(model, family.batch(step, dist.get_rank()), seed_of(step))
        loss.backward()
        return loss.detach()

    return Case(
        build=build,
        run=run,
        reference=reference,
        options={"precision": acc.Precision(params=compute, buffers=buffers), **options},
        # With momentum, so that parameters tell of the gradients of both steps. AdamW divides rounding by rounding.
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=LR, momentum=0.9),
    )


def cast_inputs(model: nn.Module, compute: torch.dtype) -> None:
    """Register hooks that cast the floating inputs of each module that `shard` would make a unit to `compute`. A tensor that is
    passed twice, as queries and as keys, is cast once."""

    def take(module: nn.Module, args: Any, kwargs: Any) -> Any:
        found: dict[int, Tensor] = {}

        def once(tensor: Tensor) -> Tensor:
            if id(tensor) not in found:
                found[id(tensor)] = cast(tensor, compute)
            return found[id(tensor)]

        return map_tensors(once, (args, kwargs))

    for _, module in choose_units(model, None):
        module.register_forward_pre_hook(take, with_kwargs=True)


def cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def compare(mesh: DeviceMesh, name: str, entered: bool = False, **arguments: Any) -> Found:
    """Train the family `name` for two steps sharded and unsharded, and return the differences on this rank. Collective.

    `entered`: make `forward` of each unit an entry point, for models that call it directly. `arguments`: of `case_of`.
    """
    twins = Twins(mesh, case_of(name, **arguments))
    plain, model = twins.unsharded, twins.sharded.model
    tied = [names for names in names_of(model) if len(names) > 1]
    assert tied == [names for names in names_of(plain.model) if len(names) > 1]
    for unit in units_of(model)[1:] if entered else ():
        acc.entry_point(unit.module(), "forward")
    losses: list[dict[str, Tensor | None]] = [{}, {}]
    grads = Worst()
    for step in range(2):
        for all_of_run, loss in zip(losses, twins.run(step), strict=True):
            all_of_run[f"loss of step {step}"] = loss
        wanted, _ = plain.reduce()
        grads = grads if step else worst(grads_of(model), wanted, *KEY_BIASES)
        plain.step()
        twins.sharded.step()
        assert_at_rest(model)
    return Found(
        num_params=sum(p.numel() for p in plain.params.values()),
        units=dict(Counter(type(unit.module()).__name__ for unit in units_of(model)[1:])),
        tied=tied,
        grads=grads,
        losses=worst(*losses),
        params=worst(params_of(model), plain.masters, "*bias"),
    )


def worst(found: Mapping[str, Tensor | None], wanted: Mapping[str, Tensor | None], *biases: str) -> Worst:
    """Return the largest error of `found` against `wanted`, relative to the largest value of the wanted tensor. Fails if only
    one of the two has a tensor. `biases`: patterns of names of biases, whose error is relative to their layer's weight if that
    is larger."""
    assert found.keys() == wanted.keys()
    result = Worst()
    for name, expected in wanted.items():
        value = found[name]
        if expected is None or value is None:
            assert value is expected, f"{name} is {value}, should be {expected}"
            continue
        assert (value.shape, value.dtype) == (expected.shape, expected.dtype), name
        beside = wanted.get(name.removesuffix("bias") + "weight") if any(fnmatch(name, b) for b in biases) else None
        largest = max(t.abs().max().item() for t in (expected, beside) if t is not None)
        error = (value - expected).abs().max().item()
        error = error / largest if largest else error
        if not error <= result.error:  # a NaN is the worst
            result = Worst(error=error, name=name)
    return result


def names_of(model: nn.Module) -> list[list[str]]:
    """Return a list of names for every parameter; a tied one has several."""
    names: dict[int, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(p), []).append(name)
    return list(names.values())


# -- the table

WORKING = tuple(name for name, family in FAMILIES.items() if not family.fails)
RANKS = 2
INTRO = """\
# Model families

Each row is a class of transformers {version}, built from a small config with random weights and trained for two
steps on {ranks} ranks, with the units that `acc.shard` finds and another batch on each rank. The reference is the
same two steps without sharding, on the batches of all ranks. Errors are the largest of any tensor and rank,
in float32: of the first step's gradients relative to the largest value of the gradient, and of both losses
relative to the loss. Dropout is on. Parameters after two steps agree as closely, and a parameter without a
gradient has none in either run.

Rows that are not 0 differ only by the order of sums: if a unit is called several times, each call's gradient
is summed over ranks. If several units read a tensor, such as an encoder's output, its gradient is summed as
without sharding, bit for bit.

`bf16`: with `Precision(params=torch.bfloat16)` the same holds, compared with bfloat16 weights over float32
masters without sharding. It is "with buffers" if the model needs `buffers=torch.bfloat16` too, "no" if the
model itself does not compute in bfloat16, and has a bound if the model adds or keeps gradients in another
precision than Accordion does.

| class | parameters | units | tied | gradients | losses | bf16 |
|---|---:|---|---|---:|---:|---|
"""
OUTRO = """
The table was made with layer drop off (`layerdrop=0.0` and the like; some configs of transformers default to
0.1). With it on, ranks skip different layers, and each makes dummy calls of those that it skips.

## What does not train

| class | why |
|---|---|
"""
AGAIN = """
`tests/engine/test_families.py` makes this table and compares it with this page;
`python -m tests.support.family_table > docs/models.md` writes it again.
"""


def render(rows: Mapping[str, list[Found]]) -> str:
    """Return the text of docs/models.md. `rows`: name of a family -> result of `compare` on each rank."""
    import transformers

    lines = [row(FAMILIES[name], ranks) for name, ranks in sorted(rows.items())]
    fails = [f"| `{name}` | {family.fails} |\n" for name, family in sorted(FAMILIES.items()) if family.fails]
    intro = INTRO.format(version=transformers.__version__, ranks=RANKS)
    return intro + "".join(lines) + OUTRO + "".join(fails) + AGAIN


def row(family: Family, ranks: list[Found]) -> str:
    found = ranks[0]
    units = ", ".join(f"{count} `{cls}`" for cls, count in found.units.items()) or "the root alone"
    tied = "<br>".join(" = ".join(f"`{name}`" for name in names) for names in found.tied[:2])
    if found.tied[2:]:
        tied += f"<br>and {len(found.tied) - 2} more"
    errors = [
        power_of_ten(max(worst.error for worst in kind))
        for kind in ([r.grads for r in ranks], [r.losses for r in ranks])
    ]
    bf16: str = family.bf16
    if family.bf16_tolerance > 1e-6:
        bf16 += f", {power_of_ten(family.bf16_tolerance)}"
    return f"| `{family.cls}` | {found.num_params:,} | {units} | {tied} | {' | '.join(errors)} | {bf16} |\n"


def power_of_ten(error: float) -> str:
    """Return `error` rounded up to a power of ten, as text such as "< 1e-6"; "0" for 0."""
    return f"< 1e{math.floor(math.log10(error)) + 1}" if error else "0"


def main() -> None:
    ranks = Pool(RANKS)
    try:
        print(render({name: ranks.run(RANKS, compare, name) for name in WORKING}), end="")
    finally:
        ranks.close()


if __name__ == "__main__":
    from tests.support import family_table  # ranks find `compare` under the name of this file

    family_table.main()
