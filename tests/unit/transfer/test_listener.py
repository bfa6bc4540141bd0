"""The thread that accepts peers lives as long as its listener, whatever happens to one of them."""

import socket
import struct
import threading
from collections.abc import Iterator

import pytest

from shared.transfer import listener as module
from shared.transfer.backend import Timing
from shared.transfer.connection import Connection
from shared.transfer.door import Door
from shared.transfer.listener import Listener
from shared.transfer.wire import Hello, Malformed
from tests.unit.transfer.test_door import LAYOUT


def refuse(_connection: Connection) -> None:
    raise Malformed("malformed: nobody is greeted here")


@pytest.fixture
def door() -> Door:
    return Door(LAYOUT, lambda _key, _backend: None)


@pytest.fixture
def listener(door: Door) -> Iterator[Listener]:
    sock = socket.create_server(("127.0.0.1", 0))
    listener = Listener(sock, "tcp", "boot", door, refuse, Timing())  # type: ignore[arg-type]
    yield listener
    listener.close()


def hello(listener: Listener) -> Hello | None:
    """What it says first, None where it just hangs up."""
    with socket.create_connection(listener._sock.getsockname(), timeout=10) as peer:
        stream = peer.makefile("rb")
        size = stream.read(4)
        return Hello.model_validate_json(stream.read(*struct.unpack("!I", size))) if len(size) == 4 else None


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), MemoryError(), OSError("no descriptor")])
def test_a_peer_that_cannot_be_served_costs_nobody_else_anything(
    listener: Listener, door: Door, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    start, failures = threading.Thread.start, [error, error]

    def failing(thread: threading.Thread) -> None:
        if thread.name.endswith("-receive") and failures:
            raise failures.pop()
        start(thread)

    monkeypatch.setattr(module.threading.Thread, "start", failing)
    assert hello(listener) is None
    assert hello(listener) is None
    answer = hello(listener)
    assert answer is not None
    assert answer.boot_id == "boot"
    assert door.snapshot()[1]["accept_errors"] == 2
    assert listener._thread.is_alive()
