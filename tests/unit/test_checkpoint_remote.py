"""Checkpoints on remote storage, through fsspec: in memory here, and on a local S3 server where moto and s3fs are installed."""

import os
import uuid

import pytest
import torch
from torch import nn

from accordion.checkpoint import folders, latest, load, prune, save
from accordion.checkpoint.convert import export
from accordion.checkpoint.look import diff, verify
from accordion.errors import CheckpointError, UsageError

fsspec = pytest.importorskip("fsspec")


def small(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))


@pytest.fixture
def memory():
    root = f"memory://{uuid.uuid4().hex}"
    yield root
    fsspec.filesystem("memory").rm(root.removeprefix("memory:/"), recursive=True)


def round_trip(root):
    """All that is done with local folders."""
    model, other = small(1), small(2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    for step in (1, 2, 10):
        save(f"{root}/step-{step}", model, optimizer, extra=step)
    save(f"{root}/step-11", model, background=True, keep=3).wait()
    assert latest(root).endswith("/step-11")
    assert latest(f"{root}/absent") is None
    assert load(f"{root}/step-10", other, torch.optim.AdamW(other.parameters())) == 10
    assert all(torch.equal(other.state_dict()[name], tensor) for name, tensor in model.state_dict().items())
    assert [path.rpartition("/")[2] for path in prune(root, 2)] == ["step-2"]
    assert verify(f"{root}/step-10") == []
    assert diff(f"{root}/step-10", f"{root}/step-11")["only_first"] == [
        name for name in diff(f"{root}/step-10", f"{root}/step-11")["only_first"] if name.startswith("optimizer/")
    ]
    with pytest.raises(CheckpointError, match="remote storage replaces none"):
        save(f"{root}/step-10", model)
    assert verify(f"{root}/step-10") == []


def damage(storage, path):
    data = bytearray(storage.cat_file(path))
    data[-200] ^= 1  # of a weight: the checksums behind take 130 bytes
    storage.pipe_file(path, bytes(data))


def torn(root, storage):
    model = small(1)
    save(f"{root}/step-1", model)
    save(f"{root}/step-2", model)
    at = f"{root}/step-2".split("://")[1]
    storage.rm_file(f"{at}/manifest.json")  # a save that was killed before the manifest
    assert latest(root).endswith("step-1")
    save(f"{root}/step-2", model)
    damage(storage, f"{at}/rank-00000.safetensors")
    with pytest.raises(CheckpointError, match="is damaged in bytes"):
        load(f"{root}/step-2", small(2))
    assert len(verify(f"{root}/step-2")) == 1


def test_in_memory(memory):
    round_trip(memory)


def test_torn_and_damaged_in_memory(memory):
    torn(memory, fsspec.filesystem("memory"))


def test_export_from_remote(memory, tmp_path):
    model = small(1)
    save(f"{memory}/c", model)
    export(f"{memory}/c", tmp_path / "m.pt", "torch")
    assert torch.equal(torch.load(tmp_path / "m.pt", weights_only=True)["0.weight"], model[0].weight)


def test_each_byte_is_asked_for_once(memory, monkeypatch):
    model, other = small(1), small(2)
    save(f"{memory}/c", model)
    asked = []
    storage = type(fsspec.filesystem("memory"))
    cat_file = storage.cat_file

    def counted(self, path, start=None, end=None):
        asked.extend([] if start is None else [(start, end)])
        return cat_file(self, path, start, end)

    monkeypatch.setattr(storage, "cat_file", counted)
    load(f"{memory}/c", other)
    asked.sort()
    assert asked[-1][1] == sum(end - start for start, end in asked)  # every byte of the file, once


def test_storage_that_is_not_there_is_told(monkeypatch):
    with pytest.raises(UsageError, match=r"nosuch://x/y cannot be reached"):
        save("nosuch://x/y", small(1))
    monkeypatch.setitem(__import__("sys").modules, "fsspec.core", None)
    with pytest.raises(UsageError, match=r"pip install 'accordion\[remote\]'"):
        folders.folder_at("s3://x/y")


@pytest.fixture
def s3(monkeypatch):
    server_of = pytest.importorskip("moto.server").ThreadedMotoServer
    pytest.importorskip("s3fs")
    server = server_of(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {
        "ENDPOINT_URL": f"http://{host}:{port}",
        "ACCESS_KEY_ID": "a",
        "SECRET_ACCESS_KEY": "b",
    }.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    storage = fsspec.filesystem("s3", skip_instance_cache=True)
    storage.mkdir("bucket")
    yield storage
    server.stop()


@pytest.mark.filterwarnings("default")
def test_on_s3(s3):
    assert os.environ["AWS_ENDPOINT_URL"]
    round_trip("s3://bucket/run")
    torn("s3://bucket/other", s3)
