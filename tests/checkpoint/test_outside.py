"""Sources that somebody else wrote: every promised tensor is there once, read in bounded memory, or all is refused."""

import json
import os
import pickle
import random
import re
import shutil
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn

import accordion
from accordion.checkpoint.convert import convert, export
from accordion.checkpoint.inspect import diff
from accordion.checkpoint.load import load
from accordion.checkpoint.torch_save_files import Saved
from accordion.errors import CheckpointError
from accordion.weights.pretrained import check_pretrained

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
INDEX = "model.safetensors.index.json"


def safetensors(path, words, data=b""):
    """A file with this header, a text or what JSON makes of it."""
    text = (words if isinstance(words, str) else json.dumps(words)).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def tensor(start, end, dtype="U8", shape=None):
    return {"dtype": dtype, "shape": [end - start] if shape is None else shape, "data_offsets": [start, end]}


def assert_refused(source, folder, *words):
    """In a sentence that has these words, and nothing is left behind."""
    before = sorted(os.listdir(folder))
    with pytest.raises(CheckpointError) as refused:
        convert(source, folder / "out")
    for word in words:
        assert word in str(refused.value)
    assert sorted(os.listdir(folder)) == before
    return str(refused.value)


LIES = {
    "below zero": ({"a": tensor(-4, 0, shape=[4]), "b": tensor(0, 4)}, 4, "a cannot be"),
    "overlap": ({"a": tensor(0, 4), "b": tensor(2, 6)}, 6, "b in bytes"),
    "the same bytes": ({"a": tensor(0, 4), "b": tensor(0, 4)}, 4, "overlaps"),
    "gap": ({"a": tensor(0, 4), "b": tensor(8, 12)}, 12, "leaves a gap"),
    "rest": ({"a": tensor(0, 4)}, 8, "end at byte"),
    "too short": ({"a": tensor(0, 8)}, 4, "a cannot be"),
    "other size": ({"a": tensor(0, 4, "F32", [2])}, 4, "a cannot be"),
    "float": ({"a": tensor(0, 4, shape=[4.0])}, 4, "a cannot be"),
    "true": ({"a": tensor(0, 1, shape=[True])}, 1, "a cannot be"),
    "huge": ({"a": tensor(0, 0, shape=[2**40, 2**40, 0])}, 0, "a cannot be"),
    "dtype": ({"a": tensor(0, 4, "F13")}, 4, "F13"),
    "metadata": ({"__metadata__": {"a": 1}, "a": tensor(0, 4)}, 4, "__metadata__"),
    "key twice": ('{"a": ONE, "a": ONE}'.replace("ONE", json.dumps(tensor(0, 4))), 4, "a key twice"),
    "list": ("[]", 0, "no JSON object"),
    "surrogate": ('{"\\ud800": ONE}'.replace("ONE", json.dumps(tensor(0, 4))), 4, "no Unicode text"),
    "nothing": ({"__metadata__": {"format": "pt"}}, 0, "holds no tensors"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_header_that_lies_is_refused(tmp_path, lie):
    words, num_bytes, said = LIES[lie]
    safetensors(tmp_path / "m.safetensors", words, bytes(num_bytes))
    assert_refused(tmp_path / "m.safetensors", tmp_path, said, "m.safetensors")


def hf(path, files, weight_map):
    path.mkdir()
    for name, tensors in files.items():
        save_file(tensors, path / name)
    (path / INDEX).write_text(weight_map if isinstance(weight_map, str) else json.dumps({"weight_map": weight_map}))
    return path


def test_every_tensor_that_an_index_promises_is_there_once(tmp_path):
    one = {"a": torch.ones(2)}
    lacks = hf(tmp_path / "lacks", {"x.safetensors": one}, {"a": "x.safetensors", "b": "x.safetensors"})
    assert_refused(lacks, tmp_path, "b in x.safetensors")
    twice = hf(
        tmp_path / "twice",
        {"x.safetensors": one, "y.safetensors": {**one, "b": torch.ones(1)}},
        {"a": "x.safetensors", "b": "y.safetensors"},
    )
    assert_refused(twice, tmp_path, "a lies in x.safetensors and in y.safetensors")
    keys = hf(tmp_path / "keys", {"x.safetensors": one}, '{"weight_map": {"a": "x.safetensors", "a": "x.safetensors"}}')
    assert_refused(keys, tmp_path, "a key twice")
    elsewhere = hf(
        tmp_path / "elsewhere",
        {"x.safetensors": one, "y.safetensors": {"b": torch.ones(1)}},
        {"a": "y.safetensors", "b": "x.safetensors"},
    )
    assert_refused(elsewhere, tmp_path, "a in y.safetensors")
    assert_refused(hf(tmp_path / "absent", {}, {"a": "x.safetensors"}), tmp_path, "x.safetensors", "No such file")


def test_keys_that_become_one_name_are_refused(tmp_path):
    torch.save({1: torch.ones(2), "1": torch.zeros(2)}, tmp_path / "m.pt")
    assert_refused(tmp_path / "m.pt", tmp_path, "1 and '1'", "both stand for")
    state = {"model": {"a": torch.ones(2)}, "module": {"a": torch.zeros(2)}}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert_refused(tmp_path / "dcp", tmp_path, "both stand for model/a")


@pytest.mark.parametrize("held", [{}, {"epoch": 3}, {"model": {}, "epoch": 3}])
def test_a_source_without_tensors_is_refused(tmp_path, held):
    torch.save(held, tmp_path / "m.pt")
    assert_refused(tmp_path / "m.pt", tmp_path, "holds no tensors")
    if held.get("epoch"):
        dcp.save({"epoch": 3}, checkpoint_id=tmp_path / "dcp", no_dist=True)
        assert_refused(tmp_path / "dcp", tmp_path, "holds no tensors")


def lied_metadata(folder, change):
    dcp.save({"model": {"a": torch.ones(2), "b": torch.ones(3)}, "step": 3}, checkpoint_id=folder, no_dist=True)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    places = {index.fqn: index for index in metadata.storage_data}
    change(metadata, places)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return folder


def test_every_value_that_dcp_promises_is_there_once(tmp_path):
    for key in ("model.a", "step"):
        folder = lied_metadata(tmp_path / f"no-{key}", lambda m, p, k=key: m.storage_data.pop(p[k]))
        assert_refused(folder, tmp_path, f"does not say where {key} lies")
    folder = lied_metadata(tmp_path / "unsaid", lambda m, p: m.state_dict_metadata.pop("model.a"))
    assert_refused(folder, tmp_path, "where model.a lies and not what it is")

    def shares(metadata, places):
        metadata.storage_data[places["model.a"]].offset = metadata.storage_data[places["model.b"]].offset

    assert_refused(lied_metadata(tmp_path / "shared", shares), tmp_path, "model.a and model.b into the same bytes")


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
    data = torch.frombuffer(bytearray((tmp_path / "m.pt").read_bytes()), dtype=torch.uint8)
    saved, trusted = Saved(data), torch.load(tmp_path / "m.pt", weights_only=True)["model"]
    assert list(saved.value["model"]) == list(trusted)
    for name, held in saved.value["model"].items():
        made = saved.tensor(held)
        assert made.dtype == trusted[name].dtype, name
        assert made.tolist() == trusted[name].tolist(), name


def test_a_flipped_byte_of_a_torch_file_is_told(tmp_path):
    torch.save({"a": torch.arange(100.0)}, tmp_path / "m.pt")
    whole = (tmp_path / "m.pt").read_bytes()
    at = whole.index(struct.pack("<2f", 41.0, 42.0))
    (tmp_path / "m.pt").write_bytes(whole[:at] + b"\x01" + whole[at + 1 :])
    assert_refused(tmp_path / "m.pt", tmp_path, "are damaged")


@pytest.mark.parametrize("shape", ["larger", "negative", "strides"])
def test_a_tensor_that_leaves_its_storage_is_refused(tmp_path, shape):
    """torch makes such a storage larger, and fills it with whatever memory holds."""
    torch.save({"a": torch.arange(7.0)}, tmp_path / "m.pt")
    with zipfile.ZipFile(tmp_path / "m.pt") as file:
        records = {name: file.read(name) for name in file.namelist()}
    old = b"K\x00K\x07\x85q"
    new = {"larger": b"K\x00K\x08\x85q", "negative": b"K\x00J\xff\xff\xff\xff\x85q", "strides": b"K\x02K\x07\x85q"}[
        shape
    ]
    with zipfile.ZipFile(tmp_path / "m.pt", "w") as file:
        for name, record in records.items():
            assert not name.endswith("data.pkl") or old in record
            file.writestr(name, record.replace(old, new) if name.endswith("data.pkl") else record)
    assert_refused(tmp_path / "m.pt", tmp_path, "shape")


def test_an_old_torch_file_is_refused_without_advice_to_load_it_unsafely(tmp_path):
    torch.save({"a": torch.ones(2)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    said = assert_refused(tmp_path / "old.pt", tmp_path, "torch 1.6", "saved again")
    torch.save({"a": torch.ones(2), "x": Path("x")}, tmp_path / "names.pt")
    said += assert_refused(tmp_path / "names.pt", tmp_path, "PosixPath, which is not allowed")
    assert "weights_only" not in said
    assert "safe_globals" not in said


def test_an_archive_of_more_records_than_16_bits_count(tmp_path):
    with zipfile.ZipFile(tmp_path / "m.pt", "w") as file:
        file.writestr("a/data.pkl", b"\x80\x02K\x05.")
        for i in range(2**16):
            file.writestr(f"a/{i}", b"")
    saved = Saved(torch.frombuffer(bytearray((tmp_path / "m.pt").read_bytes()), dtype=torch.uint8))
    assert saved.value == 5


# -- files that are none, and memory


def run_bounded(code, *words, seconds=60):
    """Run `code` in another process; its output, and by how much its resident memory grew at most, in MiB."""
    head = (
        "import sys, resource, warnings, torch\nwarnings.simplefilter('ignore')\n"
        "from accordion.checkpoint.convert import convert\nfrom accordion.errors import CheckpointError, UsageError\n"
        "peak = lambda: int([l for l in open('/proc/self/status') if l.startswith('VmHWM')][0].split()[1])\n"
        "before = peak()\n"
    )
    tail = "\nprint(); print((peak() - before) // 1024)\n"
    here = Path(__file__).parents[2]
    path = os.pathsep.join([str(Path(accordion.__file__).parents[1]), str(here), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", head + code + tail, *map(str, words)],
        capture_output=True,
        text=True,
        timeout=seconds,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    *lines, mib = done.stdout.strip().splitlines()
    return "\n".join(lines), int(mib)


REFUSED = """
for source in sys.argv[1:]:
    try:
        convert(source, source + '.out')
        print(source, 'converted')
    except (CheckpointError, UsageError) as error:
        print(str(error)[:300])
"""


def fifo_shard(folder):
    hf(folder, {}, {"a": "x.safetensors"})
    os.mkfifo(folder / "x.safetensors")


def fifo_dcp(folder):
    dcp.save({"model": {"a": torch.ones(2)}}, checkpoint_id=folder, no_dist=True)
    (file,) = folder.glob("*.distcp")
    file.unlink()
    os.mkfifo(file)


def fifo_of_a_value(folder):
    dcp.save({"model": {"a": torch.ones(2)}, "step": 3}, checkpoint_id=folder, no_dist=True)
    (file,) = folder.glob("*.distcp")
    file.unlink()
    os.mkfifo(file)


def test_a_pipe_in_place_of_a_file_is_refused_at_once(tmp_path):
    makers = [fifo_shard, fifo_dcp, fifo_of_a_value]
    for make in makers:
        make(tmp_path / make.__name__)
    said, _ = run_bounded(REFUSED, *(tmp_path / make.__name__ for make in makers))
    assert said.count("is no regular file") == 3


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

    return make


def safetensors_of(words, data=b""):
    def make(path):
        path.mkdir()
        safetensors(path / "model.safetensors", words, data)

    return make


def many_empty(path):
    path.mkdir()
    one = json.dumps(tensor(0, 0))
    safetensors(
        path / "model.safetensors", "{" + ",".join(f'"{i:x}":{one}'.replace(" ", "") for i in range(15000)) + "}"
    )


def index_of(text):
    def make(path):
        path.mkdir()
        (path / INDEX).write_text(text)

    return make


def nested_twice(depth):
    """A tuple of a tuple twice, of a tuple twice, and so on: as a key it has a hash of 2 ** depth steps."""
    return b")\x94" + b"".join(b"h%ch%c\x86\x94" % (i, i) for i in range(depth))


def copies(what, count):
    """A list of 2 ** 15 items from which `what` is made, again and again."""
    return b"\x80\x02c%s\nq\0]q\x01(%se%s." % (what, b"N" * 2**15, b"h\0h\x01\x85R" * count)


def many_of_one(path, count=16000):
    """Tensors that are all one element."""
    one = (
        b"\x80\x02}(X\x01\0\0\0actorch._utils\n_rebuild_tensor_v2\n((X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000"
        b"X\x03\0\0\0cpuK\x01tQK\0))\x89NtRq\x01"
    )
    torch_of(one + b"".join(b"X\x04\0\0\0%04xh\x01" % i for i in range(count)) + b"u.")(path)


BOMBS = {
    "memo": metadata_of(b"\x80\x04Nr\0\0\0\x40."),
    "bytearray": metadata_of(b"\x80\x05\x96" + (2**40).to_bytes(8, "little") + b"."),
    "frame": metadata_of(b"\x80\x04\x95" + (2**62).to_bytes(8, "little") + b"N."),
    "dicts": metadata_of(b"\x80\x04" + b"}\x94" * (2**18 - 9) + b"."),
    "marks": metadata_of(b"\x80\x04" + b"(" * (2**19 - 9) + b"."),
    "long": metadata_of(b"\x80\x04]" + b"(" + b"N" * 2**18 + b"e" + b"." * 2**24),
    "tuples in tuples as a key": metadata_of(b"\x80\x04})" + b"\x85" * 2**18 + b"Ns."),
    "a tuple of tuples twice, as a key": metadata_of(b"\x80\x04" + nested_twice(60) + b"}h\x3cNs."),
    "paths": metadata_of(copies(b"pathlib\nPosixPath", 2**15)),
    "packed": torch_of(bytes(2**30), compression=zipfile.ZIP_DEFLATED),
    "sizes": torch_of(copies(b"torch\nSize", 2**15)),
    "many of one": many_of_one,
    "too many of one": lambda path: many_of_one(path, 30000),
    "header of lists": safetensors_of("{" + '"a":[' + ",".join(["[]"] * 2**18) + "]}"),
    "header of brackets": safetensors_of("{" + '"a":' + "[" * 2**19),
    "empty tensors": many_empty,
    "index": index_of('{"weight_map": {"a": [' + ",".join(["{}"] * 2**18) + "]}}"),
}


def test_bombs_take_little_memory(tmp_path):
    for i, make in enumerate(BOMBS.values()):
        make(tmp_path / f"{i:02}")
    said, mib = run_bounded(REFUSED, *sorted(tmp_path.iterdir()))
    assert len(said.splitlines()) == len(BOMBS)
    assert said.count("converted") == 2, said  # empty tensors, and many of one, are what they say
    assert mib < 100, said


NUMBERS = [b"0", b"-1", b"9223372036854775808", b"1" * 5000, b"1e9", b"NaN", b"null", b"[]", b"{}"]


def mutated(data, rng):
    """Bits flipped, bytes cut out, two parts swapped or doubled, another number in place of one."""
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


def fuzz(folder, count):
    """Convert `count` mutations of what describes tensors; how many were refused. Nothing else is raised, nothing is wrong."""
    rng, num_refused = random.Random(3), 0
    state = {
        "a.weight": torch.arange(12.0).view(4, 3),
        "a.bias": torch.arange(5),
        "b": torch.arange(12.0).view(4, 3) + 50,
    }
    hf(folder / "hf", {"x.safetensors": state}, dict.fromkeys(state, "x.safetensors"))
    dcp.save({"model": state, "step": 3}, checkpoint_id=folder / "dcp", no_dist=True)
    torch.save(state, folder / "m.pt")
    files = [folder / "hf" / "x.safetensors", folder / "hf" / INDEX, folder / "dcp" / ".metadata", folder / "m.pt"]
    for i in range(count):
        file = files[i % len(files)]
        source = file if file.suffix == ".pt" else file.parent
        whole = file.read_bytes()
        if file.suffix == ".safetensors":
            end = 8 + int.from_bytes(whole[:8], "little")
            words = mutated(whole[8:end], rng)
            file.write_bytes(len(words).to_bytes(8, "little") + words + whole[end:])
        else:
            file.write_bytes(mutated(whole, rng))
        try:
            convert(source, folder / "out")
        except CheckpointError as error:
            if "cannot be converted" in str(error):  # what nobody foresaw
                raise
            num_refused += 1
        else:
            export(folder / "out", folder / "made")
            for name, made in load_file(folder / "made" / "model.safetensors").items():
                if name in state and (made.dtype, made.shape) == (state[name].dtype, state[name].shape):
                    assert torch.equal(made, state[name]), f"{i}: {name} of {file}"
            shutil.rmtree(folder / "out")
            shutil.rmtree(folder / "made")
        file.write_bytes(whole)
    return num_refused


def test_mutations_of_what_describes_tensors_are_read_right_or_refused(tmp_path):
    code = "import tests.checkpoint.test_outside as t, pathlib\nprint(t.fuzz(pathlib.Path(sys.argv[1]), 400))"
    said, mib = run_bounded(code, tmp_path, seconds=300)
    assert 200 < int(said.split()[-1]) < 400
    assert mib < 100


# -- what is loaded into what


class Held(nn.Module):
    def __init__(self, buffer, weight):
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.register_buffer("seen", buffer)


CASTS = [
    (torch.ones(2), torch.zeros(2, dtype=torch.int64), False),
    (torch.ones(2, dtype=torch.int64), torch.zeros(2), False),
    (torch.ones(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int32), False),
    (torch.ones(2, dtype=torch.bool), torch.zeros(2, dtype=torch.uint8), False),
    (torch.ones(2, dtype=torch.complex64), torch.zeros(2), False),
    (torch.ones(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int64), True),
    (torch.ones(2, dtype=torch.uint8), torch.zeros(2, dtype=torch.int16), True),
    (torch.ones(2), torch.zeros(2, dtype=torch.bfloat16), True),
    (torch.ones(2, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.float64), True),
]


@pytest.mark.parametrize(("saved", "now", "fits"), CASTS)
def test_only_casts_that_keep_the_kind_are_made_on_load(tmp_path, saved, now, fits):
    accordion.save(tmp_path / "c", Held(saved, torch.ones(3)))
    model = Held(now.clone(), torch.zeros(3))
    if fits:
        load(tmp_path / "c", model)
        assert model.seen.tolist() == [1, 1]
        return
    with pytest.raises(
        CheckpointError, match=r"1 of another kind: model/seen is .* in the checkpoint and .* in the model"
    ):
        load(tmp_path / "c", model)
    assert not model.weight.any()
    with pytest.warns(UserWarning, match="model/seen is "):
        load(tmp_path / "c", model, strict=False)
    assert torch.equal(model.seen, now)
    assert model.weight.all()


def test_names_of_wrappers_that_hide_another_tensor_are_refused(tmp_path):
    model = nn.Module()
    model.weight = nn.Parameter(torch.ones(2))
    model.add_module("_orig_mod", nn.Module())
    model._orig_mod.weight = nn.Parameter(torch.zeros(2))
    with pytest.raises(
        CheckpointError, match=r"_orig_mod.weight and another tensor of the model are both model/weight"
    ):
        accordion.save(tmp_path / "c", model)
    assert os.listdir(tmp_path) == []


# -- the command


def test_diff_of_a_damaged_checkpoint_names_the_damage(tmp_path):
    for name in "ab":
        accordion.save(tmp_path / name, Held(torch.ones(2), torch.arange(100.0)))
    file = tmp_path / "b" / "rank-00000.safetensors"
    whole = file.read_bytes()
    at = whole.index(struct.pack("<2f", 41.0, 42.0))
    file.write_bytes(whole[:at] + b"\x01" + whole[at + 1 :])
    for one, other in ("ab", "ba"):
        with pytest.raises(CheckpointError, match=r"/b is damaged, so it is not compared: model/weight is damaged"):
            diff(tmp_path / one, tmp_path / other)


def commanded(*words, **how):
    path = os.pathsep.join([str(Path(accordion.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path, **how.pop("env", {})}
    words = [sys.executable, "-m", "accordion", "checkpoint", *map(str, words)]
    return subprocess.run(words, stderr=subprocess.PIPE, env=env, timeout=60, **how)


def test_letters_that_the_terminal_has_not_are_written_as_escapes(tmp_path):
    model = nn.Module()
    model.register_buffer("gewürz", torch.ones(2))
    accordion.save(tmp_path / "gewürz", model)
    env = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii:strict"}
    done = commanded("inspect", tmp_path / "gewürz", env=env, stdout=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"model/gew\\xfcrz  F32 [2]" in done.stdout


def test_a_full_output_is_told_in_a_sentence(tmp_path):
    accordion.save(tmp_path / "c", nn.Linear(2, 2))
    with open("/dev/full", "w") as full:
        done = commanded("inspect", tmp_path / "c", stdout=full)
    assert done.returncode == 1
    assert done.stderr == b"accordion: what was found cannot be written out: No space left on device.\n"


# -- load_pretrained


@pytest.mark.parametrize("lie", LIES)
def test_a_header_that_lies_is_refused_by_load_pretrained_too(tmp_path, lie):
    words, num_bytes, said = LIES[lie]
    safetensors(tmp_path / "model.safetensors", words, bytes(num_bytes))
    model = nn.Module()
    model.register_buffer("a", torch.zeros(4, dtype=torch.uint8))
    with pytest.raises(CheckpointError, match="missing in the folder" if lie == "nothing" else said):
        check_pretrained(model, tmp_path)


def test_load_pretrained_opens_no_pipe_and_casts_no_float_to_an_integer(tmp_path):
    model = nn.Module()
    model.register_buffer("a", torch.zeros(4, dtype=torch.int32))
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
    code = (
        "from accordion.weights.pretrained import check_pretrained\nimport pathlib\ntry:\n"
        "    check_pretrained(torch.nn.Linear(2, 2), pathlib.Path(sys.argv[1]))\n"
        "except CheckpointError as error:\n    print(error)\n"
    )
    assert "is no regular file" in run_bounded(code, tmp_path)[0]
