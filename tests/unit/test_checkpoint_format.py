"""Boxes against torch's own chunks, the manifest's text, and the values that JSON has no word for."""

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load as load_safetensors

from accordion.checkpoint import format as fmt
from accordion.checkpoint.boxes import Box, Cut, box_of, overlap
from accordion.checkpoint.save import write_tensors
from accordion.errors import CheckpointError


def held_rows(rows, cuts):
    """Rows of a 1-D tensor that are left."""
    box = box_of((rows,), cuts)
    return list(range(rows))[box.within(Box((0,), (rows,)))[0]]


@given(rows=st.integers(0, 50), outer=st.integers(1, 9), inner=st.integers(1, 5))
def test_shards_are_torch_chunks(rows, outer, inner):
    def chunk_of(tensor, num_chunks, index):
        chunks = tensor.chunk(num_chunks)
        return chunks[index] if index < len(chunks) else tensor[:0]

    for i in range(outer):
        chunk = chunk_of(torch.arange(rows), outer, i)
        assert held_rows(rows, [Cut(0, outer, i)]) == chunk.tolist()
        for j in range(inner):
            assert held_rows(rows, [Cut(0, outer, i), Cut(0, inner, j)]) == chunk_of(chunk, inner, j).tolist()


@given(rows=st.integers(0, 60), outer=st.integers(1, 6), inner=st.integers(1, 6))
def test_every_row_is_held_once_and_in_order(rows, outer, inner):
    held = [
        row for i in range(outer) for j in range(inner) for row in held_rows(rows, [Cut(0, outer, i), Cut(0, inner, j)])
    ]
    assert held == list(range(rows))


def test_boxes_of_several_dims():
    assert box_of((), ()) == Box((), ())
    assert box_of((4, 0), [Cut(0, 2, 1)]) == Box((2, 0), (2, 0))
    assert box_of((3, 5), [Cut(1, 2, 1)]) == Box((0, 3), (3, 2))
    assert box_of((4, 6), [Cut(0, 2, 1), Cut(1, 3, 2)]) == Box((2, 4), (2, 2))
    assert box_of((2, 6), [Cut(0, 4, 3)]) == Box((2, 0), (0, 6))
    assert Box((7, 1), (1, 2)).within(Box((6, 0), (2, 4))) == (slice(1, 2), slice(1, 3))


def test_overlap():
    assert overlap(Box((0, 2), (4, 4)), Box((3, 0), (2, 3))) == Box((3, 2), (1, 1))
    assert overlap(Box((0,), (4,)), Box((4,), (1,))) is None
    assert overlap(Box((), ()), Box((), ())) == Box((), ())


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
    text = json.dumps(fmt.encode(value, "extra"), allow_nan=False)
    again = fmt.decode(json.loads(text), dict.__getitem__)
    assert again == value
    assert type(again) is type(value)


def test_not_a_number_round_trips():
    assert math.isnan(fmt.decode(fmt.encode(math.nan, "extra"), {}.__getitem__))


def test_tensors_are_referred_to_by_place():
    tensors = {}
    words = fmt.encode({"a": [torch.ones(1), 2]}, "top", tensors)
    assert words == {"a": [{"$tensor": "top/a/0"}, 2]}
    assert fmt.decode(words, tensors.__getitem__) == {"a": [torch.ones(1), 2]}


@pytest.mark.parametrize("value", [torch.ones(1), {1, 2}, object(), {"deep": [b"bytes"]}], ids=repr)
def test_what_json_cannot_hold_is_named(value):
    with pytest.raises(CheckpointError, match=r"extra.* is a (Tensor|set|object|bytes), which JSON cannot hold"):
        fmt.encode(value, "extra")


def a_manifest(**changes):
    words = {
        "schema": 1,
        "saved_by": {},
        "aliases": {"model/b": "model/a"},
        "optimizer": None,
        "extra": None,
        "tensors": {
            "model/a": {
                "dtype": "F32",
                "shape": [3, 2],
                "placements": ["S(0)"],
                "chunks": [
                    {"file": "rank-00000.safetensors", "offset": [0, 0], "shape": [2, 2]},
                    {"file": "rank-00001.safetensors", "offset": [2, 0], "shape": [1, 2]},
                ],
            }
        },
    }
    for path, value in changes.items():
        *where, last = path.split("__")
        inner = words
        for key in where:
            inner = inner["model/a" if key == "a" else int(key) if key.isdecimal() else key]
        inner[last] = value
    return json.dumps(words)


def test_manifest_round_trips():
    manifest = fmt.parse(a_manifest())
    assert fmt.parse(fmt.dump(manifest)) == manifest
    assert manifest.files() == ["rank-00000.safetensors", "rank-00001.safetensors"]
    assert manifest.tensors["model/a"].chunks[1].box == Box((2, 0), (1, 2))


CHUNK = "tensors__a__chunks__0__"


@pytest.mark.parametrize(
    "file",
    [
        "../a.safetensors",
        "/etc/a.safetensors",
        "a/b.safetensors",
        "a\\b.safetensors",
        ".a.safetensors",
        "a",
        "",
        None,
        3,
    ]
    + ["a..safetensors", "..", "a.safetensors\n", "a\0.safetensors"],
)
def test_files_outside_of_the_folder_are_refused(file):
    with pytest.raises(CheckpointError, match=r"not the plain name|it is damaged"):
        fmt.parse(a_manifest(**{CHUNK + "file": file}))


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("schema", 2, "schema 2 and this version reads 1"),
        ("tensors", [], "damaged"),
        ("tensors__a__dtype", "F33", "unknown dtype 'F33'"),
        ("tensors__a__shape", [3, -2], "no list of sizes"),
        ("tensors__a__shape", [3, True], "no list of sizes"),
        ("tensors__a__shape", [4, 2], "8 elements and its chunks have 6"),
        ("tensors__a__chunks", [], "6 elements and its chunks have 0"),
        (CHUNK + "offset", [2, 0], "leaves its shape"),
        (CHUNK + "offset", [0], "damaged"),
        ("aliases", {"model/b": "model/c"}, "does not list: model/b"),
    ],
)
def test_damaged_manifest_is_named(path, value, message):
    with pytest.raises(CheckpointError, match=message):
        fmt.parse(a_manifest(**{path: value}))


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "{}"])
def test_no_manifest_at_all(text):
    with pytest.raises(CheckpointError, match="damaged"):
        fmt.parse(text)


def test_files_are_what_safetensors_reads(tmp_path):
    base = torch.arange(24, dtype=torch.float32).view(4, 6)
    parts = {"half": base[1:3].half()[1:], "one": torch.tensor(True), "view": base[:, 2:4], "double": base.double().t()}
    parts |= {code: torch.ones(3).to(dtype) for code, dtype in fmt.DTYPES.items()}
    write_tensors(tmp_path / "a.safetensors", parts.items())
    again = load_safetensors((tmp_path / "a.safetensors").read_bytes())
    assert again.keys() == parts.keys()
    for name, part in parts.items():
        assert again[name].dtype == part.dtype
        torch.testing.assert_close(again[name], part, rtol=0, atol=0, msg=name)
