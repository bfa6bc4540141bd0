"""Reads and writes the safetensors format: an 8-byte length, a JSON header, then the tensors without gaps.

Own code for three reasons: numpy has no bfloat16, weights of many gigabytes are written tensor by tensor and digested
on the way, and a reader maps them copy-on-write, so that any number of workers share one copy in the page cache.
"""

import json
import math
import os
import struct
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from shared.engine.weights.errors import InvalidModel
from shared.engine.weights.plan import whole_number

_DTYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "F64": "<f8"}
_RAW = {"F32": "<f4", "F16": "<f2", "I8": "|i1", "U8": "|u1"}
_DATA_ALIGN = 4096
_MAX_HEADER_BYTES = 100 << 20


@dataclass(frozen=True, slots=True)
class _Entry:
    """start, end: bytes in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class SafetensorsFile:
    """A mapped safetensors file (a TensorSource)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._entries = _read_header(path)
        # Mode 'c' is private copy-on-write: torch wants writable memory, and nothing ever writes it.
        self._data = np.memmap(path, dtype=np.uint8, mode="c")

    def __str__(self) -> str:
        return str(self.path)

    @property
    def names(self) -> Set[str]:
        return self._entries.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).shape

    def read(self, name: str) -> np.ndarray:
        entry = self._entry(name)
        if entry.dtype not in _DTYPES:
            raise InvalidModel(f"{self.path}: tensor {name} has the format {entry.dtype}, which cannot be read")
        raw = np.asarray(self._data[entry.start : entry.end]).view(_DTYPES[entry.dtype])
        if entry.dtype == "BF16":
            raw = (raw.astype(np.uint32) << 16).view(np.float32)
        return raw.astype(np.float32, copy=False).reshape(entry.shape)

    def raw(self, name: str) -> np.ndarray:
        """The tensor as it lies in the file, never to be written. Raises InvalidModel where it is missing or of a
        format that `write_tensors` does not write."""
        entry = self._entry(name)
        if entry.dtype not in _RAW:
            raise InvalidModel(f"{self.path}: tensor {name} has the format {entry.dtype}, which cannot be mapped")
        return np.asarray(self._data[entry.start : entry.end]).view(_RAW[entry.dtype]).reshape(entry.shape)

    def digest(self) -> str:
        """xxh3-128 over the whole file; as good as reading it once, so it also warms the page cache."""
        return xxhash.xxh3_128_hexdigest(self._data.data)

    def _entry(self, name: str) -> _Entry:
        try:
            return self._entries[name]
        except KeyError:
            raise InvalidModel(f"{self.path} has no tensor {name}") from None


def write_tensors(
    path: Path,
    kinds: Mapping[str, tuple[str, tuple[int, ...]]],
    arrays: Iterable[tuple[str, np.ndarray]],
    on_written: Callable[[str], None],
) -> str:
    """Writes `arrays`, in the order of `kinds` (the format's name of a type, and a shape), and returns the xxh3-128 of
    the file, which is on disk then."""
    header, offset = {}, 0
    for name, (dtype, shape) in kinds.items():
        end = offset + math.prod(shape) * np.dtype(_RAW[dtype]).itemsize
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    # Page-aligned data: every tensor whose size allows it starts at a cache line.
    text += b" " * (-(8 + len(text)) % _DATA_ALIGN)
    digest = xxhash.xxh3_128()
    with path.open("wb") as file:
        for piece in (struct.pack("<Q", len(text)), text):
            file.write(piece)
            digest.update(piece)
        for name, array in arrays:
            dtype, shape = kinds[name]
            if array.shape != shape:
                raise InvalidModel(f"{path}: tensor {name} came as {array.shape} instead of {shape}")
            flat = np.ascontiguousarray(array, dtype=_RAW[dtype]).reshape(-1).view(np.uint8).data
            file.write(flat)
            digest.update(flat)
            on_written(name)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def type_name(kind: np.dtype[Any]) -> str:
    """The format's name of a type, one that `write_tensors` writes."""
    return next(name for name, dtype in _RAW.items() if np.dtype(dtype) == kind)


def _read_header(path: Path) -> dict[str, _Entry]:
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= min(_MAX_HEADER_BYTES, size - 8):
            raise InvalidModel(f"{path} is not a safetensors file, or is truncated")
        text = file.read(length)
    try:
        raw = json.loads(text)
        raw.pop("__metadata__", None)
        entries = {name: _entry(item, 8 + length) for name, item in raw.items()}
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise InvalidModel(f"{path}: corrupt: its header cannot be read ({error})") from error
    for name, entry in entries.items():
        _check_entry(path, name, entry, size)
    return entries


def _entry(item: dict[str, Any], data_start: int) -> _Entry:
    begin, end = (whole_number("data_offsets", "offset", offset) for offset in item["data_offsets"])
    shape = tuple(whole_number("shape", "dimension", size) for size in item["shape"])
    return _Entry(str(item["dtype"]), shape, data_start + begin, data_start + end)


def _check_entry(path: Path, name: str, entry: _Entry, size: int) -> None:
    if entry.end > size:
        raise InvalidModel(f"{path}: truncated: tensor {name} ends at byte {entry.end}, the file has {size}")
    item = np.dtype(_DTYPES[entry.dtype]).itemsize if entry.dtype in _DTYPES else 0
    if item and entry.end - entry.start != math.prod(entry.shape) * item:
        num_bytes = entry.end - entry.start
        raise InvalidModel(f"{path}: corrupt: tensor {name} has {num_bytes} bytes for {list(entry.shape)}")
