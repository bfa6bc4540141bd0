"""Token ids and units on the wire: int32 in base64, because a list of JSON numbers is three times the size."""

import base64
import binascii
import struct
from array import array
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, PlainSerializer, PlainValidator


def as_json(message: BaseModel) -> bytes:
    """What `model_dump_json` makes, without its detour by str and a dozen options."""
    return message.__pydantic_serializer__.to_json(message)


def pack_ints(values: tuple[int, ...]) -> str:
    return base64.b64encode(struct.pack(f"<{len(values)}i", *values)).decode("ascii")


def unpack_ints(value: Any) -> tuple[int, ...]:
    """Accepts the packed form or any sequence of ints; raises ValueError for anything else."""
    if isinstance(value, str):
        try:
            raw = base64.b64decode(value, validate=True)
        except binascii.Error as error:
            raise ValueError("not base64") from error
        if len(raw) % 4:
            raise ValueError("not a whole number of 32-bit integers")
        return struct.unpack(f"<{len(raw) // 4}i", raw)
    if isinstance(value, list | tuple) and all(type(item) is int for item in value):
        struct.pack(f"<{len(value)}i", *value)
        return tuple(value)
    raise ValueError("expected packed integers")


def pack_units(values: Sequence[int]) -> str:
    """In this machine's byte order: units are named on one host only. OverflowError beyond 32 bits."""
    held = values if isinstance(values, array) else array("i", values)
    return binascii.b2a_base64(held, newline=False).decode("ascii")


def unpack_units(value: Any) -> Sequence[int]:
    """The packed form becomes an array, which numpy takes as it is; a tuple or an array is left alone."""
    if isinstance(value, str):
        held = array("i")
        try:
            held.frombytes(binascii.a2b_base64(value, strict_mode=True))
        except (binascii.Error, UnicodeEncodeError) as error:
            raise ValueError("not base64") from error
        return held
    if isinstance(value, tuple | array):
        return value
    raise ValueError("expected packed units")


def pack_bytes(value: bytes) -> str:
    return base64.b64encode(value).decode("ascii")


def unpack_bytes(value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        try:
            return base64.b64decode(value, validate=True)
        except binascii.Error as error:
            raise ValueError("not base64") from error
    raise ValueError("expected base64")


def _checked_unpack(value: Any) -> tuple[int, ...]:
    try:
        return unpack_ints(value)
    except struct.error as error:
        raise ValueError("not 32-bit integers") from error


PackedInts = Annotated[
    tuple[int, ...], PlainValidator(_checked_unpack), PlainSerializer(pack_ints, return_type=str, when_used="json")
]
PackedBytes = Annotated[
    bytes, PlainValidator(unpack_bytes), PlainSerializer(pack_bytes, return_type=str, when_used="json")
]
PackedUnits = Annotated[
    Sequence[int], PlainValidator(unpack_units), PlainSerializer(pack_units, return_type=str, when_used="json")
]
