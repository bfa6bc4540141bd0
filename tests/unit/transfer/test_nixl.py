"""The `nixl` backend where reads stand still, and peers lie or start anew. Real agents, both ends in this process."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shared.runtime.errors import PeerLost, TransferError, TransferRefused
from shared.transfer import nixl, nixl_agent
from shared.transfer.backend import Channel, Faults, Manifest, Timing
from shared.transfer.ledger import Ledger
from shared.transfer.nixl import Source
from shared.transfer.nixl_agent import ReadingAgent, SourceAgent
from shared.transfer.pool import Run
from tests.contract.test_transfer_backend import PIECES, TABLE, Peer, is_set
from tests.contract.transfer_links import LAYOUT, NIXL, POISON, new_ticket

pytestmark = [*NIXL.marks]


class Ends:
    """A sender full of random bytes and a poisoned receiver."""

    def __init__(self, directory: Path) -> None:
        self.sender = Peer("nixl", "sender", directory, Timing(), Faults())
        self.receiver = Peer("nixl", "receiver", directory, Timing(), Faults())
        self.receiver.bytes[:] = POISON
        self.threads = ThreadPoolExecutor(2)
        self.channels: list[Channel] = []
        fill(self.sender, 1)

    @property
    def backend(self) -> Any:
        return self.receiver.backend

    @property
    def untouched(self) -> bool:
        return bool((self.receiver.bytes == POISON).all())

    def counted(self, what: str) -> int:
        return self.receiver.door.snapshot()[1].get(what, 0)

    def ticket(self) -> Manifest:
        key, secret = new_ticket()
        self.receiver.door.open(key, secret, TABLE)
        return Manifest(key, secret, PIECES)

    def connect(self) -> Channel:
        self.channels.append(self.sender.backend.connect(self.receiver.address))
        return self.channels[-1]

    def close(self) -> None:
        for channel in self.channels:
            channel.close()
        self.threads.shutdown()
        self.sender.close()
        self.receiver.close()


def fill(peer: Peer, seed: int) -> None:
    peer.bytes[:] = np.random.default_rng(seed).integers(0, 256, len(peer.bytes), dtype=np.uint8)


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[Ends]:
    made = Ends(tmp_path)
    yield made
    made.close()


@pytest.fixture
def made_agents(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Metadata of the agents that were made to read from it."""
    found: list[bytes] = []
    start = ReadingAgent.__init__

    def noted(self: ReadingAgent, region: nixl_agent.Region, metadata: bytes) -> None:
        found.append(metadata)
        start(self, region, metadata)

    monkeypatch.setattr(ReadingAgent, "__init__", noted)
    return found


@pytest.fixture
def still(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Senders whose agent does nothing, over UCX's TCP, where peers cannot read without its help. Set when there is a
    read that stands still."""
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    reads = threading.Event()
    post = ReadingAgent.post

    def noted(self: ReadingAgent, *spans: np.ndarray) -> None:
        post(self, *spans)
        reads.set()

    monkeypatch.setattr(ReadingAgent, "post", noted)
    monkeypatch.setattr(SourceAgent, "serving", lambda self: nullcontext())
    return reads


def test_a_fence_ends_a_read_that_stands_still(still: threading.Event, ends: Ends) -> None:
    """Nobody can call the read back. So its agent ends, and only then is the ticket quiesced; what the sender does
    afterwards reaches nobody."""
    manifest, quiesced = ends.ticket(), threading.Event()
    running = ends.threads.submit(ends.connect().transfer, manifest, is_set())
    assert still.wait(60)
    ends.receiver.door.fence(manifest.key, quiesced.set)
    assert not quiesced.is_set()
    assert quiesced.wait(60)
    with pytest.raises(TransferError):
        running.result(60)
    assert ends.backend._agents._idle == []
    for _ in range(1000):
        ends.sender.backend._source._agent.get_new_notifs()  # type: ignore[attr-defined]
    assert ends.untouched
    assert ends.receiver.door.snapshot()[0] == {}


def test_a_read_that_stands_still_is_a_time_out_and_holds_no_ticket(still: threading.Event, ends: Ends) -> None:
    ends.backend._timing = Timing(stall_s=0.5)
    manifest, quiesced = ends.ticket(), threading.Event()
    with pytest.raises(TransferError):
        ends.connect().transfer(manifest, is_set())
    assert ends.counted("failed_transfer_timeout") == 1
    ends.receiver.door.fence(manifest.key, quiesced.set)
    assert quiesced.is_set()
    assert ends.untouched


def test_a_transfer_may_take_longer_than_a_stall(ends: Ends) -> None:
    ends.backend._faults = Faults(delay_s=0.8)
    ends.backend._timing = ends.sender.backend._timing = Timing(stall_s=2.0)  # type: ignore[attr-defined]
    ends.connect().transfer(ends.ticket(), is_set())


@pytest.mark.parametrize("batch_bytes", [1, 64, 200, 1000])
def test_however_it_is_cut_the_same_lands(ends: Ends, batch_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "_BATCH_BYTES", batch_bytes)
    manifest, expected = ends.ticket(), Ledger(LAYOUT.components)
    for piece, layers in zip(PIECES, ends.connect().transfer(manifest, is_set()), strict=True):
        expected.record(piece.component, piece.first_unit, piece.rows_in_last, layers)
    assert ends.receiver.door.received(manifest.key) == expected.receipt()
    theirs, mine = (LAYOUT.view(end.pool.bytes, 0) for end in (ends.sender, ends.receiver))
    for there, here in zip(PIECES[0].units[:-1], TABLE[0], strict=False):
        assert theirs[:, there].tobytes() == mine[:, here].tobytes()


def test_a_sender_that_hangs_up_is_read_from_no_more(ends: Ends) -> None:
    """It has forgotten the ticket, and its pages are another prompt's by now."""
    ends.connect().transfer(ends.ticket(), is_set())  # from here on reads need no help of the sender's
    ends.backend._faults = Faults(delay_s=0.3)
    channel = ends.connect()
    running = ends.threads.submit(channel.transfer, ends.ticket(), is_set())
    while len(ends.receiver.first) < 2:
        threading.Event().wait(0.01)
    channel.abort()
    with pytest.raises(TransferError):
        running.result(60)
    while not ends.counted("connections_ended"):
        threading.Event().wait(0.01)
    assert ends.counted("landed") == 1


def test_nixl_hears_of_a_peer_only_after_the_door(ends: Ends, made_agents: list[bytes]) -> None:
    manifest = ends.ticket()
    channel = ends.connect()
    with pytest.raises(TransferRefused, match="bad_mac"):
        channel.transfer(Manifest(manifest.key, b"guessed", PIECES), is_set())
    assert made_agents == []
    channel.transfer(manifest, is_set())
    assert made_agents == [ends.sender.backend._source.metadata]  # type: ignore[attr-defined]


def test_a_sender_that_starts_anew_is_read_anew(ends: Ends, made_agents: list[bytes], tmp_path: Path) -> None:
    """Same name, same place, perhaps the same address in memory: what was known of the earlier one is not used."""
    pages = []
    for seed in (1, 2):
        fill(ends.sender, seed)
        for _ in range(2):  # the second time over the agent that was kept
            channel, manifest = ends.connect(), ends.ticket()
            sent = channel.transfer(manifest, is_set())
            assert (ends.receiver.pool.digests(Run(0, TABLE[0], 3), 0) == sent[0][0]).all()
            ends.receiver.door.fence(manifest.key, lambda: None)
            channel.close()
        pages.append(ends.receiver.bytes.tobytes())
        ends.sender.close()
        ends.sender = Peer("nixl", "sender", tmp_path, Timing(), Faults())
    assert len(made_agents) == len(set(made_agents)) == 2
    assert pages[0] != pages[1]


@pytest.mark.parametrize("lie", ["rubbish", "elsewhere", "geometry"])
def test_what_a_peer_says_of_its_memory_is_not_believed(ends: Ends, lie: str) -> None:
    own = ends.sender.backend._own  # type: ignore[attr-defined]
    told = {
        "rubbish": Source(agent=b"rubbish", address=own.address),
        "elsewhere": Source(agent=own.agent, address=own.address + (1 << 40)),
        "geometry": Source(agent=own.agent, address=(1 << 63) - 1),
    }[lie]
    ends.sender.backend._own = told  # type: ignore[attr-defined]
    manifest, quiesced = ends.ticket(), threading.Event()
    with pytest.raises((PeerLost, TransferRefused), match="geometry" if lie == "geometry" else None):
        ends.connect().transfer(manifest, is_set())
    ends.sender.backend._own = own  # type: ignore[attr-defined]
    assert ends.untouched
    ends.connect().transfer(manifest, is_set())
    ends.receiver.door.fence(manifest.key, quiesced.set)
    assert quiesced.wait(60)


def test_a_peer_that_is_not_there_is_lost(ends: Ends, tmp_path: Path) -> None:
    gone = Peer("nixl", "gone", tmp_path, Timing(), Faults())
    assert ends.sender.backend.reaches(gone.address)
    gone.close()
    with pytest.raises(PeerLost, match="no sidecar answers"):
        ends.sender.backend.connect(gone.address)
    for told in ((), (("nixl", "65536"),), (("nixl", "-1"),), (("nixl", "9" * 5000),), (("tcp", "1"),)):
        assert not ends.sender.backend.reaches(gone.address.model_copy(update={"endpoints": told}))
    assert not ends.sender.backend.reaches(gone.address.model_copy(update={"backends": ("tcp",)}))


def test_a_failed_read_leaves_nothing_that_writes(ends: Ends) -> None:
    """What NIXL raises must not keep the agent alive by its traceback: then its end would prove nothing."""
    region = ends.backend._agents._region
    agent = ReadingAgent(region, ends.sender.backend._source.metadata)  # type: ignore[attr-defined]
    nowhere = np.array([1], dtype=np.int64)
    with pytest.raises(PeerLost, match="nixl: nixl") as caught:
        agent.post(nowhere, nowhere, nowhere)
    agent.destroy()  # would end this process if it could not prove its end
    assert caught.value.__context__ is None
    agent.destroy()


def test_agents_that_have_nothing_to_do_are_few(ends: Ends) -> None:
    agents = ends.backend._agents
    metadata = ends.sender.backend._source.metadata  # type: ignore[attr-defined]
    taken = [agents.take(metadata) for _ in range(nixl_agent._NUM_IDLE + 2)]
    for agent in taken:
        agents.keep(agent)
    assert agents._idle == taken[2:]
    assert agents.take(metadata) is taken[2]
    agents.keep(taken[2])
    agents.close()
    assert all(agent._agent is None for agent in taken)


def test_only_the_loopback_is_listened_on(ends: Ends) -> None:
    """UCX takes every interface unless it is told otherwise, and whoever reaches it may read and write our memory."""
    import psutil

    listening = {one.laddr.ip for one in psutil.Process().net_connections("tcp") if one.status == "LISTEN"}
    assert listening == {"127.0.0.1"}
