"""Faster gathers and reduces for gloo on CPU: large tensors are sent point to point. docs/design.md has the measurements."""

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

SENDING_RANKS = 8  # the most ranks that send point to point, since the number of messages grows with its square
TAG = 1 << 20  # first tag of those messages, above the tags of other code


class GlooCommunicator(Communicator):
    """A communicator with gloo as its backend. By default its reduces are an all-to-all and a local sum at every size."""

    # gloo's reduce-scatter is an all-reduce (twice the bytes) that ignores timeouts (torch 2.13). `in_one_piece`: the host
    # would begin a second piece only when it waits for the first.

    exchanges = in_one_piece = can_poll = True

    def __init__(self, group: Any, device: torch.device) -> None:
        super().__init__(group, device)
        self.sends = device.type == "cpu" and 2 <= self.num_ranks <= SENDING_RANKS

    def send_each(self, messages: Sequence[tuple[Sequence[Tensor], Sequence[Tensor]]]) -> list[Any]:
        """Begin, for each (received, sent) in `messages`, to send `sent[r]` to rank r and to receive `received[r]` from it;
        return the works. All tensors must be contiguous. Empty tensors and this rank's own index are skipped."""
        # 12.6 MB over 2 ranks take 0.6 of the time of an all-gather.
        works = []
        for i, (received, sent) in enumerate(messages):
            for r, (target, source) in enumerate(zip(received, sent, strict=True)):
                if r == self.rank:
                    continue
                if target.numel():
                    works.append(self.group.recv([target], r, TAG + i))
                if source.numel():
                    works.append(self.group.send([source], r, TAG + i))
        return works


class SendingGather(AxisGather):
    """All-gather over gloo that sends large shards point to point if a collective, of packed small ones or tags, follows."""

    # Made at the first run, because views need a storage with memory.
    _messages: Sequence[tuple[Sequence[Tensor], list[Tensor]]] = ()

    def _communicate(self) -> Pending:
        communicator, num = self._axis.gather, self._axis.num_ranks
        assert isinstance(communicator, GlooCommunicator), "only gloo sends point to point"
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
    """A reduce over gloo that sends large gradients point to point, and small ones, packed, in a collective."""

    def steps(self) -> Steps:
        communicator, messages = self._axis.reduce, self._messages()
        assert isinstance(communicator, GlooCommunicator), "only gloo sends point to point"
        sends = communicator.send_each(messages)
        yield joined(communicator.exchange(self._sends()[-1:]), communicator.sum(self._whole))._replace(sends=sends)
        for ((first, second, *others), _), out in zip(messages, self._direct_out, strict=True):
            torch.add(first, second, out=out)
            for row in others:
                out.add_(row)
        sum_rows(self._received[-1], self._out_pack)

    def _messages(self) -> list[tuple[list[Tensor], list[Tensor]]]:
        """Return for each large gradient (buffers for the rows of each rank, rows to send to each rank). At this rank's own
        index both lists have its own rows."""
        messages, rank = [], self._axis.rank
        for i, grad, received in zip(self._msg.direct, self._direct, self._received, strict=False):
            c = self._msg.cuts[i]
            to = list(grad.view(-1).split([c.rows_of(r) * c.row_numel for r in range(c.num_ranks)]))
            messages.append(([*received[:rank], to[rank], *received[rank:]], to))
        return messages
