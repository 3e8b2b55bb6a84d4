"""Weights of unknown origin in safetensors: every listed tensor is there once, or the folder is refused."""

import json
import os
import random
from itertools import cycle

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from accordion.checkpoint.untrusted_files import read_folder
from accordion.errors import CheckpointError
from accordion.weights.lazy_tensors import rows_of_folder
from accordion.weights.pretrained import check_pretrained
from tests.checkpoint.test_faults import damage, lied
from tests.support.processes import run_bounded

INDEX = "model.safetensors.index.json"


def safetensors(path, words, data=b""):
    """Write a safetensors file with this header, a text or a value for JSON."""
    text = (words if isinstance(words, str) else json.dumps(words)).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def tensor(start, end, dtype="U8", shape=None):
    return {"dtype": dtype, "shape": [end - start] if shape is None else shape, "data_offsets": [start, end]}


def assert_refused(folder, *words):
    """Check that the tensors of `folder` are refused in a sentence with these words."""
    with pytest.raises(CheckpointError) as refused:
        rows_of_folder(folder)
    for word in words:
        assert word in str(refused.value)


LIES = {  # the header, the number of bytes of data, and words of the error
    "overlap": ({"a": tensor(0, 4), "b": tensor(2, 6)}, 6, "invalid offset for tensor `b`"),
    "gap": ({"a": tensor(0, 4), "b": tensor(8, 12)}, 12, "invalid offset for tensor `b`"),
    "too short": ({"a": tensor(0, 8)}, 4, "file not fully covered"),
    "huge": ({"a": tensor(0, 0, shape=[2**40, 2**40, 0])}, 0, "overflow"),
    "many dims": ({"a": tensor(0, 1, shape=[1] * 65)}, 1, "a cannot be U8"),
    "dtype of others": ({"a": tensor(0, 4, "F8_E8M0")}, 4, "a has the dtype 'F8_E8M0', which cannot be read"),
    "key twice": ('{"a": ONE, "a": ONE}'.replace("ONE", json.dumps(tensor(0, 4))), 4, "a key twice"),
}


@pytest.mark.parametrize("lie", LIES)
def test_forged_header_is_refused(tmp_path, lie):
    words, num_bytes, error = LIES[lie]
    safetensors(tmp_path / "model.safetensors", words, bytes(num_bytes))
    assert_refused(tmp_path, error, "model.safetensors")


def hf(path, files, weight_map):
    path.mkdir()
    for name, tensors in files.items():
        save_file(tensors, path / name)
    (path / INDEX).write_text(weight_map if isinstance(weight_map, str) else json.dumps({"weight_map": weight_map}))
    return path


def test_every_tensor_in_an_index_must_exist_once(tmp_path):
    one = {"a": torch.ones(2)}
    lacks = hf(tmp_path / "lacks", {"x.safetensors": one}, {"a": "x.safetensors", "b": "x.safetensors"})
    assert_refused(lacks, "b in x.safetensors")
    twice = hf(
        tmp_path / "twice",
        {"x.safetensors": one, "y.safetensors": {**one, "b": torch.ones(1)}},
        {"a": "x.safetensors", "b": "y.safetensors"},
    )
    assert read_folder(twice)["a"][0].name == "x.safetensors"  # the copy that the index names
    beside = hf(
        tmp_path / "beside",
        {"x.safetensors": {**one, "b": torch.ones(1)}, "y.safetensors": {**one, "c": torch.ones(1)}},
        {"b": "x.safetensors", "c": "y.safetensors"},
    )
    assert_refused(beside, "a is in x.safetensors and in y.safetensors")
    keys = hf(tmp_path / "keys", {"x.safetensors": one}, '{"weight_map": {"a": "x.safetensors", "a": "x.safetensors"}}')
    assert_refused(keys, "a key twice")
    elsewhere = hf(
        tmp_path / "elsewhere",
        {"x.safetensors": one, "y.safetensors": {"b": torch.ones(1)}},
        {"a": "y.safetensors", "b": "x.safetensors"},
    )
    assert_refused(elsewhere, "a in y.safetensors")
    assert_refused(hf(tmp_path / "absent", {}, {"a": "x.safetensors"}), "x.safetensors", "No such file")


# -- load_pretrained


def check_linear(folder):
    with pytest.raises(CheckpointError, match="is no regular file"):
        check_pretrained(nn.Linear(2, 2), folder)


def test_load_pretrained_refuses_forged_headers_pipes_and_casts_of_floats_to_integers(tmp_path):
    model = nn.Module()
    model.register_buffer("a", torch.zeros(4, dtype=torch.int32))
    words, num_bytes, error = LIES["gap"]
    safetensors(tmp_path / "model.safetensors", words, bytes(num_bytes))
    with pytest.raises(CheckpointError, match=error):
        check_pretrained(model, tmp_path)
    for dtype in (torch.float32, torch.int64, torch.bool):
        save_file({"a": torch.ones(4, dtype=dtype)}, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match=r"a is \w+ \(4,\) in the folder and int32 \(4,\) in the model"):
            check_pretrained(model, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    os.mkfifo(tmp_path / "x.safetensors")
    (tmp_path / INDEX).write_text('{"weight_map": {"a": "x.safetensors", "a": "x.safetensors"}}')
    with pytest.raises(CheckpointError, match="a key twice"):
        check_pretrained(model, tmp_path)
    (tmp_path / INDEX).write_text('{"weight_map": {"a": "x.safetensors"}}')
    run_bounded(check_linear, tmp_path)


# -- bombs and changed bytes


def answers(*folders):
    """Read each folder; return the errors, or "read"."""
    texts = []
    for folder in folders:
        try:
            rows_of_folder(folder)
            texts.append("read")
        except CheckpointError as error:
            texts.append(str(error)[:300])
    return texts


BOMBS = {
    "deep/model.safetensors": (10**6).to_bytes(8, "little") + b"[" * 10**6,
    "long header/model.safetensors": (2**62).to_bytes(8, "little") + b"{}",
    f"deep index/{INDEX}": b'{"weight_map":' * 10**5,
}


def test_headers_that_expand_hugely_are_refused_with_limited_memory(tmp_path):
    for name, data in BOMBS.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_bytes(data)
    texts, _ = run_bounded(answers, *sorted(tmp_path.iterdir()))
    assert len(texts) == len(BOMBS)
    assert "read" not in texts


def changed(file, rng):
    """Change values that describe tensors, or bytes of these values, or any bytes; return which of these."""
    whole, kind = file.read_bytes(), rng.choice(["lie", "mutate", "mutate", "damage"])
    end = 8 + int.from_bytes(whole[:8], "little")
    if kind == "damage":
        file.write_bytes(damage(whole, rng))
    elif file.suffix == ".safetensors":
        head = whole[8:end]
        words = damage(head, rng) if kind == "mutate" else json.dumps(lied(json.loads(head), rng)).encode()
        file.write_bytes(len(words).to_bytes(8, "little") + words + whole[end:])
    elif kind == "lie":
        file.write_text(json.dumps(lied(json.loads(whole), rng)))
    else:
        file.write_bytes(damage(whole, rng))
    return kind


def changes_refused(folder, count, seed):
    """Read `count` changed folders and return how many were refused; the others must have the right values."""
    rng, refusals = random.Random(seed), []
    state = {
        "a.weight": torch.arange(12.0).view(4, 3),
        "a.bias": torch.arange(5),
        "b": torch.arange(12.0).view(4, 3) + 50,
    }
    hf(folder / "hf", {"x.safetensors": state}, dict.fromkeys(state, "x.safetensors"))
    for i, name in zip(range(count), cycle(["x.safetensors", INDEX]), strict=False):
        file = folder / "hf" / name
        whole = file.read_bytes()
        kind = changed(file, rng)
        try:
            found = {key: rows.whole() for key, rows in rows_of_folder(folder / "hf").items()}
        except CheckpointError as error:
            refusals.append(str(error))
        else:
            for key, tensor in found.items() if kind == "mutate" else ():
                if key in state and (tensor.dtype, tensor.shape) == (state[key].dtype, state[key].shape):
                    assert torch.equal(tensor, state[key]), f"{i}: {key} of {file}"
        file.write_bytes(whole)
    assert not any("alloc" in text for text in refusals)
    return len(refusals)


@pytest.mark.parametrize("count", [60, pytest.param(2000, marks=pytest.mark.slow)])
def test_changed_folders_are_read_right_or_refused(tmp_path, count):
    num_refused, mib = run_bounded(changes_refused, tmp_path, count, 3)
    assert count // 2 < num_refused < count
    assert mib < 200  # most of it is for imports
