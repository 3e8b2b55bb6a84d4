"""Converting files of unknown origin: they are read correctly or refused, and nothing else happens."""

import json
import os
import pickle
import random
import re
import shutil
import zipfile

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

from accordion.checkpoint.convert import convert, export
from accordion.checkpoint.inspect import verify
from accordion.errors import CheckpointError, UsageError
from tests.checkpoint.test_faults import damage, lied
from tests.checkpoint.test_outside import INDEX, hf, safetensors
from tests.support.bounded import run_bounded
from tests.support.checkpoints import stepped

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),  # torch has words about what it meets here
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def lie_in_metadata(file, rng):
    """Put strange values into the records of DCP's metadata."""
    metadata = pickle.loads(file.read_bytes())
    info = rng.choice(list(metadata.storage_data.values()))
    said = rng.choice(list(metadata.state_dict_metadata.values()))
    strange = rng.choice([-1, 2**62, None, "x", 1.5, [], (), {}, b"x"])
    what = rng.choice(["offset", "length", "relative_path", "size", "planner_data", "path", "twice"])
    if what in ("offset", "length", "relative_path"):
        object.__setattr__(info, what, strange)
    elif what == "size" and hasattr(said, "size"):
        said.size = rng.choice([strange, torch.Size([2**40, 2**20])])
    elif what == "planner_data":
        metadata.planner_data = strange
    elif what == "path":
        metadata.planner_data[rng.choice(list(metadata.planner_data))] = strange
    else:
        for one in metadata.storage_data.values():
            one.offset, one.length, one.relative_path = info.offset, info.length, info.relative_path
    file.write_bytes(pickle.dumps(metadata))


def answers(*sources):
    """Convert each source; return the errors, or "converted"."""
    texts = []
    for source in sources:
        try:
            convert(source, f"{source}.out")
            texts.append("converted")
        except (CheckpointError, UsageError) as error:
            texts.append(str(error)[:300])
    return texts


def fifo_shard(folder):
    hf(folder, {}, {"a": "x.safetensors"})
    os.mkfifo(folder / "x.safetensors")


def fifo_of_a_value(folder):
    dcp.save({"model": {"a": torch.ones(2)}, "step": 3}, checkpoint_id=folder, no_dist=True)
    (file,) = folder.glob("*.distcp")
    file.unlink()
    os.mkfifo(file)


def test_a_pipe_in_place_of_a_file_is_refused_at_once(tmp_path):
    for make in (fifo_shard, fifo_of_a_value):
        make(tmp_path / make.__name__)
    texts, _ = run_bounded(answers, *sorted(tmp_path.iterdir()))
    assert ["is no regular file" in text for text in texts] == [True, True]


def metadata_of(text):
    def make(folder):
        folder.mkdir()
        (folder / ".metadata").write_bytes(text)

    return make


def torch_of(pickled, **how):
    def make(path):
        with zipfile.ZipFile(path, "w", **how) as file:
            file.writestr("a/data.pkl", pickled)
            file.writestr("a/data/0", b"\0" * 4)
            file.writestr("a/byteorder", b"little")
            file.writestr("a/version", b"3")

    return make


def safetensors_of(words, data=b""):
    def make(path):
        path.mkdir()
        safetensors(path / "model.safetensors", words, data)

    return make


def index_of(text):
    def make(path):
        path.mkdir()
        (path / INDEX).write_text(text)

    return make


def saved(make):
    return lambda path: torch.save({"weight": make()}, path)


def long_header(path):
    path.mkdir()
    (path / "model.safetensors").write_bytes((2**62).to_bytes(8, "little") + b"{}")


def long_lengths(path):
    dcp.save({"model": {"weight": torch.ones(3)}}, checkpoint_id=path, no_dist=True)
    metadata = pickle.loads((path / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.length = 2**45
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


BOMBS = {
    "deep": lambda path: safetensors_of("[" * 10**6)(path),
    "long header": long_header,
    "deep index": lambda path: index_of('{"weight_map":' * 10**5)(path),
    "wide": saved(lambda: torch.zeros(1).expand(2**40)),
    "sparse": saved(lambda: torch.sparse_coo_tensor([[0]], [1.0], (2**40,))),
    "meta": saved(lambda: torch.empty(2**40, device="meta")),
    "long lengths": long_lengths,
    "memo": metadata_of(b"\x80\x04Nr\0\0\0\x40."),
    "frame": metadata_of(b"\x80\x04\x95" + (2**62).to_bytes(8, "little") + b"N."),
    "packed": torch_of(bytes(2**28), compression=zipfile.ZIP_DEFLATED),
}


def test_sources_that_expand_hugely_are_refused_with_limited_memory(tmp_path):
    for name, make in BOMBS.items():
        make(tmp_path / name)
    texts, _ = run_bounded(answers, *sorted(tmp_path.iterdir()))
    assert len(texts) == len(BOMBS)
    assert "converted" not in texts


def test_a_dcp_folder_is_read_one_tensor_at_a_time(tmp_path):
    state = {f"{i}": torch.randn(2**20) for i in range(32)}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    texts, mib = run_bounded(answers, tmp_path / "dcp")
    assert texts == ["converted"]
    assert mib < 64


NUMBERS = [b"0", b"-1", b"9223372036854775808", b"1" * 5000, b"1e9", b"NaN", b"null", b"[]", b"{}"]


def mutated(data, rng):
    """Flip bits, cut out bytes, swap or double two parts, or replace a number."""
    torn, at = bytearray(data), rng.randrange(len(data))
    kind, end = rng.choice(["flip", "flip", "cut", "end", "swap", "double", "number", "huge"]), at + rng.randint(1, 40)
    if kind == "flip":
        for _ in range(rng.choice([1, 1, 4])):
            torn[rng.randrange(len(torn))] ^= 1 << rng.randrange(8)
    elif kind == "cut":
        del torn[at:end]
    elif kind == "end":
        del torn[at:]
    elif kind == "swap":
        other = rng.randrange(len(data))
        torn[at : at + 4], torn[other : other + 4] = torn[other : other + 4], torn[at : at + 4]
    elif kind == "double":
        torn[at:at] = torn[at:end]
    elif kind == "number":
        found = [m.span() for m in re.finditer(rb"\d+", data)]
        start, stop = rng.choice(found) if found else (at, at + 1)
        torn[start:stop] = rng.choice(NUMBERS)
    else:
        torn[at : at + 8] = rng.choice([b"\xff" * 8, b"\x7f" + b"\xff" * 7, b"\0" * 8, b"\0\0\0\x40\0\0\0\0"])
    return bytes(torn)


def sources(folder):
    """Write a folder of safetensors with an index, a DCP folder and a torch file; return the state and the files to change."""
    state = {
        "a.weight": torch.arange(12.0).view(4, 3),
        "a.bias": torch.arange(5),
        "b": torch.arange(12.0).view(4, 3) + 50,
    }
    model = nn.Linear(4, 3)
    weights, moments = get_state_dict(model, stepped(model))
    hf(folder / "hf", {"x.safetensors": state}, dict.fromkeys(state, "x.safetensors"))
    dcp.save({"model": state, "step": 3}, checkpoint_id=folder / "dcp", no_dist=True)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder / "optimizer", no_dist=True)
    torch.save(state, folder / "m.pt")
    described = ("hf/x.safetensors", f"hf/{INDEX}", "dcp/.metadata", "m.pt", "optimizer/.metadata")
    return state, [folder / name for name in described]


def changed(file, rng):
    """Change values that describe tensors, or bytes of these values, or any bytes; return which of these."""
    whole, kind = file.read_bytes(), rng.choice(["lie", "mutate", "mutate", "damage"])
    end = 8 + int.from_bytes(whole[:8], "little")
    if kind == "damage":
        file.write_bytes(damage(whole, rng))
    elif file.suffix == ".safetensors":
        head = whole[8:end]
        words = mutated(head, rng) if kind == "mutate" else json.dumps(lied(json.loads(head), rng)).encode()
        file.write_bytes(len(words).to_bytes(8, "little") + words + whole[end:])
    elif kind == "lie" and file.suffix == ".json":
        file.write_text(json.dumps(lied(json.loads(whole), rng)))
    elif kind == "lie" and file.name == ".metadata":
        lie_in_metadata(file, rng)
    else:
        file.write_bytes(mutated(whole, rng))
    return kind


def changes_refused(folder, count, seed):
    """Convert `count` changed sources and return how many were refused; the others must be correct, and nothing may be left."""
    rng, num_refused = random.Random(seed), 0
    state, files = sources(folder)
    before = sorted(os.listdir(folder))
    for i in range(count):
        file = files[i % len(files)]
        whole = file.read_bytes()
        kind = changed(file, rng)
        try:
            convert(file if file.suffix == ".pt" else file.parent, folder / "out")
        except (CheckpointError, UsageError) as error:
            if "alloc" in str(error) or "cannot be converted" in str(error):  # what nobody foresaw
                raise
            num_refused += 1
        else:
            assert verify(folder / "out") == []
            export(folder / "out", folder / "made")
            for name, tensor in load_file(folder / "made" / "model.safetensors").items() if kind == "mutate" else ():
                if name in state and (tensor.dtype, tensor.shape) == (state[name].dtype, state[name].shape):
                    assert torch.equal(tensor, state[name]), f"{i}: {name} of {file}"
            shutil.rmtree(folder / "out")
            shutil.rmtree(folder / "made")
        file.write_bytes(whole)
        assert sorted(os.listdir(folder)) == before, f"{i}: {file}"
    return num_refused


@pytest.mark.parametrize("count", [60, pytest.param(2000, marks=pytest.mark.slow)])
def test_changed_sources_are_read_right_or_refused(tmp_path, count):
    num_refused, mib = run_bounded(changes_refused, tmp_path, count, 3)
    assert count // 2 < num_refused < count
    assert mib < 200  # most of it is for imports
