"""What ranks of gloo do in a way of their own: large parts go from memory to memory, and from rank to rank.

An accelerator's ranks never enter this file. docs/design.md has the measurements.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from accordion import _torch
from accordion.engine.communicator import Communicator, Pending
from accordion.engine.gather import AxisGather
from accordion.engine.reduce import AxisReduce, joined, sum_rows
from accordion.engine.streams import Steps

SENDING_RANKS = 8  # up to here ranks send each other large parts; the number of messages grows with its square
TAG = 1 << 20  # of those messages, above what callers number theirs with


class GlooCommunicator(Communicator):
    """A process group of gloo.

    Its reduce-scatter is an all-reduce, twice the bytes, whose wait heeds no time-out (torch 2.13): the exchange beats
    it at every size. Its host begins a second piece only when it waits for the first.
    """

    exchanges = in_one_piece = can_poll = True

    def __init__(self, group: Any, device: torch.device) -> None:
        super().__init__(group, device)
        self.sends = device.type == "cpu" and 2 <= self.num_ranks <= SENDING_RANKS

    def send_each(self, messages: Sequence[tuple[Sequence[Tensor], Sequence[Tensor]]]) -> list[Any]:
        """For each (received, sent), contiguous tensors by rank: `sent[r]` goes to rank r, `received[r]` comes from it.

        What is of this rank itself is left alone, and what is empty is not sent. Memory to memory: 12.6 MB over
        2 ranks of gloo take 0.6 of the time of its gathers in place.
        """
        works = []
        for i, (received, sent) in enumerate(messages):
            for r, (into, out) in enumerate(zip(received, sent, strict=True)):
                if r == self.rank:
                    continue
                if into.numel():
                    works.append(self.group.recv([into], r, TAG + i))
                if out.numel():
                    works.append(self.group.send([out], r, TAG + i))
        return works


class SendingGather(AxisGather):
    """A gather whose large parts are sent. The packed message stays a collective, for which a rank can wait in turns."""

    # Made at the first run: torch cuts no storage of no bytes.
    _messages: Sequence[tuple[Sequence[Tensor], list[Tensor]]] = ()

    def _communicate(self) -> Pending:
        communicator, num = self._axis.gather, self._axis.num_ranks
        assert isinstance(communicator, GlooCommunicator), "no other sends"
        if self._storage is None or not self._fulls:
            return super()._communicate()
        if not self._messages:
            pairs = zip(self._fulls, self._shards, strict=True)
            self._messages = [(full.view(num, -1).unbind(), [shard] * num) for full, shard in pairs]
        sends = communicator.send_each(self._messages)
        if self._own:
            _torch.foreach_copy_(self._own, self._shards)
        return communicator.gather(self._arrive[-1:], self._travel[-1:])._replace(sends=sends)


class SendingReduce(AxisReduce):
    """A reduce whose large parts are sent, and summed where they arrive."""

    def steps(self) -> Steps:
        communicator, messages = self._axis.reduce, self._messages()
        assert isinstance(communicator, GlooCommunicator), "no other sends"
        sends = communicator.send_each(messages)
        yield joined(communicator.exchange(self._sends()[-1:]), communicator.sum(self._whole))._replace(sends=sends)
        for ((first, second, *others), _), out in zip(messages, self._direct_out, strict=True):
            torch.add(first, second, out=out)
            for row in others:
                out.add_(row)
        sum_rows(self._received[-1], self._out_pack)

    def _messages(self) -> list[tuple[list[Tensor], list[Tensor]]]:
        """For each direct gradient, by rank: where its part of this rank's rows comes to lie, and what goes to it."""
        messages, rank = [], self._axis.rank
        for i, grad, received in zip(self._msg.direct, self._direct, self._received, strict=False):
            c = self._msg.cuts[i]
            to = list(grad.view(-1).split([c.rows_of(r) * c.row_numel for r in range(c.num_ranks)]))
            messages.append(([*received[:rank], to[rank], *received[rank:]], to))
        return messages
