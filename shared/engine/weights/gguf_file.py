"""Reads a GGUF file: its metadata and its tensors, every length checked against the file before it is believed.

The `gguf` package dequantizes; its own reader is not used because it needs seconds for a vocabulary and follows the
lengths of a damaged file wherever they lead.
"""

import math
import mmap
import struct
from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from shared.engine.weights.errors import InvalidModel

_MAGIC = b"GGUF"
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_MIN_ITEM_BYTES = {_STRING: 8, _ARRAY: 12}
_DEFAULT_ALIGNMENT = 32
_MAX_DIMENSIONS = 4


@dataclass(frozen=True, slots=True)
class _Tensor:
    """shape in numpy order (slowest axis first); start, end: bytes in the file."""

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    start: int
    end: int


class _Cursor:
    """Walks the header; `limit` is the size of the file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data, self.offset, self._limit = path, data, 0, len(data)

    def take(self, num_bytes: int) -> bytes:
        end = self.offset + num_bytes
        if end > self._limit:
            raise InvalidModel(f"{self._path}: truncated: its header goes on beyond the {self._limit} bytes there are")
        piece = self._data[self.offset : end]
        self.offset = end
        return piece

    def scalar(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def string(self) -> str:
        return self.take(self.scalar("<Q")).decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array()
        if kind not in _SCALARS:
            raise InvalidModel(f"{self._path}: corrupt: its header has a value of unknown type {kind}")
        return self.scalar(_SCALARS[kind])

    def _array(self) -> list[Any]:
        kind, count = self.scalar("<I"), self.scalar("<Q")
        if kind in _SCALARS:
            form = _SCALARS[kind]
            if count * struct.calcsize(form) <= self._limit - self.offset:
                return list(np.frombuffer(self.take(count * struct.calcsize(form)), dtype=form).tolist())
        elif count * _MIN_ITEM_BYTES.get(kind, 1) <= self._limit - self.offset:
            return [self.value(kind) for _ in range(count)]
        raise InvalidModel(f"{self._path}: truncated: its header announces an array of {count} items")


class GgufFile:
    """A mapped GGUF file (a TensorSource). fields: metadata by key, arrays as lists."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            if file.read(4) != _MAGIC:
                raise InvalidModel(f"{path} is not a GGUF file")
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        cursor = _Cursor(path, self._data)
        cursor.take(len(_MAGIC))
        version = cursor.scalar("<I")
        if version not in (2, 3):
            raise InvalidModel(f"{path} has GGUF version {version}; 2 and 3, in little-endian order, can be read")
        num_tensors, num_fields = cursor.scalar("<Q"), cursor.scalar("<Q")
        self.fields: Mapping[str, Any] = _read_fields(cursor, num_fields)
        self._tensors = self._read_tensors(cursor, num_tensors)

    def __str__(self) -> str:
        return str(self.path)

    @property
    def names(self) -> Set[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensor(name).shape

    def read(self, name: str) -> np.ndarray:
        tensor = self._tensor(name)
        raw = np.frombuffer(self._data, dtype=np.uint8, count=tensor.end - tensor.start, offset=tensor.start)
        if tensor.kind in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):
            plain = raw.view("<f4" if tensor.kind is GGMLQuantizationType.F32 else "<f2")
            return plain.astype(np.float32, copy=False).reshape(tensor.shape)
        try:
            values = dequantize(raw.reshape(math.prod(tensor.shape[:-1]), -1), tensor.kind)
        except NotImplementedError as error:
            raise InvalidModel(f"{self.path}: tensor {name} has the format {tensor.kind.name}, "
                               "which cannot be read") from error  # fmt: skip
        return np.asarray(values, dtype=np.float32).reshape(tensor.shape)

    def _tensor(self, name: str) -> _Tensor:
        try:
            return self._tensors[name]
        except KeyError:
            raise InvalidModel(f"{self.path} has no tensor {name}") from None

    def _read_tensors(self, cursor: _Cursor, num_tensors: int) -> dict[str, _Tensor]:
        infos = [_read_info(self.path, cursor) for _ in range(num_tensors)]
        alignment = self.fields.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise InvalidModel(f"{self.path}: corrupt: its alignment is {alignment}")
        data_start = -(-cursor.offset // alignment) * alignment
        tensors = {}
        for name, shape, kind, offset in infos:
            block, block_bytes = GGML_QUANT_SIZES[kind]
            if shape[-1] % block:
                raise InvalidModel(f"{self.path}: corrupt: tensor {name} has rows of {shape[-1]}, not in {block}s")
            start = data_start + offset
            end = start + math.prod(shape) // block * block_bytes
            if end > len(self._data):
                raise InvalidModel(f"{self.path}: truncated: tensor {name} ends at byte {end}, "
                                   f"the file has {len(self._data)}")  # fmt: skip
            tensors[name] = _Tensor(shape, kind, start, end)
        return tensors


def _read_fields(cursor: _Cursor, num_fields: int) -> dict[str, Any]:
    fields = {}
    for _ in range(num_fields):
        key = cursor.string()
        fields[key] = cursor.value(cursor.scalar("<I"))
    return fields


def _read_info(path: Path, cursor: _Cursor) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
    name = cursor.string()
    num_dimensions = cursor.scalar("<I")
    if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
        raise InvalidModel(f"{path}: corrupt: tensor {name} has {num_dimensions} dimensions")
    shape = tuple(reversed([cursor.scalar("<Q") for _ in range(num_dimensions)]))
    kind = cursor.scalar("<I")
    try:
        return name, shape, GGMLQuantizationType(kind), cursor.scalar("<Q")
    except ValueError:
        raise InvalidModel(f"{path}: tensor {name} has the unknown format {kind}") from None
