"""No access of device memory lacks an order or comes after a free, for any strategy, precision, tier and program."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
from torch import nn

import accordion as acc
from accordion.engine import reduce
from accordion.engine.streams import SideStream
from accordion.safety.divergence import DivergenceMonitor
from tests.happens_before import programs
from tests.happens_before.checker import Checker, Event, Stream
from tests.happens_before.programs import Experts, Odd, Run, Small, Steps, begun, on_side, trained
from tests.support.checks import PlantedError
from tests.support.sample import sampled

pytestmark = [
    pytest.mark.cpu("it stands in for a device"),
    pytest.mark.filterwarnings("ignore"),  # of torch, of a process group in Python
]
BF16 = acc.Precision(params=torch.bfloat16)
DISK = "disk:"  # and the test's folder
SCATTERED = replace(acc.FULL_SHARD, reduce="reduce_scatter")


def steps(precision: acc.Precision | None = BF16, **options: object) -> Steps:
    """Return the `Steps` with these options, of which some are for `shard`."""
    own = {name: options.pop(name) for name in list(options) if name in Steps.__dataclass_fields__}
    if precision is not None:
        options["precision"] = precision
    return Steps(options=options, **own)


ON_DEVICE: dict[str, Steps] = {
    "full, float32": steps(None),
    "full": steps(),
    "full, float16": steps(acc.Precision(params=torch.float16)),
    "full, reduced in bfloat16": steps(acc.Precision(params=torch.bfloat16, reduce=torch.bfloat16)),
    "full, scattered": steps(strategy=SCATTERED),
    "full, uneven": steps(num_ranks=3),
    "full, uneven, scattered": steps(num_ranks=3, strategy=SCATTERED),
    "full, finite": steps(debug="finite"),
    "grad_op": steps(strategy=acc.SHARD_GRAD_OP),
    "grad_op, recomputed": steps(strategy=acc.SHARD_GRAD_OP, checkpoint_activations="every:2"),
    "optim, no_sync": steps(strategy=acc.SHARD_OPTIM, micros=2, no_sync=True),
    "none, float32": steps(None, strategy=acc.NO_SHARD),
    "none": steps(strategy=acc.NO_SHARD),
    "hybrid": steps(strategy=acc.HYBRID_SHARD),
    "hybrid, no_sync": steps(strategy=acc.HYBRID_SHARD, micros=3, no_sync=True),
    "hybrid_optim": steps(strategy=acc.HYBRID_SHARD_OPTIM),
    "hybrid_optim, float32": steps(None, strategy=acc.HYBRID_SHARD_OPTIM),
    "recomputed": steps(checkpoint_activations="full"),
    "recomputed, selective": steps(checkpoint_activations="selective"),
    "recomputed by the caller": steps(build=programs.Recomputed),
    "frozen": steps(trained=(".qkv.", "norm1")),
    "frozen, recomputed": steps(trained=(".qkv.", "norm1"), checkpoint_activations="full"),
    "another dim": steps(build=lambda: Small(Experts, 64), num_ranks=16),
    "another dim, float32, scattered": steps(None, build=lambda: Small(Experts, 64), num_ranks=16, strategy=SCATTERED),
    "another dim, hybrid_optim": steps(build=lambda: Small(Experts, 64), num_ranks=16, strategy=acc.HYBRID_SHARD_OPTIM),
    "no_sync": steps(micros=3, no_sync=True),
    "prefetch of everything": steps(prefetch=acc.Prefetch(budget_bytes=1 << 30)),
    "tied": steps(build=programs.Tied),
    "read from outside": steps(build=programs.ReadsOutside),
    "nested units": steps(units={nn.Linear, "GPTBlock"}),
    "some gradients absent": steps(build=lambda: Small(programs.Router, 64)),
}
# Waits of the host in a step: with `debug`, to check the forward for writes and for NaN, and the backward for NaN; at its end,
# for gradients that no rank had.
WAITS = {"full, finite": 3, "some gradients absent": 1}
OFFLOADS: dict[str, tuple[dict[str, str], dict[str, object]]] = {
    "states on the host": ({"optimizer": "host"}, {}),
    "parameters on the host": ({"params": "host", "optimizer": "host"}, {}),
    "parameters on the host, float32": ({"params": "host", "optimizer": "host"}, {"precision": None, "micros": 2}),
    "step on the device": ({"optimizer": "host", "step": "device"}, {}),
    "all on the host, step on the device": ({"params": "host", "optimizer": "host", "step": "device"}, {}),
    "accumulated": ({"optimizer": "host"}, {"micros": 3}),
    "activations on the host": ({"activations": "host"}, {"checkpoint_activations": "full"}),
    "all and activations on the host": (
        {"optimizer": "host", "params": "host", "activations": "host"},
        {"checkpoint_activations": "full"},
    ),
    "all on disk": ({"optimizer": DISK, "params": DISK, "grads": DISK}, {}),
    "states on disk, step on the device": ({"optimizer": DISK, "step": "device"}, {}),
    "activations on disk": ({"activations": DISK}, {"checkpoint_activations": "full"}),
}
USUAL = {
    "frozen, recomputed", "another dim, hybrid_optim", "full, uneven, scattered",
    "all and activations on the host",
    "raises_then_goes_on", "the_step_on_another_stream",
}  # fmt: skip


def assert_ordered(checker: Checker) -> None:
    assert checker.num_accesses > 1000
    assert not checker.problems, "\n".join(f"{n} times: {what}" for what, n in checker.problems.most_common(8))


@pytest.mark.parametrize("name", sampled(ON_DEVICE, USUAL.__contains__))
def test_steps_on_the_device_are_ordered_and_the_host_waits_for_none(name):
    checker = trained(ON_DEVICE[name])
    assert_ordered(checker)
    assert sum(checker.waits.values()) == WAITS.get(name, 0), checker.waits


@pytest.mark.parametrize("name", sampled(OFFLOADS, USUAL.__contains__))
def test_steps_of_offloaded_parameters_are_ordered(name, tmp_path):
    places, options = OFFLOADS[name]
    places = {what: place + str(tmp_path) if place == DISK else place for what, place in places.items()}
    assert_ordered(trained(steps(offload=acc.Offload(**places), **options)))


@pytest.mark.parametrize(
    "strategy",
    sampled(
        [acc.FULL_SHARD, SCATTERED, replace(acc.HYBRID_SHARD_OPTIM, reduce="reduce_scatter")],
        acc.FULL_SHARD.__eq__,
    ),
)
def test_reduces_in_chunks_are_ordered(strategy):
    with mock.patch.multiple(reduce, PIECE_BYTES=64 * 1024, CAST_BYTES=64 * 1024):
        assert_ordered(trained(steps(strategy=strategy)))


# -- odd programs


def abandoned(run: Run, what: str) -> None:
    """Run a step that raises in the forward or backward."""
    setattr(run.model, f"{what}_raises", True)
    with pytest.raises(PlantedError):
        run.loss().backward()
    setattr(run.model, f"{what}_raises", False)


def raises_then_goes_on(run: Run) -> None:
    abandoned(run, "backward")
    run.optimizer.zero_grad()
    run.step()
    run.step()


def raises_then_steps(run: Run) -> None:
    """As a loop does that swallows the error."""
    abandoned(run, "backward")
    run.end()
    run.loss().backward()


def forward_raises(run: Run) -> None:
    abandoned(run, "forward")
    run.step()


def evaluates(run: Run) -> None:
    for _ in range(6):
        run.loss()
    run.step()


def two_forwards(run: Run) -> None:
    (run.loss() + run.loss()).backward()
    run.end()
    loss = run.loss()
    loss.backward(retain_graph=True)
    loss.backward()
    run.optimizer.step()


def grad_of_an_activation(run: Run) -> None:
    kept: list[torch.Tensor] = []
    hook = run.model.blocks[1].register_forward_hook(lambda module, args, out: kept.append(out))
    loss = run.loss()
    torch.autograd.grad(loss, kept[0], retain_graph=True)
    loss.backward()
    hook.remove()
    run.optimizer.step()


def backward_of_some_inputs(run: Run) -> None:
    params = [p for name, p in run.model.named_parameters() if "blocks.1" not in name]
    run.loss().backward(inputs=params)
    run.optimizer.step()


def full_parameters(run: Run) -> None:
    with acc.full_params(run.model, write=True):
        for p in run.model.parameters():
            p.data.mul_(1.0)
    acc.full_state_dict(run.model)
    run.step()


def dropped_after(what: str, run: Run) -> None:
    """Free the model after its forward or backward has raised."""
    abandoned(run, what)
    run.optimizer.zero_grad()
    run.optimizer.param_groups.clear()
    run.optimizer.state.clear()
    run.model = nn.Module()
    gc.collect()


def the_step_on_another_stream(run: Run) -> None:
    """As a warm-up for a CUDA graph does."""
    run.step()
    with on_side(Stream(run.checker, "side")):
        run.step()
        run.step()
    run.step()


def an_evaluation_on_another_stream(run: Run) -> None:
    with on_side(Stream(run.checker, "side")), torch.no_grad():
        run.loss()
    run.step()


def a_block_on_a_side_stream(run: Run) -> None:
    """As a tower next to a language model; its backward runs on the main stream here, so only forwards count."""
    run.model.side = Stream(run.checker, "side")
    with torch.no_grad():
        run.loss()
        run.loss()


def out_of_memory(owner: object, name: str, run: Run) -> None:
    """The allocator refuses memory that a side stream needs for a moment; the loop goes on with the next batch."""
    real, calls = getattr(owner, name), 0

    def second_fails(*args: object) -> object:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise torch.OutOfMemoryError("planted")
        return real(*args)

    with mock.patch.object(owner, name, second_fails), pytest.raises(torch.OutOfMemoryError, match="planted"):
        run.loss().backward()
    run.optimizer.zero_grad()
    run.step()
    run.step()


ODD: dict[str, tuple[Callable[[Run], None], dict[str, object]]] = {
    program.__name__: (program, {})
    for program in (
        raises_then_goes_on, raises_then_steps, forward_raises, evaluates, two_forwards, grad_of_an_activation,
        backward_of_some_inputs, full_parameters, the_step_on_another_stream, an_evaluation_on_another_stream,
        a_block_on_a_side_stream,
    )
} | {
    "dropped_after_a_backward_that_raised": (partial(dropped_after, "backward"), {}),
    "dropped_after_a_forward_that_raised": (partial(dropped_after, "forward"), {}),
    "no_memory_for_tags": (partial(out_of_memory, DivergenceMonitor, "same_everywhere"), {}),
    "no_memory_for_a_sum": (partial(out_of_memory, reduce, "sum_rows"), {}),
    "the_step_on_another_stream, grad_op": (the_step_on_another_stream, {"strategy": acc.SHARD_GRAD_OP}),
    "an_evaluation_on_another_stream, optim": (an_evaluation_on_another_stream, {"strategy": acc.SHARD_OPTIM}),
    "two_forwards, hybrid_optim": (two_forwards, {"strategy": acc.HYBRID_SHARD_OPTIM}),
    "full_parameters, hybrid_optim": (full_parameters, {"strategy": acc.HYBRID_SHARD_OPTIM}),
    "raises_then_goes_on, recomputed": (raises_then_goes_on, {"checkpoint_activations": "full"}),
}  # fmt: skip


@pytest.mark.parametrize("name", sampled(ODD, USUAL.__contains__))
def test_odd_programs_are_ordered(name):
    program, options = ODD[name]
    with begun(steps(build=Odd, **options)) as run:
        run.step()
        run.step()
        program(run)
        assert_ordered(run.checker)


# -- planted faults are found


def problems_with(**changes: object) -> set[str]:
    """Return the kinds of problems of a few steps with methods of side streams replaced."""
    with mock.patch.multiple(SideStream, **changes):
        problems = trained(steps(num_steps=2)).problems
    kinds = ("does not wait for", "are dropped before", "are resized before")
    return {kind for problem in problems for kind in kinds if kind in problem}


def test_a_compute_stream_that_does_not_wait_for_side_streams_is_found():
    kinds = {"does not wait for", "are dropped before", "are resized before"}
    assert problems_with(lead=lambda self, event: self.compute()) == kinds


def test_side_streams_that_do_not_wait_for_the_compute_stream_are_found():
    assert "does not wait for" in problems_with(follow=lambda self: self.compute())


def test_waits_of_the_host_are_counted():
    with begun(steps()) as run:
        for _ in range(2):  # in which inputs and forwards are checked
            run.step()
        run.checker.waits.clear()
        run.loss().item()
    assert sum(run.checker.waits.values()) == 1


def test_reads_of_pinned_memory_by_the_host_are_ordered():
    """The host may read values that a stream wrote once it has waited for that write."""
    for waits in (False, True):
        checker = Checker()
        side, pinned = Stream(checker, "side"), torch.zeros(8)
        checker.pin(pinned)
        with checker.entered(side):
            checker.run("copy", [], [pinned])
        event: Event = side.record_event()
        if waits:
            event.synchronize()
        checker.run("add", [pinned], [])
        assert bool(checker.problems) is not waits
