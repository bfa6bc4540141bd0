"""Frames between two ends on one loop, and from threads."""

import asyncio
import socket
import struct
import threading

import pytest

from shared.runtime.errors import TransferRefused
from shared.transfer.control import ControlError, Open, frame
from shared.transfer.control_socket import ControlSocket


def framed(body: bytes) -> bytes:
    return struct.pack("!I", len(body)) + body


class End:
    """What one end was told."""

    def __init__(self, sock: socket.socket) -> None:
        self.frames: list[bytes] = []
        self.ends: list[Exception | None] = []
        self.changed = asyncio.Event()
        self.socket = ControlSocket(sock, self._on_frame, self._on_end)

    def _on_frame(self, body: bytes) -> None:
        if body == b"odd":
            raise ControlError("odd")
        self.frames.append(body)
        self.changed.set()

    def _on_end(self, error: Exception | None) -> None:
        self.ends.append(error)
        self.changed.set()

    async def until(self, num_frames: int = 0, ends: int = 0) -> None:
        async with asyncio.timeout(60):
            while len(self.frames) < num_frames or len(self.ends) < ends:
                self.changed.clear()
                await self.changed.wait()


@pytest.fixture
async def ends() -> tuple[End, End]:
    a, b = socket.socketpair()
    return End(a), End(b)


async def test_frames_of_a_thread_come_whole_and_in_order(ends: tuple[End, End]) -> None:
    """Far more than the socket holds at once, so most of it has to wait for the reader."""
    left, right = ends
    bodies = [bytes([number]) * (1 + 40_000 * (number % 7)) for number in range(100)]
    sending = threading.Thread(target=lambda: [left.socket.send(framed(body)) for body in bodies])
    sending.start()
    await right.until(num_frames=len(bodies))
    sending.join()
    assert right.frames == bodies
    left.socket.send(framed(b"more"))
    right.socket.send(framed(b"back"))
    await right.until(num_frames=len(bodies) + 1)
    await left.until(num_frames=1)
    left.socket.close()
    await right.until(ends=1)
    assert (left.ends, right.ends) == ([None], [None])
    left.socket.send(framed(b"after the end"))
    left.socket.close()
    assert left.ends == [None]


async def test_what_breaks_the_protocol_ends_it(ends: tuple[End, End]) -> None:
    left, right = ends
    left.socket.send(framed(b"good") + framed(b"odd") + framed(b"never seen"))
    await right.until(ends=1)
    assert right.frames == [b"good"]
    assert isinstance(right.ends[0], ControlError)
    await left.until(ends=1)


async def test_who_reads_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.transfer.control_socket._MOST_UNSENT_BYTES", 1 << 20)
    a, b = socket.socketpair()
    left = End(a)
    for _ in range(40):
        left.socket.send(framed(bytes(100_000)))
    await left.until(ends=1)
    assert isinstance(left.ends[0], ControlError)
    b.close()


async def test_what_waits_goes_first_and_then_nobody_waits_any_more() -> None:
    a, b = socket.socketpair()
    left, loop = End(a), asyncio.get_running_loop()
    b.setblocking(False)
    first = framed(bytes(3_000_000))
    left.socket.send(first)
    data = b.recv(1 << 22)
    assert len(data) < len(first)
    left.socket.send(framed(b"second"))  # there is room again, and the loop has not sent what waits
    while len(data) < len(first) + len(framed(b"second")):
        data += await asyncio.wait_for(loop.sock_recv(b, 1 << 22), 60)
    assert data == first + framed(b"second")
    await asyncio.sleep(0)
    assert not loop.remove_writer(a)
    left.socket.close()
    b.close()


def test_a_message_that_the_other_side_would_not_read_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would end the sidecar, and all transfers with it."""
    message = Open(id=1, room=1, generation=1, secret=b"s", units=(tuple(range(300)),))
    monkeypatch.setattr("shared.transfer.control.MAX_FRAME_BYTES", len(frame(message)) - 4)
    frame(message)
    monkeypatch.setattr("shared.transfer.control.MAX_FRAME_BYTES", len(frame(message)) - 5)
    with pytest.raises(TransferRefused, match="too_long"):
        frame(message)
