"""A transfer over shared memory that has to wait for others goes on burst by burst, as its sender is let."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shared.runtime.errors import TransferError, TransferRefused
from shared.transfer.backend import ALWAYS, Digests, Faults, Manifest, Timing, Turn
from shared.transfer.kernels import load_kernels
from shared.transfer.link import Piece
from shared.transfer.permits import Permits
from shared.transfer.pool import Run
from tests.contract.test_transfer_backend import POISON, Peer, is_set
from tests.contract.transfer_links import LAYOUT, new_ticket

TABLE = ((3, 4, 9, 1, 20), (), (), ())
PIECE = Piece(0, 0, (7, 8, 2, 0, 23), 4)
LAYER_BYTES = 5 * LAYOUT.components[0].unit_bytes


class Crossing:
    """A turn that counts the bursts that ask, and lets through as many as it is told."""

    window_bytes = 0

    def __init__(self, burst_bytes: int = LAYER_BYTES) -> None:
        self.burst_bytes = burst_bytes
        self.asked: list[int] = []
        self._arrived, self._open = threading.Semaphore(0), threading.Semaphore(0)
        self.closed = False

    def wait(self, num_bytes: int) -> None:
        self.asked.append(num_bytes)
        self._arrived.release()
        assert self._open.acquire(timeout=60)
        if self.closed:
            raise TransferError("not any more")

    def at_once(self, num_bytes: int) -> bool:
        return False

    def abort(self) -> None: ...

    def wait_for(self, bursts: int) -> None:
        for _ in range(bursts):
            assert self._arrived.acquire(timeout=60)

    def let(self, bursts: int) -> None:
        self._open.release(bursts)


class Two:
    def __init__(self, directory: Path) -> None:
        self.sender = Peer("shm", "sender", directory, Timing(stall_s=300), Faults())
        self.receiver = Peer("shm", "receiver", directory, Timing(stall_s=300), Faults())
        self.sender.bytes[:] = np.random.default_rng(1).integers(0, 255, len(self.sender.bytes), dtype=np.uint8)
        self.receiver.bytes[:] = POISON
        self.channel = self.sender.backend.connect(self.receiver.address)
        self.threads = ThreadPoolExecutor(2)

    def open(self, turn: Turn) -> Manifest:
        key, secret = new_ticket()
        self.receiver.door.open(key, secret, TABLE)
        return Manifest(key, secret, (PIECE,), turn=turn)

    def start(self, manifest: Manifest) -> Future[Digests]:
        return self.threads.submit(self.channel.transfer, manifest, is_set())

    def landed_layers(self) -> list[bool]:
        ours, theirs = (LAYOUT.view(end.pool.bytes, 0) for end in (self.receiver, self.sender))
        return [
            all(
                ours[layer, a].tobytes() == theirs[layer, b].tobytes()
                for a, b in zip(TABLE[0], PIECE.units, strict=True)
            )
            for layer in range(3)
        ]

    def untouched_layers(self) -> list[bool]:
        ours = LAYOUT.view(self.receiver.pool.bytes, 0)
        return [set(ours[layer].tobytes()) == {POISON} for layer in range(3)]

    def close(self) -> None:
        self.channel.close()
        self.threads.shutdown()
        self.sender.close()
        self.receiver.close()


@pytest.fixture(params=["plain", "compiled"])
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Two]:
    """Bursts of a layer each."""
    monkeypatch.setattr("shared.transfer.shm._PART_BURSTS", 1)
    made = Two(tmp_path)
    if request.param == "compiled":
        made.sender.pool.kernels = made.receiver.pool.kernels = load_kernels()
    yield made
    made.close()


def until_landed(two: Two, layer: int) -> None:
    """The burst that ends with this layer is over."""
    deadline = threading.Event()
    for _ in range(3000):
        if two.landed_layers()[layer]:
            return
        deadline.wait(0.01)
    raise AssertionError("the burst does not land")


def test_nothing_moves_beyond_the_bursts_that_may(two: Two) -> None:
    crossing = Crossing()
    manifest = two.open(crossing)
    running = two.start(manifest)
    for layer in range(3):
        crossing.wait_for(1)
        assert two.untouched_layers()[layer:] == [True] * (3 - layer)
        crossing.let(1)
        until_landed(two, layer)
    found = running.result(60)
    assert crossing.asked == [LAYER_BYTES] * 3
    assert (np.array(found[0]) == [two.sender.pool.digests(Run(0, PIECE.units, 4), k) for k in range(3)]).all()
    assert two.receiver.door.received(manifest.key)[0].num_bytes == 3 * LAYER_BYTES
    # The connection is in step: transfers of either kind follow.
    two.start(two.open(ALWAYS)).result(60)
    again = Crossing()
    again.let(3)
    two.start(two.open(again)).result(60)


def test_more_permits_than_were_needed_leave_the_connection_in_step(two: Two) -> None:
    """Bursts are shorter than a unit, so each of them moves more than it may."""
    for _ in range(2):
        two.receiver.bytes[:] = POISON
        crossing = Crossing(burst_bytes=100)
        running = two.start(two.open(crossing))
        crossing.let(3 * LAYER_BYTES // 100 - 3)
        until_landed(two, 2)
        crossing.let(3)
        running.result(60)
        assert sum(crossing.asked) == 3 * LAYER_BYTES


def test_a_transfer_of_nothing_has_its_turn_too(two: Two) -> None:
    crossing = Crossing()
    running = two.start(replace(two.open(crossing), pieces=()))
    crossing.wait_for(1)
    crossing.let(1)
    assert running.result(60) == []
    two.start(two.open(ALWAYS)).result(60)


def test_a_fence_does_not_wait_for_a_burst_that_may_not_go_on(two: Two) -> None:
    crossing = Crossing()
    manifest = two.open(crossing)
    running = two.start(manifest)
    crossing.let(1)
    crossing.wait_for(2)
    until_landed(two, 0)
    quiesced = threading.Event()
    two.receiver.door.fence(manifest.key, quiesced.set)
    assert quiesced.wait(30)
    crossing.let(2)
    with pytest.raises(TransferError):
        running.result(60)
    assert two.untouched_layers()[1:] == [True, True]


def test_who_may_not_go_on_at_all_ends_and_leaves(two: Two) -> None:
    crossing = Crossing()
    manifest = two.open(crossing)
    running = two.start(manifest)
    crossing.let(1)
    crossing.wait_for(2)
    crossing.closed = True
    crossing.let(1)
    with pytest.raises(TransferError, match="not any more"):
        running.result(60)
    two.channel.close()
    quiesced = threading.Event()
    two.receiver.door.fence(manifest.key, quiesced.set)
    assert quiesced.wait(30)


def test_a_header_that_promises_more_permits_than_come_costs_only_its_own_transfer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = Peer("shm", "sender", tmp_path, Timing(), Faults())
    receiver = Peer("shm", "receiver", tmp_path, Timing(stall_s=0.3), Faults())
    key, secret = new_ticket()
    receiver.door.open(key, secret, TABLE)
    channel = sender.backend.connect(receiver.address)
    monkeypatch.setattr("shared.transfer.shm._PART_BURSTS", 1)
    monkeypatch.setattr("shared.transfer.shm.PERMIT", b"")
    crossing = Crossing()
    crossing.let(3)
    with pytest.raises(TransferError) as caught:
        channel.transfer(Manifest(key, secret, (PIECE,), turn=crossing), is_set())
    assert not isinstance(caught.value, TransferRefused)
    assert receiver.door.snapshot()[1]["failed_transfer_timeout"] == 1
    done = threading.Event()
    receiver.door.fence(key, done.set)
    assert done.is_set()
    channel.close()
    sender.close()
    receiver.close()


def test_permits_are_counted_in_bytes() -> None:
    """A burst that ran over takes from the next one."""

    class Stub:
        def __init__(self) -> None:
            self.taken: list[int] = []

        def receive_within(self, limit: int, _wait_s: float) -> bytes:
            self.taken.append(limit)
            return b"."

    stub = Stub()
    permits = Permits(stub, 10, 3, 1.0)  # type: ignore[arg-type]
    grant: object = type("G", (), {"stopped": threading.Event()})()
    assert permits.wait(grant)  # type: ignore[arg-type]
    permits.spend(25)
    assert permits.wait(grant)  # type: ignore[arg-type]
    assert stub.taken == [3, 2, 1]
    permits.settle(grant)  # type: ignore[arg-type]
    assert stub.taken == [3, 2, 1]
