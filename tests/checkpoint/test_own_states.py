"""Forged optimizer states of a rank are refused with an error of one sentence before they are used."""

import json
from types import SimpleNamespace

import pytest
import torch

from accordion.checkpoint.optimizer_states import _words
from accordion.errors import CheckpointError

NAME = "rank/00000/optimizer"
GOOD = {
    "rows": {"w": [[0, 0], [2, 3], [3, 1]]},
    "states": [
        ["w", "absmax", {"$tensor": f"{NAME}/state/w/absmax"}],
        ["w", "none", {"$tensor": f"{NAME}/state/w/none"}],
    ],
    "sharded": [],
    "empty": {f"{NAME}/state/w/none": ["F32", [0]]},
}


def read(words):
    """Return the states that are read from these words, with correct checksums."""
    text = words if isinstance(words, bytes) else json.dumps(words).encode()
    held = (NAME, f"{NAME}/state/w/absmax", "rank/00001/optimizer/state/w/absmax")
    files = SimpleNamespace(
        manifest=SimpleNamespace(tensors=dict.fromkeys(held)),
        folder="here",
        check=lambda wanted: None,
        whole=lambda name: torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0),
    )
    return _words(files, NAME)


def test_states_that_save_writes_are_accepted():
    assert read(GOOD) == GOOD


@pytest.mark.parametrize(
    "change",
    [
        {"rows": []},
        {"sharded": [1]},
        {"sharded": None},
        {"states": [["w", "absmax"]]},
        {"states": [[1, "absmax", 2]]},
        {"states": [["w", 1, 2]]},
        {"states": [["w", "absmax", {"$tensor": "rank/00001/optimizer/state/w/absmax"}]]},
        {"states": [["w", "absmax", {"$tensor": "model/w"}]]},
        {"states": {"w": 1}},
        {"empty": {f"{NAME}/state/w/none": ["F32", [2**40, 2]]}},
        {"empty": {f"{NAME}/state/w/none": ["F32", [0] * 70]}},
        {"empty": {f"{NAME}/state/w/none": ["F32", [-1, 0]]}},
        {"empty": {f"{NAME}/state/w/none": ["F31", [0]]}},
        {"empty": {f"{NAME}/state/w/absmax": ["F32", [0]]}},
        {"empty": [1]},
    ],
)
def test_states_that_save_never_writes_are_refused(change):
    with pytest.raises(CheckpointError, match=f"here is damaged: {NAME}: "):
        read({**GOOD, **change})


@pytest.mark.parametrize("text", [b"", b"[", b"[]", b"\xff", b"3", b"[" * 100_000])
def test_text_that_is_no_json_is_refused(text):
    with pytest.raises(CheckpointError, match=f"here is damaged: {NAME}: "):
        read(text)


@pytest.mark.parametrize("key", GOOD)
def test_missing_key_is_named(key):
    with pytest.raises(CheckpointError, match=f"here is damaged: {NAME}: KeyError: '{key}'"):
        read({k: v for k, v in GOOD.items() if k != key})
