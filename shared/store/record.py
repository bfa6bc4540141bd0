"""What stands before a block's bytes wherever they are kept: who it is, how to check it, and whether this was written
to its end.

    0   magic "BATONBLK" · u16 version · u16 flags (1: snapshot) · u16 bytes of namespace · u16 bytes of tenant
    16  u64 num_bytes · u64 tokens · f64 written_s
    40  key, 16 bytes · digest, 16 bytes
    72  namespace, tenant (UTF-8), zeros
    4088  u64 xxh3-64 of all that stands before it

Little-endian. HEADER_BYTES in all, so that the payload begins on a page and a reader knows where before it has read
anything.
"""

import struct

import xxhash

from shared.store.driver import BlockRecord

HEADER_BYTES = 4096
VERSION = 1
_HEAD = struct.Struct("<8sHHHHQQd16s16s")
_CHECKSUM = struct.Struct("<Q")
_MAGIC = b"BATONBLK"
_SNAPSHOT = 1
_CHECKED = HEADER_BYTES - _CHECKSUM.size
MAX_TEXT_BYTES = _CHECKED - _HEAD.size
"""Of namespace and tenant together."""


class Malformed(Exception):
    """These bytes are no header, or not all of one."""


def pack_header(record: BlockRecord) -> bytes:
    """HEADER_BYTES. Raises ValueError for a record that no header can say."""
    namespace, tenant = record.namespace.encode(), record.tenant.encode()
    if len(namespace) + len(tenant) > MAX_TEXT_BYTES:
        raise ValueError(f"namespace and tenant take more than {MAX_TEXT_BYTES} bytes")
    if len(record.key) != 16 or len(record.digest) != 16:
        raise ValueError("keys and digests have 16 bytes")
    if record.num_bytes < 0 or record.tokens < 0:
        raise ValueError("a block of less than nothing")
    head = _HEAD.pack(
        _MAGIC,
        VERSION,
        _SNAPSHOT if record.snapshot else 0,
        len(namespace),
        len(tenant),
        record.num_bytes,
        record.tokens,
        record.written_s,
        record.key,
        record.digest,
    )
    checked = (head + namespace + tenant).ljust(_CHECKED, b"\0")
    return checked + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(checked))


def parse_header(data: bytes | bytearray | memoryview) -> BlockRecord:
    """Raises Malformed for anything but what `pack_header` made."""
    view = memoryview(data)
    if view.nbytes != HEADER_BYTES:
        raise Malformed(f"{view.nbytes} bytes")
    magic, version, flags, namespace_bytes, tenant_bytes, num_bytes, tokens, written_s, key, digest = _HEAD.unpack_from(
        view
    )
    if magic != _MAGIC or version != VERSION or flags & ~_SNAPSHOT:
        raise Malformed("not a block, or one of another version")
    if _CHECKSUM.unpack_from(view, _CHECKED)[0] != xxhash.xxh3_64_intdigest(view[:_CHECKED]):
        raise Malformed("its checksum does not fit")
    after_namespace = _HEAD.size + namespace_bytes
    try:
        namespace = str(view[_HEAD.size : after_namespace], "utf-8")
        tenant = str(view[after_namespace : after_namespace + tenant_bytes], "utf-8")
    except UnicodeDecodeError as error:
        raise Malformed("its text is none") from error
    return BlockRecord(key, num_bytes, digest, namespace, tenant, tokens, bool(flags & _SNAPSHOT), written_s)
