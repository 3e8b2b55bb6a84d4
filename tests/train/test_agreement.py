"""`accordion train` on ranks with different data: every rank raises an error with the difference, before any of them trains."""

import re
from types import SimpleNamespace

import pytest

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


@pytest.mark.parametrize(("message", "others"), DIFFERENT.items())
def test_ranks_with_different_data_raise_on_all_ranks(monkeypatch, message, others):
    """Rank 1 has other data; the exchange between ranks is simulated."""
    ranks = [SAME, {**SAME, **others}]
    said: list[dict[str, str]] = []

    def agree(rank):
        tokens = SimpleNamespace(**{key: value for key, value in ranks[rank].items() if key != "resume"})
        place = RankPlace(rank=rank, world=2, local_rank=rank, local_world=2, starter="test")
        work = LanguageWork(config=Config(), files=tokens, generation={"eos_token_id": [0]}, spec="")
        build.agree(SimpleNamespace(config=Config(), work=work, resume=ranks[rank]["resume"]), place)

    def listen(into, mine):
        said.append(mine)
        into[:] = [mine, mine]

    monkeypatch.setattr(build.dist, "all_gather_object", listen)
    agree(0)
    agree(1)
    monkeypatch.setattr(build.dist, "all_gather_object", lambda into, mine: into.__setitem__(slice(None), said))
    for rank in (0, 1):
        with pytest.raises(DivergenceError, match=re.escape(message)) as caught:
            agree(rank)
        assert "give every machine the same data.path and checkpoint.dir" in str(caught.value)
