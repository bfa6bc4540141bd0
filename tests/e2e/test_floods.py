"""Floods of messages that nobody should ever send: nothing dies, nothing is wrong, memory stays where it is, and all of
it is counted."""

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import httpx
import pytest

from tests.e2e.flooding import FloodedCluster, Intruder
from tests.support_client import Answer, complete, poll
from tests.support_noise import LISTENERS

Processes = dict[str, tuple[int, str]]
PROMPTS = [[7, 3, 9, 1] * k + [k] for k in (1, 3, 10, 30)]
EARLY = ("early_destinations_unknown", "early_destinations_refused")
COUNTED = ("received_replay", "bus_dropped", "bus_disconnects", "bus_reconnects")
GROWTH_BYTES = 32 << 20
"""What a process's memory may grow by in a flood, after one of the same kind that was short. A message that leaves 100
bytes behind would grow it by three times as much in the long one."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FloodedCluster]:
    with FloodedCluster(tmp_path_factory.mktemp("flooded"), model="toy") as running:
        yield running


async def ask(http: httpx.AsyncClient, prompt: list[int]) -> Answer:
    return await complete(http, model="toy", prompt=prompt, max_tokens=40, ignore_eos=True, baton={"path": "remote"})


@asynccontextmanager
async def served(cluster: FloodedCluster, at_least: int) -> AsyncIterator[None]:
    """Requests, two at a time, for as long as the block lasts, each answered as it was in quiet."""
    done = asyncio.Event()
    async with cluster.async_client() as http:
        quiet = [(await ask(http, prompt)).token_ids for prompt in PROMPTS]

        async def keep_asking(offset: int) -> int:
            count = 0
            while not done.is_set():
                k = (count + offset) % len(PROMPTS)
                answer = await ask(http, PROMPTS[k])
                assert answer.status == 200, answer.body
                assert answer.token_ids == quiet[k]
                count += 1
            return count

        async with asyncio.TaskGroup() as group:
            askers = [group.create_task(keep_asking(offset)) for offset in (0, 2)]
            yield
            done.set()
        assert sum(asker.result() for asker in askers) >= at_least


def processes(cluster: FloodedCluster) -> Processes:
    return {w["id"]: (w["pid"], w["boot_id"]) for w in cluster.workers() if not w["id"].startswith("ghost")}


def check_books(cluster: FloodedCluster, intruder: Intruder, before: dict[str, Counter[str]], slow_before: int) -> None:
    """Everything that was sent was counted where it belongs, and everything that the server has carried to a process
    was seen there."""

    def seen(role: str) -> tuple[Counter[str], int]:
        counters = cluster.metrics(role)
        names = ("delivered", "dropped", "answers", "late_answers")
        return counters, sum(counters[f"bus_{name}"] for name in names)

    def agrees(role: str) -> bool:
        peer = intruder.noise.target.peers[role]
        told[:] = [role, seen(role)[1], cluster.carried()[peer]["out_msgs"], seen(role)[1]]
        return len(set(told[1:])) == 1

    told: list[object] = []
    for role in LISTENERS:
        poll(lambda role=role: agrees(role), lambda: f"seen, carried, seen: {told}", 60.0)
    after = {role: cluster.metrics(role) for role in LISTENERS}
    assert cluster.num_slow_consumers() == slow_before
    for name in ("bus_dropped", "bus_handler_errors", "task_failures"):
        assert {role: after[role][name] - before[role][name] for role in LISTENERS} == dict.fromkeys(LISTENERS, 0)
    for (role, name), least in intruder.noise.expected.items():
        roles = list(LISTENERS) if role == "*" else [role]
        found = sum(after[each][name] - before[each][name] for each in roles)
        if name.startswith("malformed_"):
            assert found == least, (role, name)
        else:
            assert found >= least, (role, name, found, least)


async def rush(cluster: FloodedCluster, count: int) -> None:
    """The flood of everything, with requests served meanwhile."""
    alive, slow_before = processes(cluster), cluster.num_slow_consumers()
    before = {role: cluster.metrics(role) for role in LISTENERS}
    async with Intruder(cluster, seed=count) as intruder:
        async with served(cluster, at_least=8):
            await intruder.flood(min(5000, count // 4))
            memory = cluster.memory()
            assert len(intruder.noise.captured) > 50
            began = time.monotonic()
            sent = intruder.sent
            await intruder.flood(count - sent)
            rate = (intruder.sent - sent) / (time.monotonic() - began)
        await asyncio.to_thread(check_books, cluster, intruder, before, slow_before)
        assert cluster.carried()["intruder"]["in_msgs"] == intruder.sent
    print(f"{intruder.sent} messages, the last ones {rate:.0f} a second; {dict(intruder.noise.sorts)}")
    check_calm(cluster, memory, alive)


def check_calm(cluster: FloodedCluster, memory: dict[str, int], alive: Processes) -> None:
    """Nobody has died, nothing is held, and memory is where it was."""
    poll(lambda: processes(cluster) == alive, lambda: f"{processes(cluster)}, {alive} before", 30.0)
    cluster.settled(files=False)
    grown = {name: size - memory[name] for name, size in cluster.memory().items() if name in memory}
    print(f"memory grew by { ({name: f'{size / 2**20:.1f} MiB' for name, size in grown.items()}) }")
    assert {name: size for name, size in grown.items() if size > GROWTH_BYTES} == {}


async def strays(cluster: FloodedCluster, count: int) -> None:
    """`count` destinations for rooms that do not exist, and `count` orders for a room that does (and soon did)."""
    alive, slow_before = processes(cluster), cluster.num_slow_consumers()
    async with Intruder(cluster, seed=6) as intruder:
        async with served(cluster, at_least=8):
            await intruder.flood(500, intruder.noise.orphan_destinations())
            await asyncio.to_thread(poll, lambda: intruder.noise.rooms, "no request was overheard", 20.0)
            await intruder.flood(500, intruder.noise.duplicate_rooms(intruder.noise.rooms[-1]))
            memory = cluster.memory()
            before = {role: cluster.metrics(role) for role in LISTENERS}
            intruder.noise.expected.clear()
            await intruder.flood(count, intruder.noise.orphan_destinations())
            await intruder.flood(count, intruder.noise.duplicate_rooms(intruder.noise.rooms[-1]))
        await asyncio.to_thread(check_books, cluster, intruder, before, slow_before)
        prefill = cluster.metrics("prefill")
        early = [prefill[name] - before["prefill"][name] for name in EARLY]
        assert sum(early) >= count, early
        assert intruder.noise.expected["decode", "rooms_reused"] >= count // 4
    check_calm(cluster, memory, alive)


async def test_orphan_destinations_and_duplicate_rooms(cluster: FloodedCluster) -> None:
    await strays(cluster, 10_000)


async def test_random_messages_are_counted_and_change_nothing(cluster: FloodedCluster) -> None:
    await rush(cluster, 10_000)


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_a_million_random_messages(cluster: FloodedCluster) -> None:
    await rush(cluster, 1_000_000)


async def test_more_than_can_be_handled_is_dropped_and_counted(cluster: FloodedCluster) -> None:
    """Without waiting for answers: what does not fit in the queues of D is lost, which is what NATS may do as well, and
    is in the books. Where D is kept from reading so long that its connection ends, these say that instead."""
    alive, count = processes(cluster), 30_000
    async with Intruder(cluster, seed=9) as intruder:
        books = Books(cluster, intruder)
        replay = next(sent for sent in intruder.noise.questions() if sent[0].endswith("replay"))
        for _ in range(count):
            await intruder.publish(*replay)
        await intruder.flush()
        is_accounted_for = lambda: books.num_handled == count or books.connection_was_lost  # noqa: E731
        await asyncio.to_thread(poll, is_accounted_for, lambda: f"not {count}: {books}", 120.0)
        assert books.num_handled <= count
        assert books.num_slow == sum(n for why, n in books.ended.items() if why.startswith("Slow Consumer")), str(books)
    await check_returned(cluster, alive)


async def test_who_does_not_read_is_cut_off_comes_back_and_says_so(cluster: FloodedCluster) -> None:
    """The server holds 64 MiB for a client, and what D had not read by then nobody counts."""
    alive, count = processes(cluster), 150
    async with Intruder(cluster, seed=10) as intruder:
        books = Books(cluster, intruder)
        replay = next(sent for sent in intruder.noise.questions() if sent[0].endswith("replay"))
        pid = cluster.signal("decode-0", signal.SIGSTOP)
        try:
            for _ in range(count):
                await intruder.publish(replay[0], b"x" * (1 << 20), "")
                await intruder.flush()
            await asyncio.to_thread(poll, lambda: books.num_slow, "the server waits for D without end", 60.0)
        finally:
            os.kill(pid, signal.SIGCONT)
        await asyncio.to_thread(poll, lambda: books.connection_was_lost, lambda: f"not back: {books}", 60.0)
        assert {why.partition(" (")[0] for why in books.ended} == {"Slow Consumer"}
        assert books.num_handled < count
    await check_returned(cluster, alive)


class Books:
    """What D and the server say has become of replays since this was made."""

    def __init__(self, cluster: FloodedCluster, intruder: Intruder) -> None:
        self._cluster, self._peer = cluster, intruder.noise.target.peers["decode"]
        self._before = self._now()

    def __str__(self) -> str:
        return f"{self._since(*COUNTED)}, ended: {dict(self.ended)}, slow consumers: {self.num_slow}"

    @property
    def num_handled(self) -> int:
        return sum(self._since("received_replay", "bus_dropped"))

    @property
    def connection_was_lost(self) -> bool:
        """D has lost connections and has one again, and the server knows of each that it is over."""
        lost, back = self._since("bus_disconnects", "bus_reconnects")
        return 0 < lost == back == self.ended.total()

    @property
    def ended(self) -> Counter[str]:
        return self._cluster.ended(self._peer) - self._before[1]

    @property
    def num_slow(self) -> int:
        return self._cluster.num_slow_consumers() - self._before[2]

    def _since(self, *names: str) -> list[int]:
        now = self._cluster.metrics("decode")
        return [now[name] - self._before[0][name] for name in names]

    def _now(self) -> tuple[Counter[str], Counter[str], int]:
        return self._cluster.metrics("decode"), self._cluster.ended(self._peer), self._cluster.num_slow_consumers()


async def check_returned(cluster: FloodedCluster, alive: Processes) -> None:
    """The same D as before serves."""
    poll(lambda: processes(cluster) == alive, lambda: f"{processes(cluster)}, {alive} before", 30.0)
    cluster.wait_ready("decode-0")
    async with cluster.async_client() as http:
        assert (await ask(http, PROMPTS[1])).status == 200
    poll(lambda: processes(cluster) == alive, lambda: f"{processes(cluster)}, {alive} before", 30.0)
