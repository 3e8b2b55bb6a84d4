"""Converting files of unknown origin: they are read correctly or refused, and nothing else happens."""

import json
import os
import random
import shutil
import zipfile

import pytest
import torch
from safetensors.torch import load_file

from accordion.checkpoint.convert import convert, export
from accordion.checkpoint.inspect import verify
from accordion.errors import CheckpointError, UsageError
from tests.checkpoint.test_faults import damage, lied
from tests.checkpoint.test_outside import INDEX, hf, safetensors
from tests.support.bounded import run_bounded

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),  # torch has words about what it meets here
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


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


def test_a_pipe_in_place_of_a_file_is_refused_at_once(tmp_path):
    fifo_shard(tmp_path / "hf")
    ((text,), _) = run_bounded(answers, tmp_path / "hf")
    assert "is no regular file" in text


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


BOMBS = {
    "deep": lambda path: safetensors_of("[" * 10**6)(path),
    "long header": long_header,
    "deep index": lambda path: index_of('{"weight_map":' * 10**5)(path),
    "wide": saved(lambda: torch.zeros(1).expand(2**40)),
    "sparse": saved(lambda: torch.sparse_coo_tensor([[0]], [1.0], (2**40,))),
    "meta": saved(lambda: torch.empty(2**40, device="meta")),
    "memo": torch_of(b"\x80\x04Nr\0\0\0\x40."),
    "frame": torch_of(b"\x80\x04\x95" + (2**62).to_bytes(8, "little") + b"N."),
    "packed": torch_of(bytes(2**28), compression=zipfile.ZIP_DEFLATED),
}


def test_sources_that_expand_hugely_are_refused_with_limited_memory(tmp_path):
    for name, make in BOMBS.items():
        make(tmp_path / name)
    texts, _ = run_bounded(answers, *sorted(tmp_path.iterdir()))
    assert len(texts) == len(BOMBS)
    assert "converted" not in texts


def sources(folder):
    """Write a folder of safetensors with an index and a torch file; return the state and the files to change."""
    state = {
        "a.weight": torch.arange(12.0).view(4, 3),
        "a.bias": torch.arange(5),
        "b": torch.arange(12.0).view(4, 3) + 50,
    }
    hf(folder / "hf", {"x.safetensors": state}, dict.fromkeys(state, "x.safetensors"))
    torch.save(state, folder / "m.pt")
    return state, [folder / name for name in ("hf/x.safetensors", f"hf/{INDEX}", "m.pt")]


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
    elif kind == "lie" and file.suffix == ".json":
        file.write_text(json.dumps(lied(json.loads(whole), rng)))
    else:
        file.write_bytes(damage(whole, rng))
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
