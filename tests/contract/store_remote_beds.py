"""Beds of the drivers that talk to a server: real ones, started by the tests. Where there is none the tests are skipped
and say how to get it."""

import atexit
import itertools
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.store_servers import NO_S3, NO_VALKEY, S3_KEYS, VALKEY, WEED, Valkey, Weed
from shared.store.driver import BlockDriver
from shared.store.options import DriverOptions
from shared.store.record import VERSION
from tests.contract.store_drivers import BEDS, Bed

_prefixes = itertools.count()


@asynccontextmanager
async def redis_bed(directory: Path) -> AsyncIterator[Bed]:
    """A server of the test's own."""
    if VALKEY is None:
        pytest.skip(NO_VALKEY)
    server = Valkey(directory / "valkey")
    server.start()

    async def spoil(driver: BlockDriver, key: bytes) -> None:
        name = f"baton:{VERSION}:{key.hex()}".encode()
        last = server.ask(b"STRLEN", name)
        assert isinstance(last, int)
        byte = server.ask(b"GETRANGE", name, b"-1", b"-1")
        assert isinstance(byte, bytes)
        server.ask(b"SETRANGE", name, b"%d" % (last - 1), bytes([byte[0] ^ 1]))

    try:
        yield Bed("redis", DriverOptions(where=server.url()), spoil)
    finally:
        server.kill()


@asynccontextmanager
async def s3_bed(directory: Path) -> AsyncIterator[Bed]:
    """A prefix of the test's own on one server."""
    if WEED is None or find_spec("obstore") is None:
        pytest.skip(NO_S3)
    import obstore

    with pytest.MonkeyPatch.context() as patch:
        for name, text in S3_KEYS.items():
            patch.setenv(name, text)
        server, prefix = shared_weed(), f"bed{next(_prefixes)}"

        async def spoil(driver: BlockDriver, key: bytes) -> None:
            store = server.store(f"{prefix}/{VERSION}")
            found = bytearray(await (await obstore.get_async(store, key.hex())).bytes_async())
            found[-1] ^= 1
            await obstore.put_async(store, key.hex(), bytes(found))

        yield Bed("s3", DriverOptions(where=server.url(prefix)), spoil)


@cache
def shared_weed() -> Weed:
    """It starts in seconds, so all tests of a run have the same one, and ends with the run. S3_KEYS are set."""
    directory = Path(tempfile.mkdtemp(prefix="baton-weed-"))
    server = Weed(directory)

    def end() -> None:
        server.kill()
        shutil.rmtree(directory, ignore_errors=True)

    atexit.register(end)
    server.start()
    return server


BEDS |= {"redis": redis_bed, "s3": s3_bed}
