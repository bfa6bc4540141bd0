"""The private socket between a worker and its sidecar: whatever one side says, the other answers, or ends in order."""

import asyncio
import itertools
import json
import os
import random
import socket
import struct
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.protocol.reports import LinkAddress
from shared.transfer.control import (
    FROM_SIDECAR,
    FROM_WORKER,
    MAX_FRAME_BYTES,
    POOL_BYTE,
    Ask,
    Attach,
    ControlError,
    FrameBuffer,
    Moving,
    Open,
    Ping,
    Ready,
    Reply,
    Send,
    frame,
    from_sidecar,
    from_worker,
)
from shared.transfer.link import Piece
from shared.transfer.pool import create_pool
from tests.contract.transfer_links import LAYOUT

ADDRESS = LinkAddress(boot_id="b", host="127.0.0.1", port=1, socket="s", backends=("tcp",))
TICKET: dict[str, Any] = {"id": 1, "room": 1, "generation": 1}
MESSAGES = [
    Attach(layout=LAYOUT),
    Ready(address=ADDRESS),
    Open(**TICKET, secret=b"s", units=((1,), (1,), (1,), (1,))),
    Send(**TICKET, secret=b"s", peer=ADDRESS, pieces=(Piece(0, 0, (1,), 1),)),
    Ask(**TICKET, kind="fence"),
    Ping(id=1),
    Reply(id=1),
    Moving(room=1, generation=1, backend="tcp", receiving=True),
]
ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.lists(st.integers(), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


@given(message=st.sampled_from(MESSAGES), key=st.integers(0, 9), value=ODD, cut=st.integers(0, 400))
def test_odd_messages_are_refused_as_such(message: Any, key: int, value: object, cut: int) -> None:
    document = json.loads(message.model_dump_json())
    names = sorted(document)
    document[names[key % len(names)]] = value
    for body in (json.dumps(document).encode(), message.model_dump_json().encode()[:cut], b"[" * cut):
        for parse, kinds in ((from_worker, FROM_WORKER), (from_sidecar, FROM_SIDECAR)):
            try:
                assert parse(body) == kinds.validate_json(body)
            except ControlError:
                continue


@given(
    bodies=st.lists(st.binary(max_size=6), max_size=4),
    rest=st.binary(max_size=6),
    cuts=st.lists(st.integers(0, 40), max_size=4),
)
def test_a_frame_comes_whole_or_not_at_all(bodies: list[bytes], rest: bytes, cuts: list[int]) -> None:
    """However the stream is cut, the frames of a plain reading of all of it, and no end beyond the limit."""
    data = b"".join(struct.pack("!I", len(body)) + body for body in bodies) + rest
    wanted, at = [], 0
    while len(data) - at >= 4:
        size = struct.unpack_from("!I", data, at)[0]
        if size > MAX_FRAME_BYTES or len(data) - at - 4 < size:
            break
        wanted.append(data[at + 4 : at + 4 + size])
        at += 4 + size
    too_long = len(data) - at >= 4 and struct.unpack_from("!I", data, at)[0] > MAX_FRAME_BYTES
    frames, found = FrameBuffer(), []
    places = [0, *sorted(cuts), len(data)]
    try:
        for start, end in itertools.pairwise(places):
            found.extend(frames.feed(data[start:end]))
    except ControlError:
        assert too_long
    else:
        assert not too_long
    assert found == wanted


class Process:
    """A sidecar whose worker is this test."""

    def __init__(self, child: asyncio.subprocess.Process, ours: socket.socket, log: Path) -> None:
        self.child, self.ours, self.log = child, ours, log

    def read(self) -> Any:
        (size,) = struct.unpack("!I", self._exactly(4))
        return from_sidecar(self._exactly(size))

    def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            part = self.ours.recv(size - len(data))
            assert part, f"the sidecar is gone:\n{self.log.read_text()}"
            data += part
        return data


@pytest.fixture
async def sidecar(tmp_path: Path) -> AsyncIterator[Process]:
    ours, theirs = socket.socketpair()
    pool, log = create_pool(LAYOUT), tmp_path / "log"
    flags = ("--control-fd", str(theirs.fileno()), "--ipc-dir", str(tmp_path / "ipc"), "--nats-url", "")
    with theirs, log.open("wb") as output:
        socket.send_fds(ours, [POOL_BYTE], [pool])
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "services.sidecar", *flags, pass_fds=(theirs.fileno(),), stderr=output
        )
    ours.settimeout(60)
    yield Process(child, ours, log)
    ours.close()
    async with asyncio.timeout(60):
        await child.wait()
    os.close(pool)


@pytest.mark.parametrize(
    "said", [frame(Attach(layout=LAYOUT)) + struct.pack("!I", 9) + b"not JSON!", frame(Ping(id=1))]
)
async def test_a_worker_that_says_nonsense_has_no_sidecar_any_more(sidecar: Process, said: bytes) -> None:
    """It never guesses: its end is the worker's proof that nothing moves."""
    sidecar.ours.sendall(said)
    async with asyncio.timeout(60):
        assert await sidecar.child.wait() != 0
    assert "ControlError" in sidecar.log.read_text()


async def test_odd_requests_are_answered_and_it_lives_on(sidecar: Process) -> None:
    """Units outside the pool, twice or of no component; tickets nobody opened; peers that are not there."""
    rng = random.Random(4)
    sidecar.ours.sendall(frame(Attach(layout=LAYOUT)))
    assert isinstance(await asyncio.to_thread(sidecar.read), Ready)
    nobody = LinkAddress(boot_id="x", host="127.0.0.1", port=1, socket="../../x", backends=("tcp", "shm", "odd"))

    def some_units() -> tuple[int, ...]:
        return tuple(rng.choice([-1, 0, 1, 1, 5, 23, 24, 10**9, -(1 << 31)]) for _ in range(rng.randrange(4)))

    def request(id: int) -> Open | Send | Ask:
        ticket = {"id": id, "room": rng.choice([1, 2, (1 << 63) - 1]), "generation": rng.choice([1, 2, 10**20])}
        kind = rng.randrange(3)
        if kind == 0:
            tables = tuple(some_units() for _ in range(rng.choice([0, 3, 4, 4, 5])))
            return Open(**ticket, secret=rng.choice([b"", b"s"]), units=tables)
        if kind == 1:
            piece = Piece(rng.choice([-1, 0, 3, 4]), rng.choice([-1, 0, 10**30]), some_units(), rng.choice([0, 1, 9]))
            return Send(**ticket, secret=b"s", peer=nobody, pieces=(piece,) * rng.randrange(3))
        return Ask(**ticket, kind=rng.choice(["received", "fence", "sent", "forget"]))

    for id in range(1, 401):
        sidecar.ours.sendall(frame(request(id)))
    sidecar.ours.sendall(frame(Ping(id=999)))
    answers: dict[int, Reply] = {}
    while len(answers) < 401:
        message = await asyncio.to_thread(sidecar.read)
        if isinstance(message, Reply):
            answers[message.id] = message
    assert set(answers) == {*range(1, 401), 999}
    codes = {answer.code for answer in answers.values()}
    assert codes <= {"", "invalid_request", "unknown_room", "transfer_refused", "peer_lost", "transfer_failed"}, codes
    assert len(codes) >= 4
    assert "Traceback" not in sidecar.log.read_text()
