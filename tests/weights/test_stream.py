"""`stream_weights` delivers the full state dict, in few bytes, whatever the consumers on other ranks do."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import accordion as acc
from accordion.engine.communicator import Communicator
from tests.devices import device
from tests.inside import engine_in
from tests.support import models
from tests.support.checks import assert_at_rest, everyone
from tests.support.meters import Allocations
from tests.support.ranked import on_mesh, on_world, on_worlds, under_strategies

EVERY = ("full_shard", "hybrid_shard", "hybrid_shard_optim", "no_shard")
Messages = list[tuple[str, int, int]]  # kind, bytes of this rank's part, bytes sent to other ranks


@contextmanager
def recorded() -> Iterator[Messages]:
    """Context manager that records what this rank sends."""
    messages: Messages = []
    gather, exchange = Communicator.gather, Communicator.exchange

    def gathers(self: Communicator, outs: Any, parts: list[Tensor]) -> Any:
        count = sum(t.nbytes for t in parts)
        messages.append(("gather", count, count * (self.num_ranks - 1)))
        return gather(self, outs, parts)

    def exchanges(self: Communicator, rows: Any) -> Any:
        to_others = sum(t.itemsize * (sum(to) - to[self.rank]) for _, t, _, to in rows if to)
        messages.append(("exchange", sum(t.nbytes for _, t, _, _ in rows), to_others))
        return exchange(self, rows)

    with mock.patch.multiple(Communicator, gather=gathers, exchange=exchanges):
        yield messages


def num_sent(messages: Messages) -> int:
    return sum(sent for _, _, sent in messages)


class Normed(nn.Module):
    """Tied weights, a dim-1 cut, a 0-d parameter, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.model = models.experts()
        self.uneven = models.uneven()
        self.uneven.head.weight = self.uneven.embed.weight
        self.register_buffer("seen", torch.arange(5, device=device()))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens) + self.uneven(tokens % 19).sum()


def sharded(mesh: Any, strategy: acc.Strategy = acc.FULL_SHARD, **options: Any) -> nn.Module:
    return acc.shard(Normed(), mesh=mesh, strategy=strategy, units={models.Block}, **options)


def padded_bytes(model: nn.Module) -> int:
    """Bytes of this rank's shards as they are sent, over all parameters that are cut, times the ranks that it sends to."""
    context, total = engine_in(model).context, 0
    for param in engine_in(model).params:
        if param.cut.dim is not None and context.shard.num_ranks > 1:
            total += param.cut.shard_numel * 4 * (context.shard.num_ranks - 1)
        if param.cut.dim is not None and context.cut_twice:
            total += context.levels(param.cut)[1][1].shard_numel * 4 * (context.replicate.num_ranks - 1)
    return total


@under_strategies(*EVERY, num_ranks=3)
def test_it_delivers_the_full_state_dict_in_the_fewest_bytes_and_two_buckets(mesh: Any, strategy: acc.Strategy) -> None:
    model = sharded(mesh, strategy)
    wanted, rank, last = acc.full_state_dict(model, rank0_only=False, cpu=False), dist.get_rank(), mesh.size() - 1
    wanted.pop("uneven.head.weight")  # tied
    largest = max(t.nbytes for t in wanted.values())
    for bucket_bytes, ranks, dtype in (
        (4 * largest, "all", None),
        (1, "first", None),
        (2**28, [0, last], torch.bfloat16),
    ):
        receives = ranks == "all" or rank == 0 or (ranks != "first" and rank == last)
        count, memory = 0, Allocations()
        with recorded() as messages, memory:
            memory.mark("begin")
            for name, tensor in acc.stream_weights(model, bucket_bytes, ranks, dtype):
                is_cast = dtype is not None and wanted[name].is_floating_point()
                assert name == list(wanted)[count]
                assert torch.equal(tensor, wanted[name].to(dtype if is_cast else wanted[name].dtype)), name
                assert tensor.is_contiguous()
                count += 1
                del tensor
            memory.mark("end")
        assert count == (len(wanted) if receives else 0)
        peak = memory.peak("begin", "end") - memory.live("begin")
        if ranks == "all":
            assert num_sent(messages) == padded_bytes(model)
            assert peak <= 2 * bucket_bytes
        elif not (strategy.hybrid or strategy is acc.NO_SHARD) and ranks == "first":
            assert num_sent(messages) == (0 if rank == 0 else padded_bytes(model) // last)
            assert receives or peak < largest  # it only sends
    assert_at_rest(model)


@on_mesh((4,))
def test_secondary_shards_and_offloaded_ones_are_streamed_as_others(mesh: Any) -> None:
    for options in ({"secondary": 2}, {"offload": acc.Offload(params="host", optimizer="host")}):
        model = sharded(mesh, **options)
        one_loss_of(model).backward()
        wanted = acc.full_state_dict(model, rank0_only=False, cpu=False)
        bucket_bytes, memory = 4 * max(t.nbytes for t in wanted.values()), Allocations()
        with recorded() as messages, memory:
            memory.mark("begin")
            for name, tensor in acc.stream_weights(model, bucket_bytes):
                assert torch.equal(tensor, wanted[name])
                del tensor
            give_up_s = time.monotonic() + 5
            while memory.live_bytes != memory.live("begin") and time.monotonic() < give_up_s:
                time.sleep(0.01)  # gloo's threads drop messages when they get to it
            memory.mark("end")
        assert num_sent(messages) == padded_bytes(model)
        assert bucket_bytes / 2 < memory.peak("begin", "end") - memory.live("begin") <= 2 * bucket_bytes
        assert memory.live("end") == memory.live("begin")


def one_loss_of(model: nn.Module) -> Tensor:
    return model(models.batch(0, 0, dist.get_rank(), vocab=48)[0]).square().mean()


def consume(stream: Any, act: Callable[[], object]) -> None:
    """Call `act` with each tensor from the third on."""
    for i, _ in enumerate(stream):
        if i >= 2:
            act()


def consumed(model: nn.Module, act: str) -> None:
    """Consume a stream as `act` says, and return."""
    stream = acc.stream_weights(model, 2**14)
    if act == "keeps an iterator":
        model.kept = iter(stream)  # the engine closes it at its next call
        next(model.kept)
    elif act == "breaks":
        for _ in stream:
            break
    elif act == "raises":
        with pytest.raises(KeyError):
            consume(stream, lambda: {}["no such key"])
    elif act != "begins nothing":
        for _ in stream:
            time.sleep(0.002 if act == "is slow" else 0)


@on_worlds
def test_ranks_make_the_same_gathers_whatever_each_consumes(mesh: Any) -> None:
    model, rank = sharded(mesh), dist.get_rank()
    ends = {
        "backward": lambda: one_loss_of(model).backward(),
        "full state dict": lambda: acc.full_state_dict(model),
        "clip": lambda: acc.clip_grad_norm_(model, 1.0),
        "another stream": lambda: list(acc.stream_weights(model)),
    }
    acts = ["takes all", "is slow", "breaks", "raises", "keeps an iterator", "begins nothing"]
    for turn, (act, end) in enumerate(zip(acts * 2, itertools.cycle(ends.values()))):
        mine = act if rank == turn % mesh.size() else "takes all"
        with recorded() as messages:
            consumed(model, mine)
            end()
        each = everyone(mesh, messages)
        assert all(of_rank == each[0] for of_rank in each), (act, each)
        one_loss_of(model).backward()
    assert_at_rest(model)


@on_world(2)
def test_a_loop_that_uses_the_model_or_writes_weights_is_refused(mesh: Any) -> None:
    model = sharded(mesh)
    for act, words in ((one_loss_of, "used the sharded model before its end"), (written, "were written while")):
        with pytest.raises(acc.UsageError, match=words):
            consume(acc.stream_weights(model, 1), partial(act, model))
    stream = acc.stream_weights(model)
    one_loss_of(model).backward()
    with pytest.raises(acc.UsageError, match="used the sharded model before its end"):
        list(stream)


def written(model: nn.Module) -> None:
    with torch.no_grad():
        next(model.parameters()).mul_(2)


@on_worlds
def test_changed_tensors_alone_are_streamed(mesh: Any) -> None:
    model, rank = sharded(mesh), dist.get_rank()
    first = acc.stream_weights(model, dtype=torch.bfloat16, changed_since="start")
    everything = [name for name, _ in first]
    with recorded() as messages:
        again = acc.stream_weights(model, dtype=torch.bfloat16, changed_since=first)
        assert list(again) == []
    assert messages == []
    full = dict(model.named_parameters())
    with torch.no_grad():
        full["uneven.norm.weight"].add_(2.0**-20)  # vanishes in bfloat16
        if rank == mesh.size() - 1:  # one row, of one rank
            full["model.head.weight"].to_local()[-1] += 1
        model.seen += 1
    wanted = acc.full_state_dict(model, rank0_only=False, cpu=False)
    changed = dict(acc.stream_weights(model, dtype=torch.bfloat16, changed_since=again))
    assert list(changed) == ["seen", "model.head.weight"]
    assert all(torch.equal(tensor, wanted[name].to(tensor.dtype)) for name, tensor in changed.items())
    broken = acc.stream_weights(model, dtype=torch.bfloat16, changed_since=again)
    for _ in broken:  # rank 1 takes one tensor and fails to use it
        if rank == 1:
            break
    assert [name for name, _ in acc.stream_weights(model, dtype=torch.bfloat16, changed_since=broken)] == [
        "seen",
        "model.head.weight",
    ]
    assert len(everything) == len(set(everything))


@on_world(2)
def test_wrong_arguments_are_refused_in_a_sentence(mesh: Any) -> None:
    model, other = sharded(mesh), sharded(mesh)
    list(stream := acc.stream_weights(other))
    list(earlier := acc.stream_weights(model, changed_since="start"))
    for options, words in [
        ({"bucket_bytes": 0}, "bucket_bytes=0 is not"),
        ({"ranks": [0, 2]}, r"ranks=\[0, 2\] is neither"),
        ({"ranks": "second"}, "ranks='second' is neither"),
        ({"ranks": []}, r"ranks=\[\] is neither"),
        ({"adapters": "apart"}, "is neither"),
        ({"adapters": "alone"}, "has no adapters"),
        ({"changed_since": stream}, "no earlier stream of this model"),
        ({"changed_since": "yesterday"}, "is no earlier stream"),
        ({"changed_since": earlier, "ranks": "first"}, "to the same ranks"),
    ]:
        with pytest.raises(acc.UsageError, match=words):
            acc.stream_weights(model, **options)
    with acc.full_params(model), pytest.raises(acc.UsageError, match="full_params"):
        acc.stream_weights(model)
    with pytest.raises(acc.UsageError, match="is not sharded"):
        acc.stream_weights(nn.Linear(2, 2))
    with pytest.raises(acc.UsageError, match="iterated before"):
        list(stream)
    with pytest.raises(acc.DivergenceError, match="streams weights"):
        acc.stream_weights(model, bucket_bytes=1 + dist.get_rank())
