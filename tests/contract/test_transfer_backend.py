"""The contract of `shared.transfer.backend`, run on every backend with the door in this process."""

import mmap
import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from shared.protocol.reports import LinkAddress
from shared.runtime.errors import PeerLost, TransferError, TransferRefused, TransferTimeout
from shared.transfer.backend import Backend, Channel, Digests, Event, Faults, Manifest, Timing
from shared.transfer.door import Door
from shared.transfer.link import Piece, TicketKey
from shared.transfer.nixl import NixlBackend
from shared.transfer.pool import Pool, Run, create_pool
from shared.transfer.sending import runs_of
from shared.transfer.shm import ShmBackend
from shared.transfer.tcp import TcpBackend
from shared.transfer.wire import Header, WirePiece, sign
from tests.contract.transfer_links import LAYOUT, NIXL, POISON, new_ticket

KINDS = ["shm", "tcp", NIXL]
TABLE = ((3, 4, 9), (), (), ())
PIECES = (Piece(0, 0, (7, 8, 2), 3),)


class Peer:
    """One end: pool, door and backend, without a sidecar around them."""

    def __init__(self, kind: str, boot_id: str, directory: Path, timing: Timing, faults: Faults) -> None:
        self.fd = create_pool(LAYOUT)
        self.pool = Pool.map(self.fd, LAYOUT, writable=True)
        self.bytes = np.frombuffer(self.pool.bytes, dtype=np.uint8)
        self.first: list[TicketKey] = []
        self.door = Door(LAYOUT, lambda key, _backend: self.first.append(key))
        name, port = f"{boot_id}.sock", 0
        endpoints: tuple[tuple[str, str], ...] = ()
        if kind == "shm":
            self.backend: Backend = ShmBackend(self.pool, self.fd, self.door, boot_id, directory, name, timing, faults)
        elif kind == "nixl":
            self.backend = NixlBackend(self.pool, self.door, boot_id, "127.0.0.1", 0, timing, faults)
            endpoints = (("nixl", str(self.backend.port)),)
        else:
            self.backend = TcpBackend(self.pool, self.door, boot_id, "127.0.0.1", 0, timing, faults)
            port = self.backend.port
        self.address = LinkAddress(
            boot_id=boot_id, host="127.0.0.1", port=port, socket=name, backends=(kind,), endpoints=endpoints
        )

    def close(self) -> None:
        self.backend.close()
        os.close(self.fd)


@dataclass
class Ends:
    sender: Peer
    receiver: Peer
    channel: Channel
    threads: ThreadPoolExecutor

    def start(self, manifest: Manifest, event: threading.Event) -> Future[Digests]:
        return self.threads.submit(self.channel.transfer, manifest, event)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def ends(kind: str, tmp_path: Path) -> Iterator[Ends]:
    sender = Peer(kind, "sender", tmp_path, Timing(), Faults())
    receiver = Peer(kind, "receiver", tmp_path, Timing(), Faults())
    sender.bytes[:] = np.random.default_rng(1).integers(0, 256, len(sender.bytes), dtype=np.uint8)
    receiver.bytes[:] = POISON
    channel = sender.backend.connect(receiver.address)
    with ThreadPoolExecutor(2) as threads:
        yield Ends(sender, receiver, channel, threads)
    channel.close()
    sender.close()
    receiver.close()


def is_set() -> threading.Event:
    event = threading.Event()
    event.set()
    return event


def open_ticket(ends: Ends) -> Manifest:
    key, secret = new_ticket()
    ends.receiver.door.open(key, secret, TABLE)
    return Manifest(key, secret, PIECES)


def check_the_event_is_honoured(ends: Ends) -> None:
    event = threading.Event()
    manifest = open_ticket(ends)
    running = ends.start(manifest, event)
    with pytest.raises(TimeoutError):
        running.result(0.3)
    assert ends.receiver.first == []
    assert (ends.receiver.bytes == POISON).all()
    ends.sender.bytes[:] = 0x11
    event.set()
    digests = running.result(60)
    page = LAYOUT.view(ends.receiver.pool.bytes, 0)[:, 3]
    assert set(page.tobytes()) == {0x11}
    landed = [ends.receiver.pool.digests(Run(0, TABLE[0], 3), layer).tobytes() for layer in range(3)]
    assert [layer.tobytes() for layer in digests[0]] == landed


def test_no_byte_moves_before_the_event(ends: Ends) -> None:
    """A backend that ignores the event would send what the source held before."""
    check_the_event_is_honoured(ends)


def test_more_pieces_than_a_header_holds_are_refused_before_it_leaves(ends: Ends) -> None:
    many = tuple(Piece(1, 0, (7,), 1) for _ in range(12_000))
    with pytest.raises(TransferRefused, match="too_long"):
        ends.channel.transfer(replace(open_ticket(ends), pieces=many), is_set())
    assert ends.receiver.door.snapshot()[1] == {}


class Impatient:
    """A channel that does not wait for the event: it sends at once, or it reads at once and sends later, or it only
    makes its digests too early."""

    def __init__(self, ends: Ends, what: str) -> None:
        self._inner, self._pool, self._bytes, self._what = ends.channel, ends.sender.pool, ends.sender.bytes, what

    def transfer(self, manifest: Manifest, event: Event) -> Digests:
        if self._what == "sends":
            return self._inner.transfer(manifest, is_set())
        read = self._bytes.copy()
        early = [[self._pool.digests(run, layer) for layer in run.layers] for run in runs_of(self._pool, PIECES)]
        while not event.wait(0.01):
            pass
        if self._what == "digests":
            self._inner.transfer(manifest, event)
            return early
        self._bytes[:] = read
        return self._inner.transfer(manifest, event)

    def abort(self) -> None:
        self._inner.abort()

    def is_idle(self) -> bool:
        return self._inner.is_idle()

    def close(self) -> None:
        self._inner.close()


@pytest.mark.parametrize("what", ["sends", "reads", "digests"])
def test_a_backend_that_ignores_the_event_is_found_out(ends: Ends, what: str) -> None:
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        check_the_event_is_honoured(replace(ends, channel=Impatient(ends, what)))


def test_layers_move_one_by_one_and_in_any_order(ends: Ends) -> None:
    manifest = open_ticket(ends)
    for layers in (range(2, 3), range(0, 2)):
        pieces = (replace(PIECES[0], first_layer=layers.start, num_layers=len(layers)),)
        digests = ends.channel.transfer(replace(manifest, pieces=pieces), is_set())
        assert len(digests[0]) == len(layers)
        for layer, found in zip(layers, digests[0], strict=True):
            assert (ends.receiver.pool.digests(Run(0, TABLE[0], 3), layer) == found).all()
        done = 1 if layers.start else 3
        assert ends.receiver.door.received(manifest.key)[0].num_bytes == 11 * 120 * done
    untouched = LAYOUT.view(ends.receiver.pool.bytes, 0)[:, 5]
    assert set(untouched.tobytes()) == {POISON}


def test_an_aborted_transfer_ends_while_it_waits_for_its_event(ends: Ends) -> None:
    running = ends.start(open_ticket(ends), threading.Event())
    ends.channel.abort()
    with pytest.raises(TransferError):
        running.result(60)
    assert not ends.channel.is_idle()


def test_it_is_confirmed_only_after_it_landed(ends: Ends) -> None:
    for _ in range(100):
        manifest = open_ticket(ends)
        ends.receiver.bytes[:] = POISON
        digests = ends.channel.transfer(manifest, is_set())
        landed = ends.receiver.door.received(manifest.key)
        assert landed[0].num_bytes == 11 * 120 * 3
        assert (ends.receiver.pool.digests(Run(0, TABLE[0], 3), 0) == digests[0][0]).all()
        ends.receiver.door.fence(manifest.key, lambda: None)


def test_a_sender_that_goes_silent_times_out_and_leaves(kind: str, tmp_path: Path) -> None:
    """The receiver's stall limit ends it; the ticket can then be fenced at once."""
    sender = Peer(kind, "sender", tmp_path, Timing(), Faults(delay_s=3.0 if kind == "tcp" else 0.0))
    receiver = Peer(kind, "receiver", tmp_path, Timing(stall_s=1.0), Faults())
    key, secret = new_ticket()
    receiver.door.open(key, secret, TABLE)
    channel = sender.backend.connect(receiver.address)
    if kind == "tcp":
        with pytest.raises(TransferError):
            channel.transfer(Manifest(key, secret, PIECES), is_set())
        assert receiver.door.snapshot()[1]["failed_transfer_timeout"] == 1
    else:
        # Nothing of a transfer that the receiver copies or reads waits for the sender once it is admitted.
        channel.transfer(Manifest(key, secret, PIECES), is_set())
    done = threading.Event()
    receiver.door.fence(key, done.set)
    assert done.is_set()
    channel.close()
    sender.close()
    receiver.close()


def test_a_receiver_that_goes_silent_is_a_time_out(kind: str, tmp_path: Path) -> None:
    sender = Peer(kind, "sender", tmp_path, Timing(stall_s=1.0), Faults())
    receiver = Peer(kind, "receiver", tmp_path, Timing(), Faults())
    key, secret = new_ticket()
    receiver.door.open(key, secret, TABLE)
    channel = sender.backend.connect(receiver.address)
    # Holding the door's lock is a receiver that hangs in the middle of admitting.
    with receiver.door._lock, pytest.raises(TransferTimeout):
        channel.transfer(Manifest(key, secret, PIECES), is_set())
    channel.close()
    sender.close()
    receiver.close()


def test_another_boot_is_another_peer(ends: Ends) -> None:
    wrong = ends.receiver.address.model_copy(update={"boot_id": "earlier"})
    with pytest.raises(PeerLost, match="restarted"):
        ends.sender.backend.connect(wrong)


def test_a_transfer_cannot_be_replayed_on_another_connection(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recorded header is worthless: the nonce is the connection's, the sequence the transfer's."""
    manifest = open_ticket(ends)
    ends.channel.transfer(manifest, is_set())
    nonce = ends.channel._nonce  # type: ignore[attr-defined]

    def recorded(secret: bytes, _nonce: bytes, sequence: int, raw: bytes) -> bytes:
        return sign(secret, nonce, sequence, raw)

    monkeypatch.setattr("shared.transfer.sending.sign", recorded)
    other = ends.sender.backend.connect(ends.receiver.address)
    with pytest.raises(TransferRefused, match="bad_mac"):
        other.transfer(manifest, is_set())
    other.close()


def test_two_writers_of_one_unit_are_refused(ends: Ends) -> None:
    manifest = open_ticket(ends)
    piece = WirePiece(component=0, num_layers=3, first_unit=1, num_units=1, rows_in_last=4)
    header = Header(room=manifest.key.room, generation=1, sequence=0, pieces=(piece,))
    raw = header.model_dump_json().encode()
    door = ends.receiver.door
    grant = door.admit(header, raw, sign(manifest.secret, b"n", 0, raw), b"n", "test", lambda: None)
    with pytest.raises(TransferRefused, match="overlap"):
        ends.channel.transfer(manifest, is_set())
    door.leave(grant)
    ends.channel.transfer(manifest, is_set())


def test_the_descriptor_a_sender_gives_away_cannot_be_written(tmp_path: Path) -> None:
    peer = Peer("shm", "peer", tmp_path, Timing(), Faults())
    readable = peer.backend._readable  # type: ignore[attr-defined]
    with pytest.raises(PermissionError):
        mmap.mmap(readable, LAYOUT.total_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    with pytest.raises(OSError, match=r"Invalid argument|not permitted"):
        os.ftruncate(readable, 0)
    peer.close()


@pytest.mark.parametrize("fault", ["small", "unsealed", "file"])
def test_a_source_that_could_fault_is_refused(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool that is smaller than it says, or could become so, would kill the receiver by SIGBUS."""
    sender = Peer("shm", "sender", tmp_path, Timing(), Faults())
    receiver = Peer("shm", "receiver", tmp_path, Timing(), Faults())
    if fault == "file":
        (tmp_path / "pool").write_bytes(bytes(LAYOUT.total_bytes))
        fd = os.open(tmp_path / "pool", os.O_RDONLY)
    else:
        fd = os.memfd_create("bad", os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, 4096 if fault == "small" else LAYOUT.total_bytes)
    monkeypatch.setattr(sender.backend, "_readable", fd)
    with pytest.raises(TransferRefused, match="geometry"):
        sender.backend.connect(receiver.address)
    sender.close()
    receiver.close()


def test_a_directory_may_be_deeper_than_a_socket_address(tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 120)
    deep.mkdir()
    sender = Peer("shm", "sender", deep, Timing(), Faults())
    receiver = Peer("shm", "receiver", deep, Timing(), Faults())
    assert sender.backend.reaches(receiver.address)
    sender.backend.connect(receiver.address).close()
    sender.close()
    receiver.close()
    assert list(deep.iterdir()) == []
