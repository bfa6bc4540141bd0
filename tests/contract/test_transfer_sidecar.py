"""What only links with real sidecars do: processes die, freeze, restart and are shouted at."""

import asyncio
import os
import secrets
import signal
import socket
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import psutil
import pytest
import pytest_asyncio

from shared.runtime.errors import PeerLost, TransferError, TransferRefused, UnknownRoom
from shared.transfer import sidecar_process
from shared.transfer.link import Piece, TicketKey
from shared.transfer.sidecar_options import SidecarOptions
from tests.contract.transfer_links import LAYOUT, NIXL, POISON, Pair, Side, Wanted, make_pair, new_ticket, sidecar_side

pytestmark = pytest.mark.asyncio(loop_scope="module")
KINDS = ["shm", "tcp", NIXL]
TABLE = ((3, 4, 9), (), (), ())
PIECES = (Piece(0, 0, (7, 8, 2), 3),)
Eventually = Callable[[Callable[[], bool]], Awaitable[None]]


@pytest_asyncio.fixture(loop_scope="module", scope="module", params=KINDS)
async def kept_pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
    pair = await make_pair(request.param, tmp_path_factory.mktemp("ipc"), Wanted(delay_s=0.4))
    yield pair
    await pair.close()


@pytest.fixture
def pair(kept_pair: Pair) -> Pair:
    kept_pair.sender.scramble()
    kept_pair.receiver.poison()
    return kept_pair


async def opened(pair: Pair) -> tuple[TicketKey, bytes, asyncio.Event]:
    key, secret = new_ticket()
    first = asyncio.Event()
    await pair.receiver.link.open(key, secret, TABLE, lambda _key: first.set())
    return key, secret, first


async def outcome(pair: Pair, key: TicketKey, secret: bytes) -> Exception | None:
    try:
        await pair.sender.link.send(key, secret, pair.receiver.link.address, PIECES)
    except Exception as error:
        return error
    return None


async def exchange(pair: Pair) -> None:
    """A transfer that must work."""
    key, secret, _ = await opened(pair)
    assert await outcome(pair, key, secret) is None
    assert await pair.receiver.link.received(key) == await pair.sender.link.sent(key)
    await pair.receiver.link.fence(key)
    await pair.sender.link.forget(key)


async def test_a_peer_that_dies_is_noticed_at_once(pair: Pair, eventually: Eventually) -> None:
    key, secret, first = await opened(pair)
    restarts = len(pair.receiver.restarts)
    pair.receiver.lost.clear()
    old = pair.receiver.link.address
    async with asyncio.TaskGroup() as tasks:
        sending = tasks.create_task(outcome(pair, key, secret))
        await asyncio.wait_for(first.wait(), 30)
        started = time.monotonic()
        os.kill(pair.receiver.link.pid, signal.SIGKILL)
        assert isinstance(await sending, PeerLost)
        assert time.monotonic() - started < 10.0, "a stall is found after 15 s only"
    # Nothing that was receiving is held up, and a new boot takes over.
    await asyncio.wait_for(pair.receiver.link.fence(key), 12)
    await eventually(lambda: len(pair.receiver.restarts) == restarts + 1)
    assert pair.receiver.link.address.boot_id != old.boot_id
    with pytest.raises(PeerLost):
        await pair.sender.link.send(key, secret, old, PIECES)
    await pair.sender.link.forget(key)
    await exchange(pair)


async def test_its_own_sidecar_dies_under_both_sides(pair: Pair, eventually: Eventually) -> None:
    key, secret, first = await opened(pair)
    restarts = len(pair.sender.restarts)
    async with asyncio.TaskGroup() as tasks:
        sending = tasks.create_task(outcome(pair, key, secret))
        await asyncio.wait_for(first.wait(), 30)
        os.kill(pair.sender.link.pid, signal.SIGKILL)
        assert isinstance(await sending, PeerLost)
    await asyncio.wait_for(pair.sender.link.forget(key), 12)
    # The receiver can still fence, though its sender never said a word.
    await asyncio.wait_for(pair.receiver.link.fence(key), 12)
    pair.receiver.poison()
    await eventually(lambda: len(pair.sender.restarts) == restarts + 1)
    assert (pair.receiver.pool == POISON).all()
    await exchange(pair)


async def test_lost_tickets_are_named_and_unknown_afterwards(pair: Pair, eventually: Eventually) -> None:
    key, _, _ = await opened(pair)
    pair.receiver.lost.clear()
    restarts = len(pair.receiver.restarts)
    asking = pair.receiver.link.received(key)
    os.kill(pair.receiver.link.pid, signal.SIGKILL)
    with pytest.raises(PeerLost):
        await asking
    await eventually(lambda: len(pair.receiver.restarts) == restarts + 1)
    assert pair.receiver.lost == [key]
    with pytest.raises(UnknownRoom):
        await pair.receiver.link.received(key)
    await pair.receiver.link.fence(key)


async def test_a_frozen_sender_cannot_hold_a_fence(pair: Pair) -> None:
    key, secret, first = await opened(pair)
    pid = pair.receiver.link.pid
    async with asyncio.TaskGroup() as tasks:
        sending = tasks.create_task(outcome(pair, key, secret))
        await asyncio.wait_for(first.wait(), 30)
        os.kill(pair.sender.link.pid, signal.SIGSTOP)
        try:
            await pair.receiver.link.fence(key)
            assert psutil.pid_exists(pid), "one that does not answer in 5 s is killed"
            pair.receiver.poison()
        finally:
            os.kill(pair.sender.link.pid, signal.SIGCONT)
        assert isinstance(await sending, TransferError)
    assert (pair.receiver.pool == POISON).all()
    await pair.sender.link.forget(key)
    await exchange(pair)


async def test_a_hung_sidecar_is_killed_rather_than_believed(eventually: Eventually, tmp_path: Path) -> None:
    options = SidecarOptions("hung", tmp_path, fence_timeout_s=0.3, ping_interval_s=60)
    side = await sidecar_side(options)
    key, secret = new_ticket()
    await side.link.open(key, secret, TABLE, lambda _key: None)
    pid = side.link.pid
    os.kill(pid, signal.SIGSTOP)
    await asyncio.wait_for(side.link.fence(key), 5)
    assert not psutil.pid_exists(pid)
    await eventually(lambda: side.restarts == ["up"])
    await side.close()


async def test_a_hung_sidecar_is_found_without_traffic(eventually: Eventually, tmp_path: Path) -> None:
    side = await sidecar_side(SidecarOptions("hung", tmp_path, ping_interval_s=0.05, hang_timeout_s=2.0))
    os.kill(side.link.pid, signal.SIGSTOP)
    started, pid = time.monotonic(), side.link.pid
    await eventually(lambda: side.link.pid != pid)
    assert time.monotonic() - started < 9.0, "one that is asked nothing has 10 s, unless the options say otherwise"
    await eventually(lambda: "up" in side.restarts)
    await side.close()


async def test_an_end_that_is_cut_short_leaves_no_frozen_sidecar(
    eventually: Eventually, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sidecar_process, "_CLOSE_S", 60.0)
    side = await sidecar_side(SidecarOptions("frozen", tmp_path, ping_interval_s=60))
    pid = side.link.pid
    os.kill(pid, signal.SIGSTOP)
    ending = asyncio.get_running_loop().create_task(side.link.close())
    await eventually(lambda: side.link.pid is None)
    ending.cancel()
    await eventually(lambda: not psutil.pid_exists(pid))


async def test_silence_is_measured(eventually: Eventually, tmp_path: Path) -> None:
    side = await sidecar_side(SidecarOptions("quiet", tmp_path, ping_interval_s=0.05, hang_timeout_s=60))
    await eventually(lambda: side.link.silent_s < 0.3)
    os.kill(side.link.pid, signal.SIGSTOP)
    await eventually(lambda: side.link.silent_s > 0.5)
    os.kill(side.link.pid, signal.SIGCONT)
    await eventually(lambda: side.link.silent_s < 0.3)
    await side.close()


async def test_a_worker_that_stood_still_does_not_blame_its_sidecar(tmp_path: Path) -> None:
    side = await sidecar_side(SidecarOptions("well", tmp_path, fence_timeout_s=3.0))
    pid, key, secret = side.link.pid, *new_ticket()
    await side.link.open(key, secret, TABLE, lambda _key: None)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(side.link.fence(key))
        await asyncio.sleep(0)
        time.sleep(3.2)
    await side.link.counters()
    assert (side.link.pid, side.restarts) == (pid, [])
    await side.close()


async def test_a_restart_on_the_same_port_is_another_peer(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    options = SidecarOptions("p", tmp_path, transfer="tcp")
    sender = await sidecar_side(options)
    first = await sidecar_side(replace(options, tcp_port=port))
    old = first.link.address
    await first.close()
    second = await sidecar_side(replace(options, tcp_port=port))
    assert second.link.address.port == old.port
    key, secret = new_ticket()
    await second.link.open(key, secret, TABLE, lambda _key: None)
    with pytest.raises(PeerLost, match="restarted"):
        await sender.link.send(key, secret, old, PIECES)
    await sender.link.send(key, secret, second.link.address, PIECES)
    await sender.close()
    await second.close()


async def test_auto_takes_shm_on_one_host_and_tcp_between_hosts(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    sides = [await sidecar_side(SidecarOptions(name, tmp_path / name)) for name in ("one", "one", "two")]
    for receiver, backend in ((sides[1], "shm"), (sides[2], "tcp")):
        key, secret = new_ticket()
        await receiver.link.open(key, secret, TABLE, lambda _key: None)
        await sides[0].link.send(key, secret, receiver.link.address, PIECES)
        assert await receiver.link.received(key) == await sides[0].link.sent(key)
        assert sides[0].link.actual_backend(key) == receiver.link.actual_backend(key) == backend
    for side in sides:
        await side.close()
    assert os.listdir(tmp_path / "one") == os.listdir(tmp_path / "two") == []


@pytest_asyncio.fixture(loop_scope="module", scope="module", params=KINDS)
async def fast(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[Pair, Path]]:
    """Without injected delays, and the directory of their sockets."""
    directory = tmp_path_factory.mktemp("fast")
    pair = await make_pair(request.param, directory)
    yield pair, directory
    await pair.close()


def connect(pair: Pair, directory: Path) -> socket.socket:
    address = pair.receiver.link.address
    if pair.kind != "shm":
        port = int(address.endpoint(pair.kind) or address.port)
        return socket.create_connection((address.host, port), timeout=30)
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(30)
    sock.connect(str(directory / address.socket))
    return sock


async def test_noise_is_refused_and_survived(fast: tuple[Pair, Path]) -> None:
    pair, directory = fast
    pair.receiver.poison()
    pair.sender.scramble()
    key, secret, first = await opened(pair)
    random = Random(5)

    def shout() -> None:
        for attempt in range(60):
            with connect(pair, directory) as sock:
                noise = random.randbytes(random.choice([1, 3, 4, 40, 400, 5000]))
                framed = struct.pack("!I", len(noise)) + noise
                deep = struct.pack("!I", 2000) + b"[" * 2000
                try:
                    sock.sendall([noise, framed, deep, struct.pack("!I", 1 << 31)][attempt % 4])
                    sock.shutdown(socket.SHUT_WR)
                    while sock.recv(4096):
                        pass
                except TimeoutError:
                    raise
                except OSError:  # cut off, perhaps before all was said
                    continue

    await asyncio.to_thread(shout)
    counters = await pair.receiver.counters()
    assert counters.get("connection_errors", 0) == 0
    assert counters["refused_malformed"] + counters.get("refused_no_pool", 0) >= 15
    assert (pair.receiver.pool == POISON).all()
    assert not first.is_set()
    assert await outcome(pair, key, secret) is None
    assert pair.receiver.restarts == []


def resources(side: Side) -> tuple[int, int, int]:
    process = psutil.Process(side.link.pid)
    return process.num_fds(), process.num_threads(), process.memory_info().rss


def is_flat(grown: list[tuple[int, ...]]) -> bool:
    return all(fds <= 1 and threads <= 1 and rss < 1 << 20 for fds, threads, rss in grown)


async def test_tickets_leave_nothing_behind(fast: tuple[Pair, Path]) -> None:
    pair, _ = fast

    async def tickets(count: int) -> None:
        for k in range(count):
            key, secret, _ = await opened(pair)
            if k % 4 == 1:
                with pytest.raises(TransferRefused):
                    await pair.sender.link.send(key, secrets.token_bytes(16), pair.receiver.link.address, PIECES)
            elif k % 4 != 2:
                await pair.sender.link.send(key, secret, pair.receiver.link.address, PIECES)
            await pair.receiver.link.fence(key)
            await pair.sender.link.forget(key)

    async def grown() -> list[tuple[int, ...]]:
        before = [resources(side) for side in (pair.sender, pair.receiver)]
        await tickets(200)
        after = [resources(side) for side in (pair.sender, pair.receiver)]
        return [tuple(a - b for a, b in zip(*pair, strict=True)) for pair in zip(after, before, strict=True)]

    await tickets(40)
    # What happens once (a first warning, say) may cost memory in one round; what tickets leave behind does in all.
    rounds: list[list[tuple[int, ...]]] = []
    while not rounds or (len(rounds) < 4 and not is_flat(rounds[-1])):
        rounds.append(await grown())
    assert is_flat(rounds[-1]), rounds


async def test_many_peers_that_come_and_go_leave_nothing_behind(tmp_path: Path, eventually: Eventually) -> None:
    """A peer's boots are not remembered: their channels, mappings and sockets go with them."""
    options = SidecarOptions("p", tmp_path)
    sender = await sidecar_side(options)
    first: int | None = None
    for _ in range(4):
        receiver = await sidecar_side(options)
        key, secret = new_ticket()
        await receiver.link.open(key, secret, TABLE, lambda _key: None)
        await sender.link.send(key, secret, receiver.link.address, PIECES)
        await sender.link.forget(key)
        first = first or resources(sender)[0]
        # The channel to the peer before closes a moment after that one has gone.
        await eventually(lambda most=first: resources(sender)[0] <= most)
        await receiver.close()
    await sender.close()


async def test_layout_of_the_suite_has_every_kind_of_component() -> None:
    assert {component.index.value for component in LAYOUT.components} == {"page", "request", "ring"}
