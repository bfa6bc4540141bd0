"""Messages for an event loop to handle while something else is measured: over a real NATS server, from a process of
their own, each decoded as a gateway or worker would."""

import asyncio
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from shared.bus.base import Message
from shared.bus.nats import connect
from shared.bus.server import NatsServer
from shared.protocol.messages import TokenEntry, Tokens
from shared.protocol.wire import decode, encode

_SUBJECT = "baton.v1.gateway.bench.tokens"
_TICK_S = 0.005
_REPO = Path(__file__).parents[2]


@asynccontextmanager
async def message_load(per_s: int) -> AsyncIterator[None]:
    """`per_s` messages a second reach this loop while the block lasts. RuntimeError where fewer than 90 % did."""
    count, first = 0, asyncio.Event()

    async def handle(message: Message) -> None:
        nonlocal count
        decode(Tokens, message.data)
        count += 1
        first.set()

    loop = asyncio.get_running_loop()
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as directory:
        async with NatsServer(Path(directory)) as server:
            bus = await connect(server.url, "bench")
            await bus.subscribe(_SUBJECT, handle)
            sender = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "benchmarks.peers.messages", server.url, str(per_s), cwd=_REPO
            )
            try:
                await first.wait()
                began, before = loop.time(), count
                yield
                rate = (count - before) / (loop.time() - began)
            finally:
                sender.kill()
                await sender.wait()
                await bus.close()
    if rate < 0.9 * per_s:
        raise RuntimeError(f"only {rate:.0f} of {per_s} messages a second arrived: the machine is too busy to tell")


async def _send(url: str, per_s: int) -> None:
    """Until it is killed."""
    bus = await connect(url, "sender")
    entries = tuple(TokenEntry(room=n + 1, generation=1, choice=0, index=n, tokens=(n + 1,)) for n in range(8))
    data = encode(Tokens(sender="decode-0", entries=entries))
    loop = asyncio.get_running_loop()
    began, sent = loop.time(), 0
    while True:
        due = int((loop.time() - began) * per_s)
        for _ in range(due - sent):
            await bus.publish(_SUBJECT, data)
        sent = max(sent, due)
        await asyncio.sleep(_TICK_S)


if __name__ == "__main__":
    asyncio.run(_send(sys.argv[1], int(sys.argv[2])))
