"""Ranks of `accordion doctor` with a fault each: functions of a module, for they travel by name."""

from __future__ import annotations

import os
import time

from accordion.doctor import ranks
from accordion.doctor.ranks import RankExam
from accordion.engine import gloo
from accordion.workers.ranks import Seat

AHEAD_S = 30.0


def skewed_slow_and_wrong(seat: Seat) -> RankExam:
    """The last rank's clock goes ahead, gathers take their time, and one gradient of each sum is half as large again."""

    def slow(link, full, part, plain=ranks._gather):
        time.sleep(0.2)
        plain(link, full, part)

    def wrong(rows, out, plain=gloo.sum_rows):
        plain(rows, out)
        out[:1].mul_(1.5)

    ranks._gather, gloo.sum_rows = slow, wrong
    last = seat.rank == seat.num_ranks - 1
    clock = (lambda: time.time() + AHEAD_S) if last else time.time
    return RankExam(seat.rank, seat.num_ranks, seat.device, clock)


def wrong_messages(seat: Seat) -> RankExam:
    """What a gather brings of the second rank is zeros; and the engine raises."""

    def broken(link, full, part, plain=ranks._gather):
        plain(link, full, part)
        full.view(seat.num_ranks, -1)[1].zero_()

    def fails(*_):
        raise RuntimeError("no kernel\nfor this")

    ranks._gather, ranks.compare_steps = broken, fails
    return RankExam(seat.rank, seat.num_ranks, seat.device)


class _Dies(RankExam):
    def clocks(self):
        if self._rank == 1:
            os._exit(9)
        return super().clocks()


def dies(seat: Seat) -> RankExam:
    return _Dies(seat.rank, seat.num_ranks, seat.device)
