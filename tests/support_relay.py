"""Stands between a driver and its server, to slow it and to cut it."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator


class Relay:
    """Stands between a driver and its server. up, down: after so many bytes from the driver, or from the server, in
    all it lets no more through until `release`; None: as many as there are."""

    def __init__(self, port: int, *, up: int | None = None, down: int | None = None) -> None:
        self._target, self.up, self.down = port, up, down
        self.held = asyncio.Event()
        self._released = asyncio.Event()
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self.num_connections = 0
        self.refusing = False
        self.port = 0

    def release(self) -> None:
        self.up = self.down = None
        self._released.set()

    def cut(self) -> None:
        """Ends every connection."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    @contextlib.asynccontextmanager
    async def open(self, tls: ssl.SSLContext | None = None) -> AsyncIterator["Relay"]:
        listener = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=tls)
        self.port = listener.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            listener.close()
            self.release()
            self.cut()
            await listener.wait_closed()
            await asyncio.gather(*self._tasks)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        if (task := asyncio.current_task()) is not None:
            self._tasks.add(task)
        self._writers.append(writer)
        if self.refusing:
            return writer.transport.abort()
        with contextlib.suppress(OSError):
            up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._target)
            self._writers.append(up_writer)
            await asyncio.gather(self._pump(reader, up_writer, "up"), self._pump(up_reader, writer, "down"))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: str) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                room = getattr(self, way)
                if room is not None and len(data) > room:
                    writer.write(data[:room])
                    data = data[room:]
                    setattr(self, way, 0)
                    self.held.set()
                    await self._released.wait()
                elif room is not None:
                    setattr(self, way, room - len(data))
                writer.write(data)
                await writer.drain()
        writer.close()
