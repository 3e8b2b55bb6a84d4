"""Pickles of other programs, read so that they can run nothing: what `torch.save` wrote, and the metadata of DCP."""

from __future__ import annotations

import pickle
import re
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

from accordion.checkpoint.format import CODES
from accordion.errors import CheckpointError

CHECKED_BYTES = 2**20  # read at once to check a record
FORBIDDEN = re.compile(r"GLOBAL (\S+) (?:was not|whose module)")  # how torch.load names a class that it refuses
METADATA_MODULES = (
    *(
        "torch",
        "torch.serialization",
        "torch.distributed.checkpoint.metadata",
        "torch.distributed.checkpoint.filesystem",
    ),
    *("collections", "pathlib", "pathlib._local"),
)
PLAIN_KINDS: dict[str, type] = {"Size": tuple, "OrderedDict": dict}


def load_saved(file: BinaryIO, path: Path | None = None) -> Any:
    """Return what `torch.save` wrote to `file`, after checking the checksums of its archive.

    Args:
        path: path of `file`, whose tensors are then mapped instead of read.

    Raises: `CheckpointError` for anything but tensors and plain values.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            for record in archive.infolist():
                if record.compress_type != zipfile.ZIP_STORED:
                    raise CheckpointError(f"its record {record.filename[:100]!r} is compressed.")
                # torch.serialization.set_crc32_options(False) writes 0; reading to the end compares any other.
                with archive.open(record) as stream:
                    while record.CRC and stream.read(CHECKED_BYTES):
                        pass
        file.seek(0)
        return torch.load(path or file, map_location="cpu", weights_only=True, mmap=path is not None)
    except CheckpointError:
        raise
    except pickle.UnpicklingError as error:  # its text advises to load the file unsafely
        name = FORBIDDEN.search(str(error))
        reason = f"names {name[1][:200]}, which is not allowed" if name else "holds more than tensors and plain values"
        raise CheckpointError(f"its pickle {reason}.") from None
    except Exception as error:  # whatever broken bytes make of torch
        text = str(error).partition("\n")[0].partition("  (")[0]  # torch's texts go on with advice and a stack
        raise CheckpointError(f"it is damaged: {type(error).__name__}: {text[:200]}.") from error


def is_plain(value: object) -> bool:
    """Return if `value` is a dense tensor in host memory, of a dtype that a checkpoint can hold, and no subclass."""
    return (
        isinstance(value, Tensor)
        and type(value) in (Tensor, nn.Parameter)
        and (value.layout, value.device.type, value.is_nested) == (torch.strided, "cpu", False)
        and value.dtype in CODES
    )


class Record:
    """Inert stand-in for an object of a class that a pickle names; `state` holds what its attributes would be."""

    state: Any = None

    def __init__(self, *args: object) -> None: ...

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _MetadataUnpickler(pickle.Unpickler):
    """Unpickler that imports and calls nothing that the pickle names: its classes become subclasses of `Record`."""

    def find_class(self, module: str, name: str) -> Any:
        if module not in METADATA_MODULES:
            raise CheckpointError(f"its pickle names {module[:100]}.{name[:100]}, which is not allowed.")
        value = vars(torch).get(name)
        return value if isinstance(value, torch.dtype) else PLAIN_KINDS.get(name) or type(name, (Record,), {})


def read_metadata(file: BinaryIO) -> Any:
    """Return what DCP's `.metadata` holds, each object a `Record`. Raises `CheckpointError`."""
    try:
        return _MetadataUnpickler(file).load()
    except CheckpointError:
        raise
    except Exception as error:  # whatever broken bytes make of pickle
        raise CheckpointError(f"its pickle is damaged: {type(error).__name__}: {str(error)[:200]}.") from error
