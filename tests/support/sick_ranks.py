"""Functions that start a rank of `accordion doctor` with one fault each, in place of `accordion.doctor.ranks.start`."""

from __future__ import annotations

import os
import time

from accordion.doctor import ranks
from accordion.doctor.ranks import RankExam
from accordion.workers.ranks import RankSetup


def slow(setup: RankSetup, name: str = "_gather") -> RankExam:
    """Return an exam (the measurements of one rank) in which each call of the function `name` of `ranks` takes 2 s longer."""
    plain = getattr(ranks, name)

    def slowed(*args, **named):
        time.sleep(2.0)
        return plain(*args, **named)

    setattr(ranks, name, slowed)
    ranks.REPEATS, ranks.WARMUPS = 1, 1
    return ranks.start(setup)


def slow_exchange(setup: RankSetup) -> RankExam:
    return slow(setup, "exchange")


def wrong_messages(setup: RankSetup) -> RankExam:
    """Return an exam (the measurements of one rank) in which gathers receive zeros from the second rank."""

    def broken(link, full, shard, plain=ranks._gather):
        plain(link, full, shard)
        full.view(setup.num_ranks, -1)[1].zero_()

    ranks._gather = broken
    return ranks.start(setup)


class _Dies(RankExam):
    def gathers(self):
        if self._rank == 1:
            os._exit(9)
        return super().gathers()


def dies(setup: RankSetup) -> RankExam:
    return _Dies(setup.rank, setup.num_ranks, setup.device, setup.num_ranks)
