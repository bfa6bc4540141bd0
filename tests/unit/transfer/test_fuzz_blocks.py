"""A peer that has the secret and sends blocks as it likes: its transfer fails, nothing outside its grant is written,
and the next one is served."""

import json
import os
import random
import struct
import threading
from pathlib import Path

import numpy as np
import pytest

from shared.transfer.coded_rows import CodedRows
from shared.transfer.formats.catalog import LOSSINESS
from shared.transfer.link import TicketKey
from shared.transfer.pool import Pool, Run
from shared.transfer.wire import Header, sign
from tests.contract.transfer_links import LAYOUT, POISON, new_ticket
from tests.unit.transfer.test_fuzz_frames import (
    PIECE,
    ROUNDS,
    TABLE,
    Receiver,
    Stranger,
    framed,
    new_receiver,
    served,
    spoil,
)

CODED = tuple(name for name in LOSSINESS if name != "raw")
_LENGTH = struct.Struct("!I")


class Recorder:
    """Takes a connection's place and keeps what would be sent."""

    def __init__(self) -> None:
        self.sent = b""

    def send_all(self, views: list[memoryview]) -> None:
        self.sent += b"".join(views)


def blocks_of(name: str) -> bytes:
    """What an honest sender of `PIECE` would send."""
    pool = Pool(LAYOUT, memoryview(bytearray(LAYOUT.total_bytes)))
    values = LAYOUT.view(pool.bytes, 0)
    values[...] = np.random.default_rng(5).normal(size=values.shape)
    recorder = Recorder()
    rows = CodedRows(recorder, pool, name)  # type: ignore[arg-type]
    rows.send(Run(0, (7, 8), PIECE.rows_in_last), range(PIECE.num_layers), lambda num_bytes: None)
    return recorder.sent


def say(receiver: Receiver, key: TicketKey, secret: bytes, name: str, data: bytes) -> None:
    stranger = Stranger(receiver)
    stranger.greet()
    header = Header(room=key.room, generation=1, sequence=0, pieces=(PIECE,), wire_format=name)
    raw = header.model_dump_json().encode()
    stranger.sock.sendall(framed(sign(secret, stranger.nonce, 0, raw) + raw))
    assert json.loads(stranger.read_frame())["ok"]
    stranger.say(data)


@pytest.mark.parametrize("name", CODED)
def test_spoiled_blocks_end_and_write_nothing_outside_the_grant(name: str, tmp_path: Path) -> None:
    rng, honest = random.Random(1), blocks_of(name)
    receiver = new_receiver(stall_s=0.15)
    try:
        key, secret = new_ticket()
        receiver.door.open(key, secret, TABLE, formats=(name,))
        say(receiver, key, secret, name, honest)
        assert receiver.door.received(key)[0].num_bytes > 0, "what the others spoil would land"
        for _ in range(ROUNDS // 10):
            say(receiver, key, secret, name, spoil(rng, honest))
        for size in (0, 1, 43, 44, 1 << 16, (1 << 17) + 1, (1 << 32) - 1):
            say(receiver, key, secret, name, _LENGTH.pack(size) + bytes(min(size, 1 << 17)))
        assert (receiver.outside() == POISON).all()
        assert receiver.counters.get("connection_errors", 0) == 0
        assert receiver.counters["failed_corrupt_state"] > 0
        assert receiver.counters["refused_malformed"] > 0, "a length that no block can have"
        quiesced = threading.Event()
        receiver.door.fence(key, quiesced.set)
        assert quiesced.wait(5), "somebody is still inside"
        served(receiver, tmp_path)
    finally:
        receiver.backend.close()
        os.close(receiver.fd)
