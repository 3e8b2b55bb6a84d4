"""Changed bytes, disk errors, and forged manifests."""

import copy
import errno
import io
import json
import os
import random
import resource
import shutil
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from accordion import cli
from accordion.checkpoint import load, save
from accordion.checkpoint.reading import verify
from accordion.errors import CheckpointError
from tests.checkpoint.failing import failing
from tests.checkpoint.test_optimizer import everything, same
from tests.devices import device
from tests.support.checkpoints import filled, holds, sealed

# -- bytes that change


def save_at(mesh, path):
    torch.manual_seed(0)
    model = nn.Module()
    for name, shape in (("a", (9, 4)), ("b", (3,)), ("c", (8, 70))):
        whole = torch.randn(shape, device=device())
        mine = whole.chunk(mesh.size())[mesh.get_rank()]
        placed = DTensor.from_local(mine, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride())
        setattr(model, name, nn.Parameter(placed))
    model.register_buffer("seen", torch.arange(5, device=device()))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for param in model.parameters():
        param.grad = torch.full_like(param, 0.5)
    optimizer.step()
    save(path, model, optimizer, state={"x": torch.amp.GradScaler("cpu")})


def plain():
    model = nn.Module()
    for name, shape in (("a", (9, 4)), ("b", (3,)), ("c", (8, 70))):
        setattr(model, name, nn.Parameter(torch.full(shape, 7.0, device=device())))
    model.register_buffer("seen", torch.full((5,), 7, device=device()))
    return model


def stepped(model, has_states):
    """Return the model's optimizer, with states or without."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=7.0)
    for param in model.parameters() if has_states else ():
        param.grad = torch.ones_like(param)
    optimizer.step()
    return optimizer


@pytest.fixture
def saved(world, tmp_path):
    world.run(2, save_at, tmp_path / "c")
    return tmp_path / "c"


def damage(data, rng):
    """Flip a bit, cut off bytes, add bytes, or invert a block of bytes."""
    torn, at = bytearray(data), rng.randrange(len(data))
    kind = rng.choice(["flip", "flip", "flip", "cut", "more", "zeros"])
    if kind == "flip":
        torn[at] ^= 1 << rng.randrange(8)
    elif kind == "cut":
        del torn[at:]
    elif kind == "more":
        torn += bytes(rng.randint(1, 9))
    else:
        torn[at : at + 16] = bytes(b ^ 0xFF for b in torn[at : at + 16])
    return bytes(torn)


@pytest.mark.parametrize("count", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_changed_bytes_are_found_before_any_weight_changes(saved, count):
    folder, rng = saved, random.Random(0)
    files = sorted(folder.iterdir())
    whole = {file: file.read_bytes() for file in files}
    header = {file: int.from_bytes(data[:8], "little") + 8 for file, data in whole.items()}
    model = plain()
    load(folder, model, stepped(model, True))
    for i in range(count):
        file = files[i % len(files)]
        torn = damage(whole[file], rng)
        file.write_bytes(torn)
        faults = verify(folder)
        assert faults, f"{i}: {file.name}"
        assert file.name in " ".join(faults), f"{i}: {file.name}"
        changed = next((k for k in range(min(len(torn), len(whole[file]))) if torn[k] != whole[file][k]), len(torn))
        if file.name != "manifest.json" and changed >= header[file] and len(torn) == len(whole[file]):
            assert any(kind in " ".join(faults) for kind in ("model/", "optimizer/", "rank/")), f"{i}: {faults}"
        model = plain()
        optimizer = stepped(model, has_states=i % 2 == 0)
        before = everything(model, optimizer)
        with pytest.raises(CheckpointError, match=file.name.replace(".", r"\.")):
            load(folder, model, optimizer)
        assert same(everything(model, optimizer), before), f"{i}: weights or states changed"
        file.write_bytes(whole[file])
    assert verify(folder) == []


# -- disks


@pytest.mark.parametrize(
    ("call", "number", "background"),
    [
        ("pwrite", errno.ENOSPC, True),
        ("fsync", errno.EIO, False),
        ("rename", errno.EACCES, True),
        ("mkdir", errno.EROFS, False),
    ],
)
def test_disk_error_raises_and_the_previous_checkpoint_stays(tmp_path, call, number, background):
    model, other = filled(1), filled(0)
    save(tmp_path / "last", model, extra="before")
    with failing(os, call, number), pytest.raises(CheckpointError, match=os.strerror(number)):
        save(tmp_path / "last", filled(2), background=background).wait()
    assert load(tmp_path / "last", other) == "before"
    assert holds(tmp_path / "last", 1)
    assert verify(tmp_path / "last") == []
    save(tmp_path / "last", model, extra="after")  # and what is left of it is in nobody's way
    assert load(tmp_path / "last", other) == "after"
    assert os.listdir(tmp_path) == ["last"]


# -- manifests that lie


STRANGE = [
    None,
    True,
    -1,
    0,
    1,
    2**31,
    2**63,
    10**40,
    1e308,
    "",
    "x",
    "../../etc/passwd",
    "/dev/zero",
    "rank-00000.safetensors",
]
STRANGE += [[], {}, [[]], [0], [2**40, 2**40], {"$tensor": "model/a"}, {"$float": "x"}, {"$dict": [1]}, {"$evil": 1}]
STRANGE += [[0] * 3000, {"$tuple": {"$tuple": {"$tuple": 1}}}]


def places(words, at=()):
    """Iterate over all places in a JSON value."""
    items = words.items() if isinstance(words, dict) else enumerate(words) if isinstance(words, list) else ()
    for key, value in items:
        yield (*at, key)
        yield from places(value, (*at, key))


def lied(words, rng):
    """Return a copy of a JSON value with some values replaced, swapped, doubled or removed."""
    words = json.loads(json.dumps(words))
    for _ in range(rng.randint(1, 3)):
        all_places = list(places(words))
        if not all_places:
            break
        *where, last = rng.choice(all_places)
        inner = words
        for key in where:
            inner = inner[key]
        what = rng.random()
        if what < 0.6:
            inner[last] = copy.deepcopy(rng.choice(STRANGE))
        elif what < 0.75 and isinstance(inner, list):
            inner.append(inner[last])
        elif what < 0.9:
            del inner[last]
        elif isinstance(inner[last], int):
            inner[last] += rng.choice([-8, -1, 1, 4, 8])
    return words


@contextmanager
def little_memory(num_bytes):
    """Limit this process to so much more memory."""
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (held + num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def commands_look(folder, out):
    """Check that every command that reads a checkpoint ends with an exit code."""
    output = io.StringIO()
    for words in (["inspect", folder], ["export", folder, out], ["verify", folder]):
        with redirect_stdout(output), redirect_stderr(output):
            assert cli.main(["checkpoint", *map(str, words), "--json"]) in (0, 1, 2)
    shutil.rmtree(out, ignore_errors=True)
    return output.getvalue()


@pytest.mark.parametrize("count", [40, pytest.param(500, marks=pytest.mark.slow)])
def test_forged_manifests_are_refused(saved, count):
    """A load refuses a forged manifest or fills correct values, reads no other file and needs little memory."""
    folder, rng = saved, random.Random(0)
    words = json.loads((folder / "manifest.json").read_bytes())
    words.pop("crc32")
    paths = sorted(folder.parent.rglob("*"))
    truth = plain()
    load(folder, truth)
    refused = 0
    for i in range(count):
        (folder / "manifest.json").write_bytes(sealed(lied(words, rng)))
        model = plain()
        optimizer, text = stepped(model, has_states=True), ""
        before = everything(model, optimizer)
        with little_memory(2**28):
            try:
                load(folder, model, optimizer if i % 2 else None)
            except CheckpointError as error:
                text = str(error)
            if i % 4 == 0:
                text_of_commands = commands_look(folder, folder.parent / "out")
                assert "alloc" not in text_of_commands, f"{i}: {text_of_commands}"
        assert not text or same(everything(model, optimizer), before), f"{i}: {text}"
        assert text or all(torch.equal(model.state_dict()[name], tensor) for name, tensor in truth.state_dict().items())
        assert "alloc" not in text, f"{i}: {text}"
        assert "MemoryError" not in text, f"{i}: {text}"
        refused += bool(text)
    assert sorted(folder.parent.rglob("*")) == paths
    assert refused > count // 2
