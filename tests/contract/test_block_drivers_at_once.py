"""The drivers' contract where calls overlap, are cancelled, or meet the end of the driver."""

import asyncio

import pytest

from shared.runtime.errors import StoreFull, StoreUnavailable
from shared.store.driver import BlockDriver
from tests.contract.store_drivers import (
    NAMESPACE,
    Bed,
    cut,
    get_bytes,
    key_of,
    listed,
    payload,
    put_bytes,
    record_of,
)

KEY = key_of(1)
MIB = 1 << 20


async def test_puts_at_once_do_not_pass_the_limit_together(bed: Bed) -> None:
    if not bed.limited:
        pytest.skip("this driver has no limit of its own")
    driver = bed.driver(limit_bytes=10 * 20_000)
    await driver.open()
    puts = (put_bytes(driver, key_of(k), payload(15_000, seed=k)) for k in range(40))
    results = await asyncio.gather(*puts, return_exceptions=True)
    done = {result.key: result for result in results if not isinstance(result, BaseException)}
    assert all(isinstance(result, StoreFull) for result in results if isinstance(result, BaseException))
    assert 10 <= len(done) <= 13
    assert driver.usage()[0] <= 10 * 20_000
    assert await listed(driver) == done
    await driver.close()


async def test_of_puts_of_one_key_at_once_one_wins_whole(driver: BlockDriver) -> None:
    versions = [payload(200_000, seed=k) for k in range(12)]

    async def read() -> bytes | None:
        await asyncio.sleep(0)
        return await get_bytes(driver, KEY, 200_000)

    calls = [call for data in versions for call in (put_bytes(driver, KEY, data), read(), read())]
    results = await asyncio.gather(*calls)
    assert {result for result in results if isinstance(result, bytes)} <= set(versions)
    final = await get_bytes(driver, KEY, 200_000)
    assert final in versions
    assert [record.digest for record in (await listed(driver)).values()] == [record_of(KEY, final).digest]
    assert 200_000 <= driver.usage()[0] <= 220_000


async def test_puts_gets_and_deletes_of_one_key_at_once(driver: BlockDriver) -> None:
    data = payload(50_000, seed=12)

    async def delete() -> None:
        await driver.delete(KEY)

    for _ in range(8):
        calls = [call for _ in range(4) for call in (put_bytes(driver, KEY, data), get_bytes(driver, KEY, 50_000))]
        results = await asyncio.gather(*calls, delete(), delete())
        assert all(result == data for result in results if isinstance(result, bytes))
        found = await listed(driver)
        assert (await get_bytes(driver, KEY, 50_000) is None) == (not found)
    await driver.delete(KEY)
    assert driver.usage()[0] == 0


async def test_the_loop_goes_on_meanwhile(driver: BlockDriver) -> None:
    data = payload(32 * MIB, seed=13)
    record, room = record_of(KEY, data), bytearray(len(data))
    for begin in (lambda: driver.put(record, cut(data)), lambda: driver.get(KEY, NAMESPACE, cut(room))):
        async with asyncio.TaskGroup() as group:
            work, turns = group.create_task(begin()), 0
            while not work.done():
                await asyncio.sleep(0)
                turns += 1
        assert turns > 20


async def test_a_cancelled_get_writes_nothing_once_it_has_ended(driver: BlockDriver) -> None:
    data = payload(32 * MIB, seed=14)
    await put_bytes(driver, KEY, data)
    for turns in (0, 1, 3):
        room = bytearray(len(data))
        work = asyncio.get_running_loop().create_task(driver.get(KEY, NAMESPACE, cut(room)))
        for _ in range(turns):
            await asyncio.sleep(0)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
        then = bytes(room)
        assert await get_bytes(driver, KEY, len(data)) == data
        assert room == then


async def test_a_cancelled_put_leaves_a_whole_block_or_none(driver: BlockDriver) -> None:
    data = payload(32 * MIB, seed=15)
    pool = bytearray(len(data))
    for turns in (0, 1, 3):
        pool[:] = data
        work = asyncio.get_running_loop().create_task(driver.put(record_of(KEY, data), cut(pool)))
        for _ in range(turns):
            await asyncio.sleep(0)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
        pool[:] = bytes(len(pool))  # the pages go to somebody else
        assert (await get_bytes(driver, KEY, len(data)) == data) == (KEY in await listed(driver))


async def test_closing_waits_for_what_runs_and_refuses_what_comes(driver: BlockDriver) -> None:
    data = payload(8 * MIB, seed=16)
    puts = [asyncio.get_running_loop().create_task(put_bytes(driver, key_of(k), data)) for k in range(8)]
    await asyncio.sleep(0)
    await asyncio.gather(driver.close(), driver.close())
    results = await asyncio.gather(*puts, return_exceptions=True)
    assert all(isinstance(result, StoreUnavailable) for result in results if isinstance(result, BaseException))
    with pytest.raises(StoreUnavailable):
        await put_bytes(driver, KEY, data)
    await driver.close()
