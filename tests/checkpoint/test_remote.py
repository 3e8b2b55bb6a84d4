"""Checkpoints on remote storage, through fsspec: in memory, and on a local S3 server."""

import errno
import json
import os
import subprocess
import uuid

import pytest
import torch

from accordion.checkpoint import RandomState, latest, load, save
from accordion.checkpoint.convert import convert, export
from accordion.checkpoint.reading import verify
from accordion.checkpoint.storage import remote
from accordion.checkpoint.storage.folders import folder_at
from accordion.errors import CheckpointError, UsageError
from tests import pool
from tests.checkpoint.failing import failing
from tests.support.checkpoints import assert_same_tensors, differing, equal_step, sharded, small, stepped
from tests.support.checks import assert_equal, full
from tests.support.models import Tiny

fsspec = pytest.importorskip("fsspec")
AbstractBufferedFile = pytest.importorskip("fsspec.spec").AbstractBufferedFile


@pytest.fixture
def memory():
    root = f"memory://{uuid.uuid4().hex}"
    yield root
    fsspec.filesystem("memory").rm(root.removeprefix("memory:/"), recursive=True)


def round_trip(root):
    """Do everything that also works with local folders."""
    model, other = small(1), small(2)
    optimizer = stepped(model)
    for step in (1, 2, 10):
        save(f"{root}/step-{step}", model, optimizer, extra=step)
    save(f"{root}/step-11", model, background=True, keep=3).wait()
    assert latest(root).endswith("/step-11")
    assert latest(f"{root}/absent") is None
    assert load(f"{root}/step-10", other, torch.optim.AdamW(other.parameters())) == 10
    assert_same_tensors(model, other)
    assert verify(f"{root}/step-10") == []
    assert all(name.startswith("optimizer/") for name in differing(f"{root}/step-10", f"{root}/step-11"))
    with pytest.raises(CheckpointError, match="on remote storage none is replaced"):
        save(f"{root}/step-10", model)
    assert verify(f"{root}/step-10") == []


def test_files_of_other_programs_stay(memory):
    storage, model = fsspec.filesystem("memory"), small(1)
    at = memory.split("://")[1]
    storage.pipe_file(f"{at}/weights/model.safetensors", b"mine")
    with pytest.raises(CheckpointError, match="is no checkpoint, it holds model"):
        save(f"{memory}/weights", model)
    save(f"{memory}/step-1", model)
    storage.pipe_file(f"{at}/step-1/notes.txt", b"mine")
    for step in (2, 3):
        save(f"{memory}/step-{step}", model, keep=1)
    assert storage.cat_file(f"{at}/weights/model.safetensors") == storage.cat_file(f"{at}/step-1/notes.txt") == b"mine"
    assert not storage.exists(f"{at}/step-2")


def damage(storage, path, at=-200):
    data = bytearray(storage.cat_file(path))
    data[at] ^= 1  # of a weight: the checksums behind take 130 bytes
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


def test_checkpoints_in_a_memory_file_system(memory):
    round_trip(f"{memory}/run")
    torn(f"{memory}/other", fsspec.filesystem("memory"))


def test_other_formats_are_read_and_written_on_this_machine_only(memory, tmp_path):
    model = small(1)
    save(f"{memory}/c", model)
    export(f"{memory}/c", tmp_path / "m.pt", "torch")
    convert(tmp_path / "m.pt", f"{memory}/d")
    assert differing(f"{memory}/c", f"{memory}/d") == set()
    for act in (lambda: convert("memory://x", tmp_path / "d"), lambda: export(f"{memory}/c", "memory://x")):
        with pytest.raises(UsageError, match=r"memory://x is on remote storage, and other formats .* copy it"):
            act()


class Counted(AbstractBufferedFile):
    """A file whose blocks are fetched by ranges, as on S3; `asked` lists the ranges."""

    asked = []

    def _fetch_range(self, start, end):
        self.asked.append((start, end))
        return self.fs.cat_file(self.path, start, end)


def test_each_byte_is_fetched_once(memory, monkeypatch):
    model, other = small(1), small(2)
    save(f"{memory}/c", model)
    storage = type(fsspec.filesystem("memory"))
    monkeypatch.setattr(storage, "open", lambda self, path, **how: Counted(self, path, **how))
    monkeypatch.setattr(remote, "BLOCK_BYTES", 2**8)
    Counted.asked.clear()
    load(f"{memory}/c", other)
    Counted.asked.sort()
    assert len(Counted.asked) > 2
    assert Counted.asked[-1][1] == sum(end - start for start, end in Counted.asked)  # every byte of the file, once


def test_a_second_job_that_saves_to_one_url_is_refused_until_the_first_is_dead(memory, monkeypatch):
    storage = fsspec.filesystem("memory")
    first = folder_at(f"{memory}/c")
    begun = first.begin("0123abcd")
    marker = f"{memory}/c/{remote.SAVING}".split("://")[1]
    owner = json.loads(storage.cat_file(marker))
    for other in ({"host": "elsewhere"}, {"pid": os.getppid()}):
        storage.pipe_file(marker, json.dumps(owner | other).encode())
        with pytest.raises(
            CheckpointError, match=r"is being saved by process \d+ on .*; no other job may .* remove memory"
        ):
            save(f"{memory}/c", small(1))
    dead = subprocess.Popen(["true"])
    dead.wait()
    storage.pipe_file(marker, json.dumps(owner | {"pid": dead.pid}).encode())
    save(f"{memory}/c", small(1))
    assert verify(f"{memory}/c") == []
    with pytest.raises(CheckpointError, match="was saved by another job at the same time"):
        begun.commit(b"{}")
    begun.discard()
    assert verify(f"{memory}/c") == []
    second = folder_at(f"{memory}/d")
    second.begin("0123abcd")
    marker = f"{memory}/d/{remote.SAVING}".split("://")[1]
    storage.pipe_file(marker, json.dumps(owner | {"host": "elsewhere"}).encode())
    monkeypatch.setattr(remote, "STALE_S", -1.0)
    save(f"{memory}/d", small(1))
    assert not storage.exists(marker)


def test_a_save_on_storage_that_removes_nothing(memory):
    """The checkpoint is complete although the marker cannot be removed; a save that cannot begin leaves no marker."""
    storage, at = fsspec.filesystem("memory"), memory.split("://")[1]
    with failing(type(storage), "rm_file", errno.EPERM, lambda self, path: remote.SAVING in path):
        save(f"{memory}/a", small(1))
    assert verify(f"{memory}/a") == []
    storage.pipe_file(f"{at}/b/rank-00000.safetensors", b"left by a save that was killed")
    broken = failing(type(storage), "rm_file", errno.EPERM, lambda self, path: "rank-" in path)
    with broken, pytest.raises(CheckpointError, match="Operation not permitted"):
        save(f"{memory}/b", small(1))
    assert not storage.exists(f"{at}/b/{remote.SAVING}")


def test_missing_storage_is_named(monkeypatch):
    with pytest.raises(UsageError, match=r"nosuch://x/y cannot be reached"):
        save("nosuch://x/y", small(1))
    monkeypatch.setitem(__import__("sys").modules, "fsspec.core", None)
    with pytest.raises(UsageError, match=r"pip install 'accordion-fsdp\[remote\]'"):
        folder_at("s3://x/y")


def credentials(url):
    return {"AWS_ENDPOINT_URL": url, "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}


@pytest.fixture
def s3(monkeypatch):
    server_of = pytest.importorskip("moto.server").ThreadedMotoServer
    pytest.importorskip("s3fs")
    server = server_of(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in credentials(f"http://{host}:{port}").items():
        monkeypatch.setenv(name, value)
    storage = fsspec.filesystem("s3", skip_instance_cache=True)
    storage.makedirs("bucket", exist_ok=True)  # the server keeps what an earlier one had
    yield storage
    server.stop()


def saved_by_ranks(mesh, environ, root):
    """Save on each rank, once at once and once in the background; return the full tensors after a load."""
    os.environ |= environ
    model, optimizer = sharded(mesh)
    for step in (1, 2):
        equal_step(model, optimizer)
        state = {"random": RandomState()}
        save(f"{root}/step-{step}", model, optimizer, extra=step, state=state, background=step == 2).wait()
    other, others = sharded(mesh, seed=2)
    assert load(f"{root}/step-2", other, others, state={"random": RandomState()}) == 2
    saved = full(model)
    assert_equal(full(other), saved)
    assert [equal_step(other, others) for _ in range(2)] == [equal_step(model, optimizer) for _ in range(2)]
    return saved


def refused_by_ranks(mesh, environ, path):
    os.environ |= environ
    with pytest.raises(CheckpointError, match="is damaged in bytes") as caught:
        load(path, sharded(mesh, seed=3)[0])
    return str(caught.value)


def between_ranks(ranks, storage, root, environ):
    saved = ranks.run(2, saved_by_ranks, environ, root, timeout_s=180)[0]
    assert verify(f"{root}/step-2") == []
    alone = Tiny(tied=True, scalar=True, vocab=37)
    assert load(f"{root}/step-2", alone) == 2
    assert_equal(alone.state_dict(), saved)
    damage(storage, f"{root}/step-2/rank-00001.safetensors".split("://")[1], 20_000)
    assert len(set(ranks.run(2, refused_by_ranks, environ, f"{root}/step-2"))) == 1


def test_checkpoints_of_two_ranks_on_shared_storage(world, tmp_path):
    """This machine's folder in the place of remote storage: a file system in memory cannot be shared by ranks."""
    between_ranks(world, fsspec.filesystem("local"), f"local://{tmp_path}", {})


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_checkpoints_on_s3(s3):
    url = os.environ["AWS_ENDPOINT_URL"]
    round_trip("s3://bucket/run")
    torn("s3://bucket/other", s3)
    ranks = pool.Pool(2)  # of their own: s3fs leaves threads behind
    try:
        between_ranks(ranks, s3, "s3://bucket/ranks", credentials(url))
    finally:
        ranks.close()
