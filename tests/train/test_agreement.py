"""`accordion train` on ranks with different data: every rank raises an error with the difference, before any of them trains."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from accordion.errors import DivergenceError
from accordion.train import build
from accordion.train.config import Config
from accordion.train.language_work import LanguageWork
from accordion.train.launch import RankPlace

SAME = {"num_train": 1000, "digest": "d" * 64, "tokenizer_digest": "t" * 64, "resume": None}
DIFFERENT = {
    "training tokens: rank 0 has 1,000 (dddddddddddd), rank 1 has 999 (dddddddddddd)": {"num_train": 999},
    "training tokens: rank 0 has 1,000 (dddddddddddd), rank 1 has 1,000 (eeeeeeeeeeee)": {"digest": "e" * 64},
    "a tokenizer: rank 0 has tttttttttttt, rank 1 has uuuuuuuuuuuu": {"tokenizer_digest": "u" * 64},
    "the checkpoint to resume from: rank 0 has None, rank 1 has c/step-3": {"resume": "c/step-3"},
}


def agreed(mesh: object, cases: list[dict[str, Any]]) -> list[str]:
    """Return the error for each of `cases`, what rank 1 has in place of `SAME`; empty if ranks agree."""
    rank, errors = dist.get_rank(), []
    place = RankPlace(rank=rank, world=4, local_rank=rank, local_world=4, starter="test")
    for others in cases:
        facts = {**SAME, **(others if rank == 1 else {})}
        resume = facts.pop("resume")
        work = LanguageWork(config=Config(), files=SimpleNamespace(**facts), generation={}, spec="")
        try:
            build.agree(SimpleNamespace(config=Config(), work=work, resume=resume), place)
            errors.append("")
        except DivergenceError as error:
            errors.append(str(error))
    return errors


def test_ranks_with_different_data_raise_on_all_ranks(world: Any) -> None:
    for same, *errors in world.run(4, agreed, [{}, *DIFFERENT.values()]):
        assert not same
        for message, error in zip(DIFFERENT, errors, strict=True):
            assert message in error
            assert "give every machine the same data.path and checkpoint.dir" in error
