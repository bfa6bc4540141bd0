"""Two hosts, as far as the kernel can play them: the sender's sidecar in a network namespace of its own, and a link
between it and the receiver that is cut, swallows packets one way, or is shut by a firewall in the middle of a transfer.
"""

import asyncio
import ctypes
import os
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import pytest_asyncio

from shared.runtime.errors import TransferError
from tests.contract.transfer_links import Pair, expected_pool
from tests.contract.transfer_trio import ELSEWHERE, PIECES, TABLE, Trio, make_trio, until_whole

pytestmark = pytest.mark.asyncio(loop_scope="module")
STALL_S = 1.0
HERE, THERE = "10.231.77.1", "10.231.77.2"
_NEW_NETWORK = 0x40000000


def sh(command: str) -> None:
    subprocess.run(command.split(), check=True, capture_output=True, text=True)


@contextmanager
def inside(name: str) -> Iterator[None]:
    """Whatever this thread starts meanwhile lives in that network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/thread-self/ns/net") as ours, open(f"/run/netns/{name}") as theirs:
        if libc.setns(theirs.fileno(), _NEW_NETWORK):
            raise OSError(ctypes.get_errno(), "setns")
        try:
            yield
        finally:
            if libc.setns(ours.fileno(), _NEW_NETWORK):
                raise OSError(ctypes.get_errno(), "setns")


@dataclass(frozen=True)
class Hosts:
    """Namespaces of the sender and of the receiver."""

    sender: str
    receiver: str

    def on_receiver(self, command: str) -> None:
        sh(f"ip netns exec {self.receiver} {command}")

    def on_sender(self, command: str) -> None:
        sh(f"ip netns exec {self.sender} {command}")

    def heal(self) -> None:
        self.on_receiver("iptables -F")
        self.on_receiver("ip link set wire up")


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    """Skips where the kernel or our rights give no second host."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    if missing := [tool for tool in ("ip", "iptables") if shutil.which(tool) is None]:
        pytest.skip(f"not installed: {', '.join(missing)}")
    made = Hosts(f"baton-{os.getpid()}-a", f"baton-{os.getpid()}-b")
    try:
        sh(f"ip netns add {made.sender}")
        sh(f"ip netns add {made.receiver}")
        sh(f"ip link add wire netns {made.sender} type veth peer name wire netns {made.receiver}")
        made.on_sender(f"ip addr add {HERE}/30 dev wire")
        made.on_receiver(f"ip addr add {THERE}/30 dev wire")
        for name in ("lo", "wire"):
            made.on_sender(f"ip link set {name} up")
            made.on_receiver(f"ip link set {name} up")
        made.on_receiver("iptables -F")
    except subprocess.CalledProcessError as error:
        remove(made)
        pytest.skip(f"no network namespaces here: {error.cmd}: {error.stderr}")
    yield made
    remove(made)


def remove(hosts: Hosts) -> None:
    for name in (hosts.sender, hosts.receiver):
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def trio(hosts: Hosts, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Trio]:
    """The second sender lives on the receiver's host, so that it works while the link does not."""
    flags = ("--stall-timeout-s", str(STALL_S), "--peer-timeout-s", str(STALL_S))
    with inside(hosts.receiver):
        made = await make_trio(
            "tcp",
            tmp_path_factory.mktemp("ipc"),
            slow=True,
            flags=flags,
            apart=inside(hosts.sender),
            receiver_host=THERE,
        )
    yield made
    await asyncio.gather(*(side.close() for side in made.sides))


CUTS = {
    "the cable is pulled": "ip link set wire down",
    "what is sent is swallowed": "iptables -A INPUT -i wire -j DROP",
    "what is answered is swallowed": "iptables -A OUTPUT -o wire -j DROP",
    "a firewall resets it": "iptables -A INPUT -i wire -p tcp -j REJECT --reject-with tcp-reset",
}


@pytest.mark.parametrize("cut", CUTS)
async def test_the_link_between_two_hosts_breaks_in_a_transfer(hosts: Hosts, trio: Trio, cut: str) -> None:
    key, secret, first = await trio.open()
    try:
        async with asyncio.TaskGroup() as tasks:
            sending = tasks.create_task(trio.attempt(key, secret))
            await asyncio.wait_for(first.wait(), 30)
            hosts.on_receiver(CUTS[cut])
            async with asyncio.timeout(15 * STALL_S):
                assert isinstance(await sending, TransferError)
        async with asyncio.timeout(20.0):
            await trio.slow.link.forget(key)
        async with asyncio.timeout(20.0):
            await trio.receiver.link.fence(key)
        other = await trio.other_ticket()
        again, secret, _ = await trio.open(ELSEWHERE)
        async with asyncio.timeout(15 * STALL_S):  # nobody answers there now
            assert isinstance(await trio.attempt(again, secret), TransferError)
    finally:
        hosts.heal()
    await other.check()
    await other.end()
    await trio.receiver.link.fence(again)
    await trio.slow.link.forget(again)
    await until_connected(hosts, trio.receiver.link.address.port)
    await whole_transfer(trio)


async def until_connected(hosts: Hosts, port: int) -> None:
    """The kernels find each other again only after a while, longer where the machine is busy."""
    async with asyncio.timeout(60):
        while True:
            try:
                with inside(hosts.sender), socket.create_connection((THERE, port), STALL_S):
                    return
            except OSError:
                await asyncio.sleep(0.1)


async def whole_transfer(trio: Trio) -> None:
    """Both hosts see each other again."""
    key = await until_whole(trio)
    assert (trio.receiver.pool == expected_pool(Pair("tcp", trio.slow, trio.receiver), TABLE, PIECES)).all()
    assert await trio.receiver.link.received(key) == await trio.slow.link.sent(key)
    await trio.receiver.link.fence(key)
    await trio.slow.link.forget(key)
