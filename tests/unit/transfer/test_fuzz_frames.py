"""Whatever a stranger, or a peer gone mad, says to a sidecar's listener on a real socket: its connection ends, nothing
outside its grant is written, and the next peer is served. HYPOTHESIS_PROFILE=deep says ten times as much.
"""

import json
import os
import random
import socket
import struct
import threading
import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shared.protocol.reports import LinkAddress
from shared.runtime.errors import TransferError
from shared.state.components import IndexKind
from shared.state.layout import PoolLayout, Shard
from shared.transfer.backend import Faults, Manifest, Timing
from shared.transfer.door import Door
from shared.transfer.link import Piece, TicketKey
from shared.transfer.pool import Pool, create_pool
from shared.transfer.tcp import TcpBackend
from shared.transfer.wire import MAC_BYTES, Greeting, Header, Hello, WirePiece, parse, sign
from tests.contract.transfer_links import LAYOUT, POISON, new_ticket

ROUNDS = 10_000 if os.environ.get("HYPOTHESIS_PROFILE") == "deep" else 1000
TABLE = ((3, 4, 9), (), (), ())
PIECE = WirePiece(component=0, num_layers=3, first_unit=0, num_units=2, rows_in_last=3)
PAYLOAD_BYTES = 2 * 3 * 5 * 4 * 3 * 7  # segments, row, float32, layers, rows of one whole unit and of three quarters
_LENGTH = struct.Struct("!I")


@dataclass
class Receiver:
    """A door and a TCP listener, in this process."""

    pool: Pool
    door: Door
    backend: TcpBackend
    fd: int
    announced: list[TicketKey]

    @property
    def bytes(self) -> np.ndarray:
        return np.frombuffer(self.pool.bytes, dtype=np.uint8)

    @property
    def counters(self) -> dict[str, int]:
        return self.door.snapshot()[1]

    def outside(self) -> np.ndarray:
        """The pool but for the units of the ticket's table."""
        mask = np.ones(len(self.pool.bytes), dtype=bool)
        view = LAYOUT.view(memoryview(bytearray(LAYOUT.total_bytes)), 0)
        marks = np.zeros_like(view)
        marks[:, list(TABLE[0])] = 1
        start = LAYOUT.offset_of(0)
        mask[start : start + marks.nbytes] = (marks.reshape(-1) == 0).repeat(marks.itemsize)
        return np.asarray(self.bytes[mask])


def new_receiver(stall_s: float) -> Receiver:
    fd = create_pool(LAYOUT)
    pool = Pool.map(fd, LAYOUT, writable=True)
    announced: list[TicketKey] = []
    door = Door(LAYOUT, lambda key, _backend: announced.append(key))
    backend = TcpBackend(pool, door, "boot", "127.0.0.1", 0, Timing(stall_s=stall_s), Faults())
    receiver = Receiver(pool, door, backend, fd, announced)
    receiver.bytes[:] = POISON
    return receiver


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    """It loses patience quickly."""
    made = new_receiver(stall_s=0.15)
    yield made
    made.backend.close()
    os.close(made.fd)


class Stranger:
    """A socket to the listener, and a valid conversation to spoil."""

    def __init__(self, receiver: Receiver) -> None:
        self.sock = socket.create_connection(("127.0.0.1", receiver.backend.port), 5)
        try:
            self.nonce = parse(Hello, self.read_frame()).nonce
        except BaseException:
            self.sock.close()
            raise

    def read_frame(self) -> bytes:
        (size,) = _LENGTH.unpack(self._read(4))
        return self._read(size)

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            part = self.sock.recv(size - len(data))
            if not part:
                raise ConnectionError("cut off")
            data += part
        return data

    def greet(self, layout: PoolLayout = LAYOUT) -> bool:
        self.sock.sendall(framed(Greeting(layout=layout).model_dump_json().encode()))
        return bool(json.loads(self.read_frame())["ok"])

    def conversation(self, key: TicketKey, secret: bytes) -> bytes:
        """Greeting, header and payload as one run of bytes."""
        greeting = Greeting(layout=LAYOUT).model_dump_json().encode()
        return framed(greeting) + framed(self.header(key, secret, (PIECE,))) + b"\x11" * PAYLOAD_BYTES

    def header(self, key: TicketKey, secret: bytes, pieces: tuple[WirePiece, ...], sequence: int = 0) -> bytes:
        header = Header(room=key.room, generation=key.generation, sequence=sequence, pieces=pieces)
        raw = header.model_dump_json().encode()
        return sign(secret, self.nonce, sequence, raw) + raw

    def say(self, data: bytes) -> None:
        """Everything, then the end; and whatever is answered is read. Being cut off meanwhile is no surprise."""
        try:
            self.sock.sendall(data)
            self.sock.shutdown(socket.SHUT_WR)
            while self.sock.recv(1 << 16):
                pass
        except TimeoutError:
            raise
        except OSError:
            return
        finally:
            self.sock.close()


def framed(body: bytes) -> bytes:
    return _LENGTH.pack(len(body)) + body


def spoil(rng: random.Random, data: bytes) -> bytes:
    """Flipped, cut, doubled, with a hole, or with another length in front of a frame."""
    spoiled, place = bytearray(data), rng.randrange(len(data))
    how = rng.randrange(6)
    if how == 0:
        for _ in range(rng.choice([1, 1, 8])):
            spoiled[rng.randrange(len(spoiled))] ^= 1 << rng.randrange(8)
    elif how == 1:
        del spoiled[place:]
    elif how == 2:
        del spoiled[place : place + rng.randrange(1, 9)]
    elif how == 3:
        spoiled[place:place] = rng.randbytes(rng.randrange(1, 9))
    elif how == 4:
        spoiled[place:place] = spoiled[: rng.randrange(len(spoiled))]
    else:
        spoiled[:4] = _LENGTH.pack(rng.choice([0, 1, len(data), 1 << 20, (1 << 20) + 1, (1 << 32) - 1]))
    return bytes(spoiled)


def served(receiver: Receiver, tmp_path: Path) -> None:
    """An honest peer hands its state over."""
    key, secret = new_ticket()
    receiver.door.open(key, secret, TABLE)
    fd = create_pool(LAYOUT)
    pool = Pool.map(fd, LAYOUT, writable=True)
    sender = TcpBackend(pool, Door(LAYOUT, lambda *_: None), "other", "127.0.0.1", 0, Timing(), Faults())
    peer = LinkAddress(boot_id="boot", host="127.0.0.1", port=receiver.backend.port, socket="", backends=("tcp",))
    channel = sender.connect(peer)
    event = threading.Event()
    event.set()
    try:
        channel.transfer(Manifest(key, secret, (Piece(0, 0, (7, 8), 3),)), event)
    finally:
        channel.close()
        sender.close()
        os.close(fd)
    assert receiver.door.received(key)[0].num_bytes == PAYLOAD_BYTES
    receiver.door.fence(key, lambda: None)


def test_the_conversation_is_a_valid_one(receiver: Receiver) -> None:
    """What the others spoil would land."""
    key, secret = new_ticket()
    receiver.door.open(key, secret, TABLE)
    stranger = Stranger(receiver)
    stranger.say(stranger.conversation(key, secret))
    assert receiver.door.received(key)[0].num_bytes == PAYLOAD_BYTES
    assert (receiver.outside() == POISON).all()


def test_spoiled_conversations_end_and_write_nothing_outside_the_grant(receiver: Receiver, tmp_path: Path) -> None:
    rng = random.Random(1)
    key, secret = new_ticket()
    receiver.door.open(key, secret, TABLE)
    for number in range(ROUNDS):
        stranger = Stranger(receiver)
        stranger.say(spoil(rng, stranger.conversation(key, secret)))
        if number == ROUNDS // 4:
            tracemalloc.start()
            before = tracemalloc.get_traced_memory()[0]
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown < 1 << 20
    assert (receiver.outside() == POISON).all()
    assert receiver.counters.get("connection_errors", 0) == 0
    assert receiver.counters["refused_malformed"] > 0
    quiesced = threading.Event()
    receiver.door.fence(key, quiesced.set)
    assert quiesced.wait(5), "somebody is still inside"
    served(receiver, tmp_path)


def odd_pieces(rng: random.Random) -> tuple[WirePiece, ...]:
    odd = [-1, 0, 1, 2, 3, 4, 9, 10**6, 1 << 31, 1 << 63, 10**30, -(10**30)]
    names = ("component", "first_layer", "num_layers", "first_unit", "num_units", "rows_in_last")

    def piece() -> WirePiece:
        changes: dict[str, Any] = {name: rng.choice(odd) for name in rng.sample(names, rng.randrange(1, 4))}
        return PIECE.model_copy(update=changes)

    return tuple(piece() for _ in range(rng.randrange(1, 4)))


def allowed(pieces: tuple[WirePiece, ...]) -> bool:
    """By the words of the contract: units of the table, rows of a unit, layers of the component, nothing twice."""
    cells = [
        (layer, unit)
        for p in pieces
        for layer in range(p.first_layer, p.first_layer + min(p.num_layers, 9))
        for unit in range(p.first_unit, p.first_unit + min(p.num_units, 9))
    ]
    fits = [
        p.component == 0
        and p.num_layers >= 1
        and p.first_layer >= 0
        and p.first_layer + p.num_layers <= 3
        and p.num_units >= 1
        and p.first_unit >= 0
        and p.first_unit + p.num_units <= len(TABLE[0])
        and 1 <= p.rows_in_last <= 4
        for p in pieces
    ]
    return all(fits) and len(set(cells)) == len(cells)


def test_a_peer_with_the_secret_gets_its_own_units_and_no_others(receiver: Receiver, tmp_path: Path) -> None:
    """Indices, counts and rows of a signed header, whatever they say."""
    rng = random.Random(2)
    let_in = 0
    for _ in range(ROUNDS):
        key, secret = new_ticket()
        receiver.door.open(key, secret, TABLE)
        stranger, pieces = Stranger(receiver), odd_pieces(rng)
        assert stranger.greet()
        stranger.sock.sendall(framed(stranger.header(key, secret, pieces)))
        answer = json.loads(stranger.read_frame())
        assert answer["ok"] == allowed(pieces), (pieces, answer)
        let_in += answer["ok"]
        stranger.say(b"\x22" * 4000)
        quiesced = threading.Event()
        receiver.door.fence(key, quiesced.set)
        assert quiesced.wait(5)
    assert (receiver.outside() == POISON).all()
    assert let_in > 0
    assert receiver.counters.get("connection_errors", 0) == 0
    served(receiver, tmp_path)


def test_a_peer_that_cuts_its_state_oddly_writes_nothing_outside_the_grant(receiver: Receiver, tmp_path: Path) -> None:
    """Pages and ranks of every size, and of sizes that cannot be, with pieces that may fit or not."""
    rng = random.Random(4)
    let_in = 0
    for _ in range(ROUNDS):
        key, secret = new_ticket()
        receiver.door.open(key, secret, TABLE)
        stranger, pieces = Stranger(receiver), odd_pieces(rng)
        let_in += stranger.greet(odd_layout(rng))
        stranger.say(framed(stranger.header(key, secret, pieces)) + b"\x22" * 6000)
        quiesced = threading.Event()
        receiver.door.fence(key, quiesced.set)
        assert quiesced.wait(5)
    assert (receiver.outside() == POISON).all()
    assert receiver.counters["landed"] > 0
    assert ROUNDS // 10 < let_in < ROUNDS
    assert receiver.counters.get("connection_errors", 0) == 0
    served(receiver, tmp_path)


def odd_layout(rng: random.Random) -> PoolLayout:
    """Ours in other pages, as one of several ranks, or nothing of the kind."""
    pages, heads = rng.choice([1, 2, 3, 4, 5, 8, 64, 10**6, 1 << 62]), rng.choice([3, 3, 3, 1, 6])
    whole = tuple(
        replace(c, unit_tokens=pages if c.index is IndexKind.PAGE else c.unit_tokens) for c in LAYOUT.components
    )
    whole = (replace(whole[0], outer=(2, heads)), *whole[1:])
    sizes = rng.choice([(24, 6), (1, 1), (0, 0), (-1, 1 << 62)])
    if rng.random() < 0.6:
        return PoolLayout(whole, *sizes)
    shard = Shard(whole, rng.choice([1, 2, 3, 1 << 40]), rng.choice([0, 1, -1]))
    return PoolLayout(whole, *sizes, shard)


def test_other_tickets_and_signatures_are_refused_each_time(receiver: Receiver) -> None:
    """The refusal costs the transfer and not the connection; what nobody knows looks like what has ended."""
    key, secret = new_ticket()
    receiver.door.open(key, secret, TABLE)
    stranger = Stranger(receiver)
    assert stranger.greet()
    right = stranger.header(key, secret, (PIECE,), sequence=0)
    attempts = [
        (right[:MAC_BYTES], stranger.header(TicketKey(key.room + 1, 1), secret, (PIECE,), 0)[MAC_BYTES:]),
        (os.urandom(MAC_BYTES), stranger.header(key, secret, (PIECE,), 1)[MAC_BYTES:]),
        (b"\0" * MAC_BYTES, stranger.header(TicketKey(key.room, 2), secret, (PIECE,), 2)[MAC_BYTES:]),
        (right[:MAC_BYTES], stranger.header(key, secret, (PIECE,), 3)[MAC_BYTES:]),
    ]
    reasons = []
    for mac, raw in attempts:
        stranger.sock.sendall(framed(mac + raw))
        reasons.append(json.loads(stranger.read_frame())["reason"])
    assert reasons == ["unknown_room", "bad_mac", "stale_generation", "bad_mac"]
    stranger.say(b"")
    assert receiver.announced == []
    assert (receiver.bytes == POISON).all()


def test_who_claims_much_and_says_nothing_is_given_up(receiver: Receiver, tmp_path: Path) -> None:
    """A length without its bytes costs no memory to speak of, and no more time than the patience for one read."""
    tracemalloc.start()
    strangers = [Stranger(receiver) for _ in range(20)]
    for stranger in strangers:
        stranger.sock.sendall(_LENGTH.pack(1 << 20))
    for stranger in strangers:
        stranger.sock.settimeout(10)
        with pytest.raises(OSError, match=r"cut off|reset"):
            stranger.read_frame()
        stranger.sock.close()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 32 << 20
    served(receiver, tmp_path)


def test_more_connections_than_are_served_are_turned_away(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.transfer.listener._MAX_CONNECTIONS", 4)
    strangers = [Stranger(receiver) for _ in range(4)]
    with pytest.raises(OSError):  # noqa: PT011
        Stranger(receiver)
    assert receiver.counters["refused_too_many_connections"] == 1
    for stranger in strangers:
        stranger.sock.close()


def test_the_sender_survives_any_answer(receiver: Receiver) -> None:
    """A listener gone mad: the transfer fails with a typed error, whatever it says."""
    rng = random.Random(3)
    fd = create_pool(LAYOUT)
    pool = Pool.map(fd, LAYOUT, writable=True)
    backend = TcpBackend(pool, Door(LAYOUT, lambda *_: None), "me", "127.0.0.1", 0, Timing(1.0, 0.15), Faults())
    hello = framed(Hello(boot_id="mad", layout=LAYOUT, nonce=b"n" * 32).model_dump_json().encode())
    script = hello + framed(b'{"ok":true}') * 3
    event = threading.Event()
    event.set()
    with socket.create_server(("127.0.0.1", 0)) as server:
        peer = LinkAddress(boot_id="mad", host="127.0.0.1", port=server.getsockname()[1], socket="", backends=("tcp",))

        def answer(said: bytes) -> None:
            sock, _ = server.accept()
            with sock:
                sock.settimeout(5)
                try:
                    sock.sendall(said)
                    sock.shutdown(socket.SHUT_WR)
                    while sock.recv(1 << 16):
                        pass
                except OSError:
                    return

        ended = []
        for _ in range(ROUNDS // 3):
            mad = threading.Thread(target=answer, args=(spoil(rng, script),))
            mad.start()
            key, secret = new_ticket()
            try:
                channel = backend.connect(peer)
                try:
                    channel.transfer(Manifest(key, secret, (Piece(0, 0, (1, 2), 4),)), event)
                    ended.append("done")
                finally:
                    channel.close()
            except TransferError as error:
                ended.append(error.code)
            mad.join(10)
        assert {"peer_lost", "transfer_refused"} <= set(ended)
    backend.close()
    os.close(fd)
