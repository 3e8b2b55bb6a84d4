"""In programs in which one rank diverges, every other rank first prints the right sentence, and ends in time."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from accordion.safety.liveness.wording import ADVICE, advice
from tests.support.diverging import MARGIN_S, TIMEOUT_S
from tests.support.processes import run_python
from tests.support.ways import SENTENCES, WAYS

SAMPLE = [
    "raises in its backward",
    "exits with 0 in the loader",
    "rank 0 is killed in its forward",
    "is killed while all stream",
    "rank 0 saves at the end",
    "saves",
    "takes a batch again where memory is full in its backward",
]


# Ranks report a wait after one second instead of four. A rank that saves alone is named after 3 times as long.
SOON = """
from accordion.safety import divergence
divergence.REPORT_AFTER_S, divergence.POLL_S = 1.0, 0.25
from tests.support.ways import main
if job := main():
    job()
"""


def what_becomes_of(names: Sequence[str], *program: str) -> list[dict[str, Any]]:
    only = ",".join(f"={name}" for name in names)
    done = run_python(*program, "--only", only, timeout_s=3600, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    outcomes: list[dict[str, Any]] = json.loads(done.stdout)
    return outcomes


def test_a_sample_of_ways_prints_its_sentence_in_time() -> None:
    outcomes = what_becomes_of(SAMPLE, "-c", SOON)
    assert [one["way"] for one in outcomes if not one["true"]] == [], outcomes


@pytest.mark.slow
@pytest.mark.parametrize("sentence", SENTENCES)
def test_all_ways_print_their_sentence_in_time(sentence: str) -> None:
    """All programs that have the sentence in `docs/ways-to-part.md` print it in time."""
    names = [name for name, way in WAYS.items() if way.sentence.split("|")[0] == sentence]
    assert names, "each sentence of the page has a way"
    outcomes = what_becomes_of(names, "-m", "tests.support.ways")
    wrong = [one for one in outcomes if not one["true"] or one["late"] or one["seconds"] > TIMEOUT_S + MARGIN_S]
    assert wrong == []


def test_the_page_states_the_number_of_ways() -> None:
    assert len(WAYS) == 257
    assert all(set(way.sentence.split("|")) <= set(SENTENCES) for way in WAYS.values())


TRAINS = {"what": "gathers unit 0 (root)"}


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({0: TRAINS, 1: TRAINS}, ADVICE),
        ({0: TRAINS, 1: {**TRAINS, "evaluates": True}}, "rank 1 runs a forward without gradients"),
        ({0: {**TRAINS, "left_out": True}, 1: TRAINS, 2: {**TRAINS, "left_out": True}}, "each of ranks 0, 2 has skipped"),
        ({0: {**TRAINS, "left_out": True}, 1: {**TRAINS, "left_out": True}}, ADVICE),
        ({0: {**TRAINS, "left_out": True, "caught": "failed: OutOfMemoryError"}, 1: TRAINS}, "rank 0 has caught an error"),
        ({0: {"what": "saves a checkpoint"}, 1: TRAINS}, "rank 0 saves a checkpoint alone; all ranks must do it"),
        ({0: {"what": "saves a checkpoint"}, 1: {"what": "saves a checkpoint"}}, ADVICE),
    ],
)  # fmt: skip
def test_advice_names_the_usual_cause(said: dict[int, dict[str, Any]], expected: str) -> None:
    assert advice(said).startswith(expected)
