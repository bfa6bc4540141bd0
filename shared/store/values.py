"""A block as one value of a server: under its key in hex its header, and its bytes behind that."""

from shared.store.driver import BlockRecord
from shared.store.record import HEADER_BYTES, Malformed, parse_header

_KEY_BYTES = 16


class Damaged(Exception):
    """What lies under a block's name is not what was put there."""


def record_of(key: bytes, header: bytes | memoryview, size: int) -> BlockRecord:
    """Of a value of so many bytes that begins with `header`. Raises Damaged."""
    try:
        record = parse_header(header)
    except Malformed as error:
        raise Damaged(f"{key.hex()}: {error}") from error
    if record.key != key or record.num_bytes != size - HEADER_BYTES:
        raise Damaged(f"{key.hex()}: the header of another one, or of another size")
    return record


def key_of(name: str) -> bytes | None:
    """Whose name this is; None for names that are not ours."""
    try:
        key = bytes.fromhex(name)
    except ValueError:
        return None
    return key if len(key) == _KEY_BYTES and key.hex() == name else None
