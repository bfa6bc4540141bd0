"""Wire formats over tcp between two backends: many blocks, damage on the way, and a fence in the middle."""

import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress

import numpy as np
import pytest

from shared.protocol.reports import LinkAddress
from shared.runtime.errors import Corrupt, TransferError, TransferRefused
from shared.state.components import IndexKind, StateComponent
from shared.state.layout import PoolLayout
from shared.transfer.backend import Channel, Digests, Faults, Manifest, Timing, Wire
from shared.transfer.coded_rows import blocks
from shared.transfer.door import Door
from shared.transfer.formats.agree import EXACT_FORMATS
from shared.transfer.formats.catalog import LOSSINESS
from shared.transfer.ledger import Ledger
from shared.transfer.link import Piece, Receipt
from shared.transfer.pool import Pool, Run, create_pool
from shared.transfer.tcp import TcpBackend
from shared.transfer.wire import Header, WirePiece, sign
from tests.contract.test_transfer_backend import is_set
from tests.contract.transfer_links import POISON, new_ticket

ALL = tuple(LOSSINESS)
CODED = tuple(name for name in ALL if name != "raw")
BIG = PoolLayout(
    (StateComponent("kv", IndexKind.PAGE, 16, (2, 3), (64,), "float32", tuple(range(24)), 1),),
    num_pages=48,
    num_slots=1,
)


class End:
    """Pool, door and backend, without a sidecar around them."""

    def __init__(self, boot_id: str, faults: Faults) -> None:
        self.fd = create_pool(BIG)
        self.pool = Pool.map(self.fd, BIG, writable=True)
        self.values = BIG.view(self.pool.bytes, 0)
        self.door = Door(BIG, lambda _key, _backend: None)
        self.backend = TcpBackend(self.pool, self.door, boot_id, "127.0.0.1", 0, Timing(), faults)
        self.address = LinkAddress(
            boot_id=boot_id, host="127.0.0.1", port=self.backend.port, socket="", backends=("tcp",)
        )

    def close(self) -> None:
        self.backend.close()
        os.close(self.fd)


@pytest.fixture
def ends() -> Iterator[tuple[End, End]]:
    sender, receiver = End("sender", Faults()), End("receiver", Faults())
    sender.values[...] = np.random.default_rng(3).normal(size=sender.values.shape)
    np.frombuffer(receiver.pool.bytes, dtype=np.uint8)[:] = POISON
    yield sender, receiver
    sender.close()
    receiver.close()


def ledger_of(digests: Digests) -> Receipt:
    """What the sender would sign."""
    ledger = Ledger(BIG.components)
    ledger.record(0, 0, 16, digests[0])
    return ledger.receipt()


UNITS = tuple(range(40))
MINE = tuple(reversed(range(4, 44)))
MOVED_BYTES = 40 * BIG.components[0].unit_bytes * 24


@pytest.mark.parametrize("name", ALL)
def test_pieces_of_many_blocks_arrive_whole(name: str, ends: tuple[End, End]) -> None:
    """More than one block of several layers, into pages in another order than they come from."""
    sender, receiver = ends
    key, secret = new_ticket()
    receiver.door.open(key, secret, (MINE,), formats=(name,))
    channel = sender.backend.connect(receiver.address)
    manifest = Manifest(key, secret, (Piece(0, 0, UNITS, 16),), Wire(name))
    sent = channel.transfer(manifest, is_set())
    assert receiver.door.received(key) == ledger_of(sent)
    errors = np.abs(receiver.values[:, MINE] - sender.values[:, UNITS])
    assert errors.max() == 0 if name in EXACT_FORMATS else 0 < errors.max() < 2
    assert name != "delta" or errors[16:].mean() > 1.5 * errors[:8].mean(), "late layers are coded more coarsely"
    assert set(np.ascontiguousarray(receiver.values[:, :4]).tobytes()) == {POISON}
    if name == "raw":
        assert manifest.wire.used == {}
    else:
        assert manifest.wire.used[0][0] == name
        assert manifest.wire.used[0][1] < {"lossless": 0.97, "fp16": 0.51, "delta": 0.2}.get(name, 0.28) * MOVED_BYTES
    assert manifest.wire.bytes_per_s is not None
    assert 1e5 < manifest.wire.bytes_per_s < 1e12
    channel.close()


class Spoiler:
    """Passes a connection on, and spoils one byte of what the sender says, at `at`."""

    def __init__(self, port: int, at: int) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        self._to, self._at = port, at
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        client, _ = self._server.accept()
        with client, socket.create_connection(("127.0.0.1", self._to)) as far:
            back = threading.Thread(target=self._pass, args=(far, client, -1), daemon=True)
            back.start()
            self._pass(client, far, self._at)
            back.join()

    def _pass(self, source: socket.socket, target: socket.socket, at: int) -> None:
        seen = 0
        try:
            while data := bytearray(source.recv(65536)):
                if seen <= at < seen + len(data):
                    data[at - seen] ^= 0x10
                seen += len(data)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            with suppress(OSError):
                source.shutdown(socket.SHUT_RDWR)  # whoever sends to it shall not wait

    def close(self) -> None:
        self._server.close()
        self._thread.join(30)


@pytest.mark.parametrize("name", ALL)
def test_a_byte_that_changes_on_the_way_is_found(name: str, ends: tuple[End, End]) -> None:
    sender, receiver = ends
    key, secret = new_ticket()
    receiver.door.open(key, secret, (MINE,), formats=(name,))
    with closing(Spoiler(receiver.address.port, at=1_000_000)) as spoiler:
        channel = sender.backend.connect(receiver.address.model_copy(update={"port": spoiler.port}))
        pieces = (Piece(0, 0, UNITS, 16),)
        if name == "raw":
            sent = channel.transfer(Manifest(key, secret, pieces, Wire(name)), is_set())
            assert receiver.door.received(key)[0].num_bytes == MOVED_BYTES
            assert receiver.door.received(key) != ledger_of(sent), "this is what the commit compares"
        else:
            with pytest.raises(Corrupt, match="digest disagrees"):
                channel.transfer(Manifest(key, secret, pieces, Wire(name)), is_set())
            assert receiver.door.snapshot()[1]["failed_corrupt_state"] == 1
            assert not any(one.num_bytes for one in receiver.door.received(key)), "nothing of it counts as landed"
            again = sender.backend.connect(receiver.address)
            sent = again.transfer(Manifest(key, secret, pieces, Wire(name)), is_set())
            assert receiver.door.received(key) == ledger_of(sent)
            again.close()
        channel.close()


@pytest.mark.parametrize("name", CODED)
def test_two_blocks_that_differ_have_two_digests(name: str, ends: tuple[End, End]) -> None:
    """A lossy block's digest stands for all its units, and every other block has one of its own."""
    sender, receiver = ends
    key, secret = new_ticket()
    receiver.door.open(key, secret, (MINE,), formats=(name,))
    channel = sender.backend.connect(receiver.address)
    sent = channel.transfer(Manifest(key, secret, (Piece(0, 0, UNITS, 16),), Wire(name)), is_set())
    each = {digest.tobytes() for layer in sent[0] for digest in layer}
    num_blocks = len(list(blocks(BIG.components[0], Run(0, UNITS, 16), range(24))))
    assert num_blocks > 5
    assert len(each) == (24 * 40 if name in EXACT_FORMATS else num_blocks)
    channel.close()


@pytest.mark.parametrize("name", ["raw", "lossless", "fp8"])
def test_a_fence_in_the_middle_ends_it_and_nothing_is_written_later(name: str) -> None:
    sender, receiver = End("sender", Faults(delay_s=0.1)), End("receiver", Faults())
    key, secret = new_ticket()
    landing = threading.Event()
    receiver.door = Door(BIG, lambda _key, _backend: landing.set())
    receiver.backend.close()
    receiver.backend = TcpBackend(receiver.pool, receiver.door, "receiver", "127.0.0.1", 0, Timing(), Faults())
    receiver.door.open(key, secret, (MINE,), formats=(name,))
    channel = sender.backend.connect(receiver.address.model_copy(update={"port": receiver.backend.port}))
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(
            channel.transfer, Manifest(key, secret, (Piece(0, 0, UNITS, 16),), Wire(name)), is_set()
        )
        assert landing.wait(30)
        quiesced = threading.Event()
        receiver.door.fence(key, quiesced.set)
        assert quiesced.wait(30)
        before = bytes(receiver.pool.bytes)
        with pytest.raises(TransferError):
            running.result(30)
    assert bytes(receiver.pool.bytes) == before
    channel.close()
    sender.close()
    receiver.close()


@pytest.fixture
def several(ends: tuple[End, End]) -> Iterator[tuple[End, End, Channel]]:
    """Three connections."""
    sender, receiver = ends
    backend = TcpBackend(sender.pool, sender.door, "sender", "127.0.0.1", 0, Timing(), Faults(), streams=3)
    channel = backend.connect(receiver.address)
    yield sender, receiver, channel
    channel.close()
    backend.close()


@pytest.mark.parametrize("name", ["raw", "lossless", "int8"])
def test_several_streams_bring_what_one_does(name: str, several: tuple[End, End, Channel]) -> None:
    sender, receiver, channel = several
    for number in range(2):
        key, secret = new_ticket()
        receiver.door.open(key, secret, (MINE,), formats=(name,))
        manifest = Manifest(key, secret, (Piece(0, 0, UNITS, 7),), Wire(name))
        sent = channel.transfer(manifest, is_set())
        ledger = Ledger(BIG.components)
        ledger.record(0, 0, 7, sent[0])
        assert receiver.door.received(key) == ledger.receipt()
        assert receiver.door.received(key)[0].num_bytes == (39 * 16 + 7) * BIG.components[0].row_bytes * 24
        error = np.abs(receiver.values[:, MINE[:-1]] - sender.values[:, UNITS[:-1]]).max()
        assert error == 0 if name in EXACT_FORMATS else 0 < error < 2
        assert receiver.door.snapshot()[1]["admitted"] == 3 * (number + 1)
        assert manifest.wire.bytes_per_s is not None
        assert channel.is_idle()
        receiver.door.fence(key, lambda: None)


def test_what_is_small_takes_one_of_several(several: tuple[End, End, Channel]) -> None:
    _, receiver, channel = several
    key, secret = new_ticket()
    receiver.door.open(key, secret, (MINE,))
    channel.transfer(Manifest(key, secret, (Piece(0, 0, UNITS[:2], 16),)), is_set())
    assert receiver.door.snapshot()[1]["admitted"] == 1


def test_one_stream_that_fails_ends_the_others(several: tuple[End, End, Channel]) -> None:
    """A unit of the second part is being written by somebody else."""
    _, receiver, channel = several
    key, secret = new_ticket()
    receiver.door.open(key, secret, (MINE,))
    piece = WirePiece(component=0, num_layers=24, first_unit=20, num_units=1, rows_in_last=16)
    header = Header(room=key.room, generation=1, sequence=0, pieces=(piece,))
    raw = header.model_dump_json().encode()
    grant = receiver.door.admit(header, raw, sign(secret, b"n", 0, raw), b"n", "test", lambda: None)
    with pytest.raises(TransferRefused, match="overlap"):
        channel.transfer(Manifest(key, secret, (Piece(0, 0, UNITS, 16),)), is_set())
    assert not channel.is_idle()
    receiver.door.leave(grant)
