"""Boxes compared with torch.chunk, the manifest's text, and values that JSON lacks."""

import json
import math
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import accordion.checkpoint
from accordion.checkpoint import format as fmt
from accordion.checkpoint import json_values, load, save
from accordion.checkpoint.boxes import Box, DimCut, box_of
from accordion.errors import CheckpointError
from tests.support.checkpoints import sealed


def held_rows(rows, cuts):
    """Return the rows of a 1-D tensor that a box selects."""
    box = box_of((rows,), cuts)
    return list(range(rows))[box.within(Box((0,), (rows,)))[0]]


@given(rows=st.integers(0, 50), outer=st.integers(1, 9), inner=st.integers(1, 5))
def test_boxes_are_those_of_torch_chunk(rows, outer, inner):
    def chunk_of(tensor, num_chunks, index):
        chunks = tensor.chunk(num_chunks)
        return chunks[index] if index < len(chunks) else tensor[:0]

    for i in range(outer):
        chunk = chunk_of(torch.arange(rows), outer, i)
        assert held_rows(rows, [DimCut(0, outer, i)]) == chunk.tolist()
        for j in range(inner):
            assert held_rows(rows, [DimCut(0, outer, i), DimCut(0, inner, j)]) == chunk_of(chunk, inner, j).tolist()


VALUES = [
    None,
    True,
    3,
    -(10**30),
    0.1 + 0.2,
    5e-324,
    "text",
    [],
    {},
    (),
    (0.9, 0.999),
    [1, [2, (3, None)]],
    {"a": {"b": (1,)}},
    {1: "one", "$tensor": 2, (3, 4): [5]},
    {"$": 1},
    math.inf,
    -math.inf,
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_values_round_trip_exactly(value):
    text = json.dumps(json_values.encode(value, "extra"), allow_nan=False)
    again = json_values.decode(json.loads(text), dict.__getitem__)
    assert again == value
    assert type(again) is type(value)
    assert math.isnan(json_values.decode(json_values.encode(math.nan, "extra"), {}.__getitem__))


def test_tensors_are_named_by_their_path():
    tensors = {}
    words = json_values.encode({"a": [torch.ones(1), 2]}, "top", tensors)
    assert words == {"a": [{"$tensor": "top/a/0"}, 2]}
    assert json_values.decode(words, tensors.__getitem__) == {"a": [torch.ones(1), 2]}
    tensors = {}
    words = json_values.encode({"a/b": torch.ones(1), "a": {"b": torch.zeros(1)}}, "top", tensors)
    assert json_values.decode(words, tensors.__getitem__) == {"a/b": torch.ones(1), "a": {"b": torch.zeros(1)}}


CANNOT_HOLD = {"tensor": torch.ones(1), "set": {1, 2}, "object": object(), "bytes": {"deep": [b"bytes"]}}


@pytest.mark.parametrize("value", CANNOT_HOLD.values(), ids=CANNOT_HOLD.keys())
def test_values_that_json_cannot_hold_are_named(value):
    with pytest.raises(CheckpointError, match=r"extra.* is a (Tensor|set|object|bytes), which JSON cannot hold"):
        json_values.encode(value, "extra")


DAMAGED = {"tensor": {"$tensor": "a"}, "text": {"$float": "x"}, "large": {"$float": 10**400}, "list": {"$dict": [1]}}


@pytest.mark.parametrize("extra", DAMAGED.values(), ids=DAMAGED.keys())
def test_damaged_values_are_named(extra):
    with pytest.raises(CheckpointError, match="is damaged"):
        json_values.as_dict({"a": extra})


def a_manifest(**changes):
    chunks = [
        {"file": "rank-00000.safetensors", "at": 8, "offset": [0, 0], "shape": [2, 2], "sums": ["1" * 8] * 2},
        {"file": "rank-00001.safetensors", "at": 8, "offset": [2, 0], "shape": [1, 2], "sums": ["2" * 8]},
    ]
    words = {
        "schema": 2,
        "checksum": "crc32",
        "piece_bytes": 12,
        "files": {
            "rank-00000.safetensors": {"bytes": 24, "header_bytes": 8, "header_sum": "0" * 8},
            "rank-00001.safetensors": {"bytes": 16, "header_bytes": 8, "header_sum": "0" * 8},
        },
        "saved_by": {},
        "aliases": {"model/b": "model/a"},
        "optimizer": None,
        "extra": None,
        "tensors": {"model/a": {"dtype": "F32", "shape": [3, 2], "placements": ["S(0)"], "chunks": chunks}},
    }
    for path, value in changes.items():
        *where, last = path.split("__")
        inner = words
        for key in where:
            inner = inner["model/a" if key == "a" else int(key) if key.isdecimal() else key]
        inner[last] = value
    return sealed(words)


def test_manifest_round_trips():
    manifest = fmt.parse(a_manifest())
    assert fmt.parse(fmt.dump(manifest)) == manifest
    assert list(manifest.files) == ["rank-00000.safetensors", "rank-00001.safetensors"]
    assert manifest.tensors["model/a"].chunks[1].box == Box((2, 0), (1, 2))


CHUNK = "tensors__a__chunks__0__"


OUTSIDE = ["../a.safetensors", "/a.safetensors", "a\\b.safetensors", ".a.safetensors", "", None, "a..safetensors", "a"]


@pytest.mark.parametrize("file", [*OUTSIDE, "a.safetensors\n", "a\0.safetensors"])
def test_file_names_outside_of_the_folder_are_refused(file):
    with pytest.raises(CheckpointError, match=r"not the plain name|it is damaged"):
        fmt.parse(a_manifest(**{CHUNK + "file": file}))


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("schema", 1, "schema 1 and this version reads 2; .* export it .* with the version of Accordion that wrote it"),
        ("checksum", "md5", "checksums are 'md5'"),
        ("checksum", "xxh3_64", "not of the kind xxh3_64"),
        ("piece_bytes", 0, "piece_bytes is 0"),
        ("piece_bytes", 2**40, "piece_bytes is"),
        ("files", {}, "which is none of its files"),
        ("files", {"../x.safetensors": {}}, "not the plain name"),
        ("tensors__a__shape", [1] * 65, "more than torch allows"),
        (CHUNK + "at", 9, "do not end there"),
        (CHUNK + "at", -1, "no size"),
        (CHUNK + "sums", ["1" * 8], "16 bytes and 1 checksums"),
        (CHUNK + "sums", ["1" * 8, "1" * 7], "not of the kind crc32"),
        ("tensors__a__chunks__1__file", "rank-00000.safetensors", "do not end there"),
        ("tensors__a__chunks__1__offset", [1, 0], "overlap"),
        ("tensors", [], "damaged"),
        ("tensors__a__dtype", "F33", "unknown dtype 'F33'"),
        ("tensors__a__shape", [3, -2], "no size"),
        ("tensors__a__shape", [3, True], "no size"),
        ("tensors__a__shape", [3, 10**4000], "too large for any tensor"),
        ("tensors__a__shape", [2**62, 0], "too large for any tensor"),
        ("saved_by", 3, "saved_by is no object"),
        ("optimizer", 3, "damaged"),
        ("optimizer", {"groups": [{"params": [1], "options": {}}], "state": {}}, "groups and state"),
        ("optimizer", {"groups": [], "state": []}, "groups and state"),
        ("tensors__a__shape", [4, 2], "do not make up its shape"),
        ("tensors__a__chunks", [], "do not make up its shape"),
        (CHUNK + "offset", [2, 0], "do not make up its shape"),
        (CHUNK + "offset", [0], "damaged"),
        ("aliases", {"model/b": "model/c"}, "does not list: model/b"),
        ("aliases", {"model/a": "model/a"}, "have data too: model/a"),
    ],
)
def test_damaged_manifest_is_named(path, value, message):
    with pytest.raises(CheckpointError, match=message):
        fmt.parse(a_manifest(**{path: value}))


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"null", b"{}", b"\xff", b"[" * 10**6, b'{"a":' * 10**6])
def test_text_that_is_no_manifest_is_refused(text):
    with pytest.raises(CheckpointError, match="damaged"):
        fmt.parse(text)


def test_duplicate_keys_are_refused():
    text = json.dumps(json.loads(a_manifest())).replace('"optimizer": null', '"optimizer": null, "optimizer": 1')
    with pytest.raises(CheckpointError, match="key twice"):
        fmt.parse(sealed(text))


def test_every_flipped_bit_of_a_manifest_is_found():
    text = a_manifest()
    for bit in range(8 * len(text)):
        torn = bytearray(text)
        torn[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CheckpointError):
            fmt.parse(bytes(torn))
    for end in range(len(text)):
        with pytest.raises(CheckpointError):
            fmt.parse(text[:end])


def test_missing_package_xxhash_is_named(tmp_path, monkeypatch):
    pytest.importorskip("xxhash")
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    save(tmp_path / "a", model)
    before = other.weight.clone()
    monkeypatch.setattr("accordion.checkpoint.checksums.find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match=r"checksums are xxh3.*xxhash; pip install .accordion-fsdp.checkpoint"):
        load(tmp_path / "a", other)
    assert torch.equal(other.weight, before)
    save(tmp_path / "b", model)
    assert b'"checksum":"crc32"' in (tmp_path / "b" / "manifest.json").read_bytes()
    load(tmp_path / "b", other)
    assert torch.equal(other.weight, model.weight)


def test_save_and_load_use_no_pickle():
    """The modules of `save` and `load` use no function that reads or writes a pickle."""
    words = re.compile(
        r"import pickle\b|\bmarshal\b|\bshelve\b|\bdill\b|torch\.save\(|torch\.load\(|\w+_object(?:_list)?\("
    )
    files = list(Path(accordion.checkpoint.__file__).parent.glob("*.py"))
    uses = {path.name: set(words.findall(path.read_text())) for path in files}
    assert {name: held for name, held in uses.items() if held} == {
        "convert.py": {"torch.save("},
        "untrusted_files.py": {"torch.load(", "import pickle"},  # the class of torch.load's error
    }
