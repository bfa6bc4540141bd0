"""The driver `redis` on a real server that is killed, frozen, full, read-only, shared, and meddled with."""

import asyncio
import re
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from benchmarks.store_servers import NO_VALKEY, VALKEY, Valkey
from shared.runtime.errors import StoreFull, StoreUnavailable
from shared.store.driver import BlockRecord
from shared.store.options import DriverOptions
from shared.store.record import HEADER_BYTES, VERSION
from shared.store.redis import RedisDriver
from tests.contract.store_drivers import NAMESPACE, cut, get_bytes, key_of, listed, payload, put_bytes, record_of
from tests.support_certificates import Certificates, make_certificates, needs_openssl
from tests.support_relay import Relay

pytestmark = pytest.mark.skipif(VALKEY is None, reason=NO_VALKEY)

_MIB = 1 << 20
LARGE = 24 * _MIB
"""More than the sockets between the two ends hold."""
NowAndThen = Callable[..., Valkey]


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[NowAndThen]:
    """Starts servers of this test alone."""
    started: list[Valkey] = []

    def start(*settings: str, password: str = "") -> Valkey:
        server = Valkey(tmp_path / f"valkey{len(started)}", *settings, password=password)
        started.append(server)
        server.start()
        return server

    yield start
    for server in started:
        server.kill()


@asynccontextmanager
async def opened(url: str, limit_bytes: int | None = None) -> AsyncIterator[RedisDriver]:
    driver = RedisDriver.from_options(DriverOptions(where=url, limit_bytes=limit_bytes))
    try:
        await driver.open()
        yield driver
    finally:
        await driver.close()


def name_of(key: bytes) -> bytes:
    return f"baton:{VERSION}:{key.hex()}".encode()


async def works_again(driver: RedisDriver, key: bytes, data: bytes) -> None:
    """The driver finds its server again by itself, soon."""
    async with asyncio.timeout(30):
        while True:
            try:
                await put_bytes(driver, key, data)
                break
            except StoreUnavailable:
                await asyncio.sleep(0.02)
    assert await get_bytes(driver, key, len(data)) == data


async def test_a_server_killed_in_the_middle_of_a_put(valkey: NowAndThen) -> None:
    """Its append-only file has what was put before, and nothing of the block that was on its way."""
    server = valkey("appendonly yes", "appendfsync always")
    old, new, key = payload(_MIB, 1), payload(LARGE, 2), key_of(1)
    relay = Relay(server.port, up=LARGE // 2)
    async with relay.open(), opened(server.url()) as direct, opened(server.url(port=relay.port)) as driver:
        await put_bytes(direct, key, old)
        async with asyncio.TaskGroup() as group:
            putting = group.create_task(attempt(put_bytes(driver, key, new)))
            await relay.held.wait()
            server.kill()
            relay.cut()
        assert isinstance(await putting, StoreUnavailable)
        relay.release()
        with pytest.raises(StoreUnavailable):
            await put_bytes(direct, key, new)
        server.start()
        assert await found_after_all(direct, key, len(old)) == old
        assert [record.num_bytes for record in (await listed(direct)).values()] == [len(old)]
        await works_again(driver, key, new)


async def found_after_all(driver: RedisDriver, key: bytes, num_bytes: int) -> bytes | None:
    async with asyncio.timeout(30):
        while True:
            try:
                return await get_bytes(driver, key, num_bytes)
            except StoreUnavailable:
                await asyncio.sleep(0.02)


async def attempt(work: object) -> BaseException | None:
    try:
        await work  # type: ignore[misc]
    except (StoreFull, StoreUnavailable) as error:
        return error
    return None


async def test_a_server_killed_in_the_middle_of_a_get(valkey: NowAndThen) -> None:
    server = valkey()
    data, key = payload(LARGE, 1), key_of(1)
    relay = Relay(server.port)
    async with relay.open(), opened(server.url(port=relay.port)) as driver:
        await put_bytes(driver, key, data)
        relay.down = LARGE // 2
        async with asyncio.TaskGroup() as group:
            getting = group.create_task(attempt(get_bytes(driver, key, len(data))))
            await relay.held.wait()
            server.kill()
            relay.cut()
        assert isinstance(await getting, StoreUnavailable)
        relay.release()
        server.start()
        assert await found_after_all(driver, key, len(data)) is None, "it kept nothing on its disk"
        await works_again(driver, key, data)


async def test_the_caller_s_memory_is_let_alone_once_a_call_has_ended(valkey: NowAndThen) -> None:
    """By a time limit, and by a cancellation: what comes afterwards goes nowhere."""
    server = valkey()
    data, key = payload(LARGE, 1), key_of(1)
    for cancelled in (False, True):
        relay = Relay(server.port)
        limit_s = 60 if cancelled else 1
        async with relay.open(), opened(server.url(f"timeout_s={limit_s}", port=relay.port)) as driver:
            await put_bytes(driver, key, data)
            relay.down, room = LARGE // 2, bytearray(LARGE)
            async with asyncio.TaskGroup() as group:
                getting = group.create_task(attempt(driver.get(key, NAMESPACE, cut(room, (1000, 2000)))))
                await relay.held.wait()
                if cancelled:
                    getting.cancel()
            if not cancelled:
                assert "took longer than 1 s" in str(await getting)
            assert any(room), "some of it had come"
            room[:] = bytes(LARGE)
            relay.release()
            assert await get_bytes(driver, key, len(data)) == data, "the next call has a connection of its own"
            assert not any(room)


async def test_a_frozen_server_costs_a_call_its_time_and_no_more(valkey: NowAndThen) -> None:
    server = valkey()
    key, data = key_of(1), payload(LARGE, 1)
    async with opened(server.url("timeout_s=0.5&connect_s=0.2")) as driver, asyncio.timeout(60):
        await put_bytes(driver, key, data)
        with server.frozen():
            for work in (lambda: put_bytes(driver, key, data), lambda: get_bytes(driver, key, LARGE)):
                assert isinstance(await attempt(work()), StoreUnavailable)
            assert isinstance(await attempt(driver.delete(key)), StoreUnavailable)
            with pytest.raises(StoreUnavailable):
                await listed(driver)
        await works_again(driver, key_of(2), payload(_MIB, 2))


async def test_who_has_no_password_or_a_wrong_one_is_told_so(valkey: NowAndThen) -> None:
    server = valkey(password="s3cret")
    async with opened(server.url()) as driver:
        await put_bytes(driver, key_of(1), b"x" * 100)
    for password, said in (("wr0ng", "WRONGPASS"), ("", "NOAUTH")):
        with pytest.raises(StoreUnavailable, match=said) as caught:
            async with opened(server.url(password=password)):
                pass
        assert "wr0ng" not in str(caught.value)
        assert "s3cret" not in str(caught.value)


async def test_a_full_server_refuses_and_serves_what_it_has(valkey: NowAndThen) -> None:
    server = valkey("maxmemory 32mb", "maxmemory-policy noeviction")
    data = payload(8 * _MIB, 1)
    async with opened(server.url()) as driver:
        stored = 0
        while (error := await attempt(put_bytes(driver, key_of(stored), data))) is None:
            stored += 1
            assert stored < 5, "32 MiB are full"
        assert isinstance(error, StoreFull)
        assert stored > 0
        assert driver.usage()[1] == 32 * _MIB
        assert len(await listed(driver)) == stored
        assert await get_bytes(driver, key_of(0), len(data)) == data
        assert await get_bytes(driver, key_of(stored), len(data)) is None
        await driver.delete(key_of(0))
        await put_bytes(driver, key_of(stored), data)
        assert "evicts nothing" in driver.durability


async def test_what_the_server_evicted_is_not_there(valkey: NowAndThen) -> None:
    server = valkey("maxmemory 32mb", "maxmemory-policy allkeys-lru")
    data = payload(4 * _MIB, 1)
    async with opened(server.url()) as driver:
        for number in range(12):
            await put_bytes(driver, key_of(number), data)
        found = [await get_bytes(driver, key_of(number), len(data)) for number in range(12)]
        assert found[-1] == data
        assert None in found
        assert {one for one in found if one is not None} == {data}
        assert "evicts blocks when its memory is full (allkeys-lru)" in driver.durability


async def test_more_than_our_own_limit_is_refused(valkey: NowAndThen) -> None:
    async with opened(valkey().url(), limit_bytes=16 * _MIB) as driver:
        await put_bytes(driver, key_of(1), payload(8 * _MIB, 1))
        with pytest.raises(StoreFull, match="16777216 bytes are all"):
            await put_bytes(driver, key_of(2), payload(8 * _MIB, 2))
        assert driver.usage()[1] == 16 * _MIB


async def test_a_block_larger_than_a_value_may_be(valkey: NowAndThen) -> None:
    async with opened(valkey("proto-max-bulk-len 1mb").url()) as driver:
        with pytest.raises(StoreFull, match="a value of this server has 1048576 at most"):
            await put_bytes(driver, key_of(1), payload(_MIB, 1))
        await put_bytes(driver, key_of(1), payload(_MIB - HEADER_BYTES, 1))


async def test_a_replica_takes_nothing(valkey: NowAndThen) -> None:
    server = valkey()
    async with opened(server.url()) as driver:
        await put_bytes(driver, key_of(1), b"x" * 100)
        server.ask(b"REPLICAOF", b"127.0.0.1", b"1")
        with pytest.raises(StoreUnavailable, match="READONLY"):
            await put_bytes(driver, key_of(2), b"x" * 100)
        server.ask(b"REPLICAOF", b"NO", b"ONE")
        await works_again(driver, key_of(2), b"x" * 100)


@pytest.mark.parametrize("offset", [0, 100, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 99_999])
async def test_a_changed_byte_is_seen_and_the_block_dropped(valkey: NowAndThen, offset: int) -> None:
    server, key = valkey(), key_of(1)
    async with opened(server.url()) as driver:
        await put_bytes(driver, key, payload(100_000, 1))
        byte = server.ask(b"GETRANGE", name_of(key), b"%d" % offset, b"%d" % offset)
        assert isinstance(byte, bytes)
        server.ask(b"SETRANGE", name_of(key), b"%d" % offset, bytes([byte[0] ^ 1]))
        assert await get_bytes(driver, key, 100_000) is None
        assert server.ask(b"EXISTS", name_of(key)) == 0
        await works_again(driver, key, payload(100_000, 1))


@pytest.mark.parametrize("size", [0, 1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 999])
async def test_a_value_of_another_length_is_never_listed_nor_served(valkey: NowAndThen, size: int) -> None:
    server, key, other = valkey(), key_of(1), key_of(2)
    async with opened(server.url()) as driver:
        for name in (key, other):
            await put_bytes(driver, name, payload(1000, 1))
        whole = server.ask(b"GET", name_of(key))
        assert isinstance(whole, bytes)
        server.ask(b"SET", name_of(key), whole[:size])
        assert await get_bytes(driver, key, 1000) is None
        assert server.ask(b"EXISTS", name_of(key)) == 0
        server.ask(b"SET", name_of(key), whole[:size])
        assert set(await listed(driver)) == {other}
        assert server.ask(b"EXISTS", name_of(key)) == 0


async def test_what_is_not_ours_is_let_alone(valkey: NowAndThen) -> None:
    server, key = valkey(), key_of(1)
    names = (
        b"baton:%d:other" % VERSION,
        b"baton:%d:%b" % (VERSION, key_of(2).hex().upper().encode()),
        name_of(key_of(3)) + b"00",
        b"baton:x",
        b"x",
    )
    async with opened(server.url()) as driver:
        await put_bytes(driver, key, b"x" * 100)
        for name in names:
            server.ask(b"SET", name, b"theirs")
        server.ask(b"RPUSH", name_of(key_of(4)), b"a list under a block's name")
        assert set(await listed(driver)) == {key}
        assert await get_bytes(driver, key_of(4), 100) is None
        assert await get_bytes(driver, key_of(2), 100) is None
        assert [server.ask(b"EXISTS", name) for name in (*names, name_of(key_of(4)))] == [1] * 6
    async with opened(server.url()) as again, opened(server.url("prefix=other:")) as other:
        assert again.usage()[0] == HEADER_BYTES + 100
        assert await listed(other) == {}


async def test_several_databases_and_a_unix_socket(valkey: NowAndThen) -> None:
    server, key = valkey(), key_of(1)
    async with opened(server.url()) as driver, opened(f"unix://{server.socket_path}?database=3") as other:
        await put_bytes(other, key, b"x" * 100)
        assert await get_bytes(driver, key, 100) is None
        assert await get_bytes(other, key, 100) == b"x" * 100
        async with opened(server.url().replace("/0", "/3")) as third:
            assert await get_bytes(third, key, 100) == b"x" * 100


async def test_many_are_listed_once_each(valkey: NowAndThen) -> None:
    async with opened(valkey().url()) as driver:
        wanted = {(record := await put_bytes(driver, key_of(n), payload(10 + n, n))).key: record for n in range(700)}
        assert await listed(driver) == wanted


async def test_many_calls_at_once_share_few_connections(valkey: NowAndThen) -> None:
    server, key = valkey(), key_of(0)
    async with opened(server.url("connections=3")) as driver:
        async with asyncio.TaskGroup() as group:
            for number in range(40):
                group.create_task(put_bytes(driver, key, payload(200_000, 0)))
                group.create_task(same_or_none(driver, key, payload(200_000, 0)))
                group.create_task(put_bytes(driver, key_of(number + 1), payload(50_000, number)))
        assert len(await listed(driver)) == 41
        clients = server.ask(b"CLIENT", b"LIST")
        assert isinstance(clients, bytes)
        assert len(clients.splitlines()) == 3 + 1


async def same_or_none(driver: RedisDriver, key: bytes, data: bytes) -> None:
    assert await get_bytes(driver, key, len(data)) in (data, None)


async def test_a_server_that_is_away_is_not_tried_again_at_once(valkey: NowAndThen) -> None:
    server = valkey()
    relay = Relay(server.port)
    async with relay.open(), opened(server.url(port=relay.port)) as driver:
        await put_bytes(driver, key_of(1), b"x" * 100)
        relay.refusing, before = True, relay.num_connections
        relay.cut()
        for _ in range(200):
            assert isinstance(await attempt(get_bytes(driver, key_of(1), 100)), StoreUnavailable)
        assert 0 < relay.num_connections - before < 20
        relay.refusing = False
        await works_again(driver, key_of(1), b"y" * 100)


async def test_closing_ends_what_is_under_way(valkey: NowAndThen) -> None:
    server = valkey()
    relay = Relay(server.port, up=1 << 20)
    async with relay.open(), opened(server.url("timeout_s=200", port=relay.port)) as driver:
        async with asyncio.timeout(30), asyncio.TaskGroup() as group:
            putting = group.create_task(attempt(put_bytes(driver, key_of(1), payload(LARGE, 1))))
            await relay.held.wait()
            await driver.close()
        assert isinstance(await putting, StoreUnavailable)
        await driver.close()
        with pytest.raises(StoreUnavailable):
            await get_bytes(driver, key_of(1), 100)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@needs_openssl
async def test_tls(valkey: NowAndThen, certificates: Certificates) -> None:
    """Ended by the relay: the server of the package has none."""
    server, key, data = valkey(), key_of(1), payload(3 * _MIB, 1)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificates.server, certificates.server.with_suffix(".key"))
    relay = Relay(server.port)
    async with relay.open(tls):
        url = server.url(port=relay.port).replace("redis://", "rediss://")
        async with opened(f"{url}?ca_file={certificates.ca}") as driver:
            await put_bytes(driver, key, data)
            assert await get_bytes(driver, key, len(data)) == data
            assert set(await listed(driver)) == {key}
            before = relay.num_connections
            relay.cut()
            assert await found_after_all(driver, key, len(data)) == data
            assert relay.num_connections == before + 1
        for trusted in (f"ca_file={certificates.other_ca}", ""):
            with pytest.raises(StoreUnavailable, match="CERTIFICATE_VERIFY_FAILED"):
                async with opened(f"{url}?{trusted}" if trusted else url):
                    pass


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ((), "Nothing survives the Redis server's end"),
        (("save 60 1",), r"once a snapshot has it \(save 60 1\)"),
        (("appendonly yes",), r"costs the last second \(appendfsync everysec\)"),
        (("appendonly yes", "appendfsync always"), r"a loss of power \(appendfsync always\)"),
        (('rename-command CONFIG ""',), "it does not tell"),
    ],
)
async def test_durability_is_the_server_s_own(valkey: NowAndThen, settings: tuple[str, ...], said: str) -> None:
    async with opened(valkey(*settings).url()) as driver:
        assert re.search(said, driver.durability)


async def test_pieces_of_the_wrong_size_are_the_caller_s_mistake(valkey: NowAndThen) -> None:
    async with opened(valkey().url()) as driver:
        record: BlockRecord = record_of(key_of(1), b"x" * 100)
        with pytest.raises(ValueError, match="the record says 100"):
            await driver.put(record, (memoryview(b"x" * 99),))
