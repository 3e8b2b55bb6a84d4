"""A reader written from docs/checkpoint.md alone, without torch, reads what `save` wrote and what `load` gives."""

import base64
import json
import math
import zlib

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import accordion as acc
from accordion.checkpoint import RandomState, save
from accordion.checkpoint.format import CODES
from tests.devices import device

# -- the reader: every line follows a sentence of "The format"

NUMPY = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "BF16": "<u2",
    "F8_E4M3": "u1",
    "F8_E5M2": "u1",
    "C64": "<c8",
    "I64": "<i8",
}
NUMPY |= {"I32": "<i4", "I16": "<i2", "I8": "i1", "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1", "BOOL": "?"}


def sum_of(kind, data):
    if kind == "crc32":
        return f"{zlib.crc32(data):08x}"
    import xxhash

    return xxhash.xxh3_64_hexdigest(data)


def read_manifest(folder):
    text = (folder / "manifest.json").read_bytes()
    assert text[-21:] == f',"crc32":"{zlib.crc32(text[:-21]):08x}"}}\n'.encode()
    words = json.loads(text)
    assert words["schema"] == 2
    for name, file in words["files"].items():
        data = (folder / name).read_bytes()
        assert len(data) == file["bytes"]
        assert 8 + int.from_bytes(data[:8], "little") == file["header_bytes"]
        assert sum_of(words["checksum"], data[: file["header_bytes"]]) == file["header_sum"]
    return words


def read_tensor(folder, words, name):
    entry = words["tensors"][words["aliases"].get(name, name)]
    whole = np.empty(entry["shape"], NUMPY[entry["dtype"]])
    for chunk in entry["chunks"]:
        length, size = math.prod(chunk["shape"]) * whole.itemsize, words["piece_bytes"]
        data = (folder / chunk["file"]).read_bytes()[chunk["at"] : chunk["at"] + length]
        assert [sum_of(words["checksum"], data[i : i + size]) for i in range(0, length, size)] == chunk["sums"]
        header = json.loads((folder / chunk["file"]).read_bytes()[8 : words["files"][chunk["file"]]["header_bytes"]])
        key = f"{words['aliases'].get(name, name)}[{','.join(map(str, chunk['offset']))}]"
        start, end = header[key]["data_offsets"]
        assert (end - start, header[key]["dtype"]) == (length, entry["dtype"])
        box = tuple(slice(a, a + n) for a, n in zip(chunk["offset"], chunk["shape"], strict=True))
        whole[box] = np.frombuffer(data, whole.dtype).reshape(chunk["shape"])
    return whole


def value_of(folder, words, value):
    if isinstance(value, list):
        return [value_of(folder, words, item) for item in value]
    if not isinstance(value, dict):
        return value
    meanings = {
        "$float": float,
        "$tuple": lambda items: tuple(value_of(folder, words, item) for item in items),
        "$dict": lambda pairs: {value_of(folder, words, k): value_of(folder, words, v) for k, v in pairs},
        "$tensor": lambda name: read_tensor(folder, words, name),
    }
    if len(value) == 1 and next(iter(value)) in meanings:
        return meanings[next(iter(value))](next(iter(value.values())))
    return {key: value_of(folder, words, item) for key, item in value.items()}


# -- what it is held against

EXTRA = {"step": 3, "odd": (1, math.inf, [None, {2: "two", "$x": -0.0}])}


class Mixed(nn.Module):
    """A model with a tie and tensors of all dtypes that a checkpoint can hold."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(6, 7, bias=False)
        self.body = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 6))
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight
        for dtype, code in CODES.items():
            self.register_buffer(f"as_{code}", torch.tensor([[0, 1, 1]]).to(dtype))
        self.register_buffer("none", torch.empty(0, 3))
        self.register_buffer("scalar", torch.tensor(4))

    def forward(self, x):
        return self.head(self.body(x))


def saved(mesh, path):
    """Save after two steps; return all full tensors that `load` reads, as bytes."""
    torch.manual_seed(0)
    model = acc.shard(Mixed(), mesh, units={nn.Linear})
    optimizer = acc.wrap_optimizer(torch.optim.AdamW(model.parameters(), lr=0.1, amsgrad=True))
    for _ in range(2):
        model(torch.ones(2, 6, device=device())).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.manual_seed(mesh.get_rank() + 5)
    save(path, model, optimizer, extra=EXTRA, state={"random": RandomState()})
    torch.manual_seed(1)
    again = acc.shard(Mixed(), mesh, units={nn.Linear})
    other = acc.wrap_optimizer(torch.optim.AdamW(again.parameters()))
    acc.load(path, again, other, state={"random": RandomState()})
    tensors = {f"model/{name}": tensor for name, tensor in again.state_dict().items()}
    for name, param in again.named_parameters():
        tensors |= {f"optimizer/state/{name}/{key}": value for key, value in other.state[param].items()}
    whole = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in tensors.items()}
    draws = torch.get_rng_state()
    return {name: (tuple(t.shape), bytes_of(t)) for name, t in whole.items()}, bytes_of(draws)


def bytes_of(tensor):
    return tensor.detach().contiguous().flatten().view(torch.uint8).cpu().numpy().tobytes()


@pytest.mark.parametrize("ranks", [1, 3])
def test_reader_written_from_the_page_reads_checkpoints(world, tmp_path, ranks):
    of_ranks = world.run(ranks, saved, tmp_path / "c")
    words = read_manifest(tmp_path / "c")
    names = [*words["tensors"], *words["aliases"]]
    assert {name for name in names if not name.startswith("rank/")} == set(of_ranks[0][0])
    for name, (shape, data) in of_ranks[0][0].items():
        tensor = read_tensor(tmp_path / "c", words, name)
        assert (tensor.shape, tensor.tobytes()) == (shape, data), name
    assert value_of(tmp_path / "c", words, words["extra"]) == EXTRA
    (group,) = words["optimizer"]["groups"]
    assert value_of(tmp_path / "c", words, group["options"])["betas"] == (0.9, 0.999)
    for param in group["params"]:
        state = value_of(tmp_path / "c", words, words["optimizer"]["state"][param])
        assert state["exp_avg"].tobytes() == of_ranks[0][0][f"optimizer/state/{param}/exp_avg"][1]
    for rank, (_, draws) in enumerate(of_ranks):
        text = json.loads(read_tensor(tmp_path / "c", words, f"rank/{rank:05d}/state").tobytes())
        assert value_of(tmp_path / "c", words, text)["random"]["torch"].tobytes() == draws


# -- a checkpoint of an earlier version: what `save` wrote before names were locked, each file compressed

EARLIER = {
    "manifest.json": (
        "c-qC3-Hw|u5QXpi7^B{mhJV;_U9}HT^(u;@!5#t%f5K+FX~esCY{-&bZKPIewOn}ypX1NN5f@ORqy`}i9N?8Wsj-0!#2~@|9Ox?&bjZ(|6l9UV"
        "jY2PSK;a`v?m~6}-3_8-MX>S1jrU3PBg@*cISkmISmZm<kSdLSx1Suqx<X~D3m5dH2Q)59Qx93nt*+NqQ~jdBv`<wlSqI<0eSy6L$Dtd0V|0NY"
        "2W-p|eo}QTH6NO@vDsxDy4IWkHM@A5m=U^$T5YaoONmWSZPgyRb{2<&B!Oq!Xo-1-?h&#AYeg)_Ckyr5D7t~r+`Ap?n*FMxpn*@QFt2ZRjf&*F"
        "XPTHyY1Cx67G_>u!4COoEKKX8rdD;lTxa20r8~>q*P3ZsF8{ZFM)Zc8@hhs@ek3rT@v~>1jlzOvFZ*UmMdGIpl!TIoH7Ln*YtB;~`kbD`x2!iF"
        "O(&^#*KtUF?s-D+)uvCCXsVs>1U$XIMnQ&EUB@oU(PoVEV0c+~hn7Q86pHwWo#%M_*UqRHW`?zy3Ug6-7)jVqCbKi;b;NfV{~h7}rK_b2qLoer"
        "zQ{44h3*ei^1jmz9#(!Cdr9nXy*vDGrt-b!9^Rw^1^NjlxNsXs*E+iMjur98!!2Q&{vSr`YbhgdrOdZU5TJ-HC1cLN@(g5@$^>Hx(}&;6qw@y"
    ),
    "rank-00000.safetensors": (
        "c-ozj-%7(U6vpG5jB_2xpLJc`&Ajpryb58QHi;{mbu=lWqu^usI6j(*Ob}az`N6qJLVoAt``)g|r%vEIV;|X*ZSVI{amqDpPGI8m(ZU99ml7z1"
        "J?4`VRB8$aBknrqf{h_va$4z;o-uWcLH&uC0xBwGCUnQx`u4^4EJTd<Y>D~K+d~}ut{$AT{eLV9NhP0Kk?l?wTxMT#DvJ#7@$kTS77K&_8N*%m"
        "9kX7~fQsZ&=y6;mrE0c>yr)^*5c0bHn%TY-EbGQ`EDY#L6ABtBni{3ej~9ikz^r(=64!k0>#yM{zy?K$C4wG50M(DfJ^"
    ),
}


def test_a_checkpoint_of_an_earlier_version_loads(tmp_path):
    for name, text in EARLIER.items():
        (tmp_path / name).write_bytes(zlib.decompress(base64.b85decode(text)))
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.1)
    assert acc.load(tmp_path, model, optimizer) == {"step": 7}
    assert (model.weight.tolist(), model.bias.tolist()) == ([[0.5, 1.5]], [2.5])
    assert optimizer.state[model.weight]["momentum_buffer"].tolist() == [[1.0, 1.0]]
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]) == (0.5, 0.5)
