"""The contract of `shared.transfer.link.Link`, run on the fake, on shared memory and on TCP with real sidecars."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import xxhash

from shared.runtime.errors import InvalidRequest, TransferError, TransferRefused, UnknownRoom
from shared.state.layout import PoolLayout
from shared.transfer.link import Piece, TicketKey
from tests.contract.transfer_links import LAYOUT, NIXL, POISON, Pair, Side, Wanted, expected_pool, make_pair, new_ticket

pytestmark = pytest.mark.asyncio(loop_scope="module")
KINDS = ["fake", "shm", "tcp", NIXL]
TABLE = ((3, 4, 9, 1, 20), (3, 4, 9, 1, 20), (2,), (5,))
WHOLE = (
    Piece(0, 0, (7, 8, 2, 0, 23), 3),
    Piece(1, 0, (7, 8, 2, 0, 23), 3),
    Piece(2, 0, (4,), 1),
    Piece(3, 0, (0,), 5),
)


@pytest_asyncio.fixture(loop_scope="module", scope="module", params=KINDS)
async def kept_pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
    pair = await make_pair(request.param, tmp_path_factory.mktemp("ipc"))
    yield pair
    await pair.close()


@pytest.fixture
def pair(kept_pair: Pair) -> Pair:
    kept_pair.sender.scramble()
    kept_pair.receiver.poison()
    return kept_pair


@pytest_asyncio.fixture(loop_scope="module", scope="module", params=KINDS)
async def slow_pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
    pair = await make_pair(request.param, tmp_path_factory.mktemp("slow"), Wanted(delay_s=0.3))
    yield pair
    await pair.close()


async def opened(pair: Pair, table: tuple[tuple[int, ...], ...] = TABLE) -> tuple[TicketKey, bytes, asyncio.Event]:
    key, secret = new_ticket()
    first = asyncio.Event()
    await pair.receiver.link.open(key, secret, table, lambda _key: first.set())
    return key, secret, first


def unit(side: Side, number: int) -> bytes:
    """All layers of one page of the first component, as bytes: random floats may be NaN."""
    return side.component(0)[:, number].tobytes()


async def end(pair: Pair, key: TicketKey) -> None:
    await pair.receiver.link.fence(key)
    await pair.sender.link.forget(key)


async def test_rows_with_state_land_and_nothing_else_changes(pair: Pair) -> None:
    key, secret, first = await opened(pair)
    await pair.sender.link.send(key, secret, pair.receiver.link.address, WHOLE)
    assert (pair.receiver.pool == expected_pool(pair, TABLE, WHOLE)).all()
    receipt = await pair.receiver.link.received(key)
    assert receipt == await pair.sender.link.sent(key)
    assert [one.name for one in receipt] == [component.name for component in LAYOUT.components]
    assert [one.num_bytes for one in receipt] == [19 * 120 * 3, 19 * 7 * 2, 72 * 3, 5 * 12]
    await asyncio.wait_for(first.wait(), 30)
    assert pair.sender.link.actual_backend(key) == pair.receiver.link.actual_backend(key) == pair.kind
    await end(pair, key)


async def test_the_digest_is_the_one_that_is_documented(pair: Pair) -> None:
    key, secret, _ = await opened(pair)
    await pair.sender.link.send(key, secret, pair.receiver.link.address, WHOLE)
    kv = pair.sender.component(0)
    pages = [kv[layer, unit, :, :, : (3 if unit == 23 else 4)] for layer in range(3) for unit in WHOLE[0].units]
    digests = b"".join(xxhash.xxh3_128_digest(np.ascontiguousarray(page).tobytes()) for page in pages)
    assert (await pair.receiver.link.received(key))[0].digest == xxhash.xxh3_128_hexdigest(digests)
    await end(pair, key)


async def test_chunks_in_any_cut_give_the_same_receipt(pair: Pair) -> None:
    key, secret, _ = await opened(pair)
    address = pair.receiver.link.address
    chunks = [
        (Piece(0, 0, (7, 8), 4), Piece(1, 0, (7,), 4)),
        (Piece(0, 2, (2,), 4), Piece(1, 1, (8, 2, 0), 4)),
        (Piece(0, 3, (0, 23), 3), Piece(1, 4, (23,), 3), Piece(2, 0, (4,), 1), Piece(3, 0, (0,), 5)),
    ]
    await asyncio.gather(*(pair.sender.link.send(key, secret, address, pieces) for pieces in chunks))
    receipt = await pair.receiver.link.received(key)
    assert receipt == await pair.sender.link.sent(key)
    assert (pair.receiver.pool == expected_pool(pair, TABLE, WHOLE)).all()
    await end(pair, key)
    again, secret, _ = await opened(pair)
    await pair.sender.link.send(again, secret, address, WHOLE)
    assert await pair.receiver.link.received(again) == receipt
    await end(pair, again)


async def test_layers_in_any_cut_and_order_give_the_same_receipt(pair: Pair) -> None:
    key, secret, _ = await opened(pair)
    address = pair.receiver.link.address
    by_layer = [tuple(replace(piece, first_layer=at, num_layers=1) for piece in WHOLE) for at in range(3)]
    layers = [LAYOUT.components[piece.component].num_layers for piece in WHOLE]
    sends = [tuple(p for p, n in zip(pieces, layers, strict=True) if p.first_layer < n) for pieces in by_layer]
    for number, pieces in enumerate((sends[2], sends[0], sends[1])):
        assert (await pair.receiver.link.received(key))[0].num_bytes == number * 19 * 120
        await pair.sender.link.send(key, secret, address, pieces)
    assert (pair.receiver.pool == expected_pool(pair, TABLE, WHOLE)).all()
    receipt = await pair.receiver.link.received(key)
    assert receipt == await pair.sender.link.sent(key)
    await end(pair, key)
    again, secret, _ = await opened(pair)
    await pair.sender.link.send(again, secret, address, WHOLE)
    assert await pair.receiver.link.received(again) == receipt
    await end(pair, again)


async def test_a_layer_leaves_the_others_alone(pair: Pair) -> None:
    key, secret, _ = await opened(pair)
    pieces = tuple(replace(piece, first_layer=1, num_layers=1) for piece in WHOLE[:3])
    await pair.sender.link.send(key, secret, pair.receiver.link.address, pieces)
    assert (pair.receiver.pool == expected_pool(pair, TABLE, pieces)).all()
    assert [one.num_bytes for one in await pair.receiver.link.received(key)] == [19 * 120, 19 * 7, 72, 0]
    await end(pair, key)


async def test_what_the_receiver_holds_already_is_not_written(pair: Pair) -> None:
    key, secret = new_ticket()
    await pair.receiver.link.open(key, secret, TABLE, lambda _key: None, held_len=8)
    with pytest.raises(TransferRefused, match="bad_range"):
        await pair.sender.link.send(key, secret, pair.receiver.link.address, (Piece(0, 1, (8, 2), 4),))
    rest = (*(replace(p, first_unit=2, units=p.units[2:]) for p in WHOLE[:2]), *WHOLE[2:])
    await pair.sender.link.send(key, secret, pair.receiver.link.address, rest)
    assert (pair.receiver.pool == expected_pool(pair, TABLE, rest)).all()
    receipt = await pair.receiver.link.received(key)
    assert receipt == await pair.sender.link.sent(key)
    assert [one.num_bytes for one in receipt] == [11 * 120 * 3, 11 * 7 * 2, 72 * 3, 5 * 12]
    await end(pair, key)


async def test_a_component_nothing_was_moved_of_has_an_empty_entry(pair: Pair) -> None:
    key, secret, _ = await opened(pair)
    await pair.sender.link.send(key, secret, pair.receiver.link.address, (Piece(2, 0, (1,), 1),))
    receipt = await pair.receiver.link.received(key)
    assert receipt == await pair.sender.link.sent(key)
    assert [one.num_bytes for one in receipt] == [0, 0, 216, 0]
    await end(pair, key)


async def test_a_transfer_of_nothing_is_announced_and_confirmed(pair: Pair) -> None:
    key, secret, first = await opened(pair)
    await pair.sender.link.send(key, secret, pair.receiver.link.address, ())
    await asyncio.wait_for(first.wait(), 30)
    assert all(one.num_bytes == 0 for one in await pair.receiver.link.received(key))
    await end(pair, key)


@pytest.mark.parametrize(
    ("reason", "pieces"),
    [
        ("bad_mac", WHOLE),
        ("stale_generation", WHOLE),
        ("unknown_room", WHOLE),
        ("bad_range", (Piece(0, 3, (1, 2, 3), 4),)),
        ("bad_range", (Piece(2, 1, (1,), 1),)),
        ("bad_range", (Piece(0, -1, (1,), 4),)),
        ("overlap", (Piece(0, 1, (1, 2), 4), Piece(0, 2, (3,), 4))),
        ("overlap", (Piece(0, 1, (1, 2), 4, 0, 2), Piece(0, 2, (3,), 4, 1, 2))),
        ("bad_layers", (Piece(0, 1, (1, 2), 4, 1, 0),)),
        ("bad_layers", (Piece(0, 1, (1, 2), 4, 2, -1),)),
    ],
)
async def test_what_the_door_refuses_writes_nothing_and_is_counted(
    pair: Pair, reason: str, pieces: tuple[Piece, ...]
) -> None:
    key, secret, first = await opened(pair)
    before = (await pair.receiver.counters()).get(f"refused_{reason}", 0)
    used = {
        "stale_generation": replace(key, generation=key.generation + 1),
        "unknown_room": replace(key, room=key.room ^ 1),
    }.get(reason, key)
    wrong = secrets.token_bytes(16) if reason == "bad_mac" else secret
    with pytest.raises(TransferRefused, match=reason):
        await pair.sender.link.send(used, wrong, pair.receiver.link.address, pieces)
    assert (await pair.receiver.counters())[f"refused_{reason}"] == before + 1
    assert (pair.receiver.pool == POISON).all()
    assert not first.is_set()
    # The ticket has taken no harm.
    if used != key:
        await pair.sender.link.forget(used)
    await pair.sender.link.send(key, secret, pair.receiver.link.address, WHOLE)
    assert (pair.receiver.pool == expected_pool(pair, TABLE, WHOLE)).all()
    await end(pair, key)


@pytest.mark.parametrize(
    "piece",
    [
        Piece(0, 0, (24,), 4),
        Piece(0, 0, (-1,), 4),
        Piece(2, 0, (6,), 1),
        Piece(0, 0, (1,), 5),
        Piece(0, 0, (1,), 0),
        Piece(0, 0, (1,), 4, 3, 1),
        Piece(0, 0, (1,), 4, -1, 2),
        Piece(0, 0, (1,), 4, 0, 10**30),
        Piece(4, 0, (1,), 1),
        Piece(0, 0, (), 1),
    ],
)
async def test_a_source_that_does_not_exist_is_refused(pair: Pair, piece: Piece) -> None:
    key, secret, _ = await opened(pair)
    with pytest.raises(TransferRefused, match="bad_source"):
        await pair.sender.link.send(key, secret, pair.receiver.link.address, (piece,))
    assert (pair.receiver.pool == POISON).all()
    await end(pair, key)


@pytest.mark.parametrize("table", [((24,), (), (), ()), ((1, 1), (), (), ()), ((-1,), (), (), ()), ((1,), (), ())])
async def test_a_table_outside_the_pool_is_not_opened(pair: Pair, table: tuple[tuple[int, ...], ...]) -> None:
    key, secret = new_ticket()
    with pytest.raises(InvalidRequest):
        await pair.receiver.link.open(key, secret, table, lambda _key: None)
    with pytest.raises(UnknownRoom):
        await pair.receiver.link.received(key)
    await pair.receiver.link.fence(key)


async def test_a_fenced_ticket_is_dead_and_fencing_again_is_harmless(pair: Pair) -> None:
    key, secret, _ = await opened(pair)
    await asyncio.gather(pair.receiver.link.fence(key), pair.receiver.link.fence(key))
    await pair.receiver.link.fence(key)
    await pair.receiver.link.fence(TicketKey(1, 1))
    with pytest.raises(TransferRefused, match="dead_room"):
        await pair.sender.link.send(key, secret, pair.receiver.link.address, WHOLE)
    assert (pair.receiver.pool == POISON).all()
    with pytest.raises(UnknownRoom):
        await pair.receiver.link.received(key)
    await pair.sender.link.forget(key)


async def test_a_newer_attempt_of_a_room_is_apart_from_the_older(pair: Pair) -> None:
    key, secret, _ = await opened(pair, ((3,), (), (), ()))
    newer, other = replace(key, generation=2), secrets.token_bytes(16)
    await pair.receiver.link.open(newer, other, ((4,), (), (), ()), lambda _key: None)
    await pair.receiver.link.fence(key)
    with pytest.raises(TransferRefused, match="stale_generation"):
        await pair.sender.link.send(key, secret, pair.receiver.link.address, (Piece(0, 0, (1,), 4),))
    await pair.sender.link.send(newer, other, pair.receiver.link.address, (Piece(0, 0, (1,), 4),))
    assert unit(pair.receiver, 4) == unit(pair.sender, 1)
    await pair.sender.link.forget(key)
    await end(pair, newer)


async def test_what_is_forgotten_starts_anew(pair: Pair) -> None:
    key, secret, _ = await opened(pair)
    await pair.sender.link.send(key, secret, pair.receiver.link.address, WHOLE)
    await pair.sender.link.forget(key)
    await pair.sender.link.forget(key)
    assert pair.sender.link.actual_backend(key) is None
    assert all(one.num_bytes == 0 for one in await pair.sender.link.sent(key))
    await end(pair, key)


async def test_tickets_do_not_disturb_each_other(pair: Pair) -> None:
    tables = [((k, k + 12), (), (), ()) for k in range(12)]
    tickets = [await opened(pair, table) for table in tables]
    pieces = [(Piece(0, 0, (23 - k, k), 2),) for k in range(12)]
    address = pair.receiver.link.address
    await asyncio.gather(
        *(
            pair.sender.link.send(key, secret, address, piece)
            for (key, secret, _), piece in zip(tickets, pieces, strict=True)
        )
    )
    for (key, _, _), table, piece in zip(tickets, tables, pieces, strict=True):
        wanted = LAYOUT.view(memoryview(expected_pool(pair, table, piece)), 0)[:, table[0]]
        assert pair.receiver.component(0)[:, table[0]].tobytes() == wanted.tobytes()
        assert await pair.receiver.link.received(key) == await pair.sender.link.sent(key)
        await end(pair, key)


async def test_after_a_fence_no_byte_of_the_ticket_is_written(slow_pair: Pair) -> None:
    """The transfer is under way, and slow: its pages go to another ticket, whose bytes must stay."""
    pair = slow_pair
    pair.sender.scramble()
    pair.receiver.poison()
    key, secret, first = await opened(pair)
    sending = asyncio.ensure_future(pair.sender.link.send(key, secret, pair.receiver.link.address, WHOLE))  # noqa: TID251
    await asyncio.wait_for(first.wait(), 30)
    await asyncio.wait_for(pair.receiver.link.fence(key), 10)
    pair.receiver.poison()
    with pytest.raises(TransferError):
        await asyncio.wait_for(sending, 12)
    # The same pages under a new ticket: the slow transfer of the new one proves that the old one's time has passed.
    again, secret, _ = await opened(pair)
    await pair.sender.link.send(again, secret, pair.receiver.link.address, (Piece(0, 0, (1, 1, 1), 4),))
    assert (pair.receiver.pool == expected_pool(pair, TABLE, (Piece(0, 0, (1, 1, 1), 4),))).all()
    assert await pair.receiver.link.received(again) == await pair.sender.link.sent(again)
    await pair.sender.link.forget(key)
    await end(pair, again)


async def test_transfers_of_a_ticket_keep_their_order(slow_pair: Pair) -> None:
    """Each is slow enough for the next to overtake it, and all write the same unit."""
    pair = slow_pair
    pair.sender.scramble()
    key, secret, _ = await opened(pair)
    address = pair.receiver.link.address
    sends = [(Piece(1, 1, (number,), 4),) for number in (11, 12)]
    await asyncio.gather(*(pair.sender.link.send(key, secret, address, pieces) for pieces in sends))
    assert pair.receiver.component(1)[:, 4].tobytes() == pair.sender.component(1)[:, 12].tobytes()
    assert await pair.receiver.link.received(key) == await pair.sender.link.sent(key)
    await end(pair, key)


async def test_forgetting_stops_what_is_under_way(slow_pair: Pair) -> None:
    pair = slow_pair
    key, secret, first = await opened(pair)
    address = pair.receiver.link.address
    async with asyncio.TaskGroup() as tasks:
        sends = [tasks.create_task(_failing(pair, key, secret)) for _ in range(3)]
        await asyncio.wait_for(first.wait(), 30)
        await asyncio.wait_for(pair.sender.link.forget(key), 10)
    assert [type(task.result()) for task in sends if not isinstance(task.result(), TransferError)] == []
    await pair.receiver.link.fence(key)
    # The link still works.
    again, secret, _ = await opened(pair, ((1,), (), (), ()))
    await pair.sender.link.send(again, secret, address, (Piece(0, 0, (2,), 4),))
    await end(pair, again)


async def _failing(pair: Pair, key: TicketKey, secret: bytes) -> TransferError | None:
    try:
        await pair.sender.link.send(key, secret, pair.receiver.link.address, WHOLE)
    except TransferError as error:
        return error
    return None


@pytest.mark.parametrize("kind", KINDS)
async def test_spoiled_bytes_show_in_the_receipt(kind: str, tmp_path: Path) -> None:
    pair = await make_pair(kind, tmp_path, Wanted(corrupt=True))
    pair.sender.scramble()
    key, secret, _ = await opened(pair)
    await pair.sender.link.send(key, secret, pair.receiver.link.address, WHOLE)
    got, sent = await pair.receiver.link.received(key), await pair.sender.link.sent(key)
    assert all(a.num_bytes == b.num_bytes and a.digest != b.digest for a, b in zip(got, sent, strict=True))
    await end(pair, key)
    await pair.close()


@pytest.mark.parametrize("kind", KINDS)
async def test_another_geometry_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    other = replace(LAYOUT.components[0], dtype="float16")
    layout = PoolLayout((other, *LAYOUT.components[1:]), LAYOUT.num_pages, LAYOUT.num_slots)
    pair = await make_pair(kind, tmp_path, receiver_layout=layout)
    pair.receiver.poison()
    key, secret, _ = await opened(pair)
    match = "geometry: component kv: dtype is float32 at the source, float16 at the target"
    with pytest.raises(TransferRefused, match=match):
        await pair.sender.link.send(key, secret, pair.receiver.link.address, WHOLE)
    assert (pair.receiver.pool == POISON).all()
    await pair.close()
