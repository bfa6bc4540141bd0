"""The driver `s3` on a real server that is killed, frozen, and meddled with, and on answers of a full one."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from benchmarks.store_servers import NO_S3, S3_KEYS, WEED, Weed
from shared.runtime.errors import StoreFull, StoreUnavailable
from shared.store.options import DriverOptions
from shared.store.record import HEADER_BYTES, VERSION
from tests.contract.store_drivers import NAMESPACE, cut, get_bytes, key_of, listed, payload, put_bytes, record_of
from tests.contract.store_remote_beds import shared_weed
from tests.support_relay import Relay

obstore = pytest.importorskip("obstore", reason="pip install baton-serving[s3]")
from obstore.store import S3Store  # noqa: E402

from shared.store.s3 import S3Driver  # noqa: E402

needs_server = pytest.mark.skipif(WEED is None, reason=NO_S3)
_MIB = 1 << 20
LARGE = 24 * _MIB
"""More than the sockets between the two ends hold."""
_numbers = itertools.count()


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in S3_KEYS.items():
        monkeypatch.setenv(name, text)


@pytest.fixture
def weed(keys: None) -> Weed:
    """Each test has a prefix of its own there."""
    return shared_weed()


@pytest.fixture
def prefix() -> str:
    return f"test{next(_numbers)}"


@asynccontextmanager
async def opened(url: str, limit_bytes: int | None = None) -> AsyncIterator[S3Driver]:
    driver = S3Driver.from_options(DriverOptions(where=url, limit_bytes=limit_bytes))
    try:
        await driver.open()
        yield driver
    finally:
        await driver.close()


def behind(weed: Weed, prefix: str) -> "S3Store":
    """The same objects, past the driver."""
    return weed.store(f"{prefix}/{VERSION}")


async def attempt(work: object) -> BaseException | None:
    try:
        await work  # type: ignore[misc]
    except (StoreFull, StoreUnavailable) as error:
        return error
    return None


async def works_again(driver: S3Driver, key: bytes, data: bytes) -> None:
    async with asyncio.timeout(60):
        while await attempt(put_bytes(driver, key, data)) is not None:
            await asyncio.sleep(0.02)
    assert await get_bytes(driver, key, len(data)) == data


@needs_server
async def test_a_server_killed_in_the_middle_of_a_put(weed: Weed, prefix: str) -> None:
    """What was put before is there, and nothing of the block that was on its way."""
    old, new, key = payload(_MIB, 1), payload(LARGE, 2), key_of(1)
    relay = Relay(weed.port, up=LARGE // 2)
    async with relay.open(), opened(weed.url(prefix)) as direct:
        await put_bytes(direct, key, old)
        async with opened(weed.url(prefix, port=relay.port)) as driver:
            async with asyncio.TaskGroup() as group:
                putting = group.create_task(attempt(put_bytes(driver, key, new)))
                await relay.held.wait()
                weed.kill()
                relay.refusing = True
                relay.cut()
            assert isinstance(await putting, StoreUnavailable)
            assert isinstance(await attempt(get_bytes(direct, key, len(old))), StoreUnavailable)
            relay.refusing = False
            relay.release()
            weed.start()
            assert await get_bytes(direct, key, len(old)) == old
            assert await get_bytes(direct, key, len(new)) is None
            assert [record.num_bytes for record in (await listed(direct)).values()] == [len(old)]
            await works_again(driver, key, new)


@needs_server
async def test_a_server_killed_in_the_middle_of_a_get(weed: Weed, prefix: str) -> None:
    data, key = payload(LARGE, 1), key_of(1)
    relay = Relay(weed.port)
    async with relay.open(), opened(weed.url(prefix, port=relay.port)) as driver:
        await put_bytes(driver, key, data)
        relay.down = LARGE // 2
        async with asyncio.TaskGroup() as group:
            getting = group.create_task(attempt(get_bytes(driver, key, len(data))))
            await relay.held.wait()
            weed.kill()
            relay.refusing = True
            relay.cut()
        assert isinstance(await getting, StoreUnavailable)
        relay.refusing = False
        relay.release()
        weed.start()
        assert await get_bytes(driver, key, len(data)) == data


@needs_server
async def test_a_frozen_server_costs_a_call_its_time_and_no_more(weed: Weed, prefix: str) -> None:
    key, data = key_of(1), payload(LARGE, 1)
    async with opened(weed.url(prefix, "timeout_s=1")) as driver, opened(weed.url(prefix)) as patient:
        await put_bytes(patient, key, data)
        async with asyncio.timeout(60):
            with weed.frozen():
                for work in (put_bytes(driver, key, data), get_bytes(driver, key, LARGE), driver.delete(key)):
                    assert "took longer than 1 s" in str(await attempt(work))
                with pytest.raises(StoreUnavailable, match="took longer"):
                    await listed(driver)
        await works_again(patient, key_of(2), payload(_MIB, 2))


@needs_server
async def test_the_caller_s_memory_is_let_alone_once_a_call_has_ended(weed: Weed, prefix: str) -> None:
    data, key = payload(LARGE, 1), key_of(1)
    for cancelled in (False, True):
        relay = Relay(weed.port)
        limit_s = 60 if cancelled else 2
        async with relay.open(), opened(weed.url(prefix, f"timeout_s={limit_s}", port=relay.port)) as driver:
            await put_bytes(driver, key, data)
            relay.down, room = LARGE // 2, bytearray(LARGE)
            async with asyncio.TaskGroup() as group:
                getting = group.create_task(attempt(driver.get(key, NAMESPACE, cut(room, (1000, 2000)))))
                await relay.held.wait()
                if cancelled:
                    getting.cancel()
            if not cancelled:
                assert "took longer than 2 s" in str(await getting)
            room[:] = bytes(LARGE)
            relay.release()
            assert await get_bytes(driver, key, len(data)) == data
            assert not any(room)


@needs_server
async def test_who_has_the_wrong_keys_is_told_so(weed: Weed, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wr0ng-s3cret")
    with pytest.raises(StoreUnavailable, match="SignatureDoesNotMatch") as caught:
        async with opened(weed.url(prefix)):
            pass
    assert "wr0ng" not in str(caught.value)


@needs_server
async def test_a_bucket_that_is_not_there(weed: Weed) -> None:
    with pytest.raises(StoreUnavailable, match="no such bucket"):
        async with opened(weed.url("x").replace("//blocks/", "//nowhere/")):
            pass


@needs_server
@pytest.mark.parametrize("offset", [0, 100, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 99_999])
async def test_a_changed_byte_is_seen_and_the_block_dropped(weed: Weed, prefix: str, offset: int) -> None:
    key, store = key_of(1), behind(weed, prefix)
    async with opened(weed.url(prefix)) as driver:
        await put_bytes(driver, key, payload(100_000, 1))
        found = bytearray(await (await obstore.get_async(store, key.hex())).bytes_async())
        found[offset] ^= 1
        await obstore.put_async(store, key.hex(), bytes(found))
        assert await get_bytes(driver, key, 100_000) is None
        assert await names_behind(store) == set()
        await works_again(driver, key, payload(100_000, 1))


async def names_behind(store: S3Store) -> set[str]:
    return {meta["path"] for meta in await obstore.list(store).collect_async()}


@needs_server
@pytest.mark.parametrize("size", [0, 1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 999])
async def test_an_object_of_another_length_is_never_listed_nor_served(weed: Weed, prefix: str, size: int) -> None:
    key, other, store = key_of(1), key_of(2), behind(weed, prefix)
    async with opened(weed.url(prefix)) as driver:
        for name in (key, other):
            await put_bytes(driver, name, payload(1000, 1))
        whole = bytes(await (await obstore.get_async(store, key.hex())).bytes_async())
        await obstore.put_async(store, key.hex(), whole[:size])
        assert await get_bytes(driver, key, 1000) is None
        assert await names_behind(store) == {other.hex()}
        await obstore.put_async(store, key.hex(), whole[:size])
        assert set(await listed(driver)) == {other}
        assert await names_behind(store) == {other.hex()}


@needs_server
async def test_what_is_not_ours_is_let_alone(weed: Weed, prefix: str) -> None:
    key, store = key_of(1), behind(weed, prefix)
    names = {"other", key_of(2).hex().upper(), key_of(3).hex() + "00", f"{key_of(4).hex()}/x"}
    async with opened(weed.url(prefix)) as driver:
        await put_bytes(driver, key, b"x" * 100)
        for name in names:
            await obstore.put_async(store, name, b"theirs")
        assert set(await listed(driver)) == {key}
        assert await names_behind(store) == names | {key.hex()}
    async with opened(weed.url(prefix)) as again, opened(weed.url(f"{prefix}-other")) as other:
        assert again.usage()[0] == HEADER_BYTES + 100
        assert await listed(other) == {}


@needs_server
async def test_many_are_listed_once_each_and_counted(weed: Weed, prefix: str) -> None:
    async with opened(weed.url(prefix)) as driver:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(put_bytes(driver, key_of(n), payload(10 + n, n))) for n in range(150)]
        wanted = {record.key: record for record in [await task for task in tasks]}
        assert await listed(driver) == wanted
        total = sum(HEADER_BYTES + 10 + n for n in range(150))
        assert driver.usage() == (total, None)
        await driver.delete(key_of(0))
        await driver.delete(key_of(0))
        assert driver.usage() == (total - HEADER_BYTES - 10, None)
    async with opened(weed.url(prefix), limit_bytes=total) as driver:
        assert driver.usage() == (total - HEADER_BYTES - 10, total)
        with pytest.raises(StoreFull, match="bytes are all"):
            await put_bytes(driver, key_of(1000), b"x" * 11)
        await put_bytes(driver, key_of(1000), b"x" * 10)


@pytest.mark.parametrize(
    ("status", "code", "meaning"),
    [
        (507, "InsufficientStorage", StoreFull),
        (403, "QuotaExceeded", StoreFull),
        (507, "XMinioStorageFull", StoreFull),
        (403, "AccessDenied", StoreUnavailable),
        (500, "InternalError", StoreUnavailable),
        (503, "SlowDown", StoreUnavailable),
    ],
)
async def test_what_a_service_s_refusal_means(status: int, code: str, meaning: type[Exception]) -> None:
    """Answers as S3 services give them: none that a package brings can be filled up."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        size = next((int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if b"content-length" in line), 0)
        await reader.readexactly(size)
        body = f"<Error><Code>{code}</Code><Message>no</Message></Error>".encode()
        writer.write(b"HTTP/1.1 %d No\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % (status, len(body)) + body)
        await writer.drain()
        writer.close()

    listener = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    driver = S3Driver.from_options(DriverOptions(where=f"s3://blocks/x?endpoint=http://127.0.0.1:{port}"))
    with pytest.raises(meaning, match=code):
        await driver.put(record_of(key_of(1), b"x" * 100), cut(b"x" * 100))
    await driver.close()
    listener.close()
    await listener.wait_closed()


async def test_a_service_that_is_not_there_is_said_clearly() -> None:
    driver = S3Driver.from_options(DriverOptions(where="s3://blocks/x?endpoint=http://127.0.0.1:9"))
    with pytest.raises(StoreUnavailable, match=r"s3://blocks/x at http://127\.0\.0\.1:9"):
        await driver.open()
    await driver.close()
    with pytest.raises(StoreUnavailable, match="closed"):
        await driver.delete(key_of(1))
