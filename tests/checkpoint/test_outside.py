"""Sources of unknown origin: every listed tensor is there once, or the source is refused."""

import io
import json
import os
import random
import shutil
import struct
import zipfile

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from accordion.checkpoint.convert import convert, export
from accordion.checkpoint.reading import verify
from accordion.checkpoint.untrusted_files import read_folder
from accordion.errors import CheckpointError, UsageError
from accordion.weights.pretrained import check_pretrained
from tests.checkpoint.test_faults import damage, lied
from tests.support.processes import run_bounded

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),  # torch warns about some of these files
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
INDEX = "model.safetensors.index.json"


def safetensors(path, words, data=b""):
    """Write a safetensors file with this header, a text or a value for JSON."""
    text = (words if isinstance(words, str) else json.dumps(words)).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def tensor(start, end, dtype="U8", shape=None):
    return {"dtype": dtype, "shape": [end - start] if shape is None else shape, "data_offsets": [start, end]}


def assert_refused(source, folder, *words):
    """Check that converting is refused in a sentence with these words, and leaves nothing."""
    before = sorted(os.listdir(folder))
    with pytest.raises(CheckpointError) as refused:
        convert(source, folder / "out")
    for word in words:
        assert word in str(refused.value)
    assert sorted(os.listdir(folder)) == before
    return str(refused.value)


LIES = {  # the header, the number of bytes of data, and words of the error
    "overlap": ({"a": tensor(0, 4), "b": tensor(2, 6)}, 6, "invalid offset for tensor `b`"),
    "gap": ({"a": tensor(0, 4), "b": tensor(8, 12)}, 12, "invalid offset for tensor `b`"),
    "too short": ({"a": tensor(0, 8)}, 4, "file not fully covered"),
    "huge": ({"a": tensor(0, 0, shape=[2**40, 2**40, 0])}, 0, "overflow"),
    "many dims": ({"a": tensor(0, 1, shape=[1] * 65)}, 1, "a cannot be U8"),
    "dtype of others": ({"a": tensor(0, 4, "F8_E8M0")}, 4, "a has the dtype 'F8_E8M0', which cannot be read"),
    "key twice": ('{"a": ONE, "a": ONE}'.replace("ONE", json.dumps(tensor(0, 4))), 4, "a key twice"),
    "nothing": ({"__metadata__": {"format": "pt"}}, 0, "holds no tensors"),
}


@pytest.mark.parametrize("lie", LIES)
def test_forged_header_is_refused(tmp_path, lie):
    words, num_bytes, error = LIES[lie]
    safetensors(tmp_path / "m.safetensors", words, bytes(num_bytes))
    assert_refused(tmp_path / "m.safetensors", tmp_path, error, "m.safetensors")


def hf(path, files, weight_map):
    path.mkdir()
    for name, tensors in files.items():
        save_file(tensors, path / name)
    (path / INDEX).write_text(weight_map if isinstance(weight_map, str) else json.dumps({"weight_map": weight_map}))
    return path


X, Y = "x.safetensors", "y.safetensors"
A, B, C = ({name: torch.ones(2)} for name in "abc")
INDEXES = {  # the files, the index, and words of the error
    "lacking": ({X: A}, {"a": X, "b": X}, "b in x.safetensors"),
    "in two files": ({X: A | B, Y: A | C}, {"b": X, "c": Y}, "a is in x.safetensors and in y.safetensors"),
    "key twice": ({X: A}, '{"weight_map": {"a": "x.safetensors", "a": "x.safetensors"}}', "a key twice"),
    "elsewhere": ({X: A, Y: B}, {"a": Y, "b": X}, "a in y.safetensors"),
    "no file": ({}, {"a": X}, "x.safetensors cannot be opened: No such file"),
}


@pytest.mark.parametrize("case", INDEXES)
def test_every_tensor_in_an_index_must_exist_once(tmp_path, case):
    files, weight_map, error = INDEXES[case]
    assert_refused(hf(tmp_path / "hf", files, weight_map), tmp_path, error)


def test_a_copy_of_a_tensor_that_the_index_does_not_name_is_left_out(tmp_path):
    folder = hf(tmp_path / "twice", {X: A, Y: A | B}, {"a": X, "b": Y})
    assert read_folder(folder)["a"][0].name == X


@pytest.mark.parametrize(
    "prefix", ["module._orig_mod.", "_orig_mod.module.", "module.module.", "_checkpoint_wrapped_module."]
)
def test_prefixes_of_compiled_and_wrapped_models_are_removed(tmp_path, prefix):
    saved = {f"{prefix}{name}": torch.ones(2) for name in ("a.weight", "module.b")}
    torch.save({"model": saved}, tmp_path / "x.pt")
    save_file(saved, tmp_path / "x.safetensors")
    for source, target in (("x.pt", "a"), ("x.safetensors", "b")):
        assert set(convert(tmp_path / source, tmp_path / target).tensors) == {"model/a.weight", "model/module.b"}


def test_names_of_the_models_own_modules_stay(tmp_path):
    torch.save({"module.a": torch.ones(2), "b": torch.ones(2)}, tmp_path / "own.pt")
    assert set(convert(tmp_path / "own.pt", tmp_path / "own").tensors) == {"model/module.a", "model/b"}


NO_MODELS = {  # what torch.save wrote, and words of the error
    "keys with equal names": ({1: torch.ones(2), "1": torch.zeros(2)}, "1 and '1' both stand for 1"),
    "empty": ({}, "holds no tensors"),
    "numbers alone": ({"epoch": 3}, "holds no tensors"),
    "empty model": ({"model": {}, "epoch": 3}, "holds no tensors"),
    "list": ([1], "holds a list and no state dict"),
}


@pytest.mark.parametrize("case", NO_MODELS)
def test_torch_file_without_a_model_is_refused(tmp_path, case):
    saved, error = NO_MODELS[case]
    torch.save(saved, tmp_path / "m.pt")
    assert_refused(tmp_path / "m.pt", tmp_path, error)


# -- what torch.save writes


def odd_tensors():
    whole = torch.arange(24.0).view(4, 6)
    return {
        "whole": whole,
        "turned": whole.t(),
        "part": whole[1:3, ::2],
        "wide": torch.ones(1).expand(5),
        "scalar": torch.tensor(3),
        "empty": torch.empty(0, 3),
        "half": torch.ones(3).half(),
        "brain": torch.ones(3).bfloat16(),
        "bool": torch.tensor([True, False]),
        "small": torch.arange(3).to(torch.uint16),
        "float8": torch.ones(3).to(torch.float8_e4m3fn),
        "conj": torch.tensor([1 + 2j, 3j], dtype=torch.complex64).conj(),
        "neg": torch.tensor([1 + 2j, 3j], dtype=torch.complex64).conj().imag,
        "param": nn.Parameter(whole + 1),
    }


@pytest.mark.parametrize("checked", [True, False])
def test_tensors_of_torch_save_are_what_torch_loads(tmp_path, checked):
    torch.serialization.set_crc32_options(checked)
    try:
        torch.save({"model": odd_tensors()}, tmp_path / "m.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    convert(tmp_path / "m.pt", tmp_path / "c")
    export(tmp_path / "c", tmp_path / "m.safetensors", "safetensors")
    exported, trusted = load_file(tmp_path / "m.safetensors"), torch.load(tmp_path / "m.pt", weights_only=True)["model"]
    assert sorted(exported) == sorted(trusted)
    for name, tensor in trusted.items():
        assert exported[name].dtype == tensor.dtype, name
        assert exported[name].tolist() == tensor.tolist(), name


def test_flipped_byte_of_a_torch_file_raises(tmp_path):
    torch.save({"a": torch.arange(100.0)}, tmp_path / "m.pt")
    whole = (tmp_path / "m.pt").read_bytes()
    at = whole.index(struct.pack("<2f", 41.0, 42.0))
    (tmp_path / "m.pt").write_bytes(whole[:at] + b"\x01" + whole[at + 1 :])
    assert_refused(tmp_path / "m.pt", tmp_path, "Bad CRC-32")


class Payload:
    """An object that makes a folder when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_torch_files_that_are_old_or_hold_code_are_refused_without_advice_to_load_them_unsafely(tmp_path):
    """Nothing of a pickle is executed."""
    torch.save({"a": torch.ones(2)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    errors = assert_refused(tmp_path / "old.pt", tmp_path, "torch 1.6", "save it again")
    torch.save({"a": torch.ones(2), "x": Payload(tmp_path / "mark")}, tmp_path / "code.pt")
    errors += assert_refused(tmp_path / "code.pt", tmp_path, "mkdir, which is not allowed")
    assert "weights_only" not in errors
    assert "safe_globals" not in errors


# -- load_pretrained


@pytest.mark.usefixtures("no_waiting")
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
    with pytest.raises(CheckpointError, match="is no regular file"):
        check_pretrained(model, tmp_path)


# -- pipes, bombs and changed bytes


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


def archive(pickled, **how):
    """Return the bytes of a file of `torch.save` with the pickle `pickled`."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", **how) as file:
        file.writestr("a/data.pkl", pickled)
        file.writestr("a/data/0", b"\0" * 4)
        file.writestr("a/byteorder", b"little")
        file.writestr("a/version", b"3")
    return buffer.getvalue()


def torch_file(tensor):
    buffer = io.BytesIO()
    torch.save({"weight": tensor}, buffer)
    return buffer.getvalue()


def bombs():
    """Return the contents of files, by their paths, each in a source of its own."""
    return {
        "deep/model.safetensors": (10**6).to_bytes(8, "little") + b"[" * 10**6,
        "long header/model.safetensors": (2**62).to_bytes(8, "little") + b"{}",
        f"deep index/{INDEX}": b'{"weight_map":' * 10**5,
        "wide": torch_file(torch.zeros(1).expand(2**40)),
        "sparse": torch_file(torch.sparse_coo_tensor([[0]], [1.0], (2**40,))),
        "meta": torch_file(torch.empty(2**40, device="meta")),
        "memo": archive(b"\x80\x04Nr\0\0\0\x40."),
        "frame": archive(b"\x80\x04\x95" + (2**62).to_bytes(8, "little") + b"N."),
        "packed": archive(bytes(2**28), compression=zipfile.ZIP_DEFLATED),
    }


def test_pipes_and_sources_that_expand_hugely_are_refused_with_limited_memory(tmp_path):
    files = bombs()
    for name, data in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    os.mkfifo(hf(tmp_path / "a pipe", {}, {"a": X}) / X)
    (pipe, *texts), _ = run_bounded(answers, *sorted(tmp_path.iterdir()))
    assert "is no regular file" in pipe
    assert len(texts) == len(files)
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
