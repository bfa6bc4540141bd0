"""The contract of `shared.store.driver`, run on every driver in BEDS."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from shared.runtime.errors import StoreFull
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


async def test_it_says_who_it_is_and_what_survives(bed: Bed, driver: BlockDriver) -> None:
    assert driver.name == bed.name
    assert driver.durability.endswith(".")
    assert "survive" in driver.durability


@pytest.mark.parametrize("num_bytes", [0, 1, 4095, 100_003, 5 * MIB + 7])
async def test_what_is_read_is_what_was_put(driver: BlockDriver, num_bytes: int) -> None:
    data = payload(num_bytes, seed=num_bytes)
    record = await put_bytes(driver, KEY, data)
    room = bytearray(num_bytes)
    assert await driver.get(KEY, NAMESPACE, cut(room, (num_bytes // 2,))) == record
    assert room == data


async def test_a_block_may_lie_in_thousands_of_pieces_of_any_size(driver: BlockDriver) -> None:
    data = payload(400_000, seed=2)
    sizes = np.random.default_rng(3).integers(0, 200, 3000)
    await driver.put(record_of(KEY, data), cut(data, sizes))
    room = bytearray(len(data))
    assert await driver.get(KEY, NAMESPACE, cut(room, sizes[::-1])) is not None
    assert room == data


async def test_pieces_may_be_views_of_arrays(driver: BlockDriver) -> None:
    pool = np.random.default_rng(4).random((4, 3, 50), dtype=np.float32)
    await driver.put(record_of(KEY, pool[1:3].tobytes()), (pool[1].data, pool[2].data))
    room = np.zeros((2, 3, 50), dtype=np.float32)
    assert await driver.get(KEY, NAMESPACE, (room[0].data, room[1].data)) is not None
    assert np.array_equal(room, pool[1:3])


async def test_what_is_not_there_is_none(driver: BlockDriver) -> None:
    assert await driver.get(KEY, NAMESPACE, cut(bytearray(10))) is None
    await put_bytes(driver, KEY, bytes(10))
    assert await driver.get(key_of(2), NAMESPACE, cut(bytearray(10))) is None


@pytest.mark.parametrize(("namespace", "num_bytes"), [("model-a:layout-2", 1000), (NAMESPACE, 999), (NAMESPACE, 1001)])
async def test_whoever_expects_another_geometry_gets_nothing(
    driver: BlockDriver, namespace: str, num_bytes: int
) -> None:
    data = payload(1000, seed=5)
    await put_bytes(driver, KEY, data)
    assert await get_bytes(driver, KEY, num_bytes, namespace) is None
    assert await get_bytes(driver, KEY, 1000) == data


async def test_a_put_replaces_what_was_there(driver: BlockDriver) -> None:
    await put_bytes(driver, KEY, payload(1000, seed=6))
    data = payload(2000, seed=7)
    record = await put_bytes(driver, KEY, data, "another")
    assert await get_bytes(driver, KEY, 1000) is None
    assert await get_bytes(driver, KEY, 2000, "another") == data
    assert await listed(driver) == {KEY: record}


async def test_what_is_deleted_is_gone_however_often(driver: BlockDriver) -> None:
    await put_bytes(driver, KEY, bytes(1000))
    for _ in range(2):
        await driver.delete(KEY)
        assert await get_bytes(driver, KEY, 1000) is None
    assert await listed(driver) == {}
    data = payload(1000, seed=8)
    await put_bytes(driver, KEY, data)
    assert await get_bytes(driver, KEY, 1000) == data


async def test_records_tell_everything(driver: BlockDriver) -> None:
    data = payload(300, seed=9)
    wanted = [
        record_of(key_of(k), data, tenant=tenant, tokens=64 * k, snapshot=bool(k % 2), written_s=1e9 + k / 7)
        for k, tenant in enumerate(("", "ann", "Zoë · 日本", "x" * 300) * 80)
    ]
    await asyncio.gather(*(driver.put(record, cut(data)) for record in wanted))
    assert await listed(driver) == {record.key: record for record in wanted}


async def test_usage_grows_by_what_is_put_and_comes_back(driver: BlockDriver) -> None:
    before, limit = driver.usage()
    assert (before, limit) == (0, None)
    await put_bytes(driver, KEY, bytes(50_000))
    one = driver.usage()[0]
    assert 50_000 <= one <= 60_000
    await put_bytes(driver, KEY, bytes(50_000))
    assert driver.usage()[0] == one
    await put_bytes(driver, key_of(2), bytes(50_000))
    assert driver.usage()[0] == 2 * one
    await driver.delete(KEY)
    await driver.delete(KEY)
    assert driver.usage()[0] == one


async def test_a_spoiled_block_is_dropped_and_never_read(bed: Bed, driver: BlockDriver) -> None:
    data = payload(5000, seed=10)
    await put_bytes(driver, KEY, data)
    await put_bytes(driver, key_of(2), data)
    await bed.spoil(driver, KEY)
    assert await get_bytes(driver, KEY, 5000) is None
    assert set(await listed(driver)) == {key_of(2)}
    assert driver.usage()[0] < 2 * 5000
    await put_bytes(driver, KEY, data)
    assert await get_bytes(driver, KEY, 5000) == data


async def test_bytes_that_never_had_their_digest_are_dropped(driver: BlockDriver) -> None:
    data = payload(5000, seed=11)
    await driver.put(record_of(KEY, data, digest=bytes(16)), cut(data))
    assert await get_bytes(driver, KEY, 5000) is None
    assert await listed(driver) == {}


async def test_pieces_of_another_size_than_the_record_are_a_mistake(driver: BlockDriver) -> None:
    with pytest.raises(ValueError, match="1000 bytes"):
        await driver.put(replace(record_of(KEY, bytes(1000)), num_bytes=1001), cut(bytes(1000)))
    assert await listed(driver) == {}
    assert driver.usage()[0] == 0


async def test_the_limit_is_kept_and_nothing_is_lost_by_it(bed: Bed) -> None:
    if not bed.limited:
        pytest.skip("this driver has no limit of its own")
    async with asyncio.timeout(60):
        probe = bed.driver(limit_bytes=1 << 30)
        await probe.open()
        await put_bytes(probe, KEY, bytes(10_000))
        one, limit = probe.usage()
        assert limit == 1 << 30
        await probe.delete(KEY)
        await probe.close()
    driver = bed.driver(limit_bytes=3 * one + one // 2)
    await driver.open()
    blocks = {key_of(k): payload(10_000, seed=k) for k in range(4)}
    *fitting, last = blocks
    for key in fitting:
        await put_bytes(driver, key, blocks[key])
    with pytest.raises(StoreFull):
        await put_bytes(driver, last, blocks[last])
    assert await get_bytes(driver, last, 10_000) is None
    assert [await get_bytes(driver, key, 10_000) for key in fitting] == [blocks[key] for key in fitting]
    blocks[fitting[0]] = payload(10_000, seed=99)
    await put_bytes(driver, fitting[0], blocks[fitting[0]])  # in place of the one that is there
    assert await get_bytes(driver, fitting[0], 10_000) == blocks[fitting[0]]
    with pytest.raises(StoreFull):
        await put_bytes(driver, fitting[0], bytes(10_000 + one))
    await driver.delete(fitting[1])
    await put_bytes(driver, last, blocks[last])
    assert await get_bytes(driver, last, 10_000) == blocks[last]
    await driver.close()


async def test_blocks_outlive_the_driver_or_it_says_so(bed: Bed, driver: BlockDriver) -> None:
    blocks = {key_of(k): payload(3000, seed=k) for k in range(30)}
    records = {key: await put_bytes(driver, key, data) for key, data in blocks.items()}
    used = driver.usage()[0]
    await driver.close()
    again = bed.driver()
    await again.open()
    assert await listed(again) == (records if bed.persistent else {})
    if bed.persistent:
        assert again.usage()[0] == used
        assert {key: await get_bytes(again, key, 3000) for key in blocks} == blocks
    await again.close()
