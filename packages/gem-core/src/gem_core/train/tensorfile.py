"""Named tensors in one file, in the safetensors layout: an 8-byte little-endian header length, a JSON header, raw little-endian values.

Reading parses JSON and maps bytes; nothing is ever unpickled. Any safetensors reader can open these files.
"""

from __future__ import annotations

import json
import os
import struct
import time
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from gem_core.errors import CheckpointError

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_MAX_HEADER = 100 * 2**20
_CHUNK = 64 * 2**20
_FLUSH_S = 30.0
"""Writing goes to the disk so often, so that the last flush is not the one that takes long."""


class Written(NamedTuple):
    """Size in bytes and CRC-32 of a file as it was meant to be."""

    bytes: int
    crc32: int


class Summed:
    """Writes to a file and knows the `Written` of all that it was given."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.written = file, Written(0, 0)

    def write(self, data: bytes | memoryview) -> None:
        self.file.write(data)
        self.written = Written(self.written.bytes + len(data), zlib.crc32(data, self.written.crc32))

    def flush(self) -> None:
        """To the disk."""
        self.file.flush()
        os.fsync(self.file.fileno())


def nothing() -> None:
    """Tells nobody of progress."""


def crc32_of(path: Path, progress: Callable[[], None] = nothing) -> int:
    """The CRC-32 of a file's bytes as the disk gives them. ``progress`` is called after each 16 MiB or less."""
    found, buffer = 0, memoryview(bytearray(16 * 2**20))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            found = zlib.crc32(buffer[:count], found)
            progress()
    return found


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype in the files."""
    if dtype not in _NAMES:
        raise CheckpointError(f"a tensor of dtype {dtype} cannot be stored", fix=f"store one of {', '.join(_NAMES.values())}")
    return _NAMES[dtype]


def dtype_of(name: str) -> torch.dtype:
    """The reverse of `dtype_name`."""
    if name not in _DTYPES:
        raise CheckpointError(f"the stored dtype {name!r} is not known", fix="use the version of gem-core that wrote it")
    return _DTYPES[name]


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None, progress: Callable[[], None] = nothing
) -> Written:
    """Write and fsync. Device tensors are copied to the host one at a time. ``progress`` is called after each 64 MiB or less."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name, tensor in tensors.items():
        kind = dtype_name(tensor.dtype)
        size = tensor.numel() * tensor.element_size()
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as opened:
        file = Summed(opened)
        file.write(struct.pack("<Q", len(text)) + text)
        flushed = time.monotonic()
        for tensor in tensors.values():
            raw = tensor.detach().reshape(-1).cpu().contiguous().view(torch.uint8).numpy()
            for start in range(0, raw.size, _CHUNK):
                file.write(raw[start : start + _CHUNK].data)
                if time.monotonic() - flushed > _FLUSH_S:
                    file.flush()
                    flushed = time.monotonic()
                progress()
        file.flush()
    return file.written


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Every tensor of the file, as views of a private memory map: pages are read when used, and the file is never changed.

    :raises CheckpointError: the file is missing, cut short, or not in this layout.
    """

    def broken(what: str) -> CheckpointError:
        return CheckpointError(f"the tensor file {what}", where=str(path), fix="use another checkpoint; this one is damaged")

    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            length = struct.unpack("<Q", file.read(8))[0] if size >= 8 else _MAX_HEADER + 1
            if length > min(_MAX_HEADER, size - 8):
                raise broken("has no valid header")
            header = json.loads(file.read(length))
    except OSError as error:
        raise CheckpointError(
            f"the tensor file cannot be read: {error.strerror}", where=str(path), fix="put it back from a copy"
        ) from error
    except ValueError as error:
        raise broken("has no valid header") from error
    header.pop("__metadata__", None)
    storage = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)[8 + length :]
    tensors = {}
    try:
        for name, entry in header.items():
            dtype, shape, (start, end) = _DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
            count = 1
            for n in shape:
                count *= n
            if not 0 <= start <= end <= storage.numel() or end - start != count * dtype.itemsize:
                raise broken(f"is cut short or inconsistent at {name!r}")
            raw = storage[start:end]
            if start % dtype.itemsize or raw.data_ptr() % dtype.itemsize:
                raw = raw.clone()
            tensors[name] = raw.view(dtype).reshape(shape)
    except (KeyError, TypeError, ValueError) as error:
        raise broken("has a header that does not describe tensors") from error
    return tensors
