"""The contract of `shared.bus.kv.KeyValue`, run on JetStream and on its in-memory twin."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from shared.bus import nats
from shared.bus.base import MAX_PAYLOAD_BYTES, Bus, BusError
from shared.bus.kv import Bucket, BucketGone, KeyValue, KvConflict, KvFull, NoKeyValue
from shared.bus.memory import MemoryHub
from shared.bus.server import NatsServer

Connect = Callable[[], Awaitable[Bus]]


class KeyValueContract:
    @pytest.fixture
    def bucket(self) -> Bucket:
        return Bucket(f"test-{secrets.token_hex(6)}", ttl_s=60.0)

    @pytest.fixture
    async def kv(self, connect: Connect, bucket: Bucket) -> KeyValue:
        return await (await connect()).bucket(bucket)

    async def test_what_is_written_is_read_by_another_client(self, connect: Connect, bucket: Bucket) -> None:
        one, two = await (await connect()).bucket(bucket), await (await connect()).bucket(bucket)
        assert await two.get("a.b") is None
        revision = await one.create("a.b", b"first")
        found = await two.get("a.b")
        assert found is not None
        assert (found.value, found.revision) == (b"first", revision)

    async def test_of_two_who_create_one_is_told_so(self, kv: KeyValue) -> None:
        results = await asyncio.gather(kv.create("a", b"1"), kv.create("a", b"2"), return_exceptions=True)
        assert sorted(type(result).__name__ for result in results) == ["KvConflict", "int"]

    async def test_of_two_who_update_one_is_told_so(self, connect: Connect, bucket: Bucket) -> None:
        one, two = await (await connect()).bucket(bucket), await (await connect()).bucket(bucket)
        revision = await one.create("a", b"0")
        newer = await two.update("a", b"two", revision)
        assert newer > revision
        with pytest.raises(KvConflict):
            await one.update("a", b"one", revision)
        found = await one.get("a")
        assert found is not None
        assert (found.value, found.revision) == (b"two", newer)

    async def test_keys_do_not_disturb_each_other(self, kv: KeyValue) -> None:
        first, second = await kv.create("a", b"1"), await kv.create("b", b"2")
        await kv.update("a", b"3", first)
        await kv.update("b", b"4", second)

    async def test_what_is_not_there_is_not_updated(self, kv: KeyValue) -> None:
        with pytest.raises(KvConflict):
            await kv.update("a", b"1", 7)
        revision = await kv.create("a", b"1")
        await kv.delete("a")
        with pytest.raises(KvConflict):
            await kv.update("a", b"2", revision)

    async def test_what_is_at_another_revision_is_not_deleted(self, kv: KeyValue) -> None:
        first = await kv.create("a", b"1")
        second = await kv.update("a", b"2", first)
        with pytest.raises(KvConflict):
            await kv.delete("a", first)
        assert await kv.get("a") is not None
        await kv.delete("a", second)
        assert await kv.get("a") is None

    async def test_what_was_deleted_may_come_again(self, kv: KeyValue) -> None:
        await kv.delete("a")
        await kv.create("a", b"1")
        await kv.delete("a")
        await kv.delete("a")
        assert await kv.get("a") is None
        await kv.create("a", b"2")
        assert (await kv.get("a") or pytest.fail("gone")).value == b"2"

    async def test_what_nobody_writes_goes_and_what_is_written_stays(self, connect: Connect) -> None:
        kv = await (await connect()).bucket(Bucket(f"test-{secrets.token_hex(6)}", ttl_s=1.0))
        kept = await kv.create("kept", b"0")
        await kv.create("left", b"0")
        for number in range(4):
            await asyncio.sleep(0.5)
            kept = await kv.update("kept", b"%d" % number, kept)
        async with asyncio.timeout(30):
            while await kv.get("left") is not None:
                kept = await kv.update("kept", b"again", kept)
                await asyncio.sleep(0.2)
        assert await kv.get("kept") is not None
        with pytest.raises(KvConflict):
            await kv.update("left", b"1", 2)

    async def test_a_bucket_with_other_settings_is_the_same_bucket(self, connect: Connect, bucket: Bucket) -> None:
        bus = await connect()
        kv = await bus.bucket(bucket)
        await kv.create("a", b"1")
        other = await bus.bucket(Bucket(bucket.name, bucket.ttl_s / 2, bucket.max_bytes * 2))
        assert (await other.get("a") or pytest.fail("gone")).value == b"1"

    async def test_a_full_bucket_refuses_and_keeps_what_it_has(self, connect: Connect) -> None:
        kv = await (await connect()).bucket(Bucket(f"test-{secrets.token_hex(6)}", ttl_s=60.0, max_bytes=8192))
        await kv.create("a", b"x" * 4000)
        with pytest.raises(KvFull):
            await kv.create("b", b"x" * 8000)
        assert await kv.get("a") is not None

    @pytest.mark.parametrize("key", ["", ".a", "a.", "a b", "a*", ">", "a..b", "x" * 65, "a/b"])
    async def test_malformed_keys(self, kv: KeyValue, key: str) -> None:
        for call in (kv.get(key), kv.create(key, b""), kv.update(key, b"", 1), kv.delete(key)):
            with pytest.raises(ValueError, match="not a key"):
                await call

    async def test_values_too_large(self, kv: KeyValue) -> None:
        with pytest.raises(ValueError, match="more than an entry"):
            await kv.create("a", b"x" * (MAX_PAYLOAD_BYTES + 1))

    async def test_a_large_value(self, kv: KeyValue) -> None:
        large = secrets.token_bytes(MAX_PAYLOAD_BYTES - 4096)
        await kv.create("a", large)
        assert (await kv.get("a") or pytest.fail("gone")).value == large

    async def test_a_closed_bus(self, connect: Connect, bucket: Bucket) -> None:
        bus = await connect()
        kv = await bus.bucket(bucket)
        await bus.close()
        with pytest.raises(BusError):
            await kv.create("a", b"")


class TestMemory(KeyValueContract):
    @pytest.fixture
    def hub(self) -> MemoryHub:
        return MemoryHub()

    @pytest.fixture
    def connect(self, hub: MemoryHub) -> Connect:
        async def connect() -> Bus:
            return hub.client("test")

        return connect

    async def test_a_hub_without_it(self, hub: MemoryHub, bucket: Bucket) -> None:
        hub.stores = None
        with pytest.raises(NoKeyValue):
            await hub.client("test").bucket(bucket)


class TestNats(KeyValueContract):
    @pytest.fixture
    async def server(self, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[NatsServer]:
        async with NatsServer(tmp_path_factory.mktemp("nats")) as server:
            yield server

    @pytest.fixture
    async def connect(self, server: NatsServer) -> AsyncIterator[Connect]:
        opened: list[Bus] = []

        async def connect() -> Bus:
            opened.append(await nats.connect(server.url, "test"))
            return opened[-1]

        yield connect
        for bus in opened:
            await bus.close()

    async def test_a_server_that_starts_again_still_has_it(
        self, server: NatsServer, connect: Connect, bucket: Bucket
    ) -> None:
        kv = await (await connect()).bucket(bucket)
        revision = await kv.create("a", b"1")
        await server.stop()
        await server.start()
        async with asyncio.timeout(30):
            while True:
                try:
                    await kv.update("a", b"2", revision)
                    return
                except KvConflict:  # the server did it, and its answer got lost
                    assert (await kv.get("a") or pytest.fail("gone")).value == b"2"
                    return
                except BusError:
                    await asyncio.sleep(0.05)

    async def test_a_bucket_that_was_removed(self, connect: Connect, bucket: Bucket) -> None:
        bus = await connect()
        kv = await bus.bucket(bucket)
        assert isinstance(bus, nats.NatsBus)
        client = bus._connection.client()
        await client.jetstream().delete_key_value(bucket.name)
        with pytest.raises(BucketGone):
            await kv.create("a", b"1")
        await (await bus.bucket(bucket)).create("a", b"1")

    async def test_a_server_without_it(self, tmp_path_factory: pytest.TempPathFactory, bucket: Bucket) -> None:
        async with NatsServer(tmp_path_factory.mktemp("nats"), jetstream=False) as plain:
            bus = await nats.connect(plain.url, "test")
            with pytest.raises(NoKeyValue):
                await bus.bucket(bucket)
            await bus.close()
