"""Any run of calls on a driver against a dictionary that says what must be there."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from shared.runtime.errors import StoreFull
from shared.store.driver import BlockDriver
from tests.contract.store_drivers import BEDS, Bed, get_bytes, key_of, listed, payload, put_bytes

KEYS = st.sampled_from([key_of(k) for k in range(4)])
NAMESPACES = st.sampled_from(["one", "two"])
SIZES = st.sampled_from([0, 1, 700, 9000, 30_000])
LIMIT = 60_000
Held = tuple[str, bytes]


class Model(RuleBasedStateMachine):
    """What a driver holds under each key: namespace and bytes."""

    runner: asyncio.Runner
    bed: Bed

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[bytes, Held] = {}
        self.number = 0
        self.driver = self.opened()
        for key in self.run(listed(self.driver)):
            self.run(self.driver.delete(key))

    def run(self, call):  # type: ignore[no-untyped-def]
        return self.runner.run(call)

    def opened(self) -> BlockDriver:
        driver = self.bed.driver(LIMIT if self.bed.limited else None)
        self.run(driver.open())
        return driver

    def fresh(self, num_bytes: int) -> bytes:
        self.number += 1
        return payload(num_bytes, self.number)

    @rule(key=KEYS, namespace=NAMESPACES, num_bytes=SIZES)
    def put(self, key: bytes, namespace: str, num_bytes: int) -> None:
        data = self.fresh(num_bytes)
        try:
            self.run(put_bytes(self.driver, key, data, namespace))
        except StoreFull:
            others = sum(len(held) for other, (_, held) in self.held.items() if other != key)
            assert self.bed.limited
            assert others + num_bytes > LIMIT / 2, "there was room"
            if key not in self.run(listed(self.driver)):
                self.held.pop(key, None)  # nothing, rather than what was there before, is within the contract
        else:
            self.held[key] = (namespace, data)

    @rule(key=KEYS, namespace=NAMESPACES, num_bytes=SIZES)
    def get(self, key: bytes, namespace: str, num_bytes: int) -> None:
        held = self.held.get(key)
        wanted = held[1] if held is not None and (namespace, num_bytes) == (held[0], len(held[1])) else None
        assert self.run(get_bytes(self.driver, key, num_bytes, namespace)) == wanted

    @rule(key=KEYS)
    def delete(self, key: bytes) -> None:
        self.run(self.driver.delete(key))
        self.held.pop(key, None)

    @rule(key=KEYS)
    def spoil(self, key: bytes) -> None:
        namespace, data = self.held.get(key, ("", b""))
        if data:
            self.run(self.bed.spoil(self.driver, key))
            assert self.run(get_bytes(self.driver, key, len(data), namespace)) is None
            del self.held[key]

    @precondition(lambda self: self.driver.usage()[0] < LIMIT / 2)
    @rule(key=KEYS, namespace=NAMESPACES, versions=st.integers(1, 4), delete=st.booleans())
    def at_once(self, key: bytes, namespace: str, versions: int, delete: bool) -> None:
        """Puts, a get and perhaps a delete of one key that overlap: what is there then is one of them."""
        data = [self.fresh(700) for _ in range(versions)]

        async def calls() -> bytes | None:
            puts = [put_bytes(self.driver, key, one, namespace) for one in data]
            ends = [self.driver.delete(key)] if delete else []
            return (await asyncio.gather(*puts, *ends, get_bytes(self.driver, key, 700, namespace)))[-1]

        before = self.held.pop(key, None)
        read = self.run(calls())
        assert read is None or read in data or before == (namespace, read)
        now = self.run(get_bytes(self.driver, key, 700, namespace))
        assert now in data or (now is None and delete)
        if now is not None:
            self.held[key] = (namespace, now)

    @precondition(lambda self: self.bed.persistent)
    @rule()
    def start_again(self) -> None:
        self.run(self.driver.close())
        self.driver = self.opened()

    @invariant()
    def it_lists_what_is_there(self) -> None:
        found = self.run(listed(self.driver))
        assert {key: (record.namespace, record.num_bytes) for key, record in found.items()} == {
            key: (namespace, len(data)) for key, (namespace, data) in self.held.items()
        }

    @invariant()
    def it_counts_what_is_there(self) -> None:
        used, limit = self.driver.usage()
        assert used >= sum(len(data) for _, data in self.held.values())
        assert limit is None or used <= limit
        assert self.held or used == 0

    def teardown(self) -> None:
        self.run(self.driver.close())


@pytest.mark.parametrize("name", BEDS)
def test_a_driver_is_a_dictionary_of_whole_blocks(name: str, tmp_path: Path) -> None:
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        bed = runner.run(stack.enter_async_context(BEDS[name](tmp_path)))
        machine = type("Model", (Model,), {"runner": runner, "bed": bed})
        run_state_machine_as_test(machine, settings=settings(max_examples=12))
        runner.run(stack.aclose())
