"""Files that somebody else made, to be converted: they are read right or refused, and nothing else happens."""

import json
import os
import pickle
import random
import resource
import zipfile

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn

from accordion.checkpoint.convert import convert
from accordion.checkpoint.inspect import verify
from accordion.errors import CheckpointError, UsageError
from tests.checkpoint.test_faults import damage, lied

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),  # torch has words about what it meets here
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def refused(source, folder):
    """Convert; whether it was refused. What came out otherwise is whole."""
    text = ""
    try:
        convert(source, folder / "out")
    except (CheckpointError, UsageError) as error:
        text = str(error)
    assert "alloc" not in text
    if text:
        assert not (folder / "out").exists()
        return True
    assert verify(folder / "out") == []
    for file in (folder / "out").iterdir():
        file.unlink()
    (folder / "out").rmdir()
    return False


def sources(folder):
    """A folder of safetensors, a DCP folder and a torch file."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    (folder / "hf").mkdir()
    save_file(model.state_dict(), folder / "hf" / "model.safetensors")
    (folder / "index").mkdir()
    save_file(model.state_dict(), folder / "index" / "a.safetensors")
    (folder / "index" / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": dict.fromkeys(model.state_dict(), "a.safetensors")})
    )
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 3}
    dcp.save(state, checkpoint_id=folder / "dcp", no_dist=True)
    torch.save(state, folder / "m.pt")
    return [folder / name for name in ("hf", "index", "dcp", "m.pt")]


def lie_in_header(file, rng):
    data = file.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    text = json.dumps(lied(json.loads(data[8:end]), rng)).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])


def lie_in_metadata(file, rng):
    """Strange values in the records of DCP's metadata."""
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


def fuzz(folder, count, seed):
    rng, num_refused = random.Random(seed), 0
    all_sources = sources(folder)
    before = sorted(os.listdir(folder))
    for i in range(count):
        source = all_sources[i % len(all_sources)]
        file = source if source.is_file() else rng.choice(sorted(source.iterdir()))
        whole = file.read_bytes()
        if file.suffix == ".safetensors" and rng.random() < 0.7:
            lie_in_header(file, rng)
        elif file.suffix == ".json" and rng.random() < 0.7:
            file.write_text(json.dumps(lied(json.loads(whole), rng)))
        elif file.name == ".metadata" and rng.random() < 0.7:
            lie_in_metadata(file, rng)
        else:
            file.write_bytes(damage(whole, rng))
        num_refused += refused(source, folder)
        file.write_bytes(whole)
        assert sorted(os.listdir(folder)) == before, f"{i}: {file}"
    assert not any(refused(source, folder) for source in all_sources)
    return num_refused


def test_sources_that_lie(tmp_path):
    assert fuzz(tmp_path, 80, 0) > 30


@pytest.mark.slow
def test_1000_sources_that_lie(tmp_path):
    assert fuzz(tmp_path, 1000, 1) > 300


def test_bombs_are_refused_in_little_memory(tmp_path):
    deep = b"[" * 10**6
    (tmp_path / "deep.safetensors").write_bytes(len(deep).to_bytes(8, "little") + deep)
    (tmp_path / "index").mkdir()
    (tmp_path / "index" / "model.safetensors.index.json").write_bytes(b'{"weight_map":' * 10**5)
    (tmp_path / "long.safetensors").write_bytes((2**62).to_bytes(8, "little") + b"{}")
    torch.save({"weight": torch.zeros(1).expand(2**40)}, tmp_path / "wide.pt")
    torch.save({"weight": torch.sparse_coo_tensor([[0]], [1.0], (2**40,))}, tmp_path / "sparse.pt")
    torch.save({"weight": torch.empty(2**40, device="meta")}, tmp_path / "meta.pt")
    with zipfile.ZipFile(tmp_path / "zip.pt", "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("a/data.pkl", bytes(2**26))
    dcp.save({"model": {"weight": torch.ones(3)}}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    metadata = pickle.loads((tmp_path / "dcp" / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.length = 2**45
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(metadata))
    names = sorted(os.listdir(tmp_path))
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for name in names:
        assert refused(tmp_path / name, tmp_path), name
    assert sorted(os.listdir(tmp_path)) == names
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 2**19
