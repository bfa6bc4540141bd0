"""Rows in a wire format, between a connection and pages: blocks of a few layers, each behind its length.

How a piece is cut into blocks follows from its header, so both sides know it. Each side codes in a thread beside the
one that moves bytes: while a block is on the wire the next one is made and the one before is taken apart.

An exact format gives the digests of the rows, at both ends, as if they had travelled as they are. Of a lossy one the
rows differ, so what is compared is each block as it was sent and as it came: its digest stands for all its units.
"""

import struct
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import xxhash

from shared.state.components import StateComponent
from shared.transfer.connection import Connection
from shared.transfer.digester import DIGEST_BYTES
from shared.transfer.formats.block import Damaged, block_shape
from shared.transfer.formats.catalog import LOSSINESS, format_for
from shared.transfer.pool import Pool, Run
from shared.transfer.row_spans import part_of
from shared.transfer.wire import Malformed

_LENGTH = struct.Struct("!I")
_BLOCK_BYTES = 2 << 20
_AHEAD = 2
_SLACK_BYTES = 64 << 10
"""What a format may need beyond twice the rows, at most: tables, scales, the header."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Block:
    """Some layers of some units, of each of them the first `num_rows` rows. first_unit: its place in the piece."""

    run: Run
    first_unit: int
    layers: range
    num_rows: int


def blocks(component: StateComponent, run: Run, layers: range) -> Iterator[Block]:
    """All of `run`: whole units first; the last one stands alone where some of its rows carry no state."""
    whole = len(run.units) - (run.rows_in_last < component.unit_tokens)
    units_at_once = max(1, _BLOCK_BYTES // component.unit_bytes)
    parts = [(at, min(at + units_at_once, whole), component.unit_tokens) for at in range(0, whole, units_at_once)]
    if whole < len(run.units):
        parts.append((whole, len(run.units), run.rows_in_last))
    for first, end, rows in parts:
        part = part_of(run, first, end, component.unit_tokens)
        layers_at_once = max(1, units_at_once // (end - first))
        for layer in range(layers.start, layers.stop, layers_at_once):
            yield Block(part, first, layers[layer - layers.start :][:layers_at_once], rows)


@dataclass(frozen=True, slots=True)
class WireCost:
    """Bytes on the wire, and how long they kept the sender; making them does not count."""

    num_bytes: int = 0
    spent_s: float = 0.0

    def __add__(self, other: "WireCost") -> "WireCost":
        return WireCost(self.num_bytes + other.num_bytes, self.spent_s + other.spent_s)


@dataclass(frozen=True, slots=True)
class CodedRows:
    """On one connection. name: the format that was agreed on. burst_bytes: sent without asking, at most."""

    connection: Connection
    pool: Pool
    name: str
    burst_bytes: int = _BLOCK_BYTES

    def send(self, run: Run, layers: range, before: Callable[[int], None]) -> tuple[list[np.ndarray], WireCost]:
        """Sends all of `run` and returns the digests of each layer. before(num_bytes): called before each burst, may
        raise. Reads no page any more when it ends, however it ends."""
        digests = np.empty((len(layers), len(run.units), DIGEST_BYTES), dtype=np.uint8)
        sent = WireCost()

        def made(block: Block) -> Callable[[], bytes]:
            return lambda: self._encode(block, digests, layers.start)

        with closing(_beside(made(block) for block in blocks(self._component(run), run, layers))) as ready:
            for data in ready:
                for burst in _bursts(data, self.burst_bytes):
                    num_bytes = sum(map(len, burst))
                    before(num_bytes)
                    began = time.monotonic()
                    self.connection.send_all(burst)
                    sent += WireCost(num_bytes, time.monotonic() - began)
        return list(digests), sent

    def receive(
        self, run: Run, layers: range, before: Callable[[], None], spoil: bool = False
    ) -> tuple[list[np.ndarray], Damaged | None]:
        """Fills all of `run`. Of a block that is damaged nothing is kept, but the rest is received all the same, so
        that the connection goes on. spoil: a fault injection damages the first. Writes no page any more when it ends.
        """
        digests = np.empty((len(layers), len(run.units), DIGEST_BYTES), dtype=np.uint8)
        component = self._component(run)
        damaged: Damaged | None = None

        def taken() -> Iterator[Callable[[], Damaged | None]]:
            for number, block in enumerate(blocks(component, run, layers)):
                before()
                data = self._receive_block(component, block)
                yield self._taking(data, block, digests, layers.start, spoil=spoil and number == 0)

        for found in _beside(taken()):
            damaged = damaged or found
        return list(digests), damaged

    def _component(self, run: Run) -> StateComponent:
        return self.pool.layout.components[run.component]

    def _plane(self, run: Run, block: Block) -> np.ndarray:
        """[layers of the block, all units, segments, rows of the block, width]; shares memory with the pool."""
        component, layout = self._component(run), self.pool.layout
        shape = block_shape(component, component.num_layers, layout.units_of(component), component.unit_tokens)
        plane = layout.view(self.pool.bytes, run.component).reshape(shape)
        return plane[block.layers.start : block.layers.stop, :, :, : block.num_rows]

    def _encode(self, block: Block, digests: np.ndarray, first_layer: int) -> bytes:
        component = self._component(block.run)
        chosen = format_for(self.name, component)
        rows = self._plane(block.run, block)[:, _where(block.run)]
        data = chosen.encode(rows, component, first_layer=block.layers.start)
        self._enter(block, digests, first_layer, None if not LOSSINESS[chosen.name] else data)
        return data

    def _receive_block(self, component: StateComponent, block: Block) -> bytearray:
        prefix = bytearray(_LENGTH.size)
        self.connection.receive_all([memoryview(prefix)])
        (size,) = _LENGTH.unpack(prefix)
        rows_bytes = len(block.layers) * len(block.run.units) * component.unit_bytes
        if size > 2 * rows_bytes + _SLACK_BYTES:
            raise Malformed(f"malformed: a block of {size} bytes for {rows_bytes} of rows")
        data = bytearray(size)
        if size:
            self.connection.receive_all([memoryview(data)])
        return data

    def _taking(
        self, data: bytearray, block: Block, digests: np.ndarray, first_layer: int, *, spoil: bool
    ) -> Callable[[], Damaged | None]:
        def take() -> Damaged | None:
            chosen = format_for(self.name, self._component(block.run))
            exact = not LOSSINESS[chosen.name]
            if spoil and not exact:
                data[-1] ^= 0xFF
            try:
                self._decode(data, block)
            except Damaged as error:
                return error
            if spoil and exact:
                self.pool.flip_byte(block.run, block.layers.start)
            self._enter(block, digests, first_layer, None if exact else data)
            return None

        return take

    def _decode(self, data: bytearray, block: Block) -> None:
        component = self._component(block.run)
        chosen = format_for(self.name, component)
        plane, where = self._plane(block.run, block), _where(block.run)
        if isinstance(where, slice):
            chosen.decode(data, component, plane[:, where])
            return
        shape = plane.shape
        rows = np.empty((shape[0], len(where), *shape[2:]), dtype=plane.dtype)
        chosen.decode(data, component, rows)
        plane[:, where] = rows

    def _enter(self, block: Block, digests: np.ndarray, first_layer: int, data: bytes | bytearray | None) -> None:
        """data: of a lossy block."""
        units = slice(block.first_unit, block.first_unit + len(block.run.units))
        for layer in block.layers:
            if data is None:
                digests[layer - first_layer, units] = self.pool.digests(block.run, layer)
            else:
                digests[layer - first_layer, units] = np.frombuffer(xxhash.xxh3_128_digest(data), dtype=np.uint8)


def _bursts(data: bytes, limit: int) -> Iterator[list[memoryview]]:
    """A block behind its length."""
    view, prefix = memoryview(data), [memoryview(_LENGTH.pack(len(data)))]
    for at in range(0, max(1, len(view)), limit):
        yield [*prefix, view[at : at + limit]]
        prefix = []


def _where(run: Run) -> slice | np.ndarray:
    """A run's units as an index: neighbours share memory with the pool, others are copied."""
    units = np.asarray(run.units, dtype=np.int64)
    first, after = int(units[0]), int(units[-1]) + 1
    return slice(first, after) if len(units) == after - first and (np.diff(units) == 1).all() else units


def _beside(jobs: Iterator[Callable[[], T]]) -> Generator[T, None, None]:
    """What the jobs return, in order. They run in a thread beside the caller's, `_AHEAD` of them at most not yet taken;
    when this ends, or is closed, none runs."""
    waiting: deque[Future[T]] = deque()
    with ThreadPoolExecutor(1, thread_name_prefix="coding") as beside:
        for job in jobs:
            waiting.append(beside.submit(job))
            if len(waiting) > _AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
