"""A block: rows of one component as they travel, behind a header that says what they are.

    magic  format  version  dtype  layers units segments rows width  payload length  digest  payload

Values are always [layers, units, segments, rows, width]: `segments` is a component's `outer` and `width` its `inner`,
each as one dimension, so that one index names a row of one token and head. The digest, xxh3-64 over the header and the
payload, finds damage; whoever damages a block on purpose can seal it anew, so that no format trusts its payload.
"""

import math
import struct

import numpy as np
import xxhash

from shared.runtime.errors import Corrupt
from shared.state.components import IndexKind, StateComponent

Buffer = bytes | bytearray | memoryview
Shape = tuple[int, int, int, int, int]

_HEAD = struct.Struct("<2sBB4s5IQ")
_DIGEST = struct.Struct("<Q")
_MAGIC = b"BW"
HEADER_BYTES = _HEAD.size + _DIGEST.size


class Damaged(Corrupt):
    """What arrived is not a block, or not the one that was to come."""


def block_shape(component: StateComponent, num_layers: int, num_units: int, num_rows: int) -> Shape:
    return num_layers, num_units, math.prod(component.outer), num_rows, math.prod(component.inner)


def is_lossy_input(component: StateComponent) -> bool:
    """Whether formats that lose something take it: pages of floats. Other state is small and a model may lean on
    every bit of it; what is in fp8 already gains nothing."""
    return component.index is IndexKind.PAGE and component.dtype in ("float32", "float16")


def check_values(values: np.ndarray, component: StateComponent) -> None:
    """Raises ValueError if these are no rows of that component."""
    expected = block_shape(component, *(values.shape[axis] for axis in (0, 1, 3))) if values.ndim == 5 else None
    if values.shape != expected or values.dtype != np.dtype(component.dtype):
        raise ValueError(f"{values.shape} of {values.dtype} are no rows of component {component.name}")
    if values.shape[3] > component.unit_tokens or values.shape[0] > component.num_layers or not values.size:
        raise ValueError(f"{values.shape} are not rows that component {component.name} can have")


def seal(number: int, version: int, values: np.ndarray, payload: bytes) -> bytes:
    """payload as a block of format `number`, with a header for `values`."""
    name = values.dtype.str.encode().ljust(4)
    head = _HEAD.pack(_MAGIC, number, version, name, *values.shape, len(payload))
    return b"".join((head, _DIGEST.pack(_digest(head, payload)), payload))


def unseal(number: int, version: int, data: Buffer, component: StateComponent, out: np.ndarray) -> memoryview:
    """The payload of a block of that format whose rows fit exactly into `out`. Raises Damaged for anything else."""
    check_values(out, component)
    view = memoryview(data).cast("B")
    if len(view) < HEADER_BYTES:
        raise Damaged(f"a block of {len(view)} bytes has no header")
    head, payload = view[: _HEAD.size], view[HEADER_BYTES:]
    magic, its_number, its_version, name, *shape, length = _HEAD.unpack(head)
    if magic != _MAGIC:
        raise Damaged("this is no block")
    if length != len(payload):
        raise Damaged(f"a block of {length} bytes came as {len(payload)}")
    if _DIGEST.unpack(view[_HEAD.size : HEADER_BYTES])[0] != _digest(head, payload):
        raise Damaged("the block's digest disagrees")
    if (its_number, its_version) != (number, version):
        raise Damaged(f"format {its_number} version {its_version} came where {number} version {version} was agreed")
    if tuple(shape) != out.shape or name.rstrip() != out.dtype.str.encode():
        raise Damaged(f"rows {shape} of {name!r} came where {list(out.shape)} of {out.dtype.str} were to come")
    return payload


class Reader:
    """Takes a payload apart from its start on; what is not there raises Damaged."""

    def __init__(self, payload: memoryview) -> None:
        self._rest = payload

    def take(self, num_bytes: int) -> memoryview:
        if num_bytes > len(self._rest):
            raise Damaged(f"the payload ends {num_bytes - len(self._rest)} bytes early")
        taken, self._rest = self._rest[:num_bytes], self._rest[num_bytes:]
        return taken

    def array(self, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
        """Shares memory with the payload."""
        num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
        return np.frombuffer(self.take(num_bytes), dtype=dtype).reshape(shape)

    def fields(self, layout: struct.Struct) -> tuple[int, ...]:
        return layout.unpack(self.take(layout.size))

    def end(self) -> None:
        if len(self._rest):
            raise Damaged(f"{len(self._rest)} bytes of the payload are too many")


def _digest(head: Buffer, payload: Buffer) -> int:
    hasher = xxhash.xxh3_64(head)
    hasher.update(payload)
    return int(hasher.intdigest())
