"""Functions that start a rank of `accordion doctor` with one fault each, in place of `accordion.doctor.ranks.start`."""

from __future__ import annotations

import os
import time

from accordion.doctor import ranks
from accordion.doctor.ranks import RankExam
from accordion.workers.ranks import Seat


def slow(seat: Seat) -> RankExam:
    """Return an exam (the measurements of one rank) whose gathers take 2 s longer."""

    def slow_gather(link, full, shard, plain=ranks._gather):
        time.sleep(2.0)
        plain(link, full, shard)

    ranks._gather, ranks.REPEATS, ranks.WARMUPS = slow_gather, 1, 1
    return ranks.start(seat)


def slow_exchange(seat: Seat) -> RankExam:
    """Return an exam (the measurements of one rank) whose all-to-alls take 2 s longer."""

    def slow_exchange(heads, group, split, join, plain=ranks.exchange):
        time.sleep(2.0)
        return plain(heads, group, split, join)

    ranks.exchange, ranks.REPEATS, ranks.WARMUPS = slow_exchange, 1, 1
    return ranks.start(seat)


def wrong_messages(seat: Seat) -> RankExam:
    """Return an exam (the measurements of one rank) in which gathers receive zeros from the second rank."""

    def broken(link, full, shard, plain=ranks._gather):
        plain(link, full, shard)
        full.view(seat.num_ranks, -1)[1].zero_()

    ranks._gather = broken
    return ranks.start(seat)


class _Dies(RankExam):
    def gathers(self):
        if self._rank == 1:
            os._exit(9)
        return super().gathers()


def dies(seat: Seat) -> RankExam:
    return _Dies(seat.rank, seat.num_ranks, seat.device, seat.num_ranks)
