"""What `torch.save` wrote, read without torch's own unpickler: an archive of plain records, and the tensors that lie in them."""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from accordion._torch import SUBCLASS_MAKERS, TENSOR_MAKERS
from accordion.checkpoint.format import DTYPES, MOST_DIMS
from accordion.checkpoint.pickles import Meaning, Name, Record, is_bounded, most_pickle, read_pickle
from accordion.errors import CheckpointError

LARGEST_EXPANDED = 2**26  # bytes of a tensor that is larger than the memory it is made of
DTYPE_NAMES = {Name("torch", str(dtype).removeprefix("torch.")): dtype for dtype in DTYPES.values()}
STORAGES = {
    Name("torch", name + "Storage"): dtype
    for name, dtype in {
        "Double": torch.float64,
        "Float": torch.float32,
        "Half": torch.float16,
        "BFloat16": torch.bfloat16,
        "ComplexFloat": torch.complex64,
        "ComplexDouble": torch.complex128,
        "Long": torch.int64,
        "Int": torch.int32,
        "Short": torch.int16,
        "Char": torch.int8,
        "Byte": torch.uint8,
        "Bool": torch.bool,
    }.items()
} | {Name("torch.storage", "UntypedStorage"): torch.uint8}
REBUILD, REBUILD_WITH_DTYPE = (Name(TENSOR_MAKERS, f"_rebuild_tensor_v{version}") for version in (2, 3))
PARAMETERS = tuple(Name(TENSOR_MAKERS, name) for name in ("_rebuild_parameter", "_rebuild_parameter_with_state"))
MAKERS = (REBUILD, REBUILD_WITH_DTYPE, *PARAMETERS)
SUBCLASS = Name(SUBCLASS_MAKERS, "_rebuild_from_type_v2")
PLAIN_TYPES = tuple(
    Name(module, name)
    for module, name in (("torch", "Tensor"), ("torch.nn.parameter", "Parameter"), ("torch.nn.parameter", "Buffer"))
)
OTHERS = {  # they become records; whoever reads leaves them out
    *((kind, name) for kind in ("builtins", "__builtin__") for name in ("set", "frozenset", "complex", "bytearray")),
    ("_codecs", "encode"),
    ("collections", "Counter"),
    ("torch", "device"),
    ("torch.serialization", "_get_layout"),
    (TENSOR_MAKERS, "_rebuild_sparse_tensor"),
    (TENSOR_MAKERS, "_rebuild_meta_tensor_no_storage"),
}
LISTS = {("collections", "OrderedDict"), ("torch", "Size")}


@dataclass(frozen=True, slots=True)
class Bytes:
    """A record of an archive: bytes [at, end) of what holds it, and the checksum that it came with, 0 if none."""

    at: int
    end: int
    crc: int


@dataclass(frozen=True, slots=True, eq=False)
class SharedMemory:
    """The storage that tensors share: bytes [at, end), elements of `dtype`; whoever reads it first checks it."""

    at: int
    end: int
    dtype: torch.dtype
    crc: int


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """A tensor that is not made yet. `shape`, `strides`, `offset`: in elements of `memory`, within it."""

    memory: SharedMemory
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    turned: str = ""  # "conj" or "neg": every element is to be turned so

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Saved:
    """A file of `torch.save`, or a part of one. Owns nothing: `data`, its bytes, uint8, are mapped.

    `value`: what was saved, each tensor a `Held`, each object a `Record`.
    """

    def __init__(self, data: Tensor) -> None:
        self.data = data
        self._sound: set[int] = set()
        self._records = dict(_records(data))
        heads = [name for name in self._records if name.count("/") == 1 and name.endswith("/data.pkl")]
        if len(heads) != 1:
            raise CheckpointError("it is no archive of torch.save: it has no data.pkl.")
        self._folder = heads[0].removesuffix("data.pkl")
        order = self._records.get(self._folder + "byteorder")
        if order is not None and self._read(order) != b"little":
            raise CheckpointError("its numbers are not little-endian, which is not read.")
        head = self._records[heads[0]]
        if head.end - head.at > most_pickle(data.numel() - (head.end - head.at)):
            raise CheckpointError(f"its pickle of {head.end - head.at} bytes is absurd beside its tensors.")
        pickled = self._read(head)
        self.value: Any = read_pickle(pickled, Meaning(allowed=_is_allowed, called=_called, stored=self._stored))
        if not is_bounded(self.value, 4 * len(pickled) + 1024):
            raise CheckpointError("its values hold themselves or each other without end.")

    def _read(self, record: Bytes) -> bytes:
        found = self.data[record.at : record.end].numpy().tobytes()
        if record.crc and zlib.crc32(found) != record.crc:
            raise CheckpointError(f"bytes {record.at} to {record.end} are damaged: their checksum does not fit.")
        return found

    def _stored(self, key: Any) -> SharedMemory:
        word, kind, name, _, count = key
        if word != "storage" or kind not in STORAGES or type(count) is not int or not isinstance(name, str):
            raise CheckpointError("its pickle refers to something that is no storage.")
        record = self._records.get(f"{self._folder}data/{name}")
        dtype = STORAGES[kind]
        if record is None or record.end - record.at != count * dtype.itemsize:
            raise CheckpointError(f"its storage {name[:50]!r} of {count} elements is not there, or of another size.")
        return SharedMemory(record.at, record.end, dtype, record.crc)

    def tensor(self, held: Held) -> Tensor:
        """The tensor itself; its memory is the file's. Raises `CheckpointError` where its bytes are damaged."""
        memory = held.memory
        part = self.data[memory.at : memory.end]
        if memory.crc and memory.at not in self._sound:
            if zlib.crc32(part.numpy().data) != memory.crc:
                raise CheckpointError(f"bytes {memory.at} to {memory.end} are damaged: their checksum does not fit.")
            self._sound.add(memory.at)
        if not math.prod(held.shape):
            return torch.empty(held.shape, dtype=held.dtype, device="cpu")
        part = part[: len(part) // held.dtype.itemsize * held.dtype.itemsize]
        part = part if part.data_ptr() % held.dtype.itemsize == 0 else part.clone()
        part = part.view(held.dtype)
        made = part.as_strided(held.shape, held.strides, part.storage_offset() + held.offset)
        return _turned(made, held.turned) if held.turned else made


def _turned(tensor: Tensor, how: str) -> Tensor:
    return torch.conj_physical(tensor) if how == "conj" else -tensor


def _is_allowed(name: Name) -> bool:
    known = name in DTYPE_NAMES or name in STORAGES or name in PLAIN_TYPES or name in MAKERS
    known = (
        known or name == SUBCLASS or (name.module == "torch" and isinstance(vars(torch).get(name.name), torch.dtype))
    )
    return known or (name.module, name.name) in OTHERS or (name.module, name.name) in LISTS


def _called(what: Name, args: tuple[Any, ...]) -> Any:
    """What a call makes: tensors, shapes and dicts; of all else a record."""
    if what in (REBUILD, REBUILD_WITH_DTYPE):
        return _held(what, args)
    if what in PARAMETERS:
        return args[0]
    if what == SUBCLASS:
        make, kind, inner, _ = args
        return _called(make, inner) if kind in PLAIN_TYPES and make in MAKERS else Record(what, args)
    return called_list(what, args)


def called_list(what: Name, args: tuple[Any, ...]) -> Any:
    """An OrderedDict that is still to be filled, or a shape; a record for any other call."""
    if (what.module, what.name) == ("collections", "OrderedDict") and not args:
        return {}
    if (what.module, what.name) == ("torch", "Size") and len(args) == 1 and isinstance(args[0], tuple):
        return args[0]
    return Record(what, args)


def _held(what: Name, args: tuple[Any, ...]) -> Held | Record:
    memory, offset, shape, strides = args[:4]
    if not isinstance(memory, SharedMemory):
        raise CheckpointError("its pickle makes a tensor of something that is no storage.")
    dtype = memory.dtype
    if what == REBUILD_WITH_DTYPE:
        if args[6] not in DTYPE_NAMES:
            return Record(what, args)
        dtype = DTYPE_NAMES[args[6]]
    about = args[7 if what == REBUILD_WITH_DTYPE else 6 :]
    turned = [key for key, value in (about[0] if about and about[0] else {}).items() if value]
    if len(turned) > 1 or not set(turned) <= {"conj", "neg"} or len(shape) > MOST_DIMS or len(shape) != len(strides):
        return Record(what, args)
    if not all(type(number) is int and number >= 0 for number in (offset, *shape, *strides)):
        raise CheckpointError("its pickle has a tensor whose shape is none.")
    count, room = math.prod(shape), (memory.end - memory.at) // dtype.itemsize
    last = offset + sum((rows - 1) * step for rows, step in zip(shape, strides, strict=True)) if count else 0
    if (count and last >= room) or math.prod(max(1, rows) for rows in shape) >= 2**59:
        raise CheckpointError(f"a tensor of shape {str(shape)[:100]} leaves its storage of {room} elements.")
    if count * dtype.itemsize > max(memory.end - memory.at, LARGEST_EXPANDED):
        raise CheckpointError(f"a tensor of shape {str(shape)[:100]} made of {room} elements is absurd.")
    return Held(memory, dtype, offset, shape, strides, *turned)


# -- the archive, a zip that packs nothing


END, END_64, WHERE_64, ENTRY, LOCAL = b"PK\5\6", b"PK\6\6", b"PK\6\7", b"PK\1\2", b"PK\3\4"
END_BYTES, WHERE_64_BYTES, END_64_BYTES, ENTRY_BYTES, LOCAL_BYTES = 22, 20, 56, 46, 30
FREE_DIRECTORY = 2**22  # bytes of the list of records that any archive may have
DATA_PER_DIRECTORY = 2  # beyond it: other bytes for each byte of the list; torch writes twice as many and more


def is_archive(data: Tensor) -> bool:
    """Whether these bytes begin as an archive; what torch wrote before 1.6 does not."""
    return data[:4].numpy().tobytes() == LOCAL


def _records(data: Tensor) -> Iterator[tuple[str, Bytes]]:
    """The records of an archive, each once and apart from the others. Raises `CheckpointError` for any other file."""
    try:
        found = list(_entries(data))
    except (struct.error, UnicodeDecodeError, ValueError, IndexError) as error:
        raise CheckpointError(f"it is no archive of torch.save: {type(error).__name__}: {error}.") from error
    spans = sorted((record.at, record.end) for _, record in found)
    apart = all(one[1] <= other[0] for one, other in pairwise(spans))
    if not apart or len({name for name, _ in found}) != len(found):
        raise CheckpointError("it is no archive of torch.save: records overlap, or have one name.")
    yield from found


def _bytes(data: Tensor, at: int, count: int) -> bytes:
    if not 0 <= at <= at + count <= data.numel():
        raise ValueError(f"{count} bytes from byte {at} on are not there")
    return data[at : at + count].numpy().tobytes()


def _entries(data: Tensor) -> Iterator[tuple[str, Bytes]]:
    at, count, length = _directory(data)
    if length > FREE_DIRECTORY + (data.numel() - length) // DATA_PER_DIRECTORY:
        raise ValueError(f"a list of records of {length} bytes is absurd in {data.numel()}")
    end = at + length
    for _ in range(count):
        fixed = _bytes(data, at, ENTRY_BYTES)
        method, crc, packed, size, name_bytes, extra_bytes, about_bytes, start = struct.unpack(
            "<10xH4xIIIHHH8xI", fixed
        )
        if fixed[:4] != ENTRY or method != 0:
            raise ValueError("a record is packed, or described by nothing")
        name = _bytes(data, at + ENTRY_BYTES, name_bytes).decode()
        extra = _bytes(data, at + ENTRY_BYTES + name_bytes, extra_bytes)
        size, packed, start = _widened(extra, [size, packed, start])
        if size != packed or min(size, start) < 0:
            raise ValueError("a record is packed, or has no size")
        local = _bytes(data, start, LOCAL_BYTES)
        if local[:4] != LOCAL:
            raise ValueError("a record is not where it should be")
        start += LOCAL_BYTES + sum(struct.unpack("<26xHH", local))
        if start + size > data.numel():
            raise ValueError("a record leaves the file")
        yield name, Bytes(start, start + size, crc)
        at += ENTRY_BYTES + name_bytes + extra_bytes + about_bytes
    if at != end:
        raise ValueError("its list of records does not end where it should")


def _directory(data: Tensor) -> tuple[int, int, int]:
    """Where the list of records begins, how many there are, and its bytes."""
    last = data.numel() - END_BYTES
    fixed = _bytes(data, last, END_BYTES)
    if fixed[:4] != END or fixed[-2:] != b"\0\0":
        raise ValueError("its end is not there")
    count, length, at = struct.unpack("<10xHII2x", fixed)
    if count == 0xFFFF or 0xFFFFFFFF in (length, at):
        where = _bytes(data, last - WHERE_64_BYTES, WHERE_64_BYTES)
        if where[:4] != WHERE_64:
            raise ValueError("its end is not there")
        (at,) = struct.unpack("<8xQ4x", where)
        wide = _bytes(data, at, END_64_BYTES)
        if wide[:4] != END_64:
            raise ValueError("its end is not there")
        count, length, at = struct.unpack("<32xQQQ", wide)
    return at, count, length


def _widened(extra: bytes, sizes: list[int]) -> list[int]:
    """Sizes of a record: those that 32 bits cannot hold stand in its extra field."""
    at, wide = 0, b""
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            wide = extra[at + 4 : at + 4 + length]
        at += 4 + length
    taken = iter(struct.unpack(f"<{len(wide) // 8}Q", wide[: len(wide) // 8 * 8]))
    return [next(taken, -1) if size == 0xFFFFFFFF else size for size in sizes]
