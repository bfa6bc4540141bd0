"""Identifiers. All of them are made by Baton itself; nothing a client sends is ever used as a key."""

import re
import secrets

ROOM_BITS = 63
_TOKEN = re.compile(r"[a-z0-9_-]{1,64}")


def new_room() -> int:
    """The wire name of a ticket: 63 random bits, never 0 and never reused."""
    return secrets.randbelow((1 << ROOM_BITS) - 1) + 1


def new_boot_id() -> str:
    """The incarnation of a process: new at each start, so that a restart is a new peer."""
    return secrets.token_hex(4)


def new_request_id() -> str:
    """128 random bits, as shown to clients in `x-baton-request-id`."""
    return f"req-{secrets.token_hex(16)}"


def new_stream_id() -> str:
    """128 random bits, as shown to clients in `x-baton-stream-id`: who knows them, and has the key, may read it."""
    return secrets.token_hex(16)


def new_seed() -> int:
    """A sampling seed for requests that bring none."""
    return secrets.randbits(ROOM_BITS)


def peer_name(worker: str, boot_id: str) -> str:
    """How a process is addressed: its name and its boot id, so that no message for an earlier
    incarnation can ever reach a later one."""
    peer = f"{worker}-{boot_id}"
    if not _TOKEN.fullmatch(peer):
        raise ValueError(f"{peer!r} may hold only a-z, 0-9, '_' and '-' (64 characters at most)")
    return peer
